"""No message on the page names an option or a command of the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

import weightsmith
from weightsmith._app.cli.app import COMMANDS
from weightsmith._app.studio import check, show, tasks
from weightsmith._app.studio.check import Mend, PageError, is_for_terminals, said
from weightsmith._base.errors import Finding, OutputExists, ParameterError, PlanError, SyntaxProblem
from weightsmith._base.options import assignment, named, option_records, options_of
from weightsmith._reports.judge import Judge

SOURCE = Path(weightsmith.__file__).parent


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts that an expression may be; `7` in place of what is filled in."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in inner.values)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _fixes() -> set[str]:
    """The next steps that the source names, in `fix=` and in variables of that name."""
    texts = set[str]()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "fix":
                texts.update(_texts(node.value))
            elif isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "fix" for target in node.targets
            ):
                texts.update(_texts(node.value))
    return texts


@pytest.mark.long
def test_every_next_step_is_one_that_the_page_has() -> None:
    fixes = _fixes()
    assert sum(map(is_for_terminals, fixes)) > 50, "they were not found"
    for fix in fixes:
        assert not is_for_terminals(said(Finding("it is wrong", fix=fix)).finding.fix), fix


def test_the_page_knows_every_command() -> None:
    assert check.COMMANDS == {name for name in COMMANDS if name}


def test_options_in_messages_are_named_by_their_words() -> None:
    names = {name for record in option_records() for name in options_of(record)}
    assert len(names) > 50
    for name in names:
        reworded = said(Finding(f"{named(name)} is wrong", where=named(name), details=(named(name),), fix=assignment(name, 7)))
        for text in (reworded.finding.what, reworded.finding.where, *reworded.finding.details, reworded.finding.fix):
            assert "--" not in text, (name, text)
        assert reworded.finding.what.endswith(" is wrong")


def test_what_needs_no_change_has_none() -> None:
    for finding in (
        Finding("no such folder", "<text>:3:5", ("near: ./a",), "write models/fr, or models/de"),
        Finding("it needs torch", fix="run pip install 'weightsmith[moe]'"),
        Finding("name a folder that weightsmith wrote", "./a"),
    ):
        assert said(finding) == check.Said(finding)


@pytest.mark.parametrize(
    ("error", "shown", "button"),
    [
        (
            OutputExists("it exists", where="out", fix="choose another, or replace it with --overwrite (overwrite=True)"),
            "Choose another, or tick `replace it` beside the name.",
            'data-mend="overwrite" data-value="">Replace it<',
        ),
        (
            ParameterError("2 rows of 512", fix=f"give a longer text, or shorter rows: {assignment('tokens', 128)}"),
            "Give a longer text, or use shorter rows.",
            'data-mend="tokens" data-value="128">Use rows of 128 tokens<',
        ),
        (
            SyntaxProblem("the recipe is empty", where="<text>:1:1", fix="Write a recipe with `weightsmith init`."),
            "Choose a base and models.",
            'data-mend="models" data-value="">Choose models<',
        ),
        (PageError("nothing is chosen", Mend("models", "Choose")), "nothing is chosen", 'data-mend="models"'),
    ],
)
def test_a_control_of_the_page_mends_it(error: Exception, shown: str, button: str) -> None:
    html = show.error(error)
    assert shown in unescape(html)
    assert button in html
    assert "error[" not in html
    assert "&lt;text&gt;" not in html


@pytest.mark.long
def test_a_model_that_cannot_be_tried_says_so_in_the_pages_words() -> None:
    def load() -> Judge:
        raise ParameterError("its rows are too long", fix=f"write shorter rows: {assignment('tokens', 128)}")

    sample = tasks._sample("./models/fr", load, tasks.Asked("The"))
    assert "its rows are too long" in sample.problem
    assert "--" not in sample.problem


def test_all_problems_of_a_recipe_have_their_places() -> None:
    problems = [SyntaxProblem("it is no number", where=f"<text>:{line}:5", fix="write one") for line in (2, 4)]
    html = show.error(PlanError(problems, ("<text>", "a: 1\nb: x\nc: 3\nd: y\n")))
    assert "data-line=2" in html
    assert "data-line=4" in html
    assert "    4 | d: y" in html
    assert "Nothing was written." in html
