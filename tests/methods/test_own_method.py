"""Merge methods of the user's own: both forms, where they come from, what is refused, and what is said when they fail."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightsmith
from tests.cases.case import f64, fine_tunes
from tests.cli_help import Cli, cli, make_models, run_process, work
from tests.mini import run_method, write_checkpoint
from tests.plan_help import only, problems
from tests.plugin_help import installed
from tests.test_docs import blocks_of, sessions
from weightsmith import PerModel, block_method, tensor_method
from weightsmith import _methods as methods
from weightsmith._base.errors import CannotResume, MethodError, NonFinite, PlanError, UnknownName
from weightsmith._base.tensors import DTYPES
from weightsmith._methods.user import OwnMethod, at_hand, load_file, method_of
from weightsmith._plans import plan_from_json

__all__ = ["cli", "work"]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_method"
PAGE = ROOT / "docs" / "own-method.md"

HALF = """
from weightsmith import block_method, tensor_method

@block_method
def half(models, out, share: float = 0.5):
    out[:] = share * models[0] + (1 - share) * models[1]

def plain(models, out):
    pass

@block_method
def broken(models, out):
    out[:] = 1
    raise ValueError("no such luck")
"""
RECIPE = """merge_method: ./half.py:half
models:
  - model: a
  - model: b
