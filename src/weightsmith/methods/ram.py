"""ram: keep what one model alone changed, average what several did."""

from __future__ import annotations

from weightsmith.jobs.job import Job, Matrix
from weightsmith.methods.base import Method, Parameter, always

EPSILON = Parameter("epsilon", "float", "A delta is active where it is larger than this.", default=1e-5, minimum=0.0)


def _job(matrix: Matrix) -> Job:
    from weightsmith.jobs.elementwise import ActiveJob

    return ActiveJob(matrix)


METHOD = Method(
    name="ram",
    title="keep what one model alone changed, average what several did",
    summary="""For models trained by reinforcement learning, whose deltas are sparse: plain averaging dilutes what
only one of them has changed. Where one model alone is active its delta is kept whole; where several are, their deltas
are averaged over those. bf16 weights change by more than 1e-5 or not at all unless they are tiny, so `epsilon` seldom
matters.""",
    use="""For models trained by reinforcement learning from one base, each on its own task. Not for supervised
fine-tunes: nearly every weight is active in all of them, and ram is their average.""",
    passes="One: the result is written as the inputs are read.",
    source="Reinforced Agent Merging, 2026, https://arxiv.org/abs/2601.13572",
    formula="Aᵢ = |δᵢ| > ε, n = Σ Aᵢ;  out = base + δᵢ where n = 1;  base + Σ Aᵢδᵢ / n where n ≥ 2",
    parameters=(EPSILON,),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: ram
base_model: ./base
models:
  - model: ./fr
  - model: ./de
dtype: bfloat16
""",
    job=_job,
    elementwise=always,
)
