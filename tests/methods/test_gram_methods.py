"""What holds for methods made of inner products: their closed forms, and their limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests import plan_help
from tests.cases import elementwise
from tests.cases import gram as whole
from tests.cases.case import f64, fine_tunes
from tests.cases.gram import KARCHER, SLERP, STOCK
from tests.methods.test_methods import ulp_error
from tests.mini import run_method, write_checkpoint
from weightsmith._base.tensors import DTYPES
from weightsmith._methods.geometric_median import median_coefficients
from weightsmith._methods.jobs import combination
from weightsmith._methods.karcher import karcher_coefficients
from weightsmith._methods.model_stock import stock_coefficients

BF16, F64 = DTYPES["BF16"], DTYPES["F64"]


def merge(folder: Path, method: str, arrays: list[np.ndarray], shared: dict[str, Any], **options: Any) -> np.ndarray:
    """Merge inputs without parameters, or with weights; to float64 unless another dtype is asked for."""
    weights = options.pop("weights", None)
    models = [{} for _ in arrays]
    for model_settings, weight in zip(models[len(arrays) - len(weights or ()) :], weights or (), strict=True):
        model_settings["weight"] = weight
    return run_method(folder, method, arrays, shared=shared, models=models, **({"out": F64} | options))


def near(size: float, count: int, seed: int = 0) -> list[np.ndarray]:
    """float32 models, each as far from the first as this share of its length."""
    rng = np.random.default_rng(seed)
    base = rng.normal(0, 1, (37, 211))
    return [(base + size * (i > 0) * rng.normal(0, 1, base.shape)).astype(np.float32) for i in range(count)]


def apart(count: int, shape: tuple[int, ...] = (17, 23)) -> list[np.ndarray]:
    """float64 models that have nothing in common, of different lengths."""
    return [np.random.default_rng(i).normal(0, 1 + i, shape) for i in range(count)]


# ---- multislerp ------------------------------------------------------------------------------------------------------------


def mergekits_multislerp(xs: list[np.ndarray], weights: list[float], eps: float = 1e-8) -> np.ndarray:
    """Its formula as it stands, with the step in tangent space."""
    units = [x / (np.linalg.norm(x) + eps) for x in xs]
    mean = np.sum([w * u for w, u in zip(weights, units, strict=True)], axis=0)
    mean /= np.linalg.norm(mean)
    tangent = np.sum([w * (u - np.sum(u * mean) * mean) for w, u in zip(weights, units, strict=True)], axis=0)
    size = np.linalg.norm(tangent) + eps
    direction = mean * np.cos(size) + tangent * np.sin(size) / size
    return direction * sum(w * np.linalg.norm(x) for w, x in zip(weights, xs, strict=True))


def test_multislerp_is_the_normalised_mean_and_so_is_mergekits(tmp_path: Path) -> None:
    arrays, weights = apart(5), [0.1, 0.4, 0.2, 0.25, 0.05]
    expected = mergekits_multislerp(arrays, weights)
    np.testing.assert_allclose(whole.nlerp(arrays, weights), expected, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
        merge(tmp_path / "a", "multislerp", arrays, SLERP, weights=[10 * w for w in weights]),
        whole.nlerp(arrays, weights),
        rtol=1e-12,
    )
    with_base = merge(tmp_path / "b", "multislerp", arrays, SLERP, weights=weights[:4], base=True)
    deltas = [a - arrays[0] for a in arrays[1:]]
    np.testing.assert_allclose(with_base, arrays[0] + whole.nlerp(deltas, whole.shares(*weights[:4])), rtol=1e-11)


def test_karcher_steps_walk_to_where_the_arcs_cancel(tmp_path: Path) -> None:
    arrays, weights = apart(4), [0.6, 0.2, 0.1, 0.1]
    units = [whole.unit(a) for a in arrays]

    def unbalanced(steps: int) -> float:
        got = merge(tmp_path / str(steps), "multislerp", arrays, SLERP | {"karcher_steps": steps}, weights=weights)
        pulls = [w * whole.log_map(whole.unit(got), u) for w, u in zip(weights, units, strict=True)]
        return float(np.linalg.norm(np.sum(pulls, axis=0)))

    assert unbalanced(0) > 1e-2
    assert unbalanced(1) < 0.3 * unbalanced(0)
    assert unbalanced(30) < 1e-12


def test_one_model_beside_the_base_of_multislerp_is_weighted_like_any_other(tmp_path: Path) -> None:
    base, model = apart(2)
    alone = merge(tmp_path / "a", "multislerp", [base, model], SLERP, weights=[0.3], base=True)
    np.testing.assert_allclose(alone, model, rtol=1e-13, atol=1e-14)
    for weight in (0.3, -2.0):
        shared = SLERP | {"normalize_weights": False}
        got = merge(tmp_path / str(weight), "multislerp", [base, model], shared, weights=[weight], base=True)
        np.testing.assert_allclose(got, base + weight * (model - base), rtol=1e-12, atol=1e-12)


def test_negative_weights_of_multislerp_point_away(tmp_path: Path) -> None:
    arrays = apart(3)
    away, towards = (
        merge(tmp_path / str(w), "multislerp", arrays, SLERP | {"normalize_weights": False}, weights=[w, w], base=True)
        for w in (-0.5, 0.5)
    )
    np.testing.assert_allclose(away - arrays[0], arrays[0] - towards, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_directions_that_cancel_give_the_weighted_sum(count: int, tmp_path: Path) -> None:
    base = apart(1)[0]
    untouched = merge(tmp_path / "a", "multislerp", [base] * (count + 1), SLERP, weights=[1.0] * count, base=True)
    np.testing.assert_allclose(untouched, base, rtol=1e-15)
    turns = [2 * np.pi * i / count for i in range(count)]
    star = [base + np.array([np.cos(t), np.sin(t)] + [0] * 21) * (i + 1) for i, t in enumerate(turns)]
    got = merge(tmp_path / "b", "multislerp", [base, *star], SLERP, weights=[1.0] * count, base=True)
    np.testing.assert_allclose(got, np.mean(star, axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "parameters", "text"),
    [
        ((1, -1), "{}", "the weights sum to 0, so they cannot be normalised"),
        ((2, -1), "{karcher_steps: 1}", "karcher_steps walks to a mean, which negative weights do not have"),
    ],
)
def test_weights_that_multislerp_cannot_use(weights: tuple[int, int], parameters: str, text: str, tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / name) for name in "ab")
    models = "".join(f"  - {{model: {m}, parameters: {{weight: {w}}}}}\n" for m, w in zip((a, b), weights, strict=True))
    assert text in str(plan_help.problems(f"merge_method: multislerp\nmodels:\n{models}parameters: {parameters}\n")[0])


# ---- karcher ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 0.1, 1e-2, 1e-3, 1e-5, 1e-7])
def test_karcher_by_inner_products_is_karcher_on_tensors(size: float, tmp_path: Path) -> None:
    arrays = near(size, 4)
    shared = KARCHER | {"max_iter": 50, "tol": 1e-7}
    exact = whole.karcher(f64(arrays), 50, 1e-7)
    assert ulp_error(merge(tmp_path, "karcher", arrays, shared, out=DTYPES["F32"]), exact, bits=24) <= 2


def test_karcher_of_models_that_have_nothing_in_common(tmp_path: Path) -> None:
    arrays = apart(6)
    np.testing.assert_allclose(merge(tmp_path, "karcher", arrays, KARCHER), whole.karcher(arrays), rtol=1e-11)


@pytest.mark.long
def test_karcher_of_two_is_half_of_a_slerp_between_their_directions(tmp_path: Path) -> None:
    a, b = apart(2)
    b *= np.linalg.norm(a) / np.linalg.norm(b)
    halfway = merge(tmp_path / "s", "slerp", [a, b], {"t": 0.5}, base=True)
    np.testing.assert_allclose(merge(tmp_path / "k", "karcher", [a, b], KARCHER), halfway, rtol=1e-12)


def test_karcher_of_tiny_tensors_is_not_zero(tmp_path: Path) -> None:
    arrays = [1e-9 * a for a in apart(3)]
    np.testing.assert_allclose(merge(tmp_path, "karcher", arrays, KARCHER), whole.karcher(arrays), rtol=1e-11)


def test_karcher_of_zeros_and_of_opposites() -> None:
    zero_and_one = np.diag([0.0, 4.0])
    np.testing.assert_allclose(karcher_coefficients(zero_and_one, 10, 1e-5), [0, 0.5])  # mean length 1, the one direction
    for cosine in (-1.0, -1.0 + 1e-15):
        opposite = np.array([[1.0, cosine], [cosine, 1.0]])
        np.testing.assert_allclose(karcher_coefficients(opposite, 10, 1e-5), [1, 0])


# ---- model_stock -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cosine", [0.9, 0.5, 0.1, 0.0, -0.3, -1.0])
def test_model_stock_of_two_has_a_closed_form(cosine: float) -> None:
    norms = np.array([3e-6, 2e-6])
    products = np.outer(norms, norms) * np.array([[1, cosine], [cosine, 1]])
    t = 2 * max(0, cosine) / (1 + max(0, cosine))
    np.testing.assert_allclose(stock_coefficients(products, pooled=False), [1 - t, t / 2, t / 2], rtol=1e-12, atol=1e-15)


def test_model_stock_sees_small_deltas_too(tmp_path: Path) -> None:
    """mergekit's floor of 1e-6 under the norms' product would leave t = 0.01 here."""
    rng = np.random.default_rng(0)
    common = rng.normal(0, 1, 64)
    arrays = [np.ones(64)] + [1 + 1e-5 * (common + 0.1 * rng.normal(0, 1, 64)) for _ in range(2)]
    got = merge(tmp_path, "model_stock", arrays, STOCK, base=True)
    average = np.mean(arrays[1:], axis=0)
    t = np.linalg.norm(got - arrays[0]) / np.linalg.norm(average - arrays[0])
    assert 0.98 < t < 1


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_fine_tunes_that_oppose_each_other_give_the_base(noise: float, rows: bool, tmp_path: Path) -> None:
    """mergekit's t has a pole where 1 + (n-1) cos θ is 0: 22 times the offset was seen."""
    base, delta, other = apart(3)
    arrays = [base, base + delta, base - delta + noise * other]
    got = merge(tmp_path, "model_stock", arrays, STOCK | {"filter_wise": rows}, base=True)
    furthest = np.linalg.norm(np.mean(arrays[1:], axis=0) - base)
    assert np.linalg.norm(got - base) <= furthest * (1 + 1e-12)
    if not rows:
        assert got.tobytes() == base.tobytes()


