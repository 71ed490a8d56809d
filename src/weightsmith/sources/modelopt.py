"""NVIDIA ModelOpt's weights, FP8 and NVFP4.

FP8    X.weight F8_E4M3 [outputs, inputs], X.weight_scale F32 of one element
NVFP4  X.weight U8 [outputs, inputs / 2]: two float4 in a byte, the first in the low half; X.weight_scale F8_E4M3
       [outputs, inputs / 16]; X.weight_scale_2 F32 of one element, by which each of these scales is multiplied

Scales of activations and of the KV cache are dropped. Releases that describe the quantisation in hf_quant_config.json alone are
not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.errors import Finding, FormatError, Unsupported
from weightsmith.formats.files import show
from weightsmith.formats.quantised import (
    DAMAGED_CHECKPOINT,
    PLAIN_FIX,
    method_of,
    part_of,
    plain_dtype,
    quantisation_entry,
    setting,
)
from weightsmith.sources.base import Tensors
from weightsmith.sources.decoded import F32, Weight, decoded, read_all
from weightsmith.sources.kind import Wrapped, Wrapper
from weightsmith.sources.mlx import FLOAT4, FLOAT8
from weightsmith.tensors import DType, TensorSpec

CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at a time, of one row at least."""

_ACTIVATIONS = ("input_scale", "output_scale", "k_scale", "v_scale", "k_bias", "v_bias")


@dataclass(frozen=True, slots=True)
class ModelOptWeight:
    """One weight: codes, scales, and for NVFP4 the factor of the scales."""

    spec: TensorSpec
    stored: tuple[str, ...]
    natural_dtype: DType
    preferred_rows: int = 1

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith.kernels.packed import dequantise_rows

        inputs, packed = self.spec.shape[1], len(self.stored) == 3
        bits, table, group = (4, FLOAT4, 16) if packed else (8, FLOAT8, inputs)
        row, end = first // inputs, first + values.size
        while row * inputs < end:
            bottom = min(row + max(1, CHUNK_ELEMENTS // inputs), -(-end // inputs))
            start, width = max(first, row * inputs), inputs * bits // 8
            words = np.empty((bottom - row) * width, np.uint8)
            stored.read_into(self.stored[0], row * width, words)
            if packed:
                scales = read_all(stored, self.stored[1], row * inputs // 16, bottom * inputs // 16).astype(np.float32)
                with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                    scales *= read_all(stored, self.stored[2])[0]
            else:
                scales = np.repeat(read_all(stored, self.stored[1]), bottom - row)
            part, biases = values[start - first : bottom * inputs - first], np.zeros_like(scales)
            dequantise_rows(words.view(np.uint32), width // 4, bits, table, group, scales, biases, start - row * inputs, part)
            row = bottom


def _recognises(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> bool:
    return method_of(config) in ("modelopt", "modelopt_fp4") and any(map(_is_codes, specs.values()))


def _is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name in ("F8_E4M3", "U8") and spec.name.endswith(".weight")


def _wrap(stored: Tensors, config: Mapping[str, Any], where: str) -> Wrapped:
    _, entry = quantisation_entry(config, where)
    setting(entry, "quant_algo", None, ("FP8", "NVFP4", "MIXED_PRECISION"), where)
    specs, dtype = stored.specs, plain_dtype(config)
    smoothed = [name for name in specs if name.endswith(".pre_quant_scale")]
    if smoothed:
        what = f"tensor {show(smoothed[0])} scales activations before its layer: such weights are not read"
        raise Unsupported(what, where=where, fix=PLAIN_FIX)
    weights: list[Weight] = [_weight(specs, spec, dtype, where) for spec in specs.values() if _is_codes(spec)]
    dropped = [name for name in specs if name.rpartition(".")[2] in _ACTIVATIONS and specs[name].size == 1]
    notes = []
    if dropped:
        what = f"{len(dropped)} scale(s) of activations or of the KV cache are dropped: plain weights have none"
        notes = [Finding(what, where, (f"the first is {show(dropped[0])}",))]
    parts = (".weight", ".weight_scale", ".weight_scale_2")
    return decoded(stored, weights, config, where, kind="ModelOpt", parts=parts, dropped=dropped, notes=notes)


def _weight(specs: Mapping[str, TensorSpec], codes: TensorSpec, dtype: DType, where: str) -> ModelOptWeight:
    outputs, width = part_of(specs, codes.name, ("F8_E4M3", "U8"), (None, None), where).shape
    packed = codes.dtype.name == "U8"
    inputs = 2 * width if packed else width
    if inputs % (16 if packed else 4):
        what = f"tensor {show(codes.name)} is {list(codes.shape)}: rows of {inputs:,} elements are not read"
        raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)
    names = [codes.name, f"{codes.name}_scale"]
    if packed:
        part_of(specs, names[1], ("F8_E4M3",), (outputs, inputs // 16), where)
        names.append(f"{codes.name}_scale_2")
    last = specs.get(names[-1])
    part_of(specs, names[-1], ("F32",), (1,) if last is not None and last.shape == (1,) else (), where)
    return ModelOptWeight(TensorSpec(codes.name, F32, (outputs, inputs)), tuple(names), dtype)


WRAPPER = Wrapper("ModelOpt", _recognises, _wrap)
