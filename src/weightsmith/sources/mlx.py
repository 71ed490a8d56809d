"""MLX's weights: rows of codes packed along the inputs, in groups with a scale.

X.weight U32 [outputs, inputs · bits / 32]   each row is a stream of bits, the lowest bit of a word first
X.scales     [outputs, inputs / group_size]
X.biases     [outputs, inputs / group_size]  of mode affine

mode    bits           group_size   a weight is
affine  2 3 4 5 6 8    any          code · scale + bias
mxfp4   4              32           float4 · 2 ^ (scale - 127)
mxfp8   8              32           float8 (E4M3) · 2 ^ (scale - 127)
nvfp4   4              16           float4 · scale, a float8 (E4M3)

config.json has the settings of the model, and under the names of modules those that differ. Embeddings are quantised too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.errors import FormatError, Unsupported
from weightsmith.formats.files import show
from weightsmith.formats.quantised import (
    DAMAGED_CHECKPOINT,
    PLAIN_FIX,
    config_entries,
    group_size_of,
    part_of,
    plain_dtype,
    quantisation_entry,
    setting,
)
from weightsmith.sources.base import Tensors
from weightsmith.sources.decoded import F32, Weight, decoded, read_all
from weightsmith.sources.kind import Wrapped, Wrapper
from weightsmith.tensors import DTYPES, DType, TensorSpec

CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at a time, of one row at least."""

_BITS = (2, 3, 4, 5, 6, 8)
_FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and group size of the modes that have only one."""
_MODES = ("affine", *_FIXED)
FLOAT4 = np.array([*(0, 0.5, 1, 1.5, 2, 3, 4, 6), *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6)], np.float32)
"""The values of float4's codes."""
FLOAT8 = np.arange(256, dtype=np.uint8).view(DTYPES["F8_E4M3"].numpy).astype(np.float32)
"""The values of the codes of float8 (E4M3)."""


@dataclass(frozen=True, slots=True)
class MlxWeight:
    """One weight.

    spec        the plain weight
    stored      weight, scales; biases of mode affine
    natural_dtype  config.json's dtype, else that of the scales
    mode        `affine`, `mxfp4`, …
    bits        of a code
    group_size  inputs of a group
    """

    spec: TensorSpec
    stored: tuple[str, ...]
    natural_dtype: DType
    mode: str
    bits: int
    group_size: int
    preferred_rows: int = 1

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith.kernels.packed import dequantise_rows

        inputs, table = self.spec.shape[1], self._table()
        width, groups = inputs * self.bits // 32, inputs // self.group_size
        rows = max(1, CHUNK_ELEMENTS // inputs)
        row, end = first // inputs, first + values.size
        while row * inputs < end:
            bottom = min(row + rows, -(-end // inputs))
            start = max(first, row * inputs)
            words = read_all(stored, self.stored[0], row * width, bottom * width)
            scales = self._scales(read_all(stored, self.stored[1], row * groups, bottom * groups))
            biases = np.zeros_like(scales)
            if self.mode == "affine":
                biases = read_all(stored, self.stored[2], row * groups, bottom * groups).astype(np.float32)
            part = values[start - first : bottom * inputs - first]
            dequantise_rows(words, width, self.bits, table, self.group_size, scales, biases, start - row * inputs, part)
            row = bottom

    def _table(self) -> npt.NDArray[np.float32]:
        """float32 [2 ** bits]: the number that each code is."""
        if self.mode == "affine":
            return np.arange(1 << self.bits, dtype=np.float32)
        return FLOAT4 if self.bits == 4 else FLOAT8

    def _scales(self, found: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if self.mode.startswith("mx"):
            powers: npt.NDArray[np.float32] = np.ldexp(np.float32(1), found.astype(np.int32) - 127)
            return np.where(found == 255, np.float32(np.nan), powers)
        return (found.view(DTYPES["F8_E4M3"].numpy) if self.mode == "nvfp4" else found).astype(np.float32)


def _recognises(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> bool:
    entries = config_entries(config)
    named = any(isinstance(entry.get("quant_method"), str) for _, entry in entries)
    return bool(entries) and not named and any(_is_quantised(name, specs) for name in specs)


def _is_quantised(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """The name is that of the scales of codes in 32-bit words."""
    weight = specs.get(name.removesuffix(".scales") + ".weight")
    return name.endswith(".scales") and weight is not None and weight.dtype.name == "U32"


def _wrap(stored: Tensors, config: Mapping[str, Any], where: str) -> Wrapped:
    _, entry = quantisation_entry(config, where)
    specs = stored.specs
    weights: list[Weight] = [
        _weight(specs, name.removesuffix(".scales"), entry, config, where) for name in specs if _is_quantised(name, specs)
    ]
    return decoded(stored, weights, config, where, kind="MLX", parts=(".weight", ".scales", ".biases"))


def _weight(
    specs: Mapping[str, TensorSpec], module: str, entry: Mapping[str, Any], config: Mapping[str, Any], where: str
) -> MlxWeight:
    own = entry.get(module)
    settings = {"group_size": 64, "bits": 4, **own} if isinstance(own, Mapping) else entry  # the defaults of MLX's layers
    mode = setting(settings, "mode", "affine", _MODES, where)
    if mode == "affine":
        bits, group_size = setting(settings, "bits", None, _BITS, where), group_size_of(settings, where)
    else:
        bits, group_size = _FIXED[mode]
    codes = specs[f"{module}.weight"]
    if len(codes.shape) != 2:
        what = f"tensor {show(codes.name)} is {list(codes.shape)}: experts that MLX has stacked (switch_mlp) are not read"
        raise Unsupported(what, where=where, fix=PLAIN_FIX)
    outputs, width = codes.shape
    inputs = 32 * width // bits
    if inputs * bits != 32 * width or group_size < 1 or inputs % group_size:
        what = f"tensor {show(codes.name)} is {list(codes.shape)}, which {bits} bits in groups of {group_size} do not fill"
        raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)
    dtypes = ("U8",) if mode != "affine" else ("F32", "BF16", "F16")
    shape = (outputs, inputs // group_size)
    scales = part_of(specs, f"{module}.scales", dtypes, shape, where)
    names = [codes.name, scales.name]
    if mode == "affine":
        names.append(part_of(specs, f"{module}.biases", (scales.dtype.name,), shape, where).name)
    dtype = plain_dtype(config, scales.dtype if mode == "affine" else DTYPES["BF16"])
    return MlxWeight(TensorSpec(codes.name, F32, (outputs, inputs)), tuple(names), dtype, mode, bits, group_size)


WRAPPER = Wrapper("MLX", _recognises, _wrap)