@pytest.mark.parametrize("shape", [(60, 33), (300, 1), (2, 70_001), (1, 50)])
def test_filter_wise_is_each_row_alone_however_many_are_held(
    shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    common, base = rng.normal(0, 1e-3, shape), rng.normal(0, 0.02, shape)
    arrays = [base] + [base + common + rng.normal(0, 1e-3, shape) for _ in range(3)]
    arrays = [a.astype(ml_dtypes.bfloat16) for a in arrays]
    shared = STOCK | {"filter_wise": True}
    got = merge(tmp_path / "all", "model_stock", arrays, shared, base=True, out=BF16)
    for r in (0, 1, shape[0] - 1)[: shape[0]]:
        alone = merge(tmp_path / f"{r}", "model_stock", [a[r] for a in arrays], STOCK, base=True, out=BF16)
        assert ulp_error(got[r], alone.astype(np.float64)) <= 1  # sums per row, and per grain where a row is longer
    monkeypatch.setattr(combination, "AT_ONCE", 9 * 7)
    again = merge(tmp_path / "few", "model_stock", arrays, shared, base=True, out=BF16)
    assert again.tobytes() == got.tobytes()


def test_pooled_cosine_counts_long_deltas_more() -> None:
    norms = np.array([1.0, 1.0, 1e-3])
    products = np.outer(norms, norms) * np.array([[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]])
    mean, pooled = (stock_coefficients(products, pooled=p)[0] for p in (False, True))
    cosines = np.array([0.3, 0.9 / 1.002])
    np.testing.assert_allclose([mean, pooled], 1 - 3 * cosines / (1 + 2 * cosines), rtol=1e-12)


def test_model_stock_of_a_single_fine_tune_is_refused(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / name) for name in "ab")
    problem = plan_help.only(f"merge_method: model_stock\nbase_model: {a}\nmodels: [{{model: {a}}}, {{model: {b}}}]\n")
    assert f"merge_method model_stock takes at least 2 models besides the base, and there is one\n  {b}\n" in str(problem)


