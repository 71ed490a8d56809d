"""Every method through the engine against the float64 reference, and the same bytes for any cut and number of threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.mini import run_method
from weightsmith.kernels import reference
from weightsmith.methods.task_vectors import random_key
from weightsmith.tensors import DTYPES

GTA = {"normalize": False, "rescale": "none", "lambda": 1.0, "int8_mask": False}


def fine_tunes(shape: tuple[int, ...], count: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> list[np.ndarray]:
    """A base and `count` perturbations, with realistic magnitudes."""
    rng = np.random.default_rng(seed)
    base = rng.normal(0, 0.02, shape)
    return [base.astype(dtype)] + [(base + rng.normal(0, 1e-3, shape)).astype(dtype) for _ in range(count)]


def ulp_error(got: np.ndarray, exact: np.ndarray, bits: int = 8) -> float:
    """Largest error in units in the last place of a float with `bits` significant bits.

    Results that cancel to nothing are measured at 2^-40: there the reference itself has only float64's noise left.
    """
    got64 = got.astype(np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-40))) - bits + 1)
    return float(np.max(np.abs(got64 - exact) / ulp)) if got.size else 0.0


def f64(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [a.astype(np.float64) for a in arrays]


def deltas(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Deltas as the methods define them: rounded to float32 when all is 16-bit, else in float64."""
    kind = np.float32 if all(a.dtype.itemsize <= 2 for a in arrays) else np.float64
    base = arrays[0].astype(kind)
    return f64([a.astype(kind) - base for a in arrays[1:]])


def ties_reference(arrays: Sequence[np.ndarray], weights: Sequence[float], density: float, **kw: Any) -> np.ndarray:
    masked = [d * reference.keep_largest(d, max(1, int(density * d.size))) for d in deltas(arrays)]
    return reference.merge_task_vectors(f64(arrays)[0], masked, weights, **kw)


def dare_reference(
    arrays: Sequence[np.ndarray], weights: Sequence[float], density: float, rescale: str, **kw: Any
) -> np.ndarray:
    masked = []
    for i, d in enumerate(deltas(arrays)):
        kept = d * reference.random_mask(random_key(0, i, "w"), d.size, density).reshape(d.shape)
        before, after = np.abs(d).sum(), np.abs(kept).sum()
        l1 = before / after if after >= 1e-7 else 1.0
        masked.append(kept * {"l1": l1, "inv_density": 1 / density, "none": 1.0}[rescale])
    return reference.merge_task_vectors(f64(arrays)[0], masked, weights, **kw)


