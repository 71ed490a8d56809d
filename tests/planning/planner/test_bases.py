"""Which model is the base of what, how many models a method takes, and which of them counts twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import plan_help
from tests.plan_help import only, plan, problems, sources, warnings

LAYERS = 4
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def abc(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    folder = tmp_path_factory.mktemp("models")
    a, b, c = (plan_help.model(folder / name, LAYERS, seed=i) for i, name in enumerate("abc"))
    return a, b, c


def of(*models: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"model": m, "parameters": parameters} for m in models]


def cut(*models: str, start: int = 0, end: int = 2) -> list[dict[str, Any]]:
    return [{"model": m, "layer_range": [start, end]} for m in models]


def test_models_takes_in_the_base_that_is_not_listed_and_puts_it_first(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    listed = plan({"merge_method": "ties", "base_model": a, "models": of(b, a, c, weight=1)})
    unlisted = plan({"merge_method": "ties", "base_model": a, "models": of(b, c, weight=1)})
    assert sources(listed)[Q] == sources(unlisted)[Q] == [(0, Q), (1, Q), (2, Q)]
    assert [m.ref for m in unlisted.models] == [a, b, c]
    assert all(s.base for s in unlisted.steps)
    assert listed.steps == unlisted.steps


def test_slices_do_not_take_in_the_base(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    recipe: dict[str, Any] = {"merge_method": "slerp", "base_model": a, "parameters": {"t": 0.5}}
    problem = only({**recipe, "slices": [{"sources": cut(b)}]})
    assert str(problem) == (
        f"slices[0]: the slice does not list the base model {a}\n"
        "  -> Add it to the sources, with the layer_range to take from it."
    )
    p = plan({**recipe, "slices": [{"sources": cut(b, a)}]})
    assert sources(p)[Q] == [(0, Q), (1, Q)]


@pytest.mark.parametrize("listed", [True, False])
def test_slerp_goes_from_the_base_to_the_other_model(abc: tuple[str, str, str], listed: bool) -> None:
    a, b, _ = abc
    models = [{"model": b}, {"model": a}] if listed else [{"model": b}]
    p = plan({"merge_method": "slerp", "base_model": a, "models": models, "parameters": {"t": 0.5}})
    assert sources(p)[Q] == [(0, Q), (1, Q)]
    assert p.models[0].ref == a


def test_slerp_of_two_models_that_are_not_the_base_is_refused(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    recipe = {"merge_method": "slerp", "base_model": a, "models": [{"model": b}, {"model": c}], "parameters": {"t": 0.5}}
    assert str(only(recipe)) == (
        f"models: merge_method slerp takes exactly 1 model besides the base, and there are 2\n  {b}\n  {c}\n"
        "  -> Remove 1 of them, or write a method that takes more."
    )


def test_a_method_that_needs_a_base_says_so(abc: tuple[str, str, str]) -> None:
    _, b, c = abc
    problem = only(f"merge_method: ties\nmodels: [{{model: {b}}}, {{model: {c}}}]\nparameters: {{weight: 1}}\n")
    assert str(problem) == (
        "<text>:1:1: merge_method ties needs a base_model\n"
        "  -> Write base_model: and the model that the others were tuned from."
    )


def test_nuslerp_merges_models_without_a_base_and_task_vectors_with_one(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    without = plan({"merge_method": "nuslerp", "models": of(b, c, weight=1)})
    assert sources(without)[Q] == [(0, Q), (1, Q)]
    assert not any(s.base for s in without.steps)
    base = plan({"merge_method": "nuslerp", "base_model": a, "models": of(b, c, weight=1)})
    assert sources(base)[Q] == [(0, Q), (1, Q), (2, Q)]
    assert all(s.base for s in base.steps)


def test_the_base_of_nuslerp_is_not_one_of_the_two(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    problem = only({"merge_method": "nuslerp", "base_model": a, "models": of(a, b, weight=1)})
    assert "takes exactly 2 models besides the base, and there is one" in str(problem)


def test_linear_counts_an_unlisted_base_as_an_input_and_asks_for_its_weight(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    recipe = f"merge_method: linear\nbase_model: {a}\nmodels:\n"
    recipe += "".join(f"  - {{model: {m}, parameters: {{weight: 1}}}}\n" for m in (b, c))
    assert str(only(recipe)) == (
        "<text>:2:13: merge_method linear needs the parameter 'weight' for each model\n"
        "  the base_model counts as one more input of linear\n"
        "  -> Write parameters: {weight: 0.5} at the top level, or list the base under 'models' with parameters of its own."
    )
    p = plan(recipe + "parameters: {weight: 3}\n")
    assert [i.model for i in p.steps[0].inputs] == [1, 2, 0]  # listed models first, as in mergekit
    assert [m["weight"] for m in p.settings[p.steps[0].settings].models] == [1, 1, 3]


def test_passthrough_with_an_unlisted_base_has_two_inputs(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    problem = only({"merge_method": "passthrough", "base_model": a, "models": [{"model": b}]})
    assert str(problem) == (
        f"models: merge_method passthrough takes exactly 1 model, and there are 2\n"
        f"  {b}\n  {a} (base_model, which counts as an input of passthrough)\n"
        "  -> Remove base_model."
    )
    assert plan({"merge_method": "passthrough", "base_model": a, "models": [{"model": a}]})


def test_a_base_outside_all_slices_only_gives_config_and_files(abc: tuple[str, str, str], tmp_path: Path) -> None:
    a, b, _ = abc
    (Path(a) / "tokenizer.json").write_text("{}")
    p = plan({"merge_method": "passthrough", "base_model": a, "slices": [{"sources": cut(b, end=3)}]})
    assert p.donor == 0
    assert p.models[0].ref == a
    assert "tokenizer.json" in p.carried
    assert p.config is not None
    assert p.config["num_hidden_layers"] == 3
    assert {i.model for s in p.steps for i in s.inputs} == {1}
    reasons = {d.reason for d in p.dropped if d.model == 0}
    assert reasons == {f"module model is taken from {b}"}


def test_a_slice_may_have_a_base_of_its_own(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    slices = [{"sources": cut(a, b)}, {"sources": cut(b, c, start=2, end=4), "base_model": c}]
    p = plan({"merge_method": "slerp", "base_model": a, "slices": slices, "parameters": {"t": 0.5}})
    assert [m.ref for m in p.models] == [a, b, c]
    assert sources(p)["model.layers.1.mlp.up_proj.weight"] == [(m, "model.layers.1.mlp.up_proj.weight") for m in (0, 1)]
    assert sources(p)["model.layers.3.mlp.up_proj.weight"] == [(m, "model.layers.3.mlp.up_proj.weight") for m in (2, 1)]
    assert sources(p)["lm_head.weight"] == [(2, "lm_head.weight"), (1, "lm_head.weight")]


def test_the_base_of_a_slice_does_not_become_the_donor(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    slices = [{"sources": cut(a, b), "base_model": b}, {"sources": cut(a, c), "base_model": c}]
    p = plan({"merge_method": "slerp", "slices": slices, "parameters": {"t": 0.5}})
    assert p.models[p.donor].ref == a


def test_the_base_of_a_slice_has_no_effect_on_a_method_without_bases(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    p = plan({"merge_method": "passthrough", "slices": [{"sources": cut(a), "base_model": b}]})
    assert [w.split("\n")[0] for w in warnings(p) if "no effect" in w] == [
        "slices[0].base_model: base_model of a slice has no effect: merge_method passthrough knows no base"
    ]
    assert {d.reason for d in p.dropped if d.model == 1} == {"the recipe takes no tensor of this model"}


def test_the_base_of_a_slice_must_be_one_of_its_sources(abc: tuple[str, str, str]) -> None:
    a, b, c = abc
    recipe = {"merge_method": "slerp", "slices": [{"sources": cut(a, b), "base_model": c}], "parameters": {"t": 0.5}}
    errors = problems(recipe)
    assert [str(f).split("\n")[0] for f in errors] == [
        f"slices[0]: the slice does not list the base model {c}",
        "slices[0]: merge_method slerp takes exactly 1 model besides the base, and there are 2",
    ]


def test_a_model_listed_twice_is_refused(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    error = only({"merge_method": "linear", "models": of(a, b, a, weight=1)})
    assert str(error) == f"models[2]: {a} is listed twice\n  -> List each input once, with the sum of the weights."


def test_a_base_listed_twice_is_refused(abc: tuple[str, str, str]) -> None:
    a, b, _ = abc
    errors = problems({"merge_method": "ties", "base_model": a, "models": of(a, a, b, weight=1)})
    assert f"{a} is listed twice" in str(errors[0])


def test_two_layer_ranges_of_one_model_may_be_merged(abc: tuple[str, str, str]) -> None:
    a, _, _ = abc
    both = [*cut(a, start=0, end=2), *cut(a, start=2, end=4)]
    p = plan({"merge_method": "linear", "slices": [{"sources": both}], "parameters": {"weight": 1}})
    assert sources(p)["model.layers.1.mlp.up_proj.weight"] == [
        (0, "model.layers.1.mlp.up_proj.weight"),
        (0, "model.layers.3.mlp.up_proj.weight"),
    ]
    same = [*cut(a), *cut(a)]
    twice = {"merge_method": "linear", "slices": [{"sources": same}], "parameters": {"weight": 1}}
    assert "is listed twice" in str(only(twice))


def test_two_spellings_of_one_folder_are_one_model(abc: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = abc
    monkeypatch.chdir(Path(a).parent)
    recipe = {"merge_method": "slerp", "base_model": "a", "models": [{"model": "./a/"}, {"model": b}], "parameters": {"t": 0.5}}
    p = plan(recipe)
    assert [m.ref for m in p.models] == ["a", b]
    monkeypatch.setenv("HOME", str(Path(a).parent))
    recipe["base_model"] = "~/a"
    assert [m.ref for m in plan(recipe).models] == ["~/a", b]


def test_a_home_folder_is_expanded(abc: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, _ = abc
    monkeypatch.setenv("HOME", str(Path(a).parent))
    p = plan({"merge_method": "linear", "models": of("~/a", "~/b", weight=1)})
    assert [m.ref for m in p.models] == ["~/a", "~/b"]


def test_two_revisions_of_one_hub_model_are_two_models(abc: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._planning.planner import inputs

    a, b, _ = abc
    folders = {"v1": a, "v2": b}
    asked = []

    def fake(path: str, *, revision: str | None = None, **options: Any) -> Any:
        asked.append((path, revision))
        return real(folders[revision or ""])

    real = inputs.open_checkpoint
    monkeypatch.setattr(inputs, "open_checkpoint", fake)
    p = plan({"merge_method": "linear", "models": of("org/name@v1", "org/name@v2", weight=1)})
    assert [m.ref for m in p.models] == ["org/name@v1", "org/name@v2"]
    assert asked == [("org/name", "v1"), ("org/name", "v2")]
