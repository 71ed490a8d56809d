"""OFT: the inputs of a module are rotated, block by block (Qiu et al. 2023, arXiv 2306.07280; OFTv2, arXiv 2506.19847).

Each block R is the Cayley transform of a skew-symmetric matrix, or the first terms of its Neumann series. W' = W Rᵀ; of an
embedding, W' = W R.
"""

from __future__ import annotations

import math

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes

_OF_EMBEDDING = "oft_embedding_R"


def shapes(module: AdapterModule) -> Shapes:
    """[blocks, size · (size - 1) / 2]: the part above the diagonal. One block may stand for all."""
    part = _OF_EMBEDDING if module.has(_OF_EMBEDDING) else "oft_R"
    shape = module.parts[part].shape if module.has(part) else ()
    if len(shape) != 2:
        raise ValueError(f"{part} is {list(shape)}, not [blocks, elements]: OFT of PEFT before 0.16 is not read")
    size = (1 + math.isqrt(1 + 8 * shape[1])) // 2
    if module.inputs % size:
        raise ValueError(f"{part} is {list(shape)}: blocks of {size} do not divide {module.inputs} inputs")
    return {part: (1 if module.flag("block_share") else module.inputs // size, size * (size - 1) // 2)}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """The blocks that rows are multiplied with, [blocks, size, size]."""
    ((part, above),) = arrays.items()
    number, size = len(above), (1 + math.isqrt(1 + 8 * above.shape[1])) // 2
    skew = np.zeros((number, size, size))
    skew[:, *np.triu_indices(size, 1)] = above
    skew -= skew.transpose(0, 2, 1)
    if module.flag("coft"):  # PEFT projects again when it merges
        limit = module.number("eps", 6e-5) / math.sqrt(number)
        norms = np.sqrt((skew * skew).sum(axis=(1, 2), keepdims=True))
        skew = np.where(norms <= limit, skew, limit * skew / np.where(norms > 0, norms, 1.0))
    terms = module.whole("num_cayley_neumann_terms", 5)
    turned = _neumann(skew, terms) if module.flag("use_cayley_neumann") else cayley(skew)
    return (np.ascontiguousarray(turned if part == _OF_EMBEDDING else turned.transpose(0, 2, 1)),)


def cayley(skew: Rows) -> Rows:
    """(I - Q) (I + Q)⁻¹ of each block; both factors commute."""
    one = np.eye(skew.shape[-1])
    return np.linalg.solve(one + skew, one - skew).astype(np.float64, copy=False)


def _neumann(skew: Rows, terms: int) -> Rows:
    """I + 2 Q + 2 Q² + … + Q^(terms - 1), as PEFT sums it."""
    total = np.eye(skew.shape[-1]) + (2 * skew if terms > 1 else 0 * skew)
    if terms > 2:
        power = skew
        for _ in range(2, max(3, terms - 1)):
            power = power @ skew
            total += 2 * power
        total += power @ skew
    return total


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Rotate rows."""
    from weightsmith._kernels.combine import rotate_blocks

    rotate_blocks(rows.copy(), arrays[0], rows)


KIND = AdapterKind(
    title="OFT",
    types=("OFT",),
    parts=("oft_R", _OF_EMBEDDING),
    shapes=shapes,
    prepare=prepare,
    change=change,
    used=frozenset({"block_share", "coft", "eps", "use_cayley_neumann", "num_cayley_neumann_terms"}),
    unused=frozenset({"r", "oft_block_size", "module_dropout"}),
)
