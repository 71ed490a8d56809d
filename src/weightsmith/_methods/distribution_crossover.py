"""distribution_crossover: two models mixed by frequency, along the weights of their base in order of size."""

from __future__ import annotations

import numpy as np

from weightsmith._methods.crossover import Alpha, Array, Tilt, filter_spectrum, mixes
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


def filtered_in_order(delta: Array, order: Array, alpha: float, tilt: float) -> Array:
    """As `crossover.filtered` of one dimension, along which the elements of delta are in the order of those of `order`.

    Equal ones stay in the order of their positions. Cost: six arrays of the same size.
    """
    if not delta.size:
        return delta
    places = np.argsort(order, axis=None, kind="stable")
    spectrum = np.fft.rfft(delta.reshape(-1)[places])
    filter_spectrum(spectrum, alpha, tilt)
    result = np.empty(delta.size)
    result[places] = np.fft.irfft(spectrum, delta.size)
    return result.reshape(delta.shape)


@merge_method(
    title="two models mixed by frequency, in the base's order",
    family="delta",
    summary="""Sorts the elements of each tensor by the value that they have in the base, and mixes the two models by frequency
along that order. A supplies the low frequencies: what it did to all weights of about the same value. B supplies the high
ones, which differ from weight to weight. `alpha` is the share of the frequencies that come from B. `tilt` makes the cut soft.
This is `distribution_crossover` of sd-mecha before version 0.1, for image models. Elements with equal values in the base stay
in the order of their positions. In sd-mecha, torch's sort decides.""",
    use="""For two fine-tunes of one image model, where recipes of sd-mecha call for it. The base is what both were
tuned from. No evidence for language models is known.""",
    passes="Two: the difference and the base, then the result.",
    source="ljleb, sd-mecha 0.0, distribution_crossover, https://github.com/ljleb/sd-mecha",
    formula="out = A + P⁻¹ F⁻¹(share · F(P (B - A))),  P sorts by the base",
    min_models=2,
    max_models=2,
    example=example_recipe("distribution_crossover", shared="{alpha: 0.5, tilt: 0.5}"),
)
def distribution_crossover(matrix: Matrix, alpha: Alpha = 0.5, tilt: Tilt = 0.0) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob, SpectralDeltaJob

    if mixes(alpha, tilt) or not matrix.shape:
        return CombinationJob(matrix, np.array([0.0, 1 - alpha, alpha]))

    def change(delta: Array, base: Array) -> Array:
        return filtered_in_order(delta, base, alpha, tilt)

    return SpectralDeltaJob(matrix, change, 1.0, start=1, ends=(1, 2), order=0)
