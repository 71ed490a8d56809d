"""sce: select by variance, calculate shares, erase minority signs."""

from __future__ import annotations

from weightsmith.jobs.job import Job, Matrix
from weightsmith.methods.base import Method, Parameter
from weightsmith.methods.family import INT8_MASK


def _job(matrix: Matrix) -> Job:
    from weightsmith.jobs.selective import SceJob

    topk = float(matrix.shared["select_topk"])  # type: ignore[arg-type]
    return SceJob(matrix, topk, mask_update=matrix.shared["select_applies_to"] == "update")


METHOD = Method(
    name="sce",
    title="select by variance, calculate shares, erase minority signs",
    summary="""Selects the share `select_topk` of the positions at which the models differ most among each other,
gives each model a share by the energy (mean square) of its delta there, and averages, by these shares, the deltas
that have the sign of their sum. mergekit changes only the selected positions (`select_applies_to: update`, the
default); in the authors' code the selection counts for the shares alone (`weights`), and their value is 0.1. Of equal
variances those with the lower index are selected.""",
    use="""For three models or more that were fine-tuned from one base on different data, as in FuseChat. With two
models the variance is half the squared difference, and selection prefers what one model alone changed.""",
    passes="Two with `select_topk: 1`: energies, then the result. Else four, or six when the guess of the threshold fails.",
    source="Wan et al. 2024, FuseChat, section 3.3, https://arxiv.org/abs/2408.07990",
    formula="cᵢ = Σ_{selected} δᵢ² / Σᵢ Σ_{selected} δᵢ²;  s = sign(Σ δᵢ);  out = base + Σ_{agree} cᵢδᵢ / Σ_{agree} cᵢ",
    parameters=(
        Parameter(
            "select_topk",
            "float",
            "Share of the positions where models differ that is selected.",
            default=1.0,
            minimum=0.0,
            maximum=1.0,
        ),
        Parameter(
            "select_applies_to",
            "str",
            "What the selection is for: the `update` (mergekit) or the models' shares, `weights` (authors).",
            default="update",
            choices=("update", "weights"),
        ),
        INT8_MASK,
    ),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: sce
base_model: ./base
models:
  - model: ./fr
  - model: ./de
parameters: {select_topk: 0.1}
dtype: bfloat16
""",
    job=_job,
)
