"""What can be done on the page, with what browsers send; and that nothing they send becomes HTML."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.app.studio.models import make, recipe
from tests.cli_help import run_process
from tests.output_help import tree
from weightsmith import open_checkpoint, preview
from weightsmith._app.studio import show
from weightsmith._app.studio.check import PageError
from weightsmith._app.studio.kept import KeptRuns, StudioRun
from weightsmith._app.studio.places import Places
from weightsmith._app.studio.session import Session, listed_methods
from weightsmith._app.studio.tasks import MAX_SWEEP, Asked, available, tried
from weightsmith._base.errors import Busy, CannotResume, OutputExists, ParameterError, PlanError, Unsupported
from weightsmith._base.report.blocks import written
from weightsmith._files.remote.ahead import TransferEstimate
from weightsmith._methods import NAMES, all_methods
from weightsmith._methods.method import FAMILIES
from weightsmith._plans.summary import Memory, OpeningEstimate, Summary, UploadEstimate
from weightsmith._reports.look.preview import GroupPreview, Preview
from weightsmith._reports.look.preview import Kept as Survives
from weightsmith._reports.look.surveys import NonFiniteCounts

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\"'${alert(1)}{{constructor}}"
SECONDS = 300.0  # a busy machine that imports torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("session").resolve()
    make(root)
    return root


@pytest.fixture
def session(root: Path, tmp_path: Path) -> Iterator[Session]:
    opened_session = Session(Places.of([root], tmp_path / "out", hub=False))
    yield opened_session
    opened_session.close()


def until(what: Callable[[], Any]) -> Any:
    """What a function finds, as soon as it finds something."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def write(session: Session, text: str) -> int:
    """Make a text the recipe; its version."""
    answer = session.edit("test", session.kept.taken.get("test", 0) + 1, [{"kind": "text", "base": session.text, "text": text}])
    return int(answer["version"])


def followed(session: Session, name: str, version: int) -> Mapping[str, Any]:
    """A value of the board, of this version of the recipe."""

    def ready() -> Any:
        value = session.board.get(name) or {}
        return value if value.get("version") == version and value.get("busy") in (None, 0) else None

    state: Mapping[str, Any] = until(ready)
    return state


def finished(session: Session) -> Mapping[str, Any]:
    session.tasks.wait(SECONDS)
    task: Mapping[str, Any] = session.board.get("task")
    assert not task["running"]
    return task


