"""The form of a case, and what references are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Case:
    """One method with one set of parameters.

    name       unique; begins with the method's name
    method     as in recipes
    shared     resolved parameters of the tensor, all of them
    models     resolved parameters of each input; {} for a base
    reference  inputs (any floating dtype, one logical matrix) → float64 result, written apart from the kernels
    base       input 0 is a base
    ulp        allowed error of bf16 output
    identity   merging a model with itself gives the model, bit for bit
    dims       numbers of dimensions the case is meant for
    tensor     its name
    """

    name: str
    method: str
    shared: Mapping[str, Any]
    models: Sequence[Mapping[str, Any]]
    reference: Callable[[Arrays], np.ndarray]
    base: bool = True
    ulp: float = 1.0
    identity: bool = True
    dims: tuple[int, ...] = (0, 1, 2, 3)
    tensor: str = "w"

    @property
    def inputs(self) -> int:
        """The base included."""
        return len(self.models)


def fine_tunes(shape: tuple[int, ...], count: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> list[np.ndarray]:
    """A base and `count` perturbations, with realistic magnitudes."""
    rng = np.random.default_rng(seed)
    base = rng.normal(0, 0.02, shape)
    return [base.astype(dtype)] + [(base + rng.normal(0, 1e-3, shape)).astype(dtype) for _ in range(count)]


def mixed(shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    """As `fine_tunes`, by turns in float32 and bf16.

    Merged into F32: rows of float64. Tests that need such rows share these dtypes, since each set of them is another variant
    of every kernel to compile.
    """
    return [a.astype(ml_dtypes.bfloat16 if i % 2 else np.float32) for i, a in enumerate(fine_tunes(shape, count, np.float64))]


def f64(arrays: Arrays) -> list[np.ndarray]:
    """Each input as float64."""
    return [a.astype(np.float64) for a in arrays]


def deltas(arrays: Arrays) -> list[np.ndarray]:
    """Deltas as the methods define them: rounded to float32 when all is 16-bit, else in float64."""
    kind = np.float32 if all(a.dtype.itemsize <= 2 for a in arrays) else np.float64
    base = arrays[0].astype(kind)
    return f64([a.astype(kind) - base for a in arrays[1:]])