parameters: {share: 0.25}
"""


@pytest.fixture
def project(work: Path) -> Path:
    """The models `a` and `b`, and in another folder the recipe `sub/half.yml` with its code."""
    (work / "sub").mkdir()
    (work / "sub" / "half.py").write_text(HALF)
    (work / "sub" / "half.yml").write_text(RECIPE)
    return work


def read(path: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(path) as model:
        return {name: model.read(name) for name in model.specs}


def merged(function: Any, arrays: list[np.ndarray], folder: Path, **how: Any) -> np.ndarray:
    """One tensor through the engine; `shared` and `models` are resolved parameters."""
    how = {"shared": {}, "models": [{}] * len(arrays), **how}
    with at_hand(function) as method:
        return run_method(folder, method.name, arrays, **how)


# ---- a function that a Python recipe holds


@block_method
def mean(models, base, out, weight: PerModel[float] = 1.0):  # type: ignore[no-untyped-def]
    out[:] = base + 0.5 * (weight @ (models - base))


def holding(method: object) -> dict[str, Any]:
    return {"merge_method": method, "base_model": "a", "models": [{"model": "b"}]}


@pytest.mark.long
def test_a_recipe_may_hold_the_function_itself(project: Path) -> None:
    weightsmith.merge(holding(mean), "out", progress=False)
    task = {"merge_method": "task_arithmetic", "base_model": "a", "models": [{"model": "b", "parameters": {"weight": 0.5}}]}
    weightsmith.merge(task, "expected", progress=False)
    for name, expected in read(project / "expected").items():
        np.testing.assert_array_equal(read(project / "out")[name], expected)
    assert weightsmith.plan(holding(mean)).provenance.name == weightsmith.plan(holding(mean)).provenance.name
    staged = weightsmith.plan([{"name": "first", **holding(mean)}, {**holding(mean), "models": [{"model": "first"}]}])
    assert staged.provenance.name.startswith("mean@")


@pytest.mark.long
def test_its_plan_runs_in_this_process_alone(project: Path) -> None:
    plan = weightsmith.plan(holding(mean))
    weightsmith.run(plan, "out", progress=False)
    weightsmith.merge(holding(mean), "expected", progress=False)
    assert (project / "out/model.safetensors").read_bytes() == (project / "expected/model.safetensors").read_bytes()
    Path("plan.json").write_text(json.dumps(plan.to_json()))
    ran = run_process("run", "plan.json", "again", fresh=True)
    assert ran.code == 1
    assert "merge_method mean is a function of the Python process that made the plan" in ran.err
    assert "./my_method.py:mean" in ran.err
    ran = run_process("plan", "out/recipe.yml", fresh=True)
    assert ran.code == 1
    assert re.search(r"merge_method mean@\w{16} was a function of another Python process", ran.err)


@pytest.mark.parametrize("method", [lambda models, out: None, np.ones(2), object()])
def test_what_is_no_merge_method_is_one_error(project: Path, method: object) -> None:
    (problem,) = problems(holding(method))
    assert isinstance(problem, MethodError)
    assert problem.finding.where == "merge_method"
    assert "not a merge method\n  -> Write @weightsmith.block_method or @weightsmith.tensor_method" in str(problem)


# ---- a file that a recipe names


def test_a_recipe_merges_with_the_function_of_a_file_beside_it(project: Path) -> None:
    weightsmith.merge("sub/half.yml", "out", allow_code=True)
    a, b, out = read(project / "a"), read(project / "b"), read(project / "out")
    for name in a:
        np.testing.assert_array_equal(
            out[name], (0.25 * a[name].astype(float) + 0.75 * b[name].astype(float)).astype(np.float32)
        )


@pytest.mark.parametrize("text", [True, False])
def test_a_recipe_that_is_no_file_starts_from_the_current_folder(project: Path, text: bool) -> None:
    parts: dict[str, Any] = {"merge_method": "./sub/half.py:half", "models": [{"model": "a"}, {"model": "b"}]}
    recipe = json.dumps(parts, indent=1) if text else parts
    assert weightsmith.plan(recipe, allow_code=True).provenance.name.startswith("./sub/half.py:half@")


def test_without_leave_it_is_refused_and_said_what_would_run(project: Path) -> None:
    (project / "sub" / "half.py").write_text("raise SystemExit('it ran')")
    problem = only("sub/half.yml")
    assert isinstance(problem, MethodError)
    assert str(problem) == (
        f"sub/half.yml:1:1: merge_method ./half.py:half would run code: the file {project / 'sub' / 'half.py'}\n"
        "  -> Read that file, and if you trust it add --allow-code (allow_code=True)."
    )


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("./gone.py:half", "the file of the merge method, {folder}/gone.py, cannot be read: no such file"),
        ("./half.py", "merge_method ./half.py names no function\n  -> Write ./half.py:FUNCTION."),
        (
            "./half.py:haf",
            "{folder}/half.py has no function 'haf' (did you mean 'half'?)\n  -> Methods in it: half, broken.",
        ),
        (
            "./half.py:plain",
            "./half.py:plain is a function, not a merge method\n"
            "  -> Write @weightsmith.block_method or @weightsmith.tensor_method above the function.",
        ),
        ("./bad.py:f", "{folder}/bad.py, line 2 cannot be loaded: SyntaxError: "),
        ("./exits.py:f", "{folder}/exits.py cannot be loaded: SystemExit: 3"),
        ("./sign.py:f", "f(models) has no argument 'out'\n  -> Write models, out and perhaps base as its arguments."),
    ],
)
def test_what_is_wrong_with_the_code_is_said_with_its_line_in_the_recipe(project: Path, method: str, message: str) -> None:
    sub = project / "sub"
    (sub / "bad.py").write_text("x = 1\ny = = 2\n")
    (sub / "exits.py").write_text("raise SystemExit(3)")
    (sub / "sign.py").write_text("import weightsmith\n@weightsmith.block_method\ndef f(models): pass\n")
    (sub / "r.yml").write_text(RECIPE.replace("./half.py:half", method))
    problem = only("sub/r.yml", allow_code=True)
    assert isinstance(problem, MethodError)
    assert str(problem).startswith("sub/r.yml:1:1: " + message.format(folder=sub))


def test_parameters_are_checked_as_any_methods(project: Path) -> None:
    (project / "sub" / "half.yml").write_text(RECIPE.replace("share: 0.25", "shore: 0.25"))
    problem = only("sub/half.yml", allow_code=True)
    assert isinstance(problem, UnknownName)
    assert "has no parameter 'shore' (did you mean 'share'?)" in str(problem)


def test_an_unknown_method_still_has_its_nearest_name(project: Path) -> None:
    unknown, parameter = problems(RECIPE.replace("./half.py:half", "tise"))
    assert "no merge method is called 'tise' (did you mean 'ties'?)" in str(unknown)
    assert "no merge method has a parameter 'share'" in str(parameter)
    with pytest.raises(UnknownName, match="Give the function itself in Python"):
        methods.get("./half.py:half")


@pytest.mark.long
def test_other_code_is_another_plan_and_its_hash_is_in_the_manifest(project: Path) -> None:
    before = weightsmith.plan("sub/half.yml", allow_code=True)
    assert weightsmith.plan("sub/half.yml", allow_code=True).hash == before.hash
    assert plan_from_json(before.to_json()) == before

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge("sub/half.yml", "out", allow_code=True, progress=stop)
    (project / "sub" / "half.py").write_text(HALF + "# another\n")
    assert weightsmith.plan("sub/half.yml", allow_code=True).hash != before.hash
    with pytest.raises(CannotResume, match=r"code of \./half\.py:half: changed"):
        weightsmith.merge("sub/half.yml", "out", allow_code=True)
    weightsmith.merge("sub/half.yml", "out", allow_code=True, resume=False)
    code = json.loads((project / "out" / "weightsmith.json").read_text())["merge_method_code"]
    assert code == {"name": "./half.py:half", "sha256": hashlib.sha256((HALF + "# another\n").encode()).hexdigest()}
    assert "merge_method_code" not in json.loads(_linear_manifest(project))


def _linear_manifest(folder: Path) -> str:
    weightsmith.merge("linear.yml", folder / "linear")
    return (folder / "linear" / "weightsmith.json").read_text()


@pytest.mark.long
def test_the_command_line_needs_the_flag_too(project: Path, cli: Cli) -> None:
    ran = cli("merge", "sub/half.yml", "out")
    assert ran.code == 1
    assert "\nerror[method]: sub/half.yml:1:1: merge_method ./half.py:half would run code" in ran.err
    assert cli("plan", "sub/half.yml").code == 1
    assert re.match(r"method   \./half\.py:half@[0-9a-f]{16}\n", cli("plan", "sub/half.yml", "--allow-code").out)
    assert cli("plan", "sub/half.yml", "--allow-code", "--explain", "model.norm.weight").out.count("sub/half.yml:5:21") == 1
    assert cli("merge", "sub/half.yml", "out", "--allow-code", "--quiet").code == 0
    assert "half.py:half" in (project / "out" / "README.md").read_text()


# ---- a package that brings one


@pytest.fixture
def package(tmp_path: Path) -> Any:
    """An installed package with the methods `halves` and `nothing`, and one that cannot be loaded."""
    points = "halves = halves_pkg:half\nnothing = halves_pkg:plain\nlost = halves_pkg:x"
    with installed(tmp_path / "site", points, group="methods", halves_pkg=HALF):
        yield


def test_a_method_of_an_installed_package_needs_no_leave(package: Any, work: Path) -> None:
    plan = weightsmith.plan(RECIPE.replace("./half.py:half", "halves"))
    assert re.fullmatch("halves@[0-9a-f]{16}", plan.provenance.name)
    weightsmith.merge(RECIPE.replace("./half.py:half", "halves"), "out")
    assert "package brought 1.0" in (work / "out" / "README.md").read_text()
    assert "did you mean 'halves'" in str(only(RECIPE.replace("./half.py:half", "halve")))


@pytest.mark.slow
def test_installed_methods_are_listed_and_shown(package: Any, cli: Cli) -> None:
    ran = cli("methods")
    lines = {line.split()[0]: line for part in ran.out.split("\n\n")[:-1] for line in part.splitlines()[1:]}
    assert lines["halves"].endswith("a method of the user's own")
    assert set(lines) == {*methods.NAMES, "halves"}
    assert list(lines).index("halves") == list(lines).index("linear") + 2  # it needs no base, so it is an average
    assert "nothing is a function, not a merge method" in ran.err
    assert "brought 1.0: the merge method lost cannot be loaded" in ran.err
    shown = cli("methods", "halves").out
    assert shown.startswith("halves: ")
    assert "half(models, out, share: float = 0.5)" in shown
    assert "example" not in shown


@pytest.mark.long
def test_the_schema_knows_installed_methods_and_their_parameters(package: Any, cli: Cli) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(cli("schema").out))
    recipe = {"merge_method": "halves", "models": [{"model": "a"}, {"model": "b"}], "parameters": {"share": 0.25}}
    assert validator.is_valid(recipe)
    assert not validator.is_valid(recipe | {"parameters": {"shore": 0.25}})
    assert not validator.is_valid(recipe | {"merge_method": "halve"})


# ---- steps after an own method


@pytest.mark.parametrize("form", ["block", "tensor"])
@pytest.mark.parametrize(
    "steps", [{"delta_scale": 0.5}, {"norm_match": "mean"}, {"spectrum": "flatten", "spectrum_strength": 0.5}], ids=str
)
def test_the_steps_after_a_merge_follow_own_methods_that_need_a_base(form: str, steps: dict[str, Any], tmp_path: Path) -> None:
    """The same function as task_arithmetic's, and so the same result after the same step."""

    def summed(models: Any, base: Any, weight: PerModel[float] = 1.0) -> Any:
        return base + sum(w * (m.astype(np.float64) - base) for w, m in zip(weight, models, strict=True))

    def filled(models: Any, base: Any, out: Any, weight: PerModel[float] = 1.0) -> None:
        out[:] = summed(models, base, weight)

    filled.__annotations__["weight"] = summed.__annotations__["weight"] = PerModel[float]
    custom = block_method(filled) if form == "block" else tensor_method(summed)
    base, *tuned = fine_tunes((40, 30), 2)
    held = [{"mlp.up_proj.weight": a} for a in tuned]
    first = {"mlp.up_proj.weight": base}
    how: dict[str, Any] = {"base": first, "weight": [0.3, 0.9], "out_dtype": "float32", **steps}
    got = weightsmith.merge_state_dicts(custom, held, **how)["mlp.up_proj.weight"]
    expected = weightsmith.merge_state_dicts("task_arithmetic", held, **how)["mlp.up_proj.weight"]
    plain = weightsmith.merge_state_dicts(custom, held, base=first, weight=[0.3, 0.9], out_dtype="float32")[
        "mlp.up_proj.weight"
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)
    assert np.abs(got - plain).max() > 1e-5, "the step changed nothing"


