"""Parameters from signatures: of weightsmith's methods and of the user's. And the example of docs/adding-a-method.md."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli, cli, make_models, work
from weightsmith import PerModel, block_method
from weightsmith import _methods as methods
from weightsmith._base.errors import MethodError, PlanError
from weightsmith._methods.family import check_probabilities
from weightsmith._methods.method import Booleans, Bounds, Ignored, Parameter, bound, merge_method, parameters_of, values
from weightsmith._methods.user import at_hand
from weightsmith.abc.job import Job, Matrix

__all__ = ["cli", "work"]

PAGES = Path(__file__).parents[2] / "docs"
Share = Annotated[PerModel[float], "A share.", Bounds(0.0, 1.0)]


def blocks(page: str) -> list[str]:
    """The Python of a page, as written."""
    return re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# ---- signatures


def described(function: Any) -> dict[str, Parameter]:
    return {p.name: p for p in parameters_of(function, skip=("matrix",))}


def test_annotations_say_documentation_bounds_and_choices() -> None:
    def f(
        matrix: Any,
        a: Share,
        b: PerModel[Annotated[int, "Inside."]] = 2,
        c: Annotated[Literal["x", "y"], "Of two.", Booleans("x", "y")] = "x",
        d: Annotated[float | None, Bounds(1)] = None,
        e: Annotated[bool, "For others.", Ignored("it is so")] = False,
        lambda_: PerModel[float | None] = None,
    ) -> None: ...

    assert described(f) == {
        "a": Parameter("a", "float", "A share.", "model", None, 0.0, 1.0),
        "b": Parameter("b", "int", "Inside.", "model", 2),
        "c": Parameter("c", "str", "Of two.", "tensor", "x", choices=("x", "y"), booleans=("x", "y")),
        "d": Parameter("d", "float", "", "tensor", None, 1, optional=True),
        "e": Parameter("e", "bool", "For others.", "tensor", False, ignored="it is so"),
        "lambda": Parameter("lambda", "float", "", "model", None, optional=True),
    }


def test_what_a_function_is_called_with() -> None:
    def f(w: PerModel[float], n: PerModel[int] = 3, s: PerModel[float | None] = None, lambda_: float = 0.5) -> None: ...

    per_model = [{"w": 1, "n": 2, "s": None}, {"w": 0.25, "n": 4, "s": 2.0}]
    got = values(parameters_of(f, skip=()), {"spectrum": "none"}, per_model)
    assert list(got) == ["w", "n", "s", "lambda_"]  # and not the parameters of the steps after it
    assert (got["w"].dtype, got["w"].tolist()) == (np.float64, [1, 0.25])
    assert (got["n"].dtype, got["n"].tolist()) == (np.int64, [2, 4])
    assert (got["s"], got["lambda_"]) == ((None, 2.0), 0.5)


def numbers(matrix: Any, t: Literal[1, 2]) -> None: ...
def outside(matrix: Any, t: Literal["a", "b"] = "c") -> None: ...  # type: ignore[assignment]
def late(matrix: Any, t: PerModel[float] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (numbers, "the parameter 't' of numbers has the type Literal[1, 2]"),
        (outside, "the default 'c' of the parameter 't' of outside is not one of a, b"),
        (late, "the parameter 't' of late has the type PerModel[float] | None"),
    ],
)
def test_signatures_that_are_wrong(function: Any, message: str) -> None:
    with pytest.raises(MethodError) as caught:
        described(function)
    assert str(caught.value).startswith(message)


def test_a_rule_can_only_ask_for_parameters_of_the_method() -> None:
    def f(matrix: Any, t: float) -> None: ...

    with pytest.raises(MethodError, match="has the argument 'u', which is not a parameter of the method"):
        bound(lambda u: u > 0, parameters_of(f, skip=("matrix",)))


@pytest.mark.parametrize(
    ("density", "epsilon", "fits"), [(0.3, 0.29, 1), (0.3, 0.3, 0), (0.8, 0.19, 1), (0.8, 0.2, 0), (1, 0.5, 1)]
)
def test_probabilities_are_between_0_and_1(density: float, epsilon: float, fits: bool) -> None:
    reason = check_probabilities([0.5, density], [0.1, epsilon])
    limit = f"they must lie between 0 and 1: use an epsilon below {min(density, round(1 - density, 9)):g}"
    assert reason.endswith("" if fits else limit)
    assert bool(reason) != fits


def test_rules_get_typed_values() -> None:
    seen: list[Any] = []

    def look(**options: Any) -> bool:
        seen.append({name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in options.items()})
        return True

    texts = dict.fromkeys(("title", "summary", "use", "passes", "source", "formula", "example"), "text")

    @merge_method(
        **texts,
        family="average",
        check=lambda w, t: str(look(w=w, t=t)),
        copies=lambda w: look(w=w),
        needs=lambda t: look(t=t),
        keeps_base=lambda role, t: look(role=role, t=t),
        elementwise=lambda t: look(t=t),
    )
    def some(matrix: Matrix, w: PerModel[float] = 1.0, t: int = 3, weight: PerModel[float] = 1.0) -> Job:
        raise AssertionError("not called")

    assert (some.name, some.base, some.min_models, some.max_models) == ("some", "required", 1, None)
    assert some.check({"t": 5}, [{}, {"w": 2.0}, {"w": 4.0}]) == "True"  # the base has no place
    assert some.copies([{"w": 2.0}])
    assert some.needs({"t": 5})
    assert some.keeps_base({"t": 5}, "vocabulary")
    assert some.elementwise({"t": 5})
    assert seen == [{"w": [2.0, 4.0], "t": 5}, {"w": [2.0]}, {"t": 5}, {"role": "vocabulary", "t": 5}, {"t": 5}]
    assert [some.ignored(parameters) for parameters in ({}, {"w": 0.0, "weight": 1.0}, {"weight": 0.0})] == [False, False, True]


def test_bounds_and_choices_of_an_own_method_are_checked() -> None:
    scope: dict[str, Any] = {}
    exec(compile(next(b for b in blocks("own-method.md") if "def limited" in b), "page", "exec"), scope)
    base, a = {"w": np.float32([1, 1, 1])}, {"w": np.float32([1.25, 5, 1])}

    def run(**options: Any) -> list[float]:
        merged: list[float] = weightsmith.merge_state_dicts(scope["limited"], [a], base=base, limit=0.5, **options)[
            "w"
        ].tolist()
        return merged

    assert run() == [1.25, 1.5, 1]
    assert run(how="drop") == [1.25, 1, 1]
    with pytest.raises(PlanError, match="how: must be one of cut, drop"):
        run(how="cat")
    with pytest.raises(PlanError, match="limit: must be at least 0, not -1"):
        weightsmith.merge_state_dicts(scope["limited"], [a], base=base, limit=-1)
    with at_hand(scope["limited"]) as method:
        assert {p.name: p.doc for p in method.parameters}["limit"] == "How far an element moves at most."


def test_the_default_of_a_parameter_of_each_model_is_the_value_of_all() -> None:
    @block_method
    def f(models: Any, out: Any, w: PerModel[float] = 0.5) -> None:
        assert len(w) == 2
        out[:] = w @ models

    assert weightsmith.merge_state_dicts(f, [{"w": np.float32([2])}, {"w": np.float32([4])}])["w"] == 3


# ---- the page


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The file of docs/adding-a-method.md."""
    file = tmp_path / "unit_mean.py"
    file.write_text(blocks("adding-a-method.md")[0], encoding="utf-8")
    return file


