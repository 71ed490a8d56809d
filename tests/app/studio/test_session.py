"""What can be done on the page, with what browsers send; and that nothing they send becomes HTML."""

from __future__ import annotations

import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.app.studio.models import make, recipe
from tests.output_help import tree
from weightsmith._app.studio import compare, draft, show
from weightsmith._app.studio.session import Session
from weightsmith._methods import all_methods
from weightsmith._reports.look.nonfinite import NonFinite
from weightsmith._reports.look.preview import GroupPreview, Kept, Preview

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\"'${alert(1)}{{constructor}}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session").resolve()


@pytest.fixture(scope="module")
def session(root: Path) -> Session:
    return Session(make(root))


class Tags(HTMLParser):
    """The elements of a text, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.attributes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes += [name for name, _ in attrs]


def harmless(text: str) -> bool:
    tags = Tags(text)
    return "img" not in tags.found and "script" not in tags.found and not any(name.startswith("on") for name in tags.attributes)


@pytest.mark.slow
def test_from_a_goal_to_another_method(root: Path, session: Session) -> None:
    base, fr, de, py = (f"{root}/models/{name}" for name in ("base", "fr", "de", "adapters/py"))
    text = session.begin("combine", None, [])
    text = session.rebuild(text, "combine", "ties", base, [])
    text = session.rebuild(text, "combine", "ties", base, [fr, py])
    assert text == draft.begin("combine", base, [fr, f"{base}+{py}"])  # with the goal's comments
    assert "The recipe is correct" in session.check(text)
    text = session.edit(text, {"values": [[["models", 0, "parameters", "weight"], 0.25]]})
    text = session.rebuild(text, "combine", "ties", base, [fr, f"{base}+{py}", de])
    assert draft.read(text).models == (fr, f"{base}+{py}", de)
    assert "weight: 0.25" in text
    assert session.rebuild("merge_method: [", "combine", "ties", base, [fr]) == "merge_method: ["


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"values": None},
        {"values": 3},
        {"values": [3]},
        {"values": [[]]},
        {"values": [[["models"], 1, 2]]},
        {"values": [[[{}], 1]]},
        {"values": [["models", 1]]},
        {"values": [[["merge_method"], "x.py:f"]]},
        {"values": [[["models", 0, "parameters", "weight"], {"a": 1}]]},
    ],
)
def test_events_that_no_slider_sends_change_nothing(root: Path, session: Session, event: dict[str, Any]) -> None:
    assert session.edit(recipe(root), event) == recipe(root)


@pytest.mark.slow
def test_a_preview_and_its_heat_maps(root: Path, session: Session) -> None:
    text = session.preview(recipe(root))
    assert text.count("<svg") == 4
    assert "survives" in text
    assert "when the recipe is correct" in session.preview(recipe(root).replace("ties", "tise"))
    assert "when the recipe is correct" in session.preview(f"merge_method: linear\nmodels: [{{model: {root}/secret}}]\n")


@pytest.mark.slow
def test_looking_at_one_two_and_more_models(root: Path, session: Session) -> None:
    base, fr, de = (f"{root}/models/{name}" for name in ("base", "fr", "de"))
    assert "Largest element" in session.look(None, [base])
    assert "A change of low rank" in session.look(base, [fr])
    assert "Task vectors of 2 models" in session.look(base, [fr, de])
    assert "outside the folders" in session.look(base, [f"{root}/secret"])
    assert "Choose a base" in session.look(None, [])
    facts = session.facts([base, f"{root}/models/adapters/py", f"{root}/secret", base, None])
    assert facts.count("<li") == 3
    assert "4 layers" in facts
    assert "outside the folders" in facts


@pytest.mark.slow
def test_a_merge_with_its_report_is_a_model_that_can_be_chosen(root: Path, session: Session) -> None:
    assert session.start(recipe(root), "../evil", False, False).startswith('<div class="ws-problem">')
    assert session.start(recipe(root), "merged", False, False) == ""
    *_, (status, report) = session.watch()
    assert "Done" in status
    assert report.startswith("<!doctype html>")
    assert 'sandbox="allow-scripts allow-downloads"' in show.frame(report)
    (made,) = session.made()
    assert made in [ref for _, ref in session.models()]
    assert not session.resumes("merged")
    assert not session.resumes("../../x")
    assert session.start(recipe(root), "merged", False, False) == ""
    *_, (status, report) = session.watch()
    assert "output-exists" in status
    assert report == ""


def test_a_result_that_was_not_made_here_is_never_replaced(root: Path, session: Session) -> None:
    base = session.places.out / "base"
    shutil.copytree(root / "models" / "base", base)
    before = tree(base)
    assert session.start(recipe(root), "base", True, True) == ""
    *_, (status, _) = session.watch()
    assert "weightsmith did not make it" in status
    assert tree(base) == before


def test_a_studio_that_others_reach_replaces_and_discards_nothing(root: Path, session: Session) -> None:
    reached = Session(replace(session.places, alone=False))
    for overwrite, again in ((True, False), (False, True)):
        assert "replaces no result, and discards no unfinished work" in reached.start(recipe(root), "other", overwrite, again)
    assert reached.work.status.state == "idle"


@pytest.mark.slow
def test_what_may_not_be_read_is_not_merged_and_not_compared(root: Path, session: Session) -> None:
    text = recipe(root).replace("models/fr", "secret")
    assert "outside the folders" in session.start(text, "no", False, False)
    assert not (root / "out" / "no").exists()
    if compare.available():
        *_, table = session.compare([f"{root}/secret"], "a", "", 8)
        assert "outside the folders" in table
        *_, table = session.compare(["org/name"] * 99, "a", "", 8)
        assert "too much to compare" in table


def test_hostile_names_stay_text(root: Path, session: Session) -> None:
    text = f"merge_method: linear\nmodels:\n- model: {HOSTILE!r}\n- modle: '{HOSTILE[:20]}'\n"
    kept = Kept(1.0, 0.5, 0.1, 0.1, 0.1, 0.5)
    group = GroupPreview(HOSTILE, 1, 10, 1, 1.0, 1.0, (kept,), (NonFinite(),) * 3)
    plan: Any = type("P", (), {"recipe": HOSTILE})()
    found = Preview(HOSTILE, HOSTILE, (HOSTILE,), 1, 10, (group,), (group,), group, (), (), (), plan)
    shown = [
        session.check(text),
        session.facts([HOSTILE]),
        session.look(HOSTILE, [HOSTILE]),
        session.preview(text),
        session.start(text, HOSTILE, False, False),
        session.start(recipe(root), HOSTILE, False, False),
        show.preview(found),
        show.samples([compare.Sample(HOSTILE, HOSTILE, 2.0), compare.Sample(HOSTILE, problem=HOSTILE)], HOSTILE, HOSTILE),
        show.frame(f"<p>{HOSTILE}</p>"),
        *(show.about(method) for method in all_methods()),
    ]
    assert all(map(harmless, shown))
    assert not harmless(f"<p>{HOSTILE}</p>")
