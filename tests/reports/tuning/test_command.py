"""Candidates that a command measures: what it is given, what it may print, and how it may fail."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.cli_help import Cli, cli
from tests.reports.tuning.test_tune import LINEAR, trials
from weightsmith._base.errors import OutputExists, ParameterError, StoreError, WeightsmithError
from weightsmith._reports.command import CommandFailed
from weightsmith._reports.tuning.result import NOT_BETTER, Tuning

pytestmark = pytest.mark.process

__all__ = ["cli"]

SCRIPT = """import sys
import numpy as np
from safetensors.numpy import load_file
import glob, os
model = sys.argv[1]
open("seen.txt", "a").write(model + "\\n")
n = len(open("seen.txt").readlines())
{before}
weights = load_file(glob.glob(model + "/*.safetensors")[0])
wanted = load_file(glob.glob("wanted/*.safetensors")[0])
print("some words")
print(sum(float(np.square(weights[name] - wanted[name]).sum()) for name in weights))
"""


def script(before: str = "") -> str:
    """A command that prints how far a model is from another."""
    Path("score.py").write_text(SCRIPT.format(before=before))
    return f"{shlex.quote(sys.executable)} score.py {{model}}"


@pytest.fixture
def target_merge(work: Path) -> None:
    """What the search is to find."""
    recipe = json.loads(json.dumps(LINEAR))
    recipe["models"][0]["parameters"]["weight"] = [0.2, 0.9]
    recipe["models"][1]["parameters"]["weight"] = 1.4
    weightsmith.merge(recipe, "wanted", progress=False, out_dtype="float32")


def tune(out: str = "tuned.yml", **options: Any) -> Tuning:
    all_options = {"budget": 20, "seed": 3, "progress": False, "out_dtype": "float32", **options}
    return weightsmith.tune(LINEAR, out, **all_options)


@pytest.mark.slow
def test_the_number_that_a_command_prints_is_made_small(target_merge: None, cli: Cli) -> None:
    tuning = tune(command=script(), budget=8)
    best = min(trial.nats[0][0] for trial in tuning.trials)  # type: ignore[type-var]
    assert tuning.measured["tuned"] == best == tuning.objective_of(tuning.best)
    assert best < 0.9 * tuning.measured["start"]  # type: ignore[operator]
    assert re.fullmatch(r"The tuned recipe has \S+, the start \S+, the mean \S+, by the command .*", tuning.reading[0])
    assert (NOT_BETTER in tuning.reading) == (tuning.measured["tuned"] >= tuning.measured["mean"])
    worse = replace(tuning, measured={**tuning.measured, "mean": tuning.measured["tuned"]})
    assert worse.reading[-1] == NOT_BETTER
    assert "by no other" in tuning.reading[0]
    assert not Path("tuned.candidate").exists()
    assert len(Path("seen.txt").read_text().splitlines()) == 8 + 3  # tuned, start, mean
    Path("lin.yml").write_text(json.dumps({**LINEAR, "out_dtype": "float32"}))
    args = ["tune", "lin.yml", "cli.yml", "--command", script(), "--report-command", script("# other"), "--budget", 2]
    ran = cli(*args)
    assert ran.code == 0, ran.err
    assert "by the command" not in ran.out
    assert "score.py {model}" in ran.out
    assert Path("cli.html").exists()


@pytest.mark.slow
def test_a_search_by_a_command_resumes(target_merge: None) -> None:
    weightsmith.merge(
        {"merge_method": "linear", "models": [{"model": "b", "parameters": {"weight": 1}}]}, "tuned.candidate", progress=False
    )  # as a crash leaves it
    assert len(tune(command=script(), budget=3).trials) == 3
    lines = trials()
    assert tune(command=script(), budget=5).resumed == 3
    assert trials()[:3] == lines
    assert len(Path("seen.txt").read_text().splitlines()) == 5 + 2 * 3  # twice tuned, start, mean
    with pytest.raises(WeightsmithError, match="another search: command"):
        tune(command=script() + " more")


FAILURES = {
    "it fails": ("sys.exit('no such task')", "the command ended with status 1", "no such task"),
    "it prints no number": ("print('done'); sys.exit()", "the last line of the command is no number", "done"),
    "it prints nothing": ("sys.exit()", "the command printed nothing", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_a_command_that_never_worked_ends_the_search_and_a_later_failure_is_a_line(target_merge: None, name: str) -> None:
    before, message, detail = FAILURES[name]
    with pytest.raises(CommandFailed, match=message) as error:
        tune(command=script(before))
    assert detail in str(error.value)
    assert not Path("tuned.yml").exists()
    assert not Path("tuned.candidate").exists()
    Path("seen.txt").unlink()
    tuning = tune(command=script(f"if n == 2:\n    {before}"), budget=4)
    assert [bool(trial.error) for trial in tuning.trials] == [False, True, False, False]
    assert message in tuning.trials[1].error


@pytest.mark.slow
def test_a_command_that_fails_on_the_mean_does_not_lose_the_search(target_merge: None) -> None:
    tuning = tune(command=script("if n == 6: sys.exit('no')"), budget=3)  # three trials, tuned, start
    assert tuning.measured.keys() == {"tuned", "start"}
    assert NOT_BETTER not in tuning.reading


@pytest.mark.slow
def test_a_number_that_is_not_finite_is_an_invalid_candidate(target_merge: None) -> None:
    tuning = tune(command=script("if n == 1: print('nan'); sys.exit()"), budget=3)
    assert "the command printed nan" in tuning.trials[0].error
    assert tuning.best > 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no place for the model": ({"command": "true"}, "the command does not name the model"),
    "quotes that do not end": ({"command": "true '{model}"}, "the command cannot be read"),
    "no place in the report's": ({"command": "a {model}", "report_command": "b"}, "report_command"),
    "a text too": ({"command": "true {model}", "text": "t.txt"}, "exclude each other"),
    "a gradient": ({"command": "true {model}", "search": "gradient"}, "a number that a command prints has no gradient"),
    "an objective": ({"command": "true {model}", "objective": "worst"}, "it is for texts"),
    "the report's alone": ({"report_command": "true {model}", "text": "t.txt"}, "it is for searches with"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_measured_is_one_error_and_leaves_nothing(work: Path, name: str) -> None:
    before = sorted(path.name for path in work.iterdir())
    options, message = WRONG[name]
    with pytest.raises(ParameterError) as error:
        tune(**options)
    assert message in str(error.value)
    assert sorted(path.name for path in work.iterdir()) == before


@pytest.mark.slow
def test_files_that_a_command_leaves_in_the_model_stay(target_merge: None) -> None:
    with pytest.raises(StoreError, match="it is not removed"):
        tune(command=script("open(model + '/mine.txt', 'w').write('mine')"))
    assert Path("tuned.candidate/mine.txt").read_text() == "mine"


def test_a_program_that_is_absent_is_named(work: Path) -> None:
    with pytest.raises(CommandFailed, match="no-such-program cannot be run"):
        tune(command="no-such-program {model}")


def test_a_folder_of_someone_else_is_not_replaced(work: Path) -> None:
    Path("tuned.candidate").mkdir()
    Path("tuned.candidate/mine.txt").write_text("mine")
    with pytest.raises(OutputExists):
        tune(command="true {model}")
    assert Path("tuned.candidate/mine.txt").read_text() == "mine"
