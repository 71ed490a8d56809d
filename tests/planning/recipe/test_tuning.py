"""Values to tune in a recipe: read with positions, filled with comments and layout kept, refused by other commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import plan_help
from tests.cli_help import Cli, cli
from weightsmith._base.errors import PlanError
from weightsmith._methods import all_methods
from weightsmith._planning.recipe import Recipe, WrittenRecipe, load, read_template
from weightsmith._planning.recipe.grammar import schema
from weightsmith._planning.recipe.tuning import in_yaml
from weightsmith._planning.recipe.yaml import Document, plain, read_yaml

__all__ = ["cli"]

RECIPE = """# two models
merge_method: {choice: [ties, dare_ties]}   # by random masks?
base_model: a
x-shared: &w {tune: [0, 1]}
models:
  - model: b
    parameters:
      weight: *w
      density:   # a block
        tune:
          - 0.1
          - 1
        start: 0.5  # where it begins
      # after it
  - model: {choice: [c, "d e"]}
    parameters: {weight: *w, density: [{tune: [0.2, 1e-0]}, 0.7]}
parameters:
  lambda:
    - {filter: mlp, value: {tune: [0, 2]}}
    - value: 1
"""


def values_of(documents: WrittenRecipe | Sequence[Document]) -> list[Any]:
    listed = documents.documents if isinstance(documents, WrittenRecipe) else documents
    return [plain(document.root) for document in listed if document.root is not None]


def test_values_are_found_in_the_order_of_the_text_and_aliases_are_one_value() -> None:
    template = read_template(RECIPE)
    assert [tunable.name for tunable in template.tunables] == [
        "merge_method",
        "models[0].parameters.weight",
        "models[0].parameters.density",
        "models[1].model",
        "models[1].parameters.density[0]",
        "parameters.lambda[0].value",
    ]
    assert template.start == ("ties", 0.5, 0.5, "c", 0.6, 1.0)
    assert [tunable.where for tunable in template.tunables][:2] == ["<text>:2:15", "<text>:4:11"]
    assert [tunable.parameter for tunable in template.tunables][3:] == ["model", "density", "lambda"]


def test_a_filled_recipe_keeps_comments_and_layout() -> None:
    written = read_template(RECIPE).fill(("dare_ties", 0.25, 1.0, "d e", 0.00002, 2))
    expected = RECIPE.replace("{choice: [ties, dare_ties]}", "dare_ties").replace("{tune: [0, 1]}", "0.25")
    expected = expected.replace("tune:\n          - 0.1\n          - 1\n        start: 0.5", "1.0")
    expected = expected.replace('{choice: [c, "d e"]}', '"d e"').replace("{tune: [0.2, 1e-0]}", "0.00002")
    assert written.text == expected.replace("{tune: [0, 2]}", "2")
    assert values_of(written) == values_of(read_yaml(written.text, "r.yml"))
    assert isinstance(load(written).recipe, Recipe)
    assert load(written).problems == ()


def test_a_mapping_and_recipes_of_several_documents_are_filled() -> None:
    inner = {"name": "one", "merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": {"tune": [0, 1]}}}]}
    outer = {"merge_method": "linear", "models": [{"model": "one"}], "parameters": {"weight": {"tune": [1, 3]}}}
    template = read_template([inner, outer])
    assert template.start == (0.5, 2.0)
    assert values_of(read_yaml(template.fill((0.1, 1.5)).text, "r.yml")) == values_of(template.fill((0.1, 1.5)))
    assert values_of(template.fill((0.1, 1.5)))[0]["models"][0]["parameters"] == {"weight": 0.1}
    text = "name: one\nmerge_method: linear\nmodels: [{model: a, parameters: {weight: {tune: [0, 1]}}}]\n"
    text += "---\nmerge_method: linear\nmodels: [{model: one}]  # all\nparameters: {weight: 1}\n"
    assert read_template(text).fill((0.1,)).text == text.replace("{tune: [0, 1]}", "0.1")


def test_settings_may_hold_values_to_tune() -> None:
    recipe = {"merge_method": "slerp", "base_model": "a", "models": [{"model": "b"}], "parameters": {"t": 0.5}}
    template = read_template(recipe, settings={"parameters.t": {"tune": [0, 1]}})
    assert [tunable.name for tunable in template.tunables] == ["parameters.t"]


def test_text_with_a_mark_or_an_odd_line_end_is_filled() -> None:
    for text in ("\ufeff" + RECIPE, RECIPE.replace("\n", "\r\n")):
        template = read_template(text)
        filled = template.fill(template.start)
        assert values_of(read_yaml(filled.text, "r.yml")) == values_of(filled)
        assert "# by random masks?" in filled.text


WRONG = {
    "parameters: {t: {tune: [1, 0]}}": "<text>:1:24: 'tune' takes a range from low to high, not from 1 to 0",
    "parameters: {t: {tune: [1, 1]}}": "takes a range from low to high, not from 1 to 1",
    "parameters: {t: {tune: [0, .nan]}}": "<text>:1:24: 'tune' takes two finite numbers, not [0, nan]",
    "parameters: {t: {tune: [0, 1, 2]}}": "takes two finite numbers, not [0, 1, 2]",
    "parameters: {t: {tune: [0, true]}}": "takes two finite numbers, not [0, true]",
    "parameters: {t: {tune: [0, 1], start: 2}}": "<text>:1:39: 'start' takes a number from 0 to 1, not the number 2",
    "parameters: {t: {tune: [0, 1], step: 2}}": "<text>:1:32: a value to tune takes 'tune' and 'start', not 'step'",
    "parameters: {t: {choice: [a]}}": "<text>:1:26: 'choice' takes at least two values, all different",
    "parameters: {t: {choice: [a, a]}}": "all different",
    "parameters: {t: {choice: [a, {b: c}]}}": "'choice' takes texts, finite numbers, true and false, not a mapping",
    "parameters: {t: {choice: [a, b], start: c}}": "'start' takes one of the choices, not the text 'c'",
    "dtype: {choice: [float32, bfloat16]}": "<text>:1:8: 'dtype' cannot be tuned",
    "merge_method: {tune: [0, 1]}": "<text>:1:15: 'merge_method' cannot be tuned",
    "models: [{model: a, layer_range: {tune: [0, 1]}}]": "'models[0].layer_range' cannot be tuned",
    "merge_method: linear": "the recipe has no value to tune",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_values_are_errors_at_their_line(text: str) -> None:
    with pytest.raises(PlanError) as error:
        read_template(text + "\n")
    assert len(error.value.problems) == 1
    assert WRONG[text] in str(error.value)


@pytest.mark.long
def test_there_are_at_most_a_thousand() -> None:
    weights = ", ".join(["{tune: [0, 1]}"] * 1001)
    with pytest.raises(PlanError, match="1,001 values to tune: at most 1,000"):
        read_template(f"parameters: {{t: [{weights}]}}\n")


@pytest.mark.parametrize("command", ["merge", "plan", "preview", "eval"])
def test_other_commands_refuse_the_recipe_with_one_error(
    cli: Cli, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        plan_help.model(Path(name), 2, seed=seed)
    Path("r.yml").write_text(RECIPE)
    Path("t.txt").write_text("text")
    arguments = {"merge": ["out"], "eval": ["--text", "t.txt"]}.get(command, [])
    ran = cli(command, "r.yml", *arguments)
    assert ran.code == 1
    assert "r.yml:2:15: this recipe has 6 values to tune" in ran.err
    assert "weightsmith tune" in ran.err
    assert ran.err.count("error[") == 1
    assert not Path("out").exists()


SOME = {
    "parameters: {weight: {tune: [0, 1]}}": True,
    "parameters: {weight: [{tune: [0, 1]}, 0.5]}": True,
    "parameters: {weight: [{filter: mlp, value: {tune: [0, 1], start: 0.5}}]}": True,
    "parameters: {normalize: {choice: [true, false]}}": True,
    "parameters: {normalize: {tune: [0, 1]}}": False,
    "parameters: {weight: {tune: [0]}}": False,
    "parameters: {weight: {tune: [0, 1], stop: 1}}": False,
    "merge_method: {choice: [linear, ties]}": True,
    "merge_method: {choice: [linear, tees]}": False,
    "base_model: {choice: [a, b]}": True,
    "dtype: {choice: [float32, bfloat16]}": False,
}


@pytest.mark.parametrize("line", SOME)
def test_the_schema_knows_values_to_tune(line: str) -> None:
    import jsonschema
    import yaml

    document: dict[str, Any] = {"merge_method": "linear", "models": [{"model": "a"}], **yaml.safe_load(line)}
    assert jsonschema.Draft202012Validator(schema(all_methods())).is_valid(document) == SOME[line]


def test_numbers_are_written_so_that_yaml_reads_them_as_numbers() -> None:
    import yaml

    for value in (1e-7, 0.1, 3.0, 1e22, -2.5e-9, 5, True, "no", "0.5", "a b", "./x@v1", "\u00e9: #", ""):
        read_back = yaml.safe_load(in_yaml(value))
        assert read_back == value
        assert type(read_back) is type(value)
