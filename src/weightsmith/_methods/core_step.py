"""core_step: one step towards a text, within the directions in which fine-tunes differ from their base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from weightsmith._methods.jobs.decompose import column_basis, thin_svd
from weightsmith._methods.linears import matrix_method
from weightsmith._methods.method import Bounds, Requirement
from weightsmith.abc.job import Job, Matrix

SLOPES, INPUTS = "slopes", "second_moments"

EXAMPLE = """\
merge_method: core_step
base_model: ./merged
text: all.txt
models:
  - model: ./base
  - model: ./fr
  - model: ./de
parameters: {directions: 8, step: 0.1}
dtype: bfloat16
"""


def step_of(deltas: Sequence[Any], slopes: Any, outputs: Any, inputs: Any, directions: int, damping: float) -> Any:
    """U (UᵀBU + d b I)⁻¹ UᵀSV (VᵀAV + d a I)⁻¹ Vᵀ, with a and b the means of the diagonals of VᵀAV and UᵀBU.

    deltas   float64 [rows, cols] each, of the models from any one point. U and V are bases of what the leading singular
             vectors of the differences from the first one span, together
    slopes   S, float64 [rows, cols]: the gradient of the log-likelihood
    outputs  B, float64 [rows, rows]: mean of ggᵀ; inputs: A, [cols, cols]: mean of xxᵀ
    damping  d
    """
    import torch

    parts = [thin_svd(deltas[i] - deltas[0], directions) for i in range(1, len(deltas))]
    u, v = _basis(torch.cat([p[0] for p in parts], 1)), _basis(torch.cat([p[2] for p in parts], 0).T)
    core = u.T @ slopes @ v
    core = _divided(_divided(core, u.T @ outputs @ u, damping).T, v.T @ inputs @ v, damping).T
    return u @ core @ v.T


def _basis(vectors: Any) -> Any:
    """An orthonormal basis of what the columns span: [rows, rank]."""
    basis = column_basis(vectors)
    return basis[:, basis.any(0)]


def _divided(core: Any, moments: Any, damping: float) -> Any:
    """(moments + damping · mean of their diagonal)⁻¹ core; zeros if the moments are."""
    import torch

    mean = float(moments.diagonal().mean()) if len(moments) else 0.0
    if mean <= 0:
        return torch.zeros_like(core)
    damped = moments.clone()
    damped.diagonal().add_(damping * mean)
    return torch.linalg.solve(damped, core)


@matrix_method(
    title="step in the core of the fine-tunes",
    family="data",
    summary="""Improves a merge on a text. The base is the merge, and the text is run through it. The weight of each linear
layer takes one step that makes the text likelier. The step stays within the directions in which the fine-tunes differ from the
model that they were trained from: the leading `directions` left and right singular vectors of each. With three models, these
are 24 by 24 numbers for a matrix. The step is divided by the curvature: the second moments of what enters the layer, and of the
gradients at its outputs. The first of `models` is the one that the others were trained from. For several steps, use a recipe of
this method as the base of the next. All other tensors are those of the base. Requires torch.""",
    use="""After any merge of fine-tunes, with a text that has all their kinds in equal shares. Hold out a part of the text, and
compare steps of 0.03 to 0.1 on it with [`weightsmith eval`](../evaluate.md): too long a step makes the merge worse than it
was.""",
    source="weightsmith's own. The factors of the curvature, here with the text's own labels: Martens and Grosse 2015, "
    "Optimizing Neural Networks with Kronecker-factored Approximate Curvature, https://arxiv.org/abs/1503.05671; the core of "
    "several task vectors: Panariello et al. 2025, Accurate and Efficient Low-Rank Model Merging in Core Space, "
    "https://arxiv.org/abs/2509.17786",
    formula="U, V: bases of the leading singular vectors of modelᵢ - model₁;  S = mean g xᵀ, B = UᵀE[g gᵀ]U, A = VᵀE[x xᵀ]V;  "
    "out = base + step · U (B + damping · mean diag B)⁻¹ UᵀSV (A + damping · mean diag A)⁻¹ Vᵀ",
    example=EXAMPLE,
    min_models=2,
    otherwise="kept from the base",
    keeps_base=lambda role: role != "linear",
    requires=lambda: tuple(Requirement(kind, of="base") for kind in (SLOPES, INPUTS)),
)
def core_step(
    matrix: Matrix,
    directions: Annotated[int, "Leading singular vectors of each model's difference from the first.", Bounds(1)] = 8,
    step: Annotated[float, "Length of the step."] = 0.1,
    damping: Annotated[float, "Share of the mean of their diagonals that is added to both factors.", Bounds(0.0)] = 3.0,
) -> Job:
    from weightsmith._methods.jobs.combination import sum_of_deltas
    from weightsmith._methods.jobs.matrix import MatrixJob

    known, n_models = matrix.statistics, len(matrix.codes) - 1
    if matrix.role != "linear" or SLOPES not in known:
        return sum_of_deltas(matrix, np.zeros(n_models))

    def merge(deltas: Sequence[Any]) -> Any:
        import torch

        both, inputs = (torch.from_numpy(np.array(known[kind][0], np.float64)).to(matrix.device) for kind in (SLOPES, INPUTS))
        return step_of(deltas, both[:, : matrix.cols], both[:, matrix.cols :], inputs, directions, damping)

    base = np.array([1.0] + [0.0] * n_models)
    copies, side = 6 + 2 * n_models, max(matrix.shape[0], matrix.cols)
    return MatrixJob(matrix, merge, base, np.ones(n_models), step, copies=copies, side=side)