def test_a_parameter_by_the_name_of_a_step_is_the_methods_own(tmp_path: Path) -> None:
    @block_method
    def f(models: Any, base: Any, out: Any, delta_scale: float = 1.0) -> None:
        out[:] = base + 10 * delta_scale * (models[0] - base)

    with at_hand(f) as method:
        assert [p.name for p in method.parameters] == ["delta_scale"]
    got = weightsmith.merge_state_dicts(f, [{"w": np.float32([3])}], base={"w": np.float32([1])}, delta_scale=2.0)
    assert got["w"][0] == 41


def test_methods_of_packages_that_do_not_work(package: Any, work: Path) -> None:
    assert "1:1: nothing is a function, not a merge method" in str(only(RECIPE.replace("./half.py:half", "nothing")))
    lost = str(only(RECIPE.replace("./half.py:half", "lost")))
    assert "brought 1.0: the merge method lost cannot be loaded: AttributeError" in lost


# ---- signatures


def described(function: Any) -> Any:
    return method_of(function, "m", "here")


def test_the_signature_says_the_parameters() -> None:
    @block_method
    def f(
        models: Any,
        base: Any,
        out: Any,
        w: PerModel[float],
        kind: PerModel[str] = "a",
        t: float = 1,
        n: int = 3,
        flag: bool = False,
        lambda_: float = 0.5,
        limit: float | None = None,
    ) -> None:
        """Does things.

        And more."""

    description = described(f)
    assert (description.base, description.title, description.min_models, description.max_models) == (
        "required",
        "Does things",
        1,
        None,
    )
    shown = [(p.name, p.kind, p.scope, p.default, p.required) for p in description.parameters]
    assert shown == [
        ("w", "float", "model", None, True),
        ("kind", "str", "model", "a", False),
        ("t", "float", "tensor", 1.0, False),
        ("n", "int", "tensor", 3, False),
        ("flag", "bool", "tensor", False, False),
        ("lambda", "float", "tensor", 0.5, False),
        ("limit", "float", "tensor", None, False),
    ]