Case = tuple[str, int, Mapping[str, Any], list[Mapping[str, Any]], bool, Callable[[list[np.ndarray]], np.ndarray]]
W = [{"weight": 0.7}, {"weight": -0.2}, {"weight": 1.3}]
CASES: dict[str, Case] = {
    "linear": ("linear", 3, {"normalize": True}, W, False, lambda a: reference.combine(f64(a), np.array([0.7, -0.2, 1.3]) / 1.8)),
    "linear, sum": ("linear", 3, {"normalize": False}, W, False, lambda a: reference.combine(f64(a), [0.7, -0.2, 1.3])),
    "linear, one": ("linear", 1, {"normalize": True}, W[:1], False, lambda a: f64(a)[0]),
    "passthrough": ("passthrough", 1, {}, [{"scale": 0.3}], False, lambda a: f64(a)[0] * 0.3),
    "task_arithmetic": (
        "task_arithmetic", 3, GTA | {"lambda": 0.8}, [{}, *W[:2]], True,
        lambda a: reference.merge_task_vectors(f64(a)[0], [x - f64(a)[0] for x in f64(a)[1:]], [0.7, -0.2], elect=False, normalize=False, factor=0.8),
    ),
    "task_arithmetic, mean": (
        "task_arithmetic", 3, GTA | {"normalize": True}, [{}, *W[:2]], True,
        lambda a: reference.merge_task_vectors(f64(a)[0], [x - f64(a)[0] for x in f64(a)[1:]], [0.7, -0.2], elect=False, normalize=True, factor=1.0),
    ),
    "slerp": ("slerp", 2, {"t": 0.3}, [{}, {}], True, lambda a: reference.slerp(*f64(a), 0.3)),
    "nuslerp": ("nuslerp", 2, {"nuslerp_flatten": True, "nuslerp_row_wise": False}, [{"weight": 3.0}, {"weight": 1.0}], False, lambda a: reference.nuslerp(*f64(a), 0.25)),
    "nuslerp, base": (
        "nuslerp", 3, {"nuslerp_flatten": True, "nuslerp_row_wise": False}, [{}, {"weight": 3.0}, {"weight": 1.0}], True,
        lambda a: f64(a)[0] + reference.nuslerp(f64(a)[1] - f64(a)[0], f64(a)[2] - f64(a)[0], 0.25),
    ),
    "nuslerp, rows": (
        "nuslerp", 2, {"nuslerp_flatten": False, "nuslerp_row_wise": True}, [{"weight": 3.0}, {"weight": 1.0}], False,
        lambda a: reference.nuslerp(*f64(a), 0.25, axis=-1),
    ),
    "nuslerp, columns": (
        "nuslerp", 3, {"nuslerp_flatten": False, "nuslerp_row_wise": False}, [{}, {"weight": 3.0}, {"weight": 1.0}], True,
        lambda a: f64(a)[0] + reference.nuslerp(f64(a)[1] - f64(a)[0], f64(a)[2] - f64(a)[0], 0.25, axis=0),
    ),
    "ties": (
        "ties", 3, GTA | {"normalize": True}, [{}, {"weight": 1.0, "density": 0.5}, {"weight": 0.5, "density": 0.5}], True,
        lambda a: ties_reference(a, [1.0, 0.5], 0.5, elect=True, normalize=True, factor=1.0),
    ),
    "ties, sum": (
        "ties", 4, GTA | {"lambda": 0.4}, [{}, *[{"weight": w, "density": 0.2} for w in (0.3, 0.3, -0.6)]], True,
        lambda a: ties_reference(a, [0.3, 0.3, -0.6], 0.2, elect=True, normalize=False, factor=0.4),
    ),
    "ties, untrimmed": (
        "ties", 3, GTA | {"normalize": True}, [{}, {"weight": 1.0, "density": 1.0}, {"weight": 0.5, "density": 1.0}], True,
        lambda a: reference.merge_task_vectors(f64(a)[0], deltas(a), [1.0, 0.5], elect=True, normalize=True, factor=1.0),
    ),
    "dare_linear": (
        "dare_linear", 3, GTA | {"rescale": "l1"}, [{}, *[{"weight": 0.6, "density": 0.3}] * 2], True,
        lambda a: dare_reference(a, [0.6, 0.6], 0.3, "l1", elect=False, normalize=False, factor=1.0),
    ),
    "dare_ties": (
        "dare_ties", 3, GTA | {"rescale": "inv_density"}, [{}, *[{"weight": 0.6, "density": 0.3}] * 2], True,
        lambda a: dare_reference(a, [0.6, 0.6], 0.3, "inv_density", elect=True, normalize=False, factor=1.0),
    ),
    "dare_ties, mean": (
        "dare_ties", 3, GTA | {"rescale": "l1", "normalize": True}, [{}, *[{"weight": 0.6, "density": 0.7}] * 2], True,
        lambda a: dare_reference(a, [0.6, 0.6], 0.7, "l1", elect=True, normalize=True, factor=1.0),
    ),
}  # fmt: skip

EXACT = {"linear", "linear, sum", "linear, one", "passthrough", "task_arithmetic", "task_arithmetic, mean"}


def run_case(case: Case, folder: Path, arrays: list[np.ndarray], **options: Any) -> np.ndarray:
    method, _, shared, models, base, _ = case
    return run_method(folder, method, arrays, shared=shared, models=models, base=base, **options)


