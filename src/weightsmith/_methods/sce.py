"""sce: select by variance, weigh by it, erase minority signs."""

from __future__ import annotations

from typing import Annotated, Literal

from weightsmith._methods.family import Int8Mask
from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="select by variance, weigh by it, erase minority signs",
    family="sparse",
    summary="""Selects the share `select_topk` of positions at which the models differ most. Each model gets a share by the
energy (mean square) of its delta there. The deltas that have the sign of their sum are then averaged by these shares.
mergekit changes only the selected positions (`select_applies_to: update`, the default). In the authors' code, the selection
affects only the shares (`weights`), and their value is 0.1. Among equal variances, those with the lower index are selected.
The shares are by energy however small the deltas are. mergekit makes them equal if the mean squares sum to less than 1e-6, as
those of most fine-tunes do.""",
    use="""For three or more models that were fine-tuned from one base on different data, as in FuseChat. With two models, the
variance is half the squared difference, so selection prefers what only one model changed.""",
    passes="Two with `select_topk: 1`: energies, then the result. Else four, or six when the guess of the threshold fails.",
    source="Wan et al. 2024, FuseChat, section 3.3, https://arxiv.org/abs/2408.07990",
    formula="cᵢ = Σ_{selected} δᵢ² / Σᵢ Σ_{selected} δᵢ²;  s = sign(Σ δᵢ);  out = base + Σ_{agree} cᵢδᵢ / Σ_{agree} cᵢ",
    example=example_recipe("sce", shared="{select_topk: 0.1}"),
)
def sce(
    matrix: Matrix,
    select_topk: Annotated[float, "Share of the positions where models differ to select.", Bounds(0.0, 1.0)] = 1.0,
    select_applies_to: Annotated[
        Literal["update", "weights"],
        "Purpose of the selection: the `update` (mergekit), or only the models' shares, `weights` (authors).",
    ] = "update",
    int8_mask: Int8Mask = False,
) -> Job:
    from weightsmith._methods.jobs.elementwise import SceJob

    return SceJob(matrix, select_topk, mask_update=select_applies_to == "update")
