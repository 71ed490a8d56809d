"""Texts that llama.cpp splits otherwise than transformers: none that a name or another `pre` can mend; a warning of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers

import weightsmith
from tests import llama_cpp
from tests.gguf_help import BYTE_LEVEL, BYTES, SENTENCEPIECE, SIZES, tokenizer_files, write_gguf
from tests.gguf_help import llama as gguf_llama
from tests.llama_cpp import needs_llama_cpp
from weightsmith._models.formats.gguf.tokenizer.parts import recognised_name, unsaid

PHI = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
PHI_PIECES = ["<unk>", "<s>", "</s>", *BYTES, "\u2581", "a", "\n", "\u2581a", *PHI]
PHI_KEYS = {
    **SENTENCEPIECE,
    "tokenizer.ggml.tokens": PHI_PIECES,
    "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0] + [-1000.0] * 4,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 4, *[3] * 4],
}


def model_with(folder: Path, keys: dict[str, Any], changes: Any) -> Path:
    """A tiny Llama with the tokenizer of some keys. changes: of its tokenizer.json, in place."""
    source, rows = folder / "source.gguf", len(keys["tokenizer.ggml.tokens"])
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(source, "llama", gguf_llama(vocabulary=rows, kind="F32"), {**SIZES, **keys})
    weightsmith.dequantize(source, folder / "m", progress=False)
    tokenizer = json.loads(tokenizer_files(keys)["tokenizer.json"])
    changes(tokenizer)
    (folder / "m" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder / "m"


def strip_as_phi3(tokenizer: dict[str, Any]) -> None:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]}
    tokenizer["pre_tokenizer"] = None
    for entry in tokenizer["added_tokens"]:
        entry["rstrip"] = entry["content"] not in ("<unk>", "<s>", "<|endoftext|>")


def written(model: Path, out: Path) -> tuple[dict[str, Any], list[str]]:
    quantised = weightsmith.quantize(model, out, "gguf-f32", progress=False)
    fields = gguf.GGUFReader(out / "model.gguf").fields
    return {name: field.contents() for name, field in fields.items()}, [str(warning) for warning in quantised.warnings]


@pytest.mark.long
@needs_llama_cpp
def test_phi3s_turns_have_the_tokens_that_transformers_gives_them(tmp_path: Path) -> None:
    model = model_with(tmp_path / "merged", PHI_KEYS, strip_as_phi3)
    keys, warnings = written(model, tmp_path / "out")
    assert keys["general.name"] == "M (Phi-3)"
    assert not any("splits some texts" in warning for warning in warnings)
    text = "<|user|>\na<|end|>\n<|assistant|>\n"
    expected = transformers.AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)
    with llama_cpp.Judge(tmp_path / "out" / "model.gguf") as judge:
        assert judge.tokens(text) == expected


@needs_llama_cpp
def test_a_name_that_only_looks_like_phi3_does_not_strip_spaces_nor_stop_llama_cpp_from_loading(tmp_path: Path) -> None:
    model = model_with(tmp_path / "x", BYTE_LEVEL, lambda tokenizer: None)
    model = model.rename(tmp_path / "my-phi3-tune")
    keys, _ = written(model, tmp_path / "out")
    assert keys["general.name"] == "My Phi 3 Tune"
    with llama_cpp.Judge(tmp_path / "out" / "model.gguf") as judge:
        assert judge.tokens("<|im_end|> a") == [260, 256]


def test_names_are_changed_only_where_llama_cpp_would_do_something_else() -> None:
    phi3 = ["<unk>", "<s>", "</s>", *PHI]
    stripping = frozenset(phi3) - {"<unk>", "<s>", "<|endoftext|>"}
    assert recognised_name("Phi-3-mini", phi3, stripping) == "Phi-3-mini"
    assert recognised_name("My phi 3 Mini", phi3, stripping) == "My Phi-3 Mini"
    assert recognised_name("", phi3, stripping) == "(Phi-3)"
    assert recognised_name("Llama", phi3, frozenset()) == "Llama"
    assert recognised_name("Phi-3 Mini", phi3, frozenset()) == "Phi 3 Mini"
    assert recognised_name("Phi-3 Mini", phi3, stripping - {"<|end|>"}) == "Phi 3 Mini", "one that does not strip"
    assert recognised_name("Phi-3 Mini", [t for t in phi3 if t != "<s>"], stripping) == "Phi 3 Mini", "it would not load"


def entry(token: str, **flags: bool) -> dict[str, Any]:
    return {"id": 1, "content": token, **flags}


@pytest.mark.parametrize(
    ("normalizer", "added", "expected"),
    [
        (None, [entry("<m>", lstrip=True)], ["'a <m>' (lstrip)"]),
        (None, [entry("<m>", rstrip=True), entry("<n>", rstrip=True)], ["'<m> a' (rstrip of 2 tokens)"]),
        (None, [entry("<m>", single_word=True)], ["'a<m>a' (single_word)"]),
        ({"type": "NFC"}, [], ["'e\\u0301' (normalizer NFC)"]),
        ({"type": "Lowercase"}, [], ["'A' (normalizer Lowercase)"]),
        ({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Strip"}]}, [], ["NFKC", "' a ' (normalizer Strip)"]),
        ({"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, [], ["'``' (normalizer Replace)"]),
        ({"type": "Other"}, [], ["any text (normalizer 'Other')"]),
    ],
)
def test_the_warning_has_an_example_of_each_kind(normalizer: Any, added: list[dict[str, Any]], expected: list[str]) -> None:
    [warning] = unsaid({"normalizer": normalizer}, added, "m", pieces=False, examples=())
    assert all(example in str(warning) for example in expected)


def test_what_a_file_can_say_is_not_warned_of() -> None:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prefixed = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]}
    for normalizer in (None, spaces, prefixed):
        assert unsaid({"normalizer": normalizer}, [entry("<m>")], "m", pieces=True, examples=()) == []
    assert len(unsaid({"normalizer": prefixed}, [], "m", pieces=False, examples=())) == 1
    assert unsaid({}, [entry("<m>", rstrip=True)], "Phi-3", pieces=True, examples=()) == []


@needs_llama_cpp
@pytest.mark.parametrize("example", ["normalizer NFC", "lstrip", "rstrip", "single_word"])
def test_the_examples_have_other_tokens_in_llama_cpp(example: str, tmp_path: Path) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        if example == "normalizer NFC":
            tokenizer["normalizer"] = {"type": "NFC"}
        else:
            tokenizer["added_tokens"][0][example] = True

    model = model_with(tmp_path, BYTE_LEVEL, change)
    _, warnings = written(model, tmp_path / "out")
    [warning] = [warning for warning in warnings if "splits some texts otherwise" in warning]
    text = {"normalizer NFC": "e\u0301", "lstrip": "a <|im_end|>", "rstrip": "<|im_end|> a", "single_word": "a<|im_end|>a"}[
        example
    ]
    assert f"{text!a} ({example})" in warning
    expected = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json")).encode(text)
    with llama_cpp.Judge(tmp_path / "out" / "model.gguf") as judge:
        assert judge.tokens(text) != expected
        assert judge.tokens("ab ab") == transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(model / "tokenizer.json")
        ).encode("ab ab")


@needs_llama_cpp
@pytest.mark.parametrize("whole", [True, False])
def test_words_are_looked_up_whole_as_tokenizer_json_says(whole: bool, tmp_path: Path) -> None:
    """The token `12` has a merge, and `cd` has none."""
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"][:260], "<|im_end|>", "cd"]
    keys = {**BYTE_LEVEL, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*[1] * 260, 3, 1]}

    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["ignore_merges"] = whole

    model = model_with(tmp_path, keys, change)
    written_keys, warnings = written(model, tmp_path / "out")
    assert written_keys["tokenizer.ggml.pre"] == ("llama-bpe" if whole else "smaug-bpe")
    assert not any("ignore_merges" in warning for warning in warnings)
    expected = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json")).encode("cd 12")
    assert (261 in expected) == whole
    with llama_cpp.Judge(tmp_path / "out" / "model.gguf") as judge:
        assert judge.tokens("cd 12") == expected


@needs_llama_cpp
def test_a_space_before_the_first_text_alone_has_an_example(tmp_path: Path) -> None:
    model = model_with(tmp_path, PHI_KEYS, lambda tokenizer: None)
    _, warnings = written(model, tmp_path / "out")
    assert any("'<|user|>a' (prepend_scheme first)" in warning for warning in warnings)
    expected = transformers.AutoTokenizer.from_pretrained(model).encode("<|user|>a", add_special_tokens=False)
    with llama_cpp.Judge(tmp_path / "out" / "model.gguf") as judge:
        assert judge.tokens("<|user|>a") != expected


def test_a_way_to_merge_that_no_file_can_say_has_an_example(tmp_path: Path) -> None:
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"][:260], "<|im_end|>", "\u0120cd"]
    keys = {**BYTE_LEVEL, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*[1] * 260, 3, 1]}
    keys["tokenizer.ggml.pre"] = "qwen2"

    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["ignore_merges"] = True

    _, warnings = written(model_with(tmp_path, keys, change), tmp_path / "out")
    assert any("' cd' (ignore_merges)" in warning for warning in warnings)
