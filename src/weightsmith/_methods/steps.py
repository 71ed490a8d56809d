"""Steps after a merge: the merged delta of each tensor is measured and scaled before it is added to the base, or its singular
values are changed.

Every method that needs a base has them as parameters. On language models the length of merged - base decides whether a merge
works (https://arxiv.org/abs/2511.21437; the card of a merge lists it), and most methods leave it to chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np

from weightsmith._base.torch_use import needs_torch
from weightsmith._methods.method import Bounds, Method, Requirement, bound, parameters_of
from weightsmith.abc.job import Job, Matrix


def _job(
    matrix: Matrix,
    make: Callable[[Matrix], Job],
    spectrum: Annotated[
        Literal["none", "flatten", "floor", "calibrate"],
        "Change the singular values S of each linear layer's merged delta. `flatten` moves them towards their mean (Iso-C, "
        "arXiv 2502.04959). `floor` raises small values to the one at which S sums to the share `spectrum_strength` (subspace "
        "boosting, arXiv 2506.16506). `calibrate` divides by how often the models repeat a direction (SVC, arXiv 2602.05536). "
        "Requires torch.",
    ] = "none",
    spectrum_strength: Annotated[
        float | None,
        "`flatten`: (1 - strength) S + strength · mean S, 0.1 by default. `floor`: the share, 0.01 by default. `calibrate`: "
        "the minimum repetition to assume, 1/K for K models by default; 1 only weakens.",
        Bounds(0.0, 1.0),
    ] = None,
    aim: Annotated[
        float | None,
        "Scale down the columns of each linear layer's merged delta whose inputs are large in the base model, to this share "
        "for the largest. The factor is 1 - (1 - aim) a / max a, where a is the mean magnitude of an input on the base's text "
        "(AIM, arXiv 2502.02421; 0.4 there). The recipe names the text.",
        Bounds(0.0, 1.0),
    ] = None,
    norm_match: Annotated[
        Literal["none", "mean", "max", "task_arithmetic"],
        "Rescale each tensor's merged delta to a Frobenius norm: the `mean` or the `max` of the inputs' deltas, or that of "
        "their plain weighted sum (`task_arithmetic`).",
    ] = "none",
    delta_scale: Annotated[
        float, "Factor on the merged delta, applied last. A gradient over the layers is LiNeS: shallow layers change less."
    ] = 1.0,
) -> Job:
    """The job that `make` makes, with the steps after it that are asked for; `spectrum` and `aim` only of a linear layer."""

    def spectral(matrix: Matrix) -> Job:
        if spectrum == "none" or matrix.role != "linear":
            return make(matrix)
        from weightsmith._methods.jobs.steps import SpectrumJob

        return SpectrumJob(matrix, make, spectrum, spectrum_strength)

    def changed(matrix: Matrix) -> Job:
        if aim is None or MAGNITUDES.kind not in matrix.statistics:
            return spectral(matrix)
        from weightsmith._methods.jobs.steps import ColumnsJob

        sizes = np.array(matrix.statistics[MAGNITUDES.kind][0], np.float64)
        return ColumnsJob(matrix, spectral, 1.0 - (1.0 - aim) * sizes / max(sizes.max(), np.finfo(np.float64).tiny))

    if norm_match == "none" and delta_scale == 1.0:
        return changed(matrix)
    from weightsmith._methods.jobs.steps import ScaledJob

    return ScaledJob(matrix, changed, norm_match, delta_scale)


MAGNITUDES = Requirement("magnitudes", of="base")

PARAMETERS = parameters_of(_job, skip=("matrix", "make"))


def with_steps(method: Method) -> Method:
    """The method with the steps' parameters, and a job that carries them out where they ask for something.

    As it is when it needs no base, or has a parameter by the name of one of the steps': that is then its own.
    """
    if method.base != "required" or not {p.name for p in PARAMETERS}.isdisjoint(p.name for p in method.parameters):
        return method
    job = bound(_job, PARAMETERS, skip=("matrix", "make"))
    check = bound(lambda spectrum: needs_torch() if spectrum != "none" else "", PARAMETERS)
    decomposed = bound(lambda spectrum: spectrum != "none", PARAMETERS)
    aims = bound(lambda aim: aim is not None, PARAMETERS)
    unchanged = bound(lambda spectrum, aim, norm_match: spectrum == norm_match == "none" and aim is None, PARAMETERS)
    return replace(
        method,
        parameters=method.parameters + PARAMETERS,
        job=lambda matrix: job(matrix, method.job, shared=matrix.shared),
        check=lambda shared, models: method.check(shared, models) or check(shared=shared),
        elementwise=lambda shared: method.elementwise(shared) and unchanged(shared=shared),
        on_device=lambda shared: method.on_device(shared) or decomposed(shared=shared),
        requires=lambda shared: (*method.requires(shared), *([MAGNITUDES] if aims(shared=shared) else ())),
    )
