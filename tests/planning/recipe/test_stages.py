"""Several recipes in one text, and recipes inside recipes: which is the result, which are its models, and what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.cli_help import CONFIG
from tests.mini import write_checkpoint
from tests.work import steps
from weightsmith._planning.recipe import Recipe, Upcycling, load
from weightsmith._planning.recipe.grammar import MAX_RECIPE_DEPTH
from weightsmith._planning.recipe.load import MAX_RECIPES


def recipe(model: str, name: str = "") -> str:
    return f"{f'name: {name}{chr(10)}' if name else ''}merge_method: linear\nmodels: [{{model: org/a}}, {{model: {model}}}]\n"


def read(*recipes: str, **options: Any) -> Recipe:
    loaded = load("---\n".join(recipes), **options)
    assert loaded.problems == ()
    assert isinstance(loaded.recipe, Recipe)
    return loaded.recipe


def problems(*recipes: str, **options: Any) -> list[str]:
    return [str(problem) for problem in load("---\n".join(recipes), **options).problems]


def models(parsed: Recipe | None) -> list[str]:
    assert parsed is not None
    return [str(ref) for ref in parsed.references]


def test_the_result_is_the_recipe_without_a_name_wherever_it_is() -> None:
    for recipes in ([recipe("org/b", "one"), recipe("one")], [recipe("one"), recipe("org/b", "one")]):
        parsed = read(*recipes)
        assert models(parsed) == ["org/a", "one"]
        assert models(parsed.stages["one"]) == ["org/a", "org/b"]
        assert parsed.text == "---\n".join(recipes)


def test_if_all_have_names_the_last_is_the_result_and_has_the_text_of_all() -> None:
    texts = recipe("org/b", "one"), recipe("one", "two")
    parsed = read(*texts)
    assert (parsed.name, models(parsed)) == ("two", ["org/a", "one"])
    assert parsed.stages["one"] is not None
    assert parsed.stages["one"].text == texts[0]
    assert parsed.text == "---\n".join(texts)


def test_documents_without_contents_are_left_out() -> None:
    assert models(read("# a comment\n", recipe("org/b", "one"), "", recipe("one"), "")) == ["org/a", "one"]


def test_positions_of_a_list_of_mappings_begin_with_its_number() -> None:
    one = {"name": "one", "merge_method": "linear", "models": [{"model": "org/a", "paramters": {}}]}
    two = {"merge_method": "linear", "models": [{"model": "one"}], "dtyp": 1}
    positions = [problem.finding.where for problem in load([one, two]).problems]
    assert positions == ["[0].models[0].paramters", "[1].dtyp"]


def test_equal_recipes_inside_a_recipe_are_one_model() -> None:
    inner = "{merge_method: linear, models: [{model: org/b}]}"
    parsed = read(f"merge_method: ties\nbase_model: {inner}\nmodels: [{{model: {inner}}}, {{model: org/c}}]\n")
    base, same, _ = parsed.references
    assert base == same
    assert str(base) == "the merge of org/b by linear"
    assert [models(inside) for inside in parsed.stages.values()] == [["org/b"]]


def test_a_mixture_takes_merges_by_name() -> None:
    text = f"{recipe('org/b', 'one')}---\nbase_model: one\nexperts: [{{source_model: one}}, {{source_model: org/c}}]\n"
    mixture = load(text, "moe").recipe
    assert isinstance(mixture, Upcycling)
    assert models(mixture.base if isinstance(mixture.base, Recipe) else None) == ["org/a", "org/b"]
    assert [isinstance(expert.model, Recipe) for expert in mixture.experts] == [True, False]
    assert type(load(text, None).recipe) is Upcycling
    assert "this is a recipe of `weightsmith moe`" in str(load(text).problems[0])


def test_values_are_set_in_the_recipe_whose_name_the_path_begins_with() -> None:
    texts = recipe("org/b", "one"), recipe("one")
    parsed = read(*texts, settings={"one.dtype": "float16", "models[0].model": "org/c"})
    one = parsed.stages["one"]
    assert one is not None
    assert (str(one.dtype), parsed.dtype, models(parsed)) == ("F16", None, ["org/c", "one"])
    assert "dtype: float16\n" in one.text
    assert load(parsed.text).problems == ()
    assert problems(*texts, settings={"one.dtyp": 1})[0].startswith("--set one.dtyp: unknown key")


ONE, TWO = recipe("org/b", "one"), recipe("one", "two")


@pytest.mark.parametrize(
    ("recipes", "messages"),
    [
        (
            (ONE, ONE, recipe("one")),
            ["<text>:5:7: two recipes are called 'one'\n  first at <text>:1:7\n  -> Give each a name of its own."],
        ),
        (
            (recipe("org/b"), recipe("org/b")),
            [
                "<text>:4:1: a second recipe without a name\n  the first is at <text>:1:1\n"
                "  -> Give all but one a name: name: first_stage. The one without is the result."
            ],
        ),
        (
            (recipe("two", "one"), TWO, recipe("one")),
            [
                "<text>:7:34: recipes need each other's results: one -> two -> one\n"
                "  -> Name another model: each recipe can use the results of those that do not depend on it."
            ],
        ),
        (
            (recipe("one", "one"), recipe("one")),
            [
                "<text>:3:34: the recipe 'one' needs its own result\n"
                "  -> Name another model: each recipe can use the results of those that do not depend on it."
            ],
        ),
        (
            (ONE, recipe("{merge_method: linear, models: [{model: one@main}]}")),
            [
                "<text>:6:74: 'one' is a recipe of this file, and has no revisions\n"
                "  -> Write one; for a model of this name, rename the recipe."
            ],
        ),
        (
            (ONE, recipe("org/b+one")),
            [
                "<text>:6:34: the result of the recipe 'one' cannot be used as an adapter\n"
                "  -> Run that recipe alone first, and use its output folder here."
            ],
        ),
        (
            (recipe("org/b", "'a@b'"), recipe("org/b")),
            [
                "<text>:1:7: a recipe cannot be called 'a@b': '@' cannot be in the name of a model\n"
                "  -> Use letters, digits, '-', '_' and '.'."
            ],
        ),
        (
            (ONE.replace("models", "modles"), recipe("one").replace("linear", "linear\nname: [two]")),
            [
                "<text>:3:1: unknown key 'modles' at the top level (did you mean 'models'?); mergekit silently ignored it\n"
                "  -> Write 'models'.",
                "<text>:6:7: 'name' takes a text, not a list of 1",
            ],
        ),
    ],
)
def test_a_wrong_stage(recipes: tuple[str, ...], messages: list[str]) -> None:
    assert problems(*recipes) == messages


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("model: one\nprune_experts: {keep: [0]}\n", "<text>:5:8: the result of the recipe 'one' cannot be operated on"),
        (
            "base_model: org/a\nexperts: [{source_model: one+org/x}]\n",
            "<text>:6:26: no adapter can be applied to the result of the recipe 'one' in a mixture",
        ),
    ],
)
def test_a_result_that_a_mixture_cannot_use(last: str, message: str) -> None:
    (problem,) = load(f"{ONE}---\n{last}", "moe").problems
    assert str(problem) == f"{message}\n  -> Run that recipe alone first, and use its output folder here."


def test_a_recipe_that_the_result_does_not_use_is_not_run() -> None:
    (finding,) = read(ONE, TWO, recipe("one")).findings
    assert str(finding) == (
        "<text>:5:7: the recipe 'two' is not run: the result does not use it\n"
        "  -> Use its name as a model, or put it into a file of its own."
    )


def test_of_broken_yaml_nothing_is_said_about_models() -> None:
    loaded = load(f"{recipe('one')}---\nname: one\nmodels: [\n")
    assert loaded.recipe is not None
    assert loaded.models == ()
    assert len(loaded.problems) == 1


@pytest.mark.long
def test_the_number_of_recipes_and_their_depth_have_limits() -> None:
    many = [recipe("org/b", f"r{i}") for i in range(MAX_RECIPES + 1)]
    assert problems(*many) == [f"<text>:{4 * MAX_RECIPES + 1}:1: more than 500 recipes\n  -> Write them into several files."]
    deep = "org/b"
    for _ in range(MAX_RECIPE_DEPTH + 1):
        deep = f"{{merge_method: linear, models: [{{model: {deep}}}]}}"
    (message,) = problems(recipe(deep))
    assert "recipes inside recipes, more than 8 deep" in message
    assert problems(recipe(deep.replace("{merge_method: linear, models: [{model: ", "", 1).replace("}]}", "", 1))) == []


@pytest.mark.long
def test_a_chain_of_the_most_recipes_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in "ab":
        write_checkpoint(tmp_path / folder, {"model.layers.0.mlp.up_proj.weight": np.full((4, 4), 1.0, np.float32)}, CONFIG)
    models = ["./b", *(f"r{i}" for i in range(MAX_RECIPES))]
    equal = "parameters: {weight: 1}\n"
    chain = [recipe(model, f"r{i}").replace("org", ".") + equal for i, model in enumerate(models[:MAX_RECIPES])]
    chain[-1] = chain[-1].partition("\n")[2]
    assert len(weightsmith.plan("---\n".join(chain)).steps) == 1


@pytest.mark.process
@pytest.mark.slow
def test_many_recipes_that_each_use_all_before_them_are_read_in_time() -> None:
    many = 100
    recipes = [
        f"name: r{i}\nmerge_method: linear\nmodels: [{{model: org/a}}, {', '.join(f'{{model: r{k}}}' for k in range(i))}]\n"
        for i in range(1, many)
    ]
    assert len(read(*recipes).stages) == many - 2
    half = recipes[: many // 2]  # a quarter of the names
    assert steps(lambda: read(*recipes)) < 5 * steps(lambda: read(*half))
