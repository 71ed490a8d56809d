"""The `merged_factors` product: factors of what a merge has made of core matrices (`cores.py`), for one layer.

With U M Vᵀ and the singular value decomposition M = P S Qᵀ, the factors of rank r are B = U P √S and A = √S (V Q)ᵀ, cut to r.
They are the best of that rank. Where there is no V (KnOTS), M has the columns of the matrix. Ranks beyond those of M are zeros.

A merge of DoRA adapters is diag(g) W + B A, with g = 1 + the merged scales. As DoRA, that is the factors diag(1 / g) B and A,
and the norms of its rows: PEFT scales the rows of W + diag(1 / g) B A to these norms, which gives the same rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import MismatchError
from weightsmith._base.tensors import DTYPES, MAX_STACKED, TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.adapters.cores import matrices_of, row_norms, stored
from weightsmith._methods.jobs.decompose import thin_svd
from weightsmith._methods.jobs.matrix import one_thread
from weightsmith._plans import Product, Step
from weightsmith._plans.codec import has_type
from weightsmith._plans.forms import ProductSettings
from weightsmith.abc.product import Arrays

Tensor = Any  # torch is optional, so mypy cannot use its type

SMALLEST = 1e-3
"""Share of a row of the base that DoRA keeps at least."""


@dataclass(frozen=True, slots=True)
class MergedWork(ProductSettings):
    """The settings of a `merged_factors` product.

    cores    the product of the core matrices
    modules  names
    shapes   outputs and inputs of each
    ranks    of the factors of each
    experts  of each; 0: a single matrix
    scaled   they are DoRA
    """

    cores: str
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    experts: tuple[int, ...]
    scaled: bool = False

    @property
    def each(self) -> Iterator[tuple[str, tuple[int, int], int, int]]:
        """Name, shape, rank and number of experts of each module."""
        yield from zip(self.modules, self.shapes, self.ranks, self.experts, strict=True)

    def outs(self) -> tuple[TensorSpec, ...]:
        """The arrays: A and B of each module, as PEFT stores them, and the norms of DoRA."""
        f32, found = DTYPES["F32"], list[TensorSpec]()
        for name, (outputs, inputs), rank, experts in self.each:
            count = max(1, experts)
            found.append(TensorSpec(f"{name}: A", f32, (count * rank, inputs)))
            found.append(TensorSpec(f"{name}: B", f32, (outputs, rank * count)))
            found += [TensorSpec(f"{name}: norms", f32, (outputs,))] if self.scaled else []
        return tuple(found)

    def product(self, name: str, steps: Sequence[Step]) -> Product:
        """The product. steps: of the merged core matrices, named as the matrices, of U and V, and of scales and base."""
        shares = TensorSpec(f"{name}: kept", DTYPES["F64"], (len(self.modules), 2))
        return Product(name, "merged_factors", (*self.outs(), shares), self.to_json(), tuple(steps), needs=(self.cores,))


def _compute(bench: ProductContext) -> Arrays:
    import torch

    work = MergedWork.of(bench.product)
    bases = {f"{name}: base" for name in work.modules}
    shapes = {step.out.name: step.out.shape for step in bench.product.steps if step.out.name not in bases}
    arrays = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    bench.fill(arrays)
    reading = threading.Lock()  # one matrix of the base is in memory at a time

    def decomposed(matrix: str, rank: int) -> tuple[Tensor, Tensor, list[float]]:
        u, core = (torch.from_numpy(arrays[each]).double() for each in (f"{matrix}: U", matrix))
        left, values, right = thin_svd(core)
        squares, scale = values.square(), values[:rank].sqrt()
        a, b = scale[:, None] * right[:rank], u @ (left[:, :rank] * scale)
        if f"{matrix}: V" in arrays:
            a = a @ torch.from_numpy(arrays[f"{matrix}: V"]).double().T
        more = rank - len(a)
        kept = [float(squares[:rank].sum()), float(squares.sum())]
        return torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more)), kept

    def as_dora(name: str, shape: tuple[int, int], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """B of the adapter, and the norms."""
        g = 1 + torch.from_numpy(arrays[f"{name}: scales"]).double()
        if (small := (g.abs() < SMALLEST).nonzero()).numel():
            what = f"row {int(small[0])} of the base would be scaled to {float(g[small[0]]):.2g} of what it is, and DoRA cannot"
            raise MismatchError(what, where=name, fix="use smaller weights, or merge models: BASE+ADAPTER")
        with reading:
            weight = np.empty(shape, np.float32)
            bench.fill({f"{name}: base": weight})
            (norms,) = row_norms(weight, [(a, b)], g)
        return b / g[:, None], norms * g.sign()

    def make(
        name: str, shape: tuple[int, int], rank: int, experts: int
    ) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float64]]:
        a, b, kept = zip(*(decomposed(matrix, rank) for matrix in matrices_of(name, experts)), strict=True)
        if work.scaled:
            (a,), (b,) = a, b
            b, norms = as_dora(name, shape, a, b)
            found = [a, b, norms]
        else:
            found = [torch.cat(a), torch.stack(b, 2).flatten(1)]
        return [stored(each) for each in found], np.sum(kept, axis=0)

    with one_thread(), ThreadPoolExecutor(bench.threads) as pool:
        made = list(pool.map(lambda each: make(*each), work.each))
    return [*(array for arrays, _ in made for array in arrays), np.array([shares for _, shares in made])]


def _check(product: Product) -> str:
    if not has_type(product.settings, MergedWork):
        return "its settings are not those of merged factors"
    work = MergedWork.of(product)
    shapes = {step.out.name: step.out.shape for step in product.steps}
    counts = {len(each) for each in (work.modules, work.shapes, work.ranks, work.experts)}
    if len(counts) > 1 or work.cores not in product.needs:
        return "it has not one rank for each module, or does not need its core matrices"
    for name, shape, rank, experts in work.each:
        if not 0 <= experts <= MAX_STACKED or (experts and work.scaled):
            return f"{experts:,} experts of {name!r}"
        if work.scaled and (shapes.get(f"{name}: scales"), shapes.get(f"{name}: base")) != (shape[:1], shape):
            return f"it has no steps for the norms of {name!r}"
        for matrix in matrices_of(name, experts):
            core, u, v = (shapes.get(each, ()) for each in (matrix, f"{matrix}: U", f"{matrix}: V"))
            bases = ((shape[0], core[0]), (shape[1], core[1])) if len(core) == 2 else ()
            if (u, v) not in (bases, (*bases[:1], ())) or (not v and core[1] != shape[1]) or not 0 < rank <= min(shape):
                return f"it has no steps for {name!r}"
    return "" if product.outs == work.product(product.name, ()).outs else "its arrays are not those of its modules"


KIND = ProductKind("decomposing merged adapters", compute=_compute, check=_check)
