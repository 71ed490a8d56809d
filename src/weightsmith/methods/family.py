"""Parameters that the task-vector methods share, and the job they make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightsmith.jobs.job import Job, Matrix, Parameters
from weightsmith.methods.base import Parameter

if TYPE_CHECKING:
    from weightsmith.jobs.survey import Survey
    from weightsmith.jobs.task_vectors import Combine, Election, Sparsifier
    from weightsmith.planner.steps import Settings, Step

LAMBDA = Parameter("lambda", "float", "Factor on the merged task vector.", default=1.0)
INT8_MASK = Parameter("int8_mask", "bool", "Accepted for mergekit recipes.", default=False, ignored="masks take no memory here")
DENSITY = Parameter(
    "density", "float", "Share of the delta that is kept.", scope="model", default=1.0, minimum=0.0, maximum=1.0
)
GAMMA = Parameter(
    "gamma",
    "float",
    "Share of the delta, the largest elements of all, that is dropped before `density` is kept.",
    scope="model",
    default=0.01,
    minimum=0.0,
    maximum=1.0,
)
EPSILON = Parameter(
    "epsilon",
    "float",
    "The smallest element of a row is kept with probability density - epsilon, the largest with density + epsilon.",
    scope="model",
    default=0.15,
    minimum=0.0,
    maximum=0.5,
)
SCOPE = Parameter(
    "scope",
    "str",
    "What magnitudes are ranked among: the `tensor` (mergekit's way), each `row`, or all tensors of the `model`, which "
    "takes a pass over them before the merge and keeps all elements as large as the threshold.",
    default="tensor",
    choices=("tensor", "row", "model"),
)


def normalize(default: bool) -> Parameter:
    """The `normalize` parameter with a method's own default."""
    return Parameter("normalize", "bool", "Divide by the sum of the weights that contributed.", default=default)


_RESCALES = {
    "none": "`none` does nothing",
    "l1": "`l1` (mergekit's `true`) restores each delta's L1 norm",
    "inv_density": "`inv_density` divides by the density",
    "inv_probability": "`inv_probability` divides each element by the probability with which it was kept",
}


def rescale(default: str, *choices: str) -> Parameter:
    """The `rescale` parameter with a method's own default and, besides `none` and `l1`, its own choices."""
    allowed = ("none", "l1", *choices)
    return Parameter(
        "rescale",
        "str",
        f"What the mask took away is made up for: {'; '.join(_RESCALES[c] for c in allowed)}.",
        default=default,
        choices=allowed,
        booleans=("none", "l1"),
    )


def sums_to_zero(models: Sequence[Parameters]) -> str:
    """What is wrong with weights that are to be normalised and sum to zero (mergekit writes NaN, or divides by 1); else ""."""
    total = sum(float(m["weight"] or 0) for m in models if "weight" in m)
    return f"the weights sum to {total:g}, so they cannot be normalised" if abs(total) < 1e-8 else ""


def check_normalize(shared: Parameters, models: Sequence[Parameters]) -> str:
    """The check of methods with a `normalize` parameter."""
    return sums_to_zero(models) if shared["normalize"] else ""


def check_probabilities(shared: Parameters, models: Sequence[Parameters]) -> str:
    """Probabilities of keeping an element must be probabilities; a density of 1 keeps everything."""
    for own in models:
        density, epsilon = float(own.get("density") or 0), float(own.get("epsilon") or 0)
        if "density" in own and 0 < density < 1 and not (density - epsilon > 0 and density + epsilon < 1):
            return (
                f"density {density:g} and epsilon {epsilon:g} make probabilities from {density - epsilon:g} to "
                f"{density + epsilon:g}; they must lie between 0 and 1: use an epsilon below {min(density, 1 - density):g}"
            )
    return ""


def task_vector_job(matrix: Matrix, sparsifier: Sparsifier, *, elect: Election = "none", combine: Combine | None = None) -> Job:
    """The job of a method of the family, from its parameters; `combine` where `normalize` does not say it."""
    from weightsmith.jobs.task_vectors import Axes, TaskVectorJob

    shared = matrix.shared
    axes = Axes(
        sparsifier=sparsifier,
        rescale=shared.get("rescale") or "none",  # type: ignore[arg-type]  # one of the parameter's choices
        elect=elect,
        combine=combine or ("mean" if shared["normalize"] else "sum"),
        factor=float(shared["lambda"]),  # type: ignore[arg-type]
        scope=shared.get("scope") or "tensor",  # type: ignore[arg-type]
    )
    return TaskVectorJob(matrix, axes)


def model_thresholds(merged: Sequence[tuple[Step, Settings]]) -> Survey | None:
    """The survey of `scope: model`; None where no tensor has that."""
    wanted: dict[tuple[int, float, float], None] = {}
    sizes: dict[int, int] = {}
    for step, settings in merged:
        if settings.shared.get("scope") != "model":
            continue
        for source, own in zip(step.inputs[1:], settings.models[1:], strict=True):
            sizes[source.model] = sizes.get(source.model, 0) + step.out.size
            outliers = settings.shared.get("sparsify", "magnitude_outliers") == "magnitude_outliers"
            density, gamma = float(own["density"] or 0), float(own.get("gamma") or 0) if outliers else 0.0
            if density > 0:
                wanted[source.model, density, gamma] = None
    if not wanted:
        return None
    from weightsmith.jobs.survey import Thresholds

    return Thresholds(sizes, list(wanted))
