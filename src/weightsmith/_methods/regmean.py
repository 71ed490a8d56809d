"""regmean: the delta whose outputs are nearest to those of each model on its own text, pulled towards another merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from weightsmith._base.errors import ParameterError, nearest
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._base.torch_use import needs_torch
from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, Parameter, Requirement, example_recipe
from weightsmith.abc.job import Job, Matrix

if TYPE_CHECKING:
    from weightsmith._methods.jobs.matrix import Deltas

KIND = "second_moments"

Prior = Literal["none", "linear", "task_arithmetic", "tsv_m", "svc", "wudi", "star", "iso_c", "iso_cts", "resmerge"]

WEIGHED = "Σ δG"
"""In `Deltas.recall`, what all priors begin with."""

SUMS = ("linear", "task_arithmetic")
"""Priors that are weighted sums of the deltas."""


def solve(
    deltas: Sequence[Any],
    moments: Callable[[int, Any], Any],
    alpha: float,
    ridge: float,
    mu: float,
    prior: Any,
    where: str,
    recall: Callable[[Callable[[], Any]], Any] = lambda compute: compute(),
) -> Any:
    """(Σ δᵢ Gᵢ + μ m Δ₀) (Σ Gᵢ + (μ + ridge) m I)⁻¹, with m the mean of the diagonal of Σ Gᵢ.

    deltas   float64 [rows, cols] each; the result is of that shape
    moments  (number of a model, space) → Gᵢ, float64 [cols, cols]: in `space`, a tensor like it, or in a new one
    alpha    factor on what is not on the diagonal of each Gᵢ
    prior    Δ₀; None: none, and μ counts as 0
    where    the tensor, for errors
    recall   gives Σ δᵢ Gᵢ from what computes it, or from a call with another prior

    By Cholesky in float64: summed, the Gᵢ of a real layer reach a condition of 2e9, where an inverse in float32 is noise.
    Directions in which nothing enters take the prior, or 0. Raises ParameterError if the sum is singular: with `ridge` 0.
    """
    import torch

    total: Any = None
    space: Any = None

    def add(i: int) -> Any:
        nonlocal total, space
        gram = space = moments(i, space)
        if alpha != 1.0:
            diagonal = gram.diagonal().clone()
            gram.mul_(alpha).diagonal().copy_(diagonal)
        if total is None:
            total, space = gram, None
        else:
            total.add_(gram)
        return gram

    def weighed() -> Any:
        products = torch.zeros_like(deltas[0])
        for i in range(len(deltas)):
            products.addmm_(deltas[i], add(i))
        return products

    target = recall(weighed)
    for i in range(len(deltas) if total is None else 0):
        add(i)
    mean = float(total.diagonal().mean())
    if mean == 0:  # no token reached the layer
        return prior if prior is not None else sum(deltas[i] for i in range(len(deltas))) / len(deltas)
    if prior is not None:
        target = target.add(prior, alpha=mu * mean)
    total.diagonal().add_((ridge + (mu if prior is not None else 0.0)) * mean)
    factor, failed = torch.linalg.cholesky_ex(total)
    if int(failed):
        what = "the texts do not determine this matrix: fewer tokens reach it than it has columns, or some columns get nothing"
        raise ParameterError(what, where=where, fix="set ridge to 0.001, or give longer texts")
    return torch.cholesky_solve(target.T, factor).T


def _check(prior: str, prior_parameters: str | None, mu: float) -> str:
    if prior == "none":
        return "prior_parameters are of no method: write prior: and its name" if prior_parameters else needs_torch()
    parameters = _prior_parameters(prior, prior_parameters)
    return needs_torch() if isinstance(parameters, dict) else parameters


def _prior_parameters(prior: str, text: str | None) -> dict[str, Any] | str:
    """The parameters of the prior that the recipe gives, or what is wrong with them."""
    from weightsmith import _methods as methods
    from weightsmith._methods.steps import PARAMETERS

    try:
        parameters = parse((text or "{}").encode(errors="surrogatepass"))
    except JsonError:
        parameters = None
    if not isinstance(parameters, dict):
        return "prior_parameters takes a mapping, {lambda: 0.8}"
    steps = {p.name for p in PARAMETERS}
    known = {p.name: p for p in methods.get(prior).parameters if p.scope == "tensor" and p.name not in steps}
    for name, value in parameters.items():
        if name not in known:
            return f"prior_parameters: {prior} has no parameter '{name}'{nearest(name, known)}: write one of {', '.join(known)}"
        if problem := _problem(known[name], value):
            return f"prior_parameters: {name} {problem}, not {value!r}"
    return parameters


def _problem(parameter: Parameter, value: Any) -> str:
    """Why a parameter cannot have this value, or ""."""
    kinds: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "bool": (bool,), "str": (str,)}
    fits = isinstance(value, kinds[parameter.kind]) and isinstance(value, bool) == (parameter.kind == "bool")
    if not fits or (isinstance(value, float) and math.isnan(value)):
        return {"float": "must be a number", "int": "must be a whole number"}.get(parameter.kind, f"must be a {parameter.kind}")
    return parameter.problem(value)


def _towards(matrix: Matrix, prior: str, prior_parameters: str | None) -> Callable[[Deltas], Any] | None:
    """Δ₀ from the deltas without their weights; None for no prior."""
    from weightsmith import _methods as methods

    if prior == "none" or matrix.role != "linear":
        return None
    method, parameters = methods.get(prior), _prior_parameters(prior, prior_parameters)
    assert isinstance(parameters, dict)
    shared = {p.name: p.default for p in method.parameters if p.scope == "tensor"} | parameters
    per_model = {p.name: p.default for p in method.parameters if p.scope == "model"}
    models = tuple({**per_model, **{k: v for k, v in model.items() if k in per_model}} for model in matrix.model_parameters)
    if prior in SUMS:
        return _sum_of([float(model["weight"] or 0) for model in models], shared)
    inputs = (*matrix.models[: int(matrix.base)], *models)
    job = method.job(replace(matrix, shared=shared, models=inputs, statistics={}, method=prior))
    return _matrix_prior(job)


def _sum_of(weights: Sequence[float], shared: Mapping[str, Any]) -> Callable[[Deltas], Any]:
    """λ Σ wᵢδᵢ, divided by Σ wᵢ with `normalize`."""
    shares = np.asarray(weights, np.float64) * shared.get("lambda", 1.0)
    if shared["normalize"]:
        total = float(np.sum(weights))
        shares /= total if abs(total) >= 1e-8 else 1.0  # as task_arithmetic
    return lambda deltas: sum(deltas.weighted(shares))


def _matrix_prior(job: Job) -> Callable[[Deltas], Any]:
    from weightsmith._methods.jobs.matrix import MatrixJob

    assert isinstance(job, MatrixJob)
    return lambda deltas: job.merged(deltas.weighted(job.weights)) * job.factor


@matrix_method(
    title="regression mean",
    family="data",
    summary="""Finds, for each weight of a linear layer, the merged delta that best reproduces what each model's own delta
