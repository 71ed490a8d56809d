"""Gemma 3n: published files, tensors that llama.cpp needs and never reads, and settings that it does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header

SHARED = [f"blk.{i}.{name}.weight" for i in (20, 21) for name in ("attn_k", "attn_k_norm", "attn_v")]


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("gemma3n", folder, 1, vocab_size=262, dtype="float32")
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return source


def written(source: Path, name: str = "f32", **options: Any) -> Path:
    weightsmith.quantize(source, source.parent / name, f"gguf-{name}", progress=False, **options)
    return source.parent / name / "model.gguf"


def published(source: Path) -> None:
    """As Google publishes it: within a model of several parts, with keys and values in all layers."""
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["full_attention"]["rope_theta"], "rope_scaling": None}
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["intermediate_size"] = [48] * 22
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors = {name.replace("model.", "model.language_model.", 1): checkpoint.read(name) for name in checkpoint.specs}
    for i in (20, 21):
        attention = {name: values for name, values in tensors.items() if ".layers.0.self_attn." in name}
        copies = {name.replace(".layers.0.", f".layers.{i}."): values for name, values in attention.items()}
        tensors = copies | tensors
    tensors["model.vision_tower.timm_model.conv_stem.conv.weight"] = np.zeros((4, 3, 3, 3), np.float32)
    tensors["model.audio_tower.conformer.0.norm.weight"] = np.zeros(4, np.float32)
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": config}
    write_checkpoint(source, tensors, {**whole, "vision_config": {}, "audio_config": {}})


@pytest.mark.long
def test_published_files_have_keys_and_values_that_nothing_reads(tmp_path: Path) -> None:
    """transformers does not save them, and llama.cpp does not load a file without them: they are 0 then."""
    path = written(saved(tmp_path / "plain" / "m"))
    plain = stored(path)
    assert all(kind == "F32" and not any(data) for kind, _, data in map(plain.get, SHARED))  # type: ignore[misc]
    assert plain["blk.21.attn_k.weight"][1] == plain["blk.0.attn_k.weight"][1]
    source = saved(tmp_path / "m")
    published(source)
    again = written(source)
    expected = plain | {name: plain[f"blk.0.{name.split('.', 2)[2]}"] for name in SHARED}
    assert stored(again) == expected
    keys = [
        {name: str(value) for name, value in read_gguf_header(file).keys.items() if name.startswith("gemma3n.")}
        for file in (path, again)
    ]
    assert keys[0] == keys[1]
    with weightsmith.open_checkpoint(again) as back, weightsmith.open_checkpoint(tmp_path / "plain" / "m") as here:
        assert list(back.specs) == [name for name in here.specs if name != "lm_head.weight"]


@pytest.mark.long
def test_tokens_without_an_embedding_of_each_layer_have_zeros(tmp_path: Path) -> None:
    """Tokens that stand for images and sounds; llama.cpp's converter adds such rows, too."""
    path = written(saved(tmp_path / "m"))
    kind, shape, data = stored(path)["per_layer_token_embd.weight"]
    assert (kind, shape) == ("F32", (262, 22 * 256))
    values = np.frombuffer(data, "<f4").reshape(shape)
    assert values[:60].any(1).all()
    assert not values[60:].any()
    with weightsmith.open_checkpoint(path) as back:
        assert back.config is not None
        assert back.config["vocab_size_per_layer_input"] == 262


@pytest.mark.long
def test_tensors_that_nothing_reads_need_no_importances(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 262}
    source = zoo.save("gemma3n", tmp_path / "m", 1, **sizes)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    shapes = {name: shape for name, (_, shape, _) in stored(written(source)).items() if len(shape) > 1}
    tensors = {name: np.ones((1, shape[-1]), np.float32) for name, shape in shapes.items() if name not in SHARED}
    from tests.gguf_help import write_gguf

    sums = {f"{name}.in_sum2": (values, "F32") for name, values in tensors.items()}
    counts = {f"{name}.counts": (np.float32([[1]]), "F32") for name in tensors}
    matrix = write_gguf(tmp_path / "i.gguf", "imatrix", sums | counts, {"general.type": "imatrix"})
    kinds = {name: kind for name, (kind, _, _) in stored(written(source, "iq2_xs", imatrix=str(matrix))).items()}
    assert kinds["blk.0.attn_k.weight"] == "IQ2_XS"
    assert kinds["blk.20.attn_k.weight"] == "Q4_K"


@needs_llama_cpp
@pytest.mark.long
def test_llama_cpp_computes_the_same_but_for_the_deviation_of_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp estimates it with n - 1, which shows in narrow MLPs alone."""
    import torch
    from transformers.models.gemma3n import modeling_gemma3n

    deviation = torch.std

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def std(self, values: torch.Tensor, dim: int, *, keepdim: bool, unbiased: bool) -> torch.Tensor:
            assert not unbiased
            return deviation(values, dim=dim, keepdim=keepdim, unbiased=True)

    monkeypatch.setattr(modeling_gemma3n, "torch", Torch())
    source = saved(tmp_path / "m")
    path = written(source)
    model, missing = zoo.load("gemma3n", source)
    assert not any(missing.values())
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 60, 40)]
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 0.005 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, and llama.cpp takes 2 for granted"),
        ({"activation_sparsity_pattern": [0.95] * 22}, r"activation_sparsity_pattern is \[0.95, .*, and llama.cpp takes"),
        ({"altup_num_inputs": 3}, "altup_num_inputs is 3, and llama.cpp takes 4 for granted"),
        ({"altup_active_idx": 1}, "altup_active_idx is 1, and llama.cpp takes 0 for granted"),
        ({"altup_correct_scale": False}, "altup_correct_scale is False, and llama.cpp takes True for granted"),
        ({"laurel_rank": 32}, "laurel_rank is 32, and llama.cpp takes 64 for granted"),
        ({"hidden_size_per_layer_input": 128}, "hidden_size_per_layer_input is 128, and llama.cpp takes 256"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping is 20.0, and llama.cpp takes 30.0 for granted"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping is missing"),
        ({"layer_types": ["sliding_attention"] * 22}, r"layer_types is \['sliding_attention', .*, and llama.cpp takes"),
        ({"intermediate_size": [48] * 21 + [64]}, r"intermediate_size is \[48, 48, .*, not a positive whole number"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        written(saved(tmp_path / "m", **changes))


@pytest.mark.parametrize("names", [["model.altup_projections.2.weight"], ["model.altup_projections.1.weight"]])
def test_matrices_of_a_stack_that_are_missing(names: list[str], tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs if name not in names}, checkpoint.config
    write_checkpoint(source, tensors, config)
    with pytest.raises(PlanError, match=r"2 matrices, and llama\.cpp has 3|experts are numbered"):
        written(source)
