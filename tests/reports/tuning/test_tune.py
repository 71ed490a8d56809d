"""`weightsmith tune` from the recipe to the report: what is written, resumed, refused; and what users see."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
import weightsmith._methods.tsv_m
from tests.cli_help import Cli, cli, environment
from tests.fork_help import Forked, started_cli
from weightsmith._base.errors import NonFinite, OutputExists, PlanError, WeightsmithError
from weightsmith._engine import results
from weightsmith._execution.options import RunOptions
from weightsmith._execution.progress import Silent
from weightsmith._planning.options import RecipeOptions
from weightsmith._reports.evaluate.values import Change
from weightsmith._reports.options import EvaluateSettings, TuneSettings
from weightsmith._reports.tuning import measure
from weightsmith._reports.tuning import tune as module
from weightsmith._reports.tuning.evaluator import Evaluator
from weightsmith._reports.tuning.journal import Trial
from weightsmith._reports.tuning.result import NOT_BETTER, Tuning

__all__ = ["cli"]

LINEAR: dict[str, Any] = {
    "merge_method": "task_arithmetic",
    "base_model": "a",
    "models": [
        {"model": "b", "parameters": {"weight": [{"tune": [0, 1]}, {"tune": [0, 1]}]}},
        {"model": "c", "parameters": {"weight": {"tune": [0, 2]}}},
    ],
}
ARGS: dict[str, Any] = {"text": "t.txt", "report_text": "u.txt", "tokens": 32, "rows": 8, "seed": 3, "progress": False}


def tune(recipe: Any = "r.yml", out: str = "tuned.yml", **options: Any) -> Tuning:
    return weightsmith.tune(recipe, out, **{"budget": 6, **ARGS, **options})


def started(budget: int) -> Forked:
    """The command, for the same trials as `tune`."""
    args = ["r.yml", "tuned.yml", "--text", "t.txt", "--report-text", "u.txt", "--tokens", "32", "--rows", "8", "--seed", "3"]
    return started_cli("tune", *args, "--budget", budget, "--quiet", env=environment())


def trials(path: str = "tuned.trials.jsonl") -> list[str]:
    return Path(path).read_text().splitlines()[1:]


def recipe(text: str) -> str:
    Path("own.yml").write_text(text)
    return "own.yml"


@pytest.mark.slow
def test_the_result_is_the_recipe_with_numbers_and_its_page(work: Path) -> None:
    tuning = tune(budget=10)
    text = Path("tuned.yml").read_text()
    assert text.startswith("# Tuned by weightsmith")
    assert text.endswith(tuning.recipe)
    assert "# two fine-tunes" in text
    assert "# the first" in text
    assert len(tuning.trials) == 10
    weightsmith.merge("tuned.yml", "merged", progress=False)
    weightsmith.merge({**_start()}, "start", progress=False)
    expected = weightsmith.evaluate("start", "merged", text="u.txt", tokens=32, rows=23, progress=False)
    for name, score in zip(("start", "tuned"), expected.scores, strict=True):
        assert tuning.judged[name][0].loss.value == pytest.approx(score[0].loss.value, rel=1e-5)
    change, same = tuning.changes["start"], expected.totals[1].change
    assert same is not None
    assert change.value == pytest.approx(same.value, abs=1e-5)
    assert change.error == pytest.approx(same.error, abs=1e-5)
    assert "than the start" in tuning.reading[0]
    best = min(tuning.losses, key=tuning.objective_of)
    assert best == tuning.best
    assert tuning.objective_of(best) <= tuning.objective_of(1)
    assert best in tuning.front
    json.dumps(tuning.to_json(), allow_nan=False)


@pytest.mark.long
def test_the_plain_mean_is_a_reference_and_the_report_says_if_it_is_not_beaten(work: Path) -> None:
    tuning = tune(budget=3)
    assert [*tuning.judged] == ["tuned", "start", "mean", "base"]
    mean = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 1}} for name in "bc"]}
    weightsmith.merge(mean, "mean", progress=False)
    expected = weightsmith.evaluate("mean", text="u.txt", tokens=32, rows=23, progress=False)
    assert tuning.judged["mean"][0].loss.value == pytest.approx(expected.scores[0][0].loss.value, rel=1e-5)
    assert any("than the mean" in line for line in tuning.reading)
    change = tuning.changes["mean"]
    assert (NOT_BETTER in tuning.reading) == (not (change.told_apart and change.value > 0))
    for value, beats in ((3.0, True), (1.9, False), (0.0, False), (-3.0, False)):
        [score] = tuning.against["mean"]
        scores = (replace(score, change=Change(value, 1.0, 12, 23)),)
        judged = replace(tuning, against={**tuning.against, "mean": scores})
        assert judged.beats_mean == beats
        assert (judged.reading[-1] == NOT_BETTER) == (not beats)


@pytest.mark.long
def test_a_recipe_of_one_fine_tune_has_no_mean(work: Path) -> None:
    models = [{"model": "b", "parameters": {"weight": {"tune": [0, 1]}}}]
    tuning = tune({"merge_method": "task_arithmetic", "base_model": "a", "models": models}, "one.yml", budget=2)
    assert [*tuning.judged] == ["tuned", "start", "base"]
    assert NOT_BETTER not in tuning.reading


def _start() -> dict[str, Any]:
    models = [{"model": "b", "parameters": {"weight": 0.5, "density": 0.5}}, {"model": "c", "parameters": {"density": 0.5}}]
    models[1]["parameters"]["weight"] = 0.5  # type: ignore[index]
    return {"merge_method": "ties", "base_model": "a", "dtype": "bfloat16", "models": models}


@pytest.mark.long
@pytest.mark.parametrize("objective", ["mean", "worst"])
def test_each_trial_is_reported_once_with_its_loss(work: Path, objective: str) -> None:
    def run(budget: int) -> tuple[Tuning, list[tuple[Trial, float | None]]]:
        heard = list[tuple[Trial, float | None]]()
        texts = EvaluateSettings(text=("t.txt", "u.txt"), tokens=32, rows=12)
        settings = TuneSettings(budget=budget, objective=objective)
        arguments = RecipeOptions(), texts, settings, RunOptions(), Silent()
        return module.tuned("r.yml", "tuned.yml", *arguments, lambda trial, loss: heard.append((trial, loss))), heard

    for budget, earlier in ((4, 0), (6, 4)):
        tuned, heard = run(budget)
        assert tuned.resumed == earlier
        assert [trial for trial, _ in heard] == [*tuned.trials]
        losses = {trial.number: loss for trial, loss in heard if loss is not None}
        assert losses == {number: tuned.objective_of(number) for number in tuned.losses}
        assert losses


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("search", ["cma", "gradient"])
def test_the_same_call_makes_the_same_trials_with_any_number_of_threads(work: Path, search: str) -> None:
    tune(LINEAR, "one.yml", search=search, threads=1)
    tune(LINEAR, "two.yml", search=search, threads=3)
    assert trials("one.trials.jsonl") == trials("two.trials.jsonl")
    if search == "cma":
        tune(LINEAR, "three.yml", search=search, seed=4)
        assert trials("one.trials.jsonl") != trials("three.trials.jsonl")


@pytest.mark.process
@pytest.mark.cpu
@pytest.mark.slow
def test_after_kill_9_the_same_trials_follow(work: Path) -> None:
    tune(out="whole.yml", budget=12)
    journal = Path("tuned.trials.jsonl")
    for least in (2, 5):
        process = started(budget=12)
        while not journal.exists() or len(journal.read_bytes().split(b"\n")) < least + 2:
            assert not process.ended()
            time.sleep(0.005)
        process.kill()
        process.wait()
        assert not Path("tuned.yml").exists()
    before = journal.read_bytes()
    tuning = tune(budget=12)
    assert 5 <= tuning.resumed < 12
    assert journal.read_bytes().startswith(before[: before.rindex(b"\n")])
    assert trials() == trials("whole.trials.jsonl")
    assert Path("tuned.yml").read_text().split("\n", 2)[2] == Path("whole.yml").read_text().split("\n", 2)[2]


@pytest.mark.process
@pytest.mark.cpu
@pytest.mark.slow
def test_processes_that_share_a_search_make_the_trials_of_one(work: Path) -> None:
    """Each makes some; one that is killed loses its trial alone."""
    tune(out="whole.yml", budget=24)
    journal = Path("tuned.trials.jsonl")
    processes = [started(budget=24) for _ in range(3)]
    while not journal.exists() or len(trials()) < 3:
        time.sleep(0.01)
    processes[0].kill()
    processes[0].wait()
    assert [process.wait().code for process in processes[1:]] == [0, 0]
    assert sorted(trials(), key=lambda line: int(json.loads(line)["trial"])) == trials("whole.trials.jsonl")
    assert Path("tuned.yml").read_text().split("\n", 2)[2] == Path("whole.yml").read_text().split("\n", 2)[2]


@pytest.mark.long
def test_a_larger_budget_goes_on_and_nothing_is_computed_twice(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(budget=4)
    first = trials()
    scored, losses = list[object](), Evaluator.losses
    monkeypatch.setattr(Evaluator, "losses", lambda *args, **options: scored.append(args[1]) or losses(*args, **options))
    tuning = tune(budget=4)
    assert (tuning.resumed, len(scored)) == (4, 4)  # the report: tuned, start, mean, base
    assert trials() == first
    assert tune(budget=7).resumed == 4
    assert trials()[:4] == first
    assert len(trials()) == 7


@pytest.mark.long
def test_ctrl_c_leaves_the_best_so_far(work: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    scored, losses = list[int](), Evaluator.losses

    def interrupt(self: Evaluator, *args: Any, **options: Any) -> Any:
        scored.append(1)
        if len(scored) == 12:  # a candidate is scored in up to three parts
            raise KeyboardInterrupt
        return losses(self, *args, **options)

    args = ["tune", "r.yml", "tuned.yml", "--text", "t.txt", "--report-text", "u.txt", "--tokens", "32", "--rows", "8"]
    monkeypatch.setattr(Evaluator, "losses", interrupt)
    ran = cli(*args, "--budget", 10)
    assert ran.code == 130
    assert "tuned.yml has the best values so far" in ran.err
    assert "Finished trials are kept in tuned.trials.jsonl" in ran.err
    assert "not yet judged on other text" in Path("tuned.yml").read_text()
    n = len(trials())
    assert n > 1
    weightsmith.plan("tuned.yml")
    ran = cli(*args, "--budget", 10, "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["resumed"] == n
    assert "not yet judged" not in Path("tuned.yml").read_text()


@pytest.mark.long
def test_an_invalid_candidate_is_a_line(work: Path) -> None:
    text = "merge_method: task_arithmetic\nbase_model: a\ndtype: float16\nmodels:\n"
    text += "  - {model: b, parameters: {weight: {tune: [0, 1e9], start: 0.5}}}\n"
    tuning = tune(recipe(text), budget=5, search="random")
    errors = [trial.error for trial in tuning.trials]
    assert errors[0] == ""
    assert all("not a number that float16 can hold (output tensor" in error for error in errors[1:])
    assert tuning.best == 1
    assert "No candidate was better than the start" in tuning.reading[0]
    assert "4 candidates could not be scored; trial 2" in tuning.reading[-1]
    assert tune(recipe(text), budget=5, search="random").resumed == 5


@pytest.mark.long
def test_without_a_valid_candidate_there_is_one_error_and_no_recipe(work: Path) -> None:
    text = "merge_method: task_arithmetic\nbase_model: a\ndtype: float16\nmodels:\n"
    text += "  - {model: b, parameters: {weight: {tune: [1e8, 1e9]}}}\n"
    with pytest.raises(NonFinite, match="none of 3 candidates could be scored"):
        tune(recipe(text), budget=3)
    assert not Path("tuned.yml").exists()


@pytest.mark.long
def test_matrices_that_a_number_does_not_change_are_computed_once(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """λ scales what task singular vectors give: only the first candidate decomposes."""
    calls, thin_svd = list[int](), weightsmith._methods.tsv_m.thin_svd

    def counted(matrix: Any, keep: int) -> Any:
        calls.append(1)
        return thin_svd(matrix, keep)

    monkeypatch.setattr(results, "LARGE_BYTES", 1)  # these are kept in a file
    monkeypatch.setattr(weightsmith._methods.tsv_m, "thin_svd", counted)
    text = "merge_method: tsv_m\nbase_model: a\nmodels: [{model: b}, {model: c}]\nparameters: {lambda: {tune: [0.2, 1.4]}}\n"
    tune(recipe(text), budget=1)
    of_one = len(calls)
    first = tune("own.yml", "more.yml", budget=3)
    assert len(calls) == 2 * of_one > 0
    monkeypatch.setattr(measure, "MOST_MATRICES", 1)
    scores = [trial.nats for trial in first.trials]
    assert [trial.nats for trial in tune("own.yml", "again.yml", budget=3).trials] == scores
    assert len(set(scores)) == 3
    assert {path.suffix for path in work.iterdir() if "own" in path.name or "more" in path.name} == {".yml", ".jsonl"}


@pytest.mark.long
def test_methods_and_models_are_chosen(work: Path) -> None:
    text = "merge_method: {choice: [ties, task_arithmetic]}\nbase_model: a\nmodels:\n"
    text += "  - {model: {choice: [b, c]}, parameters: {weight: {tune: [0, 1]}}}\n"
    tuning = tune(recipe(text), budget=16)
    assert [trial.values[:2] for trial in tuning.trials[:4]] == [
        ("ties", "b"), ("ties", "c"), ("task_arithmetic", "b"), ("task_arithmetic", "c"),
    ]  # fmt: skip
    assert len({trial.values[:2] for trial in tuning.trials[4:]}) == 1
    weightsmith.plan("tuned.yml")


@pytest.mark.long
@pytest.mark.parametrize("objective", ["mean", "worst", "kl"])
def test_the_objective_is_what_is_made_small(work: Path, objective: str) -> None:
    Path("v.txt").write_text("Something else entirely; " * 3 + "".join(chr(97 + i * i * 7 % 26) for i in range(700)))
    options = {"reference": ["b", "c"]} if objective == "kl" else {}
    tuning = tune(text=["t.txt", "v.txt"], objective=objective, budget=8, **options)
    whole = {trial.number: trial for trial in tuning.trials if trial.whole}
    for number, trial in whole.items():
        sums = trial.divergences if objective == "kl" else trial.nats
        means = [sum(row_sums) / (31 * len(row_sums)) for row_sums in sums]  # type: ignore[arg-type]
        assert tuning.losses[number] == pytest.approx(means)
        assert tuning.objective_of(number) == pytest.approx(max(means) if objective == "worst" else np.mean(means))
    assert tuning.best == min(whole, key=tuning.objective_of)


@pytest.mark.long
@pytest.mark.parametrize("objective", ["mean", "worst", "kl"])
def test_the_gradient_of_the_objective_is_followed_and_resumed(work: Path, objective: str) -> None:
    Path("v.txt").write_text("Something else entirely; " * 3 + "".join(chr(97 + i * i * 7 % 26) for i in range(700)))
    options: dict[str, Any] = {"reference": ["b", "c"]} if objective == "kl" else {}
    options |= {"text": ["t.txt", "v.txt"], "objective": objective, "search": "gradient"}
    assert len(tune(LINEAR, budget=2, **options).trials) == 2
    tuning = tune(LINEAR, budget=5, **options)
    assert tuning.resumed == 2
    tune(LINEAR, "whole.yml", budget=5, **options)
    assert trials() == trials("whole.trials.jsonl")
    assert all(trial.whole and len(trial.slopes) == 3 for trial in tuning.trials)
    for first, second in itertools.pairwise(tuning.trials[:2]):
        promised = np.dot(first.slopes, np.subtract(second.values, first.values))
        change = tuning.objective_of(second.number) - tuning.objective_of(first.number)
        assert 1.7 * promised < change < 0.3 * promised
    assert tuning.best > 2


def test_the_gradient_is_for_numbers_with_fractions(work: Path) -> None:
    whole = {**LINEAR, "merge_method": "multislerp", "parameters": {"karcher_steps": {"tune": [1, 5]}}}
    with pytest.raises(WeightsmithError, match="takes whole numbers, which have no gradient"):
        tune(whole, search="gradient")


@pytest.mark.long
def test_more_rows_are_for_candidates_like_the_best_of_earlier_rounds(work: Path) -> None:
    tuning = tune(budget=16, rows=12)
    scored = [sum(value is not None for value in trial.nats[0]) for trial in tuning.trials]
    assert {3, 12} <= set(scored) <= {3, 6, 12}
    assert scored[0] == 12
    assert tuning.few_rows == 3
    few = [sum(trial.nats[0][k] or 0 for k in (0, 4, 8)) for trial in tuning.trials]
    for first, end in ((1, 8), (8, 15)):  # a start, and two generations of seven
        limit = sorted(few[:first])[max(0, first // 4 - 1)]
        assert [rows > 3 for rows in scored[first:end]] == [loss <= limit for loss in few[first:end]]


@pytest.mark.long
def test_time_ends_the_search(work: Path) -> None:
    tuning = tune(budget=100_000, time="1s")
    assert 1 <= len(tuning.trials) < 1000


@pytest.mark.long
def test_the_start_counts_for_the_time_and_one_candidate_is_tried_all_the_same(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """An hour passes while the models are opened."""

        seconds = 0.0
        sleep = staticmethod(time.sleep)

        def monotonic(self) -> float:
            return self.seconds

    clock = Clock()
    plain = module.Candidates.__init__

    def opened(*arguments: Any, **options: Any) -> None:
        plain(*arguments, **options)
        clock.seconds += 3600

    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module.Candidates, "__init__", opened)
    tuning = tune(time="30m")
    assert len(tuning.trials) == 1
    assert tuning.seconds == 3600


WRONG = {
    "a time": ({"time": "soon"}, "must be a time such as 90s, 30m or 2h, not 'soon'"),
    "no text": ({"text": []}, "there is no text to score"),
    "a reference without kl": ({"reference": "b"}, "a reference is for the objective kl alone"),
    "kl without a reference": ({"objective": "kl"}, "needs a model to compare with"),
    "too many references": ({"objective": "kl", "reference": ["a", "b"]}, "2 references for 1 texts"),
    "the same text": ({"report_text": "t.txt"}, "rows of t.txt for the report are in the rows of t.txt to tune on too"),
    "a text that is absent": ({"text": "x.txt"}, "x.txt"),
    "an output that is no recipe": ({"out": "tuned"}, "the output is a recipe, whose name ends in .yml"),
    "no folder": ({"out": "no/tuned.yml"}, "there is no folder"),
    "a recipe without values": ({"recipe": "plain.yml"}, "the recipe has no value to tune"),
    "a grid that is too large": ({"search": "grid"}, "a grid of two values of each number takes 8 candidates"),
    "an unknown search": ({"search": "genes"}, "must be one of cma, line, gradient, random, grid"),
    "a model that is absent": ({"recipe": "absent.yml"}, "nowhere"),
    "a reference of another shape": ({"objective": "kl", "reference": "other"}, "its tensors are not those of the merge"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_tuned_is_one_error_and_leaves_nothing(work: Path, name: str) -> None:
    from tests.calibration_help import save_model

    if "shape" in name:
        save_model(Path("other"), "qwen3")
    Path("plain.yml").write_text("merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n")
    Path("absent.yml").write_text("merge_method: linear\nmodels: [{model: ./nowhere, parameters: {weight: {tune: [0, 1]}}}]\n")
    before = sorted(path.name for path in work.iterdir())
    options, message = WRONG[name]
    with pytest.raises(WeightsmithError) as error:
        tune(**options)
    told = str(error.value)
    assert message in told
    assert not isinstance(error.value, PlanError) or len(error.value.problems) == 1
    assert sorted(path.name for path in work.iterdir()) == before


@pytest.mark.long
def test_a_file_that_is_not_ours_stays(work: Path) -> None:
    for name in ("tuned.yml", "tuned.trials.jsonl"):
        Path(name).write_text("mine\n")
        with pytest.raises(OutputExists):
            tune()
        assert Path(name).read_text() == "mine\n"
        Path(name).unlink()
        Path("tuned.trials.jsonl").unlink(missing_ok=True)
    tune(budget=2)
    Path("tuned.yml").write_text(Path("tuned.yml").read_text() + "# my own remark\n")
    with pytest.raises(OutputExists, match="was changed since"):
        tune(budget=2)
    assert Path("tuned.yml").read_text().endswith("# my own remark\n")


@pytest.mark.long
def test_another_text_or_other_weights_are_another_search(work: Path) -> None:
    from tests.calibration_help import changed

    tune(budget=2)
    with pytest.raises(WeightsmithError, match="of another search: texts differ"):
        tune(budget=2, rows=7)
    folder = work / "b"
    target = folder.resolve()
    folder.unlink()
    import shutil

    shutil.copytree(target, folder)
    changed(folder, up_proj=2)
    with pytest.raises(WeightsmithError, match="of another search: models differ"):
        tune(budget=2)
    assert tune(budget=2, resume=False).resumed == 0


@pytest.mark.long
def test_the_command_shows_what_it_found(work: Path, cli: Cli) -> None:
    args = ["r.yml", "tuned.yml", "--text", "t.txt", "--text", "v.txt", "--tokens", "32", "--budget", "6"]
    Path("v.txt").write_text(Path("u.txt").read_text())
    ran = cli("tune", *args)
    assert ran.code == 0, ran.err
    for part in ("tuned.yml", "than the start", "pareto front over the texts", "models[0].parameters.weight", "all texts"):
        assert part in ran.out
    page = Path("tuned.html").read_text()
    assert "Best so far" in page
    assert "<script src" not in page
    ran = cli("tune", *args, "--report", "own.html", "--quiet")
    assert (ran.code, ran.out) == (0, "")
    assert Path("own.html").exists()
    Path("tuned.html").write_text("mine")
    ran = cli("tune", *args)
    assert ran.code == 3
    assert Path("tuned.html").read_text() == "mine"


def test_the_module_names_its_marks() -> None:
    assert module.MARK.startswith("# Tuned by weightsmith")


@pytest.mark.long
def test_a_line_scores_all_rows_of_each_candidate(work: Path) -> None:
    recipe = {**LINEAR, "models": [{"model": name, "parameters": {"weight": 1}} for name in "bc"]}
    tuning = tune({**recipe, "parameters": {"lambda": {"tune": [0, 1]}}}, search="line", budget=20)
    assert 3 <= len(tuning.trials) <= 8
    assert len(tuning.losses) == len(tuning.trials)
    assert tuning.objective_of(tuning.best) == min(map(tuning.objective_of, tuning.losses))


@pytest.mark.long
def test_a_table_has_a_row_for_each_trial_and_texts_may_be_strings(work: Path) -> None:
    tuning = tune(text=Path("t.txt").read_text(), report_text=[Path("u.txt").read_text()])
    assert tuning.judged == tune(out="files.yml").judged
    (name,) = tuning.texts
    assert name.startswith("'")
    assert tuning.report_texts[0].startswith("'")
    rows = tuning.table()
    assert [row["trial"] for row in rows] == [trial.number for trial in tuning.trials]
    (best,) = (row for row in rows if row["best"])
    assert best["trial"] == tuning.best
    assert best["objective"] == best[f"loss {name}"] == tuning.objective_of(tuning.best)
    assert [best[name] for name in tuning.names] == list(tuning.values)
    assert "weightsmith-text-" not in Path("tuned.yml").read_text()
