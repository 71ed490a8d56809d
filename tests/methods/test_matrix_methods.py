"""The methods of whole matrices: what must hold of each, which tensors they are for, and their memory, threads and torch."""

from __future__ import annotations

import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import weightsmith
from tests import cli_help
from tests.cases.case import deltas, f64, fine_tunes
from tests.mini import run_method, write_checkpoint
from weightsmith import _methods as methods
from weightsmith._activations.statistics import find_statistic
from weightsmith._base.errors import CannotResume, ParameterError, PlanError
from weightsmith._base.installation import install
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.torch_use import one_thread
from weightsmith._engine.resources import RESIDENT_BYTES, Cut, fit_resident_bytes, fit_tile_bytes, peak_memory_bytes
from weightsmith._engine.schedule import ActivePass, ActiveStep, LeafPass, Scheduler
from weightsmith._execution.identity import merges_on_device, work_identity
from weightsmith._methods import cart, iso_c, iso_cts, resmerge, star, svc, tsv_m, wudi
from weightsmith._methods.jobs.decompose import polar, thin_svd
from weightsmith._methods.jobs.matrix import Deltas, _is_finite
from weightsmith._models.structure.projections import role_of
from weightsmith._plans import Step
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

SHAPES = [(40, 24), (24, 40), (30, 30)]


def tensors(shape: tuple[int, int], count: int, rank: int | None = None, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    matrices = []
    for _ in range(count):
        if rank is None:
            matrices.append(rng.normal(size=shape))
        else:
            matrices.append(rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1])))
    return [torch.from_numpy(m) for m in matrices]


def assert_near(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    scale = max(1e-300, float(torch.linalg.norm(expected)))
    assert float(torch.linalg.norm(got - expected)) <= tolerance * scale


# ---- linear algebra


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [None, 5])
def test_thin_svd_is_an_svd(shape: tuple[int, int], rank: int | None) -> None:
    a = tensors(shape, 1, rank)[0]
    u, s, vt = thin_svd(a)
    assert_near((u * s) @ vt, a)
    expected = torch.linalg.svdvals(a)
    expected[5 if rank else len(expected) :] = 0
    np.testing.assert_allclose(s, expected, atol=1e-9)
    real = rank or min(shape)
    assert_near(u[:, :real].T @ u[:, :real], torch.eye(real, dtype=torch.float64), 1e-9)
    assert not u[:, real:].any()
    assert not vt[real:].any()


def test_polar_is_orthonormal_even_of_nearly_parallel_columns() -> None:
    a = tensors((50, 6), 1)[0]
    a[:, 1] = a[:, 0] + 1e-3 * a[:, 1]
    p = polar(a)
    assert_near(p.T @ p, torch.eye(6, dtype=torch.float64), 1e-8)
    u, _, vt = torch.linalg.svd(a, full_matrices=False)
    assert_near(p, u @ vt, 1e-7)


def test_polar_of_twice_the_same_column_has_its_rank() -> None:
    a = tensors((50, 1), 1)[0]
    p = polar(torch.cat([a, a], 1))
    assert_near(p, torch.cat([a, a], 1) / (np.sqrt(2) * torch.linalg.norm(a)))


