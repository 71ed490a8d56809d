"""The value of every parameter for every tensor and model, against a slow oracle; and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import plan_help
from tests.plan_help import only, plan, prepare, problems, warnings
from weightsmith._base.errors import ParameterError, UnknownName, UnknownParameter

LAYERS = 4


@pytest.fixture(scope="module")
def abc(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    folder = tmp_path_factory.mktemp("models")
    a, b, c = (plan_help.model(folder / name, LAYERS, seed=i) for i, name in enumerate("abc"))
    return a, b, c


# ---- the oracle: section 2.4 of what mergekit does, word for word, over plain dicts ------------------------------------------


def evaluate(value: Any, name: str, t: Fraction, number: bool) -> Any:
    """One level's value for a tensor; None: the level says nothing. number: the parameter is one, and no flag or choice."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        for entry in value:
            if entry.get("filter") in (None, "*") or entry["filter"] in name:
                return evaluate(entry["value"], name, t, number)
        return None
    if isinstance(value, list):
        if not number:
            return value[int(t * (len(value) - 1))]
        s = t * (len(value) - 1)
        low = float(value[int(s)])
        high = float(value[min(int(s) + 1, len(value) - 1)])
        return float((1 - (s - int(s))) * Fraction(low) + (s - int(s)) * Fraction(high))
    return float(value) if number else value


def look_up(parameter: str, levels: list[Mapping[str, Any]], name: str, t: Fraction, default: Any) -> Any:
    for level in levels:
        if parameter in level:
            value = evaluate(level[parameter], name, t, parameter not in ("normalize", "rescale"))
            if value is not None:
                return value
    return default


SHARED = {"normalize": True, "rescale": "none", "lambda": 1.0}
OWN = {"weight": None, "density": 1.0}


def expected(recipe: dict[str, Any], abc: tuple[str, ...]) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Output tensor → shared parameters, and those of each model but the base, in the recipe's order."""
    out: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    top = recipe.get("parameters", {})

    def add(out_name: str, sources: list[dict[str, Any]], t: Fraction, levels: list[Any], names: list[str]) -> None:
        shared = {p: look_up(p, levels, out_name, t, d) for p, d in SHARED.items()}
        if not isinstance(shared["rescale"], str):
            shared["rescale"] = "l1" if shared["rescale"] else "none"
        models = [
            {p: look_up(p, [s.get("parameters", {}), *levels], name, t, d) for p, d in OWN.items()}
            for s, name in zip(sources, names, strict=True)
            if s["model"] != abc[0]
        ]
        out[out_name] = shared, [m for m in models if m["weight"] != 0]

    if "models" in recipe:
        for i in range(LAYERS):
            for suffix in plan_help.LAYER:
                name = f"model.layers.{i}.{suffix}"
                add(name, recipe["models"], Fraction(i, LAYERS - 1), [top], [name] * len(recipe["models"]))
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            add(name, recipe["models"], Fraction(0), [top], [name] * len(recipe["models"]))
        return out
    module = recipe["modules"]["model"] if "modules" in recipe else recipe
    levels = [module.get("parameters", {}), top] if "modules" in recipe else [top]
    at = 0
    for s in module["slices"]:
        start, end = s["sources"][0]["layer_range"]
        n = end - start
        for i in range(n):
            for suffix in plan_help.LAYER:
                names = [f"model.layers.{x['layer_range'][0] + i}.{suffix}" for x in s["sources"]]
                t = Fraction(i, n - 1) if n > 1 else Fraction(1)
                add(f"model.layers.{at + i}.{suffix}", s["sources"], t, [s.get("parameters", {}), *levels], names)
        at += n
    for name, which in (("model.embed_tokens.weight", 0), ("model.norm.weight", -1), ("lm_head.weight", -1)):
        s = module["slices"][which]
        add(name, s["sources"], Fraction(0), [s.get("parameters", {}), *levels], [name] * len(s["sources"]))
    return out


FILTERS = st.sampled_from([*"mlp self_attn layers.1 layers.3 norm lm_head embed weight nowhere *".split(), None])
NUMBERS = st.sampled_from([0.125, 0.25, 0.5, 0.75, 1, 0, "1e-3"])  # the last is text in YAML 1.1
FLAGS = st.booleans() | st.sampled_from([0, 1])


