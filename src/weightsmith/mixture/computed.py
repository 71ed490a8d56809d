"""Tensors that no checkpoint has: planned by name and shape, filled in while the engine does all else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from weightsmith.checkpoint import Checkpoint
from weightsmith.formats.safetensors import StoredTensor
from weightsmith.planner.steps import COMPUTED
from weightsmith.tensors import TensorSpec


class Unstored(Checkpoint):
    """A model that is in no file: those who inherit say what its tensors are, and give their bytes."""

    def __init__(self) -> None:
        self.ref = COMPUTED
        self.folder = Path(os.devnull)
        self.revision = ""
        self.config: dict[str, Any] | None = None
        self.files = self.ignored = self.weights = ()
        self.metadata: dict[str, str] = {}
        self.quantised = None
        self.tensors: dict[str, StoredTensor] = {}

    def _enter(self, spec: TensorSpec) -> None:
        """A tensor that it has."""
        self.tensors[spec.name] = StoredTensor(spec, self.folder, 0)

    def location(self, name: str) -> tuple[int, int]:
        return -1, 0

    def close(self) -> None:
        pass


class Computed(Unstored):
    """A model whose tensors are in memory, for steps that read what was computed and not stored.

    `add` says what it will hold, which is all that a plan needs; `fill` gives the numbers.

    identify  the identity of what the numbers follow from: known before they are
    """

    def __init__(self) -> None:
        super().__init__()
        self.identify: Callable[[], str] = str
        self._data: dict[str, np.ndarray] = {}

    def add(self, spec: TensorSpec) -> None:
        """A tensor that will be filled in."""
        self._enter(spec)

    def fill(self, name: str, values: np.ndarray) -> None:
        """Give a tensor its numbers, rounded once to its dtype. values: any float dtype, of the tensor's shape."""
        spec = self.tensors[name].spec
        assert values.shape == spec.shape, (name, values.shape, spec.shape)
        self._data[name] = np.ascontiguousarray(values.astype(spec.dtype.numpy)).reshape(-1).view(np.uint8)

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """All of it is filled in."""
        return len(self._data) == len(self.tensors)

    @property
    def header_hash(self) -> str:  # type: ignore[override]
        """Of names, dtypes and shapes."""
        return xxhash.xxh3_128_hexdigest(repr([str(t.spec) for t in self.tensors.values()]).encode())

    @property
    def state_hash(self) -> str:  # type: ignore[override]
        """Of what the numbers follow from too: work that was interrupted goes on only with the same ones."""
        return xxhash.xxh3_128_hexdigest(f"{self.header_hash} {self.identify()}".encode())

    def read_into(self, name: str, start_byte: int, buffer: Any) -> None:
        out = np.frombuffer(buffer, np.uint8)
        out[:] = self._data[name][start_byte : start_byte + out.size]