# ---- what must hold of each method


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_model_is_its_own_merge(shape: tuple[int, int]) -> None:
    d = tensors(shape, 1)
    assert_near(tsv_m.merge(d, None), d[0])
    assert_near(iso_c.merge(d, 0.0), d[0])
    assert_near(star.merge(d, 1.0, [None]), d[0])
    assert_near(wudi.merge(d, 1e-9), d[0], 1e-4)
    for alpha in (0.1, 1.0):
        assert_near(svc.merge(d, [1.0], alpha), d[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_models_that_share_no_space_are_added_up(shape: tuple[int, int]) -> None:
    u, v = (torch.linalg.qr(a)[0] for a in (tensors((shape[0], 9), 1)[0], tensors((shape[1], 9), 1)[0]))
    size = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    d = [u[:, i : i + 3] @ size @ v[:, i : i + 3].T for i in (0, 3, 6)]
    assert_near(tsv_m.merge(d, 3), sum(d))
    assert_near(wudi.merge(d, 1e-9), sum(d), 1e-5)
    assert_near(svc.merge(d, [1.0] * 3, 1.0), sum(d))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_models_are_counted_once_where_interference_is_removed(shape: tuple[int, int]) -> None:
    d = tensors(shape, 1)
    assert_near(tsv_m.merge(d * 3, min(shape)), d[0])
    assert_near(svc.merge(d * 3, [1.0] * 3, 1 / 3), d[0])
    assert_near(star.merge(d * 3, 1.0, [None] * 3), d[0])
    assert_near(wudi.merge(d * 3, 1e-9), d[0], 1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_iso_c_is_the_flattened_svd_of_the_sum(shape: tuple[int, int]) -> None:
    d = tensors(shape, 3)
    u, s, vt = torch.linalg.svd(sum(d), full_matrices=False)
    assert_near(iso_c.merge(d, 1.0), s.mean() * u @ vt, 1e-8)
    assert_near(iso_c.merge(d, 0.0), sum(d))


def test_iso_c_leaves_directions_alone_that_nobody_moved() -> None:
    d = tensors((40, 24), 2, rank=3)
    s = torch.linalg.svdvals(iso_c.merge(d, 1.0))
    np.testing.assert_allclose(s[:6], float(torch.linalg.svdvals(sum(d)).mean()), rtol=1e-9)
    np.testing.assert_allclose(s[6:], 0, atol=1e-9)


def test_iso_cts_is_isotropic_and_of_full_rank() -> None:
    s = torch.linalg.svdvals(iso_cts.merge(tensors((40, 24), 3), 0.8))
    np.testing.assert_allclose(s, float(s[0]), rtol=1e-9)


def test_tsv_m_wholly_flattened_keeps_each_models_sum_of_singular_values() -> None:
    d = tensors((40, 24), 1)
    s = torch.linalg.svdvals(d[0])[:5]
    got = torch.linalg.svdvals(tsv_m.merge(d, 5, 1.0))
    np.testing.assert_allclose(got[:5], float(s.mean()))
    np.testing.assert_allclose(got[5:], 0, atol=1e-12)
    assert_near(tsv_m.merge(tensors((40, 24), 1, rank=3), 5, 0.0), tensors((40, 24), 1, rank=3)[0])


def test_star_keeps_the_sum_of_singular_values() -> None:
    d = tensors((40, 24), 1)
    kept = star.merge(d, 0.4, [None])
    np.testing.assert_allclose(torch.linalg.svdvals(kept).sum(), torch.linalg.svdvals(d[0]).sum())
    assert 1 < int(torch.linalg.matrix_rank(kept)) < 12


def test_star_with_a_known_rank_leaves_the_rounding_of_the_weights_out() -> None:
    """A LoRA delta stored in bf16: half of the sum of its singular values is rounding, and would go to the kept directions."""
    exact = 1e-3 * tensors((96, 80), 1, rank=4)[0]
    noise = 1e-3 * torch.randn(96, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known, blind = (star.merge([exact + noise], 1.0 - 1e-9, [rank]) for rank in (4, None))
    assert int(torch.linalg.matrix_rank(known)) == 4
    assert int(torch.linalg.matrix_rank(blind)) > 70
    cut = torch.linalg.svdvals(exact + noise)
    truncated = star.merge([exact + noise], 0.6, [4])
    np.testing.assert_allclose(torch.linalg.svdvals(truncated).sum(), cut[:4].sum())
    np.testing.assert_allclose(torch.linalg.svdvals(star.merge([exact + noise], 0.2, [None])).sum(), cut.sum())


def test_wudi_is_the_minimum_of_its_loss_and_both_ways_to_it_agree() -> None:
    d = tensors((8, 40), 3)  # 24 rows in all, fewer than columns
    ridge = 0.1
    grams = [x.T @ x / (x * x).sum() for x in d]
    merged = wudi.merge(d, ridge)
    epsilon = ridge * float(torch.diagonal(sum(grams)).mean())
    gradient = sum((merged - x) @ c for x, c in zip(d, grams, strict=True)) + epsilon * merged
    assert float(gradient.abs().max()) < 1e-12
    wide = [torch.cat([x, torch.zeros(40, 40, dtype=torch.float64)]) for x in d]  # the same, with more rows than columns
    assert_near(wudi.merge(wide, ridge)[:8], merged)


def test_svc_with_a_large_alpha_shrinks_everything_alike() -> None:
    d = tensors((40, 24), 3)
    assert_near(svc.merge(d, [1.0] * 3, 1e6), sum(d) / 1e6)


def test_svc_leaves_out_models_that_did_not_move() -> None:
    d = tensors((40, 24), 1)
    assert_near(svc.merge([*d, torch.zeros_like(d[0])], [0.5, 0.5], 0.5), d[0])


def test_resmerge_of_one_model_keeps_the_residual_and_a_share_of_the_head() -> None:
    d = tensors((40, 24), 1)
    u, s, vt = torch.linalg.svd(d[0], full_matrices=False)
    head = s[0] * torch.outer(u[:, 0], vt[0])
    rest = d[0] - head
    assert_near(resmerge.merge(d, 1, 0.2, 0.7, 1.0), rest + 0.2 * head * torch.linalg.norm(rest) / torch.linalg.norm(head))


def test_resmerge_does_not_shorten_residuals_that_agree_in_part() -> None:
    common, *residuals = tensors((60, 50), 4)
    d = [common + x for x in residuals]
    merged = resmerge.merge(d, 1, 0.0, 0.7, 1.0)
    plain = sum(resmerge.merge([x], 1, 0.0, 0.7, 1.0) for x in d) / 3  # of one model: its residual
    assert float(torch.linalg.norm(merged)) > 1.05 * float(torch.linalg.norm(plain))


def test_resmerge_falls_back_to_the_mean_where_residuals_oppose_each_other() -> None:
    d = tensors((40, 24), 1)[0]
    residual = d - resmerge.merge([d], 1, 0.0, 0.7, 1.0)
    assert float(torch.linalg.norm(resmerge.merge([d, -0.5 * d], 1, 0.0, 0.7, 1.0))) == pytest.approx(
        0.25 * float(torch.linalg.norm(d - residual))
    )


def test_cart_of_full_rank_is_the_mean() -> None:
    xs = tensors((40, 24), 3)
    mean = sum(xs) / 3
    assert float(cart.merge([x - mean for x in xs], 1.0).abs().max()) < 1e-12


# ---- which tensors


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.mlp.experts.7.down_proj.weight",
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.shared_expert.up_proj.weight",
        "transformer.h.0.attn.c_attn.weight",
        "bert.encoder.layer.0.attention.output.dense.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.0.attention.output.weight",
    ],
)
def test_linear_layers_are_known(name: str) -> None:
    assert role_of(TensorSpec(name, DTYPES["BF16"], (64, 32))) == "linear"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.word_embeddings.weight",
        "output.weight",
        "shared.weight",
        "embed_out.weight",
        "model.shared.weight",
        "transformer.output_layer.weight",
        "proj_out.weight",
        "cls.predictions.decoder.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.block_sparse_moe.gate.weight",
        "model.layers.3.mlp.router.weight",
        "model.layers.3.mlp.shared_expert_gate.weight",
        "model.layers.3.block_sparse_moe.router.layer.weight",
        "model.layers.3.mlp.experts.gate_up_proj_bias",
        "model.layers.3.mamba.conv1d.weight",
        "model.layers.3.mamba.A_log",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ],
)
def test_what_is_no_linear_layer_takes_the_mean(name: str, tmp_path: Path) -> None:
    assert role_of(TensorSpec(name, DTYPES["BF16"], (64, 32))) != "linear"
    arrays = fine_tunes((64, 32), 2)
    shared, models = {"directions": 1, "flatten": 0.0, "lambda": 0.5}, [{}, {"weight": 1.0}, {"weight": 1.0}]
    got = run_method(tmp_path, "tsv_m", arrays, shared=shared, models=models, base=True, name=name)
    exact = f64(arrays)[0] + 0.5 * np.mean(deltas(arrays), axis=0)
    np.testing.assert_allclose(got, exact, atol=1e-7)


