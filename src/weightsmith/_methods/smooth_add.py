"""smooth_add: add one model's difference from the base to another, smoothed."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from weightsmith._methods.family import Lambda
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

Array = npt.NDArray[np.float64]

_RADIUS, _SIGMA = 4, 1.0
_AT_ONCE = 1 << 20  # elements of windows in memory: 8 MiB


def smooth(delta: Array) -> Array:
    """A median filter over 3 elements of each dimension, then a Gaussian one with the deviation 1: float64, any shape.

    Beyond the edges, elements are repeated in reverse order, the outermost first. A number without dimensions stays as it is.
    Cost: five arrays of the same size.

    >>> smooth(np.array([0.0, 0.0, 9.0, 0.0, 0.0]))
    array([0., 0., 0., 0., 0.])
    >>> smooth(np.full((2, 3), 0.5)).round(12).tolist()
    [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """
    if delta.ndim == 0 or delta.size == 0:
        return delta
    smoothed = _medians(delta)
    for axis in range(delta.ndim):
        smoothed = _blurred(smoothed, axis)
    return smoothed


def _medians(values: Array) -> Array:
    padded, medians = np.pad(values, 1, mode="symmetric"), np.empty_like(values)
    count = 3**values.ndim
    high = max(1, _AT_ONCE * len(values) // (count * values.size))
    for first in range(0, len(values), high):
        part = padded[first : first + high + 2]
        windows = np.lib.stride_tricks.sliding_window_view(part, (3,) * values.ndim)
        flat = windows.reshape(*windows.shape[: values.ndim], count)
        medians[first : first + high] = np.partition(flat, count // 2, axis=-1)[..., count // 2]
    return medians


def _blurred(values: Array, axis: int) -> Array:
    # math.exp, because numpy's differs in the last bit from one kind of CPU to another
    weights = np.array([math.exp(-0.5 * (place / _SIGMA) ** 2) for place in range(-_RADIUS, _RADIUS + 1)])
    weights /= weights.sum()
    margins = [(_RADIUS, _RADIUS) if k == axis else (0, 0) for k in range(values.ndim)]
    padded = np.moveaxis(np.pad(values, margins, mode="symmetric"), axis, 0)
    total = np.zeros_like(np.moveaxis(values, axis, 0))
    for k, weight in enumerate(weights):
        total += weight * padded[k : k + len(total)]
    return np.moveaxis(total, 0, axis)


@merge_method(
    title="add a fine-tune's smoothed changes to another model",
    family="delta",
    summary="""Adds what the second model learnt to the first model, and smooths it on the way. This is SuperMerger's
`smoothAdd`, for image models. The second model's difference from the base passes through two filters: a median filter over 3
elements in each dimension, then a Gaussian filter with a standard deviation of 1. The filters treat neighbours in a
tensor like neighbours in an image, so most of a difference that looks like noise is lost.""",
    use="""When adding the plain difference (task_arithmetic) breaks the images: the effect is weaker. The order of the models
matters: the first one is changed. Convolutions take most of the time, because their windows have 81 elements.""",
    passes="Two: the difference, then the result.",
    source="hako-mikan, SuperMerger, smoothAdd, https://github.com/hako-mikan/sd-webui-supermerger",
    formula="out = A + λ gauss(median(B - base))",
    min_models=2,
    max_models=2,
    example=example_recipe("smooth_add", shared="{lambda: 1.0}"),
)
def smooth_add(matrix: Matrix, lambda_: Lambda = 1.0) -> Job:
    from weightsmith._methods.jobs.combination import ChangedDeltaJob

    return ChangedDeltaJob(matrix, smooth, lambda_, start=1, ends=(0, 2))
