"""NVIDIA ModelOpt's weights, FP8, MXFP8 and NVFP4, also mixed.

FP8    X.weight F8_E4M3 [outputs, inputs], X.weight_scale F32: one element; [outputs] of rows (FP8_PER_CHANNEL_PER_TOKEN); of
       blocks of 128 by 128, [blocks, blocks] or [blocks, 1, blocks, 1] (FP8_PB_WO)
MXFP8  X.weight F8_E4M3 [outputs, inputs], X.weight_scale U8 [outputs, inputs / 32]: an exponent of 2 with 127 added
NVFP4  X.weight U8 [outputs, inputs / 2]: two float4 in a byte, the first in the low half; X.weight_scale F8_E4M3
       [outputs, inputs / 16]; X.weight_scale_2 F32 of one element, by which each of these scales is multiplied

Experts of Llama 4 and gpt-oss are stacked, X: [experts, inputs, outputs]. Their parts are X_weight_scale, X_weight_scale_2.

FP8    X F8_E4M3, a scale of one element
NVFP4  X U8 [experts, inputs / 2, outputs]: two inputs in a byte; scales [experts, inputs / 16, outputs]; X_weight_scale_2 may
       have an element for each expert

Scales of activations and of the KV cache are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import (
    config_entries,
    dropped_scales,
    method_of,
    plain_dtype,
    quantisation_entry,
    recogniser,
    setting,
    unsupported,
)
from weightsmith._models.formats.decoded import (
    CHUNK_ELEMENTS,
    F32,
    DecodedTensors,
    QuantisedModel,
    Weight,
    bands,
    read_all,
    refuse_transposed,
)
from weightsmith._models.formats.matrices import MXFP4_GROUP, NVFP4_GROUP
from weightsmith._models.formats.scaled import FACTOR, TENSOR, ScaledWeight, Scheme, read_scaled
from weightsmith.abc.stored import Config, Rows, Specs, StoredFormat, Wrapped
from weightsmith.abc.tensors import Tensors

_SIDE = 128
_SCHEMES = [
    Scheme("float8", "F8_E4M3", TENSOR, scales=("F32",)),
    Scheme("float8", "F8_E4M3", (1, None), scales=("F32",)),
    Scheme("float8", "F8_E4M3", (_SIDE, _SIDE), scales=("F32",)),
    Scheme("float8", "F8_E4M3", (1, MXFP4_GROUP), scales=("U8",)),
    Scheme("float4", "U8", (1, NVFP4_GROUP), scales=("F8_E4M3",), multiplied=True),
]
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
"""Values of quant_algo. The shape and dtype of the scales of a weight tell which scheme it has."""


_SCALE, _INPUT_SCALE = "_weight_scale", "_input_scale"
"""Ends of the names of the parts of stacked experts: X_weight_scale, …"""


_METHODS = ("modelopt", "modelopt_fp4")


def _is_of_cache_alone(entry: Mapping[str, Any]) -> bool:
    """True if the KV cache is quantised, and weights are plain."""
    return entry.get("quant_algo") is None and bool(entry.get("kv_cache_quant_algo") or entry.get("kv_cache_scheme"))


def _recognises(config: Config, specs: Specs) -> bool:
    """Weights are codes; or they are plain, and the entry in config.json is that of a KV cache with scales."""
    if _recognises_codes(config, specs):
        return True
    is_of_cache = any(_is_of_cache_alone(entry) for _, entry in config_entries(config))
    return method_of(config) in _METHODS and is_of_cache and any(name.endswith((".k_scale", ".v_scale")) for name in specs)


def is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name in ("F8_E4M3", "U8") and (spec.name.endswith(".weight") or _is_stack(spec))


def _is_stack(spec: TensorSpec) -> bool:
    return len(spec.shape) == 3 and ".experts." in spec.name and spec.name.endswith("_proj")


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    if _is_of_cache_alone(entry):
        return [], [Finding("the KV cache's quantisation is dropped: plain weights have none", f"{where}: {place}")]
    algorithm = entry.get("quant_algo")
    upper = algorithm.upper() if isinstance(algorithm, str) else algorithm  # some exports have fp8_pb_wo
    setting({**entry, "quant_algo": upper}, "quant_algo", None, _ALGORITHMS, where)
    return _SCHEMES, []


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    refuse_transposed(config, "ModelOpt", where)
    if smoothed := next((name for name in stored.specs if name.endswith(".pre_quant_scale")), ""):
        raise unsupported(f"tensor {show(smoothed)} scales activations before its layer: such weights are not read", where)
    model = QuantisedModel(stored, config, where)
    stacks = [_stack(model, spec) for spec in model.specs.values() if is_codes(spec) and _is_stack(spec)]
    if not stacks:
        return _READ(stored, config, where)
    dropped = [name for weight in stacks if (name := weight.spec.name + _INPUT_SCALE) in model.specs]
    if any(is_codes(spec) and not _is_stack(spec) for spec in model.specs.values()):
        wrapped = _READ(DecodedTensors(stored, stacks, dropped, where), config, where)
    else:
        place, entry = quantisation_entry(config, where)
        read_entry(entry, place, where)
        wrapped = model.decoded(stacks, "ModelOpt", (), dropped)
    return replace(wrapped, notes=(*wrapped.notes, *dropped_scales(dropped, where)))


_READ = read_scaled(read_entry)


# ---- stacked experts


@dataclass(frozen=True, slots=True)
class StackedFloat4(Weight):
    """The experts of a layer: [experts, inputs, outputs]. stored: codes, scales, and the factors of these."""

    preferred_rows: ClassVar[int] = NVFP4_GROUP

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        from weightsmith._kernels.codes import TABLES

        experts, inputs, outputs = self.spec.shape
        table, factors = TABLES["float4"], np.resize(read_all(stored, self.stored[2]), experts)
        rows = max(NVFP4_GROUP, CHUNK_ELEMENTS // outputs // NVFP4_GROUP * NVFP4_GROUP)
        for top, end, skip, target in bands(first, values, outputs, rows, NVFP4_GROUP):
            codes = read_all(stored, self.stored[0], top // 2 * outputs, end // 2 * outputs).reshape(-1, outputs)
            groups = np.arange(top // NVFP4_GROUP, end // NVFP4_GROUP)
            scales = read_all(stored, self.stored[1], groups[0] * outputs, (groups[-1] + 1) * outputs).astype(np.float32)
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                scales = scales.reshape(-1, outputs) * factors[groups * NVFP4_GROUP // inputs, None]
                numbers = np.stack([table[codes & 15], table[codes >> 4]], 1).reshape(-1, NVFP4_GROUP, outputs)
                numbers *= scales[:, None]
            target[:] = numbers.reshape(-1)[skip : skip + target.size]


def _stack(model: QuantisedModel, spec: TensorSpec) -> Weight:
    name, scale, (experts, inputs, outputs) = spec.name, spec.name + _SCALE, spec.shape
    dtype = plain_dtype(model.config)
    if not spec.size:
        raise model.damaged(f"tensor {show(name)} is empty")
    if spec.dtype.name == "U8":
        inputs *= 2
        model.part(scale, ("F8_E4M3",), (experts, inputs // NVFP4_GROUP, outputs))
        if inputs % NVFP4_GROUP:
            raise model.damaged(f"tensor {show(name)} has {inputs:,} inputs, not a multiple of {NVFP4_GROUP}")
        factor = f"{name}_weight{FACTOR}"
        factors = model.specs.get(factor)
        model.part(factor, ("F32",), (experts,) if factors is not None and factors.shape == (experts,) else _one(factors))
        return StackedFloat4(TensorSpec(name, F32, (experts, inputs, outputs)), (name, scale, factor), dtype)
    model.part(scale, ("F32",), _one(model.specs.get(scale)))
    whole = TensorSpec(name, F32, spec.shape)
    return ScaledWeight(whole, (name, scale), dtype, "float8", (experts * inputs, outputs))


def _one(spec: TensorSpec | None) -> tuple[int, ...]:
    """The shape of a tensor of one element, as it is if it is one."""
    return spec.shape if spec is not None and spec.size == 1 else (1,)


_recognises_codes = recogniser(is_codes, *_METHODS)
FORMAT = StoredFormat("modelopt", "ModelOpt", _recognises, read)
