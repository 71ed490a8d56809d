"""`weightsmith auto` from the models to the merge: what is written, repeated, resumed, refused."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

import weightsmith
import weightsmith._methods.regmean
import weightsmith._methods.tsv_m
from tests.calibration_help import noisy_copy, save_model
from tests.cli_help import Cli, cli
from tests.reports.tuning.help import words
from weightsmith._base.errors import (
    Busy,
    CheckpointError,
    MismatchError,
    NonFinite,
    NoSpace,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
)
from weightsmith._execution.progress import Silent
from weightsmith._outputs.staging import Staging
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import Plan
from weightsmith._reports.auto import auto as module
from weightsmith._reports.auto import write as write_module
from weightsmith._reports.auto.pool import Choice, Pool
from weightsmith._reports.auto.result import Auto
from weightsmith._reports.tuning.evaluator import Evaluator

__all__ = ["cli"]

FINE_TUNES = ("fr", "de")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    save_model(folder / "base")
    for seed, name in enumerate(FINE_TUNES, 1):
        noisy_copy(folder / "base", folder / name, seed)
        (folder / f"{name}.txt").write_text(" ".join(words(10 * seed + i) for i in range(5)))
    return folder


@pytest.fixture
def work(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in pristine.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def auto(out: str = "merged", models: Sequence[str] = FINE_TUNES, **options: Any) -> Auto:
    return weightsmith.auto("base", models, out, **{"progress": False, **options})


def with_head(name: str, out: str, change: float | None = None) -> None:
    """A copy that ties its head to the embedding; it stores none, or one with the embedding's numbers times a factor."""
    folder = Path(shutil.copytree(Path(name).resolve(), out))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if change is not None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * change
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def rows_of(path: str) -> list[str]:
    return [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]


TEXTS = {name: f"{name}.txt" for name in FINE_TUNES}


