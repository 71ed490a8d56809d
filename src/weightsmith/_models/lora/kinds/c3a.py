"""C3A: a circular convolution for each block of inputs and outputs (Chen et al. 2024, arXiv 2407.19342).

W + C / inputs: element (q, s) of a block of C is number (s - q) mod b of its kernel.
"""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes, full_rank


def shapes(module: AdapterModule) -> Shapes:
    """[outputs / b, inputs / b, b]."""
    size = module.whole("block_size", 256)
    if len(module.shape) != 2 or module.inputs % size or module.outputs % size:
        raise ValueError(f"block_size is {size}, which does not divide the weight {list(module.shape)}")
    return {"c3a_kernel": (module.outputs // size, module.inputs // size, size)}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """The kernels."""
    return (arrays["c3a_kernel"] / module.inputs,)


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Add the kernel of its block to each row, turned by the row's place in the block."""
    (kernels,) = arrays
    size = kernels.shape[2]
    for i, row in enumerate(rows):
        row += np.roll(kernels[(first + i) // size], (first + i) % size, axis=1).ravel()


KIND: AdapterKind = AdapterKind(
    title="C3A",
    types=("C3A",),
    parts=("c3a_kernel",),
    shapes=shapes,
    prepare=prepare,
    exact=full_rank(lambda: KIND),
    change=change,
    used=frozenset({"block_size"}),
    patterns={"block_size": "block_size_pattern"},
)
