"""BOFT: several rotations of the inputs, each of blocks of shuffled columns, and a factor on each row (Liu et al. 2023,
arXiv 2311.06243): W' = s ∘ W M₀ᵀ M₁ᵀ …, with Mᵢ = Pᵢ Bᵢ Pᵢᵀ, Bᵢ block-diagonal and Pᵢ a butterfly permutation.
"""

from __future__ import annotations

import numpy as np

from weightsmith._models.lora.kinds.oft import cayley
from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes


def shapes(module: AdapterModule) -> Shapes:
    """R [factors, blocks, size, size] and s [outputs, 1] of a linear layer."""
    shape = module.parts["boft_R"].shape if module.has("boft_R") else ()
    if len(module.shape) != 2:
        raise ValueError("BOFT of a convolution is not read")
    if len(shape) != 4 or 0 in shape or module.inputs % shape[1]:
        raise ValueError(f"boft_R is {list(shape)}, not [factors, blocks, size, size] of {module.inputs} inputs")
    size = module.inputs // shape[1]
    if shape[0] > 1 and (size % 2 or shape[1] % 2 ** (shape[0] - 1)):
        raise ValueError(f"{shape[0]} butterfly factors do not fit {shape[1]} blocks of {size}")
    return {"boft_R": (shape[0], shape[1], size, size), "boft_s": (module.outputs, 1)}


def butterfly(inputs: int, blocks: int, half: int) -> np.ndarray:
    """The order of columns in which a block has halves of blocks that lie apart.

    >>> butterfly(8, 1, 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    order = np.arange(inputs).reshape(blocks, -1, half)
    return np.concatenate((order[:, 0::2], order[:, 1::2]), axis=1).ravel()


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """The blocks that rows are multiplied with, and the factors of rows."""
    weights = arrays["boft_R"]
    turned = cayley(0.5 * (weights - weights.transpose(0, 1, 3, 2))).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(turned), arrays["boft_s"]


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Rotate and scale rows."""
    from weightsmith._kernels.combine import rotate_blocks

    rotations, scales = arrays
    factors, blocks, size, _ = rotations.shape
    for i, turned in enumerate(rotations):
        inputs = rows.shape[1]
        order = butterfly(inputs, blocks // 2**i, size // 2) if factors > 1 else np.arange(inputs)
        shuffled, out = np.empty_like(rows), np.empty_like(rows)
        shuffled[:, order] = rows
        rotate_blocks(shuffled, turned, out)
        rows[:] = out[:, order]
    rows *= scales[first : first + len(rows)]


KIND = AdapterKind(
    title="BOFT",
    types=("BOFT",),
    parts=("boft_R", "boft_s"),
    shapes=shapes,
    prepare=prepare,
    change=change,
    unused=frozenset({"boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout"}),
)