def forms(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain = values | st.lists(values, min_size=1, max_size=4)
    entry = st.builds(lambda f, v: {"value": v} if f is None else {"filter": f, "value": v}, FILTERS, plain)
    return plain | entry | st.lists(entry, min_size=1, max_size=3)


def blocks(per_model: bool, shared: bool) -> st.SearchStrategy[dict[str, Any]]:
    chosen = {"weight": forms(NUMBERS), "density": forms(NUMBERS)} if per_model else {}
    if shared:
        chosen |= {"lambda": forms(NUMBERS), "normalize": forms(FLAGS), "rescale": forms(FLAGS)}
    return st.fixed_dictionaries({}, optional=chosen)


@st.composite
def recipes(draw: st.DrawFn, abc: tuple[str, str, str]) -> dict[str, Any]:
    a, b, c = abc
    top = draw(blocks(True, True))
    if "weight" not in top or draw(st.booleans()):
        entry = st.fixed_dictionaries({"filter": st.just("mlp"), "value": NUMBERS})
        top["weight"] = [*draw(st.lists(entry, max_size=1)), {"value": 1}]
    elif isinstance(top["weight"], dict) or (isinstance(top["weight"], list) and isinstance(top["weight"][0], dict)):
        top["weight"] = [*([top["weight"]] if isinstance(top["weight"], dict) else top["weight"]), {"value": 0.5}]
    recipe: dict[str, Any] = {"merge_method": "ties", "base_model": a, "parameters": top}
    order = draw(st.permutations([a, b, c]))
    form = draw(st.sampled_from(["models", "slices", "modules"]))
    if form == "models":
        listed = [m for m in order if m != a or draw(st.booleans())]
        recipe["models"] = [{"model": m, "parameters": draw(blocks(m != a, False))} for m in listed]
        return recipe
    slices = []
    for _ in range(draw(st.integers(1, 2))):
        n = draw(st.integers(1, 3))
        sources = []
        for m in order:
            start = draw(st.integers(0, LAYERS - n))
            source = {"model": m, "layer_range": [start, start + n], "parameters": draw(blocks(m != a, False))}
            sources.append(source)
        slices.append({"sources": sources, "parameters": draw(blocks(True, True))})
    if form == "slices":
        recipe["slices"] = slices
    else:
        recipe["modules"] = {"model": {"slices": slices, "parameters": draw(blocks(True, True))}}
    return recipe


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_values_are_those_of_the_oracle_whatever_the_recipe(abc: tuple[str, str, str], data: st.DataObject) -> None:
    recipe = data.draw(recipes(abc))
    oracle = expected(recipe, abc)
    p = plan(recipe)
    assert {step.out.name for step in p.steps} == oracle.keys()
    for step in p.steps:
        got = p.settings[step.settings]
        shared, models = oracle[step.out.name]
        assert got.shared["normalize"] is bool(shared["normalize"])
        assert got.shared["rescale"] == shared["rescale"]
        assert got.shared["lambda"] == pytest.approx(shared["lambda"], abs=1e-12)
        assert dict(got.models[0]) == {}
        # inputs: the base first, then the recipe's order
        assert [dict(m) for m in got.models[1:]] == [pytest.approx(m, abs=1e-12) for m in models]


# ---- single cases -----------------------------------------------------------------------------------------------------------


def test_explain_gives_value_and_line_of_each_parameter(abc: tuple[str, str, str], tmp_path: Path) -> None:
    a, b, c = abc
    recipe = tmp_path / "r.yml"
    recipe.write_text(f"""merge_method: ties
base_model: {a}
models:
  - model: {b}
    parameters:
      weight:
        - filter: mlp
          value: [0, 0.75]
        - value: 0.25
  - model: {c}
    parameters: {{density: 0.5}}
parameters:
  weight: 2
  lambda: 0.5
""")
    with prepare(recipe) as prepared:
        explained = {(o.parameter, o.model): (o.value, o.where) for o in prepared.explain("model.layers.1.mlp.up_proj.weight")}
        outside = {(o.parameter, o.model): o.value for o in prepared.explain("lm_head.weight")}
        with pytest.raises(UnknownName, match=r"no tensor 'lm_head.wieght' \(did you mean 'lm_head.weight'"):
            prepared.explain("lm_head.wieght")
    expected_values = {
        ("normalize", None): (True, "default"),
        ("rescale", None): ("none", "default"),
        ("lambda", None): (0.5, f"{recipe}:14:11"),
        ("int8_mask", None): (False, "default"),
        ("weight", 1): (0.25, f"{recipe}:8:18"),  # a third of the way
        ("density", 1): (1.0, "default"),
        ("weight", 2): (2.0, f"{recipe}:13:11"),
        ("density", 2): (0.5, f"{recipe}:11:27"),
    }
    assert explained | expected_values == explained  # and those that every method with a base has, at their defaults
    assert all(where == "default" for key, (_, where) in explained.items() if key not in expected_values)
    assert outside["weight", 1] == 0.25


def test_a_slice_of_one_layer_has_the_last_value_of_a_gradient(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    sources = [{"model": m, "layer_range": [2, 3]} for m in (a, b)]
    p = plan({"merge_method": "slerp", "base_model": a, "slices": [{"sources": sources}], "parameters": {"t": [0.25, 0.75]}})
    t = {s.out.name: p.settings[s.settings].shared["t"] for s in p.steps}
    assert t["model.layers.0.mlp.up_proj.weight"] == 0.75
    assert t["lm_head.weight"] == t["model.norm.weight"] == t["model.embed_tokens.weight"] == 0.25


def test_own_filters_look_at_the_name_in_the_model_and_shared_ones_at_the_output_name(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    sources = [
        {"model": a, "layer_range": [0, 1], "parameters": {"weight": [{"filter": "layers.0", "value": 2}, {"value": 3}]}},
        {"model": b, "layer_range": [3, 4], "parameters": {"weight": [{"filter": "layers.3", "value": 4}, {"value": 5}]}},
    ]
    one = {"sources": [{"model": a, "layer_range": [0, 1]}], "parameters": {"weight": 1}}
    flags = [{"filter": "layers.1", "value": False}, {"value": True}]
    recipe = {"merge_method": "linear", "slices": [one, {"sources": sources}], "parameters": {"normalize": flags}}
    p = plan(recipe)
    step = next(s for s in p.steps if s.out.name == "model.layers.1.mlp.up_proj.weight")
    assert [m["weight"] for m in p.settings[step.settings].models] == [2.0, 4.0]
    assert p.settings[step.settings].shared["normalize"] is False


def test_every_wrong_parameter_is_reported_at_once_with_its_place(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    errors = problems(f"""merge_method: ties
base_model: {a}
models:
  - model: {b}
    parameters:
      weight: lots
      density: 2
      lambda: 1
  - model: {c}
    parameters:
      wieght: 1
      density: [0.5, -1]
parameters:
  normalize: 3
  lamda: 1
""")
    assert [(type(p), p.finding.where) for p in errors] == [
        (ParameterError, "<text>:6:15"),
        (ParameterError, "<text>:7:16"),
        (ParameterError, "<text>:8:7"),
        (UnknownParameter, "<text>:11:7"),
        (ParameterError, "<text>:12:16"),
        (ParameterError, "<text>:14:14"),
        (UnknownParameter, "<text>:15:3"),
    ]
    assert [p.finding.what for p in errors] == [
        "weight must be a number, not 'lots'",
        "density must be at most 1, not 2",
        "'lambda' applies to the whole merge, not to one model; mergekit ignores it here",
        "merge_method ties has no parameter 'wieght' (did you mean 'weight'?); mergekit ignores it",
        "density must be at least 0, not -1",
        "normalize must be true or false, not 3",
        "merge_method ties has no parameter 'lamda' (did you mean 'lambda'?); mergekit ignores it",
    ]


def test_a_seed_among_the_parameters_is_an_option_of_the_command(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    recipe = {
        "merge_method": "dare_ties",
        "base_model": a,
        "models": [{"model": b, "parameters": {"weight": 1}}],
        "parameters": {"random_seed": 145},
    }
    (problem,) = problems(recipe)
    assert problem.finding.fix == "Remove it and pass --seed on the command line."


def test_lenient_turns_what_mergekit_ignores_into_warnings_and_ignores_it(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    recipe = {
        "merge_method": "slerp",
        "base_model": a,
        "models": [{"model": a}, {"model": b, "parameters": {"t": 0.9, "weight": 1}}],
        "parameters": {"t": 0.5, "embed": 3},
    }
    assert len(problems(recipe)) == 3
    p = plan(recipe, lenient=True)
    assert {p.settings[s.settings].shared["t"] for s in p.steps} == {0.5}
    assert [w.split("\n")[0] for w in warnings(p)] == [
        "models[1].parameters.t: 't' applies to the whole merge, not to one model; mergekit ignores it here",
        "models[1].parameters.weight: merge_method slerp has no parameter 'weight'; mergekit ignores it",
        "parameters.embed: merge_method slerp has no parameter 'embed'; mergekit ignores it",
    ]


def test_parameters_on_the_base_warn(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    models = [{"model": a, "parameters": {"weight": 1, "density": 0.5}}, {"model": b, "parameters": {"weight": 1}}]
    p = plan({"merge_method": "ties", "base_model": a, "models": models})
    assert [w.split("\n")[0] for w in warnings(p)] == [
        "models[0].parameters.weight: weight has no effect here: the base has no weight",
        "models[0].parameters.density: density has no effect here: the base has no density",
    ]


def test_a_parameter_that_the_method_accepts_and_ignores_warns(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    models = [{"model": b, "parameters": {"weight": 1, "density": 0.5}}]
    p = plan({"merge_method": "task_arithmetic", "base_model": a, "models": models})
    assert warnings(p) == ["models[0].parameters.density: density has no effect: task_arithmetic has no sparsifier"]


def test_a_missing_shared_parameter_is_reported_once(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    problem = only(f"merge_method: slerp\nbase_model: {a}\nmodels:\n  - model: {b}\n")
    assert str(problem) == (
        "<text>:1:1: merge_method slerp needs the parameter 't'\n  -> Write parameters: {t: 0.5} at the top level."
    )


def test_a_required_parameter_that_filters_leave_out_names_a_tensor(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    t = [{"filter": "mlp", "value": 0.5}, {"filter": "attn", "value": 0.1}]
    problem = only({"merge_method": "slerp", "base_model": a, "models": [{"model": b}], "parameters": {"t": t}})
    assert str(problem) == (
        "parameters.t: 't' has no value for model.layers.0.input_layernorm.weight: no filter fits it\n"
        "  -> Add an entry without a filter, last in the list: it holds for the rest."
    )


def test_a_filter_and_a_value_that_decide_nothing_warn(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    recipe = {
        "merge_method": "linear",
        "models": [
            {"model": a, "parameters": {"weight": [{"filter": f, "value": 1} for f in ("mpl", "mlp.up")] + [{"value": 2}]}},
            {"model": b, "parameters": {"weight": 1}},
        ],
        "parameters": {"weight": 3},
    }
    assert [w.split("\n")[0] for w in warnings(plan(recipe))] == [
        "models[0].parameters.weight[0].filter: the filter 'mpl' of weight decides for no tensor",
        "parameters.weight: weight here decides for no tensor: nearer values are used for all of them",
    ]


def test_filters_that_all_decide_nothing_warn_one_by_one(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    weight = [{"filter": "mpl", "value": 1}, {"filter": "atn", "value": 2}]
    models = [{"model": a, "parameters": {"weight": weight}}, {"model": b}]
    p = plan({"merge_method": "linear", "models": models, "parameters": {"weight": 3}})
    assert [w.split("\n")[0] for w in warnings(p)] == [
        f"models[0].parameters.weight[{k}].filter: the filter '{name}' of weight decides for no tensor"
        for k, name in enumerate(("mpl", "atn"))
    ]


def test_of_a_list_that_decides_nothing_its_rest_is_not_named(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    models = [{"model": name, "parameters": {"weight": 1}} for name in (a, b)]
    p = plan(
        {"merge_method": "linear", "models": models, "parameters": {"weight": [{"filter": "mlp", "value": 2}, {"value": 3}]}}
    )
    assert [w.split("\n")[0] for w in warnings(p)] == [
        "parameters.weight[0].filter: the filter 'mlp' of weight decides for no tensor"
    ]


@pytest.mark.long
def test_many_warnings_of_one_kind_are_counted_together(abc: tuple[str, str, str]) -> None:
    filters = [{"filter": f"absent{i}", "value": 0.1} for i in range(2500)]
    entry = {"model": abc[1], "parameters": {"weight": [*filters, {"value": 0.5}]}}
    said = warnings(plan({"merge_method": "linear", "models": [{"model": abc[0], "parameters": {"weight": 1}}, entry]}))
    whats = [warning.split("\n")[0].partition(".filter: ")[2] for warning in said]
    expected = [f"the filter 'absent{i}' of weight decides for no tensor" for i in range(5)]
    assert whats == [*expected[:4], f"{expected[4]}; so for 2,495 more like it"]


def test_a_filter_hidden_behind_a_wider_one_warns(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    t = [{"value": 0.5}, {"filter": "mlp", "value": 0.1}]
    p = plan({"merge_method": "slerp", "base_model": a, "models": [{"model": b}], "parameters": {"t": t}})
    assert [w.split("\n")[0] for w in warnings(p)] == ["parameters.t[1].filter: the filter 'mlp' of t decides for no tensor"]


def test_density_of_a_model_wins_over_the_recipe_and_the_default_comes_last(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    models = [{"model": b, "parameters": {"density": 0.25}}, {"model": c}]
    recipe = {"merge_method": "ties", "base_model": a, "models": models, "parameters": {"weight": 1, "density": 0.5}}
    p = plan(recipe)
    assert [m["density"] for m in p.settings[p.steps[0].settings].models[1:]] == [0.25, 0.5]
    del recipe["parameters"]["density"]  # type: ignore[attr-defined]
    p = plan(recipe)
    assert [m["density"] for m in p.settings[p.steps[0].settings].models[1:]] == [0.25, 1.0]


def test_a_gradient_in_scientific_notation_is_interpolated(abc: tuple[str, str, str]) -> None:
    """YAML 1.1 reads 1e-4 as text; mergekit 0.1.5 goes by the parameter, and so do we."""
    a, b, c = abc
    text = f"merge_method: ties\nbase_model: {a}\nmodels: [{{model: {b}}}, {{model: {c}}}]\n"
    p = plan(text + "parameters: {weight: [1e-4, 4e-4], normalize: [0, 1], rescale: [0, 1]}\n")
    got = [p.settings[next(s for s in p.steps if f"layers.{i}.mlp.up" in s.out.name).settings] for i in range(LAYERS)]
    assert [s.models[1]["weight"] for s in got] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])
    assert [s.shared["normalize"] for s in got] == [False, False, False, True]
    assert [s.shared["rescale"] for s in got] == ["none", "none", "none", "l1"]


def test_numbers_written_as_text_count(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    p = plan(f"merge_method: slerp\nbase_model: {a}\nmodels: [{{model: {b}}}]\nparameters: {{t: 1e-3}}\n")
    assert p.settings[p.steps[0].settings].shared["t"] == 0.001


def test_flags_that_became_choices_take_both(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    models = [{"model": b}]
    recipe = {"merge_method": "dare_ties", "base_model": a, "models": models, "parameters": {"weight": 1, "rescale": True}}
    for written, meant in ((True, "l1"), (False, "none"), ("inv_density", "inv_density"), (0, "none")):
        recipe["parameters"]["rescale"] = written  # type: ignore[index]
        p = plan(recipe)
        assert p.settings[p.steps[0].settings].shared["rescale"] == meant
    recipe["parameters"]["rescale"] = "l2"  # type: ignore[index]
    assert "must be one of none, l1, inv_density, not 'l2'" in str(only(recipe))


def test_weights_that_cannot_be_normalised_are_refused(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    models = [{"model": a, "parameters": {"weight": 1}}, {"model": b, "parameters": {"weight": -1}}]
    assert "the weights sum to 0" in str(only({"merge_method": "linear", "models": models}))
    p = plan({"merge_method": "linear", "models": models, "parameters": {"normalize": False}})
    assert p.settings[p.steps[0].settings].shared["normalize"] is False