def test_the_place_of_the_base() -> None:
    assert described(block_method(lambda models, out: None)).base == "input"
    assert described(block_method(lambda models, out, base: None)).base == "required"
    assert described(tensor_method(lambda models, base=None: None)).base == "optional"


def none(models: Any, out: Any) -> None: ...
def untyped(models: Any, out: Any, t=1.0) -> None: ...  # type: ignore[no-untyped-def]
def listed(models: Any, out: Any, t: list[float]) -> None: ...
def unknown(models: Any, out: Any, t: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def wrong_default(models: Any, out: Any, t: int = 0.5) -> None: ...  # type: ignore[assignment]
def no_default(models: Any, out: Any, t: float = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013
def starred(models: Any, out: Any, *t: float) -> None: ...
def slashed(models: Any, /, out: Any) -> None: ...
def taken(models: Any, out: Any, seed: int = 0) -> None: ...
def nothing() -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (block_method(untyped), "the parameter 't' of untyped has no type"),
        (block_method(listed), "the parameter 't' of listed has the type list[float]"),
        (block_method(unknown), "the types of unknown's parameters cannot be read: NameError: name 'Nowhere' is not defined"),
        (block_method(wrong_default), "the default 0.5 of the parameter 't' of wrong_default is not of type int"),
        (block_method(no_default), "the default None of the parameter 't' of no_default is no float"),
        (block_method(starred), "the argument '*t: 'float'' of starred cannot be given by name"),
        (block_method(slashed), "the argument 'models: 'Any'' of slashed cannot be given by name"),
        (block_method(taken), "the parameter 'seed' of taken has a name that merge_state_dicts takes"),
        (block_method(nothing), "nothing() -> 'None' has no argument 'models'"),
        (tensor_method(none), "none(models: 'Any', out: 'Any') -> 'None' has an argument 'out'"),
    ],
    ids=lambda value: value.plain.__name__ if isinstance(value, OwnMethod) else "",
)
def test_signatures_that_are_no_methods(function: OwnMethod, message: str) -> None:
    with pytest.raises(MethodError) as caught:
        described(function)
    assert str(caught.value).startswith(message)


