"""sce: select by variance, calculate shares, erase minority signs."""

from __future__ import annotations

from typing import Annotated, Literal

from weightsmith._methods.describe import example_recipe
from weightsmith._methods.family import Int8Mask
from weightsmith._methods.signature import Bounds, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="select by variance, calculate shares, erase minority signs",
    summary="""Selects the share `select_topk` of the positions at which the models differ most among each other,
gives each model a share by the energy (mean square) of its delta there, and averages, by these shares, the deltas
that have the sign of their sum. mergekit changes only the selected positions (`select_applies_to: update`, the
default); in the authors' code the selection counts for the shares alone (`weights`), and their value is 0.1. Of equal
variances those with the lower index are selected. The shares are by energy however small the deltas are; mergekit makes them
equal where the mean squares sum to less than 1e-6, as those of most fine-tunes do.""",
    use="""For three models or more that were fine-tuned from one base on different data, as in FuseChat. With two
models the variance is half the squared difference, and selection prefers what one model alone changed.""",
    passes="Two with `select_topk: 1`: energies, then the result. Else four, or six when the guess of the threshold fails.",
    source="Wan et al. 2024, FuseChat, section 3.3, https://arxiv.org/abs/2408.07990",
    formula="cᵢ = Σ_{selected} δᵢ² / Σᵢ Σ_{selected} δᵢ²;  s = sign(Σ δᵢ);  out = base + Σ_{agree} cᵢδᵢ / Σ_{agree} cᵢ",
    example=example_recipe("sce", shared="{select_topk: 0.1}"),
)
def sce(
    matrix: Matrix,
    select_topk: Annotated[float, "Share of the positions where models differ that is selected.", Bounds(0.0, 1.0)] = 1.0,
    select_applies_to: Annotated[
        Literal["update", "weights"],
        "What the selection is for: the `update` (mergekit) or the models' shares, `weights` (authors).",
    ] = "update",
    int8_mask: Int8Mask = False,
) -> Job:
    from weightsmith._methods.jobs.elementwise import SceJob

    return SceJob(matrix, select_topk, mask_update=select_applies_to == "update")
