"""The `merged_factors` product: factors of what a merge has made of core matrices (`cores.py`), for one layer.

With U M Vᵀ and the singular value decomposition M = P S Qᵀ, the factors of rank r are B = U P √S and A = √S (V Q)ᵀ, cut to r.
They are the best of that rank. Where there is no V (KnOTS), M has the columns of the matrix. Ranks beyond those of M are zeros.

A merge of DoRA adapters is diag(g) W + B A, with g = 1 + the merged scales. As DoRA, that is the factors diag(1 / g) B and A,
and the norms of its rows: PEFT scales the rows of W + diag(1 / g) B A to these norms, which gives the same rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import MismatchError
from weightsmith._base.one_thread import one_thread
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.adapters.cores import Adapted, row_norms, stored
from weightsmith._methods.jobs.decompose import thin_svd
from weightsmith._plans import Product, Step
from weightsmith._plans.forms import ProductSettings
from weightsmith.abc.product import Arrays

Tensor = Any  # torch is optional, so mypy cannot use its type

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
    modules: tuple[Adapted, ...]
    ranks: tuple[int, ...]

    def product(self, name: str, steps: Sequence[Step]) -> Product:
        """The product. steps: of the merged core matrices, named as the matrices, of U and V, and of scales and base."""
        outs = [out for module, rank in zip(self.modules, self.ranks, strict=True) for out in module.factor_specs(rank)]
        outs.append(TensorSpec(f"{name}: kept", DTYPES["F64"], (len(self.modules), 2)))
        return Product(name, "merged_factors", tuple(outs), self.to_json(), tuple(steps), needs=(self.cores,))

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """See `ProductSettings`."""
        if len(self.modules) != len(self.ranks) or self.cores not in product.needs:
            return "it has not one rank for each module, or does not need its core matrices"
        for module, rank in zip(self.modules, self.ranks, strict=True):
            if problem := module.invalid or module.lacks(shapes, module.merged):
                return problem
            if not 0 < rank <= min(module.shape):
                return f"it has no steps for {rank:,} ranks of {module.name!r}"
        return "" if product.outs == self.product(product.name, ()).outs else "its arrays are not those of its modules"


def _compute(context: ProductContext) -> Arrays:
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

    def as_dora(module: Adapted, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """B of the adapter, and the norms."""
        g = 1 + torch.from_numpy(arrays[module.scales]).double()
        if (small := (g.abs() < SMALLEST).nonzero()).numel():
            what = f"row {int(small[0])} of the base would be scaled to {float(g[small[0]]):.2g} of what it is, and DoRA cannot"
            raise MismatchError(what, where=module.name, fix="use smaller weights, or merge models: BASE+ADAPTER")
        with reading:
            (norms,) = row_norms(context.load([module.base])[module.base], [(a, b)], g)
        return b / g[:, None], norms * g.sign()

    def make(module: Adapted, rank: int) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float64]]:
        a, b, kept = zip(*(decomposed(matrix, rank) for matrix in module.matrices), strict=True)
        factors = [torch.cat(a), torch.stack(b, 2).flatten(1)]
        if module.scaled:
            factors = [a[0], *as_dora(module, a[0], b[0])]
        return [stored(factor) for factor in factors], np.sum(kept, axis=0)

    with one_thread(), ThreadPoolExecutor(context.threads) as pool:
        results = list(pool.map(make, work.modules, work.ranks))
    return [*(array for arrays, _ in results for array in arrays), np.array([shares for _, shares in results])]


KIND = ProductKind("decomposing merged adapters", compute=_compute, check=MergedWork.check)