def test_vectors_and_single_rows_are_no_matrices() -> None:
    for shape in ((64,), (1, 64), (4, 64, 64)):
        assert role_of(TensorSpec("w.weight", DTYPES["BF16"], shape)) == "other"


# ---- memory, threads, torch


class Hoard(Job):
    """A job of two tiles that takes memory, and tells how much is taken."""

    taken = 0
    most = 0
    lock = threading.Lock()

    def __init__(self, size: int) -> None:
        self.resident_bytes = size
        self.began = False

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        with Hoard.lock:
            if not self.began:
                self.began = True
                Hoard.taken += self.resident_bytes
                Hoard.most = max(Hoard.most, Hoard.taken)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        pass

    def apply(self, tile: Tile, out: Bytes) -> None:
        pass


def run_hoards(sizes: list[int], allowed: int) -> tuple[int, int]:
    """Most memory taken at a time, and the number of parts finished."""
    step = Step(TensorSpec("w", DTYPES["F32"], (4,)), "x", ())
    Hoard.taken = Hoard.most = 0
    finished: list[ActivePass] = []

    waiting = iter(sizes)

    def begin(step: Step) -> list[LeafPass]:
        active = ActiveStep(step)
        active.unfinished = 1
        return [LeafPass(active, step, Hoard(next(waiting)), 0, [Cut(0, 2), Cut(2, 2)])]

    scheduler = Scheduler([(step, frozenset())] * len(sizes), (), begin, finished.append, allowed)

    def work() -> None:
        while (task := scheduler.next()) is not None:
            assert isinstance(task.active, LeafPass)
            job = task.active.job
            assert isinstance(job, Hoard)
            if task.phase == 0:
                job.statistics(0, None)  # type: ignore[arg-type]
                time.sleep(0.001)  # so that others begin as well
            elif task.tile == 1:
                with Hoard.lock:
                    Hoard.taken -= job.resident_bytes
            scheduler.done(task, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return Hoard.most, len(finished)


def test_jobs_are_begun_only_while_there_is_memory_for_them() -> None:
    most, finished = run_hoards([40, 40, 40, 0, 40, 0, 40] * 20, 100)
    assert finished == 140
    assert most <= 100


def test_jobs_of_one_byte_count_too() -> None:
    most, finished = run_hoards([1] * 20, 1)
    assert finished == 20
    assert most == 1


def test_a_job_larger_than_the_bound_is_run_alone() -> None:
    most, finished = run_hoards([10, 500, 10, 500], 100)
    assert finished == 4
    assert most == 500


def test_a_finished_part_lets_go_of_its_job() -> None:
    step = Step(TensorSpec("w", DTYPES["F32"], (2,)), "x", ())
    active = ActiveStep(step)
    active.unfinished = 1
    part = LeafPass(active, step, Hoard(10), 0, [Cut(0, 2)])
    scheduler = Scheduler([(step, frozenset())], (), lambda _: [part], lambda _: None, 100)
    for _ in range(2):
        task = scheduler.next()
        assert task is not None
        scheduler.done(task, None)
    assert part.job is None


def test_what_max_memory_leaves() -> None:
    assert fit_resident_bytes(None, 2, 4) == RESIDENT_BYTES
    remaining = fit_resident_bytes(2 << 30, 2, 4)
    assert remaining == (2 << 30) - peak_memory_bytes(fit_tile_bytes(2 << 30, 2, 4), 2, 4) > 1 << 30


def test_one_thread_is_for_the_time_of_the_computation_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            with one_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_is_no_number_is_averaged_not_decomposed(tmp_path: Path) -> None:
    arrays = fine_tunes((40, 30), 2)
    arrays[2][3, 4] = np.nan
    shared, models = {"directions": 2, "flatten": 0.0, "lambda": 1.0}, [{}, {"weight": 1.0}, {"weight": 1.0}]
    got = run_method(tmp_path, "tsv_m", arrays, shared=shared, models=models, base=True, allow_nonfinite=True)
    exact = f64(arrays)[0] + np.mean(deltas(arrays), axis=0)
    assert np.isnan(got).sum() == 1
    np.testing.assert_allclose(got, exact, atol=1e-7)


def make_models(folder: Path) -> None:
    for name, array in zip(("base", "a", "b"), fine_tunes((64, 48), 2), strict=True):
        layers = {f"model.layers.{i}.mlp.up_proj.weight": np.roll(array, i) for i in range(6)}
        write_checkpoint(folder / name, layers | {"model.norm.weight": array[0]}, {"num_hidden_layers": 6})


RECIPE = """merge_method: tsv_m
base_model: {folder}/base
models:
  - model: {folder}/a
  - model: {folder}/b
parameters: {{directions: 4, lambda: 0.8{more}}}
dtype: bfloat16
"""


@pytest.mark.matrix
@pytest.mark.slow
def test_a_whole_merge_is_the_same_with_little_memory_and_any_threads(tmp_path: Path) -> None:
    make_models(tmp_path)
    recipe = RECIPE.format(folder=tmp_path, more="")
    first = weightsmith.merge(recipe, tmp_path / "one", threads=1, card=False)
    for i, options in enumerate([{"threads": 4}, {"threads": 3, "max_memory_bytes": 300 << 20}]):
        again = weightsmith.merge(recipe, tmp_path / f"more{i}", card=False, **options)  # type: ignore[arg-type]
        assert (again.out / "model.safetensors").read_bytes() == (first.out / "model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.slow
def test_the_steps_after_a_merge_apply_and_keep_to_the_memory(tmp_path: Path) -> None:
    make_models(tmp_path)
    weightsmith.merge(RECIPE.format(folder=tmp_path, more=""), tmp_path / "whole", card=False)
    weightsmith.merge(RECIPE.format(folder=tmp_path, more=", delta_scale: 0.5"), tmp_path / "half", card=False)
    name = "model.layers.1.mlp.up_proj.weight"
    read = [weightsmith.open_checkpoint(tmp_path / m).read(name).astype(np.float64) for m in ("base", "whole", "half")]
    np.testing.assert_allclose(read[2] - read[0], 0.5 * (read[1] - read[0]), atol=4e-4)


class NoTorch:
    """Stands before all other finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"blocked: {name}")
        return None


@pytest.mark.parametrize("method", ["tsv_m", "svc", "wudi", "star", "iso_c", "iso_cts", "resmerge", "cart"])
def test_without_torch_the_plan_says_what_to_install(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_models(tmp_path)
    text = f"merge_method: {method}\nmodels:\n  - model: {tmp_path}/a\n  - model: {tmp_path}/b\ndtype: bfloat16\n"
    text += "" if method == "cart" else f"base_model: {tmp_path}/base\n"
    weightsmith.plan(text)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [NoTorch(), *sys.meta_path])
    with pytest.raises(PlanError, match=rf"not installed: run {re.escape(install('torch'))}"):
        weightsmith.plan(text)


def test_the_beta_bounds_of_resmerge_are_in_order(tmp_path: Path) -> None:
    make_models(tmp_path)
    text = RECIPE.format(folder=tmp_path, more="").replace("tsv_m", "resmerge")
    text = text.replace("{directions: 4, lambda: 0.8}", "{beta_min: 1.0, beta_max: 0.5}")
    with pytest.raises(PlanError, match=r"beta_min 1 is above beta_max 0\.5"):
        weightsmith.plan(text)


def test_weights_are_factors_on_the_deltas(tmp_path: Path) -> None:
    arrays = fine_tunes((40, 30), 1, ml_dtypes.bfloat16)
    shared = {"directions": 30, "flatten": 0.0, "lambda": 1.0}
    got = run_method(tmp_path, "tsv_m", arrays, shared=shared, models=[{}, {"weight": -0.5}], base=True)
    np.testing.assert_allclose(got, f64(arrays)[0] - 0.5 * deltas(arrays)[0], atol=1e-8)


def test_torch_has_its_number_of_threads_again_whatever_the_order_of_leaving() -> None:
    """OpenMP has a number for each thread: one that leaves before the last is left with 1, and must not be asked."""

    def elsewhere() -> int:
        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as a, ThreadPoolExecutor(1) as b:
            blocks = one_thread(), one_thread()
            for pool, block in zip((a, b), blocks, strict=True):
                pool.submit(block.__enter__).result()
            assert elsewhere() == 1
            for pool, block in zip((a, b), blocks, strict=True):  # the first to enter leaves first
                pool.submit(block.__exit__, None, None, None).result()
            assert elsewhere() == 3
            again = one_thread()
            a.submit(again.__enter__).result()
            a.submit(again.__exit__, None, None, None).result()
            assert elsewhere() == 3
    finally:
        torch.set_num_threads(before)


# ---- the device


TSV = "merge_method: tsv_m\nbase_model: a\nmodels:\n  - model: b\n  - model: c\n"
SPECTRUM = TSV.replace("tsv_m", "ties") + "parameters: {spectrum: flatten, weight: 0.5, density: 0.5}\n"
SCALED = TSV.replace("base_model: a\n", "base_model: a\nparameters: {delta_scale: 0.5}\n")
TIES = SPECTRUM.replace("spectrum: flatten", "norm_match: mean")
STAGE = TSV.replace("merge_method", "name: tsv\nmerge_method") + "---\n" + TIES.replace("model: b", "model: tsv")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cli_help.make_models(tmp_path, ("a", "b", "c"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.matrix("method")
@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [TSV, SPECTRUM, SCALED, STAGE], ids=["method", "spectrum", "scaled", "stage"])
def test_whole_matrices_are_computed_on_the_device_of_the_run_whatever_torch_finds(
    models: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    seen: set[str] = set()
    make = Deltas.__init__

    def spy(self: Deltas, rows: Any, weights: Any, device: str, **options: Any) -> None:
        seen.add(device)
        make(self, rows, weights, device, **options)

    monkeypatch.setattr(Deltas, "__init__", spy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    weightsmith.merge(recipe, "default", fsync=False)
    assert seen == {"cpu"}
    seen.clear()
    weightsmith.merge(recipe, "chosen", fsync=False, device="cpu:0")
    assert seen == {"cpu:0"}


@pytest.mark.cpu
def test_the_device_is_part_of_the_identity_where_it_changes_numbers(models: Path) -> None:
    for recipe, matters in ((TSV, True), (SPECTRUM, True), (SCALED, True), (TIES, False)):
        plan = weightsmith.plan(recipe)
        assert merges_on_device(plan) == matters, recipe
        assert (work_identity(plan, [], "cuda:1") != work_identity(plan, [], "cpu")) == matters, recipe
        assert work_identity(plan, [], "cuda:1") == work_identity(plan, [], "cuda"), "of one type"


def test_work_of_one_device_is_not_resumed_on_another(models: Path) -> None:
    class Stop(Exception):
        pass

    def stop(now: weightsmith.Progress) -> None:
        if now.tensors:
            raise Stop

    with pytest.raises(Stop):
        weightsmith.merge(TSV, "out", progress=stop, threads=1)
    with pytest.raises(CannotResume) as refused:
        weightsmith.merge(TSV, "out", device="meta")
    assert "device" in str(refused.value)
    assert weightsmith.merge(TSV, "out").resumed


@pytest.mark.long
def test_a_device_that_cannot_be_used_is_found_before_anything_is_read(models: Path) -> None:
    with pytest.raises(ParameterError, match="the device 'nothing' cannot be used"):
        weightsmith.merge(TSV, "out", device="nothing")
    assert [path.name for path in models.iterdir() if "out" in path.name] == []
    weightsmith.merge(TIES, "out", device="nothing", fsync=False)  # nothing is computed there


def test_jobs_that_are_not_portable_are_those_whose_methods_say_so() -> None:
    """A new method of whole matrices that forgets `on_device` would be resumed on another device."""
    for name in methods.NAMES:
        method = methods.get(name)
        shared, model_parameters = (
            {p.name: 0.5 if p.required else p.default for p in method.parameters if p.scope == scope and not p.optional}
            for scope in ("tensor", "model")
        )
        count = 3 if method.max_models is None or method.max_models > 1 else 2
        base = method.base == "required"
        places = tuple(range(count))
        models = ({} if base else model_parameters, *[model_parameters] * (count - 1))
        codes = np.zeros(count, np.int64)
        ones = {statistic.kind: np.ones(find_statistic(statistic.kind).shape(8, 8)) for statistic in method.requires(shared)}
        known = {kind: dict.fromkeys(places, array) for kind, array in ones.items()}
        matrix = Matrix("w", 64, 8, 64, codes, 0, base, shared, models, 0, places, places, (), (8, 8), "linear")
        matrix = replace(matrix, statistics=known)
        try:
            job = method.job(matrix)
        except (IndexError, KeyError, ValueError):  # it reads a product
            assert not method.on_device(shared), name
            continue
        on_cpu_alone = name in ("crossover", "distribution_crossover")  # numpy computes their Fourier transforms
        assert job.portable != (method.on_device(shared) or on_cpu_alone), name


def test_a_sum_that_overflows_does_not_make_finite_rows_infinite() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.full((2, 3, 4), 3e38)
    assert _is_finite(rows)
    rows[1, 2, 3] = torch.nan
    assert not _is_finite(rows)
    rows[1, 2, 2:] = torch.tensor([torch.inf, -torch.inf])
    assert not _is_finite(rows)
