"""MLX's weights as numbers. The package describes the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.config import (
    config_entries,
    damaged,
    group_size_of,
    part_of,
    plain_dtype,
    quantisation_entry,
    setting,
    unsupported,
)
from weightsmith._models.formats.decoded import F32, Weight, bands, decoded, read_all
from weightsmith._models.formats.numbers import MXFP4_GROUP, NVFP4_GROUP, powers_of_two
from weightsmith.abc.stored import Config, Specs, Wrapped
from weightsmith.abc.tensors import Tensors

_BITS = (2, 3, 4, 5, 6, 8)
_FIXED = {"mxfp4": (4, MXFP4_GROUP), "mxfp8": (8, MXFP4_GROUP), "nvfp4": (4, NVFP4_GROUP)}
"""Bits and group size of the modes that have only one."""
_MODES = ("affine", *_FIXED)


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
        from weightsmith._kernels.packed import dequantise_rows

        inputs, table = self.spec.shape[1], self._table()
        width, groups = inputs * self.bits // 32, inputs // self.group_size
        for row, bottom, skip, part in bands(first, values, inputs):
            words = read_all(stored, self.stored[0], row * width, bottom * width)
            scales = self._scales(read_all(stored, self.stored[1], row * groups, bottom * groups))
            biases = np.zeros_like(scales)
            if self.mode == "affine":
                biases = read_all(stored, self.stored[2], row * groups, bottom * groups).astype(np.float32)
            dequantise_rows(words, width, self.bits, table, self.group_size, scales, biases, skip, part)

    def _table(self) -> npt.NDArray[np.float32]:
        """float32 [2 ** bits]: the number that each code is."""
        from weightsmith._kernels.codes import TABLES

        return np.arange(1 << self.bits, dtype=np.float32) if self.mode == "affine" else TABLES[f"float{self.bits}"]

    def _scales(self, found: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if self.mode.startswith("mx"):
            return powers_of_two(found)
        return (found.view(DTYPES["F8_E4M3"].numpy) if self.mode == "nvfp4" else found).astype(np.float32)


def recognises(config: Config, specs: Specs) -> bool:
    entries = config_entries(config)
    named = any(isinstance(entry.get("quant_method"), str) for _, entry in entries)
    return bool(entries) and not named and any(is_quantised(name, specs) for name in specs)


def is_quantised(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """The name is that of the scales of codes in 32-bit words."""
    weight = specs.get(name.removesuffix(".scales") + ".weight")
    return name.endswith(".scales") and weight is not None and weight.dtype.name == "U32"


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    _, entry = quantisation_entry(config, where)
    specs = stored.specs
    weights: list[Weight] = [
        _weight(specs, name.removesuffix(".scales"), entry, config, where) for name in specs if is_quantised(name, specs)
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
        raise unsupported(what, where)
    outputs, width = codes.shape
    inputs = 32 * width // bits
    if inputs * bits != 32 * width or group_size < 1 or inputs % group_size:
        what = f"tensor {show(codes.name)} is {list(codes.shape)}, which {bits} bits in groups of {group_size} do not fill"
        raise damaged(what, where)
    dtypes = ("U8",) if mode != "affine" else ("F32", "BF16", "F16")
    shape = (outputs, inputs // group_size)
    scales = part_of(specs, f"{module}.scales", dtypes, shape, where)
    names = [codes.name, scales.name]
    if mode == "affine":
        names.append(part_of(specs, f"{module}.biases", (scales.dtype.name,), shape, where).name)
    dtype = plain_dtype(config, scales.dtype if mode == "affine" else DTYPES["BF16"])
    return MlxWeight(TensorSpec(codes.name, F32, (outputs, inputs)), tuple(names), dtype, mode, bits, group_size)