class Tags(HTMLParser):
    """The elements of a text, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


def harmless(text: str) -> bool:
    tags = Tags(text)
    return "img" not in tags.names and "script" not in tags.names and not any(name.startswith("on") for name in tags.attributes)


# ---- the recipe


@pytest.mark.long
def test_edits_are_applied_in_order_and_once(root: Path, session: Session) -> None:
    write(session, recipe(root))
    fr = f"{root}/models/fr"
    change = {"kind": "set", "path": ["models", 0, "parameters", "weight"], "model": fr}
    first = session.edit("a", 1, [change | {"value": 0.2}, change | {"value": 0.3}])
    assert "weight: 0.3" in first["text"]
    later = session.edit("b", 1, [change | {"value": 0.4}])
    assert later["version"] == first["version"] + 1
    assert session.edit("a", 1, [change | {"value": 0.3}]) == later  # sent again, after a lost answer
    assert "weight: 0.4" in session.text
    assert session.edit("a", 2, [{"kind": "undo"}])["text"] == first["text"]
    assert session.edit("a", 3, [{"kind": "redo"}])["text"] == later["text"]
    with pytest.raises(ParameterError, match="more than 100,000 characters"):
        session.edit("a", 4, [{"kind": "text", "base": session.text, "text": "x" * 300_000}])
    assert session.text == later["text"]


@pytest.mark.long
def test_a_restart_returns_to_the_recipe_and_the_runs(root: Path, session: Session) -> None:
    version = write(session, recipe(root))
    followed(session, "preview", version)
    until(lambda: session.kept.runs)
    session.close()
    again = Session(session.places)
    try:
        assert again.board.get("document")["text"] == recipe(root)
        assert again.board.get("document")["version"] == version
        sent_again = [{"kind": "text", "base": "", "text": "# sent twice\n"}]
        assert again.edit("test", again.kept.taken["test"], sent_again)["text"] == recipe(root), (
            "its answer was lost, not the edit"
        )
        assert [run["kind"] for run in again.board.get("runs")][:1] == ["preview"]
        followed(again, "preview", version)
    finally:
        again.close()


@pytest.mark.long
def test_a_disk_that_is_full_loses_no_edit(root: Path, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    write(session, recipe(root))
    with monkeypatch.context() as full:

        def write_text(*args: object, **options: object) -> int:
            raise OSError(28, "No space left on device")

        full.setattr(Path, "write_text", write_text)
        version = write(session, recipe(root) + "# two\n")
        assert "the disk is full" in session.board.get("unsaved")
        assert session.board.get("document")["text"].endswith("# two\n")
        assert "away from its base" in followed(session, "preview", version)["html"], (
            "a run that is not stored hides no preview"
        )
        assert "the disk is full" in session.board.get("unsaved"), "it is said as long as it is so"
    until(lambda: session.board.get("unsaved") == "")
    session.close()
    assert KeptRuns(session.places.out).text.endswith("# two\n"), "without another edit"


def test_a_folder_that_is_another_studios_refuses_the_edit(root: Path, session: Session) -> None:
    other = Session(session.places)
    try:
        write(other, "# theirs\n")
        with pytest.raises(Busy):
            write(session, "# mine\n")
        assert session.text == session.board.get("document")["text"] == ""
    finally:
        other.close()


def test_a_change_that_fails_loses_no_other_of_its_request(root: Path, session: Session) -> None:
    text = recipe(root).replace("ties", "tiess")
    changes = [{"kind": "text", "base": "", "text": text}, {"kind": "base", "name": f"{root}/models/de"}]
    answer = session.edit("a", 1, [*changes, {"kind": "add", "name": f"{root}/secret"}, {"kind": "undo"}])
    assert answer["text"] == text.replace(f"base_model: {root}/models/base", f"base_model: {root}/models/de")
    with pytest.raises(ParameterError):
        session.edit("a", 2, [{"kind": "undo"}, {"kind": "text", "base": "", "text": "x" * 300_000}])
    assert session.edit("a", 3, [{"kind": "undo"}])["text"] == text, "what was refused leaves undo as it was"


def test_an_adapter_is_added_on_its_base(root: Path, session: Session) -> None:
    base, py = f"{root}/models/base", f"{root}/models/adapters/py"
    session.edit("a", 1, [{"kind": "goal", "name": "add"}, {"kind": "base", "name": base}, {"kind": "add", "name": py}])
    draft = session.board.get("document")["draft"]
    assert (draft["base"], draft["models"]) == (base, (f"{base}+{py}",))


# ---- what follows from it


@pytest.mark.long
def test_problems_have_their_lines_and_a_correct_recipe_its_costs(root: Path, session: Session) -> None:
    notes = followed(session, "notes", write(session, recipe(root).replace("density: 0.5", "densty: 0.5", 1)))
    assert notes["marks"] == [[5, "error"]]
    assert "did you mean" in notes["html"]
    notes = followed(session, "notes", write(session, recipe(root)))
    assert notes["good"]
    assert [name for name, _ in notes["costs"]] == ["size", "memory"]


@pytest.mark.long
def test_a_preview_has_the_numbers_of_the_command(root: Path, session: Session) -> None:
    shown = followed(session, "preview", write(session, recipe(root)))
    previewed = preview(recipe(root), progress=False)
    for kept, name in zip(previewed.total.models, previewed.names, strict=True):
        assert kept is not None
        assert f"<b>{kept.survives:.1%}</b> survives" in shown["html"]
        assert shown["survives"][name] == [
            round(layer.models[previewed.names.index(name)].survives, 4)
            for layer in previewed.layers
            if layer.name[-1].isdigit()
        ]  # type: ignore[union-attr]
    assert len(shown["charts"]) == 4
    for wrong in (recipe(root).replace("ties", "tise"), f"merge_method: linear\nmodels: [{{model: {root}/none}}]\n"):
        assert "when the recipe is correct" in followed(session, "preview", write(session, wrong))["html"]


@pytest.mark.long
def test_the_distance_is_torchs(root: Path, session: Session) -> None:
    """A preview of all elements, and the merge that is written, against norms that torch computes."""
    import torch

    text = recipe(root)
    session.start(write(session, text), "measured")
    assert session.work.wait(SECONDS).state == "done"
    measured, base = (open_checkpoint(path) for path in (session.places.out / "measured", root / "models" / "base"))
    with measured, base:
        pairs = [(np.asarray(measured[name], np.float64), np.asarray(base[name], np.float64)) for name in base]
    moved = sum(float(torch.tensor(a - b).square().sum()) for a, b in pairs) ** 0.5
    norm = sum(float(torch.tensor(b).square().sum()) for _, b in pairs) ** 0.5
    run = until(lambda: [run for run in session.kept.runs if run.kind == "merge"])[0]
    assert run.numbers["distance from the base"] == f"{100 * moved / norm:.2f}%"
    share = preview(text, full=True, progress=False).total.share
    merged_only = {step.out.name for step in session.work.status.merged.plan.steps if step.op != "copy"}  # type: ignore[union-attr]
    assert merged_only
    assert share == pytest.approx(moved / norm, rel=2e-2)


def test_models_are_listed_with_what_they_are(root: Path, session: Session) -> None:
    cards = until(
        lambda: (
            (cards := session.board.get("models") or [])
            and all("kind" in card or "problem" in card for card in cards)
            and cards
        )
    )
    by_name = {card["ref"]: card for card in cards}
    base = by_name[f"{root}/models/base"]
    assert (base["layers"], base["dtype"], base["adapter"]) == (4, "BF16", False)
    assert by_name[f"{root}/models/adapters/py"]["adapter"]


def test_every_method_is_in_a_family() -> None:
    listed = listed_methods()
    assert {method["name"] for method in listed} == set(NAMES)
    assert {method["family"] for method in listed} == set(FAMILIES)
    known = {method["name"]: method["family"] for method in listed}
    assert known["consensus_ta"] == "sparse"  # it masks, whatever its title says
    assert (known["linear"], known["slerp"], known["ties"], known["tsv_m"], known["regmean"]) == (
        "average",
        "sphere",
        "sparse",
        "spectral",
        "data",
    )


# ---- merging


def test_a_merge_is_a_run_with_a_report_and_a_model_that_can_be_chosen(root: Path, session: Session) -> None:
    version = write(session, recipe(root))
    with pytest.raises(ParameterError, match="cannot be the name"):
        session.start(version, "../evil")
    with pytest.raises(CannotResume, match="changed meanwhile"):
        session.start(version - 1, "merged")
    session.start(version, "merged")
    assert session.work.wait(SECONDS).state == "done"
    run = until(lambda: [run for run in session.kept.runs if run.kind == "merge"])[0]
    assert until(lambda: session.kept.report(run.id)).startswith("<!doctype html>")
    assert run.recipe == recipe(root)
    until(lambda: run.model in [card["ref"] for card in session.board.get("models")])
    assert session.about_name("merged") == {"valid": True, "exists": True, "unfinished": False}
    assert not session.about_name("../../x")["valid"]
    assert [name for name, _ in followed(session, "notes", write(session, recipe(root) + "# again\n"))["costs"]] == [
        "size",
        "memory",
        "time",
    ]
    session.start(session.kept.version, "merged")
    session.work.wait(SECONDS)
    failed = until(lambda: (shown := session.board.get("work"))["state"] == "failed" and shown)["problem"]
    assert 'data-mend="overwrite"' in failed
    assert "--overwrite" not in failed


def test_a_result_that_was_not_made_here_is_never_replaced(root: Path, session: Session) -> None:
    base = session.places.out / "base"
    shutil.copytree(root / "models" / "base", base)
    before = tree(base)
    session.start(write(session, recipe(root)), "base", overwrite=True, again=True)
    status = session.work.wait(SECONDS)
    assert "weightsmith did not make it" in str(status.problem)
    assert tree(base) == before


def test_a_studio_that_others_reach_replaces_and_discards_nothing(root: Path, session: Session) -> None:
    session.places = replace(session.places, alone=False)
    version = write(session, recipe(root))
    for options in ({"overwrite": True}, {"again": True}):
        with pytest.raises(ParameterError, match="replaces no result, and discards no unfinished work"):
            session.start(version, "other", **options)
    assert session.work.status.state == "idle"


# ---- tasks


def test_what_may_not_be_read_is_not_merged_tried_swept_or_looked_at(root: Path, tmp_path: Path) -> None:
    session = Session(Places.of([root / "models"], tmp_path, hub=False))
    try:
        version = write(session, recipe(root).replace("models/fr", "secret"))
        path, secret = ["models", 1, "parameters", "weight"], f"{root}/secret"
        for act in (
            lambda: session.start(version, "no"),
            lambda: session.tasks.ask(session.text, [], "The", "", 8),
            lambda: session.tasks.sweep(session.text, path, f"{root}/models/de", [0.1], "", ""),
            lambda: session.tasks.look(session.text, [secret]),
            lambda: session.card(secret),
        ):
            with pytest.raises(PlanError, match="outside the folders"):
                act()
    finally:
        session.close()


@pytest.mark.long
@pytest.mark.skipif(not available(), reason="needs torch and transformers")
def test_a_try_and_its_limits(root: Path, session: Session) -> None:
    write(session, recipe(root))
    base = f"{root}/models/base"
    with pytest.raises(ParameterError, match="nothing to try it on"):
        session.tasks.ask(session.text, [], " ", "", 8)
    with pytest.raises(Unsupported, match="too much to compare"):
        session.tasks.ask(session.text, [base] * 99, "The", "", 8)
    session.tasks.ask(session.text, [base], "The", "The three most important things", 4)
    with pytest.raises(Busy):
        session.tasks.look(session.text, [base])
    shown = finished(session)
    assert shown["html"].count("<tr>") == 3
    run = session.kept.runs[-1]
    assert (run.kind, list(run.numbers)) == ("try", ["perplexity of the merge", f"perplexity of {base}"])
    merge = tried(recipe(root), session.places, Asked("", "The three most important things"))
    assert run.numbers["perplexity of the merge"] == f"{merge.perplexity:.4g}"


def test_a_sweep_previews_each_value(root: Path, session: Session) -> None:
    write(session, recipe(root))
    path, model = ["models", 0, "parameters", "density"], f"{root}/models/fr"
    session.tasks.sweep(session.text, path, model, [0.1, 0.9], "", "")
    shown = finished(session)
    for value in (0.1, 0.9):
        previewed = preview(recipe(root).replace("density: 0.5", f"density: {value}", 1), progress=False)
        assert f"<b>{previewed.total.models[0].survives:.1%}</b>" in shown["html"]  # type: ignore[union-attr]
    assert session.text == recipe(root)
    for wrong, values in ((["models", 0, "model"], [0.1]), (path, []), (path, [float("nan")]), (path, [0.1] * (MAX_SWEEP + 1))):
        with pytest.raises(ParameterError):
            session.tasks.sweep(session.text, wrong, model, values, "", "")


@pytest.mark.matrix
@pytest.mark.skipif(not available() or find_spec("cmaes") is None, reason="needs torch, transformers and cmaes")
def test_a_search_finds_what_the_command_finds(root: Path, session: Session) -> None:
    choice = random.Random(1)
    words = "the most important things about this program are what it reads and writes and how fast".split()
    text = "".join(" ".join(choice.choices(words, k=12)) + ".\n" for _ in range(100))
    write(session, recipe(root))
    path, model = ["models", 0, "parameters", "weight"], f"{root}/models/fr"
    for ranges, budget in (
        ([], 4),
        ([(path, model, 1.0, 0.0)], 4),
        ([(["merge_method"], model, 0.0, 1.0)], 4),
        ([(path, model, 0.0, 1.0)], 1),
    ):
        with pytest.raises(ParameterError):
            session.tasks.tune(session.text, ranges, text, budget)
    session.tasks.tune(session.text, [(path, model, 0.0, 1.5)], text, 4)
    shown = finished(session)
    assert shown["report"], shown
    run = session.kept.runs[-1]
    assert "4 trials" in shown["html"]
    folder = session.places.out / "by-command"
    folder.mkdir()
    (folder / "text.txt").write_text(text)
    (folder / "r.yml").write_text(recipe(root).replace("weight: 1.0", "weight: {tune: [0.0, 1.5]}", 1))
    ran = run_process("tune", "r.yml", "tuned.yml", "--text", "text.txt", "--budget", 4, "--json", cwd=folder)
    assert ran.code == 0, ran.err
    printed = json.loads(ran.out)
    assert (folder / "tuned.yml").read_text().endswith(run.recipe)
    page, report = session.kept.report(shown["report"]), (folder / "tuned.html").read_text()
    assert page is not None
    scored = [trial for trial in printed["trials"] if trial["losses"]]
    assert shown["html"].count("<tr><td>") == len(scored) > 0
    for trial in scored:
        [loss] = trial["losses"]
        assert 0 < loss < 2 * math.log(280), "nats per token: 280 tokens are in the vocabulary"
        assert f"<tr><td>{trial['trial']}</td><td class='ws-n'>{written(loss)}</td>" in shown["html"]
        assert f">{written(loss)}<" in page
        assert f">{written(loss)}<" in report
    assert session.text == recipe(root)
    assert not list(session.kept.folder.glob("tune-*"))
    session.tasks.tune(session.text, [(path, model, 0.0, 1.5)], text, 500)
    until(lambda: "trial" in session.board.get("task")["doing"])
    session.tasks.stop()
    assert "Stopped" in finished(session)["html"]


@pytest.mark.long
@pytest.mark.skipif(not available() or find_spec("cmaes") is None, reason="needs torch, transformers and cmaes")
def test_a_text_that_is_too_short_is_said_before_a_search(root: Path, session: Session) -> None:
    write(session, recipe(root))
    path, model = ["models", 0, "parameters", "weight"], f"{root}/models/fr"
    text = " ".join(f"word{i}" for i in range(30))
    fit = session.fit(text, 64)
    assert 0 < fit["rows"] < fit["needed"] == 4
    assert session.fit(text, fit["shorter"])["rows"] >= 4
    with pytest.raises(PageError, match=f"{fit['rows']} rows? of 64 tokens, and 4 are needed") as short:
        session.tasks.tune(session.text, [(path, model, 0.0, 1.5)], text, 4, 64)
    assert (short.value.mend.control, short.value.mend.value) == ("tokens", str(fit["shorter"]))
    with pytest.raises(PageError, match="are needed") as shortest:
        session.tasks.tune(session.text, [(path, model, 0.0, 1.5)], "word", 4)
    assert shortest.value.mend.control == "text"
    with pytest.raises(PageError, match="rows have from 2 to"):
        session.fit(text, 1)
    assert session.board.get("task") == {"running": False}, "nothing was started"
    session.tasks.tune(session.text, [(path, model, 0.0, 1.5)], text, 2, fit["shorter"])
    assert finished(session)["report"]


def test_an_empty_recipe_asks_for_models(session: Session) -> None:
    for act in (
        lambda: session.start(session.kept.version, "merged"),
        lambda: session.recipe(session.kept.version),
        lambda: session.fit("a text", None),
    ):
        with pytest.raises(PageError, match="no model is chosen yet") as empty:
            act()
        assert 'data-mend="models"' in show.error(empty.value)


# ---- an example


@pytest.mark.long
def test_the_demos_models_are_an_example(session: Session) -> None:
    session.example()
    draft = session.board.get("document")["draft"]
    demo = session.places.out / "demo"
    assert (draft["base"], set(draft["models"])) == (str(demo / "base"), {str(demo / "french"), str(demo / "german")})
    assert sorted(path.name for path in session.places.out.iterdir() if path.name != ".studio") == ["demo"]
    assert followed(session, "notes", session.kept.version)["good"]
    before = tree(demo)
    session.edit("a", 1, [{"kind": "undo"}])
    assert session.text == ""
    session.example()
    assert tree(demo) == before
    until(lambda: {f"{demo}/base", f"{demo}/french"} <= {card["ref"] for card in session.board.get("models")})


def test_another_folder_of_that_name_stays(session: Session) -> None:
    (session.places.out / "demo").mkdir(parents=True)
    (session.places.out / "demo" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExists, match="another folder of this name"):
        session.example()
    assert session.text == ""
    assert tree(session.places.out / "demo")


# ---- a studio that is killed


@pytest.mark.long
def test_what_was_interrupted_is_said_by_the_next_studio(root: Path, session: Session) -> None:
    killed = KeptRuns(session.places.out)
    killed.save(recipe(root))
    killed.began("try", "the merge")
    killed.began("merge", "mine")
    killed.close()
    again = Session(session.places)
    try:
        task, work = again.board.get("task"), again.board.get("work")
        assert (task["kind"], task["running"]) == ("try", False)
        assert "Interrupted: the merge." in task["html"]
        assert (work["state"], work["name"]) == ("interrupted", "mine")
        assert "press Merge again" in work["html"], "nothing of it is kept"
    finally:
        again.close()
    (session.places.out / "mine").mkdir()  # it was published, and the studio killed before it said so
    again = Session(session.places)
    try:
        work = again.board.get("work")
        assert work["state"] == "published"
        assert "mine</b> is merged." in work["html"]
        assert "mine/report.html" in work["html"]
    finally:
        again.close()
    (session.places.out / ".studio" / "running.json").write_text('{"merge": "../evil", "other": "x"}')
    third = Session(session.places)
    try:
        assert third.board.get("work")["state"] == "idle"
        assert third.board.get("task") == {"running": False}
    finally:
        third.close()


@pytest.mark.long
def test_looking_at_one_two_and_more_models(root: Path, session: Session) -> None:
    base, fr, de = (f"{root}/models/{name}" for name in ("base", "fr", "de"))
    for models, said in (
        ([base], "Largest element"),
        ([base, fr], "A change of low rank"),
        ([base, fr, de], "Task vectors of 2 models"),
    ):
        session.tasks.look(session.text, models)
        shown = finished(session)
        page = session.kept.report(shown["report"])
        assert page is not None
        assert said in page
    with pytest.raises(ParameterError, match="no model is chosen"):
        session.tasks.look(session.text, [])


@pytest.mark.long
def test_two_runs_side_by_side(root: Path, session: Session) -> None:
    for text in (recipe(root), recipe(root).replace("density: 0.5", "density: 0.9", 1)):
        version = write(session, text)
        followed(session, "preview", version)
        session.tasks.look(session.text, [f"{root}/models/base"])  # a row between two previews
        finished(session)
    previews = [run.id for run in session.kept.runs if run.kind == "preview"]
    html = session.compare_runs(*previews)
    assert "<del>-    parameters: {weight: 1.0, density: 0.5}</del>" in html
    assert "<ins>+    parameters: {weight: 1.0, density: 0.9}</ins>" in html
    with pytest.raises(ParameterError, match="gone"):
        session.compare_runs(99, 100)


def test_hostile_names_stay_text(root: Path, session: Session) -> None:
    text = f"merge_method: linear\nmodels:\n- model: {HOSTILE!r}\n- modle: '{HOSTILE[:20]}'\n"
    kept = Survives(1.0, 0.5, 0.1, 0.1, 0.1, 0.5)
    group = GroupPreview(HOSTILE, 1, 10, 1, 1.0, 1.0, (kept,), (NonFiniteCounts(),) * 3)
    plan: Any = type("P", (), {"recipe": HOSTILE})()
    requests: Any = {"opening": OpeningEstimate(0, 0), "upload": UploadEstimate(0, 0, 0, 0, 0)}
    summary = Summary(1, False, *(1,) * 7, memory=Memory(1, 1, 1), transfer=TransferEstimate(0, 0, 0, 0), **requests)
    previewed = Preview(HOSTILE, HOSTILE, (HOSTILE,), 1, 10, (group,), (group,), group, (), (), (), plan, summary)
    run = StudioRun(1, "try", 1.0, HOSTILE, HOSTILE, numbers={HOSTILE: HOSTILE})
    sample = show.Sample(HOSTILE, HOSTILE, 2.0)
    shown = [
        followed(session, "notes", write(session, text))["html"],
        show.preview(previewed)[0],
        show.samples([sample, show.Sample(HOSTILE, problem=HOSTILE)], HOSTILE),
        show.sweep(
            HOSTILE,
            [show.Swept(0.5, previewed, sample), show.Swept(0.6, previewed, show.Sample(HOSTILE, problem=HOSTILE))],
            HOSTILE,
        ),
        show.two_runs(run, replace(run, recipe=f"{HOSTILE}\n{HOSTILE}")),
        show.error(ParameterError(HOSTILE, where=HOSTILE, details=[HOSTILE], fix=HOSTILE)),
        show.error(ValueError(HOSTILE)),
        *(show.about(method) for method in all_methods()),
    ]
    assert all(map(harmless, shown))
    assert not harmless(f"<p>{HOSTILE}</p>")


@pytest.mark.long
def test_merges_that_nobody_sees_running_are_runs(root: Path, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that end between two looks of the thread that watches."""
    monkeypatch.setattr("weightsmith._app.studio.session._TICK_SECONDS", 3.0)
    version = write(session, recipe(root))
    time.sleep(0.5)
    session.start(version, "first")
    session.work.wait(SECONDS)
    until(lambda: [run.title for run in session.kept.runs if run.kind == "merge"] == ["first"])
    session.start(version, "second")
    session.work.wait(SECONDS)
    until(lambda: [run.title for run in session.kept.runs if run.kind == "merge"] == ["first", "second"])
