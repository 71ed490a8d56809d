"""Parameters that the task-vector methods share, and the job they make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._methods.jobs import task_vectors as axes
from weightsmith._methods.jobs.task_vectors import Axes as Axes
from weightsmith._methods.method import Booleans, Bounds, Ignored, PerModel
from weightsmith._plans import Product, Settings, Step
from weightsmith.abc.job import Job, Matrix

Floats = Sequence[float]

Share = Annotated[PerModel[float], "Share of this model in the sum."]
Weight = Annotated[PerModel[float], "Factor on this model's delta."]
Lambda = Annotated[float, "Factor on the merged task vector."]
Int8Mask = Annotated[bool, "Accepted for mergekit recipes.", Ignored("masks take no memory here")]
Density = Annotated[PerModel[float], "Share of the delta to keep.", Bounds(0.0, 1.0)]
Gamma = Annotated[
    PerModel[float],
    "Share of the delta to drop before `density` is kept: its largest elements.",
    Bounds(0.0, 1.0),
]
Epsilon = Annotated[
    PerModel[float],
    "The smallest element of a row is kept with probability density - epsilon, the largest with density + epsilon.",
    Bounds(0.0, 0.5),
]
Group = Annotated[PerModel[int], "Number of neighbouring elements in a group; the share `density` of each is kept.", Bounds(1)]
Scope = Annotated[
    axes.Scope,
    "Range within which magnitudes are ranked: the `tensor` (as in mergekit), each `row`, or the whole `model`. `model` takes "
    "a pass over all tensors before the merge, and keeps all elements that equal the threshold.",
]
Normalize = Annotated[bool, "Divide by the sum of the weights."]
NormalizeElected = Annotated[bool, "Divide by the sum of |weight| of the models that agree."]

_RESCALE = (
    "How to make up for what the mask removed: `none` does nothing; `l1` (mergekit's `true`) restores each delta's L1 norm; "
    "`inv_density` divides by the density"
)
_BY_PROBABILITY = "`inv_probability` divides each element by the probability with which it was kept"
Rescale = Annotated[Literal["none", "l1", "inv_density"], f"{_RESCALE}.", Booleans("none", "l1")]
AnyRescale = Annotated[axes.Rescale, f"{_RESCALE}; {_BY_PROBABILITY}.", Booleans("none", "l1")]


def sums_to_zero(weight: Floats) -> str:
    """What is wrong with weights that are to be normalised and sum to zero (mergekit writes NaN, or divides by 1); else ""."""
    total = float(sum(weight))
    return f"the weights sum to {total:g}, so they cannot be normalised" if abs(total) < 1e-8 else ""


def check_normalize(weight: Floats, normalize: bool) -> str:
    """The check of methods with a `normalize` parameter."""
    return sums_to_zero(weight) if normalize else ""


def check_probabilities(density: Floats, epsilon: Floats) -> str:
    """Probabilities of keeping an element must be probabilities; a density of 1 keeps everything."""
    for share, spread in zip(density, epsilon, strict=True):
        if 0 < share < 1 and not (share - spread > 0 and share + spread < 1):
            return (
                f"density {share:g} and epsilon {spread:g} make probabilities from {share - spread:g} to "
                f"{share + spread:g}; they must lie between 0 and 1: use an epsilon below {min(share, 1 - share):g}"
            )
    return ""


def job(matrix: Matrix, settings: Axes, *, normalize: bool = False) -> Job:
    """The job of a method of the family. normalize: the sum of the models is divided by that of their weights."""
    return axes.TaskVectorJob(matrix, replace(settings, combine="mean") if normalize else settings)


def of_the_model(scope: str) -> bool:
    """Magnitudes are ranked among those of the whole model."""
    return scope == "model"


def model_thresholds(merged: Sequence[tuple[Step, Settings]]) -> Product | None:
    """The product of `scope: model`; None where every model keeps nothing. merged: the tensors that have this scope."""
    thresholds: dict[tuple[int, float, float], None] = {}
    sizes: dict[int, int] = {}
    for step, settings in merged:
        for source, parameters in zip(step.inputs[1:], settings.models[1:], strict=True):
            sizes[source.model] = sizes.get(source.model, 0) + step.out.size
            outliers = settings.shared.get("sparsify", "magnitude_outliers") == "magnitude_outliers"
            density, gamma = float(parameters["density"] or 0), float(parameters.get("gamma") or 0) if outliers else 0.0
            if density > 0:
                thresholds[source.model, density, gamma] = None
    if not thresholds:
        return None
    models = tuple(sizes)
    return Product(
        name="thresholds",
        op="thresholds",
        outs=(TensorSpec("thresholds", DTYPES["I64"], (len(thresholds), 2)),),
        settings={
            "sizes": list(sizes.values()),
            "wanted": [[models.index(model), density, gamma] for model, density, gamma in thresholds],
        },
        models=models,
    )
