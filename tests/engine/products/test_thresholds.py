"""Statistics over the whole model: thresholds and counts are those of all tensors together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.mini import write_checkpoint
from weightsmith import merge, open_checkpoint
from weightsmith._engine.products.thresholds import Thresholds

SHAPES = {"a.weight": (300, 517), "b.weight": (64,), "c.weight": (70, 200), "d.weight": (40, 4096)}
SCALES = {"a.weight": 1.0, "b.weight": 20.0, "c.weight": 0.05, "d.weight": 0.3}


def make_models(folder: Path, dtype: Any, count: int = 2) -> list[dict[str, np.ndarray]]:
    """A base and fine-tunes whose tensors have changed by very different amounts."""
    rng = np.random.default_rng(0)
    base = {name: rng.normal(0, 0.02, shape).astype(dtype) for name, shape in SHAPES.items()}
    models = [base]
    for _ in range(count):
        models.append(
            {n: (base[n].astype(np.float64) + SCALES[n] * rng.normal(0, 1e-3, s)).astype(dtype) for n, s in SHAPES.items()}
        )
    for name, tensors in zip(["base", "m1", "m2"], models, strict=False):
        write_checkpoint(folder / name, tensors)
    return models


def run(folder: Path, method: str, parameters: str, shared: str, **options: Any) -> dict[str, np.ndarray]:
    recipe = (
        f"merge_method: {method}\nbase_model: {folder}/base\nmodels:\n"
        + "".join(f"  - model: {folder}/{m}\n    parameters: {{{parameters}}}\n" for m in ("m1", "m2"))
        + f"parameters: {{{shared}}}\ndtype: float32\n"
    )
    out = folder / f"out{len(list(folder.iterdir()))}"
    merge(recipe, out, **options)
    with open_checkpoint(out) as checkpoint:
        return {name: np.array(checkpoint.read(name)) for name in checkpoint.specs}


def kept_of_the_model(models: list[dict[str, np.ndarray]], i: int, density: float, gamma: float = 0.0) -> dict[str, np.ndarray]:
    """Deltas of model i, those outside the band of the whole model's magnitudes zeroed; ties at the lower edge kept."""
    deltas = {n: models[i][n].astype(np.float32) - models[0][n].astype(np.float32) for n in SHAPES}
    size = np.sort(np.concatenate([np.abs(d).ravel() for d in deltas.values()]))[::-1]
    first, end = int(gamma * size.size), int(gamma * size.size) + max(1, int(density * size.size))
    ceiling = size[first - 1] if first else np.float32(np.inf)
    return {
        n: np.where((np.abs(d) >= size[end - 1]) & (np.abs(d) < ceiling), d, 0).astype(np.float64) for n, d in deltas.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("density", [0.01, 0.2, 0.7])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "f32"])
