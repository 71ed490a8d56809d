"""Tokens that end a generation: llama.cpp stops where transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

import weightsmith
from tests import llama_cpp
from tests.gguf_help import BYTE_LEVEL, LETTERS, SIZES, tokenizer_files
from tests.gguf_help import llama as gguf_llama
from tests.llama_cpp import needs_llama_cpp
from weightsmith._models.formats.gguf.tokenizer.chat import ids_of, stops_of, with_ends

GLM = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]


@pytest.mark.parametrize("model_type", ["glm4", "glm4_moe", "glm4_moe_lite"])
@pytest.mark.parametrize("listed", [True, False])
def test_glm_stops_at_the_turn_of_a_user(model_type: str, listed: bool) -> None:
    stops = [0, 7, 9] if listed else [0]
    special, warnings = with_ends({"eos": 0, "padding": 0}, stops, GLM, model_type)
    assert (special["eos"], special["eot"], special["unknown"], special["padding"]) == (0, 7, 0, 0)
    assert special.get("eom") == (9 if listed or model_type != "glm4" else None)
    assert special["bos"] == (0 if model_type == "glm4" else 2)  # as llama.cpp's converter
    assert not warnings


def test_all_ids_of_a_list_are_named_or_known() -> None:
    tokens = ["a", "<|end|>", "<|assistant|>", "<x>", "<y>", "</s>"]
    assert with_ends({"eos": 1}, [1, 2], tokens, "phi3") == ({"eos": 1, "eom": 2}, []), "<|end|> stays the end of a turn"
    assert with_ends({"eos": 0}, [5, 0], ["a", "b", "c", "d", "e", "</s>"], "x") == ({"eos": 0}, []), "llama.cpp knows </s>"
    assert with_ends({}, [3, 4], tokens, "x") == with_ends({"eos": 3}, [4], tokens, "x")
    special, [warning] = with_ends({"eos": 0}, [0, 2, 3, 4], ["a", "b", "<c>", "<d>", "<e>"], "x")
    assert special == {"eos": 0, "eot": 2, "eom": 3}
    assert "llama.cpp does not stop at '<e>', as transformers does" in str(warning)


def test_only_rows_of_the_embedding_are_ids() -> None:
    assert ids_of([3, True, -1, 9, "x", 2.0, None], 9) == [3]
    assert stops_of(({"eos_token_id": 4}, {"eos_token_id": [5, 4]}, {}), 9) == [4, 5, 4]


def model_with(folder: Path, tokens: list[str], config: dict[str, Any], generation: dict[str, Any]) -> Path:
    """A tiny Llama with some special tokens behind its letters."""
    keys = {**BYTE_LEVEL, "tokenizer.ggml.tokens": [*LETTERS, *BYTE_LEVEL["tokenizer.ggml.tokens"][256:260], *tokens]}
    keys |= {"tokenizer.ggml.token_type": [*[1] * 260, *[3] * len(tokens)], "tokenizer.ggml.eos_token_id": 260}
    source = folder / "source.gguf"
    from tests.gguf_help import write_gguf

    write_gguf(source, "llama", gguf_llama(vocabulary=260 + len(tokens), kind="F32"), {**SIZES, **keys})
    weightsmith.dequantize(source, folder / "m", progress=False)
    for name, content in tokenizer_files(keys).items():
        (folder / "m" / name).write_bytes(content)
    path = folder / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    (folder / "m" / "generation_config.json").write_text(json.dumps(generation))
    return folder / "m"


@needs_llama_cpp
def test_llama_cpp_stops_at_every_id_of_generation_config(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|other|>"]
    stops = [260, 261, 262]
    model = model_with(tmp_path, tokens, {"eos_token_id": 260}, {"eos_token_id": stops, "temperature": 0.7})
    quantised = weightsmith.quantize(model, tmp_path / "out", "gguf-f32", progress=False)
    with llama_cpp.Judge(tmp_path / "out" / "model.gguf") as judge:
        assert [judge.stops_at(number) for number in (*stops, 263, 0)] == [True, True, True, False, False]
    assert not quantised.plan.lacking, "the keys say all that generation_config.json does"
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["general.sampling.temp"].contents() == pytest.approx(0.7)
