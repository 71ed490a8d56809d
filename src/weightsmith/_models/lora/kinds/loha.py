"""LoHa: the element-wise product of two low-rank matrices (Hyeon-Woo et al. 2021, arXiv 2108.06098; LyCORIS).

    W + scaling · (w1_a @ w1_b) ∘ (w2_a @ w2_b)

Of a convolution each factor may be a Tucker decomposition with a core `t` [rank, rank, height, width].
"""

from __future__ import annotations

import numpy as np

from weightsmith._models.lora.kinds.lokr import scaling
from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, ExactFactors, Rows, Shapes


def shapes(module: AdapterModule) -> Shapes:
    """Two pairs of factors, and two cores or none."""
    if not module.has("hada_w1_b"):
        raise ValueError("it has no hada_w1_b")
    rank = module.parts["hada_w1_b"].shape[0] if module.parts["hada_w1_b"].shape else 0
    stated = module.whole("r", rank)
    scaling(module, rank)
    if stated != rank:
        raise ValueError(f"r is {stated}, and hada_w1_b has {rank} rows")
    if module.has("hada_t1") or module.has("hada_t2"):
        kernel = (*module.shape[2:], 1)[:2]
        if len(module.shape) not in (3, 4):
            raise ValueError("it has cores of a convolution, and the weight is none")
        factors = {f"hada_w{k}_{end}": (rank, module.shape[end == "b"]) for k in "12" for end in "ab"}
        return {**factors, "hada_t1": (rank, rank, *kernel), "hada_t2": (rank, rank, *kernel)}
    ends = {"a": (module.outputs, rank), "b": (rank, module.inputs)}
    return {f"hada_w{k}_{end}": shape for k in "12" for end, shape in ends.items()}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """Left and right of both matrices; the scaling is part of the first left."""
    pairs = []
    for k in "12":
        left, right = arrays[f"hada_w{k}_a"], arrays[f"hada_w{k}_b"]
        if f"hada_t{k}" in arrays:
            rank, core = len(left), arrays[f"hada_t{k}"]
            left, right = left.T, np.einsum("ijkl,jr->irkl", core, right).reshape(rank, -1)
        pairs += [np.ascontiguousarray(left), np.ascontiguousarray(right)]
    pairs[0] = pairs[0] * scaling(module, pairs[1].shape[0])
    return tuple(pairs)


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Add the product of both matrices."""
    from weightsmith._kernels.combine import add_matrix_product

    one, other = np.zeros_like(rows), np.zeros_like(rows)
    add_matrix_product(arrays[0][first : first + len(rows)], arrays[1], one)
    add_matrix_product(arrays[2][first : first + len(rows)], arrays[3], other)
    rows += one * other


def exact_shape(module: AdapterModule) -> tuple[int, int]:
    """The shape of a linear layer's weight."""
    if module.has("hada_t1") or not module.has("hada_w1_a", "hada_w1_b"):
        raise ValueError("it has cores of a convolution")
    return module.parts["hada_w1_a"].shape[0], module.parts["hada_w1_b"].shape[-1]


def exact_factors(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """(A₁ B₁) ∘ (A₂ B₂): each column of A₁ times each of A₂, and each row of B₁ times each of B₂. The rank is squared."""
    one, first, other, second = prepare(module, arrays)
    left = (one[:, :, None] * other[:, None, :]).reshape(len(one), -1)
    return left, (first[:, None, :] * second[None, :, :]).reshape(-1, first.shape[1])


KIND = AdapterKind(
    title="LoHa",
    types=("LOHA",),
    parts=("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    shapes=shapes,
    prepare=prepare,
    change=change,
    used=frozenset({"r", "alpha"}),
    unused=frozenset({"rank_dropout", "module_dropout", "use_effective_conv2d"}),
    exact=ExactFactors(exact_shape, lambda module: module.parts["hada_w1_b"].shape[0] ** 2, exact_factors),
    patterns={"r": "rank_pattern", "alpha": "alpha_pattern"},
)
