"""How byte-level BPE splits a text: in tokenizer.json, in llama.cpp, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers as library

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.architectures.glm import Glm4
from weightsmith._models.formats.gguf.architectures.llama import Llama
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.tokenizer.splits import BY_NAME, SPLITTINGS, Splitting, splitting_of

IDS = [(splitting.whole + splitting.names)[0] for splitting in SPLITTINGS]
TEXTS = [
    "It's 12345 o'clock (UTC)...\n\n  x=1_000;  THEY'LL see\r\n\r\n",
    "Camel CamelCase HTTPServer don't can't WE'RE  double  spaces\t\ttabs \n \n end ",
    "\u0414\u043e\u0431\u0440\u043e\u0435 \u0443\u0442\u0440\u043e, \u043c\u0438\u0440! 12 34 567 \u20ac9,99",
    "\u65e5\u672c\u8a9e\u3068\u304b\u306a\u4e2d\u6587\uff0c\u6587\u5b57\u3002 \ud55c\uad6d\uc5b4 \ub2e8\uc5b4",
    "a+b<=c ~`^| $12 #tag @name/path\\to\\file [x]{y} !!! ?! --- ***",
    "  leading\n\n\n three lines\n",
]
MARKS = ["man\u0303ana sen\u0303or", "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e01\u0e33\u0e48"]
"""Letters with combining marks."""
ASCII = [text for text in TEXTS if text.isascii()]


def trained(splitting: Splitting, texts: list[str], *, digits: bool = True) -> dict[str, Any]:
    """A tokenizer.json whose merges join characters of texts across all borders, so that each border shows in the tokens.

    digits: they are joined too
    """
    learner = library.Tokenizer(library.models.BPE())
    learner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False, max_token_length=6)
    learner.train_from_iterator([text * 2 for text in texts], trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [merge for merge in model["merges"] if digits or not any(c.isdigit() for c in "".join(merge))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": splitting.as_json(),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**model, "merges": merges, "ignore_merges": bool(splitting.whole)},
    }


def saved(folder: Path, tokenizer: dict[str, Any]) -> Path:
    source = zoo.save("llama", folder, 1, vocab_size=len(tokenizer["model"]["vocab"]))
    for name, content in tokenizer_files(BYTE_LEVEL).items():
        (source / name).write_bytes(content)
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    return source


def tokens(tokenizer: Path, texts: list[str]) -> list[list[int]]:
    theirs = library.Tokenizer.from_file(str(tokenizer))
    return [theirs.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("splitting", SPLITTINGS, ids=IDS)
def test_a_way_has_one_name(splitting: Splitting) -> None:
    assert splitting_of(splitting.as_json()) is splitting
    with pytest.raises(Unsupported, match="splits text by"):
        splitting_of({"type": "Sequence", "pretokenizers": [*splitting.steps, splitting.steps[-1]]})


def test_what_matches_may_be_kept_if_one_pattern_matches_all() -> None:
    """As in tokenizers that were made from OpenAI's."""
    kept = {"behavior": "Removed", "invert": True}
    for splitting in SPLITTINGS:
        steps = [{**step, **kept} if step["type"] == "Split" else step for step in splitting.steps]
        if [step["type"] for step in steps] == ["Split", "ByteLevel"]:
            assert splitting_of({"type": "Sequence", "pretokenizers": steps}) is splitting
        elif steps != [*splitting.steps]:
            with pytest.raises(Unsupported):
                splitting_of({"type": "Sequence", "pretokenizers": steps})


@pytest.mark.long
@pytest.mark.parametrize("splitting", SPLITTINGS, ids=IDS)
def test_a_text_is_split_in_the_same_way_there_and_back(splitting: Splitting, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", trained(splitting, TEXTS))
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    path = tmp_path / "q" / "model.gguf"
    assert read_gguf_header(path).keys["tokenizer.ggml.pre"] in (splitting.whole or splitting.names)
    with weightsmith.open_checkpoint(path) as back:
        assert not back.notes
        assert tokens(back.folder / "tokenizer.json", TEXTS) == tokens(source / "tokenizer.json", TEXTS)
        assert json.loads((back.folder / "tokenizer.json").read_text())["model"]["ignore_merges"] == bool(splitting.whole)


@needs_llama_cpp
@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("splitting", SPLITTINGS, ids=IDS)
def test_llama_cpp_splits_a_text_in_the_same_way(splitting: Splitting, tmp_path: Path) -> None:
    # Falcon's last steps see the characters that stand for bytes, of which some count as digits: llama.cpp's do not.
    texts = ASCII if "falcon" in splitting.names else TEXTS
    # llama.cpp leaves digits together, and relies on merges that join none.
    source = saved(tmp_path / "m", trained(splitting, texts, digits="deepseek-llm" not in splitting.names))
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        assert [judge.tokens(text) for text in texts] == tokens(source / "tokenizer.json", texts)


def marked(splitting: Splitting, folder: Path) -> list[str]:
    """The warnings of a file whose tokenizer has tokens of letters with combining marks."""
    source = saved(folder / "m", trained(splitting, MARKS))
    result = weightsmith.quantize(source, folder / "q", "gguf-f32", progress=False)
    return [str(warning) for warning in result.warnings if "combining marks" in str(warning)]


@pytest.mark.parametrize("splitting", SPLITTINGS, ids=IDS)
def test_words_that_llama_cpp_ends_at_a_mark_are_a_warning(splitting: Splitting, tmp_path: Path) -> None:
    warnings = marked(splitting, tmp_path)
    assert len(warnings) == splitting.apart
    assert all(r"n\u0303" in warning for warning in warnings)


@needs_llama_cpp
@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("splitting", [splitting for splitting in SPLITTINGS if "falcon" not in splitting.names])
def test_llama_cpp_ends_words_at_marks_where_a_warning_says_so(splitting: Splitting, tmp_path: Path) -> None:
    marked(splitting, tmp_path)
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        alike = [judge.tokens(text) for text in MARKS] == tokens(tmp_path / "m" / "tokenizer.json", MARKS)
    assert alike != splitting.apart


@pytest.mark.parametrize(("name", "composed"), [("qwen2", True), ("qwen35", True), ("command-r", True), ("llama-bpe", False)])
def test_accents_are_composed_as_in_the_original(name: str, composed: bool, tmp_path: Path) -> None:
    """transformers' tokenizers of Qwen and Cohere compose them; llama.cpp does not, and its file does not say so."""
    content = tokenizer_files({**BYTE_LEVEL, "tokenizer.ggml.pre": name})["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_bytes(content)
    (apart,), (joined,) = (tokens(tmp_path / "tokenizer.json", [text]) for text in ("e\u0301", "\u00e9"))
    assert (apart == joined) == composed


@pytest.mark.parametrize(
    ("architecture", "whole", "name"),
    [
        (Llama(), True, "llama-bpe"),
        (Llama(), False, "smaug-bpe"),
        (Glm4(), True, "glm4"),
        (Glm4(), False, "chatglm-bpe"),
    ],
)
def test_files_of_glm_have_names_of_their_own(architecture: GgufArchitecture, whole: bool, name: str) -> None:
    splitting = BY_NAME["llama-bpe"]
    assert splitting.name(architecture, whole=whole) == name
