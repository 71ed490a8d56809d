"""Steps after a merge, and how far the result is from the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cases.case import deltas, f64, fine_tunes
from tests.cases.task_vectors import GTA, MEAN
from tests.methods.test_methods import ulp_error
from tests.mini import run_method, write_checkpoint
from tests.sampling import sampled
from weightsmith import _methods as methods
from weightsmith import merge, open_checkpoint
from weightsmith._base.tensors import DTYPES
from weightsmith._outputs.manifest import MANIFEST_NAME

OWN = [{}, {"weight": 0.7, "density": 0.3}, {"weight": 0.5, "density": 0.3}]


def merged_delta(folder: Path, arrays: list[np.ndarray], **steps: Any) -> np.ndarray:
    got = run_method(folder, "ties", arrays, shared=MEAN | steps, models=OWN, base=True, out=DTYPES["F64"])
    return got - f64(arrays)[0]


@pytest.mark.long
@pytest.mark.parametrize("norm", ["mean", "max", "task_arithmetic"])
def test_norm_match_gives_the_delta_the_norm_that_is_asked_for(norm: str, tmp_path: Path) -> None:
    arrays = fine_tunes((200, 517), 2, np.float64)
    arrays[2] = arrays[0] + 3 * (arrays[2] - arrays[0])
    ds = deltas(arrays)
    norms = [np.linalg.norm(d) for d in ds]
    target = {"mean": np.mean(norms), "max": max(norms), "task_arithmetic": np.linalg.norm(0.7 * ds[0] + 0.5 * ds[1])}[norm]
    plain = merged_delta(tmp_path / "a", arrays)
    matched = merged_delta(tmp_path / "b", arrays, norm_match=norm)
    np.testing.assert_allclose(np.linalg.norm(matched), target, rtol=1e-12)
    np.testing.assert_allclose(matched / np.linalg.norm(matched), plain / np.linalg.norm(plain), rtol=1e-6, atol=1e-12)


@pytest.mark.long
def test_norm_and_scale_in_bf16_are_within_an_ulp(tmp_path: Path) -> None:
    arrays = fine_tunes((200, 517), 2)
    exact = f64(arrays)[0] + 0.8 * merged_delta(tmp_path / "a", [a.astype(np.float64) for a in arrays], norm_match="max")
    shared = MEAN | {"norm_match": "max", "delta_scale": 0.8}
    got = run_method(tmp_path / "b", "ties", arrays, shared=shared, models=OWN, base=True, out=DTYPES["BF16"])
    assert ulp_error(got, exact) <= 1.0


SAMPLE = {"task_arithmetic", "ties", "nearswap", "ram", "tsv_m"}
"""Methods of every run: one of each kind of job that the step wraps."""


@pytest.mark.long
@pytest.mark.parametrize("method", sampled([m for m in methods.NAMES if methods.get(m).base == "required"], SAMPLE))
def test_scaling_a_delta_to_nothing_leaves_the_base(method: str, tmp_path: Path) -> None:
    from tests.cases import CASES

    case = next(case for case in CASES.values() if case.method == method)
    arrays = fine_tunes((60, 64), case.inputs - 1)  # compiled for the tests of the methods too
    steps = {"delta_scale": 0.0}
    got = run_method(
        tmp_path, method, arrays, shared={**case.shared, **steps}, models=case.models, base=True, out=DTYPES["BF16"]
    )
    assert got.tobytes() == arrays[0].astype(ml_dtypes.bfloat16).tobytes()


def test_a_zero_delta_has_no_norm_to_match(tmp_path: Path) -> None:
    one = fine_tunes((20, 30), 0)[0]
    shared = GTA | {"norm_match": "max"}
    got = run_method(tmp_path, "task_arithmetic", [one] * 3, shared=shared, models=OWN, base=True, out=DTYPES["BF16"])
    assert got.tobytes() == one.tobytes()


@pytest.mark.matrix
@pytest.mark.slow
def test_the_same_bytes_for_any_cut(tmp_path: Path) -> None:
    arrays = fine_tunes((900, 517), 2)
    shared = MEAN | {"norm_match": "mean", "delta_scale": 0.9}
    outs = [
        run_method(tmp_path / str(i), "ties", arrays, shared=shared, models=OWN, base=True, threads=t, tile_bytes=b)
        for i, (t, b) in enumerate([(1, 1), (3, 1 << 20), (2, 300_000)])
    ]
    assert len({out.tobytes() for out in outs}) == 1


# ---- the distance


def make_recipe(folder: Path) -> str:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (50, 16)} | {
        f"model.layers.{i}.{part}.weight": (16, 16) for i in range(3) for part in ("self_attn.q_proj", "mlp.up_proj")
    }
    for name in ("base", "a"):
        tensors = {n: rng.normal(0, 0.02, s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
        write_checkpoint(folder / name, tensors, config={"num_hidden_layers": 3, "model_type": "llama"})
    return (
        f"merge_method: task_arithmetic\nbase_model: {folder}/base\n"
        f"models:\n  - model: {folder}/a\n    parameters: {{weight: 0.5}}\ndtype: bfloat16\n"
    )


def test_the_distance_is_that_of_the_files(tmp_path: Path) -> None:
    done = merge(make_recipe(tmp_path), tmp_path / "out")
    squares: dict[str, float] = {}
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "out") as out:
        for name in out.specs:
            moved = out.read(name).astype(np.float64) - base.read(name).astype(np.float64)
            layer = name.rsplit(".", 3)[0] if "layers" in name else "outside the layers"
            squares[layer] = squares.get(layer, 0) + (moved**2).sum()
    assert [m.name for m in done.distance] == ["all", *(f"model.layers.{i}" for i in range(3)), "outside the layers"]
    np.testing.assert_allclose(done.distance[0].delta, np.sqrt(sum(squares.values())), rtol=1e-12)
    for m in done.distance[1:]:
        np.testing.assert_allclose(m.delta, np.sqrt(squares[m.name]), rtol=1e-12)
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    assert manifest["distance_from_base"][0]["delta_norm"] == done.distance[0].delta
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| model.layers.2 | {done.distance[3].delta:.4g} |" in card


def test_a_resumed_merge_says_the_same_distance(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    whole = merge(recipe, tmp_path / "out")

    import weightsmith._engine.local as local

    real = local.Run._do

    def slow(self: Any, task: Any, buffers: Any) -> object:
        if self.tensors >= 3:
            raise KeyboardInterrupt
        return real(self, task, buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.Run, "_do", slow)
        with pytest.raises(KeyboardInterrupt):
            merge(recipe, tmp_path / "again", threads=1)
    again = merge(recipe, tmp_path / "again")
    assert again.resumed >= 3
    assert again.distance == whole.distance
    assert (tmp_path / "again" / "README.md").read_text().splitlines()[10:] == (
        tmp_path / "out" / "README.md"
    ).read_text().splitlines()[10:]


def test_without_a_base_there_is_no_distance(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path).replace("task_arithmetic", "linear").replace(f"base_model: {tmp_path}/base\n", "")
    done = merge(recipe, tmp_path / "out")
    assert done.distance == ()
    assert "Distance" not in (tmp_path / "out" / "README.md").read_text()


# ---- the spectrum


def spectra(arrays: list[np.ndarray], shape: tuple[int, ...], folder: Path, name: str = "w", **steps: Any) -> np.ndarray:
    """Merged delta of a sum of task vectors in float64, with a step after it."""
    shared = GTA | steps
    got = run_method(
        folder, "task_arithmetic", arrays, shared=shared, models=OWN, base=True, out=DTYPES["F64"], name=name, threads=2
    )
    return (got - f64(arrays)[0]).reshape(shape)


@pytest.mark.long
def test_the_spectrum_is_flattened_and_raised(tmp_path: Path) -> None:
    arrays = fine_tunes((60, 90), 2, np.float64)
    u, s, vt = np.linalg.svd(spectra(arrays, (60, 90), tmp_path / "a"), full_matrices=False)
    flat = spectra(arrays, (60, 90), tmp_path / "b", spectrum="flatten", spectrum_strength=0.4)
    np.testing.assert_allclose(flat, (u * (0.6 * s + 0.4 * s.mean())) @ vt, rtol=1e-8, atol=1e-10)
    raised = spectra(arrays, (60, 90), tmp_path / "c", spectrum="floor", spectrum_strength=0.2)
    star = s[np.searchsorted(np.cumsum(s), 0.2 * s.sum())]
    np.testing.assert_allclose(raised, (u * np.maximum(s, star)) @ vt, rtol=1e-8, atol=1e-10)


@pytest.mark.long
def test_calibration_follows_any_method_and_is_svc_after_task_arithmetic(tmp_path: Path) -> None:
    arrays = fine_tunes((60, 90), 2, np.float64)
    svc = run_method(
        tmp_path / "a", "svc", arrays, shared={"alpha": None, "lambda": 1.0}, models=OWN, base=True, out=DTYPES["F64"]
    )
    step = spectra(arrays, (60, 90), tmp_path / "b", spectrum="calibrate")
    np.testing.assert_allclose(step, svc - f64(arrays)[0], rtol=1e-8, atol=1e-12)
    plain = merged_delta(tmp_path / "c", arrays)
    after_ties = merged_delta(tmp_path / "d", arrays, spectrum="calibrate", spectrum_strength=1.0)
    assert np.linalg.norm(after_ties) < np.linalg.norm(plain)


def test_the_spectrum_of_what_is_no_linear_layer_is_left_alone(tmp_path: Path) -> None:
    arrays = fine_tunes((60, 90), 2, np.float64)
    name = "model.embed_tokens.weight"
    plain = spectra(arrays, (60, 90), tmp_path / "a", name=name)
    np.testing.assert_array_equal(spectra(arrays, (60, 90), tmp_path / "b", name=name, spectrum="flatten"), plain)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_spectrum_then_norm_then_scale_for_any_cut(kind: Any, tmp_path: Path) -> None:
    arrays = fine_tunes((300, 517), 2, kind)
    shared = MEAN | {"spectrum": "flatten", "norm_match": "mean", "delta_scale": 0.5}
    out = DTYPES["F32" if kind is np.float32 else "BF16"]
    outs = [
        run_method(tmp_path / str(i), "ties", arrays, shared=shared, models=OWN, base=True, out=out, threads=t, tile_bytes=b)
        for i, (t, b) in enumerate([(1, 1), (3, 1 << 20)])
    ]
    assert outs[0].tobytes() == outs[1].tobytes()
    delta = outs[0].astype(np.float64) - f64(arrays)[0]
    target = 0.5 * np.mean([np.linalg.norm(d) for d in deltas(arrays)])
    np.testing.assert_allclose(np.linalg.norm(delta), target, rtol=0.02 if out.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_a_merge_of_what_is_no_number_is_published_where_it_is_allowed(value: float, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    tensors = {"w.weight": np.full((4, 4), value, np.float32), "v.weight": np.ones(3, np.float32)}
    for name in ("base", "a"):
        write_checkpoint(tmp_path / name, tensors)
    done = merge(recipe, tmp_path / "out", allow_nonfinite=True)
    assert not np.isfinite(done.distance[0].base)
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    assert manifest["distance_from_base"][0]["base_norm"] is None