# ---- the block form


SHAPES = [(900, 517), (130_001,), (), (3, 40, 30), (2, 150_000)]


def mixed(models: Any, base: Any, out: Any, w: PerModel[float], t: float) -> None:
    """Depends on what is given at a time, so that other tiles would show."""
    out[:] = base + t * w @ (models - base) + 1e-3 * models.mean()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bytes_for_any_tiles_and_threads_whatever_the_function_does(shape: tuple[int, ...], tmp_path: Path) -> None:
    arrays = fine_tunes(shape, 2)
    how = {"shared": {"t": 0.5}, "models": [{}, {"w": 0.3}, {"w": 0.9}], "base": True, "out": DTYPES["BF16"]}
    function = block_method(mixed)
    first = merged(function, arrays, tmp_path / "a", threads=1, tile_bytes=1, **how)
    for threads, tile_bytes in [(4, 1), (3, 300_000), (1, 1 << 30)]:
        again = merged(function, arrays, tmp_path / "b", threads=threads, tile_bytes=tile_bytes, **how)
        assert again.tobytes() == first.tobytes()


@pytest.mark.parametrize("matrices", [1, 3])
def test_what_a_block_function_is_given(matrices: int, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    @block_method
    def look(
        models: Any, base: Any, out: Any, w: PerModel[int], s: PerModel[str], b: PerModel[bool], n: float | None = None
    ) -> None:
        flags = {array.flags.c_contiguous for array in (models, base, out)}
        seen.append(
            (models.shape, base.shape, out.shape, models.dtype.name, w.tolist(), w.dtype.name, s, b.dtype.name, n, flags)
        )
        out[:] = base

    per_model = [{}, {"w": 1, "s": "x", "b": True}, {"w": 2, "s": "y", "b": False}]
    arrays = fine_tunes((3, 40, 30), 2)
    how = {"shared": {"n": None}, "models": per_model, "base": True, "matrices": matrices, "threads": 1}
    merged(look, arrays, tmp_path, out=DTYPES["BF16"], **how)
    arguments = ((2, 1200), (1200,), (1200,), "float32", [1, 2], "int64", ("x", "y"), "bool", None, {True})
    assert seen == [arguments] * 3  # no grain reaches from one of a stack of matrices into the next
    seen.clear()
    merged(look, arrays, tmp_path, out=DTYPES["F32"], **how)
    assert {call[3] for call in seen} == {"float64"}


def test_an_optional_base_may_be_missing(tmp_path: Path) -> None:
    @block_method
    def f(models: Any, out: Any, base: Any = None) -> None:
        out[:] = models[0] if base is None else base

    a, b = fine_tunes((5, 6), 1)
    assert merged(f, [a, b], tmp_path / "a", out=DTYPES["BF16"]).tobytes() == a.tobytes()
    with_base = merged(f, [b, a], tmp_path / "b", out=DTYPES["BF16"], base=True, models=[{}, {}])
    assert with_base.tobytes() == b.tobytes()


def test_failing_functions_are_named_with_the_tensor_and_the_line(project: Path) -> None:
    (project / "sub" / "half.yml").write_text(RECIPE.replace(":half", ":broken").replace("{share: 0.25}", "{}"))
    with pytest.raises(MethodError) as caught:
        weightsmith.merge("sub/half.yml", "out", allow_code=True, threads=1)
    assert str(caught.value) == (
        "output tensor model.embed_tokens.weight: broken raised ValueError: no such luck\n"
        f"  {project / 'sub' / 'half.py'}:14 in broken"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    assert not (project / "out").exists()


def test_a_block_function_fills_out(tmp_path: Path) -> None:
    arrays = fine_tunes((5, 6), 1)
    with pytest.raises(MethodError, match="f returned a value; a block_method fills out and returns nothing"):
        merged(_named(lambda models, out: models[0]), arrays, tmp_path)
    with pytest.raises(NonFinite, match="output tensor w"):
        merged(_named(lambda models, out: None), arrays, tmp_path)


def _named(function: Any) -> OwnMethod:
    function.__name__ = "f"
    return block_method(function)


# ---- the tensor form


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["numpy", "torch", "float16"])
def test_whole_tensors(shape: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    @tensor_method
    def f(models: Any, base: Any, w: PerModel[float]) -> Any:
        assert [m.shape for m in (*models, base)] == [shape] * 3
        result = base + sum(x * (m - base) for x, m in zip(w, models, strict=True)) / np.float32(np.linalg.norm(base) + 1)
        return (
            torch.from_numpy(np.array(result))
            if kind == "torch"
            else np.array(result).astype(kind)
            if kind == "float16"
            else result
        )

    arrays = fine_tunes(shape, 2)
    how = {"models": [{}, {"w": 0.3}, {"w": 0.9}], "base": True, "out": DTYPES["BF16"]}
    got = merged(f, arrays, tmp_path / "a", threads=1, tile_bytes=1, **how)
    a, b, c = f64(arrays)
    exact = a + (0.3 * (b - a) + 0.9 * (c - a)) / (np.linalg.norm(a) + 1)
    np.testing.assert_allclose(got.astype(float), exact, rtol=2**-7, atol=1e-6)
    again = merged(f, arrays, tmp_path / "b", threads=3, tile_bytes=1 << 30, **how)
    assert again.tobytes() == got.tobytes()


def test_experts_come_one_at_a_time(tmp_path: Path) -> None:
    shapes = []

    @tensor_method
    def f(models: Any) -> Any:
        shapes.append(models[0].shape)
        return models[0] / np.abs(models[0]).max()

    array = fine_tunes((4, 40, 30), 0, np.float32)[0]
    got = merged(f, [array], tmp_path, matrices=4, tile_bytes=1)
    assert shapes == [(40, 30)] * 4
    np.testing.assert_allclose(np.abs(got).max(axis=(1, 2)), 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda models: None, "output tensor w: f returned a NoneType, not an array of numbers"),
        (lambda models: models[0].T, "output tensor w: f returned an array of shape [6, 5], not [5, 6]"),
        (lambda models: models[0] > "a", "output tensor w: f raised "),
        (lambda models: models[0].astype(complex), "output tensor w: f returned a ndarray, not an array of numbers"),
    ],
)
def test_results_that_are_none(function: Any, message: str, tmp_path: Path) -> None:
    function.__name__ = "f"
    with pytest.raises(MethodError) as caught:
        merged(tensor_method(function), fine_tunes((5, 6), 0), tmp_path)
    assert str(caught.value).startswith(message)


