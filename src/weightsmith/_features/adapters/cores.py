"""Adapters as small matrices in bases that they share, and a merge of these as factors again.

**core**: Core Space (Panariello et al. 2025, https://arxiv.org/abs/2509.17786). U has the left singular vectors of
[B₁ … Bₙ], and V those of [A₁ᵀ … Aₙᵀ]. Each difference is then U Mᵢ Vᵀ with Mᵢ = Uᵀ Bᵢ Aᵢ V, without any loss, and Mᵢ has as
many rows as the adapters have ranks together. What is merged are the Mᵢ. The result has factors of any rank up to that. The
paper has no scalings (lora_alpha / r); here they are part of Bᵢ, so that Bᵢ Aᵢ is what the adapter adds.

Singular vectors do not depend on the order of the adapters. Their signs do not either (`decompose.signs`). Where singular
values are equal, their vectors are any basis of a subspace, and so depend on rounding; directions that no factor has are
columns of zeros.

**knots**: KnOTS (Stoica et al. 2024, https://arxiv.org/abs/2410.19735). The differences side by side, [Δ₁ … Δₙ], are
U Σ [V₁ … Vₙ]. What is merged are the Σ Vᵢ, which have as many columns as the matrix. They follow from the Mᵢ, without the full
matrices.

**compressed**: Compress-then-Merge (2026, https://arxiv.org/abs/2606.03723). U and V are bases of `rank` dimensions, those that
hold most of all differences (singular vectors of all Mᵢ side by side, and of all on top of each other), so the Mᵢ are
[rank, rank], and so is the merge. What the adapters have outside of these bases is lost before they are merged.

**DoRA** (Liu et al. 2024, https://arxiv.org/abs/2402.09353) gives the rows of W + B A other norms. With c the quotients of new
and old norms, the result is diag(c) W + diag(c) B A: the rows of the base scaled, and a difference of low rank. So the c - 1
are merged as a vector, and the diag(c) B A as above. The result is a DoRA adapter again.

A `cores` product computes U, V and Mᵢ of one layer, and the c - 1. A `merged_factors` product decomposes what the
method makes of the Mᵢ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import MismatchError
from weightsmith._base.tensors import DTYPES, MAX_STACKED, TensorSpec
from weightsmith._base.torch_use import one_thread
from weightsmith._methods.jobs.decompose import column_basis, thin_svd
from weightsmith._plans import COPY, PRODUCTS, Product, ProductSettings, Read, Step
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

Tensor = Any  # torch is optional, so mypy cannot use its type

Space = Literal["core", "knots", "compressed"]

ZERO = -1
"""In place of an adapter's number: the zero adapter, which is the base of a merge."""


