"""Patterns in place of a model: what they stand for, in which order, and what is said when they stand for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import plan_help
from tests.plan_help import only, plan, problems, warnings
from weightsmith._base.errors import MismatchError, NotFound, SyntaxProblem, Unsupported
from weightsmith._planning.recipe import Schedule
from weightsmith._plans import Plan


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a training run in it, as trainers leave it."""
    monkeypatch.chdir(tmp_path)
    for i in (1, 9, 10, 100):
        folder = tmp_path / "run" / f"checkpoint-{i}"
        plan_help.model(folder, seed=i)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
            (folder / name).touch()
        (folder / f"global_step{i}").mkdir()
    plan_help.model(tmp_path / "base", seed=99)
    return tmp_path


def entry(model: Any, weight: float = 1) -> dict[str, Any]:
    return {"model": model, "parameters": {"weight": weight}}


def linear(*entries: Any, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [e if isinstance(e, dict) else entry(e) for e in entries], **options}


def refs(p: Plan) -> list[str]:
    return [m.ref for m in p.models]


RUN = [f"./run/checkpoint-{i}" for i in (1, 9, 10, 100)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("./run/checkpoint-*", RUN),
        ("./run/checkpoint-*/", RUN),
        ("./run/*", RUN),
        ("./*/checkpoint-*", RUN),
        ("./run/checkpoint-??", RUN[2:3]),
        ("./run/checkpoint-[19]", RUN[:2]),
        ("./run/checkpoint-[!1]*", RUN[1:2]),
        ("run/checkpoint-1*", ["run/checkpoint-1", "run/checkpoint-10", "run/checkpoint-100"]),
        ("./run/checkpoint-9/*.safetensors", ["./run/checkpoint-9/model.safetensors"]),
        ({"model": "./run/checkpoint-1?"}, RUN[2:3]),
        ({"model": {"path": "./run/checkpoint-1?"}}, RUN[2:3]),
    ],
)
def test_a_pattern_stands_for_all_that_match_in_natural_order(run: Path, pattern: Any, expected: Sequence[str]) -> None:
    p = plan(linear(entry(pattern)))
    assert refs(p) == expected
    assert not [w for w in warnings(p) if "config.json" not in w]


def test_hidden_folders_match_only_a_pattern_that_names_the_dot(run: Path) -> None:
    """Unfinished work and caches lie in hidden folders."""
    plan_help.model(run / "run" / ".checkpoint-2", seed=2)
    assert refs(plan(linear("./run/*"))) == RUN
    assert refs(plan(linear("./run/.check*", "./base"))) == ["./run/.checkpoint-2", "./base"]


def test_absolute_patterns_and_the_home_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refs(plan(linear(f"{run}/run/checkpoint-1"))) == refs(plan(linear(f"{run}/run/checkpoint-?")))[:1]
    monkeypatch.setenv("HOME", str(run))
    assert refs(plan(linear("~/run/checkpoint-?0"))) == [f"{run}/run/checkpoint-10"]


def test_the_entry_s_parameters_hold_for_each_and_other_entries_stay_in_their_place(run: Path) -> None:
    recipe = linear(entry("./base", 2), entry("./run/checkpoint-1?*", 0.5), entry("./run/checkpoint-9", 3))
    p = plan(recipe)
    assert refs(p) == ["./base", "./run/checkpoint-10", "./run/checkpoint-100", "./run/checkpoint-9"]
    used = {tuple(m["weight"] for m in p.settings[s.settings].models) for s in p.steps}
    assert used == {(2, 0.5, 0.5, 3)}


def test_the_entry_s_schedule_spreads_over_what_it_matches(run: Path) -> None:
    p = plan(linear(entry("./base", 2), {"model": "./run/*", "parameters": {"weight": {"ema": 0.5}}}))
    used = {tuple(m["weight"] for m in p.settings[s.settings].models) for s in p.steps}
    assert used == {(2, *Schedule("ema", 0.5).weights(4))}


def test_patterns_in_slices_and_modules(run: Path) -> None:
    source = {"model": "./run/checkpoint-1*", "layer_range": [0, 1], "parameters": {"weight": 1}}
    assert refs(plan({"merge_method": "linear", "slices": [{"sources": [source]}]})) == [RUN[0], RUN[2], RUN[3]]
    assert refs(plan({"merge_method": "linear", "modules": {"model": {"models": [entry("./run/*")]}}})) == RUN


@pytest.mark.parametrize("method", ["ties", "task_arithmetic"])
def test_the_base_of_the_merge_is_none_of_the_matches(run: Path, method: str) -> None:
    plan_help.model(run / "run" / "checkpoint-0")
    recipe = linear("./run/*") | {"merge_method": method, "base_model": "run/checkpoint-0"}
    p = plan(recipe)
    assert refs(p) == ["run/checkpoint-0", *RUN]
    assert {len(s.inputs) for s in p.steps} == {5}
    assert warnings(p) == []


