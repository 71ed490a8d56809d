"""Layers of Mamba and Mamba 2 (Dao and Gu 2024) under llama.cpp's names: what hybrid models have beside attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._models.formats.gguf.base.tensors import WIDTH, Dimension, TensorShape, product_of
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues
from weightsmith._models.structure.configs import decoded_floats

KV_HEADS = "attention.head_count_kv"
INNER, RANK, STATE = "ssm.inner_size", "ssm.time_step_rank", "ssm.state_size"

MAMBA_SHAPES: Mapping[str, TensorShape] = {
    "ssm_in": (Dimension(((2, INNER), (2, "ssm.group_count", STATE), (RANK,))), WIDTH),
    "ssm_out": (WIDTH, product_of(INNER)),
}


def mamba_layer(module: str) -> dict[str, str]:
    """Modules of a layer under llama.cpp's names. module: how the Hub calls the layer's block."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {name: f"{module}.{hub}" for name, hub in names.items()}


def mamba_bare(module: str) -> dict[str, str]:
    """Tensors of a layer whose names are not those of modules."""
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D", "ssm_dt.bias": f"{module}.dt_bias"}


MAMBA_1_SHAPES: Mapping[str, TensorShape] = {
    "ssm_in": (product_of(2, INNER), WIDTH),
    "ssm_x": (Dimension(((RANK,), (2, STATE))), product_of(INNER)),
    "ssm_dt": (product_of(INNER), product_of(RANK)),
    "ssm_out": (WIDTH, product_of(INNER)),
}
"""Shapes of the tensors of Mamba 1."""


def mamba_1_layer(module: str) -> dict[str, str]:
    """`mamba_layer` of the first Mamba."""
    return {"ssm_conv1d": f"{module}.conv1d", **{f"ssm_{part}": f"{module}.{part}_proj" for part in ("in", "x", "dt", "out")}}


def put_rank(config: GgufConfig, setting: str, keys: GgufKeys) -> None:
    """The rank of time steps of the first Mamba: by default, as in transformers, a sixteenth of the model's width."""
    keys.u32(RANK, -(-config.count("hidden_size") // 16) if config.get(setting, "auto") == "auto" else config.count(setting))


def need_no_limit(config: GgufConfig) -> None:
    """Raise an error if time steps are limited, which llama.cpp does not do."""
    limit = config.get("time_step_limit")
    config.need("time_step_limit", None if decoded_floats(limit) in (None, [0, math.inf]) else limit, None)


def mamba_flat(inner: Callable[[GgufConfig], int], groups: str) -> dict[str, Callable[[GgufConfig], int]]:
    """`GgufArchitecture.flat` of a model. inner: the width of all heads together; groups: config.json's number of groups."""

    def columns(config: GgufConfig) -> int:
        width, count = inner(config), config.count(groups)
        if width % count:
            raise config.wrong(groups, count, f"and {width:,} is not a multiple of it")
        return width // count

    return {"ssm_a": lambda config: 1, "ssm_d": lambda config: 1, "ssm_norm.weight": columns}


def put_kv_heads(attends: list[bool], heads: int, keys: GgufKeys) -> None:
    """The heads of k and v of each layer: 0 where it does not attend."""
    keys.put(KV_HEADS, "i32", [heads if here else 0 for here in attends])


def need_attention(config: GgufConfig, attends: list[bool]) -> None:
    """Raise Unsupported unless a layer attends: `take_kv_heads` finds the model's heads there."""
    if not any(attends):
        what = f"no layer has attention, and GGUF files of '{config.get('model_type')}' need one that has"
        raise Unsupported(what, where="config.json", fix="keep a layer with attention")


def need_states(config: GgufConfig, attends: list[bool]) -> None:
    """Raise Unsupported unless a layer has a state: llama.cpp ends with an error where it keeps none."""
    if all(attends):
        what = f"all layers have attention, and llama.cpp runs no model of '{config.get('model_type')}' without another one"
        raise Unsupported(what, where="config.json", fix="keep a layer with linear attention")


def take_kv_heads(values: GgufValues, layers: int) -> tuple[int, list[bool]]:
    """The heads of k and v, and which layers attend. Raises FormatError unless all that do have as many."""
    heads = values.get(KV_HEADS)
    if not isinstance(heads, np.ndarray) or heads.shape != (layers,) or heads.dtype.kind not in "iu":
        raise values.wrong(KV_HEADS, show(heads), f"not a whole number for each of {layers:,} layers")
    if not heads.any():
        raise values.wrong(KV_HEADS, heads, "and no layer has attention")
    most = int(heads.max())
    if not np.isin(heads, (0, most)).all():
        raise values.wrong(KV_HEADS, heads, "not one number in all layers with attention")
    return most, [bool(count) for count in heads.tolist()]


def take_inner(values: GgufValues, width: int, heads: int) -> int:
    """The width of all heads together, as a multiple of the model's width. Raises FormatError."""
    inner = values.count(INNER)
    if inner % width or inner % heads:
        raise values.wrong(INNER, inner, f"not a multiple of {width:,}, the width of the model, and of {heads:,} heads")
    return inner // width


def layer_kinds(config: GgufConfig, attends: tuple[str, ...], others: tuple[str, ...]) -> list[bool]:
    """Which layers attend, by `layer_types`. Raises FormatError.

    attends  names of layers that do
    others   names of layers that do not
    """
    layers, types = config.count("num_hidden_layers"), config.get("layer_types")
    if types is None:
        return [False] * layers
    if not isinstance(types, list) or len(types) != layers or not all(kind in (*attends, *others) for kind in types):
        known = " or ".join((*attends, *others))
        raise config.wrong("layer_types", types, f"not {known} for each of {layers:,} layers")
    return [kind in attends for kind in types]
