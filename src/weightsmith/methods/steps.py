"""Steps after a merge: the merged delta of each tensor is measured and scaled before it is added to the base, or its singular
values are changed.

Every method that needs a base has them as parameters. On language models the length of merged - base decides whether a merge
works (https://arxiv.org/abs/2511.21437; the card of a merge lists it), and most methods leave it to chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weightsmith.jobs.job import Job, Matrix
from weightsmith.jobs.linears import is_linear, needs_torch
from weightsmith.methods.base import Method, Parameter

PARAMETERS = (
    Parameter(
        "spectrum",
        "str",
        "What is done to the singular values S of each linear layer's merged delta: `flatten` moves them towards their mean "
        "(Iso-C, arXiv 2502.04959), `floor` raises those below the one at which S sums to the share `spectrum_strength` "
        "(subspace boosting, arXiv 2506.16506), `calibrate` divides by how often the models repeat a direction (SVC, arXiv "
        "2602.05536). Takes torch.",
        default="none",
        choices=("none", "flatten", "floor", "calibrate"),
    ),
    Parameter(
        "spectrum_strength",
        "float",
        "`flatten`: (1 - strength) S + strength · mean S, by default 0.1. `floor`: the share, by default 0.01. `calibrate`: "
        "the least repetition assumed, by default 1/K for K models; 1 only weakens.",
        minimum=0.0,
        maximum=1.0,
        optional=True,
    ),
    Parameter(
        "norm_match",
        "str",
        "Give each tensor's merged delta the Frobenius norm of: the inputs' deltas, on average (`mean`) or at most (`max`), or "
        "of their plain weighted sum (`task_arithmetic`).",
        default="none",
        choices=("none", "mean", "max", "task_arithmetic"),
    ),
    Parameter(
        "delta_scale",
        "float",
        "Factor on the merged delta, after all else. A gradient over the layers is LiNeS: shallow layers change less.",
        default=1.0,
    ),
)


def with_steps(method: Method) -> Method:
    """The method with the steps' parameters, and a job that carries them out where they ask for something.

    As it is when it needs no base, or has a parameter by the name of one of the steps': that is then its own.
    """
    if method.base != "required" or not {p.name for p in PARAMETERS}.isdisjoint(p.name for p in method.parameters):
        return method
    return replace(
        method,
        parameters=method.parameters + PARAMETERS,
        job=lambda matrix: _scaled(matrix, lambda inner: _spectrum(inner, method.job)),
        check=lambda shared, models: (
            method.check(shared, models) or (needs_torch(shared, models) if shared.get("spectrum", "none") != "none" else "")
        ),
        elementwise=lambda shared: (
            method.elementwise(shared) and {shared.get("spectrum", "none"), shared.get("norm_match", "none")} == {"none"}
        ),
    )


def _scaled(matrix: Matrix, make: Callable[[Matrix], Job]) -> Job:
    norm = matrix.shared.get("norm_match", "none")
    scale = float(matrix.shared.get("delta_scale", 1.0) or 0.0)
    if norm == "none" and scale == 1.0:
        return make(matrix)
    from weightsmith.jobs.scaled import ScaledJob

    return ScaledJob(matrix, make, str(norm), scale)


def _spectrum(matrix: Matrix, make: Callable[[Matrix], Job]) -> Job:
    """The method's job, with the step after it where it is asked for and the tensor is a linear layer's weight."""
    how = str(matrix.shared.get("spectrum", "none"))
    if how == "none" or not is_linear(matrix.name, matrix.shape):
        return make(matrix)
    strength = matrix.shared.get("spectrum_strength")
    from weightsmith.jobs.spectrum import SpectrumJob

    return SpectrumJob(matrix, make, how, None if strength is None else float(strength))
