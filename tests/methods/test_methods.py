"""Every method through the engine: against float64, the same bytes for any cut, thread count and layout, and at its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cases import CASES, FIRST, SWEEP, swept, task_vectors
from tests.cases.case import Case, fine_tunes, mixed
from tests.cases.task_vectors import GTA
from tests.kernels import reference
from tests.mini import run_method
from weightsmith import _methods as methods
from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import DTYPES

SHAPES = [(130, 517), (7,), (), (3, 40, 30)]


def ulp_error(got: np.ndarray, exact: np.ndarray, bits: int = 8) -> float:
    """Largest error in units in the last place of a float with `bits` significant bits.

    Results that cancel to nothing are measured at 2^-40: there the reference itself has only float64's noise left.
    """
    got64 = got.astype(np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-40))) - bits + 1)
    return float(np.max(np.abs(got64 - exact) / ulp)) if got.size else 0.0


def run_case(case: Case, folder: Path, arrays: list[np.ndarray], **options: Any) -> np.ndarray:
    options |= {"shared": case.shared, "models": case.models, "base": case.base, "name": case.tensor}
    return run_method(folder, case.method, arrays, **options)


def shapes_for(case: Case) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if len(shape) in case.dims]


IN_SHAPES = [
    pytest.param(
        name, shape, id=f"{name}-{shape}", marks=() if name in FIRST.values() or shape == shapes_for(case)[0] else SWEEP
    )
    for name, case in CASES.items()
    for shape in shapes_for(case)
]


def test_every_method_has_a_case() -> None:
    assert {case.method for case in CASES.values()} == set(methods.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), IN_SHAPES)
def test_bf16_output_is_as_near_to_float64_as_the_case_says(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    case = CASES[name]
    arrays = fine_tunes(shape, case.inputs - 1)
    got = run_case(case, tmp_path, arrays, out=DTYPES["BF16"])
    assert ulp_error(got, case.reference(arrays)) <= case.ulp


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", swept(CASES, {"linear", "ties", "dare_linear"}))  # MethodTests look at every method
def test_same_bytes_for_any_cut_and_number_of_threads(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    arrays = mixed((300, 517), case.inputs - 1)
    many = run_case(case, tmp_path / "many", arrays, threads=4, tile_bytes=1)
    one = run_case(case, tmp_path / "one", arrays, threads=1, tile_bytes=1 << 30)
    assert many.tobytes() == one.tobytes()


@pytest.mark.matrix("linear", "dare_linear")
@pytest.mark.slow
@pytest.mark.parametrize("name", swept(CASES))
def test_mixed_dtypes_meet_in_float32(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    arrays = mixed((60, 33), case.inputs - 1)
    got = run_case(case, tmp_path, arrays, out=DTYPES["F32"])
    assert ulp_error(got, case.reference(arrays), bits=24) <= max(2 * case.ulp - 0.51, 0.51)


OTHER_TASK_VECTORS = {case.method for case in task_vectors.CASES} - {"task_arithmetic", "dare_linear", "ties"}
"""They are one kernel, which reads a row and then masks it (as dare_linear), or trims it while it reads (as ties). What is kept
of a row is no matter of its dtype."""


F16 = [name for method, name in FIRST.items() if method not in OTHER_TASK_VECTORS]


@pytest.mark.slow
@pytest.mark.parametrize("name", swept(F16, [FIRST[method] for method in ("linear", "slerp", "ties", "nearswap")]))
def test_f16_in_and_out(name: str, tmp_path: Path) -> None:
    """Rows of float32 that are not bf16; float32 in and out has the rows of mixed dtypes."""
    case = CASES[name]
    arrays = fine_tunes((60, 33), case.inputs - 1, np.float16)
    got = run_case(case, tmp_path, arrays, out=DTYPES["F16"])
    exact = case.reference(arrays)
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - 10)  # below that f16 is subnormal
    assert np.max(np.abs(got.astype(np.float64) - exact) / ulp) <= max(2 * case.ulp - 0.51, 0.51)


@pytest.mark.matrix("linear*", "slerp*", "ties*", "karcher*", "tsv_m*")
@pytest.mark.slow
@pytest.mark.parametrize("name", swept(n for n, case in CASES.items() if case.identity))
@pytest.mark.parametrize("shape", [(50, 64), (64,)], ids=str)
def test_merging_a_model_with_itself_gives_the_model(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    case = CASES[name]
    if len(shape) not in case.dims:
        pytest.skip("not for vectors")
    one = fine_tunes(shape, 0)[0]
    got = run_case(case, tmp_path, [one] * case.inputs, out=DTYPES["BF16"])
    assert got.tobytes() == one.tobytes()


@pytest.mark.matrix("linear")
@pytest.mark.slow
@pytest.mark.parametrize("name", swept(n for n, case in CASES.items() if 3 in case.dims))
def test_fused_experts_give_the_bytes_of_separate_ones(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if "random" in name or case.method.startswith(("dare", "della", "add_noise")):
        pytest.skip("random numbers are keyed by the tensor's name")
    if case.shared.get("scope") == "model":
        pytest.skip("thresholds are those of all tensors")
    arrays = mixed((4, 40, 30), case.inputs - 1)
    for a in arrays[1:]:
        a[2] += 0.03  # statistics shared among the experts would show
    fused = run_case(case, tmp_path / "f", arrays, matrices=4, tile_bytes=1)
    for e in range(4):
        alone = run_case(case, tmp_path / str(e), [np.ascontiguousarray(a[e]) for a in arrays])
        assert alone.tobytes() == fused[e].tobytes()


@pytest.mark.parametrize("density", [0.0, 1e-9, 0.1, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("kind", ["bf16", "constant", "zero"])
def test_ties_keeps_exactly_what_is_asked_the_lower_index_first(density: float, kind: str, tmp_path: Path) -> None:
    n = 70_000
    base = np.zeros(n, ml_dtypes.bfloat16)
    delta = {"bf16": np.random.default_rng(1).normal(0, 1, n), "constant": np.full(n, 0.5), "zero": np.zeros(n)}[kind]
    model = delta.astype(ml_dtypes.bfloat16)
    models = [{}, {"weight": 1.0, "density": density}]
    how = {"shared": GTA, "models": models, "base": True, "out": DTYPES["BF16"], "tile_bytes": 1}
    got = run_method(tmp_path, "ties", [base, model], **how).astype(np.float64)
    k = 0 if density == 0 else n if density == 1 else max(1, int(density * n))
    mask = reference.keep_largest(model.astype(np.float64), k)
    np.testing.assert_array_equal(got, np.where(mask, model.astype(np.float64), 0.0))
    if kind != "zero":
        assert (got != 0).sum() == k - (model.astype(np.float64)[mask] == 0).sum()


def test_dare_keeps_the_expected_share_and_seed_changes_the_mask(tmp_path: Path) -> None:
    base, model = np.zeros(200_000, ml_dtypes.bfloat16), np.ones(200_000, np.float32)
    shared, models = GTA | {"rescale": "inv_density"}, [{}, {"weight": 1.0, "density": 0.3}]
    first = run_method(tmp_path / "a", "dare_linear", [base, model], shared=shared, models=models, base=True)
    other = run_method(tmp_path / "b", "dare_linear", [base, model], shared=shared, models=models, base=True, seed=1)
    kept = (first != 0).mean()
    assert abs(kept - 0.3) < 5 * np.sqrt(0.3 * 0.7 / first.size)
    np.testing.assert_allclose(first[first != 0], 1 / 0.3, rtol=1e-6)
    both = ((first != 0) & (other != 0)).mean()
    assert abs(both - 0.09) < 0.005


def test_copy_and_cast(tmp_path: Path) -> None:
    array = fine_tunes((300, 517), 0)[0]
    array.view(np.uint16)[0, :4] = [0x7FC1, 0xFF80, 0x0001, 0x8000]  # NaN with a payload, -inf, a subnormal, -0
    copied = run_method(tmp_path / "a", "copy", [array], shared={}, models=[{}], out=DTYPES["BF16"], tile_bytes=1)
    assert copied.tobytes() == array.tobytes()
    cast = run_method(tmp_path / "b", "cast", [array], shared={}, models=[{}], out=DTYPES["F16"])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(cast, array.astype(np.float32).astype(np.float16))


@pytest.mark.long
@pytest.mark.parametrize("density", [0.03, 0.5, 0.97])
def test_ties_is_exact_where_the_first_tile_is_unlike_the_rest(density: float, tmp_path: Path) -> None:
    """The window guessed from one tile then misses the threshold, and it is found by counting again."""
    n = 400_000
    rng = np.random.default_rng(2)
    scale = np.where(np.arange(n) < n // 6, 1e-6, np.where(np.arange(n) < n // 2, 1.0, 1e4))
    model = (rng.normal(0, 1, n) * scale).astype(np.float32)
    base = np.zeros(n, ml_dtypes.bfloat16)
    models = [{}, {"weight": 1.0, "density": density}]
    got = run_method(tmp_path, "ties", [base, model], shared=GTA, models=models, base=True, tile_bytes=1, threads=1)
    np.testing.assert_array_equal(got, np.where(reference.keep_largest(model.astype(np.float64), int(density * n)), model, 0))


WITH_DENSITY = [
    name for name in methods.NAMES if any(p.name == "density" and not p.ignored for p in methods.get(name).parameters)
]


@pytest.mark.parametrize("name", WITH_DENSITY)
def test_density_nought_leaves_the_base_and_one_keeps_every_delta(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES.values() if case.method == name)
    arrays = fine_tunes((60, 64), 1)
    shared = {**case.shared, "sparsify": "magnitude"}  # task_vectors keeps everything if not told otherwise

    def run(density: float) -> np.ndarray:
        parameters = {**case.models[1], "weight": 1.0, "density": density, "gamma": 0.0}
        return run_method(
            tmp_path / str(density), name, arrays, shared=shared, models=[{}, parameters], base=True, out=DTYPES["BF16"]
        )

    assert run(0.0).tobytes() == arrays[0].tobytes()
    assert run(1.0).tobytes() == arrays[1].tobytes()


def test_a_cast_that_overflows_is_an_error_and_a_cast_infinity_is_not(tmp_path: Path) -> None:
    large = np.full((5, 6), 1e30, ml_dtypes.bfloat16)
    with pytest.raises(NonFinite, match="not a number that float16 can hold"):
        run_method(tmp_path / "a", "cast", [large], shared={}, models=[{}], out=DTYPES["F16"])
    infinite = np.full((5, 6), np.inf, ml_dtypes.bfloat16)
    assert np.isinf(run_method(tmp_path / "b", "cast", [infinite], shared={}, models=[{}], out=DTYPES["F16"])).all()
