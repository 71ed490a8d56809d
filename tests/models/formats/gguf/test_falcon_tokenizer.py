"""Falcon's tokenizer, whose numbers are split into runs of three digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TRIPLES = {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}
PARTS: list[dict[str, Any]] = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    LEVEL,
    {"type": "Digits", "individual_digits": False},
    TRIPLES,
]
MERGES = ["1 2", "12 3", "123 4", "! !", "!! a", "a b", "\u0120 a", "\u0120a b", "$ 1", "' s"]
TEXTS = [
    "1234 12 123456",
    "ab!! ab!!a $12 it's",
    "a+b<=c ~`^| (ab) ab...",
    " 12  ab\n\n a1234b!",
    "\u0430\u0431 \u00ab12\u00bb\u2026",
]


def saved(folder: Path, parts: list[dict[str, Any]]) -> Path:
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"][:256], *(merge.replace(" ", "") for merge in MERGES), "<|im_end|>"]
    types = [1] * (len(tokens) - 1) + [3]
    keys = {**BYTE_LEVEL, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": MERGES}
    source = zoo.save("falcon", folder, 1, vocab_size=len(tokens))
    for name, content in tokenizer_files({**keys, "tokenizer.ggml.eos_token_id": len(tokens) - 1}).items():
        (source / name).write_bytes(content)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    tokenizer["model"]["ignore_merges"] = False
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    return source


def test_a_text_is_split_in_the_same_way_there_and_back(tmp_path: Path) -> None:
    import tokenizers as library

    source = saved(tmp_path / "m", PARTS)
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    path = tmp_path / "q" / "model.gguf"
    assert read_gguf_header(path).keys["tokenizer.ggml.pre"] == "falcon"
    theirs = library.Tokenizer.from_file(str(source / "tokenizer.json"))
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert theirs.encode("1234", add_special_tokens=False).tokens == ["123", "4"]
    with weightsmith.open_checkpoint(path) as back:
        assert not any("splits text as GPT-2" in str(note) for note in back.notes)
        ours = library.Tokenizer.from_file(str(back.folder / "tokenizer.json"))
        assert [ours.encode(text, add_special_tokens=False).ids for text in TEXTS] == expected


@needs_llama_cpp
@pytest.mark.reader
@pytest.mark.slow
def test_llama_cpp_splits_a_text_into_the_same_tokens(tmp_path: Path) -> None:
    import tokenizers as library

    source = saved(tmp_path / "m", PARTS)
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    theirs = library.Tokenizer.from_file(str(source / "tokenizer.json"))
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        for text in TEXTS:
            assert judge.tokens(text) == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    "parts",
    [
        PARTS[:3],
        [*PARTS, TRIPLES],
        [{"type": "Punctuation", "behavior": "Isolated"}, *PARTS[1:]],
        [PARTS[0], {**LEVEL, "add_prefix_space": True}, *PARTS[2:]],
        [*PARTS[:2], {"type": "Digits", "individual_digits": True}, TRIPLES],
        [*PARTS[:3], {**TRIPLES, "behavior": "Removed"}],
        [*PARTS[:3], {**TRIPLES, "pattern": {"Regex": "[0-9]"}}],
    ],
)
def test_other_ways_are_refused(parts: list[dict[str, Any]], tmp_path: Path) -> None:
    source = saved(tmp_path / "m", parts)
    with pytest.raises(PlanError, match="it splits text by"):
        weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