@pytest.mark.parametrize("shape", [(130, 517), (7,), (), (3, 40, 30)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_bf16_output_is_within_one_ulp_of_float64(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    case = CASES[name]
    if "nuslerp, " in name and name != "nuslerp, base" and len(shape) != 2:
        pytest.skip("rows and columns of a matrix")
    arrays = fine_tunes(shape, case[1] - 1)
    got = run_case(case, tmp_path, arrays, out=DTYPES["BF16"])
    error = ulp_error(got, case[5](arrays))
    assert error <= (0.51 if name in EXACT else 1.0)


@pytest.mark.parametrize("name", CASES)
def test_same_bytes_for_any_cut_and_number_of_threads(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    arrays = fine_tunes((900, 517), case[1] - 1)
    first = run_case(case, tmp_path / "a", arrays, threads=1, tile_bytes=1)
    for i, (threads, tile_bytes) in enumerate([(4, 1), (3, 300_000), (1, 1 << 30)]):
        again = run_case(case, tmp_path / f"b{i}", arrays, threads=threads, tile_bytes=tile_bytes)
        assert again.tobytes() == first.tobytes()


@pytest.mark.parametrize("name", CASES)
def test_mixed_dtypes_meet_in_float32(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    kinds = [np.float32, ml_dtypes.bfloat16, np.float16, np.float64]
    arrays = [a.astype(k) for a, k in zip(fine_tunes((60, 33), case[1] - 1, np.float64), kinds, strict=False)]
    got = run_case(case, tmp_path, arrays, out=DTYPES["F32"])
    error = ulp_error(got, case[5](arrays), bits=24)
    assert error <= (0.51 if name in EXACT else 2.0)


@pytest.mark.parametrize("name", [n for n in CASES if n in EXACT or "slerp" in n])
def test_float64_stays_float64(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    arrays = fine_tunes((60, 33), case[1] - 1, np.float64)
    got = run_case(case, tmp_path, arrays, out=DTYPES["F64"])
    np.testing.assert_allclose(got, case[5](arrays), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_zero_size(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert run_case(case, tmp_path, fine_tunes((0, 5), case[1] - 1)).shape == (0, 5)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][0] not in ("passthrough", "dare_linear", "dare_ties")])
def test_merging_a_model_with_itself_gives_the_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if name == "linear, sum":
        pytest.skip("the weights do not sum to one")
    one = fine_tunes((50, 64), 0)[0]
    got = run_case(case, tmp_path, [one] * case[1], out=DTYPES["BF16"])
    assert got.tobytes() == one.tobytes()


@pytest.mark.parametrize("density", [0.0, 1e-9, 0.1, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("kind", ["bf16", "constant", "zero"])
def test_ties_keeps_exactly_what_is_asked_the_lower_index_first(density: float, kind: str, tmp_path: Path) -> None:
    n = 70_000
    base = np.zeros(n, ml_dtypes.bfloat16)
    delta = {"bf16": np.random.default_rng(1).normal(0, 1, n), "constant": np.full(n, 0.5), "zero": np.zeros(n)}[kind]
    model = delta.astype(ml_dtypes.bfloat16)
    models = [{}, {"weight": 1.0, "density": density}]
    got = run_method(tmp_path, "ties", [base, model], shared=GTA, models=models, base=True, tile_bytes=1).astype(np.float64)
    k = 0 if density == 0 else n if density == 1 else max(1, int(density * n))
    mask = reference.keep_largest(model.astype(np.float64), k)
    np.testing.assert_array_equal(got, np.where(mask, model.astype(np.float64), 0.0))
    if kind != "zero":
        assert (got != 0).sum() == k - (model.astype(np.float64)[mask] == 0).sum()


def test_experts_have_thresholds_of_their_own(tmp_path: Path) -> None:
    arrays = fine_tunes((4, 40, 30), 1)
    arrays[1][2] += 1  # an expert with large deltas would take all the places if thresholds were by tensor
    models = [{}, {"weight": 1.0, "density": 0.25}]
    fused = run_method(tmp_path / "f", "ties", arrays, shared=GTA, models=models, base=True, matrices=4, tile_bytes=1)
    for e in range(4):
        parts = [np.ascontiguousarray(a[e]) for a in arrays]
        alone = run_method(tmp_path / str(e), "ties", parts, shared=GTA, models=models, base=True)
        assert alone.tobytes() == fused[e].tobytes()


def test_dare_keeps_the_expected_share_and_seed_changes_the_mask(tmp_path: Path) -> None:
    base, model = np.zeros(200_000, np.float32), np.ones(200_000, np.float32)
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


@pytest.mark.parametrize("density", [0.03, 0.5, 0.97])
def test_ties_is_exact_where_the_first_tile_is_unlike_the_rest(density: float, tmp_path: Path) -> None:
    """The window guessed from one tile then misses the threshold, and it is found by counting again."""
    n = 400_000
    rng = np.random.default_rng(2)
    scale = np.where(np.arange(n) < n // 6, 1e-6, np.where(np.arange(n) < n // 2, 1.0, 1e4))
    model = (rng.normal(0, 1, n) * scale).astype(np.float32)
    base = np.zeros(n, np.float32)
    models = [{}, {"weight": 1.0, "density": density}]
    got = run_method(tmp_path, "ties", [base, model], shared=GTA, models=models, base=True, tile_bytes=1, threads=1)
    np.testing.assert_array_equal(got, np.where(reference.keep_largest(model.astype(np.float64), int(density * n)), model, 0))