_NORM_ELEMENTS = 1 << 20
"""Elements in a block of rows whose norms are computed at once."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module that adapters have factors of.

    name      of the module
    shape     outputs and inputs
    owners    numbers of the adapters that have factors of it
    ranks     of these
    scalings  what B @ A of each is multiplied with
    space     what is merged: see above
    rank      of the bases of `compressed`; else 0
    experts   matrices that are one parameter (`target_parameters`), each with factors of its own; 0: a single matrix
    normed    those of the owners that are DoRA
    scaled    rows of the base are scaled, as any of the adapters is DoRA
    grouped   those of the owners whose B is [outputs, experts · rank]: in others the expert changes fastest
    """

    name: str
    shape: tuple[int, int]
    owners: tuple[int, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    space: Space = "core"
    rank: int = 0
    experts: int = 0
    normed: tuple[int, ...] = ()
    scaled: bool = False
    grouped: tuple[int, ...] = ()

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of its matrices: the module's, or one for each expert: `….experts.down_proj[0]`."""
        return tuple(f"{self.name}[{e}]" for e in range(self.experts)) or (self.name,)

    @property
    def core(self) -> tuple[int, int]:
        """The shape of the core matrices."""
        limit = min(sum(self.ranks), self.rank or sum(self.ranks))
        return min(limit, self.shape[0]), self.shape[1] if self.space == "knots" else min(limit, self.shape[1])

    def factor(self, part: str, owner: int) -> str:
        """The name of the step of A, B or the norms of an adapter."""
        return f"{self.name}: {part} of {owner}"

    def factor_shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """The shapes of A and B for one rank, as PEFT stores them."""
        count = max(1, self.experts)
        return {"A": (count * rank, self.shape[1]), "B": (self.shape[0], rank * count)}

    @property
    def base(self) -> str:
        """The name of the step of the base's matrix."""
        return f"{self.name}: base"

    @property
    def scales(self) -> str:
        """The name of the step of the merged scales of the base's rows."""
        return f"{self.name}: scales"

    def core_of(self, matrix: str, owner: int) -> str:
        """The name of the core matrix of an adapter; of one without factors of this module, and of `ZERO`, that of zeros."""
        return f"{matrix}: core of {owner if owner in self.owners else ZERO}"

    def scales_of(self, owner: int) -> str:
        """The name of the c - 1 of an adapter; of one that is no DoRA, and of `ZERO`, that of zeros."""
        return f"{self.name}: scales of {owner if owner in self.normed else ZERO}"

    def factor_specs(self, rank: int) -> list[TensorSpec]:
        """The arrays of factors of one rank: A, B, and the norms of DoRA."""
        shapes: dict[str, tuple[int, ...]] = {**self.factor_shapes(rank), **({"norms": self.shape[:1]} if self.scaled else {})}
        return [TensorSpec(f"{self.name}: {part}", DTYPES["F32"], shape) for part, shape in shapes.items()]

    def outs(self) -> tuple[TensorSpec, ...]:
        """The arrays: of each matrix `bases`, the core matrices of its owners, and one of zeros; if scaled, the scales."""
        f32, specs = DTYPES["F32"], list[TensorSpec]()
        for matrix in self.matrices:
            specs += self.bases(matrix)
            specs += [TensorSpec(self.core_of(matrix, owner), f32, self.core) for owner in (*self.owners, ZERO)]
        if self.scaled:
            specs += [TensorSpec(self.scales_of(owner), f32, self.shape[:1]) for owner in (*self.normed, ZERO)]
        return tuple(specs)

    def bases(self, matrix: str) -> tuple[TensorSpec, ...]:
        """U, and V but for KnOTS."""
        f32, (rows, cols) = DTYPES["F32"], self.core
        u = TensorSpec(f"{matrix}: U", f32, (self.shape[0], rows))
        v = TensorSpec(f"{matrix}: V", f32, (self.shape[1], cols))
        return (u,) if self.space == "knots" else (u, v)

    @property
    def invalid(self) -> str:
        """The problem with it, or ""."""
        lists = (self.owners, self.ranks, self.scalings)
        if not self.owners or len(set(map(len, lists))) > 1 or min(*self.shape, *self.ranks) < 1:
            return f"no adapter has factors of {self.name!r}"
        if not 0 <= self.experts <= MAX_STACKED or (self.experts and self.scaled):
            return f"{self.experts:,} experts of {self.name!r}"
        if not set(self.normed) <= set(self.owners) or (self.normed and not self.scaled):
            return f"norms of {self.name!r}"
        if not set(self.grouped) <= set(self.owners):
            return f"layouts of {self.name!r}"
        return "" if (self.space == "compressed") == (self.rank > 0) else f"rank {self.rank} of {self.name!r}"

    def lacks(self, shapes: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]]) -> str:
        """The problem if the shapes of a product's steps are not those of `needed`, or ""."""
        incomplete = any(shapes.get(name) != shape for name, shape in needed.items())
        return f"it has no steps for {self.name!r}" if incomplete else ""

    @property
    def read(self) -> dict[str, tuple[int, ...]]:
        """The steps that its core matrices are made of: factors, the norms of DoRA and the base's matrix."""
        shapes: dict[str, tuple[int, ...]] = {}
        for owner, rank in zip(self.owners, self.ranks, strict=True):
            shapes |= {self.factor(part, owner): shape for part, shape in self.factor_shapes(rank).items()}
        if self.scaled:
            shapes |= {self.base: self.shape, **{self.factor("norms", owner): self.shape[:1] for owner in self.normed}}
        return shapes

    @property
    def merged(self) -> dict[str, tuple[int, ...]]:
        """The steps that its merged factors are made of: core matrices, bases, and for DoRA scales and the base's matrix."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.matrices, self.core)
        shapes |= {out.name: out.shape for matrix in self.matrices for out in self.bases(matrix)}
        return shapes | ({self.scales: self.shape[:1], self.base: self.shape} if self.scaled else {})


@dataclass(frozen=True, slots=True)
class CoreWork(ProductSettings):
    """The settings of a `cores` product."""

    modules: tuple[AdaptedModule, ...]

    def product(self, name: str, steps: Sequence[Step]) -> Product:
        """The product. steps: of the factors."""
        return Product(name, "cores", self.outs, self.to_json(), tuple(steps))

    @property
    def outs(self) -> tuple[TensorSpec, ...]:
        """The arrays."""
        return tuple(out for module in self.modules for out in module.outs())

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        for module in self.modules:
            if problem := module.invalid or module.lacks(shapes, module.read):
                return problem
        return "" if product.outs == self.outs else "its arrays are not those of its modules"


def core_step(step: Step, module: AdaptedModule, matrix: str, owner: Callable[[Read], int]) -> Step:
    """The step of a merge of whole matrices, as one of core matrices. owner: the adapter that a read is of."""
    inputs = tuple(Read(PRODUCTS, module.core_of(matrix, owner(read))) for read in step.inputs)
    spec = TensorSpec(matrix, DTYPES["F32"], module.core)
    return Step(spec, step.op, inputs, step.base, step.settings, role=step.role, layer=step.layer)


def scales_step(step: Step, module: AdaptedModule, owner: Callable[[Read], int]) -> Step:
    """The step of a merge of whole matrices, as one of the scales of the base's rows, which are merged as norms are."""
    inputs = tuple(Read(PRODUCTS, module.scales_of(owner(read))) for read in step.inputs)
    spec = TensorSpec(module.scales, DTYPES["F32"], module.shape[:1])
    return Step(spec, step.op, inputs, step.base, step.settings, layer=step.layer)