# ---- in memory


def test_a_function_at_hand_merges_what_is_in_memory() -> None:
    @block_method(min_models=2, max_models=2)
    def blend(models: Any, out: Any, t: float = 0.5) -> None:
        out[:] = (1 - t) * models[0] + t * models[1]

    a, b = {"w": np.float32([0, 0])}, {"w": np.float32([4, 8])}
    assert weightsmith.merge_state_dicts(blend, [a, b], t=0.25)["w"].tolist() == [1, 2]
    with pytest.raises(PlanError, match="method blend takes exactly 2 models, not 1"):
        weightsmith.merge_state_dicts(blend, [a])
    with pytest.raises(UnknownName):
        methods.get("blend")
    with pytest.raises(MethodError, match=r"Write @weightsmith\.block_method"):
        weightsmith.merge_state_dicts(nothing, [a, b])  # type: ignore[arg-type]


def test_functions_of_one_name_do_not_meet() -> None:
    with at_hand(block_method(none)) as first, at_hand(block_method(none)) as second:
        assert (first.name, second.name) == ("none", "none-2")
        assert methods.get("none-2") is second


# ---- the example, and the page about it


def agreed(arrays: Mapping[str, np.ndarray] | Any, weights: tuple[float, ...], power: float) -> np.ndarray:
    base, *tuned = f64(arrays)
    moved = [w * (t - base) for w, t in zip(weights, tuned, strict=True)]
    length = sum(np.abs(m) for m in moved)
    return base + np.divide(np.abs(sum(moved)), length, out=np.zeros_like(base), where=length > 0) ** power * sum(moved)


