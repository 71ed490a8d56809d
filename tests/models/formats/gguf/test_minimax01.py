"""MiniMax-Text-01: kinds of layers, tensors that transformers computes, and settings that llama.cpp does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header

MAMBA, FULL = "linear_attention", "full_attention"
MIXED = [MAMBA, FULL, MAMBA]
ALPHAS = ("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor")


def saved(folder: Path, **changes: Any) -> Path:
    settings = {"vocab_size": 262, "dtype": "float32", "num_hidden_layers": 3, "layer_types": MIXED, **changes}
    source = zoo.save("minimax-01", folder, 1, **settings)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    return source


def written(source: Path) -> Path:
    out = source.with_name(f"{source.name}-q")
    quantised = weightsmith.quantize(source, out, "gguf-f32", progress=False)
    assert not [str(warning) for warning in quantised.warnings if "left out" in str(warning)]
    return out / "model.gguf"


def keys_of(path: Path) -> dict[str, Any]:
    keys = read_gguf_header(path).keys
    return {name.removeprefix("minimax-01."): keys[name] for name in keys if name.startswith("minimax-01.")}


@pytest.mark.long
@pytest.mark.parametrize("kinds", [MIXED, [MAMBA] * 7 + [FULL]])
def test_models_come_back_without_what_transformers_computes(kinds: list[str], tmp_path: Path) -> None:
    import torch

    source = saved(tmp_path / "m", layer_types=kinds, num_hidden_layers=len(kinds), rotary_dim=8)
    path = written(source)
    keys = keys_of(path)
    assert (keys["residual_scale"], keys["rope.dimension_count"]) == (3.5, 8)
    assert ("attention.recurrent_layers" in keys) == (kinds == MIXED)  # llama.cpp takes seven of eight otherwise
    computed = ("_decay", ".slope_rate")
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(path) as back:
        assert list(back.specs) == [name for name in here.specs if not name.endswith(computed)]
        assert len(here.specs) - len(back.specs) == 4 * kinds.count(MAMBA)
        for name in back.specs:
            assert np.array_equal(back.read(name), here.read(name)), name
        import transformers

        theirs, ours = (transformers.AutoConfig.from_pretrained(folder.folder).to_dict() for folder in (here, back))
    unlike = ("architectures", "dtype", "transformers_version", "_name_or_path", "eos_token_id", "bos_token_id", "pad_token_id")
    for key, value in theirs.items():
        assert key in unlike or ours.get(key) == value, key
    weightsmith.dequantize(path, tmp_path / "back", out_dtype="float32", progress=False)
    models = [zoo.load("minimax-01", folder)[0] for folder in (source, tmp_path / "back")]
    with torch.inference_mode():
        assert torch.equal(*(model(torch.arange(40)[None]).logits for model in models))


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.reader
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": [FULL, MAMBA, MAMBA], "num_attention_heads": 6, "head_dim": 12, "num_experts_per_tok": 3},
        {"layer_types": None, "num_hidden_layers": 5, **dict.fromkeys(ALPHAS, 0.5)},
    ],
)
def test_llama_cpp_computes_what_transformers_does(changes: dict[str, Any], tmp_path: Path) -> None:
    import torch

    source = saved(tmp_path / "m", **changes)
    path, tokens = written(source), np.random.default_rng(0).integers(0, 256, 40).tolist()
    model, missing = zoo.load("minimax-01", source)
    assert not any(missing.values())
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_beta_factor": 0.5}, "mlp_beta_factor is 0.5, and llama.cpp takes 1 for granted"),
        ({"mlp_alpha_factor": 0.5}, "mlp_alpha_factor is 0.5, and llama.cpp takes 3.5 for granted"),
        ({"postnorm": False}, "postnorm is False, and llama.cpp takes True for granted"),
        ({"shared_intermediate_size": 16}, "shared_intermediate_size is 16, and llama.cpp takes 0 for granted"),
        ({"sliding_window": 8}, "sliding_window is 8, and llama.cpp takes None for granted"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp takes 'silu' for granted"),
        ({"layer_types": [FULL] * 2}, "layer_types is .*, not full_attention or linear_attention for each of 3 layers"),
        ({"layer_types": [MAMBA, FULL, FULL]}, "by layer_types, layer 2 has full_attention, unlike its tensors"),
        ({"head_dim": 16}, r"head_dim is .* in config.json"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=words):
        written(source)


def test_layers_of_a_file_that_are_not_one_truth_value_each(tmp_path: Path) -> None:
    path = written(saved(tmp_path / "m"))
    keys = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in keys_of(path).items()}
    tensors = {name: (np.frombuffer(data, "<f4").reshape(shape), "F32") for name, (_, shape, data) in stored(path).items()}
    for value in ([True], [1, 0, 1]):
        changed = write_gguf(tmp_path / "m.gguf", "minimax-01", tensors, {**keys, "attention.recurrent_layers": value})
        with pytest.raises(FormatError, match=r"recurrent_layers is .*, not a truth value for each of 3 layers"):
            weightsmith.open_checkpoint(changed)


def test_a_file_that_states_how_often_layers_attend(tmp_path: Path) -> None:
    path = written(saved(tmp_path / "m"))
    keys = keys_of(path) | {"full_attention_interval": 2}
    del keys["attention.recurrent_layers"]
    tokenizer = {name: value for name, value in read_gguf_header(path).keys.items() if name.startswith("tokenizer.")}
    listed = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in (keys | tokenizer).items()}
    tensors = {name: (np.frombuffer(data, "<f4").reshape(shape), "F32") for name, (_, shape, data) in stored(path).items()}
    with weightsmith.open_checkpoint(write_gguf(tmp_path / "m.gguf", "minimax-01", tensors, listed)) as checkpoint:
        assert checkpoint.config is not None
        assert checkpoint.config["layer_types"] == MIXED
        assert {"model.layers.0.self_attn.out_proj.weight", "model.layers.1.self_attn.o_proj.weight"} <= {*checkpoint.specs}


@pytest.mark.parametrize(("kind", "words"), [(MAMBA, "no layer has attention"), (FULL, "all layers have attention")])
def test_models_of_one_kind_of_layers(kind: str, words: str, tmp_path: Path) -> None:
    """llama.cpp ends with an error."""
    with pytest.raises(PlanError, match=words):
        written(saved(tmp_path / "m", layer_types=[kind] * 3))