does to the layer's inputs on that model's text. This is a least-squares problem, solved in closed form from the mean of xxᵀ
of the inputs. The recipe names the texts. With a `prior`, the solution is pulled towards the result of another merge method
instead of towards 0, by `mu`. Weights that the texts say little about are then merged as that method would. All other tensors
take the mean of the deltas, and so do weights that a text says nothing about (experts stored in one tensor). Requires
torch.""",
    use="""For models whose purpose you can show with a few thousand tokens of text each, and with a prior that is good on its
own. On the testbed's small language model, tsv_m as the prior gave a perplexity of 8.03 (7.97 with `mu: 1`), tsv_m alone
8.14, and regmean without a prior 8.16 (8.15 with `through: merge`). A skill without a text gets worse: English, which none of
the texts covered, went from 3.46 to 3.66. A text that does not match its model's purpose makes the merge worse.""",
    source="Jin et al. 2022, Dataless Knowledge Fusion by Merging Weights of Language Models (RegMean), section 3, "
    "https://arxiv.org/abs/2212.09849; solved for deltas; the prior is weightsmith's own. "
    "`through: merge`: Nguyen et al. 2025, RegMean++, https://arxiv.org/abs/2508.03121",
    formula="Gᵢ = mean xxᵀ of model i, alpha times off the diagonal;  m = mean diag(Σ Gᵢ);  Δ₀ the prior;  "
    "out = base + λ (Σ wᵢδᵢGᵢ + μ m Δ₀)(Σ Gᵢ + (μ + ridge) m I)⁻¹",
    example=example_recipe("regmean", texts=True, shared="{prior: tsv_m, prior_parameters: {directions: 8, lambda: 0.8}}"),
    check=_check,
    requires=lambda through: (Requirement(KIND, merged=through == "merge"),),
)
def regmean(
    matrix: Matrix,
    weight: Weight = 1.0,
    alpha: Annotated[
        float, "Factor on the products of different inputs: 1 is least squares, 0 looks at each input alone.", Bounds(0.0, 1.0)
    ] = 1.0,
    ridge: Annotated[float, "Share of the mean of the diagonal that is added to it: pulls towards 0.", Bounds(0.0)] = 0.001,
    prior: Annotated[Prior, "Another merge method, towards whose result the solution is pulled."] = "none",
    prior_parameters: Annotated[
        str | None, "Parameters of the prior, as a mapping: `{directions: 8, lambda: 0.8}`. By default, its defaults."
    ] = None,
    through: Annotated[
        Literal["model", "merge"],
        "Layers through which a text runs to the layer that is measured: the model's own, or the merged ones (RegMean++, arXiv "
        "2508.03121).",
    ] = "model",
    mu: Annotated[float, "How strongly the prior pulls, as a share of the mean of the diagonal.", Bounds(0.0)] = 0.3,
    lambda_: Lambda = 1.0,
) -> Job:
    known, towards, first = matrix.statistics.get(KIND, {}), _towards(matrix, prior, prior_parameters), int(matrix.base)

    def merge(deltas: Deltas) -> Any:
        import torch

        from weightsmith._methods.jobs.matrix import statistics_digest

        def moments(i: int, space: Any) -> Any:
            if space is None or space.device.type != "cpu":
                return torch.from_numpy(np.array(known[first + i], np.float64)).to(matrix.device)
            np.copyto(space.numpy(), known[first + i])
            return space

        def recall(weighed: Callable[[], Any]) -> Any:
            return deltas.recall((WEIGHED, alpha, deltas.weights, statistics_digest(matrix)), weighed)

        prior_delta = None if towards is None else towards(deltas)
        return solve(deltas, moments, alpha, ridge, mu, prior_delta, matrix.name, recall)

    copies = 8 + 2 * len(matrix.codes)
    return linears_job(matrix, weight, lambda_, merge, copies=copies, side=matrix.cols, known=bool(known))
