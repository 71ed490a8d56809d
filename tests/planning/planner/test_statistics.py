"""What a recipe says of texts, and what the plan makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import weightsmith
from tests.cli_help import Cli
from tests.plan_help import model, prepare
from tests.recipe_help import parse
from weightsmith._base.errors import FormatError, PlanError, WeightsmithError
from weightsmith._features.quantisation.base import without_measuring
from weightsmith._methods import all_methods
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.inputs import number_models
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._planning.planner.reopen import reopen
from weightsmith._planning.planner.steps import own_texts
from weightsmith._planning.recipe.grammar import schema
from weightsmith._plans import Plan, PlanDraft, plan_from_json

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for seed, name in enumerate(("base", "a", "b")):
        model(root / name, vocab=256, seed=seed, settings={"vocab_size": 256, "hidden_size": 4})
        tokenizer.save(str(root / name / "tokenizer.json"))
    for name in ("a", "b", "all"):
        (root / f"{name}.txt").write_text(name + TEXT)
    return root


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def short(name: str, rows: int = 4) -> dict[str, Any]:
    return {"file": f"{name}.txt", "rows": rows, "tokens": 16}


def recipe(method: str = "regmean", a: Any = None, b: Any = None, text: Any = None, **parameters: Any) -> dict[str, Any]:
    entries = [
        {"model": f"./{name}", **({} if own_text is None else {"text": own_text})} for name, own_text in (("a", a), ("b", b))
    ]
    document: dict[str, Any] = {"merge_method": method, "base_model": "./base", "models": entries, "parameters": parameters}
    return document if text is None else document | {"text": text}


def plan_of(source: Mapping[str, Any]) -> Plan:
    with prepare(source) as prepared:
        return prepared.plan


def refused(source: Mapping[str, Any]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        prepare(source)
    return [str(problem) for problem in caught.value.problems]


def test_a_models_own_text_wins_over_that_of_the_recipe() -> None:
    plan = plan_of(recipe(a=short("a"), text=short("all", rows=5)))
    texts = [product.settings["text"] for product in plan.products if product.op == "text_rows"]
    assert [(Path(text["source"]).name, text["rows"]) for text in texts] == [("a.txt", 4), ("all.txt", 5)]
    step = next(step for step in plan.steps if step.out.name == DOWN)
    assert [(statistic.kind, statistic.input) for statistic in step.statistics] == [
        ("second_moments", 1),
        ("second_moments", 2),
    ]
    assert all(plan.maker[statistic.read.tensor] in plan.needs(step) for statistic in step.statistics)
    assert not any(step.statistics for step in plan.steps if step.role != "linear")


def test_the_built_in_text_is_named_built_in() -> None:
    plan = plan_of(recipe(text={"file": "built-in", "rows": 2, "tokens": 8}))
    assert {product.settings["text"]["source"] for product in plan.products if product.op == "text_rows"} == {"built-in"}


def test_a_method_without_a_text_says_what_to_write() -> None:
    assert refused(recipe()) == [
        "merge_method: merge_method regmean measures the models on a text, and the recipe names none\n"
        "  -> Write text: and a file, text: built-in, or text: own, at the top level."
    ]
    (one,) = refused(recipe(a=short("a")))
    assert one == (
        "merge_method: merge_method regmean measures ./b on a text, and the recipe names none\n"
        "  -> Write text: and a file, text: built-in, or text: own, at the top level or in the entry of the model."
    )


def test_a_text_that_the_method_does_not_look_at_is_an_error() -> None:
    for source in (recipe("task_arithmetic", text=short("all"), weight=1), recipe("task_arithmetic", a=short("a"), weight=1)):
        (one,) = refused(source)
        assert "merge_method task_arithmetic looks at no text with these parameters\n  -> Remove 'text'." in one


def test_a_text_of_a_model_that_is_not_measured_is_a_warning() -> None:
    source = recipe("fisher", a=short("a"), b=short("b"))
    source["models"][1]["parameters"] = {"weight": 0}
    assert any("the text of ./b is not read" in str(finding) for finding in plan_of(source).warnings)


def test_every_problem_of_the_texts_is_reported_at_once_where_it_is() -> None:
    source = recipe(a={"file": "a.md"}, b=short("b", rows=400), alpha=2)
    messages = refused(source)
    assert len(messages) == 3, messages
    assert any(
        message.startswith("models[0].text: the text 'a.md' is not a .txt, .jsonl or .parquet file") for message in messages
    )
    assert any(message.startswith("models[1].text: the text has") for message in messages)


def test_a_text_in_place_of_its_file_says_to_save_it() -> None:
    (message,) = refused(recipe(a="Hello, this is a text.", b=short("b")))
    assert message.startswith("models[0].text: it is a text itself, and the name of a file is needed: 'Hello, this is a text.'")
    assert "Save the text in a .txt file" in message


def test_a_text_that_is_not_there_is_one_error() -> None:
    (one,) = refused(recipe(text="nowhere.txt"))
    assert "nowhere.txt" in one


def test_a_model_with_two_texts_is_an_error() -> None:
    modules = "{text: {models: [{model: a, text: a.txt}]}, vision: {models: [{model: a, text: b.txt}]}}"
    parsed, _ = parse(f"merge_method: regmean\nbase_model: b\nmodules: {modules}\n", "r.yml")
    assert parsed is not None
    problems: list[WeightsmithError] = []
    own_texts(parsed, number_models(parsed)[0], problems)
    assert [str(problem) for problem in problems] == [
        "r.yml:3:89: a has two texts, a.txt and b.txt\n  -> Write the same text in each entry."
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prior_parameters": {"directions": 2}}, "prior_parameters are of no method"),
        (
            {"prior": "tsv_m", "prior_parameters": {"direction": 2}},
            "tsv_m has no parameter 'direction' (did you mean 'directions'?)",
        ),
        ({"prior": "tsv_m", "prior_parameters": {"directions": 0.5}}, "directions must be a whole number, not 0.5"),
        ({"prior": "tsv_m", "prior_parameters": {"flatten": 2}}, "flatten must be at most 1, not 2"),
        ({"prior": "tsv_m", "prior_parameters": {"flatten": True}}, "flatten must be a number, not True"),
        ({"prior": "tsv_m", "prior_parameters": '{"flatten": NaN}'}, "flatten must be a number, not nan"),
        ({"prior": "tsv_m", "prior_parameters": '{"flatten": 1, "flatten": 0}'}, "prior_parameters takes a mapping"),
        ({"prior": "tsv_m", "prior_parameters": {"spectrum": "floor"}}, "tsv_m has no parameter 'spectrum'"),
        ({"prior": "tsv_m", "prior_parameters": "{"}, "prior_parameters takes a mapping"),
        ({"prior": "ties"}, "prior must be one of none, linear, task_arithmetic, tsv_m"),
    ],
)
def test_the_parameters_of_a_prior_are_checked(options: dict[str, Any], words: str) -> None:
    assert any(words in message for message in refused(recipe(text=short("all"), **options)))


def test_slices_and_modules_are_measured_too() -> None:
    sliced = recipe(text=short("all"))
    del sliced["models"]
    layers = [{"sources": [{"model": f"./{name}", "layer_range": [i, i + 1]} for name in ("base", "a", "b")]} for i in (1, 0)]
    sliced["slices"] = layers
    plan = plan_of(sliced)
    first = next(step for step in plan.steps if step.out.name == "model.layers.0.mlp.down_proj.weight")
    assert all("layers.1.mlp.down_proj" in statistic.read.tensor for statistic in first.statistics)
    modules = recipe(text=short("all"))
    modules["modules"] = {"default": {"models": modules.pop("models")}}
    assert sum(len(step.statistics) for step in plan_of(modules).steps) == 2 * 2 * 3


def test_through_the_merge_each_layer_needs_the_merged_ones_below() -> None:
    plan = plan_of(recipe(a=short("a"), b=short("b", rows=5), through="merge"))
    products = {product.name: product for product in plan.products}
    step = next(step for step in plan.steps if step.out.name == DOWN)
    for statistic in step.statistics:
        (states,) = products[plan.maker[statistic.read.tensor]].needs
        below = [need for need in products[states].needs if products[need].op == "statistic"]
        assert len(below) == 2  # of both models: what leaves the layer below is merged
        assert {inner.op for inner in products[states].steps if inner.role == "linear"} == {"regmean"}
    assert [product.op for product in plan.products].count("statistic") == 2 * 2


def test_no_text_runs_through_a_merge_with_other_layers_or_tokens() -> None:
    sliced = recipe(text=short("all"), through="merge")
    del sliced["models"]
    sliced["slices"] = [{"sources": [{"model": f"./{name}", "layer_range": [0, 2]} for name in ("base", "a", "b")]}]
    (one,) = refused(sliced)
    assert "texts cannot run through the layers of a merge with 'slices'" in one
    assert "rite through: model in the parameters" in one
    united = recipe(text=short("all"), through="merge") | {"tokenizer": {"source": "union"}}
    assert any("of a merge with 'tokenizer'" in message for message in refused(united))


def test_aim_measures_the_base_alone() -> None:
    plan = plan_of(recipe("ties", text=short("all"), weight=1, density=0.5, aim=0.4))
    step = next(step for step in plan.steps if step.out.name == DOWN)
    assert [(statistic.kind, statistic.input) for statistic in step.statistics] == [("magnitudes", 0)]


def test_a_stage_that_measures_is_written_first() -> None:
    inner = recipe(text=short("all"))
    outer = {"merge_method": "linear", "models": [{"model": inner, "parameters": {"weight": 1}}, {"model": "./a"}]}
    outer["models"][1]["parameters"] = {"weight": 1}
    with prepare(outer) as prepared:
        assert [stage.why for stage in prepared.stages] == ["regmean looks at the whole model first"]


def _changed(prepared: Prepared, change: Any) -> Plan:
    data = json.loads(json.dumps(prepared.plan.to_json()))
    change(next(step for step in data["steps"] if step["name"] == DOWN))
    return plan_from_json(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda step: step["statistics"].pop(), "looks at other statistics of it"),
        (lambda step: step["statistics"][0].update(kind="gram"), "looks at other statistics of it"),
        (lambda step: step["statistics"][0].update(input=9), "is not of an input"),
        (lambda step: step["statistics"][0]["read"].__setitem__(0, 0), "is not of an input, or no product's array"),
        (
            lambda step: step["statistics"][0]["read"].__setitem__(
                1, step["statistics"][0]["read"][1].replace("mlp.down_proj", "mlp.gate_up")
            ),
            "does not have the shape of its second_moments",
        ),
    ],
)
def test_a_plan_from_elsewhere_is_checked(change: Any, words: str) -> None:
    with prepare(recipe(text=short("all"))) as prepared:
        reopen(_changed(prepared, lambda step: None)).close()
        with pytest.raises((PlanError, FormatError)) as caught:
            reopen(_changed(prepared, change))
    assert words in str(caught.value)


def test_what_measures_cannot_be_previewed_or_merged_in_memory() -> None:
    with pytest.raises(weightsmith.WeightsmithError, match="regmean measures the models on a text, which a sample does not"):
        weightsmith.preview(recipe(text=short("all")), progress=False)
    with pytest.raises(PlanError, match="regmean measures the models on a text, and state dicts have none"):
        weightsmith.merge_state_dicts("regmean", [{}, {}], base={})


def test_a_quantised_merge_keeps_what_it_measures_itself() -> None:
    plan = plan_of(recipe(text=short("all")))
    draft = PlanDraft.of(plan)
    assert without_measuring(draft) == []
    assert tuple(draft.products) == plan.products


@pytest.mark.slow
def test_the_plan_says_what_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    Path("by_text.yml").write_text(json.dumps(recipe(a=short("a"), text=short("all", rows=5))))
    run = Cli(monkeypatch, capsys)
    printed = run("plan", "by_text.yml").out
    # Three inputs of each of two layers: q and up of 4 features, down of 6.
    for text, rows, name in (("a", 4, "a"), ("all", 5, "b")):
        read = f"{rows} rows of 16 tokens of {folder}/{text}.txt, through ./{name}: second_moments, 544 bytes"
        assert read in " ".join(printed.split())
    summary = json.loads(run("plan", "by_text.yml", "--json").out)["summary"]
    assert [(text["model"], text["rows"], text["bytes"]) for text in summary["texts"]] == [("./a", 4, 544), ("./b", 5, 544)]
    # One layer of both models, and states: of a before and after its layer 0, of b before its own.
    assert summary["product_bytes"] == 2 * 272 + (2 * 5 + 4) * 16 * 4 * 4
    assert "disk 4.13 kB at most, beside the output, for one layer's statistics at a time" in " ".join(printed.split())
    assert summary["measuring_bytes"] == 272 + 4 * sum(
        step["shape"][0] * (step["shape"] + [1])[1]
        for step in json.loads(run("plan", "by_text.yml", "--json").out)["steps"]
        if step["name"].startswith("model.layers.0.")
    )


def test_the_seed_chooses_the_rows() -> None:
    with prepare(recipe(text=short("all")), RecipeOptions(seed=3)) as prepared:
        assert {p.settings["text"]["seed"] for p in prepared.plan.products if p.op == "text_rows"} == {3}


@pytest.mark.parametrize(("value", "fits"), [({"lambda": 0.8, "directions": 8}, True), ({"lambda": [1, 2]}, False), (3, False)])
def test_the_schema_takes_parameters_of_a_prior(value: Any, fits: bool) -> None:
    source = {"merge_method": "regmean", "models": [{"model": "a"}], "parameters": {"prior_parameters": value}}
    assert jsonschema.Draft202012Validator(schema(all_methods())).is_valid(source) == fits
