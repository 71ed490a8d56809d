"""Whatever the text, parse() returns; whatever it returns holds together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.recipe_help import parse
from weightsmith._base.errors import WeightsmithError
from weightsmith._planning.recipe import load
from weightsmith._planning.recipe.grammar import LEVELS

KEYS = sorted({name for level in LEVELS for name in level.names} | {"weight", "t", "revision", "<<", "on", "x-1", "zzz"})
SCALARS = ["a", "org/b@v", "c+d", "0.5", "1e-5", "8", "-1", ".nan", "true", "~", "", "bfloat16", "ties",
           "[", "]", "*x", "&x", "!!int", "'", '"', "|", "2024-01-01", "0x", "1:2", "=", "{", "}",
           "-", "?", "%", "@", "\\", "\t"]  # fmt: skip
lines = st.builds(
    lambda indent, dash, key, value: f"{' ' * indent}{'- ' if dash else ''}{key}{value}",
    st.integers(0, 8),
    st.booleans(),
    st.one_of(st.just(""), st.sampled_from(KEYS).map(lambda k: k + ": ")),
    st.lists(st.sampled_from(SCALARS), max_size=3).map(" ".join),
)
RECIPES = (
    """\
merge_method: ties
base_model: &b org/base
models:
  - model: *b
  - model: org/a@v1
    parameters:
      weight: [0, 1]
      t:
        - {filter: mlp, value: 0.5}
        - value: 1
dtype: bfloat16
""",
    """\
merge_method: passthrough
slices:
  - sources:
      - model: {model: {path: a, revision: v}}
        layer_range: [0, 8]
        parameters: {weight: 1}
    base_model: b
modules:
  m:
    models:
      - model: a
""",
)


@st.composite
def almost_recipes(draw: st.DrawFn) -> str:
    """A recipe with a few of its lines removed, moved in or out, written twice, or replaced."""
    text = draw(st.sampled_from(RECIPES)).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(text) - 1))
        change = draw(st.sampled_from(["remove", "indent", "outdent", "double", "replace", "value"]))
        if change == "remove" and len(text) > 1:
            del text[i]
        elif change == "indent":
            text[i] = "  " + text[i]
        elif change == "outdent":
            text[i] = text[i].removeprefix("  ")
        elif change == "double":
            text.insert(i, text[i])
        elif change == "replace":
            text[i] = draw(lines)
        elif change == "value":
            text[i] = text[i].partition(": ")[0].rstrip(":") + ": " + draw(st.sampled_from(SCALARS))
    return "\n".join(text)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["a", "ties", "b@v", "", "é"]))
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.integers(0, 3)), inner, max_size=5),
    ),
    max_leaves=30,
)


def check(text: str) -> None:
    for lenient in (False, True):
        recipe, problems = parse(text, "r.yml", lenient=lenient, parameter_names=("weight", "t"))
        assert recipe is not None or problems
        for problem in problems:
            assert isinstance(problem, WeightsmithError)
            name, line, column = problem.finding.where.split(":")
            assert (name, int(line) >= 1, int(column) >= 1) == ("r.yml", True, True)
            str(problem).encode()
        if recipe is not None:
            assert bool(recipe.models) + bool(recipe.slices) + bool(recipe.modules) == 1
            for finding in recipe.findings:
                str(finding).encode()


@pytest.mark.long
@given(st.text())
@example('"\\UFFFFFFFF"')
@example("%YAML 1." + "9" * 5000 + "\n--- a")
@example("a: 1" + "0" * 5000)
@example("a: 0x_")
@example("a: !!timestamp 2024-13-45")
@example("a: !!binary ''")
@example("\x00")
@example("\ufeff\ufeffa: 1")
@example("---\n" * 3)
@example("a: &a\nb: *a\n? *a\n: c")
@example("{" * 5000)
@example("- " * 5000)
@settings(max_examples=50, deadline=None)
def test_any_text_gives_problems_and_never_an_exception(text: str) -> None:
    check(text)


@pytest.mark.long
@given(almost_recipes())
@settings(max_examples=80, deadline=None)
def test_almost_a_recipe_gives_problems_and_never_an_exception(text: str) -> None:
    check(text)


@pytest.mark.long
@given(trees)
@settings(max_examples=50, deadline=None)
def test_any_yaml_tree_gives_problems_and_never_an_exception(tree: Any) -> None:
    check(yaml.safe_dump(tree, allow_unicode=True))


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(KEYS), trees, max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_python_mapping_gives_problems_and_never_an_exception(tree: dict[str, Any]) -> None:
    loaded = load(tree, parameter_names=("weight", "t"))
    recipe, problems = loaded.recipe, loaded.problems
    assert recipe is not None or problems
    assert all(isinstance(p, WeightsmithError) for p in problems)
