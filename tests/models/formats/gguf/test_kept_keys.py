"""Keys of GGUF files that another output keeps: the tokenizer's, those of sampling, and where the model comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import weightsmith
from tests.gguf_help import BYTE_LEVEL, SENTENCEPIECE, SIZES, llama, write_gguf
from weightsmith._execution.cards import read_card
from weightsmith._files.arrays import view_of
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.sources.composed import StateDict

ORIGIN: dict[str, Any] = {
    "general.name": "My Phi-3",
    "general.license": "other",
    "general.license.name": "tiny licence",
    "general.author": "Jo Doe",
    "general.organization": "Acme",
    "general.tags": ["chat"],
    "general.languages": ["en", "de"],
    "general.base_model.count": 1,
    "general.base_model.0.name": "Tiny",
    "general.base_model.0.organization": "Org",
    "general.base_model.0.repo_url": "https://huggingface.co/org/tiny",
    "general.sampling.temp": 0.25,
    "general.sampling.top_k": 7,
}
UNKNOWN_WAY = BYTE_LEVEL | {"tokenizer.ggml.pre": "a way of 2031", "tokenizer.ggml.add_sep_token": False}
"""A tokenizer that splits text in a way that only newer programs know."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(name: str, keys: dict[str, Any] = UNKNOWN_WAY, seed: int = 0) -> Path:
    rows = len(keys["tokenizer.ggml.tokens"])
    return write_gguf(Path(name), "llama", llama(seed, vocabulary=rows), {**SIZES, **ORIGIN, **keys})


def keys_of(path: Path) -> dict[str, Any]:
    """The keys, with the types of their values."""
    fields = gguf.GGUFReader(path).fields
    return {name: (field.types, field.contents()) for name, field in fields.items()}


def tokenizer_of(path: Path) -> dict[str, Any]:
    return {key: value for key, value in keys_of(path).items() if key.startswith(("tokenizer.", "general.sampling."))}


def blend(*models: str, **more: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 1}} for m in models], **more}


@pytest.mark.parametrize("keys", [UNKNOWN_WAY, SENTENCEPIECE], ids=["bytes", "pieces"])
@pytest.mark.parametrize("quantize", ["gguf-copy", "gguf-q8_0"])
def test_a_tokenizer_that_does_not_change_is_kept_as_it_is(keys: dict[str, Any], quantize: str) -> None:
    source = save("a.gguf", keys)
    result = weightsmith.quantize(source, "q", quantize, progress=False)
    assert tokenizer_of(Path("q/model.gguf")) == tokenizer_of(source)
    assert len(tokenizer_of(source)) > 6
    assert not [str(warning) for warning in result.warnings if "tokenizer" in str(warning)] or keys is UNKNOWN_WAY


def test_a_merge_of_files_keeps_the_way_that_text_is_split() -> None:
    """It used to be GPT-2's, because tokenizer.json says nothing of a way that is not known here."""
    for seed, name in enumerate(("a.gguf", "b.gguf")):
        save(name, seed=seed)
    weightsmith.merge(blend("a.gguf", "b.gguf"), "out", quantize="gguf-q8_0", progress=False)
    assert tokenizer_of(Path("out/model.gguf")) == tokenizer_of(Path("a.gguf"))
    two = {"merge_method": "passthrough", "models": [{"model": "first"}]}
    named = [{"name": "first", **blend("a.gguf", "b.gguf")}, {"name": "second", **two}]
    weightsmith.merge(named, "staged", quantize="gguf-q8_0", progress=False)
    assert tokenizer_of(Path("staged/model.gguf")) == tokenizer_of(Path("a.gguf"))


def test_a_chosen_template_takes_the_place_of_that_of_the_file_alone() -> None:
    source = save("a.gguf", UNKNOWN_WAY | {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "{{ x }}"})
    weightsmith.merge(blend("a.gguf", chat_template="chatml"), "out", quantize="gguf-q8_0", progress=False)
    before, after = tokenizer_of(source), tokenizer_of(Path("out/model.gguf"))
    templates = {key for key in before | after if key.startswith("tokenizer.chat_template")}
    assert {key: value for key, value in after.items() if key not in templates} == {
        key: value for key, value in before.items() if key not in templates
    }
    assert "<|im_start|>" in after["tokenizer.chat_template"][1]


def test_a_tokenizer_that_changes_is_written_anew() -> None:
    save("a.gguf", SENTENCEPIECE)
    other = save("b.gguf", SENTENCEPIECE | {"tokenizer.ggml.tokens": [*SENTENCEPIECE["tokenizer.ggml.tokens"][:-1], "<other>"]})
    recipe = blend("a.gguf", "b.gguf", tokenizer={"source": "union"})
    weightsmith.merge(recipe, "out", quantize="gguf-f16", progress=False)
    tokens = read_gguf_header(Path("out/model.gguf")).keys["tokenizer.ggml.tokens"]
    assert {"<think>", "<other>"} <= set(tokens)
    assert len(tokens) == 1 + len(read_gguf_header(other).keys["tokenizer.ggml.tokens"])


