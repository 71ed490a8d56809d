"""Tokens that are in a vocabulary, and hardly ever were in the training data.

Land and Bartolo 2024, "Fishing for Magikarp", https://arxiv.org/abs/2405.05417: the rows of such tokens are near the mean of
rows that were surely not trained, and in an embedding with a head of its own they are short.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsmith.transplant.approximations.base import Side, Tables

SHARE = 0.01
"""Of the other rows, that are called poorly trained by each criterion, at most."""

SIMILAR = 0.5
"""A row with a smaller cosine to the untrained ones is not called so."""


def poorly_trained(tables: Tables, side: Side, unused: Sequence[int], *, by_length: bool) -> frozenset[int]:
    """Numbers of rows that are poorly trained, besides the unused ones.

    unused     rows that are surely not trained
    by_length  short rows count too
    """
    lengths = np.concatenate([np.linalg.norm(rows, axis=1) for _, rows in tables.chunks(side)])
    bad, known = np.zeros(len(lengths), bool), np.ones(len(lengths), bool)
    known[list(unused)] = False
    if not known.any():
        return frozenset()
    if by_length:
        bad |= lengths < np.quantile(lengths[known], SHARE)
    if len(unused):
        mean = tables.rows(side, unused).mean(0, dtype=np.float64)
        mean = (mean / max(float(np.linalg.norm(mean)), 1e-30)).astype(np.float32)
        cosines = np.concatenate([rows @ mean for _, rows in tables.chunks(side)]) / np.maximum(lengths, 1e-30)
        bad |= cosines > max(float(np.quantile(cosines[known], 1 - SHARE)), SIMILAR)
    found: npt.NDArray[np.int64] = np.flatnonzero(bad)
    return frozenset(found.tolist())
