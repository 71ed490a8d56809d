"""crossover: the low frequencies of one model's tensors, and the high ones of another's."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import numpy.typing as npt

from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

Array = npt.NDArray[np.float64]

Alpha = Annotated[float, "Share of the frequencies that come from the second model, from the highest down.", Bounds(0.0, 1.0)]
Tilt = Annotated[
    float,
    "0 is a sharp cut, and 1 mixes all frequencies alike. 2 cuts, too, and takes the lowest from the second model.",
    Bounds(0.0, 2.0),
]

_AT_ONCE = 1 << 16  # frequencies: 1 MiB of them


def mixes(alpha: float, tilt: float) -> bool:
    """Whether all frequencies have the same share: the result is a weighted sum."""
    return alpha in (0.0, 1.0) or tilt == 1.0


def shares(heights: Array, alpha: float, tilt: float) -> Array:
    """The share of the second model at frequencies of these heights, 0 the lowest and 1 the highest: of the same shape.

    >>> heights = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    >>> shares(heights, 0.5, 0.0), shares(heights, 0.5, 0.5)
    (array([0., 0., 0., 1., 1.]), array([0.  , 0.25, 0.5 , 0.75, 1.  ]))
    """
    if tilt in (0.0, 2.0):  # in float32, as sd-mecha decides whether a height is above the cut
        heights32 = heights.astype(np.float32)
        return (heights32 > np.float32(1 - alpha) if tilt == 0.0 else heights32 < np.float32(alpha)).astype(np.float64)
    slope = 1 / math.tan(math.pi * tilt / 2)
    cut = 1 - alpha if tilt <= 1 else alpha
    clipped: Array = np.clip(alpha + slope * (heights - cut), 0.0, 1.0)
    return clipped


def squared_heights(length: int, *, half: bool) -> Array:
    """The squares of the heights along one dimension. half: it is the one of which a real spectrum has a half.

    >>> np.sqrt(squared_heights(5, half=False)), np.sqrt(squared_heights(3, half=True))
    (array([0. , 0.5, 1. , 1. , 0.5]), array([0. , 0.5, 1. ]))
    """
    places = np.arange(length)
    top = length - 1 if half else length // 2
    heights: Array = (places if half else np.minimum(places, length - places)) / max(top, 1)
    return heights**2


def filter_spectrum(spectrum: npt.NDArray[np.complex128], alpha: float, tilt: float) -> None:
    """Multiply a spectrum, in place, by the second model's share of each frequency. Its last dimension has the half of them."""
    squares = [squared_heights(n, half=axis == spectrum.ndim - 1) for axis, n in enumerate(spectrum.shape)]
    high = max(1, _AT_ONCE * len(spectrum) // spectrum.size)
    for first in range(0, len(spectrum), high):
        part = slice(first, first + high)
        total = np.zeros(())
        for square in (squares[0][part], *squares[1:]):
            total = total[..., None] + square
        spectrum[part] *= shares(np.sqrt(total / spectrum.ndim), alpha, tilt)


def filtered(delta: Array, alpha: float, tilt: float) -> Array:
    """The part of a difference between two models, at the frequencies that come from the second: float64, any shape but ().

    Cost: three arrays of the same size.
    """
    if not delta.size:
        return delta
    axes = tuple(range(delta.ndim))
    spectrum = np.fft.rfftn(delta, axes=axes)
    filter_spectrum(spectrum, alpha, tilt)
    return np.fft.irfftn(spectrum, delta.shape, axes)


@merge_method(
    title="low frequencies of one model, high ones of another",
    family="sphere",
    summary="""Takes each tensor as an image, and mixes the two models by frequency: A, the base, supplies the low frequencies,
and B the high ones. The Fourier transform has as many dimensions as the tensor. A frequency's height is the root mean square
of its heights in all dimensions. Experts and other matrices that are stored in one tensor are transformed one by one. `alpha`
is how far B reaches down from the highest. `tilt` makes the cut soft: at 0.5, the share of B rises evenly from 0 to 1 with
`alpha: 0.5`. This is `crossover` of sd-mecha, for image models. There, `tilt` goes to 4, and above 2 it means the same as
4 - tilt here. At 2, sd-mecha takes 1 - alpha for alpha.""",
    use="""For fine-tunes of one image model, as sd-mecha's recipes do. Neighbours in a tensor are not neighbours of any
picture, so it is an experiment: look at the images. No evidence for language models is known.""",
    passes="Two: the difference, then the result.",
    source="ljleb, sd-mecha, crossover, https://github.com/ljleb/sd-mecha",
    formula="out = A + F⁻¹(share · F(B - A)),  share = [height > 1 - alpha] at tilt 0",
    max_models=1,
    example=example_recipe("crossover", shared="{alpha: 0.5, tilt: 0.5}", models=["fr"]),
)
def crossover(matrix: Matrix, alpha: Alpha = 0.5, tilt: Tilt = 0.0) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob, SpectralDeltaJob

    if mixes(alpha, tilt) or not matrix.shape:
        return CombinationJob(matrix, np.array([1 - alpha, alpha]))
    return SpectralDeltaJob(matrix, lambda delta: filtered(delta, alpha, tilt), 1.0, start=0, ends=(0, 1))