def test_ties_of_the_paper_ranks_the_whole_model(dtype: Any, density: float, tmp_path: Path) -> None:
    models = make_models(tmp_path, dtype)
    got = run(tmp_path, "ties", f"weight: 1, density: {density}", "scope: model, normalize: false")
    kept = [kept_of_the_model(models, i, density) for i in (1, 2)]
    for name in SHAPES:
        a, b = (k[name] for k in kept)
        sign = np.where(a + b >= 0, 1.0, -1.0)
        expected = models[0][name].astype(np.float64) + np.where(np.sign(a) == sign, a, 0) + np.where(np.sign(b) == sign, b, 0)
        np.testing.assert_allclose(got[name], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_outliers_of_the_whole_model(tmp_path: Path) -> None:
    models = make_models(tmp_path, np.float32)
    got = run(tmp_path, "breadcrumbs", "weight: 1, density: 0.3, gamma: 0.01", "scope: model")
    kept = [kept_of_the_model(models, i, 0.3, 0.01) for i in (1, 2)]
    for name in SHAPES:
        expected = models[0][name].astype(np.float64) + kept[0][name] + kept[1][name]
        np.testing.assert_allclose(got[name], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_a_sample_that_misleads_costs_passes_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = make_models(tmp_path, np.float32)
    real, passes = Thresholds.end, []

    def mislead(self: Thresholds, number: int) -> None:
        real(self, number)
        passes.append(number)
        if number == 0:
            for search in self.searches.values():
                search.first, search.end = 1 << 16, 2 << 16

    monkeypatch.setattr(Thresholds, "end", mislead)
    got = run(tmp_path, "localize_and_stitch", "density: 0.1", "lambda: 1")
    assert passes == [0, 1, 2, 3]
    kept = [kept_of_the_model(models, i, 0.1) for i in (1, 2)]
    for name in SHAPES:
        a, b = (k[name] for k in kept)
        mean = (a + b) / np.maximum((a != 0).astype(int) + (b != 0), 1)
        np.testing.assert_allclose(got[name], models[0][name].astype(np.float64) + mean, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_the_same_bytes_for_any_memory_and_threads(tmp_path: Path) -> None:
    make_models(tmp_path, ml_dtypes.bfloat16)
    parameters, shared = "weight: 1, density: 0.2", "scope: model"
    first = run(tmp_path, "ties", parameters, shared, threads=1)
    again = run(tmp_path, "ties", parameters, shared, threads=3, max_memory_bytes=220 << 20)
    for name in SHAPES:
        assert first[name].tobytes() == again[name].tobytes()


def test_ramplus_counts_over_the_model(tmp_path: Path) -> None:
    base = {"a.weight": np.zeros((10, 10), np.float32), "b.weight": np.zeros(20, np.float32)}
    one, two = [{n: x.copy() for n, x in base.items()} for _ in range(2)]
    one["a.weight"][:, :5] = 1  # alone 50 of a
    one["b.weight"][:] = 2  # shared 20 of b
    two["b.weight"][:] = 4
    for name, tensors in zip(["base", "m1", "m2"], [base, one, two], strict=True):
        write_checkpoint(tmp_path / name, tensors)
    got = run(tmp_path, "ramplus", "", "rescale: 1.5")
    np.testing.assert_allclose(got["a.weight"][:, :5], 1 + 0.5 * 20 / 50, rtol=1e-6)
    np.testing.assert_array_equal(got["b.weight"], 3.0)


@pytest.mark.parametrize(
    ("method", "parameters", "shared", "surveys"),
    [
        ("ties", "weight: 1, density: 0.2", "scope: model", 1),
        ("ties", "weight: 1", "scope: row", 0),
        ("ramplus", "", "lambda: 1", 1),
    ],
)
def test_the_plan_says_what_the_survey_reads(method: str, parameters: str, shared: str, surveys: int, tmp_path: Path) -> None:
    from tests.plan_help import prepare
    from weightsmith._execution.options import RunOptions
    from weightsmith._execution.summary import summarise

    make_models(tmp_path, ml_dtypes.bfloat16)
    recipe = (
        f"merge_method: {method}\nbase_model: {tmp_path}/base\nmodels:\n"
        + "".join(f"  - model: {tmp_path}/{m}\n    parameters: {{{parameters}}}\n" for m in ("m1", "m2"))
        + f"parameters: {{{shared}}}\ndtype: bfloat16\n"
    )
    with prepare(recipe) as prepared:
        summary = summarise(prepared, RunOptions())
    assert summary.survey_bytes == surveys * summary.input_bytes
    assert summary.read_bytes >= (1 + surveys) * summary.input_bytes


@pytest.mark.long
def test_a_model_that_feeds_a_step_twice_counts_twice(tmp_path: Path) -> None:
    """Layers 0 and 1 of one fine-tune merged into one layer: both deltas are ranked, together."""
    rng = np.random.default_rng(0)
    name = "model.layers.{}.mlp.up_proj.weight"
    base = {name.format(i): rng.normal(0, 0.02, (40, 50)).astype(np.float32) for i in range(2)}
    tuned = {n: (x + (1 + 9 * ("1.mlp" in n)) * rng.normal(0, 1e-3, x.shape)).astype(np.float32) for n, x in base.items()}
    config = {"num_hidden_layers": 2, "model_type": "llama"}
    write_checkpoint(tmp_path / "base", base, config=config)
    write_checkpoint(tmp_path / "m1", tuned, config=config)
    density = 0.7
    recipe = (
        f"merge_method: ties\nbase_model: {tmp_path}/base\nslices:\n  - sources:\n"
        f"      - {{model: {tmp_path}/base, layer_range: [0, 1]}}\n"
        + "".join(
            f"      - {{model: {tmp_path}/m1, layer_range: [{i}, {i + 1}], parameters: {{weight: 1, density: {density}}}}}\n"
            for i in range(2)
        )
        + "parameters: {scope: model, normalize: false}\ndtype: float32\n"
    )
    merge(recipe, tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        got = np.array(checkpoint.read(name.format(0)))
    first = base[name.format(0)]
    ds = [tuned[name.format(i)] - first for i in range(2)]
    size = np.sort(np.abs(np.concatenate([d.ravel() for d in ds])))[::-1]
    a, b = (np.where(np.abs(d) >= size[int(density * size.size) - 1], d, 0).astype(np.float64) for d in ds)
    sign = np.where(a + b >= 0, 1.0, -1.0)
    expected = first + np.where(np.sign(a) == sign, a, 0) + np.where(np.sign(b) == sign, b, 0)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_gamma_is_for_outliers_alone(tmp_path: Path) -> None:
    models = make_models(tmp_path, np.float32)
    got = run(tmp_path, "task_vectors", "density: 0.3, gamma: 0.2", "sparsify: magnitude, scope: model")
    kept = [kept_of_the_model(models, i, 0.3) for i in (1, 2)]
    for name in SHAPES:
        np.testing.assert_allclose(got[name], models[0][name] + kept[0][name] + kept[1][name], rtol=1e-6, atol=1e-9)


def test_ramplus_counts_each_tensor_with_its_own_epsilon(tmp_path: Path) -> None:
    base = {"a.weight": np.zeros((10, 10), np.float32), "b.weight": np.zeros(20, np.float32)}
    one, two = [{n: np.full_like(x, v) for n, x in base.items()} for v in (1, 2)]
    two["b.weight"][:10] = 0
    for name, tensors in zip(["base", "m1", "m2"], [base, one, two], strict=True):
        write_checkpoint(tmp_path / name, tensors)
    got = run(tmp_path, "ramplus", "", "rescale: 2.0, epsilon: [{filter: a, value: 5}, {value: 0.1}]")
    np.testing.assert_array_equal(got["a.weight"], 0)  # nothing there is active
    np.testing.assert_allclose(got["b.weight"][:10], 2.0)  # alone in 10 and shared in 10: the ratio is 1


@pytest.mark.slow
def test_ordinary_settings_take_a_sample_and_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    base = {f"{i}.weight": rng.normal(0, 0.02, (300, 517)).astype(np.float32) for i in range(4)}
    write_checkpoint(tmp_path / "base", base)
    for m in ("m1", "m2"):
        write_checkpoint(tmp_path / m, {n: (x + rng.normal(0, 1e-3, x.shape)).astype(np.float32) for n, x in base.items()})
    passes: list[int] = []
    real = Thresholds.end
    monkeypatch.setattr(Thresholds, "end", lambda self, number: (real(self, number), passes.append(number)))
    run(tmp_path, "breadcrumbs", "weight: 1, density: 0.9", "scope: model")
    assert passes == [0, 1]