def test_where_the_base_is_an_input_it_is_one_of_the_matches(run: Path) -> None:
    p = plan(linear("./run/*", base_model="./run/checkpoint-10"))
    assert {len(s.inputs) for s in p.steps} == {4}
    assert refs(p)[0] == "./run/checkpoint-10"


def test_a_folder_of_that_very_name_is_no_pattern(run: Path) -> None:
    plan_help.model(run / "run[1]")
    plan_help.model(run / "run1")
    assert refs(plan(linear("./run[1]"))) == ["./run[1]"]


# ---- left out


def test_folders_without_weights_are_left_out_with_a_warning(run: Path) -> None:
    (run / "run" / "checkpoint-2").mkdir()
    for name in ("optimizer.pt", "scheduler.pt"):
        (run / "run" / "checkpoint-2" / name).touch()
    (run / "run" / "checkpoint-3" / "global_step3").mkdir(parents=True)
    (run / "run" / "checkpoint-4").mkdir()
    (run / "run" / "runs.log").touch()
    p = plan(linear("./run/*"))
    assert refs(p) == RUN
    (warning,) = warnings(p)
    assert "models[0].model: 3 of 7 folders that match ./run/* are left out" in warning
    assert "./run/checkpoint-2: no weights, but optimizer.pt, scheduler.pt" in warning
    assert "./run/checkpoint-3: no weights, but global_step3" in warning
    assert "./run/checkpoint-4: empty" in warning


def test_a_link_to_another_match_is_left_out_and_a_link_elsewhere_is_not(run: Path) -> None:
    (run / "run" / "best").symlink_to("checkpoint-9")
    (run / "run" / "last").symlink_to(run / "base")
    p = plan(linear("./run/*"))
    assert refs(p) == [*RUN, "./run/last"]
    assert "./run/best: a link to ./run/checkpoint-9" in warnings(p)[0]


@pytest.mark.parametrize(
    ("file", "words"), [("model.pkl", "no weights in a format that is read"), ("adapter_config.json", "an adapter")]
)
def test_a_folder_whose_weights_cannot_be_used_is_an_error(run: Path, file: str, words: str) -> None:
    (run / "run" / "checkpoint-5").mkdir()
    (run / "run" / "checkpoint-5" / file).touch()
    problem = only(linear("./run/*"))
    assert isinstance(problem, Unsupported)
    assert f"models[0].model: run/checkpoint-5: {words}" in str(problem)


# ---- errors


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            "./run/step-*",
            "no folder matches ./run/step-*\n  folders in run: checkpoint-1, checkpoint-9, checkpoint-10, checkpoint-100",
        ),
        ("./nowhere/*", "no folder matches ./nowhere/*\n  there is no folder nowhere"),
        ("org/model-*", "no folder matches org/model-*\n  there is no folder org"),
        ("checkpoint-*", "no folder matches checkpoint-*\n  folders in the current folder: base, run"),
        ("./run/checkpoint-1/*.json", "no folder matches ./run/checkpoint-1/*.json"),
        ("./run/checkpoint-*@main", "a pattern matches local folders, which have no revisions"),
    ],
)
def test_no_match_is_one_error_with_its_line(run: Path, pattern: str, words: str) -> None:
    text = f"merge_method: linear\nmodels:\n  - model: {pattern}\n    parameters: {{weight: 1}}\n"
    problem = only(text)
    assert isinstance(problem, NotFound | SyntaxProblem)
    assert str(problem).startswith("<text>:3:12: ")
    assert words in str(problem)


def test_what_else_is_wrong_with_the_text_is_said_too(run: Path) -> None:
    text = "merge_method: linear\nmodels:\n  - model: ./no/*\n    weight: 1\n  - model: ./none/*\n"
    assert [p.finding.where for p in problems(text)] == ["<text>:3:12", "<text>:4:5", "<text>:5:12"]


def test_matches_without_weights_only_are_an_error(run: Path) -> None:
    (run / "logs" / "a").mkdir(parents=True)
    assert "no folder that matches ./logs/* holds weights\n  ./logs/a: empty" in str(only(linear("./logs/*")))


def test_a_base_is_no_pattern(run: Path) -> None:
    recipe = linear("./run/*", base_model="./ba*")
    assert "base_model: base_model is one model, and ./ba* is a pattern" in str(only(recipe))


def test_two_entries_that_match_the_same_folder_are_an_error(run: Path) -> None:
    problem = only(linear("./run/*", "./run/checkpoint-9"))
    assert isinstance(problem, MismatchError)
    assert "models[1]: ./run/checkpoint-9 is listed twice" in str(problem)


# ---- to the end


def test_a_merge_of_a_pattern_is_the_merge_of_its_matches(run: Path) -> None:
    weightsmith.merge(linear("./run/*"), "out/by/pattern", fsync=False)
    weightsmith.merge(linear(*RUN), "out/by/name", fsync=False)
    by_pattern, by_name = (run / "out" / "by" / name / "model.safetensors" for name in ("pattern", "name"))
    assert by_pattern.read_bytes() == by_name.read_bytes()
