"""A source with a LoRA adapter applied: W + scaling · B @ A, computed on read; with DoRA, its rows scaled to given norms."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightsmith.formats.hf_folder import natural_key
from weightsmith.sources.base import Tensors, check_range, digest, read, spec_of
from weightsmith.tensors import DTYPES, DType, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from weightsmith.sources.base import Buffer


@dataclass(frozen=True, slots=True)
class Update:
    """scaling · B @ A, or its transpose, to add to a matrix.

    a, b        the adapter's tensors A [rank, inputs] and B [outputs, rank]
    scaling     factor on the product
    transposed  the matrix is [inputs, outputs]: (B @ A)ᵀ is added
    magnitude   the adapter's tensor of the norms that the rows of the sum are scaled to (DoRA); "": they remain as they are
    """

    a: str
    b: str
    scaling: float
    transposed: bool
    magnitude: str = ""


@dataclass(frozen=True, slots=True)
class AdaptedTensor:
    """The origin of a tensor of an adapted source.

    base         the corresponding tensor of the base, which determines the output dtype
    replacement  the adapter's tensor that replaces it; "" for none
    update       the update to add, or None
    """

    base: str
    replacement: str = ""
    update: Update | None = None


class Adapted:
    """A source `base` with an adapter applied.

    Tensors with an update are F32 (F64 if the base tensor is F64): base plus update, rounded once, so a merge does not lose
    the part of the update that 16 bits cannot hold. All others are read unchanged.

    base, adapter  the sources; closed with this one
    origins        name → origin of the tensor
    where          the model as the user named it, for messages
    """

    def __init__(self, base: Tensors, adapter: Tensors, origins: Mapping[str, AdaptedTensor], where: str) -> None:
        self._base, self._adapter, self._where = base, adapter, where
        self._origins = {name: origins[name] for name in sorted(origins, key=natural_key)}
        self.specs: Mapping[str, TensorSpec] = {name: self._spec(name, origin) for name, origin in self._origins.items()}
        changes = [repr((name, origin)) for name, origin in self._origins.items() if origin != AdaptedTensor(name)]
        self.identity = digest([base.identity, adapter.identity, changes])
        self.paths: tuple[Path, ...] = (*base.paths, *adapter.paths)
        self._factors: dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]] = {}
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        return digest([self.identity, self._base.state, self._adapter.state])

    def kept_as(self, name: str) -> DType:
        return self._base.kept_as(self._origin(name).base)

    def preferred_rows(self, name: str) -> int:
        source, stored = self._stored(self._origin(name))
        return source.preferred_rows(stored)

    def location(self, name: str) -> tuple[int, int] | None:
        origin = self._origin(name)
        source, stored = self._stored(origin)
        return source.location(stored) if origin.update is None else None

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        origin, spec = self._origin(name), self.specs[name]
        source, stored = self._stored(origin)
        into = np.frombuffer(out, np.uint8)
        check_range(spec, start_byte, into.size, self._where)
        if origin.update is None:
            source.read_into(stored, start_byte, out)
            return
        from weightsmith.kernels.codecs import BLOCK
        from weightsmith.kernels.lora import add_low_rank

        before = source.specs[stored].dtype
        width, cols = spec.dtype.itemsize, spec.shape[1]
        first, end = start_byte // width, -(-(start_byte + into.size) // width)
        if origin.update.magnitude:  # a norm is of a whole row
            first, end = first // cols * cols, -(-end // cols) * cols
        raw = np.empty((end - first) * before.itemsize, np.uint8)
        source.read_into(stored, first * before.itemsize, raw)
        left, right = self._factors_of(name, origin.update)
        values = np.empty(end - first, spec.dtype.numpy)
        row, total = np.empty(BLOCK, spec.dtype.numpy), np.empty(BLOCK)
        add_low_rank(raw, before.code, first, values.size, left, right, origin.update.scaling, values, row, total)
        if origin.update.magnitude:
            rows = values.reshape(-1, cols)
            norms = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
            wanted = read(self._adapter, origin.update.magnitude, slice(first // cols, end // cols)).astype(np.float64)
            rows *= (wanted / np.where(norms > 0, norms, 1.0))[:, None]
        into[:] = values.view(np.uint8)[start_byte - first * width :][: into.size]

    def check_unchanged(self) -> None:
        self._base.check_unchanged()
        self._adapter.check_unchanged()

    def close(self) -> None:
        self._base.close()
        self._adapter.close()

    def _origin(self, name: str) -> AdaptedTensor:
        return self._origins[spec_of(self.specs, name, self._where).name]

    def _stored(self, origin: AdaptedTensor) -> tuple[Tensors, str]:
        """The source of the unmodified tensor, and its name there."""
        return (self._adapter, origin.replacement) if origin.replacement else (self._base, origin.base)

    def _spec(self, name: str, origin: AdaptedTensor) -> TensorSpec:
        source, stored = self._stored(origin)
        spec = replace(source.specs[stored], name=name)
        return spec if origin.update is None or spec.dtype.name == "F64" else replace(spec, dtype=DTYPES["F32"])

    def _factors_of(self, name: str, update: Update) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
        """left [rows, rank] and right [rank, cols] of the update of a tensor [rows, cols]; cached."""
        with self._lock:
            if name not in self._factors:
                a, b = (read(self._adapter, factor).astype(np.float32) for factor in (update.a, update.b))
                if update.transposed:
                    a, b = b.T, a.T
                self._factors[name] = np.ascontiguousarray(b, np.float64), np.ascontiguousarray(a)
            return self._factors[name]
