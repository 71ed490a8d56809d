"""Which names are of factors of an adapter, and of adapters that are more than B @ A."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.lora.test_lora import base, normal, refusal
from weightsmith._models.lora.forms import OTHER_KINDS, PAIRS, find_factors, other_kind, split_factor


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.a)
def test_every_way_to_name_factors(pair: object) -> None:
    for part, ending in (("A", pair.a), ("B", pair.b)):  # type: ignore[attr-defined]
        assert split_factor(f"unet.mid_block.attn.to_q{ending}") == ("unet.mid_block.attn.to_q", part, pair)
    factor_names = find_factors(f"layers.0.q{ending}" for ending in (pair.a, pair.b))  # type: ignore[attr-defined]
    assert (factor_names.modules, factor_names.adapters, factor_names.kinds) == (("layers.0.q",), ("",), ())
    assert not find_factors([f"layers.0.q{pair.a}"]).modules  # type: ignore[attr-defined]  # an A alone is a factor of nothing


def test_names_of_models_that_look_like_factors() -> None:
    names = [
        "model.layers.0.attn.w_lora.lora.0.weight",  # RWKV-7: a layer with a nonlinearity inside
        "model.layers.0.attn.w_lora.lora.2.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.q_b_proj.weight",
        "backbone.layers.0.soft_cap.weight",
        "decoder.diff",
        "memory.on_input",
        "model.layers.0.mlp.alpha",
    ]
    assert not find_factors(names)
    assert find_factors(["lycoris_blocks_0_q.diff"]).kinds == ("whole differences",)


READ = ("hada_", "lokr_", "lora_mid", "diff", "diff_b", "diff_m", "w_norm", "b_norm")
"""Parts of kinds that are read from single files."""


def test_adapters_with_names_of_their_own() -> None:
    names = [f"layers.0.q.lora_{part}.{name}.weight" for name in ("speech", "default", "vision") for part in "AB"]
    factor_names = find_factors([*names, "layers.0.q.base_layer.weight"])
    assert (factor_names.modules, factor_names.adapters, factor_names.layers) == (
        ("layers.0.q",),
        ("speech", "", "vision"),
        ("layers.0.q",),
    )


@pytest.mark.parametrize("key", [key for key in OTHER_KINDS if key not in READ])
def test_every_other_kind_is_refused_by_name(key: str, tmp_path: Path) -> None:
    part = f"{key}w1_a" if key.endswith("_") else key
    ending = {"lora_mid": "lora_mid.weight", "lora_magnitude_vector": "lora_magnitude_vector.default.weight"}.get(part, part)
    name = f"lora_unet_mid_block.{ending}"
    assert other_kind(name) == OTHER_KINDS[key]
    tensors = {"lora_unet_x.lora_down.weight": normal(2, 3), "lora_unet_x.lora_up.weight": normal(3, 2), name: normal(2, 2)}
    save_file(tensors, tmp_path / "a.safetensors")
    problem = refusal(base(tmp_path / "base", np.float32), tmp_path / "a.safetensors")
    assert f"it is {OTHER_KINDS[key]}, which is not applied from a single file" in problem.finding.what
    assert "merge it into its base with the program that made it" in problem.finding.fix.lower()
