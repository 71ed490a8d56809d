"""The `combination` product: what PEFT's `add_weighted_adapter` computes of some adapters, for one layer.

    cat                 factors side by side: the weighted sum of the differences, exactly; ranks add up
    svd                 the best factors of the weighted sum, of the largest of the ranks
    linear              the sums of the A and of the B, by roots of weight and scaling. Their product is another matrix than the
                        sum of the differences: it has the products of every A with every other B
    ties                the same, after TIES on the A and on the B
    dare_linear, dare_ties, magnitude_prune     the same, after random or smallest elements of A and B are set to zero
    ties_svd, dare_linear_svd, dare_ties_svd, magnitude_prune_svd       on the full differences, and then as svd

TIES here elects signs by the sum, or the number, of elements without their weights, and divides by how many agree. Differences
from PEFT: random masks depend on seed, adapter and module; of equal magnitudes, those with lower positions are kept; sums are
float64, factors and singular values need no full matrix where the result does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.torch_use import one_thread
from weightsmith._features.adapters.cores import AdaptedModule
from weightsmith._features.adapters.factors import decompose, prefers_exact
from weightsmith._plans import Product, ProductSettings, Step
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

Matrix = npt.NDArray[np.float64]

PREFIX = "peft_"
"""The prefix of their names in recipes: `merge_method: peft_ties_svd`."""

EXACT = ("cat", "svd")
ON_FACTORS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
"""These work on A and on B, so the ranks must be equal."""

NAMES = (*EXACT, *ON_FACTORS, "ties_svd", "dare_linear_svd", "dare_ties_svd", "magnitude_prune_svd")
MAJORITIES = ("total", "frequency")


@dataclass(frozen=True, slots=True)
class PeftCombination:
    """A combination as a recipe names it.

    density   share of the elements that are kept; 1 for those that keep all
    majority  signs are elected by sums (`total`) or by numbers of elements (`frequency`)
    """

    name: str
    density: float = 1.0
    majority: str = "total"

    def rank(self, ranks: Sequence[int], limit: int | None) -> int:
        """The rank of the result, from the ranks of the adapters and the limit that was asked for."""
        if self.name == "cat":
            return sum(ranks)
        return max(ranks) if limit is None or self.name in ON_FACTORS else limit

    def prunes(self) -> bool:
        """Whether it has a density."""
        return self.name not in (*EXACT, "linear")


@dataclass(frozen=True, slots=True)
class CombinationWork(ProductSettings):
    """The settings of a product.

    weights  of the adapters that have factors of each module
    ranks    of the result for each module
    """

    combination: PeftCombination
    modules: tuple[AdaptedModule, ...]
    weights: tuple[tuple[float, ...], ...]
    ranks: tuple[int, ...]
    seed: int

    def product(self, name: str, steps: Sequence[Step]) -> Product:
        """The product. steps: of the factors."""
        outs = [out for module, rank in zip(self.modules, self.ranks, strict=True) for out in module.factor_specs(rank)]
        return Product(name, "combination", tuple(outs), self.to_json(), tuple(steps))

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        kind = self.combination
        if kind.name not in NAMES or not 0 <= kind.density <= 1:
            return f"unknown combination {kind}"
        if not len(self.modules) == len(self.weights) == len(self.ranks):
            return "it has not one rank for each module"
        for module, weights, rank in zip(self.modules, self.weights, self.ranks, strict=True):
            if problem := module.invalid or module.lacks(shapes, module.read):
                return problem
            if module.experts or module.scaled:
                return f"experts or norms of {module.name!r}"
            if len(weights) != len(module.owners) or rank != kind.rank(module.ranks, rank):
                return f"wrong weights or rank of {module.name!r}"
            if kind.name in ON_FACTORS and len(set(module.ranks)) > 1:
                return f"different ranks of {module.name!r}"
        return "" if product.outs == self.product(product.name, ()).outs else "its arrays are not those of its modules"


def combine(
    combination: PeftCombination,
    factors: Sequence[tuple[Matrix, Matrix]],
    scalings: Sequence[float],
    weights: Sequence[float],
    rank: int,
    seed: Callable[[int, str], int],
) -> tuple[Matrix, Matrix]:
    """A and B of the result. factors: A [rank, inputs] and B [outputs, rank] of each adapter.

    seed  of the random mask of one adapter's `A`, `B` or `delta`
    """
    kind = combination.name
    shares = [weight * scaling for weight, scaling in zip(weights, scalings, strict=True)]
    if kind == "cat":
        return np.vstack([s * a for s, (a, _) in zip(shares, factors, strict=True)]), np.hstack([b for _, b in factors])
    if kind in ON_FACTORS:
        roots = [np.sqrt(abs(s)) for s in shares]
        signed = [float(np.copysign(root, s)) for root, s in zip(roots, shares, strict=True)]
        a = _merged(combination, kind, [a for a, _ in factors], signed, lambda i: seed(i, "A"))
        return a, _merged(combination, kind, [b for _, b in factors], roots, lambda i: seed(i, "B"))
    if kind == "svd":
        a, b = np.vstack([s * a for s, (a, _) in zip(shares, factors, strict=True)]), np.hstack([b for _, b in factors])
        (u, left), (v, right) = np.linalg.qr(b), np.linalg.qr(a.T)
        core = np.ascontiguousarray(left @ right.T, np.float32)
        factored = decompose(core, min(rank, *core.shape), 0, exact=True)
        return _padded((v @ factored.right.T).T, u @ factored.left, rank)
    deltas = [scaling * b @ a for scaling, (a, b) in zip(scalings, factors, strict=True)]
    merged = _merged(combination, kind.removesuffix("_svd"), deltas, weights, lambda i: seed(i, "delta"))
    exact = prefers_exact(rank, *merged.shape)
    factored = decompose(merged.astype(np.float32), min(rank, *merged.shape), seed(-1, "basis"), exact=exact)
    return _padded(factored.right, factored.left, rank)


def _padded(a: npt.NDArray[Any], b: npt.NDArray[Any], rank: int) -> tuple[Matrix, Matrix]:
    """Factors with zeros up to a rank."""
    n_zeros = rank - len(a)
    return np.pad(a, ((0, n_zeros), (0, 0))), np.pad(b, ((0, 0), (0, n_zeros)))


def _merged(
    combination: PeftCombination, kind: str, tensors: Sequence[Matrix], weights: Sequence[float], seed: Callable[[int], int]
) -> Matrix:
    density = combination.density
    if kind in ("ties", "magnitude_prune") and density < 1:
        tensors = [_largest(tensor, density) for tensor in tensors]
    if kind.startswith("dare") and density < 1:
        tensors = [tensor * _mask(tensor.shape, density, seed(i)) / density for i, tensor in enumerate(tensors)]
    if not kind.endswith("ties"):
        added: Matrix = np.sum([weight * tensor for weight, tensor in zip(weights, tensors, strict=True)], axis=0)
        return added
    signs = np.sign(tensors)
    elected = np.where(np.sum(tensors if combination.majority == "total" else signs, axis=0) >= 0, 1.0, -1.0)
    agree = signs == elected
    total = np.sum([w * tensor * kept for w, tensor, kept in zip(weights, tensors, agree, strict=True)], axis=0)
    mean: Matrix = total / np.maximum(agree.sum(axis=0), 1)
    return mean


def _largest(tensor: Matrix, density: float) -> Matrix:
    flat = tensor.reshape(-1)
    kept = np.argsort(-np.abs(flat), kind="stable")[: int(density * flat.size)]
    pruned = np.zeros_like(flat)
    pruned[kept] = flat[kept]
    return pruned.reshape(tensor.shape)


def _mask(shape: tuple[int, ...], density: float, seed: int) -> npt.NDArray[np.bool_]:
    return np.random.Generator(np.random.Philox(seed)).random(shape) < density


def _compute(context: ProductContext) -> Arrays:
    work = CombinationWork.of(context.product)
    arrays = context.load(step.out.name for step in context.product.steps)

    def make(module: AdaptedModule, weights: Sequence[float], rank: int) -> list[npt.NDArray[Any]]:
        def seed(i: int, part: str) -> int:
            return xxhash.xxh64_intdigest(f"{work.seed} {module.owners[i]} {part} {module.name}".encode())

        factors = [
            (arrays[module.factor("A", i)].astype(float), arrays[module.factor("B", i)].astype(float)) for i in module.owners
        ]
        a, b = combine(work.combination, factors, module.scalings, weights, rank, seed)
        return [a.astype(np.float32), b.astype(np.float32)]

    with one_thread(), ThreadPoolExecutor(context.threads) as pool:
        factors_of_modules = pool.map(make, work.modules, work.weights, work.ranks)
        return [array for arrays in factors_of_modules for array in arrays]


KIND = ProductKind("combining adapters", compute=_compute, check=CombinationWork.check)
