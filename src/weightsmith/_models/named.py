"""Tensors by name, as a dict has values: for checkpoints, and for results of commands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, KeysView, Mapping
from typing import TYPE_CHECKING

from weightsmith._base.tensors import TensorSpec

if TYPE_CHECKING:
    import numpy as np


class NamedTensors(ABC):
    """Tensors by name: `model["lm_head.weight"]`, `in`, `len`, iteration, `keys`, `items`.

    Only `[]`, `items` and `read` read tensor data, one tensor at a time. Not a `Mapping`: a recipe may be one.
    """

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → dtype and shape, in model order."""

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor as a new numpy array (ml_dtypes for bf16 and fp8), or some of its rows.

        Raises NotFound for an unknown tensor.
        """

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __bool__(self) -> bool:
        return True  # A checkpoint is not None, however few tensors it has.

    def keys(self) -> KeysView[str]:
        """The names of the tensors, in model order."""
        return self.specs.keys()

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors, in model order. Each tensor is read when it is reached."""
        return ((name, self[name]) for name in self.specs)
