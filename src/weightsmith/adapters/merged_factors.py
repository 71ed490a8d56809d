"""The `merged_factors` product: factors of what a merge has made of core matrices (`cores.py`), for one layer.

With U M Vᵀ and the singular value decomposition M = P S Qᵀ, the factors of rank r are B = U P √S and A = √S (V Q)ᵀ, cut to r.
They are the best of that rank. Where there is no V (KnOTS), M has the columns of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from weightsmith.adapters.cores import stored
from weightsmith.jobs.decompose import thin_svd
from weightsmith.jobs.matrix import one_thread
from weightsmith.plans import Product, Step
from weightsmith.plans.reading import has_type
from weightsmith.products import Bench, Kind
from weightsmith.products.base import Arrays
from weightsmith.tensors import DTYPES, TensorSpec


@dataclass(frozen=True, slots=True)
class MergedWork:
    """The settings of a `merged_factors` product.

    cores    the product of the core matrices
    modules  names
    shapes   outputs and inputs of each
    ranks    of the factors of each
    """

    cores: str
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    def outs(self) -> tuple[TensorSpec, ...]:
        """The arrays: A and B of each module."""
        f32, found = DTYPES["F32"], list[TensorSpec]()
        for name, (outputs, inputs), rank in zip(self.modules, self.shapes, self.ranks, strict=True):
            found += [TensorSpec(f"{name}: A", f32, (rank, inputs)), TensorSpec(f"{name}: B", f32, (outputs, rank))]
        return tuple(found)

    def product(self, name: str, steps: Sequence[Step]) -> Product:
        """The product. steps: of the merged core matrices, named as the modules, and of U and V."""
        shares = TensorSpec(f"{name}: kept", DTYPES["F64"], (len(self.modules), 2))
        return Product(name, "merged_factors", (*self.outs(), shares), asdict(self), tuple(steps), needs=(self.cores,))

    @classmethod
    def of(cls, product: Product) -> MergedWork:
        """From the settings of a product."""
        return cls(**product.settings)


def _compute(bench: Bench) -> Arrays:
    import torch

    work = MergedWork.of(bench.product)
    arrays = {step.out.name: np.empty(step.out.shape, np.float32) for step in bench.product.steps}
    bench.fill(arrays)

    def make(name: str, rank: int) -> tuple[list[npt.NDArray[np.float32]], list[float]]:
        u, core = (torch.from_numpy(arrays[each]).double() for each in (f"{name}: U", name))
        left, values, right = thin_svd(core)
        squares, scale = values.square(), values[:rank].sqrt()
        a, b = scale[:, None] * right[:rank], u @ (left[:, :rank] * scale)
        if f"{name}: V" in arrays:
            a = a @ torch.from_numpy(arrays[f"{name}: V"]).double().T
        return [stored(a), stored(b)], [float(squares[:rank].sum()), float(squares.sum())]

    with one_thread(), ThreadPoolExecutor(bench.threads) as pool:
        made = list(pool.map(make, work.modules, work.ranks))
    return [*(array for arrays, _ in made for array in arrays), np.array([shares for _, shares in made])]


def _check(product: Product) -> str:
    if not has_type(product.settings, MergedWork):
        return "its settings are not those of merged factors"
    work = MergedWork.of(product)
    shapes = {step.out.name: step.out.shape for step in product.steps}
    if not len(work.modules) == len(work.shapes) == len(work.ranks) or work.cores not in product.needs:
        return "it has not one rank for each module, or does not need its core matrices"
    for name, shape, rank in zip(work.modules, work.shapes, work.ranks, strict=True):
        core, u, v = (shapes.get(each, ()) for each in (name, f"{name}: U", f"{name}: V"))
        bases = ((shape[0], core[0]), (shape[1], core[1])) if len(core) == 2 else ()
        if (u, v) not in (bases, (*bases[:1], ())) or (not v and core[1] != shape[1]) or not 0 < rank <= min(core):
            return f"it has no steps for {name!r}"
    return "" if product.outs == work.product(product.name, ()).outs else "its arrays are not those of its modules"


KIND = Kind("decomposing merged adapters", compute=_compute, check=_check)
