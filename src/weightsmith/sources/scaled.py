"""Codes with scales as float32: each read multiplies the values of the codes that it needs by their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.errors import FormatError
from weightsmith.formats.files import DAMAGED
from weightsmith.formats.scaled import ScaledLayout, ScaledWeight, names_scaled, scaled_layout
from weightsmith.sources.base import Tensors, read
from weightsmith.sources.decoded import F32, DecodedTensors
from weightsmith.sources.kind import Wrapped, Wrapper
from weightsmith.tensors import DType, TensorSpec

CHUNK_ELEMENTS = 1 << 18
"""Elements to decode at a time: at most 256 KiB of codes."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """One weight.

    layout   which tensors it is stored in, and what each scale is for
    natural_dtype  config.json's dtype
    """

    layout: ScaledWeight
    natural_dtype: DType

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.layout.name, F32, self.layout.shape)

    @property
    def stored(self) -> tuple[str, ...]:
        return self.layout.parts

    @property
    def preferred_rows(self) -> int:
        """The height of a block, so that no scale is read twice; 1 if one block is the whole matrix."""
        height = self.layout.block[0]
        return height if height < self.layout.shape[0] else 1

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith.kernels.blocks import TABLES, dequantise

        weight = self.layout
        self._check_extent(stored)
        cols, (block_rows, block_cols) = weight.shape[1], weight.block
        across = -(-cols // block_cols)
        for start in range(0, values.size, CHUNK_ELEMENTS):
            part, at = values[start : start + CHUNK_ELEMENTS], first + start
            band, last = at // cols // block_rows, (at + part.size - 1) // cols // block_rows
            scales = self._scales(stored, band * across, (last + 1) * across)
            begin, end = at * weight.bits // 8, -(-(at + part.size) * weight.bits // 8)
            codes = np.empty(end - begin, np.uint8)
            stored.read_into(weight.codes, begin, codes)
            if not weight.zeros:
                dequantise(codes, TABLES[weight.kind], at, cols, scales, across, block_rows, block_cols, part)
                continue
            dequantise(codes, TABLES[weight.kind], at, cols, np.ones_like(scales), across, block_rows, block_cols, part)
            row, col = np.divmod(np.arange(at, at + part.size), cols)
            block = (row - band) * across + col // block_cols
            part -= self._zeros(stored, band, last + 1)[block]
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                part *= scales[block]

    def _zeros(self, stored: Tensors, first: int, end: int) -> npt.NDArray[np.float32]:
        """The values of the codes of zero in rows first … end: float32 [blocks], in row-major order."""
        from weightsmith.kernels.blocks import TABLES

        weight, bits = self.layout, self.layout.bits
        per_word, across = 32 // bits, stored.specs[weight.zeros].shape[1]
        words = np.empty((-(-end // per_word) - first // per_word, across), "<u4")
        stored.read_into(weight.zeros, first // per_word * across * 4, words.view(np.uint8).reshape(-1))
        rows = np.arange(first, end)
        shifts = (rows % per_word * bits).astype(np.uint32)[:, None]
        codes = words[rows // per_word - first // per_word] >> shifts & np.uint32((1 << bits) - 1)
        return np.asarray(TABLES[weight.kind][codes.reshape(-1)])

    def _scales(self, stored: Tensors, first: int, end: int) -> npt.NDArray[np.float32]:
        """Scales first … end, by which the values of the codes are multiplied."""
        from weightsmith.kernels.codecs import decode

        dtype = stored.specs[self.layout.scale].dtype
        raw = np.empty((end - first) * dtype.itemsize, np.uint8)
        stored.read_into(self.layout.scale, first * dtype.itemsize, raw)
        if dtype.name == "U8":  # E8M0: 2^(code - 127); 255 is NaN
            powers = np.ldexp(np.float32(1), np.minimum(raw, 254).astype(np.int32) - 127)
            return np.where(raw == 255, np.float32(np.nan), powers).astype(np.float32)
        scales = np.empty(end - first, np.float32)
        decode(raw, dtype.code, 0, scales.size, scales)
        if self.layout.divisor:
            with np.errstate(all="ignore"):
                scales /= read(stored, self.layout.divisor).reshape(-1)[0]
        return scales

    def _check_extent(self, stored: Tensors) -> None:
        """Raise FormatError if the stored shape is not that of the codes."""
        if self.layout.extent:
            shape = read(stored, self.layout.extent).tolist()
            if shape != list(self.layout.shape):
                what = f"{self.layout.extent} is {shape}, and the codes are for {list(self.layout.shape)}"
                raise FormatError(what, fix=DAMAGED)


def dequantised(stored: Tensors, layout: ScaledLayout, where: str) -> DecodedTensors:
    """The plain model that `scaled_layout` has found in the specs of `stored`."""
    return DecodedTensors(stored, [ScaledMatrix(weight, layout.dtype) for weight in layout.weights], layout.dropped, where)


def _wrap(stored: Tensors, config: Mapping[str, Any], where: str) -> Wrapped:
    layout = scaled_layout(config, stored.specs, where)
    if layout is None:  # `names_scaled` has checked this
        raise AssertionError(where)
    return Wrapped(dequantised(stored, layout, where), layout.config, layout.notes)


WRAPPER = Wrapper("codes with scales", names_scaled, _wrap)
