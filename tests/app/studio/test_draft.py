"""A recipe as controls: what they show, and that what they write changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._app.studio import draft
from weightsmith._methods import NAMES, get
from weightsmith._planning.recipe import load

COMBINE = """# One model with the skills of several fine-tunes of one base: TIES
merge_method: ties
base_model: ./base    # the model that all the others were tuned from
models:
  - model: ./fr
    parameters: {weight: 1.0}    # its share
  - model: ./de
    parameters: {weight: 1.0}    # its share
parameters:
  density: 0.5    # share of each model's changes that is kept, the largest; 1 keeps all
  lambda: 1.0     # strength of the merged changes; less is closer to the base
dtype: bfloat16
"""
WEIGHT = ("models", 0, "parameters", "weight")


FR, DE = "./fr", "./de"


def changed(text: str, values: dict[draft.Path, Any]) -> str:
    """The recipe after a `set` of each control."""
    for path, value in values.items():
        model = path[1] if path and path[0] == "models" and len(path) > 1 else ""
        names = draft.read(text).models
        name = names[model] if isinstance(model, int) and model < len(names) else ""
        text = draft.edited(text, {"kind": "set", "path": list(path), "model": name, "value": value})
    return text


def step(text: str, kind: str, name: str, **fields: Any) -> str:
    return draft.edited(text, {"kind": kind, "name": name, **fields})


def by_path(text: str) -> dict[draft.Path, draft.Control]:
    return {control.path: control for control in draft.read(text).controls}


def test_controls_show_a_goals_recipe() -> None:
    form = draft.read(COMBINE)
    assert (form.method, form.base, form.models, form.held) == ("ties", "./base", ("./fr", "./de"), "")
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
        form = draft.read(text)
        assert not form.held
        assert not {draft.NO_MODEL, draft.NO_BASE} & {form.base, *form.models}


@pytest.mark.parametrize("method", NAMES)
def test_every_method_gets_a_recipe_that_controls_show(method: str) -> None:
    text = step(COMBINE, "method", method)
    assert load(text).problems == ()
    assert text.startswith("# One model with the skills")
    form = draft.read(text)
    assert (form.method, form.base, form.models, form.held) == (method, "./base", (FR, DE), "")
    values = {control.name: control.value for control in form.controls}
    required = {p.name for p in get(method).parameters if p.required}
    assert all(values[name] is not None for name in required)
    assert not any(control.held for control in form.controls)


def test_moving_a_slider_changes_one_value_and_keeps_comments() -> None:
    text = changed(COMBINE, {WEIGHT: 0.25})
    assert text == COMBINE.replace("weight: 1.0", "weight: 0.25", 1)
    assert changed(text, {WEIGHT: 0.25}) == text


def test_a_curve_and_a_value_that_was_not_there() -> None:
    path = ("models", 1, "parameters", "density")
    text = changed(COMBINE, {path: [0, 0.5, 1.0], ("parameters", "normalize"): False})
    lines = text.splitlines()
    assert lines[7].startswith("    parameters: {weight: 1.0, density: [0, 0.5, 1.0]}    # its share")
    assert lines[11] == "  normalize: false"
    assert by_path(text)[path].value == (0, 0.5, 1.0)
    bare = "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n"
    assert changed(bare, {WEIGHT: 2}) == bare + "  parameters: {weight: 2}\n"


@pytest.mark.parametrize(
    "text",
    [
        "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n  parameters: # none yet\ndtype: float32\n",
        "merge_method: ties\nbase_model: a\nmodels: [{model: b, parameters: {weight: 1,}}]\n",
        "{merge_method: ties, base_model: a, models: [{model: b}]}",
        '{"merge_method": "ties", "base_model": "a", "models": [{"model": "b", "parameters": {"weight": [0, 1]}}]}\n',
        "# ☃\nmerge_method: ties\nbase_model: '☃'\nmodels:\n- model: b\n  parameters:\n    weight:\n    - 0.5\n    - 1\n",
    ],
)
def test_any_way_to_write_a_recipe_can_be_edited(text: str) -> None:
    expected = yaml.safe_load(text)
    entry = expected["models"][0]
    entry["parameters"] = {**(entry.get("parameters") or {}), "weight": 0.75}
    assert yaml.safe_load(changed(text, {WEIGHT: 0.75})) == expected


values = st.one_of(st.floats(-9, 9), st.integers(-9, 9), st.lists(st.floats(0, 1), min_size=2, max_size=5))
paths = st.sampled_from(
    [WEIGHT, ("models", 1, "parameters", "density"), ("parameters", "lambda"), ("parameters", "delta_scale")]
)


@pytest.mark.long
@given(st.dictionaries(paths, values, max_size=4))
def test_what_is_written_is_shown(changes: dict[draft.Path, Any]) -> None:
    controls = by_path(changed(COMBINE, changes))
    for path, value in changes.items():
        shown = controls[path].value
        assert shown == pytest.approx(tuple(value) if isinstance(value, list) else value, rel=1e-5)
        assert not controls[path].held


@pytest.mark.parametrize("value", [None, {"a": 1}, [1], [1] * 99, ["x", "y"], float("nan"), [0.0, float("inf")], object()])
def test_what_no_control_writes_is_left_out(value: Any) -> None:
    assert changed(COMBINE, {WEIGHT: value}) == COMBINE


@pytest.mark.parametrize(
    "path", [("merge_method",), ("base_model",), ("models", 0, "model"), ("models", 9, "parameters", "weight"), ()]
)
def test_only_parameters_are_written(path: draft.Path) -> None:
    assert changed(COMBINE, {path: "/etc/passwd"}) == COMBINE


def test_another_method_keeps_what_both_have_and_all_other_keys() -> None:
    text = changed(COMBINE, {WEIGHT: 0.3}) + "tokenizer_source: union # both\n"
    text = step(step(step(text, "method", "dare_linear"), "add", "./py"), "remove", DE)
    assert yaml.safe_load(text) == {
        "merge_method": "dare_linear",
        "base_model": "./base",
        "models": [{"model": FR, "parameters": {"weight": 0.3}}, {"model": "./py", "parameters": {"weight": 1.0}}],
        "parameters": {"density": 0.5, "lambda": 1.0},
        "dtype": "bfloat16",
        "tokenizer_source": "union",
    }
    assert "share of each model's changes" in text
    assert text.endswith("tokenizer_source: union # both\n")
    text = step(text, "method", "slerp")
    assert yaml.safe_load(text)["parameters"] == {"t": 0.5}
    assert step(text, "method", "../evil.py:f") == text


def test_models_come_and_go_on_an_empty_page_and_on_another_base() -> None:
    text = step(step(step("", "add", FR), "base", "./base"), "add", DE)
    assert (draft.read(text).base, draft.read(text).models) == ("./base", (FR, DE))
    assert step(text, "add", FR) == text
    assert step(text, "remove", "./none") == text

    def on_base(model: str, base: str) -> str:
        return f"{base}+{model}" if model == "./lora" else model

    text = draft.edited(text, {"kind": "add", "name": "./lora"}, on_base)
    assert draft.read(text).models == (FR, DE, "./base+./lora")
    text = draft.edited(text, {"kind": "base", "name": "./new"}, on_base)
    assert (draft.read(text).base, draft.read(text).models) == ("./new", (FR, DE, "./new+./lora"))
    for name in (FR, DE, "./new+./lora"):
        text = step(text, "remove", name)
    assert draft.read(text).models == ()
    assert draft.NO_MODEL in text


def test_a_moved_model_keeps_its_values_and_an_old_edit_finds_it() -> None:
    text = changed(COMBINE, {WEIGHT: 0.25})
    text = draft.edited(text, {"kind": "move", "name": FR, "after": DE})
    assert draft.read(text).models == (DE, FR)
    assert draft.edited(text, {"kind": "move", "name": FR, "after": DE}) == text, "pressed twice before it is seen"
    assert draft.read(draft.edited(text, {"kind": "move", "name": FR, "before": DE})).models == (FR, DE)
    based = step(COMBINE, "method", "model_stock").replace("models:\n", "models:\n  - model: ./base\n")
    moved = yaml.safe_load(draft.edited(based, {"kind": "move", "name": FR, "after": DE}))["models"]
    assert [entry["model"] for entry in moved] == ["./base", DE, FR]
    text = draft.edited(text, {"kind": "set", "path": list(WEIGHT), "model": FR, "value": 0.75})  # of before it was moved
    assert yaml.safe_load(text)["models"] == [
        {"model": DE, "parameters": {"weight": 1.0}},
        {"model": FR, "parameters": {"weight": 0.75}},
    ]
    assert draft.edited(text, {"kind": "set", "path": list(WEIGHT), "model": "./gone", "value": 0.1}) == text


def test_numbers_by_part() -> None:
    parts = [{"filter": "self_attn", "value": 0.3}, {"value": 0.5}]
    text = changed(COMBINE, {WEIGHT: parts})
    assert load(text).problems == ()
    assert by_path(text)[WEIGHT].parts == (("self_attn", 0.3), ("", 0.5))
    assert by_path(changed(text, {WEIGHT: 0.5}))[WEIGHT].value == 0.5


def test_slices_are_blocks_that_move() -> None:
    slices = "merge_method: passthrough\nslices:\n" + "".join(
        f"  # part {i}\n  - sources:\n      - {{model: a, layer_range: [{i}, {i + 2}]}}\n" for i in range(3)
    )
    assert [block.words for block in draft.read(slices).blocks] == [f"a layers {i} to {i + 2}" for i in range(3)]
    last = {"place": 2, "words": "a layers 2 to 4", "count": 3}
    text = draft.edited(slices, {"kind": "move", **last, "end": 0})
    assert [block.words for block in draft.read(text).blocks] == [f"a layers {i} to {i + 2}" for i in (2, 0, 1)]
    assert text.index("# part 2") < text.index("# part 0") < text.index("# part 1")
    assert draft.edited(text, {"kind": "move", **last, "end": 0}) == text, "pressed twice before it is seen"
    first = {"place": 0, "words": "a layers 2 to 4", "count": 3}
    fewer = draft.edited(text, {"kind": "drop", **first})
    assert [block.words for block in draft.read(fewer).blocks] == ["a layers 0 to 2", "a layers 1 to 3"]
    for wrong in ({"count": 4}, {"words": "x"}, {"place": 3}, {"place": -1}, {"place": True}, {"end": "1"}, {"end": 9}):
        assert draft.edited(text, {"kind": "move", **first, "end": 1, **wrong}) == text
    assert draft.edited(fewer, {"kind": "drop", **first}) == fewer, "pressed twice before it is seen"


@pytest.mark.parametrize(
    "edit",
    [
        {},
        {"kind": None},
        {"kind": "set"},
        {"kind": "set", "path": 3, "model": "", "value": 1},
        {"kind": "set", "path": [{}], "model": "", "value": 1},
        {"kind": "set", "path": ["merge_method"], "model": "", "value": "x.py:f"},
        {"kind": "set", "path": [], "model": "./fr", "value": 1},
        {"kind": "set", "path": list(WEIGHT), "model": "./fr", "value": [{"filter": 3, "value": 1}]},
        {"kind": "set", "path": list(WEIGHT), "model": "./fr", "value": [{"filter": "a", "value": float("inf")}]},
        {"kind": "text", "text": "x"},
        {"kind": "goal", "name": "experts"},
        {"kind": "add", "name": ""},
        {"kind": "add", "name": 3},
        {"kind": "add", "name": "a\nb"},
        {"kind": "base", "name": "x" * 2000},
        {"kind": "move", "name": FR},
        {"kind": "move", "name": FR, "after": "./none"},
        {"kind": "move", "name": "./none", "before": FR},
        {"kind": "move", "name": FR, "before": FR},
        {"kind": "move", "name": [], "before": FR},
        {"kind": "move", "place": 0, "end": 1},
        {"kind": "drop", "place": -1},
        {"kind": "exec", "name": "x"},
    ],
)
def test_edits_that_no_control_makes_change_nothing(edit: dict[str, Any]) -> None:
    assert draft.edited(COMBINE, edit) == COMBINE


@pytest.mark.slow
def test_what_controls_cannot_show_is_said() -> None:
    slerp = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\n"
    filters = slerp + "parameters:\n  t:\n  - {filter: mlp, value: [0, 1]}\n  - {value: 0.5}\n"
    assert by_path(filters)["parameters", "t"].held == "set by filters in the recipe"
    for value in ("null", "x", "[0]", "[x, 1]", "{ema: 0.5}"):
        assert by_path(slerp + f"parameters: {{t: {value}}}\n")["parameters", "t"].held
    slices = "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 2]}]}]\n"
    assert "as text" in draft.read(slices).held
    slip = draft.read(slerp.replace("slerp", "slurp"))
    assert (slip.base, slip.models, slip.held) == ("a", ("b",), "There is no method 'slurp'.")
    for broken in (
        "",
        "merge_method: [",
        "merge_method: none\nmodels: [{model: a}]",
        "/etc/passwd",
        "a: &a [*a]\n",
        "x" * 200_000,
    ):
        assert draft.read(broken).held
        assert changed(broken, {WEIGHT: 1}) in (broken, draft.as_text(broken))


@pytest.mark.long
def test_many_models_are_edited_as_text_alone() -> None:
    text = draft.begin("combine", "./base", [f"./{i}" for i in range(draft.MAX_MODELS)])
    assert len(draft.read(text).models) == draft.MAX_MODELS
    assert draft.read(step(text, "method", "slerp")).method == "slerp"
    longer = step(text, "add", "./more")
    assert f"up to {draft.MAX_MODELS} models" in draft.read(longer).held
    assert step(longer, "method", "slerp") == step(longer, "add", "./one") == longer


BOMB = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(30))


@pytest.mark.parametrize(
    "text",
    [
        f"name: first\n{COMBINE}---\n{COMBINE}",
        COMBINE.replace("parameters: {weight: 1.0}", "parameters: &p {weight: 1.0}", 1).replace(
            "parameters: {weight: 1.0}", "parameters: *p"
        ),
        f"a0: &a0 x\n{BOMB}{COMBINE}",
        "- a\n",
    ],
)
@pytest.mark.parametrize(
    "edit",
    [
        {"kind": "method", "name": "slerp"},
        {"kind": "base", "name": "./new"},
        {"kind": "add", "name": "./new"},
        {"kind": "remove", "name": FR},
        {"kind": "move", "name": FR, "after": DE},
        {"kind": "drop", "place": 0, "words": "no source", "count": 1},
        {"kind": "set", "path": list(WEIGHT), "model": FR, "value": 0.5},
    ],
)
def test_several_documents_and_aliases_are_edited_as_text_alone(text: str, edit: dict[str, Any]) -> None:
    assert draft.edited(text, edit) == text
    assert draft.read(text).held
    assert draft.edited(text, {"kind": "text", "base": text, "text": f"{text}# more\n"}) == f"{text}# more\n"