def test_a_mixture_of_files_has_their_tokenizer() -> None:
    """Its architecture is another one."""
    keys = {**SIZES, **UNKNOWN_WAY, "attention.key_length": 16, "attention.value_length": 16}
    for seed, name in enumerate(("a.gguf", "b.gguf")):
        norms = {f"blk.0.attn_{x}_norm.weight": (np.ones(16), "F32") for x in "qk"}
        write_gguf(Path(name), "qwen3", llama(seed, vocabulary=len(keys["tokenizer.ggml.tokens"])) | norms, keys)
    experts = [{"source_model": name} for name in ("a.gguf", "b.gguf")]
    recipe = {"base_model": "a.gguf", "gate_mode": "random", "architecture": "qwen3_moe", "experts": experts}
    weightsmith.moe(recipe, "out", quantize="gguf-f16", progress=False)
    assert read_gguf_header(Path("out/model.gguf")).keys["general.architecture"] == "qwen3moe"
    assert tokenizer_of(Path("out/model.gguf")) == tokenizer_of(Path("a.gguf"))


def test_rows_without_a_token_are_named_as_ever() -> None:
    tensors = llama(vocabulary=270)
    write_gguf(Path("a.gguf"), "llama", tensors, {**SIZES, **SENTENCEPIECE, "vocab_size": 270})
    weightsmith.quantize("a.gguf", "q", "gguf-copy", progress=False)
    assert read_gguf_header(Path("q/model.gguf")).keys["tokenizer.ggml.tokens"][-1] == "[PAD269]"


@pytest.mark.parametrize("name", ["My Phi-3", "Other"])
def test_llama_cpp_recognises_the_name_as_before(name: str) -> None:
    """It lets tokens of models with `phi-3` in their names swallow spaces."""
    save("a.gguf", SENTENCEPIECE | {"general.name": name}).rename("phi3-like.gguf")
    weightsmith.quantize("phi3-like.gguf", "q", "gguf-copy", progress=False)
    written = keys_of(Path("q/model.gguf"))["general.name"][1]
    assert written == ("Phi3 Like" if "Phi" in name else "Phi 3 Like")


def test_licence_and_origin_are_kept_and_shown() -> None:
    """The file says them; there is no README.md."""
    source = save("a.gguf")
    weightsmith.quantize(source, "q", "gguf-copy", progress=False)
    weightsmith.merge(blend("a.gguf"), "out", progress=False)
    before, after = keys_of(source), keys_of(Path("q/model.gguf"))
    assert {key: after.get(key) for key in ORIGIN if key != "general.name"} == {
        key: before[key] for key in ORIGIN if key != "general.name"
    }
    card = read_card(Path("out"))
    assert (card["license"], card["license_name"], card["base_model"]) == ("other", "tiny licence", ["org/tiny"])
    generation = json.loads(Path("out/generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"]) == (0.25, 7)
    assert weightsmith.inspect("a.gguf").licence == "tiny licence"


def test_two_licences_are_none_for_the_whole() -> None:
    save("a.gguf")
    save("b.gguf", UNKNOWN_WAY | {"general.license": "mit"}, seed=1)
    recipe = [{"name": "both", **blend("a.gguf", "b.gguf")}, {"merge_method": "passthrough", "models": [{"model": "both"}]}]
    for number, plan in enumerate((blend("a.gguf", "b.gguf"), recipe)):
        weightsmith.merge(plan, f"out{number}", quantize="gguf-q8_0", progress=False)
        assert "general.license" not in keys_of(Path(f"out{number}/model.gguf"))
        assert "license" not in read_card(Path(f"out{number}"))


def test_a_readme_beside_the_file_says_more() -> None:
    Path("m").mkdir()
    save("m/model.gguf")
    Path("m/README.md").write_text("---\nlicense: mit\n---\n")
    weightsmith.quantize("m", "q", "gguf-copy", progress=False)
    keys = keys_of(Path("q/model.gguf"))
    assert (keys["general.license"][1], keys["general.author"][1]) == ("mit", "Jo Doe")
    assert "general.license.name" not in keys
    assert weightsmith.inspect("m").licence == "mit"


def test_what_is_no_text_says_nothing() -> None:
    strange = {"general.license": 7, "general.author": ["a", "b"], "general.base_model.count": "many", "general.tags": "x"}
    strange |= {"general.sampling.top_k": "all", "general.sampling.temp": True, "general.languages": [1, 2]}
    strange |= {"general.description": "x" * 100_000}
    save("a.gguf", UNKNOWN_WAY | strange)
    with weightsmith.open_checkpoint("a.gguf") as model:
        assert model.card == {
            "license_name": "tiny licence", "organization": "Acme", "tags": ["x"],
        }  # fmt: skip
        assert "top_k" not in json.loads((model.folder / "generation_config.json").read_text())
        assert np.all(model["model.norm.weight"] == model["model.norm.weight"])


def test_tensors_in_memory_are_not_what_a_readme_in_the_current_folder_describes() -> None:
    Path("README.md").write_text("---\nlicense: mit\n---\n")
    source = StateDict({"w": view_of("w", np.ones((2, 2), np.float32))}, "memory")
    assert Checkpoint("memory", source).card == {}
