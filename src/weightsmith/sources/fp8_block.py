"""FP8 weights as float32: each read multiplies the codes of the elements it needs by their scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith.formats.fp8 import Fp8Layout, Fp8Weight, fp8_layout, names_fp8
from weightsmith.sources.base import Tensors, check_range, digest, spec_of
from weightsmith.sources.kind import Wrapped, Wrapper
from weightsmith.tensors import DTYPES, DType, TensorSpec

if TYPE_CHECKING:
    from weightsmith.sources.base import Buffer

CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at a time by each reading thread: 256 KiB of codes and 1 MiB of float32."""

_F32 = DTYPES["F32"]


class DequantisedFp8:
    """A source that dequantises another one's FP8 weights to F32, hides their scales, and passes all else through.

    specs     the plain model's tensors: weights in F32, no scales
    identity  the stored source's, and the layout of the scales
    state     the same
    paths     the stored source's

    Thread-safe if the stored source is. A read needs memory for `CHUNK_ELEMENTS` elements and their scales.
    """

    def __init__(self, stored: Tensors, layout: Fp8Layout, where: str) -> None:
        """
        stored  the source that holds codes and scales; closed with this one
        layout  what `fp8_layout` found in its specs
        where   the model as the user named it, for messages
        """
        self._stored, self._where = stored, where
        self._weights = {weight.name: weight for weight in layout.weights}
        self._dtype = layout.dtype
        hidden = {*layout.dropped, *(weight.scale for weight in layout.weights)}
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, _F32, spec.shape) if name in self._weights else spec
            for name, spec in stored.specs.items()
            if name not in hidden
        }
        facts = ["fp8", [(weight.name, weight.scale, weight.block) for weight in layout.weights], layout.dtype.name]
        self.identity = digest([stored.identity, facts])
        self.paths: tuple[Path, ...] = stored.paths

    @property
    def state(self) -> str:
        return digest([self.identity, self._stored.state])

    def kept_as(self, name: str) -> DType:
        """The default output dtype: config.json's for a dequantised tensor."""
        return self._dtype if self._weight(name) else self._stored.kept_as(name)

    def location(self, name: str) -> tuple[int, int] | None:
        """(file descriptor, offset) of a tensor that is passed through; None for a dequantised one."""
        return None if self._weight(name) else self._stored.location(name)

    def preferred_rows(self, name: str) -> int:
        """The height of a block, so that no scale is read twice; 1 if one block is the whole matrix."""
        weight = self._weight(name)
        if weight is None:
            return self._stored.preferred_rows(name)
        return weight.block[0] if weight.block[0] < self.specs[name].shape[0] else 1

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        """Fill `out` with the bytes of a tensor, in the dtype of `specs`, from `start_byte` on.

        out  writable, C-contiguous bytes; any range of the tensor, not only whole elements

        Raises NotFound for an unknown tensor, ParameterError for a range outside the tensor, else as the stored source.
        """
        weight = self._weight(name)
        if weight is None:
            self._stored.read_into(name, start_byte, out)
            return
        target = np.frombuffer(out, np.uint8)
        check_range(self.specs[name], start_byte, target.size, self._where)
        first, end = start_byte // 4, -(-(start_byte + target.size) // 4)
        buffer = np.empty(min(CHUNK_ELEMENTS, end - first), np.float32)
        done = 0
        while done < target.size:
            values = buffer[: end - first]
            self._dequantise(weight, first, values)
            part = values.view(np.uint8)[start_byte + done - first * 4 :][: target.size - done]
            target[done : done + part.size] = part
            done += part.size
            first += values.size

    def check_unchanged(self) -> None:
        """As the stored source's."""
        self._stored.check_unchanged()

    def close(self) -> None:
        """Close the stored source."""
        self._stored.close()

    def _weight(self, name: str) -> Fp8Weight | None:
        return self._weights.get(spec_of(self.specs, name, self._where).name)

    def _dequantise(self, weight: Fp8Weight, first: int, values: npt.NDArray[np.float32]) -> None:
        """values = elements first … first + n of a weight; float32 [n]."""
        from weightsmith.kernels.codecs import decode
        from weightsmith.kernels.fp8 import dequantise

        cols = self.specs[weight.name].shape[1]
        block_rows, block_cols = weight.block
        scale_cols = -(-cols // block_cols)
        band, last = first // cols // block_rows, (first + values.size - 1) // cols // block_rows
        dtype = self._stored.specs[weight.scale].dtype
        raw = np.empty((last + 1 - band) * scale_cols * dtype.itemsize, np.uint8)
        self._stored.read_into(weight.scale, band * scale_cols * dtype.itemsize, raw)
        scales = np.empty((last + 1 - band) * scale_cols, np.float32)
        decode(raw, dtype.code, 0, scales.size, scales)
        codes = np.empty(values.size, np.uint8)
        self._stored.read_into(weight.name, first, codes)
        dequantise(codes, first, cols, scales, scale_cols, block_rows, block_cols, values)


def _recognises(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> bool:
    return names_fp8(config) and any(spec.dtype.name.startswith("F8_") for spec in specs.values())


def _wrap(stored: Tensors, config: Mapping[str, Any], where: str) -> Wrapped:
    layout = fp8_layout(config, stored.specs, where)
    if layout is None:  # `_recognises` has checked this
        raise AssertionError(where)
    return Wrapped(DequantisedFp8(stored, layout, where), layout.config, layout.notes)


WRAPPER = Wrapper("FP8 with scales", _recognises, _wrap)
