"""Weights over the checkpoints of a run: the numbers, how they are written, and what is said of wrong ones."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import plan_help
from tests.plan_help import only, plan, prepare, warnings
from tests.recipe_help import parse
from weightsmith._base.errors import ParameterError
from weightsmith._planning.recipe import Entry, Schedule

NAME = "model.layers.0.mlp.up_proj.weight"
COUNTS = [1, 2, 3, 5, 30]


# ---- the numbers


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_ema_is_what_an_averager_in_the_training_loop_would_have(beta: float, n: int) -> None:
    run = np.random.default_rng(n).standard_normal(n)
    average = run[0]
    for x in run[1:]:
        average = beta * average + (1 - beta) * x
    assert np.dot(Schedule("ema", beta).weights(n), run) == pytest.approx(average, rel=1e-12)


@pytest.mark.parametrize("n", [5, 6, 30])
def test_lawa_is_the_mean_of_the_last(n: int) -> None:
    run = np.random.default_rng(n).standard_normal(n)
    assert np.dot(Schedule("lawa", 5).weights(n), run) == pytest.approx(run[-5:].mean(), rel=1e-12)


CURVES = {"linear": lambda x: 1 - x, "cosine": lambda x: math.cos(math.pi * x / 2) ** 2, "1-sqrt": lambda x: 1 - x**0.5}


@pytest.mark.parametrize("n", [2, 3, 5, 30])
@pytest.mark.parametrize("curve", CURVES)
def test_wsm_scales_the_step_after_each_checkpoint_as_the_curve_would(curve: str, n: int) -> None:
    steps = np.random.default_rng(n).standard_normal(n - 1)
    run = np.concatenate([[0.0], np.cumsum(steps)])
    decayed = sum(CURVES[curve]((i + 1) / n) * step for i, step in enumerate(steps))
    assert np.dot(Schedule("wsm", curve).weights(n), run) == pytest.approx(decayed, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("schedule", [Schedule("ema", 0.9), Schedule("lawa", 1), *(Schedule("wsm", c) for c in CURVES)])
def test_weights_are_shares(schedule: Schedule, n: int) -> None:
    weights = schedule.weights(n)
    assert len(weights) == n
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1)


def test_wsm_linear_is_the_plain_mean() -> None:
    assert Schedule("wsm", "linear").weights(7) == pytest.approx([1 / 7] * 7)


# ---- how they are written


def entries(value: str) -> tuple[Entry, ...]:
    recipe, problems = parse(
        f"merge_method: linear\nmodels: [{{model: a}}]\nparameters:\n  weight: {value}\n", "r.yml", parameter_names=["weight"]
    )
    assert [str(p) for p in problems] == []
    assert recipe is not None
    return recipe.parameters["weight"].entries


def test_a_schedule_stands_where_a_number_may() -> None:
    assert entries("{ema: 0.9}") == (Entry(Schedule("ema", 0.9), None, "r.yml:4:11"),)
    assert entries("{ema: 1e-1}") == (Entry(Schedule("ema", 0.1), None, "r.yml:4:11"),)
    assert entries("{lawa: 5}")[0].value == Schedule("lawa", 5)
    assert entries("{wsm: 1-sqrt}")[0].value == Schedule("wsm", "1-sqrt")
    assert [e.value for e in entries("[{filter: mlp, value: {ema: 0.5}}, {value: {lawa: 2}}]")] == [
        Schedule("ema", 0.5),
        Schedule("lawa", 2),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{ema: 1}", "r.yml:4:17: 'ema' takes a number from 0 to below 1, not the number 1"),
        ("{ema: -0.1}", "'ema' takes a number from 0 to below 1"),
        ("{ema: true}", "'ema' takes a number from 0 to below 1, not true"),
        ("{ema: [0.9]}", "'ema' takes a number from 0 to below 1, not a list of 1"),
        ("{lawa: 0}", "'lawa' takes a whole number from 1 on, not the number 0"),
        ("{lawa: 2.5}", "'lawa' takes a whole number from 1 on, not the number 2.5"),
        ("{wsm: cosin}", "'wsm' takes a learning rate curve, not the text 'cosin' (did you mean 'cosine'?)"),
        ("{ema: 0.9, lawa: 5}", "exactly one of ema, lawa or wsm is allowed in a schedule of weights, not 2"),
        ("{ema: 0.9, lwaa: 5}", "unknown key 'lwaa' in a schedule of weights (did you mean 'lawa'?)"),
        ("{ema: }", "one of ema, lawa or wsm is needed"),
        ("[{ema: 0.9}, {lawa: 5}]", "a mapping here takes 'value' and 'filter', not a mapping with the keys ema"),
        ("[0.5, {ema: 0.9}]", "mixes plain values with mappings"),
    ],
)
def test_a_wrong_schedule_is_one_error(value: str, words: str) -> None:
    text = f"merge_method: linear\nmodels: [{{model: a}}]\nparameters:\n  weight: {value}\n"
    _, problems = parse(text, "r.yml", parameter_names=["weight"])
    assert words in str(problems[0])
    assert len(problems) == (2 if value.startswith("[{") else 1)


# ---- what they spread over


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for i in (1, 2, 9, 10, 11):
        plan_help.model(folder / f"checkpoint-{i}", seed=i)
    plan_help.model(folder / "base", seed=99)
    return folder


def weights(recipe: dict[str, Any], name: str = NAME) -> dict[str, Any]:
    """The weight of each model of one tensor, by the last part of its path."""
    with prepare(recipe) as prepared:
        refs = [Path(m.ref).name for m in prepared.plan.models]
        return {refs[o.model]: o.value for o in prepared.explain(name) if o.parameter == "weight" and o.model is not None}


def linear(*models: Any, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [m if isinstance(m, dict) else {"model": str(m)} for m in models], **options}


def test_in_an_entry_it_spreads_over_the_matches_of_that_entry(run: Path) -> None:
    base = {"model": str(run / "base"), "parameters": {"weight": 0.25}}
    by_model = weights(linear(base, {"model": str(run / "checkpoint-*"), "parameters": {"weight": {"ema": 0.5}}}))
    assert list(by_model.items()) == [
        ("base", 0.25),
        ("checkpoint-1", 0.0625),
        ("checkpoint-2", 0.0625),
        ("checkpoint-9", 0.125),
        ("checkpoint-10", 0.25),
        ("checkpoint-11", 0.5),
    ]


def test_lawa_opens_none_but_the_last_of_its_pattern(run: Path) -> None:
    recipe = linear(
        run / "base", {"model": str(run / "checkpoint-*"), "parameters": {"weight": {"lawa": 2}}}, parameters={"weight": 1}
    )
    (run / "checkpoint-0").mkdir(exist_ok=True)
    (run / "checkpoint-0" / "pytorch_model.bin").touch()
    try:
        assert weights(recipe) == {"base": 1, "checkpoint-10": 0.5, "checkpoint-11": 0.5}
    finally:
        shutil.rmtree(run / "checkpoint-0")
    by_name = [{"filter": "mlp", "value": {"lawa": 2}}, {"value": 1}]
    entry = {"model": str(run / "checkpoint-*"), "parameters": {"weight": by_name}}
    assert len(plan(linear(entry)).models) == 5


def test_at_the_top_level_it_spreads_over_all_models(run: Path) -> None:
    recipe = linear(run / "checkpoint-9", run / "checkpoint-1?", parameters={"weight": {"lawa": 2}})
    assert weights(recipe) == {"checkpoint-9": 0, "checkpoint-10": 0.5, "checkpoint-11": 0.5}


def test_a_nearer_value_wins_and_the_model_keeps_its_place(run: Path) -> None:
    nearer = {"model": str(run / "checkpoint-10"), "parameters": {"weight": 3}}
    recipe = linear(run / "checkpoint-9", nearer, run / "checkpoint-11", parameters={"weight": {"ema": 0.5}})
    assert weights(recipe) == {"checkpoint-9": 0.25, "checkpoint-10": 3, "checkpoint-11": 0.5}
    assert warnings(plan(recipe)) == []


def test_a_filter_goes_with_it(run: Path) -> None:
    by_name = [{"filter": "mlp", "value": {"lawa": 1}}, {"value": [0.25, 1]}]
    recipe = linear(run / "checkpoint-1?", parameters={"weight": by_name})
    assert weights(recipe) == {"checkpoint-10": 0, "checkpoint-11": 1}
    assert weights(recipe, "model.layers.1.self_attn.q_proj.weight") == {"checkpoint-10": 1, "checkpoint-11": 1}


def test_the_base_has_no_place_in_it(run: Path) -> None:
    recipe = linear(run / "*", parameters={"weight": {"lawa": 5}}) | {"merge_method": "ties", "base_model": str(run / "base")}
    assert list(weights(recipe).values()) == [0.2] * 5


def test_in_slices_it_spreads_over_the_sources(run: Path) -> None:
    sources = [{"model": str(run / f"checkpoint-{i}"), "layer_range": [0, 1]} for i in (1, 2, 9)]
    slices = [{"sources": sources, "parameters": {"weight": {"ema": 0.5}}}, {"sources": sources[:1]}]
    recipe = {"merge_method": "linear", "slices": slices, "parameters": {"weight": 1}}
    assert weights(recipe) == {"checkpoint-1": 0.25, "checkpoint-2": 0.25, "checkpoint-9": 0.5}
    assert weights(recipe, NAME.replace("0", "1")) == {"checkpoint-1": 1}


def test_explain_shows_the_weight_and_the_line_of_the_schedule(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(
        f"merge_method: linear\nmodels:\n  - model: {run}/checkpoint-1?\n    parameters:\n      weight: {{ema: 0.75}}\n"
    )
    with prepare(recipe) as prepared:
        explained = [(o.value, o.where) for o in prepared.explain(NAME) if o.parameter == "weight"]
    assert explained == [(0.75, f"{recipe}:5:15"), (0.25, f"{recipe}:5:15")]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            {"models": [{"model": "checkpoint-1", "parameters": {"weight": {"ema": 0.9}}}]},
            "models[0].parameters.weight: a schedule spreads over the models of a pattern, and this entry is one model",
        ),
        (
            {"models": [{"model": "checkpoint-*"}], "parameters": {"weight": {"lawa": 6}}},
            "parameters.weight: lawa: 6 is the mean of the last 6 models, and here are 5",
        ),
        (
            {"models": [{"model": "checkpoint-1?", "parameters": {"weight": {"lawa": 3}}}]},
            "models[0].parameters.weight: lawa: 3 is the mean of the last 3 models, and here are 2",
        ),
        (
            {"base_model": "base", "models": [{"model": "checkpoint-*"}], "parameters": {"weight": {"ema": 0.9}}},
            "parameters.weight: the base_model counts as one more input of linear, and it has no place in the schedule",
        ),
        (
            {"models": [{"model": "checkpoint-*"}], "parameters": {"weight": 1, "normalize": {"ema": 0.9}}},
            "parameters.normalize: normalize takes no schedule: that is for the weights of models",
        ),
    ],
)
def test_a_schedule_that_cannot_be_spread_is_refused(
    run: Path, recipe: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    problem = only({"merge_method": "linear", **recipe})
    assert isinstance(problem, ParameterError)
    assert words in str(problem)


def test_a_schedule_for_a_method_without_weights_is_only_unknown(run: Path) -> None:
    recipe = linear(run / "checkpoint-1", parameters={"weight": {"lawa": 9}}) | {"merge_method": "passthrough"}
    assert "has no parameter 'weight'" in str(only(recipe))


def test_every_order_of_two_schedules_is_a_plan_of_its_own(run: Path) -> None:
    rules: list[dict[str, Any]] = [{"ema": 0.9}, {"lawa": 2}, {"wsm": "cosine"}, {"wsm": "1-sqrt"}]
    plans = [plan(linear(run / "checkpoint-*", parameters={"weight": rule})) for rule in rules]
    assert all(a.hash != b.hash for a, b in itertools.combinations(plans, 2))