def basis_steps(module: AdaptedModule) -> tuple[Step, ...]:
    """The steps of the bases."""
    bases = (out for matrix in module.matrices for out in module.bases(matrix))
    return tuple(Step(out, COPY, (Read(PRODUCTS, out.name),)) for out in bases)


def row_norms(
    weight: npt.NDArray[np.float32], factors: Sequence[tuple[Tensor, Tensor]], scales: Tensor | None = None
) -> list[Tensor]:
    """The norms of the rows of diag(scales) W + B A, for each A and B: float64 [outputs].

    From |w + b A|² = |w|² + 2 w Aᵀ b + |b A|², so without a matrix of W's size.
    """
    import torch

    squares, crosses = [], []
    for start in range(0, len(weight), step := max(1, _NORM_ELEMENTS // weight.shape[1])):
        rows = torch.from_numpy(weight[start : start + step]).double()
        squares.append(rows.square().sum(1))
        crosses.append(torch.stack([((a @ rows.T) * b[start : start + step].T).sum(0) for a, b in factors]))
    g = torch.ones(len(weight), dtype=torch.float64) if scales is None else scales
    plain, norms = g.square() * torch.cat(squares), list[Tensor]()
    for (a, b), cross in zip(factors, torch.cat(crosses, 1), strict=True):
        norms.append((plain + 2 * g * cross + ((b @ (a @ a.T)) * b).sum(1)).clamp(min=0).sqrt())
    return norms


def _core_matrices(context: ProductContext) -> Arrays:
    import torch

    work = CoreWork.of(context.product)
    bases = {module.base for module in work.modules}
    arrays = context.load(step.out.name for step in context.product.steps if step.out.name not in bases)
    reading = threading.Lock()  # one matrix of the base is in memory at a time

    def factors(module: AdaptedModule, owner: int, rank: int) -> tuple[Tensor, Tensor]:
        """[experts, rank, inputs] and [experts, outputs, rank]."""
        a, b = (torch.from_numpy(arrays[module.factor(part, owner)]).double() for part in "AB")
        count = max(1, module.experts)
        b = (
            b.reshape(-1, count, rank).transpose(0, 1)
            if owner in module.grouped
            else b.reshape(-1, rank, count).permute(2, 0, 1)
        )
        return a.reshape(count, rank, -1), b

    def scales(module: AdaptedModule, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """The c of each adapter that is DoRA."""
        if not module.normed:
            return {}
        with reading:
            weight = context.load([module.base])[module.base]
            scalings = dict(zip(module.owners, module.scalings, strict=True))
            scaled_pairs = [(pairs[i][0][0], scalings[i] * pairs[i][1][0]) for i in module.normed]
            norms = dict(zip(module.normed, row_norms(weight, scaled_pairs), strict=True))
        trained_norms = {i: torch.from_numpy(arrays[module.factor("norms", i)]).double() for i in module.normed}
        return {i: trained_norms[i] / torch.where(norms[i] > 0, norms[i], torch.ones_like(norms[i])) for i in module.normed}

    def make(module: AdaptedModule) -> list[npt.NDArray[np.float32]]:
        pairs = {i: factors(module, i, rank) for i, rank in zip(module.owners, module.ranks, strict=True)}
        scaled = scales(module, pairs)
        results = list[npt.NDArray[np.float32]]()
        for e in range(max(1, module.experts)):
            scaled_pairs = [(a[e], b[e] * scaled[i][:, None] if i in scaled else b[e]) for i, (a, b) in pairs.items()]
            results += _cores(module, scaled_pairs)
        if module.scaled:
            results += [stored(scaled[i] - 1) for i in module.normed]
            results.append(np.zeros(module.shape[0], np.float32))
        return results

    with one_thread(), ThreadPoolExecutor(context.threads) as pool:
        return [array for arrays in pool.map(make, work.modules) for array in arrays]


def _cores(module: AdaptedModule, factors: Sequence[tuple[Tensor, Tensor]]) -> list[npt.NDArray[np.float32]]:
    """Bases and core matrices of the adapters of one matrix, and the core matrix of zeros."""
    import torch

    factors = [(a, s * b) for s, (a, b) in zip(module.scalings, factors, strict=True)]
    bases = [column_basis(torch.cat([b for _, b in factors], 1)), column_basis(torch.cat([a.T for a, _ in factors], 1))]
    cores = [(bases[0].T @ b) @ (a @ bases[1]) for a, b in factors]
    if module.space == "knots":
        left = thin_svd(torch.cat(cores, 1), module.core[0])[0]
        cores = [left.T @ core @ bases[1].T for core in cores]
        bases = [bases[0] @ left]
    elif module.space == "compressed":
        left, right = thin_svd(torch.cat(cores, 1), module.core[0])[0], thin_svd(torch.cat(cores), module.core[1])[2].T
        cores = [left.T @ core @ right for core in cores]
        bases = [bases[0] @ left, bases[1] @ right]
    return [*map(stored, bases), *map(stored, cores), np.zeros(module.core, np.float32)]


def stored(matrix: Any) -> npt.NDArray[np.float32]:
    """A torch matrix as an array of a product."""
    return np.ascontiguousarray(matrix.float().numpy())


CORES = ProductKind("finding shared bases", compute=_core_matrices, check=CoreWork.check)


# ---- The `merged_factors` product: factors of what a merge has made of core matrices (`cores.py`), for one layer


SMALLEST = 1e-3
"""Share of a row of the base that DoRA keeps at least."""


@dataclass(frozen=True, slots=True)
class MergedWork(ProductSettings):
    """The settings of a `merged_factors` product.

    cores    the product of the core matrices
    modules  of that product
    ranks    of the factors of each
    """

    cores: str
    modules: tuple[AdaptedModule, ...]
    ranks: tuple[int, ...]

    def product(self, name: str, steps: Sequence[Step]) -> Product:
        """The product. steps: of the merged core matrices, named as the matrices, of U and V, and of scales and base."""
        outs = [out for module, rank in zip(self.modules, self.ranks, strict=True) for out in module.factor_specs(rank)]
        outs.append(TensorSpec(f"{name}: kept", DTYPES["F64"], (len(self.modules), 2)))
        return Product(name, "merged_factors", tuple(outs), self.to_json(), tuple(steps), needs=(self.cores,))

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if len(self.modules) != len(self.ranks) or self.cores not in product.needs:
            return "it has not one rank for each module, or does not need its core matrices"
        for module, rank in zip(self.modules, self.ranks, strict=True):
            if problem := module.invalid or module.lacks(shapes, module.merged):
                return problem
            if not 0 < rank <= min(module.shape):
                return f"it has no steps for {rank:,} ranks of {module.name!r}"
        return "" if product.outs == self.product(product.name, ()).outs else "its arrays are not those of its modules"


def _merged_factors(context: ProductContext) -> Arrays:
    import torch

    work = MergedWork.of(context.product)
    bases = {module.base for module in work.modules}
    arrays = context.load(step.out.name for step in context.product.steps if step.out.name not in bases)
    reading = threading.Lock()  # one matrix of the base is in memory at a time

    def decomposed(matrix: str, rank: int) -> tuple[Tensor, Tensor, list[float]]:
        u, core = (torch.from_numpy(arrays[name]).double() for name in (f"{matrix}: U", matrix))
        left, values, right = thin_svd(core)
        squares, scale = values.square(), values[:rank].sqrt()
        a, b = scale[:, None] * right[:rank], u @ (left[:, :rank] * scale)
        if f"{matrix}: V" in arrays:
            a = a @ torch.from_numpy(arrays[f"{matrix}: V"]).double().T
        n_zeros = rank - len(a)
        kept = [float(squares[:rank].sum()), float(squares.sum())]
        return torch.nn.functional.pad(a, (0, 0, 0, n_zeros)), torch.nn.functional.pad(b, (0, n_zeros)), kept

    def as_dora(module: AdaptedModule, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """B of the adapter, and the norms."""
        g = 1 + torch.from_numpy(arrays[module.scales]).double()
        if (small := (g.abs() < SMALLEST).nonzero()).numel():
            what = f"row {int(small[0])} of the base would be scaled to {float(g[small[0]]):.2g} of what it is, and DoRA cannot"
            raise MismatchError(what, where=module.name, fix="use smaller weights, or merge models: BASE+ADAPTER")
        with reading:
            (norms,) = row_norms(context.load([module.base])[module.base], [(a, b)], g)
        return b / g[:, None], norms * g.sign()

    def make(module: AdaptedModule, rank: int) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float64]]:
        a, b, kept = zip(*(decomposed(matrix, rank) for matrix in module.matrices), strict=True)
        factors = [torch.cat(a), torch.stack(b, 2).flatten(1)]
        if module.scaled:
            factors = [a[0], *as_dora(module, a[0], b[0])]
        return [stored(factor) for factor in factors], np.sum(kept, axis=0)

    with one_thread(), ThreadPoolExecutor(context.threads) as pool:
        results = list(pool.map(make, work.modules, work.ranks))
    return [*(array for arrays, _ in results for array in arrays), np.array([shares for _, shares in results])]


MERGED_FACTORS = ProductKind("decomposing merged adapters", compute=_merged_factors, check=MergedWork.check)
