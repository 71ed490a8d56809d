"""arcee_fusion: take only what changed most."""

from __future__ import annotations

from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="take only what changed most",
    family="sparse",
    summary="""Takes over from the other model only the weights with an important change. The importance of a weight is the
size of its change times the divergence of its row, where each row counts as a distribution (softmax). A weight is important
if it lies above the median by 1.5 times the interquartile range. The quartiles are exact, over all elements. mergekit draws a
sample of a million and gives another result each time.""",
    use="""To take over the strongest changes of one model, about a tenth of them, and leave the rest. It merges one model at
a time: for several, chain recipes.""",
    passes="Two, up to four when the guess of a quartile fails; the rows' divergences are kept from the first.",
    source="Arcee AI, Arcee Fusion (MergeKit 0.1), https://www.arcee.ai; mergekit, arcee_fusion",
    formula="I = |W - base| · KL(softmax(W row) ‖ softmax(base row));  out = base + (W - base) where I ≥ Q₂ + 1.5 (Q₃ - Q₁)",
    max_models=1,
    example=example_recipe("arcee_fusion", models=("fr",)),
)
def arcee_fusion(matrix: Matrix) -> Job:
    from weightsmith._methods.jobs.elementwise import FusionJob

    return FusionJob(matrix, 1e-8)
