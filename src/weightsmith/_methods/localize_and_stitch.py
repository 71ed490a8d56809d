"""localize_and_stitch: each model's largest deltas, averaged where they overlap."""

from __future__ import annotations

from typing import Annotated

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="each model's largest deltas, averaged where they overlap",
    family="sparse",
    summary="""Keeps the largest share `density` of each model's deltas, ranked over all its tensors, and adds them to the
base. Where the deltas of several models overlap, they are averaged, without an election. By default, embeddings and output
heads are copied from the base and do not count in the ranking, as in the authors' code; `embeddings: true` merges them too.
In MergeBench (language models of 2 to 9 B), this was among the best methods without data. This is the authors' method without
data ("dataless"); with data, they find the positions by training. Takes a pass over all tensors before the merge.""",
    use="""For several specialised models, keeping 5 to 10% of each. It changes little, so little is forgotten. Do not use it
for one model: it only weakens it.""",
    passes="One over all tensors, and a sample of them, then the result.",
    source="He et al. 2024, Localize-and-Stitch, section 3, https://arxiv.org/abs/2408.13656; for language models "
    "He et al. 2025, MergeBench, https://arxiv.org/abs/2505.10833",
    formula="δᵢ = the density · N largest of model i;  out = base + λ Σ wᵢδᵢ / (number of models with a δᵢ there)",
    example=example_recipe("localize_and_stitch", per_model="{density: 0.1}"),
    needs=family.of_the_model,
    product=family.model_thresholds,
    keeps_base=lambda role, embeddings: role == "vocabulary" and not embeddings,
)
def localize_and_stitch(
    matrix: Matrix,
    weight: family.Weight = 1.0,
    density: family.Density = 0.1,
    scope: family.Scope = "model",
    embeddings: Annotated[bool, "Merge embeddings and output heads too."] = False,
    lambda_: family.Lambda = 1.0,
) -> Job:
    axes = family.Axes("magnitude", weight, lambda_, density, scope=scope, combine="disjoint_mean")
    return family.job(matrix, axes)
