"""SHiRA: few elements of a weight, as many as a LoRA has, are trained themselves (Bhardwaj et al. 2024, arXiv 2406.13175)."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes, full_rank


def shapes(module: AdapterModule) -> Shapes:
    """r · (outputs + inputs) numbers, and their rows and columns."""
    number = module.whole("r") * (module.outputs + module.inputs)
    return {"shira_weight": (number,), "shira_indices": (2, number)}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """Rows, columns and numbers, in the order of the rows."""
    down, across = arrays["shira_indices"]
    for places, size in ((down, module.outputs), (across, module.inputs)):
        if not 0 <= places.min() <= places.max() < size:
            raise ValueError(f"shira_indices has a place that is outside the weight {list(module.shape)}")
    order = np.argsort(down, kind="stable")
    return down[order], across[order], arrays["shira_weight"][order]


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Add the numbers of these rows."""
    down, across, numbers = arrays
    begin, end = np.searchsorted(down, (first, first + len(rows)))
    np.add.at(rows, (down[begin:end].astype(int) - first, across[begin:end].astype(int)), numbers[begin:end])


KIND: AdapterKind = AdapterKind(
    title="SHiRA",
    types=("SHIRA",),
    parts=("shira_weight", "shira_indices"),
    shapes=shapes,
    prepare=prepare,
    exact=full_rank(lambda: KIND),
    change=change,
    used=frozenset({"r"}),
    unused=frozenset({"mask_type", "random_seed"}),
    integers=frozenset({"shira_indices"}),
)
