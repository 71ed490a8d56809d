"""What is wrong with a recipe, at its line; and that nothing is read that may not be."""

from __future__ import annotations

from pathlib import Path

import pytest

import weightsmith._app.studio.check
from tests.app.studio.models import make, recipe
from weightsmith._app.studio.check import Checked, allowed, check
from weightsmith._app.studio.places import Places


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check").resolve()


@pytest.fixture(scope="module")
def places(root: Path) -> Places:
    return make(root)


def errors(checked: Checked) -> list[tuple[int, int, str]]:
    return [(note.line, note.column, note.finding.what) for note in checked.notes if note.level == "error"]


@pytest.mark.slow
def test_a_correct_recipe_has_a_plan(root: Path, places: Places) -> None:
    checked = check(recipe(root), places)
    assert (checked.notes, errors(checked)) == ((), [])
    assert checked.plan is not None
    assert checked.plan.provenance.name == "ties"


def test_every_problem_has_its_line_and_column(root: Path, places: Places) -> None:
    text = recipe(root).replace("density: 0.5}", "densty: 0.5}", 1).replace("weight: 1.0", "weight: one")
    checked = check(text, places)
    assert checked.plan is None
    assert [(line, column) for line, column, _ in errors(checked)] == [(5, 26), (5, 31), (7, 26)]
    assert "did you mean 'density'" in str(errors(checked))
    assert checked.notes[0].excerpt[0] == "    5 |     parameters: {weight: one, densty: 0.5}"


def test_warnings_do_not_prevent_a_plan(root: Path, places: Places) -> None:
    checked = check(recipe(root, "parameters: {int8_mask: true}"), places)
    assert checked.plan is not None
    assert [note.level for note in checked.notes] == ["warning"] * len(checked.notes)


def test_a_model_that_was_not_chosen_yet(root: Path, places: Places) -> None:
    checked = check(recipe(root).replace(f"{root}/models/fr", "MODEL"), places)
    assert [(note.level, note.line, note.finding.what) for note in checked.notes] == [
        ("open", 4, "no model is chosen here yet")
    ]
    assert (checked.errors, checked.reason) == (0, "Choose 1 more model.")
    text = recipe(root).replace(f"{root}/models/fr", "MODEL").replace(f"{root}/models/de", "MODEL")
    assert check(text.replace(f"{root}/models/base", "BASE"), places).reason == "Choose a base and 2 more models."
    assert check(recipe(root).replace("ties", "tise"), places).reason == "The recipe has 1 problem."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("merge_method: linear\nmodels:\n- model: {secret}\n  parameters: {weight: 1}\n", 3),
        ("merge_method: linear\nmodels:\n- model: {base}+{secret}\n  parameters: {weight: 1}\n", 3),
        ("merge_method: linear\nmodels:\n- model: {model: {path: {secret}}}\n  parameters: {weight: 1}\n", 3),
        ("merge_method: passthrough\nslices:\n- sources: [{model: {secret}, layer_range: [0, 1]}]\n", 3),
        ("merge_method: linear\nmodels: [{model: {base}, parameters: {weight: 1}}]\ntokenizer_source: {secret}\n", 3),
        ("merge_method: linear\nmodels: [{model: {base}, parameters: {weight: 1}}]\nchat_template: {secret}/config.json\n", 3),
        ("merge_method: regmean\nbase_model: {base}\nmodels: [{model: {base}}]\ntext: {secret}/text.txt\n", 4),
        ("merge_method: regmean\nbase_model: {base}\nmodels: [{model: {base}}]\ntext: {file: ../secret/text.txt}\n", 4),
        ("merge_method: fisher\nbase_model: {base}\nmodels: [{model: {base}, text: {secret}/text.txt}]\n", 3),
        ("merge_method: linear\nmodels: [{model: {base}, parameters: {weight: 1}}]\nchat_template: ../secret/config.json\n", 3),
        ("merge_method: {secret}/evil.py:run\nmodels: [{model: {base}}]\n", 1),
        ("name: a\nmerge_method: linear\nmodels: [{model: {secret}, parameters: {weight: 1}}]\n---\n"
         "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n", 3),
        ("name: a\nmerge_method: linear\nmodels: [{model: {base}, parameters: {weight: 1}}]\nchat_template: /etc/hosts\n---\n"
         "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n", 4),
        ("merge_method: linear\nmodels: [{model: {secret}, parameters: {weight: 1}}]\n---\n[\n", 2),
        ("name: a\nmerge_method: linear\nmodels: [{model: {base}, parameters: {weight: 1}}]\n---\n"
         "merge_method: linear\nmodels: [{model: a+{secret}, parameters: {weight: 1}}]\n", 6),
        ("merge_method: linear\nmodels: [{model: s3://bucket/x, parameters: {weight: 1}}, {model: {secret}}]\n", 2),
        ("merge_method: linear\nmodels: [{model: '{secret}/../sec*', parameters: {weight: 1}}]\n", 2),
        ("merge_method: linear\ntokenizer:\n  source: base\n  tokens: {a: {source: {secret}}}\nbase_model: {base}\n"
         "models: [{model: {base}, parameters: {weight: 1}}]\n", 4),
    ],
)  # fmt: skip
def test_nothing_outside_is_read(root: Path, places: Places, monkeypatch: pytest.MonkeyPatch, text: str, line: int) -> None:
    def read(*args: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr(weightsmith, "plan", read)
    text = text.replace("{secret}", str(root / "secret")).replace("{base}", str(root / "models" / "base"))
    checked = check(text, places)
    refused = ("outside the folders", "runs no code")
    assert [note.line for note in checked.notes if any(words in note.finding.what for words in refused)] == [line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["/etc/passwd", "./recipe.yml", "", "\0", "a: " + "[" * 5000, "&a [*a]", "x" * 3_000_000, "- " * 9000]
)
def test_a_text_is_never_a_path_and_never_too_large(places: Places, text: str) -> None:
    checked = check(text, places)
    assert checked.plan is None
    assert errors(checked)
    assert "root:" not in str(checked)


def test_mixtures_are_for_the_command_line(root: Path, places: Places) -> None:
    text = f"base_model: {root}/models/base\nexperts:\n- source_model: {root}/models/fr\n  prompts_file: /etc/passwd\n"
    assert "this is a recipe of `weightsmith moe`" in errors(check(text, places))[0][2]


def test_what_is_allowed_ends_with_a_newline(root: Path, places: Places) -> None:
    assert allowed(recipe(root).rstrip(), places) == recipe(root)