RECIPE = """merge_method: ./unit_mean.py:unit_mean
models:
  - {model: a, parameters: {weight: 1.0}}
  - {model: b, parameters: {weight: 3.0}}
parameters: {power: 0.5}
"""


def test_the_example_of_the_page_merges_as_its_formula_says(example: Path) -> None:
    arrays = {"a": np.float32([[3, 4], [0, 0]]), "b": np.float32([[0, 0], [6, 8]])}
    models = [{"w": a} for a in arrays.values()]
    scope: dict[str, Any] = {"__name__": "unit_mean"}
    exec(compile(example.read_text(), str(example), "exec"), scope)
    with at_hand(scope["unit_mean"]) as method:
        assert [p.name for p in method.parameters] == ["weight", "power"]
    got = weightsmith.merge_state_dicts(scope["unit_mean"], models, weight=[1.0, 3.0], power=0.5)["w"]
    a, b = (array.astype(np.float64) for array in arrays.values())
    mean = (np.linalg.norm(a) + np.linalg.norm(b)) / 2
    expected = 0.25 * a * (mean / np.linalg.norm(a)) ** 0.5 + 0.75 * b * (mean / np.linalg.norm(b)) ** 0.5
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_example_of_the_page_runs_from_a_recipe_that_names_its_file(example: Path, work: Path, cli: Cli) -> None:
    make_models(work)
    (work / "unit_mean.py").write_bytes(example.read_bytes())
    (work / "r.yml").write_text(RECIPE)
    plan = weightsmith.plan("r.yml", allow_code=True)
    assert {step.op.partition("@")[0] for step in plan.steps if step.merges} == {"./unit_mean.py:unit_mean"}
    assert cli("merge", "r.yml", "out", "--allow-code").code == 0
    (work / "r.yml").write_text(RECIPE.replace("0.5", "1.5").replace("1.0", "0").replace("3.0", "0"))
    with pytest.raises(PlanError, match=r"power must be at most 1, not 1.5"):
        weightsmith.plan("r.yml", allow_code=True)
    (work / "r.yml").write_text(RECIPE.replace("1.0", "0").replace("3.0", "0"))
    with pytest.raises(PlanError, match="all weights are 0"):
        weightsmith.plan("r.yml", allow_code=True)


def test_the_example_becomes_a_method_of_weightsmiths_by_its_file_and_its_name(
    example: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    module = load(example, "weightsmith._methods.unit_mean")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(methods, "NAMES", (*methods.NAMES, "unit_mean"))
    shown = cli("methods", "unit_mean").out
    assert shown.startswith("unit_mean: average at one length")
    assert re.search(
        r"power: number 0 to 1; default 1.0; for the merge\s+0: lengths stay as they are; 1: all are the same.", shown
    )
    assert doctest.testmod(module) == (0, 1)


def load(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_method_is_of_a_family_that_lists_know() -> None:
    texts = dict.fromkeys(("title", "summary", "use", "passes", "source", "formula", "example"), "text")
    with pytest.raises(MethodError) as caught:
        merge_method(**texts, family="sparce")  # type: ignore[arg-type]
    assert str(caught.value).startswith("'sparce' is no family of methods (did you mean 'sparse'?)")