@pytest.mark.slow
def test_the_example_computes_what_it_says(tmp_path: Path) -> None:
    arrays = fine_tunes((900, 517), 2)
    for name, array in zip(("base", "fr", "de"), arrays, strict=True):
        write_checkpoint(tmp_path / name, {"w": array})
    method = load_file("my_method.py:agree", EXAMPLE, allow_code=True)
    how = {"shared": {"power": 2.0}, "models": [{}, {"weight": 0.7}, {"weight": 0.5}], "base": True, "out": DTYPES["BF16"]}
    got = run_method(tmp_path / "a", method.name, arrays, threads=1, tile_bytes=1, **how)
    exact = agreed(arrays, (0.7, 0.5), 2.0)
    assert np.max(np.abs(got.astype(float) - exact) / 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)) <= 0.51
    for threads, tile_bytes in [(4, 1), (3, 300_000), (1, 1 << 30)]:
        again = run_method(tmp_path / "b", method.name, arrays, threads=threads, tile_bytes=tile_bytes, **how)
        assert again.tobytes() == got.tobytes()


def test_the_other_example_keeps_the_norm(tmp_path: Path) -> None:
    method = load_file("my_method.py:keep_norm", EXAMPLE, allow_code=True)
    arrays = [a.astype(np.float32) for a in fine_tunes((40, 30), 1)]
    got = run_method(tmp_path, method.name, arrays, shared={}, models=[{"weight": 1.0}, {"weight": 3.0}])
    np.testing.assert_allclose(np.linalg.norm(got), np.mean([np.linalg.norm(a) for a in arrays]), rtol=1e-6)


def test_the_page_shows_the_example() -> None:
    """What its commands print is seen where all pages are tested."""
    shown = [block.text for block in blocks_of(PAGE)]
    for name in ("my_method.py", "agree.yml"):
        assert (EXAMPLE / name).read_text() in shown
    assert len([command for text in shown for command in sessions(text)]) >= 3


@pytest.mark.long
def test_small_models_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's recipe on models that hold numbers: a gradient reaches the function layer by layer."""
    monkeypatch.chdir(tmp_path)
    make_models(tmp_path, ("base", "fr", "de"))
    for name in ("my_method.py", "agree.yml"):
        (tmp_path / name).write_text((EXAMPLE / name).read_text())
    weightsmith.merge("agree.yml", "out", allow_code=True, fsync=False)
    parts = [read(tmp_path / name) for name in ("base", "fr", "de")]
    out = read(tmp_path / "out")
    for layer, power in ((0, 0.5), (1, 1.0)):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        exact = agreed([p[name] for p in parts], (0.7, 0.5), power)
        np.testing.assert_allclose(out[name].astype(float), exact, rtol=2**-8)