# ---- extract_rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7])
def test_short_rows_of_small_deltas_keep_their_cosines(size: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base, first, noise = rng.standard_normal((3, 4, 3, 3, 3))
    arrays = [base, base + size * first, base + size * (first + 0.2 * noise)]
    merged = merge(tmp_path, "extract_rows", arrays, {"alpha": 0.5, "beta": 0.0, "gamma": 2.0}, base=True)
    exact = whole.extract(arrays, 0.5, 0.0, 2.0)
    np.testing.assert_allclose((merged - base) / size, (exact - base) / size, atol=1e-5)


# ---- cosine ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (3, 1000), (1000, 3), (1500,), (), (5, 0)])
@pytest.mark.parametrize("form", ["a", "b"])
def test_columns_are_all_positions_but_the_first_dimension(form: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    arrays = [np.random.default_rng(i).normal(0, 1, shape) for i in range(2)]
    arrays[1] += arrays[0]
    merged = merge(tmp_path, "cosine", arrays, {"alpha": 0.1, "form": form, "low": 0.4, "high": 0.9}, base=True)
    np.testing.assert_allclose(merged, whole.cosine(arrays, 0.1, form, 0.4, 0.9) if arrays[0].size else arrays[0], atol=1e-12)


def test_columns_of_zeros_take_half_of_the_other_similarity(tmp_path: Path) -> None:
    base, other = np.eye(4), np.eye(4)
    base[:, 0] = other[:, 0] = 0
    other[1, 1] = 3
    merged = merge(tmp_path, "cosine", [base, other], {"alpha": 0.0, "form": "a", "low": 0.0, "high": 1.0}, base=True)
    np.testing.assert_allclose(merged, whole.cosine([base, other], 0.0, "a", 0.0, 1.0), atol=1e-12)


def test_a_range_without_width_is_refused(tmp_path: Path) -> None:
    a, b = (plan_help.model(tmp_path / name) for name in "ab")
    recipe = {"merge_method": "cosine", "base_model": str(a), "models": [{"model": str(b)}], "parameters": {"low": 1.0}}
    assert "low is 1, and not below high, 1" in str(plan_help.only(recipe))


# ---- splice ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (7, 300), (300, 7), (40, 101, 3), (1500,), (1, 1), (), (5, 0)])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.25), (0.7, 0.6), (1.0, 0.0), (0.0, 0.9), (0.3, 1.0)])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_runs_are_those_of_the_author(axis: str, alpha: float, beta: float, shape: tuple[int, ...], tmp_path: Path) -> None:
    arrays = [np.random.default_rng(i).normal(0, 1, shape) for i in range(2)]
    got = merge(tmp_path, "splice", arrays, {"alpha": alpha, "beta": beta, "axis": axis}, base=True)
    np.testing.assert_array_equal(got, elementwise.spliced(arrays, alpha, beta, axis))


# ---- smooth_add --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (3, 700), (700, 2), (1500,), (1, 1), (), (5, 0)])
def test_the_difference_is_filtered_in_all_dimensions(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Across the slabs of rows of which windows are in memory, and where a dimension is shorter than the filter."""
    ndimage = pytest.importorskip("scipy.ndimage")
    base, first, second = (np.random.default_rng(i).normal(0, 1, shape) for i in range(3))
    merged = merge(tmp_path, "smooth_add", [base, first, second], {"lambda": 0.7}, base=True)
    delta = second - base
    if shape and delta.size:
        delta = ndimage.gaussian_filter(ndimage.median_filter(delta, size=3), sigma=1)
    np.testing.assert_allclose(merged, first + 0.7 * delta, atol=1e-12)


# ---- geometric_median ------------------------------------------------------------------------------------------------------

EXACT = {"max_iter": 1000, "tol": 1e-13}


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_from_the_geometric_median_the_directions_to_all_models_cancel(size: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, (40, 50))
    arrays = [base + size * (1 + i) * rng.normal(0, 1, base.shape) for i in range(5)]
    got = merge(tmp_path, "geometric_median", arrays, EXACT)
    assert np.linalg.norm(np.sum([whole.unit(a - got) for a in arrays], axis=0)) < 1e-7
    # The default tolerance is enough to be no further from all of them.
    roughly = merge(tmp_path / "r", "geometric_median", arrays, {"max_iter": 100, "tol": 1e-6})
    total, rough = (sum(np.linalg.norm(a - m) for a in arrays) for m in (got, roughly))
    assert rough <= total * (1 + 1e-10)


def test_more_than_half_of_the_models_being_one_is_that_one(tmp_path: Path) -> None:
    a, b, c = fine_tunes((50, 64), 2)
    got = merge(tmp_path, "geometric_median", [b, a, a, c, a], EXACT, out=BF16)
    assert got.tobytes() == a.tobytes()


def test_a_broken_model_does_not_pull_the_median_away(tmp_path: Path) -> None:
    arrays = fine_tunes((50, 64), 4, np.float64)
    sound = np.mean(arrays[:4], axis=0)
    arrays[4] = arrays[4] + 100.0
    got = merge(tmp_path, "geometric_median", arrays, EXACT)
    assert np.linalg.norm(got - sound) < np.linalg.norm(arrays[0] - sound)


def test_the_median_of_two_is_their_mean_and_of_one_line_its_middle() -> None:
    np.testing.assert_allclose(median_coefficients(np.array([[4.0]]), 100, 1e-6), [0.5, 0.5])
    line = np.array([1.0, 10.0])  # 0, 1 and 10
    np.testing.assert_array_equal(median_coefficients(np.outer(line, line), 100, 1e-6), [0, 1, 0])


def test_the_iteration_leaves_a_model_that_is_the_mean_of_the_others() -> None:
    """There Weiszfeld's weights are infinite; without that model's own pull the first step is too long."""
    points = np.array([[-2.5, 0.0], [0.0, 0.0], [1.0, 1.62], [1.0, -1.62], [0.5, 0.0]]) / 17  # rounding leaves a distance

    def total(place: np.ndarray) -> float:
        return float(np.linalg.norm(place - points, axis=-1).sum())

    deltas = points[1:] - points[0]
    median, first = (median_coefficients(deltas @ deltas.T, steps, 1e-6) @ points for steps in (1000, 1))
    best = min(total(np.array([x, 0.0])) for x in np.linspace(0, 0.1, 10_001))  # on the axis of symmetry
    assert total(points[1]) > total(first) > total(median)
    assert total(median) <= best + 1e-8


# ---- many models -----------------------------------------------------------------------------------------------------------

MANY = {
    "karcher": (KARCHER, lambda xs: whole.karcher(xs)),
    "multislerp": (SLERP, lambda xs: xs[0] + whole.nlerp([x - xs[0] for x in xs[1:]], [1 / 29] * 29)),
    "model_stock": (STOCK, lambda xs: whole.stock(xs[0], [x - xs[0] for x in xs[1:]])),
    "geometric_median": (EXACT, whole.median),
}


@pytest.mark.long
@pytest.mark.parametrize("method", MANY)
def test_thirty_models(method: str, tmp_path: Path) -> None:
    shared, reference = MANY[method]
    arrays = fine_tunes((200, 517), 29)
    options: dict[str, Any] = {"weights": [1.0] * 29} if method == "multislerp" else {}
    base = method in ("multislerp", "model_stock")
    got = merge(tmp_path / "a", method, arrays, shared, base=base, out=BF16, **options)
    assert ulp_error(got, reference(f64(arrays))) <= 1
    again = merge(tmp_path / "b", method, arrays, shared, base=base, out=BF16, threads=3, tile_bytes=1, **options)
    assert again.tobytes() == got.tobytes()


@pytest.mark.process
@pytest.mark.slow
def test_thirty_checkpoints_through_the_front_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = [plan_help.decoder(seed=i) for i in range(30)]
    for i, arrays in enumerate(tensors):
        write_checkpoint(Path(f"m{i}"), arrays, plan_help.config())
    models = "".join(f"  - model: ./m{i}\n" for i in range(30))
    for method, reference in (("karcher", whole.karcher), ("geometric_median", whole.median)):
        weightsmith.merge(f"merge_method: {method}\nmodels:\n{models}dtype: float32\n", Path(method))
        with weightsmith.open_checkpoint(method) as merged:
            for name in tensors[0]:
                exact = reference([t[name].astype(np.float64) for t in tensors])
                np.testing.assert_allclose(merged.read(name), exact, rtol=1e-4, atol=1e-5)
