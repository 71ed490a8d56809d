"""Merge methods of your own. Recipes name them as `./my_method.py:agree` and `./my_method.py:keep_norm`."""

import numba
import numpy as np

from weightsmith import PerModel, block_method, tensor_method


@block_method
@numba.njit(nogil=True)
def agree(models, base, out, weight: PerModel[float], power: float = 1.0):
    """Task arithmetic that goes only as far as the models agree.

    out = base + c^power Σ wᵢδᵢ, where c = |Σ wᵢδᵢ| / Σ |wᵢδᵢ| is 1 for an element that all models move the same way.
    """
    for j in range(out.size):
        total = length = 0.0
        for i in range(len(models)):
            delta = weight[i] * (models[i, j] - base[j])
            total += delta
            length += abs(delta)
        out[j] = base[j] + (abs(total) / length) ** power * total if length > 0 else base[j]


@tensor_method(min_models=2)
def keep_norm(models, weight: PerModel[float] = 1.0):
    """The weighted average, as long as the models are on average."""
    average = sum(w * model for w, model in zip(weight, models, strict=True)) / sum(weight)
    norm = np.mean([np.linalg.norm(model) for model in models])
    return average * (norm / max(np.linalg.norm(average), 1e-12))
