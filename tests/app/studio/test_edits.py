"""Edits in place: the text holds what was wanted, and all that an edit does not concern stays as it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._app.studio import edits

RECIPE = """# head
merge_method: ties # how
base_model: a    # base
models:
  # the first
  - model: b
    parameters: {weight: 1.0, density: 0.5}    # its share
  # the second
  - model: c
    parameters:
      weight: 0.5   # half
      density: 0.9
  - model: d
parameters:
  density: 0.5   # keep
  lambda: 1.0
dtype: bfloat16
"""


def test_a_value_is_replaced_or_added() -> None:
    assert edits.put(RECIPE, ("parameters", "lambda"), 0.25) == RECIPE.replace("lambda: 1.0", "lambda: 0.25")
    assert edits.put(RECIPE, ("parameters", "t"), [0, 1]) == RECIPE.replace("lambda: 1.0\n", "lambda: 1.0\n  t: [0, 1]\n")
    expected = RECIPE.replace("  - model: d\n", "  - model: d\n    parameters: {weight: 2}\n")
    assert edits.put(RECIPE, ("models", 2, "parameters", "weight"), 2) == expected
    assert edits.put(RECIPE, ("dtype",), "bfloat16") == RECIPE


def test_a_key_goes_with_its_line() -> None:
    assert edits.removed(RECIPE, ("parameters", "density")) == RECIPE.replace("  density: 0.5   # keep\n", "")
    assert edits.removed(RECIPE, ("models", 0, "parameters", "weight")) == RECIPE.replace("weight: 1.0, ", "")
    assert edits.removed(RECIPE, ("nothing",)) == RECIPE
    bare = edits.removed(edits.removed(RECIPE, ("parameters", "density")), ("parameters", "lambda"))
    assert bare == RECIPE.replace("parameters:\n  density: 0.5   # keep\n  lambda: 1.0\n", "")


def test_an_item_goes_and_moves_with_the_comments_above_it() -> None:
    gone = edits.removed(RECIPE, ("models", 1))
    assert "second" not in gone
    assert "# the first\n  - model: b" in gone
    moved = edits.moved(RECIPE, ("models",), 1, 0)
    assert moved.index("# the second\n  - model: c") < moved.index("# the first\n  - model: b") < moved.index("- model: d")
    assert edits.moved(moved, ("models",), 0, 1) == RECIPE
    for start, end in ((0, 0), (-1, 1), (0, 3), (5, 0)):
        assert edits.moved(RECIPE, ("models",), start, end) == RECIPE


def test_an_item_is_added() -> None:
    text = edits.inserted(RECIPE, ("models",), {"model": "e", "parameters": {"weight": 1.0}})
    assert text == RECIPE.replace("  - model: d\n", "  - model: d\n  - model: e\n    parameters: {weight: 1.0}\n")
    assert edits.inserted("models: [{model: a}]\n", ("models",), {"model": "b"}) == "models: [{model: a}, {model: b}]\n"


@pytest.mark.parametrize(
    ("base", "current", "mine", "expected"),
    [
        ("a\nb\nc\n", "A\nb\nc\n", "a\nb\nC\n", "A\nb\nC\n"),
        ("a\nb\nc\n", "a\nB\nc\n", "a\nX\nc\n", "a\nX\nc\n"),  # the same line: the last edit wins
        ("a\nb\n", "a\nb\nc\n", "0\na\nb\n", "0\na\nb\nc\n"),
        ("a\nb\n", "a\n", "a\nb\n", "a\n"),
        ("", "x\n", "y\n", "y\n"),
        ("a\nb\nc\nd\n", "b\nc\nd\n", "a\nb\nc\n", "b\nc\n"),
    ],
)
def test_two_edits_of_one_text(base: str, current: str, mine: str, expected: str) -> None:
    assert edits.merged(base, current, mine) == expected


lines = st.lists(st.sampled_from("abcdef"), max_size=8).map(lambda lines: "".join(f"{line}\n" for line in lines))


@pytest.mark.slow
@given(lines, lines)
def test_one_edit_alone_is_that_edit(base: str, mine: str) -> None:
    assert edits.merged(base, base, mine) == mine
    assert edits.merged(base, mine, base) == mine
    assert edits.merged(base, mine, mine) == mine


styles = st.sampled_from([True, False, None])
trees = st.fixed_dictionaries(
    {
        "models": st.lists(
            st.fixed_dictionaries(
                {"model": st.sampled_from(["a", "b/c", "'"]), "parameters": st.fixed_dictionaries({"w": st.floats(0, 1)})}
            ),
            min_size=1,
            max_size=4,
        ),
        "parameters": st.dictionaries(st.sampled_from(["t", "k"]), st.integers(0, 9), min_size=1),
    }
)


@pytest.mark.long
@given(trees, styles, st.data())
def test_any_way_to_write_a_recipe_is_edited_to_what_was_wanted(
    tree: dict[str, Any], style: bool | None, data: st.DataObject
) -> None:
    text = yaml.safe_dump(tree, default_flow_style=style, sort_keys=False)
    start, end = (data.draw(st.integers(0, len(tree["models"]) - 1)) for _ in "ab")
    items = [*tree["models"]]
    items.insert(end, items.pop(start))
    assert yaml.safe_load(edits.moved(text, ("models",), start, end)) == tree | {"models": items}
    assert yaml.safe_load(edits.removed(text, ("models", start))).get("models", []) == [
        entry for i, entry in enumerate(tree["models"]) if i != start
    ]
    new = yaml.safe_load(edits.put(text, ("models", start, "parameters", "w"), [0, 1]))
    assert new["models"][start]["parameters"]["w"] == [0, 1]
    assert yaml.safe_load(edits.inserted(text, ("models",), {"model": "new"}))["models"] == [*tree["models"], {"model": "new"}]


def test_long_texts_are_merged_in_bounded_time() -> None:
    """Work that grows with their square takes hours: pytest ends it."""
    same = "a\n" * 40_000
    assert edits.merged(same, f"b\n{same}", f"{same}c\n") == f"{same}c\n"  # too long to compare: the last edit wins
    numbered = "".join(f"{i}\n" for i in range(40_000))
    merged = edits.merged(numbered, numbered.replace("20000\n", "x\n"), numbered.replace("20010\n", "y\n"))
    assert merged == numbered.replace("20000\n", "x\n").replace("20010\n", "y\n")


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "a: 1\n---\nb: 2\n",
        "a: &a [1]\nb: *a\n",
        "- a\n",
        "a: [",
        "x",
        pytest.param("a: " + "[" * 3000 + "]" * 3000, marks=pytest.mark.slow),
        "%TAG ! x\n",
    ],
)
def test_what_is_not_one_plain_document_is_not_edited(text: str) -> None:
    assert not edits.can_edit(text)
    assert edits.can_edit("a: 1 # one\nb: [x]\n")


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        ("w: 1 # x\n", lambda text: edits.put(text, ("w",), 0.00001), "w: 0.00001 # x\n"),
        ("w: 1 # x\n", lambda text: edits.put(text, ("w",), 0.1234567), "w: 0.123457 # x\n"),
        ("w: 1 # x\n", lambda text: edits.put(text, ("w",), 1e16), "w: 10000000000000000.0 # x\n"),
        ("w: 1 # x\n", lambda text: edits.put(text, ("w",), [1e-7, 1]), "w: [0.0000001, 1] # x\n"),
        ("w: # x\nz: 1\n", lambda text: edits.put(text, ("w",), 0.5), "w: 0.5 # x\nz: 1\n"),
        ("p: # x\nz: 1\n", lambda text: edits.put(text, ("p", "w"), 0.5), "p: {w: 0.5} # x\nz: 1\n"),
        ("p: {a: 1,} # x\n", lambda text: edits.put(text, ("p", "w"), 0.5), "p: {a: 1, w: 0.5,} # x\n"),
        ("m: [\n  {a: 1}, # x\n]\n", lambda text: edits.inserted(text, ("m",), {"b": 2}), "m: [\n  {a: 1}, {b: 2}, # x\n]\n"),
        ("m: [a, # x\n  b, # y\n  c]\n", lambda text: edits.removed(text, ("m", 2)), "m: [a, # x\n  b]\n"),
        ("m: [a, # x\n  b, # y\n  c]\n", lambda text: edits.removed(text, ("m", 0)), "m: [b, # y\n  c]\n"),
        ("m: [a, # x\n  b, # y\n  c]\n", lambda text: edits.moved(text, ("m",), 2, 0), "m: [c, # x\n  a, # y\n  b]\n"),
        ("m: {a: 1, # x\n  b: 2}\n", lambda text: edits.removed(text, ("m", "b")), "m: {a: 1}\n"),
        ("m:\n-\n  # a - b\n  k: 1\n- k: 2\n", lambda text: edits.moved(text, ("m",), 1, 0),
         "m:\n- k: 2\n-\n  # a - b\n  k: 1\n"),
        ("m: []  # x\n", lambda text: edits.inserted(text, ("m",), {"b": 2}), "m: [{b: 2}]  # x\n"),
    ],
)  # fmt: skip
def test_unusual_layouts_are_edited_in_place(before: str, edit: Callable[[str], str], after: str) -> None:
    assert edit(before) == after
