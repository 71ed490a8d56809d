"""Keys of hybrid models that a damaged file has otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import zoo
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._models.formats.gguf.architectures.nemotron import NemotronH
from weightsmith._models.formats.gguf.base.architecture import Contents
from weightsmith._models.formats.gguf.base.mamba import INNER, KV_HEADS, take_inner, take_kv_heads
from weightsmith._models.formats.gguf.base.values import GgufValues

MIXED = np.array([2, 0, 4], np.int32)


def values(**keys: Any) -> GgufValues:
    return GgufValues(keys, "here")


def test_heads_of_each_layer() -> None:
    assert take_kv_heads(values(**{KV_HEADS: np.array([2, 0], np.int32)}), 2) == (2, [True, False])


def test_a_file_without_attention() -> None:
    with pytest.raises(FormatError, match=r"attention\.head_count_kv is .*, and no layer has attention"):
        take_kv_heads(values(**{KV_HEADS: np.zeros(3, np.int32)}), 3)


@pytest.mark.parametrize(
    ("name", "changes", "kept"),
    [
        ("jamba", {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 3}, 3),
        ("kimi-linear", {}, 2),
        ("bailing-hybrid", {}, 1),
        ("granite-hybrid", {}, 1),
    ],
)
def test_a_stack_without_attention_is_refused(name: str, changes: dict[str, Any], kept: int, tmp_path: Path) -> None:
    source = zoo.save(name, tmp_path / "m", 1, **changes)
    recipe = {"merge_method": "passthrough", "slices": [{"sources": [{"model": str(source), "layer_range": [0, kept]}]}]}
    with pytest.raises(PlanError, match=f"no layer has attention, and GGUF files of '{name[:4]}.*' need one that has"):
        weightsmith.plan(recipe, quantize="gguf-f32")


@pytest.mark.parametrize("heads", [None, 2, np.ones(2, np.int32), np.ones(3, np.float32), MIXED])
def test_heads_that_are_no_number_for_each_layer(heads: object) -> None:
    with pytest.raises(FormatError, match=r"attention\.head_count_kv is"):
        take_kv_heads(values(**{KV_HEADS: heads}), 3)


def test_an_inner_width_that_is_no_multiple() -> None:
    assert take_inner(values(**{INNER: 64}), 32, 4) == 2
    for inner, heads in ((65, 4), (64, 3), (16, 4)):
        with pytest.raises(FormatError, match=r"ssm\.inner_size is .*, not a multiple of 32, the width of the model"):
            take_inner(values(**{INNER: inner}), 32, heads)


GOOD = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": 32,
    "attention.head_count": 4,
    KV_HEADS: np.array([2, 0, 0], np.int32),
    "feed_forward_length": np.array([0, 48, 0], np.int32),
    "attention.layer_norm_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    INNER: 64,
}


def read(**changes: object) -> dict[str, Any]:
    keys = {f"nemotron_h.{name}": value for name, value in {**GOOD, **changes}.items()}
    return NemotronH().config(keys, Contents({"token_embd.weight": (8, 32), "output.weight": (8, 32)}), "float32", "here")


def test_kinds_of_layers_follow_from_heads_and_widths() -> None:
    config = read()
    assert config["layer_types"] == ["full_attention", "mlp", "linear_attention"]
    assert (config["num_key_value_heads"], config["intermediate_size"], config["mamba_head_dim"]) == (2, 48, 16)
    none = np.zeros(3, np.int32)
    config = read(**{KV_HEADS: none, "feed_forward_length": none})
    assert config["layer_types"] == ["linear_attention"] * 3
    assert "intermediate_size" not in config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_length": np.array([48, 0, 0], np.int32)}, "and a layer would have an MLP and the attention of"),
        ({"feed_forward_length": MIXED}, "not one number in all layers that have one"),
        ({"feed_forward_length": 48}, "not a whole number for each of 3 layers"),
        ({KV_HEADS: np.array([-1, 0, 0], np.int32)}, "not one number in all layers that have one"),
        ({INNER: 66}, "is 66, not a multiple of 4 heads"),
        ({"ssm.state_size": None}, r"nemotron_h\.ssm\.state_size is missing"),
        ({"attention.layer_norm_epsilon": None}, r"nemotron_h\.attention\.layer_norm_epsilon is missing"),
    ],
)
def test_keys_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read(**changes)
