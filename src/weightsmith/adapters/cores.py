"""Core Space: adapters as small matrices in bases that they share, and a merge of these as factors again.

Panariello et al. 2025, https://arxiv.org/abs/2509.17786. Of the adapters of one matrix, U is an orthonormal basis of all
columns of their B, and V one of all rows of their A. Each difference is then U Mᵢ Vᵀ, without any loss, and Mᵢ has no more rows
than the adapters have ranks together. What is merged are the Mᵢ. The result has factors of any rank up to that.

A `cores` product computes U, V and Mᵢ of one layer. `merged_factors.py` decomposes what the method makes of the Mᵢ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.matrix import one_thread
from weightsmith.plans import COPY, PRODUCTS, Product, Read, Step
from weightsmith.plans.reading import has_type
from weightsmith.products import Bench, Kind
from weightsmith.products.base import Arrays
from weightsmith.tensors import DTYPES, TensorSpec

ZERO = -1
"""In place of an adapter's number: the zero adapter, which is the base of a merge."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """A module that adapters have factors of.

    name      of the module
    shape     outputs and inputs
    owners    numbers of the adapters that have factors of it
    ranks     of these
    scalings  what B @ A of each is multiplied with
    """

    name: str
    shape: tuple[int, int]
    owners: tuple[int, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]

    @property
    def core(self) -> tuple[int, int]:
        """The shape of the core matrices."""
        total = sum(self.ranks)
        return min(total, self.shape[0]), min(total, self.shape[1])

    def factor(self, part: str, owner: int) -> str:
        """The name of the step of A or B of an adapter."""
        return f"{self.name}: {part} of {owner}"

    def matrix(self, owner: int) -> str:
        """The name of the core matrix of an adapter; of one without factors of this module, and of `ZERO`, that of zeros."""
        return f"{self.name}: core of {owner if owner in self.owners else ZERO}"

    def outs(self) -> tuple[TensorSpec, ...]:
        """The arrays: U, V, the core matrices of its owners, and one of zeros."""
        f32, (rows, cols) = DTYPES["F32"], self.core
        bases = (
            TensorSpec(f"{self.name}: U", f32, (self.shape[0], rows)),
            TensorSpec(f"{self.name}: V", f32, (self.shape[1], cols)),
        )
        return (*bases, *(TensorSpec(self.matrix(owner), f32, self.core) for owner in (*self.owners, ZERO)))


@dataclass(frozen=True, slots=True)
class CoreWork:
    """The settings of a `cores` product."""

    modules: tuple[Adapted, ...]

    @classmethod
    def of(cls, product: Product) -> CoreWork:
        """From the settings of a product."""
        names = ("shape", "owners", "ranks", "scalings")
        return cls(tuple(Adapted(**m | {n: tuple(m[n]) for n in names}) for m in product.settings["modules"]))

    def product(self, name: str, steps: Sequence[Step]) -> Product:
        """The product. steps: of the factors."""
        outs = tuple(out for module in self.modules for out in module.outs())
        return Product(name, "cores", outs, asdict(self), tuple(steps))


def core_step(step: Step, module: Adapted, owner: Callable[[Read], int]) -> Step:
    """The step of a merge of whole matrices, as one of core matrices. owner: the adapter that a read is of."""
    inputs = tuple(Read(PRODUCTS, module.matrix(owner(read))) for read in step.inputs)
    spec = TensorSpec(module.name, DTYPES["F32"], module.core)
    return Step(spec, step.op, inputs, step.base, step.settings, role=step.role, layer=step.layer)


def basis_steps(module: Adapted) -> tuple[Step, ...]:
    """The steps of U and V."""
    return tuple(Step(out, COPY, (Read(PRODUCTS, out.name),)) for out in module.outs()[:2])


def _compute(bench: Bench) -> Arrays:
    import torch

    work = CoreWork.of(bench.product)
    shapes = {step.out.name: step.out.shape for step in bench.product.steps}
    arrays = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    bench.fill(arrays)

    def make(module: Adapted) -> list[npt.NDArray[np.float32]]:
        bases, rests = [], []
        for part, transposed in (("B", False), ("A", True)):
            own = [torch.from_numpy(arrays[module.factor(part, owner)]).double() for owner in module.owners]
            basis, rest = torch.linalg.qr(torch.cat([each.T if transposed else each for each in own], 1))
            bases.append(stored(basis))
            rests.append(rest.split(module.ranks, 1))
        cores = [stored(s * b @ a.T) for s, b, a in zip(module.scalings, *rests, strict=True)]
        return [*bases, *cores, np.zeros(module.core, np.float32)]

    with one_thread(), ThreadPoolExecutor(bench.threads) as pool:
        return [array for found in pool.map(make, work.modules) for array in found]


def stored(matrix: Any) -> npt.NDArray[np.float32]:
    """A torch matrix as an array of a product."""
    return np.ascontiguousarray(matrix.float().numpy())


def _check(product: Product) -> str:
    if not has_type(product.settings, CoreWork):
        return "its settings are not those of core matrices"
    work = CoreWork.of(product)
    shapes = {step.out.name: step.out.shape for step in product.steps}
    for m in work.modules:
        if not m.owners or not len(m.owners) == len(m.ranks) == len(m.scalings) or min(m.shape) < 1 or min(m.ranks) < 1:
            return f"no adapter has factors of {m.name!r}"
        for owner, rank in zip(m.owners, m.ranks, strict=True):
            if (shapes.get(m.factor("A", owner)), shapes.get(m.factor("B", owner))) != ((rank, m.shape[1]), (m.shape[0], rank)):
                return f"it has no steps for the factors of {m.name!r}"
    outs = tuple(out for module in work.modules for out in module.outs())
    return "" if outs == product.outs else "its arrays are not those of its modules"


KIND = Kind("finding shared bases", compute=_compute, check=_check)
