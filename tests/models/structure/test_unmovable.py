"""Stacks that config.json can express only with what it says beside the number of layers, and those that it cannot express."""

from __future__ import annotations

from typing import Any

import pytest

from weightsmith._base.errors import LayerError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import analyse, resize_config

F32 = DTYPES["F32"]


def resized(config: dict[str, Any], source: list[int], widths: list[int] | None = None, *extra_names: str) -> dict[str, Any]:
    n = config["num_hidden_layers"]
    specs = [TensorSpec(f"encoder.layer.{i}.norm.weight", F32, ((widths or [4] * n)[i],)) for i in range(n)]
    specs += [TensorSpec(name, F32, (4, 4 * n)) for name in extra_names]
    return resize_config(config, analyse(specs, config), {"encoder.layer.": source})[0]


def stages(n: int) -> list[str]:
    return ["stem", *(f"stage{i + 1}" for i in range(n))]


def test_stages_of_a_backbone_follow_their_layers() -> None:
    config = {"num_hidden_layers": 4, "stage_names": stages(4), "out_features": ["stage2", "stage4"], "out_indices": [2, 4]}
    new = resized(config, [0, 1, 1, 2, 3])
    assert (new["stage_names"], new["out_features"], new["out_indices"]) == (stages(5), ["stage3", "stage5"], [3, 5])
    with pytest.raises(LayerError, match="uses the output of layer 3"):
        resized(config, [0, 1, 2])
    last = resized({**config, "out_features": ["stage4"], "out_indices": [4]}, [0, 1, 2])
    assert (last["stage_names"], last["out_features"], last["out_indices"]) == (stages(3), ["stage3"], [3])


def test_layers_of_different_widths_stay() -> None:
    with pytest.raises(LayerError, match="different widths"):
        resized({"num_hidden_layers": 4, "num_heads": [1, 2, 4, 8]}, [0, 1, 2], [4, 8, 16, 32])


@pytest.mark.parametrize("name", ["embed_tokens_per_layer.weight", "esm.contact_head.regression.weight"])
def test_a_tensor_with_a_part_for_each_layer_keeps_them_in_place(name: str) -> None:
    with pytest.raises(LayerError, match="has a part for each layer"):
        resized({"num_hidden_layers": 4}, [0, 1, 2], None, name)


def test_zero_padded_keys_are_layer_numbers() -> None:
    config = {"num_hidden_layers": 12, "per_layer_config": {"02": {"head_dim": 8}, "11": {"head_dim": 9}}}
    assert resized(config, [2, 0, 11])["per_layer_config"] == {"0": {"head_dim": 8}, "2": {"head_dim": 9}}
