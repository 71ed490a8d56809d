"""Random router weights, for models that will be trained."""

from __future__ import annotations

import math

import numpy as np

from weightsmith._features.mixture.routing.gates import Rows


def normal(shape: tuple[int, int, int], seed: int) -> Rows:
    """N(0, 1) entries, like mergekit's `random`. Logits are as large as the hidden state's norm, so one expert dominates."""
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, np.float32)


def uniform(shape: tuple[int, int, int], seed: int) -> Rows:
    """U(-1/√hidden, 1/√hidden) entries, like mergekit's `uniform_random` and torch's linear layers."""
    bound = np.float32(1 / math.sqrt(shape[2]))
    return np.random.Generator(np.random.PCG64(seed)).random(shape, np.float32) * (2 * bound) - bound
