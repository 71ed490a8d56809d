"""LoKr: a Kronecker product of two small matrices, each whole or of low rank (Yeh et al. 2023, arXiv 2309.14859; LyCORIS).

W + scaling · w1 ⊗ w2, with w1 [a, b], w2 [k, m] and W [a · k, b · m]: row i has the products of row i // k of w1 and row i % k
of w2.
"""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, ExactFactors, Rows, Shapes


def scaling(module: AdapterModule, rank: int | None) -> float:
    """alpha / r. Files without a config have an alpha or none; and no rank where both matrices are whole (LyCORIS, ComfyUI)."""
    stated = module.settings.get("r", rank)
    return 1.0 if stated is None else module.number("alpha", stated) / module.whole("r", rank)


def _of(module: AdapterModule, part: str) -> tuple[int, ...]:
    if not module.has(part):
        raise ValueError(f"it has no {part}")
    return module.parts[part].shape


def shapes(module: AdapterModule) -> Shapes:
    """w1 and w2, whole or as factors, whose product has the shape of the weight."""
    outputs, inputs, kernel = module.outputs, module.inputs, module.shape[2:]
    scaling(module, 1)
    first = _of(module, "lokr_w1") if module.has("lokr_w1") else (*_of(module, "lokr_w1_a")[:1], *_of(module, "lokr_w1_b")[1:])
    if len(first) != 2 or 0 in first or outputs % first[0] or module.shape[1] % first[1]:
        raise ValueError(f"w1 is {list(first)}, and the weight {list(module.shape)} is no multiple of that")
    rows, cols, depth = outputs // first[0], inputs // first[1], module.shape[1] // first[1]
    expected = {"lokr_w1": first}
    if not module.has("lokr_w1"):
        rank = _of(module, "lokr_w1_b")[0]
        expected = {"lokr_w1_a": (first[0], rank), "lokr_w1_b": (rank, first[1])}
    if module.has("lokr_w2"):
        if len(kernel) == 1:  # programs that write such files disagree on what their product is
            raise ValueError("a whole w2 of a convolution in one dimension is not read")
        return {**expected, "lokr_w2": (rows, depth, *kernel)}
    rank = _of(module, "lokr_w2_b")[0]
    if module.has("lokr_t2"):
        return {**expected, "lokr_t2": (rank, rank, *(*kernel, 1)[:2]), "lokr_w2_a": (rank, rows), "lokr_w2_b": (rank, depth)}
    return {**expected, "lokr_w2_a": (rows, rank), "lokr_w2_b": (rank, cols)}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """w1, times the scaling, and w2 as a matrix."""
    ranks = [len(arrays[part]) for part in ("lokr_w1_b", "lokr_w2_b") if part in arrays]
    first = arrays["lokr_w1"] if "lokr_w1" in arrays else arrays["lokr_w1_a"] @ arrays["lokr_w1_b"]
    if "lokr_w2" in arrays:
        second = arrays["lokr_w2"]
    elif "lokr_t2" in arrays:
        second = np.einsum("ijkl,ip,jr->prkl", arrays["lokr_t2"], arrays["lokr_w2_a"], arrays["lokr_w2_b"])
    else:
        second = arrays["lokr_w2_a"] @ arrays["lokr_w2_b"]
    return first * scaling(module, ranks[0] if ranks else None), second.reshape(len(second), -1)


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Add these rows of the Kronecker product."""
    one, other = arrays
    numbers = np.arange(first, first + len(rows))
    rows += (one[numbers // len(other)][:, :, None] * other[numbers % len(other)][:, None, :]).reshape(rows.shape)


def _sizes(module: AdapterModule, k: str) -> tuple[int, int, int]:
    """Rows, columns and rank of w1 or w2. Raises ValueError for a kernel of a convolution."""
    if module.has(f"lokr_t{k}"):
        raise ValueError("it has the core of a convolution")
    if module.has(whole := f"lokr_w{k}"):
        shape = _of(module, whole)
        if len(shape) != 2:
            raise ValueError(f"{whole} is {list(shape)}, of a convolution")
        return shape[0], shape[1], min(shape)
    left, right = _of(module, f"lokr_w{k}_a"), _of(module, f"lokr_w{k}_b")
    return left[0], right[-1], right[0]


def exact_shape(module: AdapterModule) -> tuple[int, int]:
    """The shape of a linear layer's weight."""
    (rows, cols, _), (inner_rows, inner_cols, _) = _sizes(module, "1"), _sizes(module, "2")
    return rows * inner_rows, cols * inner_cols


def exact_factors(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """(A₁ B₁) ⊗ (A₂ B₂) = (A₁ ⊗ A₂) (B₁ ⊗ B₂). A whole matrix is itself times the identity. Ranks are multiplied."""
    pairs = []
    for k in "12":
        if f"lokr_w{k}" not in arrays:
            pairs.append((arrays[f"lokr_w{k}_a"], arrays[f"lokr_w{k}_b"]))
            continue
        whole = arrays[f"lokr_w{k}"]
        rows, cols = whole.shape
        pairs.append((whole, np.eye(cols)) if cols <= rows else (np.eye(rows), whole))
    (one, first), (other, second) = pairs
    ranks = [len(arrays[part]) for part in ("lokr_w1_b", "lokr_w2_b") if part in arrays]
    one = one * scaling(module, ranks[0] if ranks else None)
    return np.asarray(np.kron(one, other), np.float64), np.asarray(np.kron(first, second), np.float64)


KIND = AdapterKind(
    title="LoKr",
    types=("LOKR",),
    parts=("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    shapes=shapes,
    prepare=prepare,
    change=change,
    used=frozenset({"r", "alpha"}),
    unused=frozenset(
        "rank_dropout module_dropout rank_dropout_scale use_effective_conv2d decompose_both decompose_factor".split()
    ),
    exact=ExactFactors(exact_shape, lambda module: _sizes(module, "1")[2] * _sizes(module, "2")[2], exact_factors),
    patterns={"r": "rank_pattern", "alpha": "alpha_pattern"},
)
