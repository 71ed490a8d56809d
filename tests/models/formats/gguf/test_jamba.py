"""Jamba: which layers attend, and which have experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.formats.gguf.architectures.jamba import Jamba
from weightsmith._models.formats.gguf.base.architecture import Contents
from weightsmith._models.formats.gguf.base.mamba import INNER, KV_HEADS
from weightsmith._models.formats.gguf.header import read_gguf_header

SIX = {"num_hidden_layers": 6, "attn_layer_period": 3}


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("jamba", folder, 1, **{"vocab_size": 262, "dtype": "float32", **changes})
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (source / file).write_bytes(content)
    return source


def quantize(source: Path, out: Path) -> Path:
    weightsmith.quantize(source, out, "gguf-f32", progress=False)
    return out / "model.gguf"


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.reader
@pytest.mark.parametrize("changes", [{**SIX, "num_experts": 1}, {**SIX, "num_experts": 4, "mamba_dt_rank": 5}])
def test_llama_cpp_computes_the_same_of_other_layers(changes: dict[str, Any], tmp_path: Path) -> None:
    import torch

    source = saved(tmp_path / "m", **changes)
    path, tokens = quantize(source, tmp_path / "q"), np.random.default_rng(0).integers(0, 256, 40).tolist()
    model, _ = zoo.load("jamba", source)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()
    keys = read_gguf_header(path).keys
    assert keys["jamba.attention.head_count_kv"].tolist() == [0, 2, 0, 0, 2, 0]
    assert keys["jamba.expert_used_count"] == min(2, changes["num_experts"])
    assert keys["jamba.ssm.time_step_rank"] == changes.get("mamba_dt_rank", 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_expand": 3}, "mamba_expand is 3, and llama.cpp takes 2 for granted"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias is False, and llama.cpp takes True"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ({"attn_layer_offset": 2}, "attn_layer_offset is 2, not below attn_layer_period, 2"),
        ({"expert_layer_offset": 0}, "by expert_layer_period, layer 0 has experts, unlike its tensors"),
        ({"expert_layer_period": 3}, ""),
        ({"expert_layer_period": 3, "expert_layer_offset": 2}, "by expert_layer_period, layer 1 has no experts, unlike its"),
        ({"mamba_dt_rank": 3}, "dt_proj.weight: mamba_dt_rank is 3 in config.json"),
        ({"mamba_d_state": 5}, r"x_proj.weight: mamba_dt_rank \+ 2 \* mamba_d_state is 12"),
        ({"head_dim": 16}, r"num_key_value_heads \(0 in layers of Mamba.*\) \* head_dim is 32"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(config))
    if not words:  # of two layers, it says the same
        quantize(source, tmp_path / "q")
        return
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


GOOD = {
    "block_count": 4,
    "context_length": 64,
    "embedding_length": 32,
    "attention.head_count": 4,
    KV_HEADS: np.array([0, 2, 0, 2], np.int32),
    "feed_forward_length": 48,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 2,
    INNER: 64,
    "expert_count": 4,
    "expert_used_count": 2,
}


def read(experts: tuple[int, ...] = (), **changes: object) -> dict[str, Any]:
    keys = {f"jamba.{name}": value for name, value in {**GOOD, **changes}.items()}
    shapes = {"token_embd.weight": (8, 32), **{f"blk.{i}.ffn_gate_inp.weight": (4, 32) for i in experts}}
    return Jamba().config(keys, Contents(shapes), "float32", "here")


@pytest.mark.parametrize(
    ("experts", "period", "offset"), [((), 5, 4), ((0,), 4, 0), ((3,), 4, 3), ((1, 3), 2, 1), ((0, 1, 2, 3), 1, 0)]
)
def test_periods_follow_from_the_layers(experts: tuple[int, ...], period: int, offset: int) -> None:
    config = read(experts)
    assert (config["expert_layer_period"], config["expert_layer_offset"]) == (period, offset)
    assert (config["attn_layer_period"], config["attn_layer_offset"], config["num_key_value_heads"]) == (2, 1, 2)


def test_layers_that_are_not_one_of_every_so_many() -> None:
    for experts in ((1, 2), (0, 1), (2, 3)):
        with pytest.raises(Unsupported, match="expert_layer_period cannot say that layers"):
            read(experts)
    with pytest.raises(FormatError, match=r"ssm\.inner_size is 96, not twice 32"):
        read(**{INNER: 96})
