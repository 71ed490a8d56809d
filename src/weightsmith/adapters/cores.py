"""Adapters as small matrices in bases that they share, and a merge of these as factors again.

**core**: Core Space (Panariello et al. 2025, https://arxiv.org/abs/2509.17786). Of the adapters of one matrix, U is an
orthonormal basis of all columns of their B, and V one of all rows of their A. Each difference is then U Mᵢ Vᵀ, without any
loss, and Mᵢ has no more rows than the adapters have ranks together. What is merged are the Mᵢ. The result has factors of any
rank up to that.

**knots**: KnOTS (Stoica et al. 2024, https://arxiv.org/abs/2410.19735). The differences side by side, [Δ₁ … Δₙ], are
U Σ [V₁ … Vₙ]. What is merged are the Σ Vᵢ, which have as many columns as the matrix. They follow from the Mᵢ, without the full
matrices.

**compressed**: Compress-then-Merge (2026, https://arxiv.org/abs/2606.03723). U and V are bases of `rank` dimensions, those that
hold most of all differences (singular vectors of all Mᵢ side by side, and of all on top of each other), so the Mᵢ are
[rank, rank], and so is the merge. What the adapters have outside of these bases is lost before they are merged.

A `cores` product computes U, V and Mᵢ of one layer. `merged_factors.py` decomposes what the method makes of the Mᵢ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.decompose import thin_svd
from weightsmith.jobs.matrix import one_thread
from weightsmith.plans import COPY, PRODUCTS, Product, Read, Step
from weightsmith.plans.reading import has_type
from weightsmith.products import Bench, Kind
from weightsmith.products.base import Arrays
from weightsmith.tensors import DTYPES, TensorSpec

Space = Literal["core", "knots", "compressed"]
SPACES = get_args(Space)

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
    space     what is merged: see above
    rank      of the bases of `compressed`; else 0
    """

    name: str
    shape: tuple[int, int]
    owners: tuple[int, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    space: Space = "core"
    rank: int = 0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Adapted:
        """From JSON."""
        names = ("shape", "owners", "ranks", "scalings")
        return cls(**{**data, **{name: tuple(data[name]) for name in names}})

    @property
    def core(self) -> tuple[int, int]:
        """The shape of the core matrices."""
        limit = min(sum(self.ranks), self.rank or sum(self.ranks))
        return min(limit, self.shape[0]), self.shape[1] if self.space == "knots" else min(limit, self.shape[1])

    def factor(self, part: str, owner: int) -> str:
        """The name of the step of A or B of an adapter."""
        return f"{self.name}: {part} of {owner}"

    def matrix(self, owner: int) -> str:
        """The name of the core matrix of an adapter; of one without factors of this module, and of `ZERO`, that of zeros."""
        return f"{self.name}: core of {owner if owner in self.owners else ZERO}"

    def outs(self) -> tuple[TensorSpec, ...]:
        """The arrays: `bases`, the core matrices of its owners, and one of zeros."""
        cores = (TensorSpec(self.matrix(owner), DTYPES["F32"], self.core) for owner in (*self.owners, ZERO))
        return (*self.bases(), *cores)

    def bases(self) -> tuple[TensorSpec, ...]:
        """U, and V but for KnOTS."""
        f32, (rows, cols) = DTYPES["F32"], self.core
        u = TensorSpec(f"{self.name}: U", f32, (self.shape[0], rows))
        v = TensorSpec(f"{self.name}: V", f32, (self.shape[1], cols))
        return (u,) if self.space == "knots" else (u, v)

    def problem(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """What is wrong with it, given the shapes of the steps of a product; ""."""
        if (
            not self.owners
            or not len(self.owners) == len(self.ranks) == len(self.scalings)
            or min(*self.shape, *self.ranks) < 1
        ):
            return f"no adapter has factors of {self.name!r}"
        for owner, rank in zip(self.owners, self.ranks, strict=True):
            found = shapes.get(self.factor("A", owner)), shapes.get(self.factor("B", owner))
            if found != ((rank, self.shape[1]), (self.shape[0], rank)):
                return f"it has no steps for the factors of {self.name!r}"
        return "" if (self.space == "compressed") == (self.rank > 0) else f"rank {self.rank} of {self.name!r}"


@dataclass(frozen=True, slots=True)
class CoreWork:
    """The settings of a `cores` product."""

    modules: tuple[Adapted, ...]

    @classmethod
    def of(cls, product: Product) -> CoreWork:
        """From the settings of a product."""
        return cls(tuple(Adapted.of(module) for module in product.settings["modules"]))

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
    """The steps of the bases."""
    return tuple(Step(out, COPY, (Read(PRODUCTS, out.name),)) for out in module.bases())


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
            bases.append(basis)
            rests.append(rest.split(module.ranks, 1))
        cores = [s * b @ a.T for s, b, a in zip(module.scalings, *rests, strict=True)]
        if module.space == "knots":
            left = thin_svd(torch.cat(cores, 1), module.core[0])[0]
            cores = [left.T @ core @ bases[1].T for core in cores]
            bases = [bases[0] @ left]
        elif module.space == "compressed":
            left, right = thin_svd(torch.cat(cores, 1), module.core[0])[0], thin_svd(torch.cat(cores), module.core[1])[2].T
            cores = [left.T @ core @ right for core in cores]
            bases = [bases[0] @ left, bases[1] @ right]
        return [*map(stored, bases), *map(stored, cores), np.zeros(module.core, np.float32)]

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
    for module in work.modules:
        if problem := module.problem(shapes):
            return problem
    outs = tuple(out for module in work.modules for out in module.outs())
    return "" if outs == product.outs else "its arrays are not those of its modules"


KIND = Kind("finding shared bases", compute=_compute, check=_check)
