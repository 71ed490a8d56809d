"""MiSS, earlier Bone: one block [r, outputs] is added to each r columns of a weight (Kang and Yin 2024, arXiv 2409.15371).

With `bat`, each square block w of a weight becomes w + w @ b + b, with one b for each r rows. With `mini`, the block has
`mini_r` columns, which are repeated.
"""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, ExactFactors, Rows, Shapes


def shapes(module: AdapterModule) -> Shapes:
    """[r, outputs]; of bat [outputs / r, r, r], of mini [r, mini_r]."""
    rank, form = module.whole("r"), module.settings.get("init_weights", True)
    part = "bone_block" if module.has("bone_block") else "miss_block"
    if len(module.shape) != 2 or rank > module.inputs:
        raise ValueError(f"a weight {list(module.shape)} is no linear layer with {rank} inputs or more")
    if form == "bat":
        if module.inputs % rank or module.outputs % rank:
            raise ValueError(f"bat needs blocks [{rank}, {rank}] that fill the weight {list(module.shape)}")
        return {part: (module.outputs // rank, rank, rank)}
    if form == "mini":
        columns = module.whole("mini_r", 1)
        if module.outputs % columns:
            raise ValueError(f"mini_r is {columns}, which does not divide {module.outputs} outputs")
        return {part: (rank, columns)}
    return {part: (rank, module.outputs)}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """What is added to r columns of each row [rows, r]; of bat the blocks."""
    (block,) = arrays.values()
    return (block if block.ndim == 3 else np.ascontiguousarray(block.T),)


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Change rows, which need not begin or end with a block."""
    from weightsmith._kernels.combine import rotate_blocks

    (block,) = arrays
    inputs, numbers = rows.shape[1], np.arange(first, first + len(rows))
    if block.ndim == 3:
        rank = block.shape[1]
        for i in range(first // rank, (first + len(rows) - 1) // rank + 1):
            here = rows[max(0, i * rank - first) : (i + 1) * rank - first]
            product = np.empty_like(here)
            rotate_blocks(np.ascontiguousarray(here), block[i : i + 1], product)
            here += product
        rows += np.tile(block[numbers // rank, numbers % rank], (1, inputs // rank))
        return
    rows += np.tile(block[numbers % len(block)], (1, -(-inputs // block.shape[1])))[:, :inputs]


def exact_rank(module: AdapterModule) -> int:
    """r, unless what is added depends on the weight."""
    if module.settings.get("init_weights", True) == "bat":
        raise ValueError("with bat, what is added depends on the weight")
    return module.whole("r")


def exact_factors(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """The block, for each r columns; of mini repeated for all rows."""
    (block,) = prepare(module, arrays)
    rank = block.shape[1]
    right = np.tile(np.eye(rank), (1, -(-module.inputs // rank)))[:, : module.inputs]
    return np.tile(block, (module.outputs // len(block), 1)), np.ascontiguousarray(right)


KIND = AdapterKind(
    title="MiSS",
    types=("MISS", "BONE"),
    parts=("miss_block", "bone_block"),
    shapes=shapes,
    prepare=prepare,
    change=change,
    exact=ExactFactors(None, exact_rank, exact_factors),
    used=frozenset({"r", "mini_r", "init_weights"}),
    unused=frozenset({"miss_dropout"}),
)