@pytest.mark.long
def test_without_texts_the_fine_tunes_write_and_the_recipe_repeats_the_merge(work: Path) -> None:
    outcome = auto()
    assert not outcome.with_texts
    assert [candidate.name for candidate in outcome.candidates] == [
        "mean",
        "regmean, prior tsv_m",
        "tsv_m",
        "regmean, prior sum",
        "sum",
    ]
    assert outcome.choice.name in {candidate.name for candidate in outcome.candidates}
    weightsmith.merge("merged/recipe.yml", "again", progress=False)
    assert Path("merged/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()
    kept = {path.name for path in Path("merged.auto").iterdir()}
    assert kept == {"texts", "held-back", "scores.jsonl", "index.html"}
    assert "statistics" not in kept
    assert outcome.candidates[0].name == "mean"
    assert outcome.candidates[0].nats_change is None
    json.dumps(outcome.to_json(), allow_nan=False)
    assert "No text was given" in outcome.reading[1]


@pytest.mark.slow
def test_the_page_is_there_when_the_output_is(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def stop(path: Any, **options: Any) -> None:
        if str(path) == str(Path("merged.auto/statistics")):  # what follows the merge
            raise KeyboardInterrupt
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            auto(text=TEXTS, budget=1)
    assert Path("merged/weightsmith.json").exists()
    assert "the mean" in Path("merged.auto/index.html").read_text()


@pytest.mark.long
def test_heads_that_are_copies_of_the_embedding_change_no_score(work: Path) -> None:
    with_head("base", "my-base")
    changes = []
    for stored in ((), ("fr",), FINE_TUNES):
        for name in FINE_TUNES:
            shutil.rmtree(f"my-{name}", ignore_errors=True)
            with_head(name, f"my-{name}", 1 if name in stored else None)
        texts = {f"my-{name}": file for name, file in TEXTS.items()}
        found = weightsmith.auto("my-base", ["my-fr", "my-de"], f"out{len(stored)}", text=texts, budget=1, progress=False)
        changes.append([(each.name, each.nats) for each in found.candidates])
        with weightsmith.open_checkpoint(found.out) as model:
            assert "lm_head.weight" not in model.specs
    assert changes[0] == changes[1] == changes[2]


@pytest.mark.long
def test_a_regmean_that_is_chosen_names_its_texts_and_is_merged_from_what_was_measured(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of a merge from the texts, which measures them again."""
    merged, execute = list[Plan](), module.execute

    def noted(prepared: Prepared, out: str, *args: Any, **options: Any) -> Any:
        if out == "merged":
            merged.append(prepared.plan)
        return execute(prepared, out, *args, **options)

    monkeypatch.setattr(module, "execute", noted)
    monkeypatch.setattr(module, "choose", lambda *_scored, **_how: Choice("regmean, prior tsv_m", "said the test"))
    outcome = auto()
    assert "merge_method: regmean" in outcome.recipe
    assert "file: merged.auto/texts/fr.jsonl" in outcome.recipe
    assert Path("merged/recipe.yml").read_text() == outcome.recipe
    assert [{product.op for product in plan.products} for plan in merged] == [{"stored_statistic"}]
    weightsmith.merge("merged/recipe.yml", "measured", progress=False)
    assert Path("merged/model.safetensors").read_bytes() == Path("measured/model.safetensors").read_bytes()
    stored = json.loads(json.dumps(outcome.recipe))
    for name in FINE_TUNES:
        weightsmith.statistics(name, f"merged.auto/texts/{name}.jsonl", f"{name}-stats", tokens=32, progress=False)
        stored = stored.replace(f"text:\n    file: merged.auto/texts/{name}.jsonl\n    tokens: 32", f"text: {name}-stats")
    assert stored.count("-stats") == 2
    weightsmith.merge(stored, "again", progress=False)
    assert Path("merged/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()


@pytest.mark.long
def test_with_texts_every_fourth_row_is_held_back_and_strengths_of_regmean_are_tried(work: Path) -> None:
    outcome = auto(text=TEXTS)
    names = [candidate.name for candidate in outcome.candidates]
    assert "regmean, prior tsv_m, times 0.6" in names
    assert "regmean, prior tsv_m, times 1.4" in names
    measured, held = (rows_of(f"merged.auto/{part}/fr.jsonl") for part in ("texts", "held-back"))
    assert len(measured) == 36
    assert len(held) == 12
    whole = Path("fr.txt").read_text()
    assert all(row in whole for row in (*measured, *held))
    assert not set(measured) & set(held)


@pytest.mark.long
def test_the_candidate_that_is_usually_best_comes_first_and_a_limit_leaves_the_others(work: Path) -> None:
    one = auto(budget=1)
    assert [candidate.name for candidate in one.candidates] == ["mean", "regmean, prior tsv_m"]
    assert one.stopped
    assert one.reading[-1] == "--budget or --time ended the search before all candidates were scored."
    in_time = auto("in-time", time="0.001s")
    assert in_time.candidates == one.candidates
    larger = auto("more", budget=4)
    assert larger.candidates[:2] == one.candidates
    assert not larger.stopped


@pytest.mark.long
def test_a_model_that_changes_during_the_search_is_not_merged(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that were computed before are of the old file, and what else is read is of the new."""
    for name in FINE_TUNES:
        shutil.copytree(Path(name).resolve(), f"my-{name}")

    def retrained(*_scored: Any, **_how: Any) -> Choice:
        noisy_copy(Path("base").resolve(), work / "new", 9)
        Path("new/model.safetensors").rename("my-fr/model.safetensors")
        return Choice("tsv_m", "said the test")

    monkeypatch.setattr(module, "choose", retrained)
    with pytest.raises(CheckpointError, match=r"my-fr/model\.safetensors"):
        weightsmith.auto("base", ["my-fr", "my-de"], "merged", progress=False)
    assert not Path("merged").exists()


@pytest.mark.long
def test_stages_come_in_order(work: Path) -> None:
    stages = list[int]()

    class Told(Silent):
        def say(self, text: str) -> None:
            if match := re.match(r"\w+ (\d)/5:", text):
                stages.append(int(match[1]))

    auto(progress=Told())
    assert stages == sorted(stages)
    assert set(stages) == {1, 2, 3, 4, 5}


def test_the_plan_counts_and_writes_nothing(work: Path, cli: Cli) -> None:
    before = sorted(path.name for path in work.iterdir())
    command = ("auto", "base", *FINE_TUNES, "merged", "--plan", "--json", "--threads", "1")
    plan = json.loads(cli(*command).out)
    assert plan["candidates"] == 4
    assert plan["threads"] == 1
    assert [stage["name"] for stage in plan["stages"]] == ["text", "references", "strengths", "statistics", "candidates"]
    assert plan["stages"][0]["what"] == "2,048 tokens are written"
    assert sum(stage["processor_seconds"] for stage in plan["stages"]) == pytest.approx(plan["processor_seconds"])
    texts = [part for name in FINE_TUNES for part in ("--text", f"{name}={name}.txt")]
    printed = json.loads(cli(*command, *texts, "--budget", "2").out)
    assert printed["candidates"] == 2
    in_python = weightsmith.plan_auto(
        "base", FINE_TUNES, "merged", text={n: f"{n}.txt" for n in FINE_TUNES}, budget=2, threads=1
    )
    vary = dict.fromkeys(("processor_seconds", "stages", "free_bytes"), 0)
    assert {**in_python.to_json(), **vary} == {**printed, **vary}
    with pytest.raises(PlanError, match="there is no fine-tune"):
        weightsmith.plan_auto("base", FINE_TUNES, "merged", text={"other": "fr.txt"})
    assert [stage["name"] for stage in printed["stages"]] == ["references", "strengths", "statistics", "candidates"]
    shown = cli(*command[:6]).out
    assert "Nothing was written." in shown
    assert re.search(r"^memory +about [\d.]+ [MG]B$", shown, re.MULTILINE)
    assert re.search(r"^disk +at most [\d.]+ MB in addition to the output$", shown, re.MULTILINE)
    assert re.search(
        r"^disk needed +\d+ kB with the output; with less than the maximum, parts are recomputed$", shown, re.MULTILINE
    )
    assert sorted(path.name for path in work.iterdir()) == before


@pytest.mark.long
def test_the_plan_counts_the_statistics_that_a_run_writes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = weightsmith.plan_auto("base", FINE_TUNES, "merged")
    weightsmith.statistics("fr", "fr.txt", "stats", kind=("second_moments",), tokens=32, progress=False)
    statistics = sum(array.nbytes for array in load_file("stats/model.safetensors").values())
    output = sum(array.nbytes for array in load_file("base/model.safetensors").values())
    assert plan.needed_bytes == len(FINE_TUNES) * statistics + output
    assert plan.disk_bytes > plan.needed_bytes
    monkeypatch.setattr("weightsmith._reports.auto.cost.available_bytes", lambda _folder: plan.needed_bytes - 5)
    [reading, refused] = weightsmith.plan_auto("base", FINE_TUNES, "merged").report().summary
    assert (reading, refused) == ("Nothing was written.", "auto would not begin: free 5 bytes of the disk.")


@pytest.mark.long
def test_a_disk_without_room_is_refused_before_anything_is_written(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path.name for path in work.iterdir())
    needed = weightsmith.plan_auto("base", FINE_TUNES, "merged").needed_bytes
    for place in ("_reports.auto.cost", "_outputs.disk"):
        monkeypatch.setattr(f"weightsmith.{place}.available_bytes", lambda _folder: needed - 1)
    with pytest.raises(NoSpace, match="no space for the output") as error:
        auto()
    assert f"needed     {needed:,} bytes" in str(error.value)
    assert "Nothing was written" in str(error.value)
    assert sorted(path.name for path in work.iterdir()) == before


@pytest.mark.long
def test_no_matrix_is_computed_twice_for_strengths_priors_and_the_merge(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tsv_m once; RegMean once with each prior, for all factors and for the file that is written; Σ δG once for both priors."""
    solved, weighed, decomposed = Counter[str](), Counter[str](), Counter[int]()
    regmean, tsv_m = (sys.modules[f"weightsmith._methods.{name}"] for name in ("regmean", "tsv_m"))
    solve, factors = regmean.solve, tsv_m.factors

    def count_solve(*arguments: Any) -> Any:
        *others, where, recall = arguments
        solved[where] += 1

        def count_weighed(compute: Any) -> Any:
            def counted() -> Any:
                weighed[where] += 1
                return compute()

            return recall(counted)

        return solve(*others, where, count_weighed)

    def count_factors(*arguments: Any) -> Any:
        decomposed[0] += 1
        return factors(*arguments)

    monkeypatch.setattr(regmean, "solve", count_solve)
    monkeypatch.setattr(tsv_m, "factors", count_factors)
    monkeypatch.setattr(module, "choose", lambda *_scored, **_how: Choice("regmean, prior tsv_m, times 1.4", "said the test"))
    auto(text=TEXTS)
    assert set(solved.values()) == {2}
    assert set(weighed.values()) == {1}
    assert decomposed[0] == len(solved)


@pytest.mark.long
def test_the_scores_are_those_of_evaluate(work: Path) -> None:
    """The mean's cross entropy on held-back rows, and its divergence from a fine-tune, by another command."""
    outcome = auto(text=TEXTS)
    weightsmith.merge(module.Models("base", FINE_TUNES).mean(), "mean", progress=False)
    nats, divergences = [], []
    for name in FINE_TUNES:
        score = weightsmith.evaluate(
            "mean", text=f"merged.auto/held-back/{name}.jsonl", reference=name, tokens=32, progress=False
        )
        nats.append(score.scores[1][0].loss.value)
        divergence = score.scores[1][0].divergence
        assert divergence is not None
        divergences.append(divergence.value)
    assert outcome.candidates[0].nats == pytest.approx(np.mean(nats), rel=1e-4)
    assert outcome.candidates[0].divergence == pytest.approx(np.mean(divergences), rel=1e-2)


@pytest.mark.matrix
@pytest.mark.slow
def test_one_and_two_threads_choose_and_write_the_same(work: Path) -> None:
    one, two = auto("one", threads=1), auto("two", threads=2)
    assert one.candidates == two.candidates
    assert one.choice == two.choice
    for name in ("texts/fr.jsonl", "held-back/fr.jsonl", "scores.jsonl"):
        texts = [Path(f"{out}.auto/{name}").read_text().replace(f"{out}.auto", "") for out in ("one", "two")]
        if name != "scores.jsonl":  # its keys hold the paths of statistics
            assert texts[0] == texts[1]
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("stop", ["draw", "scores", "statistics"])
def test_an_interrupted_call_is_resumed_with_the_same_result(stop: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = auto("whole")
    countdown = {"draw": 1, "scores": 7, "statistics": 1}[stop]

    def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal countdown
            if countdown == 0:
                raise KeyboardInterrupt
            countdown -= 1
            return function(*args, **options)

        return call

    place, name = {"draw": (module, "write_own"), "scores": (Pool, "scores"), "statistics": (module._Search, "_statistics")}[
        stop
    ]
    with monkeypatch.context() as patched:
        patched.setattr(place, name, interrupting(getattr(place, name)))
        with pytest.raises(KeyboardInterrupt):
            auto()
    assert not Path("merged").exists()
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "losses", _counting(Evaluator.losses, scored := list[object]()))
        again = auto()
    assert again.choice == whole.choice
    assert [candidate.divergence for candidate in again.candidates] == [candidate.divergence for candidate in whole.candidates]
    assert Path("merged/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    if stop == "scores":
        monkeypatch.setattr(Evaluator, "losses", _counting(Evaluator.losses, everything := list[object]()))
        auto("third")
        assert len(scored) < len(everything)  # what was scored before was not scored again


@pytest.mark.matrix("texts")
@pytest.mark.long
@pytest.mark.parametrize("text", [None, TEXTS], ids=["own", "texts"])
def test_another_program_takes_up_neither_texts_nor_statistics_nor_scores(
    text: dict[str, str] | None, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_given: Any, **_more: Any) -> None:
        raise KeyboardInterrupt

    def computed() -> list[str]:
        calls = list[str]()
        with monkeypatch.context() as patch:
            patch.setattr(module, "choose", stop)
            for owner, name in ((module, "execute"), (Pool, "_scored"), (write_module, "_write")):
                function = getattr(owner, name)
                patch.setattr(owner, name, lambda *a, name=name, f=function, **k: (calls.append(name), f(*a, **k))[1])
            with pytest.raises(KeyboardInterrupt):
                auto(text=text, budget=1)
        return calls

    first = computed()
    assert {"execute", "_scored", "_write"} == {*first}
    assert not {"execute", "_scored"} & {*computed()}
    for part in (module, write_module):
        monkeypatch.setattr(part, "program_digest", lambda: "another")
    assert computed() == first


@pytest.mark.long
def test_a_measurement_that_another_program_began_is_discarded(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, finished = Staging.finish, list[str]()

    def stop(staging: Staging, name: str, *args: Any) -> None:
        if len(finished) == 3:
            raise KeyboardInterrupt
        finished.append(name)
        finish(staging, name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            auto(text=TEXTS, budget=1)
    assert Path("merged.auto/statistics/.fr.weightsmith-staging").exists()
    monkeypatch.setattr("weightsmith._execution.identity.program_digest", lambda: "another")
    again = auto(text=TEXTS, budget=1)
    assert again.candidates == auto("whole", text=TEXTS, budget=1).candidates


@pytest.mark.long
def test_scores_of_statistics_are_of_the_text_that_they_were_measured_on(work: Path) -> None:
    auto(text=TEXTS)
    fr = Path("fr.txt").read_text()
    held_back = rows_of("merged.auto/held-back/fr.jsonl")
    count = len(rows_of("merged.auto/texts/fr.jsonl")[0].split()) - 2
    text = fr.split(" ")
    Path("fr.txt").unlink()
    Path("fr.txt").write_text(" ".join([text[0], *sorted(text[1:count]), *text[count:]]))
    again = auto(text=TEXTS, overwrite=True)
    assert rows_of("merged.auto/held-back/fr.jsonl") == held_back
    fresh = auto("fresh", text=TEXTS)
    assert [(one.name, one.nats) for one in again.candidates] == [(one.name, one.nats) for one in fresh.candidates]


@pytest.mark.parametrize("out", ["merged", "merged/", "~/merged"])
def test_the_command_says_after_ctrl_c_what_is_kept(work: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, out: str) -> None:
    def stop(*_given: Any, **_more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "Pool", stop)
    texts = [part for name in FINE_TUNES for part in ("--text", f"{name}={name}.txt")]
    monkeypatch.setenv("HOME", str(work))
    done = cli("auto", "base", *FINE_TUNES, out, *texts)
    kept = work / "merged.auto" if out.startswith("~") else "merged.auto"
    assert f"Interrupted. Texts, statistics and scores are kept in {kept}\n" in done.err
    assert "Resume with the same command: weightsmith" in done.err


def test_a_second_search_for_the_same_output_is_refused(work: Path) -> None:
    Path("merged.auto").mkdir()
    with module._alone_in(Path("merged.auto"), "merged"):
        with pytest.raises(Busy, match="another process is searching for this output now"):
            auto(text=TEXTS)
    assert not any(Path("merged.auto").iterdir())


def test_a_folder_that_is_never_replaced_is_refused_before_the_search(work: Path) -> None:
    Path("merged").mkdir()
    Path("merged/mine.txt").write_text("mine")
    for call in (weightsmith.auto, weightsmith.plan_auto):
        with pytest.raises(OutputExists, match="will not be overwritten"):
            call("base", FINE_TUNES, "merged", overwrite=True)
    assert not Path("merged.auto").exists()


def _counting(function: Callable[..., Any], calls: list[object]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return function(*args, **options)

    return call


@pytest.mark.matrix
@pytest.mark.slow
def test_fine_tunes_far_from_their_base_get_the_mean_without_a_text(work: Path) -> None:
    for seed, name in enumerate("xy"):
        noisy_copy(Path("base").resolve(), work / name, seed, size=1.0)
    outcome = weightsmith.auto("base", ["x", "y"], "merged", progress=False)
    assert outcome.choice.name == "mean"
    assert "far from their base" in outcome.choice.why
    assert "Give a text for each fine-tune" in outcome.reading[2]
    assert len(outcome.candidates) == 1


def test_bad_input_is_refused_before_anything_is_written(work: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no fine-tune 'it'\n  -> Name one of fr, de"):
        auto(text={"it": "fr.txt"})
    with pytest.raises(PlanError, match="there is no text for de"):
        auto(text={"fr": "fr.txt"})
    with pytest.raises(PlanError, match=r"--text \(text\): the text for 'fr' must be the path of a file, not None"):
        auto(text={"fr": None})
    with pytest.raises(PlanError, match="there is no text for de"):
        auto(text=[Path("fr=fr.txt")])
    with pytest.raises(PlanError, match="there are two texts for fr"):
        auto(text={"fr": "fr.txt", "./fr": "de.txt", "de": "de.txt"}, models=("./fr", "de"))
    for k in (1, 2):
        shutil.copytree("fr", f"run-{k}")
    with pytest.raises(ParameterError, match=r"run-\*: it matches several models"):
        auto(models=("./run-*", "de"))
    with pytest.raises(ParameterError, match="2 to 10 fine-tunes can be merged, not 1"):
        weightsmith.auto("base", ["fr"], "merged", progress=False)
    with pytest.raises(ParameterError, match="a model is named twice"):
        weightsmith.auto("base", ["fr", "fr"], "merged", progress=False)
    with pytest.raises(ParameterError, match="must be a folder on this disk"):
        auto("s3://bucket/merged")
    with pytest.raises(PlanError, match="no such"):
        weightsmith.auto("base", ["fr", "none"], "merged", progress=False)
    Path("mine.auto").mkdir()
    Path("mine.auto/notes").write_text("mine")
    with pytest.raises(OutputExists, match="weightsmith auto did not make it"):
        auto("mine")
    for k, text in enumerate(('{"kind": "games", "score": 3}\n', "[1, 2]\n", "mine", "")):
        Path(f"scored{k}.auto").mkdir()
        scores = Path(f"scored{k}.auto/scores.jsonl")
        scores.write_text(text)
        with pytest.raises(OutputExists, match="weightsmith auto did not make it"):
            auto(f"scored{k}")
        assert scores.read_text() == text
    Path("merged").mkdir()
    with pytest.raises(OutputExists, match=r"(?s)the output exists.*as the last argument"):
        auto()
    assert not Path("merged.auto").exists()
    Path("taken.auto").write_text("mine")
    with pytest.raises(OutputExists, match="weightsmith auto did not make it"):
        auto("taken")
    for out in (".", "/", ".."):
        with pytest.raises(ParameterError, match="the output has no name"):
            auto(out, overwrite=True)
    with pytest.raises(StoreError, match="there is no folder new"):
        auto("new/merged")


def test_each_fine_tune_has_a_name_of_its_own() -> None:
    """Texts and statistics are files of these names."""
    names = module._names(module.Models("m", ("x/a", "y/A", "z/a-1")))
    assert len({name.casefold() for name in names}) == 3
    assert module._names(module.Models("m", ("org/fr@main", "base+./adapters/de"))) == ("fr", "de")
    assert module._names(module.Models("m", ("m+fr", "./c++/de"))) == ("fr", "de")
    assert module._names(module.Models("m", (".", "x")))[0] == Path.cwd().name


def test_a_text_is_given_by_any_name_of_its_noisy_copy() -> None:
    """Folders of training runs have names such as lr=1e-5."""
    models = module.Models("m", ("runs/lr=1e-5", "m+adapters/de"))
    names = module._names(models)
    for fr, de in (("lr=1e-5", "de"), ("runs/lr=1e-5", "adapters/de"), ("lr=1e-5", "m+adapters/de")):
        settings = module.AutoSettings(text=(f"{fr}=fr.txt", f"{de}=a=b.txt"))
        assert module._texts_of(settings, models, names) == {"lr=1e-5": "fr.txt", "de": "a=b.txt"}


@pytest.mark.long
def test_models_that_do_not_belong_together_are_refused(work: Path) -> None:
    shutil.copytree(Path("base").resolve(), "same")
    wide = {name: tensor.float() for name, tensor in load_file("base/model.safetensors").items()}
    save_file(wide, "same/model.safetensors", metadata={"format": "pt"})  # other bytes, equal numbers
    with pytest.raises(ParameterError, match="same: it predicts exactly what the base predicts"):
        weightsmith.auto("base", ["fr", "same"], "merged", progress=False)
    shutil.copytree(Path("de").resolve(), "other")
    tokenizer = json.loads(Path("other/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, [*vocabulary.values()][::-1], strict=True))
    Path("other/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises((MismatchError, PlanError), match="tokenizer"):
        weightsmith.auto("base", ["fr", "other"], "merged2", text={"fr": "fr.txt", "other": "de.txt"}, progress=False)
    assert not Path("merged").exists()
    assert not Path("merged2").exists()


@pytest.mark.long
def test_a_short_text_and_a_model_with_nan_have_one_error_each(work: Path) -> None:
    Path("short.txt").write_text("The cat has 3 cats. " * 4)
    with pytest.raises(PlanError, match=r"short\.txt: the text has \d rows of 32 tokens, and 8 are needed"):
        auto(text={"fr": "short.txt", "de": "de.txt"})
    shutil.copytree(Path("de").resolve(), "nan")
    tensors = load_file("nan/model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, "nan/model.safetensors", metadata={"format": "pt"})
    texts = {"fr": "fr.txt", "nan": "de.txt"}
    with pytest.raises(NonFinite, match=r"^nan: the prediction is NaN or infinite in row 0") as error:
        weightsmith.auto("base", ["fr", "nan"], "merged", text=texts, progress=False)
    assert str(error.value).endswith("merged.auto keeps what is finished: run the same command again to resume.")
    with pytest.raises(NonFinite, match=r"^nan: the prediction of the next token is NaN"):
        weightsmith.auto("base", ["fr", "nan"], "merged", progress=False)
    assert not Path("merged").exists()


@pytest.mark.long
def test_a_strength_whose_sum_no_float16_holds_is_left_out(work: Path) -> None:
    for name, element in (("base", 0.0), ("fr", 4e4), ("de", 4e4)):
        shutil.copytree(Path(name).resolve(), f"my-{name}")
        tensors = {key: tensor.half() for key, tensor in load_file(f"my-{name}/model.safetensors").items()}
        tensors["model.layers.0.mlp.up_proj.weight"][0, 5] = element
        save_file(tensors, f"my-{name}/model.safetensors", metadata={"format": "pt"})
    texts = {f"my-{name}": f"{name}.txt" for name in FINE_TUNES}
    result = weightsmith.auto("my-base", list(texts), "merged", text=texts, budget=3, progress=False)
    assert list(result.failed) == ["sum at 1"]
    assert "that float16 can hold" in result.failed["sum at 1"]
    assert any(line.startswith("sum at 1 was left out: output tensor model.layers.0.mlp") for line in result.reading)
    assert result.to_json()["failed"] == result.failed


def test_without_a_candidate_that_is_finite_the_mean_is_written(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Search, "__init__", lambda _search: None)
    search = module._Search()  # type: ignore[call-arg]
    search._scored = {"mean": []}
    assert search._choose() == Choice("mean", "no candidate has finite numbers")


def test_a_disk_that_fails_is_one_error(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any, **_more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("weightsmith._reports.auto.write.write_whole", full)
    with pytest.raises(StoreError, match=r"^merged\.auto: it cannot be written: No space left on device") as error:
        auto(text=TEXTS)
    assert "run the same command again to resume" in str(error.value)


@pytest.mark.long
def test_the_command_shows_the_candidates_and_the_choice(work: Path, cli: Cli) -> None:
    texts = [part for name in FINE_TUNES for part in ("--text", f"{name}={name}.txt")]
    done = cli("auto", "base", *FINE_TUNES, "merged", *texts)
    assert "merged is " in done.out
    assert "chosen " in done.out
    assert Path("merged/recipe.yml").is_file()
    page = Path("merged.auto/index.html").read_text()
    assert "regmean, prior tsv_m" in page
    data = json.loads(cli("auto", "base", *FINE_TUNES, "other", *texts, "--json").out)
    assert data["choice"]["name"] in page
    assert data["with_texts"] is True
    assert _keys(data) == RESULT_KEYS
    documented = Path(__file__).parents[3].joinpath("docs/auto.md").read_text().partition("## As JSON")[2].partition("\n## ")[0]
    plan = json.loads(cli("auto", "base", *FINE_TUNES, "third", *texts, "--plan", "--json").out)
    assert _keys(plan) == PLAN_KEYS
    for key in " ".join([*RESULT_KEYS, *PLAN_KEYS]).replace(".", " ").split():
        assert f"`{key}`" in documented, key


RESULT_KEYS = {
    *("out", "work", "recipe", "choice.name", "choice.why", "with_texts", "rows", "failed", "stopped", "reading", "seconds"),
    *(f"candidates.{key}" for key in ("name", "strength", "nats", "divergence")),
    *(f"candidates.{change}.{key}" for change in ("nats_change", "divergence_change") for key in ("value", "error")),
    *(f"fine_tunes.{key}" for key in ("name", "text", "change.value", "change.error", "distance")),
}
"""What `--json` prints. Programs read these: none may be renamed or removed."""

PLAN_KEYS = {
    *("out", "candidates", "processor_seconds", "threads", "memory_bytes", "disk_bytes", "needed_bytes", "free_bytes"),
    *("download_bytes", "stages.name", "stages.what", "stages.processor_seconds"),
}


def _keys(value: Any) -> set[str]:
    """The keys of JSON values, with those above them. Elements of a list share them, and the last one's are taken."""
    if isinstance(value, list):
        return _keys(value[-1]) if value else set()
    if not isinstance(value, dict) or not value:
        return set()
    return {".".join(filter(None, (key, below))) for key, item in value.items() for below in _keys(item) or {""}}


def test_an_adapter_in_the_home_folder_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "fr-lora").mkdir()
    (tmp_path / "fr-lora/adapter_config.json").write_text("{}")
    assert module.Models.of("base", ["~/fr-lora", "de"]).fine_tunes == ("base+~/fr-lora", "de")


@pytest.mark.long
def test_adapters_are_fine_tunes(work: Path) -> None:
    for name in FINE_TUNES:
        weightsmith.extract_lora(name, "base", f"{name}-lora", max_rank=2, progress=False)
    adapters = [f"{name}-lora" for name in FINE_TUNES]
    texts = {f"{name}-lora": f"{name}.txt" for name in FINE_TUNES}
    result = weightsmith.auto("base", adapters, "merged", text=texts, budget=1, progress=False)
    assert [tune.name for tune in result.fine_tunes] == adapters
    assert yaml.safe_load(result.recipe)["models"][0]["model"] == "base+fr-lora"
    weightsmith.merge("merged/recipe.yml", "again", progress=False)
    assert Path("again/model.safetensors").read_bytes() == Path("merged/model.safetensors").read_bytes()
