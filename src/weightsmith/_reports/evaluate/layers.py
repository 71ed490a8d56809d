"""How far what leaves each layer of a model is from what leaves that of another, on the first rows of a text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from weightsmith._activations.losses import Scored
from weightsmith._activations.model import TextRun
from weightsmith._activations.scored_rows import ScoredRows
from weightsmith._activations.work import LayerWork
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays

SAMPLE_BYTES = 128 << 20
"""The most states of a model that are kept, of all layers together; at least one row."""

LayerErrors = tuple[float, ...]
"""‖own - reference's‖ / ‖reference's‖ of what leaves each layer, over the scored tokens of the sampled rows."""


def with_samples(scored: Scored) -> tuple[Product, ...]:
    """Its products, and after each layer one that keeps the first rows of what leaves it: the rest need not stay on disk."""
    run, products, layers = scored.run, list[Product](), itertools.count()
    for product in scored.products:
        products.append(product)
        if product.op == "states":
            layer = next(layers)
            kept = run.array(f"sample {layer}", "F32", (_rows(run), run.text.tokens, run.base.hidden))
            work = LayerWork(run.base, run.packages, layer, product.name)
            products.append(run.product(kept.name, "sampled_states", (kept,), work, (), (product,)))
    return tuple(products)


def _rows(run: TextRun) -> int:
    row = 4 * run.text.tokens * run.base.hidden * run.layers
    return max(1, min(run.text.rows, SAMPLE_BYTES // row))


def layer_errors(arrays: Mapping[str, Arrays], reference: Mapping[str, Arrays], rows: ScoredRows) -> LayerErrors | None:
    """Error of each layer; None if the models' layers differ. Arrays are keyed by name, with those of `with_samples`."""
    names = [name for name in arrays if name.startswith("sample ")]
    if names != [name for name in reference if name.startswith("sample ")]:
        return None
    errors = []
    for name in names:
        [ours], [theirs] = arrays[name], reference[name]
        if ours.shape != theirs.shape:
            return None
        error = norm = 0.0
        for mine, other, nbytes in zip(ours, theirs, rows.nbytes, strict=False):
            is_scored = nbytes >= 0
            reference_states = other[is_scored].astype(np.float64)
            error += float(np.square(mine[is_scored] - reference_states).sum())
            norm += float(np.square(reference_states).sum())
        errors.append((error / norm) ** 0.5 if norm else 0.0)
    return tuple(errors)


def worst_layers(errors: Sequence[float], most: int = 3) -> list[tuple[int, float, float]]:
    """Layers where the error grows most, worst first: (layer, error of its output, increase).

    >>> worst_layers([0.1, 0.12, 0.3], most=2)
    [(2, 0.3, 0.18), (0, 0.1, 0.1)]
    """
    before = [0.0, *errors[:-1]]
    grown = [(layer, error, round(error - last, 12)) for layer, (error, last) in enumerate(zip(errors, before, strict=True))]
    return sorted(grown, key=lambda layer: -layer[2])[:most]
