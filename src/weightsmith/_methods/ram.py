"""ram: keep what only one model changed, average the rest."""

from __future__ import annotations

from typing import Annotated

from weightsmith._methods.method import Bounds, always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

Epsilon = Annotated[float, "A delta is active where it is larger than this.", Bounds(0.0)]


@merge_method(
    title="keep what only one model changed, average the rest",
    family="delta",
    summary="""For models trained by reinforcement learning, whose deltas are sparse. Plain averaging dilutes what only one of
them has changed. Where one model alone is active, its delta is kept whole. Where several are, the deltas of the active models
are averaged. bf16 weights change by more than 1e-5 or not at all unless they are tiny, so `epsilon` seldom matters.""",
    use="""For models trained by reinforcement learning from one base, each on its own task. Do not use it for supervised
fine-tunes: nearly every weight is active in all of them, so ram is their average.""",
    passes="One: the result is written as the inputs are read.",
    source="Yuan et al. 2026, Behavior Knowledge Merge in Reinforced Agentic Models (RAM), https://arxiv.org/abs/2601.13572",
    formula="Aᵢ = |δᵢ| > ε, n = Σ Aᵢ;  out = base + δᵢ where n = 1;  base + Σ Aᵢδᵢ / n where n ≥ 2",
    example=example_recipe("ram"),
    elementwise=always,
)
def ram(matrix: Matrix, epsilon: Epsilon = 1e-5) -> Job:
    from weightsmith._methods.jobs.elementwise import ActiveJob

    return ActiveJob(matrix, epsilon)
