"""A recipe as controls: what they show, and that what they write changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._app.studio import draft
from weightsmith._base.errors import UnknownMethod
from weightsmith._methods import NAMES, get
from weightsmith._planning.recipe import load

COMBINE = draft.begin("combine", "./base", ["./fr", "./de"])
WEIGHT = ("models", 0, "parameters", "weight")


def by_path(text: str) -> dict[draft.Path, draft.Control]:
    return {control.path: control for control in draft.read(text).controls}


def test_controls_show_a_goals_recipe() -> None:
    found = draft.read(COMBINE)
    assert (found.method, found.base, found.models, found.held) == ("ties", "./base", ("./fr", "./de"), "")
    controls = by_path(COMBINE)
    assert controls[WEIGHT].value == 1.0
    assert controls["models", 1, "parameters", "density"].value == 0.5  # of all models
    assert (controls["parameters", "lambda"].main, controls["parameters", "rescale"].main) == (True, False)
    assert controls["parameters", "rescale"].choices == ("none", "l1", "inv_density")
    assert ("parameters", "int8_mask") not in controls  # it changes nothing


@pytest.mark.parametrize("goal", draft.GOALS_SHOWN)
@pytest.mark.parametrize("models", [[], ["./fr"], ["./fr", "./de", "./py"]])
def test_every_goal_begins_with_a_recipe_that_controls_show(goal: str, models: list[str]) -> None:
    for base in ("", "./base"):
        text = draft.begin(goal, base, models)
        assert load(text).problems == ()
        found = draft.read(text)
        assert not found.held
        assert not {draft.NO_MODEL, draft.NO_BASE} & {found.base, *found.models}


@pytest.mark.parametrize("method", NAMES)
def test_every_method_gets_a_recipe_that_controls_show(method: str) -> None:
    text = draft.rebuilt(COMBINE, method, "./base", ["./fr", "./de"])
    assert load(text).problems == ()
    found = draft.read(text)
    assert (found.method, found.base, found.models, found.held) == (method, "./base", ("./fr", "./de"), "")
    values = {control.name: control.value for control in found.controls}
    required = {p.name for p in get(method).parameters if p.required}
    assert all(values[name] is not None for name in required)
    assert not any(control.held for control in found.controls)


def test_a_base_that_is_an_input_has_controls_too() -> None:
    found = draft.read(draft.rebuilt(COMBINE, "linear", "./base", ["./fr"]))
    assert found.models == ("./fr",)
    assert [(control.model, control.name) for control in found.controls if control.model] == [
        ("./base", "weight"),
        ("./fr", "weight"),
    ]


def test_moving_a_slider_changes_one_value_and_keeps_comments() -> None:
    text = draft.changed(COMBINE, {WEIGHT: 0.25})
    assert text == COMBINE.replace("weight: 1.0", "weight: 0.25", 1)
    assert draft.changed(text, {WEIGHT: 0.25}) == text


def test_a_curve_and_a_value_that_was_not_there() -> None:
    path = ("models", 1, "parameters", "density")
    text = draft.changed(COMBINE, {path: [0, 0.5, 1.0], ("parameters", "normalize"): False})
    lines = text.splitlines()
    assert lines[7].startswith("    parameters: {weight: 1.0, density: [0, 0.5, 1.0]}    # its share")
    assert lines[11] == "  normalize: false"
    assert by_path(text)[path].value == (0, 0.5, 1.0)
    bare = "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n"
    assert draft.changed(bare, {WEIGHT: 2}) == bare + "  parameters: {weight: 2}\n"


@pytest.mark.parametrize(
    "text",
    [
        "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n  parameters: # none yet\ndtype: float32\n",
        "merge_method: ties\nbase_model: a\nmodels: [{model: b, parameters: {weight: 1,}}]\n",
        "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n  parameters: &p {weight: 1}\n- model: c\n  parameters: *p\n",
        "{merge_method: ties, base_model: a, models: [{model: b}]}",
        '{"merge_method": "ties", "base_model": "a", "models": [{"model": "b", "parameters": {"weight": [0, 1]}}]}\n',
        "# ☃\nmerge_method: ties\nbase_model: '☃'\nmodels:\n- model: b\n  parameters:\n    weight:\n    - 0.5\n    - 1\n",
    ],
)
def test_any_way_to_write_a_recipe_can_be_edited(text: str) -> None:
    wanted = yaml.safe_load(text)
    entry = wanted["models"][0]
    entry["parameters"] = {**(entry.get("parameters") or {}), "weight": 0.75}
    assert yaml.safe_load(draft.changed(text, {WEIGHT: 0.75})) == wanted


values = st.one_of(st.floats(-9, 9), st.integers(-9, 9), st.lists(st.floats(0, 1), min_size=2, max_size=5))
paths = st.sampled_from(
    [WEIGHT, ("models", 1, "parameters", "density"), ("parameters", "lambda"), ("parameters", "delta_scale")]
)


@pytest.mark.slow
@given(st.dictionaries(paths, values, max_size=4))
def test_what_is_written_is_shown(given: dict[draft.Path, Any]) -> None:
    controls = by_path(draft.changed(COMBINE, given))
    for path, value in given.items():
        shown = controls[path].value
        assert shown == pytest.approx(tuple(value) if isinstance(value, list) else value, rel=1e-5)
        assert not controls[path].held


@pytest.mark.parametrize("value", [None, {"a": 1}, [1], [1] * 99, ["x", "y"], float("nan"), [0.0, float("inf")], object()])
def test_what_no_control_writes_is_left_out(value: Any) -> None:
    assert draft.changed(COMBINE, {WEIGHT: value}) == COMBINE


@pytest.mark.parametrize(
    "path", [("merge_method",), ("base_model",), ("models", 0, "model"), ("models", 9, "parameters", "weight"), ()]
)
def test_only_parameters_are_written(path: draft.Path) -> None:
    assert draft.changed(COMBINE, {path: "/etc/passwd"}) == COMBINE


def test_another_method_keeps_what_both_have_and_all_other_keys() -> None:
    text = draft.changed(COMBINE, {WEIGHT: 0.3}) + "tokenizer_source: union\n"
    text = draft.rebuilt(text, "dare_linear", "./base", ["./fr", "./py"])
    assert yaml.safe_load(text) == {
        "merge_method": "dare_linear",
        "base_model": "./base",
        "models": [{"model": "./fr", "parameters": {"weight": 0.3}}, {"model": "./py", "parameters": {"weight": 0.3}}],
        "parameters": {"density": 0.5, "lambda": 1.0},
        "dtype": "bfloat16",
        "tokenizer_source": "union",
    }
    text = draft.rebuilt(text, "slerp", "./base", ["./fr"])
    assert yaml.safe_load(text)["parameters"] == {"t": 0.5}
    with pytest.raises(UnknownMethod):
        draft.rebuilt(text, "../evil.py:f", "", [])


def test_what_controls_cannot_show_is_said() -> None:
    slerp = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\n"
    filters = slerp + "parameters:\n  t:\n  - {filter: mlp, value: 1}\n  - {value: 0.5}\n"
    assert by_path(filters)["parameters", "t"].held == "set by filters in the recipe"
    for value in ("null", "x", "[0]", "[x, 1]", "{ema: 0.5}"):
        assert by_path(slerp + f"parameters: {{t: {value}}}\n")["parameters", "t"].held
    slices = "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 2]}]}]\n"
    assert "edited as text" in draft.read(slices).held
    for broken in (
        "",
        "merge_method: [",
        "merge_method: none\nmodels: [{model: a}]",
        "/etc/passwd",
        "a: &a [*a]\n",
        "x" * 200_000,
    ):
        assert draft.read(broken).held
        assert draft.changed(broken, {WEIGHT: 1}) == draft.as_text(broken)
