"""Configs of mergekit-evolve are tuned here, and what its evaluator alone knows is refused with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weightsmith
from weightsmith._base.errors import PlanError, WeightsmithError
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.recipe import read_template
from weightsmith._reports.tuning.candidates import Candidates
from weightsmith._reports.tuning.evolve import evolution

GENOME = {"models": ["b", "c"], "merge_method": "ties", "base_model": "a"}

COUNTS: dict[str, tuple[dict[str, Any], int]] = {
    "one group": ({}, 2 * 2),
    "groups of layers": ({"layer_granularity": 1}, 2 * 2 * 2),
    "filters": ({"layer_granularity": 1, "filters": ["self_attn", "mlp"]}, 2 * 2 * 2 * 3),
    "smooth": ({"layer_granularity": 1, "smooth": True, "filters": ["mlp"]}, 2 * 2 * 2 * 2),
    "weights alone": ({"merge_method": "task_arithmetic", "allow_negative_weights": True}, 2),
    "linear": ({"merge_method": "linear", "base_model": None}, 2),
    "slerp": ({"merge_method": "slerp", "layer_granularity": 1}, 2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_genome_has_as_many_values_as_in_mergekit_and_plans(work: Path, name: str) -> None:
    keys, count = COUNTS[name]
    evolved = evolution({"genome": {**GENOME, **keys}, "tasks": ["t.txt"]})
    assert evolved is not None
    assert evolved.texts == ("t.txt",)
    assert len(read_template(evolved.recipe).tunables) == count
    with Candidates(evolved.recipe, RecipeOptions()) as candidates, candidates.prepare(candidates.start) as prepared:
        assert prepared.plan.steps


@pytest.mark.long
def test_a_config_is_tuned(work: Path) -> None:
    Path("evolve.yml").write_text(
        "genome:\n  models: [b, c]\n  merge_method: ties\n  base_model: a\ntasks:\n  - name: t.txt\n    weight: 1.0\n"
    )
    tuning = weightsmith.tune("evolve.yml", "tuned.yml", budget=3, tokens=32, progress=False)
    assert tuning.texts == ("t.txt",)
    assert tuning.start == (0.5, 1.0, 0.5, 1.0)
    weightsmith.plan("tuned.yml")


WRONG = {
    "limit: 100": "Remove it, and use --rows N",
    "apply_chat_template: true": "jsonl file with `messages`",
    "tasks: [arc_easy]": "the task 'arc_easy' is no text",
    "tasks: [{name: t.txt, metric: acc}]": "texts have no weights and metrics",
    "steps: 3": "mergekit-evolve has no key 'steps'",
    "genome: {models: [b], merge_method: della}": "the genome needs 'models' and a 'merge_method'",
    "genome: {models: [b, c, a], merge_method: slerp}": "a genome of slerp takes two models here",
    "genome: {models: [b, c], merge_method: linear, layer_granularity: 3}": "layer_granularity 3 does not divide 2 layers",
    "genome: {models: [b, c], merge_method: linear, seed: 3}": "genome has no key 'seed'",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_read_is_refused_with_what_to_write(work: Path, line: str) -> None:
    key = line.partition(":")[0]
    lines = {"genome": "genome: {models: [b, c], merge_method: ties, base_model: a}", "tasks": "tasks: [t.txt]", key: line}
    Path("evolve.yml").write_text("\n".join(lines.values()) + "\n")
    with pytest.raises(WeightsmithError) as error:
        weightsmith.tune("evolve.yml", "tuned.yml", text="t.txt", progress=False)
    assert isinstance(error.value, PlanError)
    assert WRONG[line] in str(error.value)
    assert not Path("tuned.yml").exists()
