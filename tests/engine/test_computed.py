"""The result of a plan as a source of tensors: every test that a source must pass, and the bytes that the engine writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.plan_help import prepare
from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.computed import ComputedSource
from weightsmith._engine.local import open_merge
from weightsmith._engine.resources import Cut, Resources
from weightsmith._engine.schedule import ActiveStep, LeafPass, Scheduler
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._planning.options import RecipeOptions
from weightsmith._plans import COPY, Block, ModelInput, PlanDraft, Provenance, Read, Settings, Step
from weightsmith.abc.job import Bytes, Job, Tile
from weightsmith.abc.tensors import Tensors, read
from weightsmith.testing import SourceCase, SourceTests

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"model.embed_tokens.weight": (1100, 300), "model.norm.weight": (5,), "lm_head.weight": (7, 300)}
LAYER = "model.layers.0.mlp."
LINEAR_LAYERS = {f"{LAYER}down_proj.weight": (300, 400), f"{LAYER}up_proj.weight": (400, 300)}
LINEAR = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "parameters": {"weight": 0.5}}
TIES = {
    "merge_method": "ties",
    "base_model": "c",
    "models": [{"model": "a"}, {"model": "b"}],
    "parameters": {"weight": 1, "density": 0.3},
}
METHODS: dict[str, dict[str, Any]] = {
    "linear": LINEAR,
    "ties": TIES,
    "dare_ties": {**TIES, "merge_method": "dare_ties"},
    "breadcrumbs": {**TIES, "merge_method": "breadcrumbs", "parameters": {"weight": 1, "density": 0.5, "gamma": 0.1}},
    "slerp": {"merge_method": "slerp", "base_model": "a", "models": [{"model": "b"}], "parameters": {"t": 0.3}},
    "model_stock": {"merge_method": "model_stock", "base_model": "c", "models": [{"model": "a"}, {"model": "b"}]},
    "nuslerp": {
        **LINEAR,
        "merge_method": "nuslerp",
        "parameters": {"weight": 1, "nuslerp_flatten": False},
    },
    "arcee_fusion": {"merge_method": "arcee_fusion", "base_model": "a", "models": [{"model": "b"}]},
}


def write(folder: Path, seed: int, dtype: Any = BF16, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
    rng = np.random.default_rng(seed)
    write_checkpoint(folder, {name: rng.standard_normal(shape).astype(dtype) for name, shape in sorted(shapes.items())})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("computed")
    for seed, name in enumerate("abc"):
        write(root / name, seed)
    write(root / "x", 4, np.float32)
    return root


def at(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    base = {"base_model": str(folder / recipe["base_model"])} if "base_model" in recipe else {}
    return {**recipe, **base, "models": [{"model": str(folder / entry["model"])} for entry in recipe["models"]]}


def computed(folder: Path, recipe: dict[str, Any], **options: Any) -> ComputedSource:
    """The result of a recipe, whose models are folders in `folder`."""
    prepared = prepare(at(folder, recipe), RecipeOptions(**options))
    return ComputedSource(prepared.plan, prepared.inputs, "merged")


def opened(folder: Path, recipe: dict[str, Any], resources: Resources, **options: Any) -> ComputedSource:
    """The same, with the products that it needs."""
    prepared = prepare(at(folder, recipe), RecipeOptions(**options))
    return open_merge(prepared.plan, prepared.inputs, "merged", resources)


def written(folder: Path, recipe: dict[str, Any], out: Path, **options: Any) -> dict[str, np.ndarray]:
    """What the engine writes of it."""
    weightsmith.merge(at(folder, recipe), out, progress=False, fsync=False, **options)
    with open_checkpoint(out) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


class TestComputed(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        for seed, name in enumerate("abcx"):
            write(tmp_path / name, seed)
        expected = written(tmp_path, TIES, tmp_path / "out")

        def opened() -> Tensors:
            return computed(tmp_path, TIES)

        def other() -> Tensors:
            return computed(tmp_path, {**LINEAR, "models": [{"model": "x"}]})

        return SourceCase(opened, expected, other)


@pytest.mark.long
@pytest.mark.parametrize("tile_bytes", [1, 300_000, 1 << 20])
@pytest.mark.parametrize("method", METHODS)
def test_any_tiles_are_what_the_engine_writes(method: str, tile_bytes: int, folder: Path, tmp_path: Path) -> None:
    expected = written(folder, METHODS[method], tmp_path / "out", seed=3)
    source = computed(folder, METHODS[method], seed=3)
    source.set_run(Resources(tile_bytes=tile_bytes, aligned_bytes=tile_bytes))
    assert list(source.specs) == list(expected)
    for name, array in expected.items():
        assert read(source, name).tobytes() == array.tobytes(), name
    source.close()


@pytest.mark.long
@pytest.mark.parametrize("method", ["ties", "nuslerp"])
def test_threads_share_the_statistics(method: str, folder: Path, tmp_path: Path) -> None:
    expected = written(folder, METHODS[method], tmp_path / "out")
    source = computed(folder, METHODS[method])
    source.set_run(Resources(tile_bytes=1))
    parts: dict[int, bytes] = {}

    def work(k: int) -> None:
        parts[k] = read(source, "model.embed_tokens.weight", slice(k * 100, k * 100 + 100)).tobytes()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(parts[k] for k in range(11)) == expected["model.embed_tokens.weight"].tobytes()
    source.close()


class Counted(Job):
    """Two passes; says which tiles were taken, and how many at once."""

    def __init__(self, *, sequential: bool) -> None:
        self.sequential = sequential
        self.taken: list[tuple[int, int]] = []
        self.finished: list[list[int]] = []
        self.busy = self.most = 0
        self.lock = threading.Lock()

    def passes(self) -> int:
        return 2

    def count(self, k: int) -> int:
        with self.lock:
            self.taken.append((len(self.finished), k))
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(0.005)
        with self.lock:
            self.busy -= 1
        return k * k

    def finish_pass(self, number: int, results: list[int]) -> None:
        self.finished.append(results)

    def apply(self, tile: Tile, out: Bytes) -> None:
        raise AssertionError


@pytest.mark.parametrize("sequential", [True, False])
def test_each_tile_of_a_pass_is_taken_once_and_in_order_where_the_job_wants_that(sequential: bool) -> None:
    job = Counted(sequential=sequential)
    step = Step(TensorSpec("w", DTYPES["F32"], (8,)), "linear", ())
    leaf = LeafPass(ActiveStep(step), step, job, 0, [Cut(k, 1) for k in range(8)], applies=False)
    scheduler = Scheduler()
    scheduler.add(leaf)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: scheduler.work(lambda task: job.count(task.tile)), range(4)))
    assert scheduler.error is None
    assert job.finished == [[k * k for k in range(8)]] * 2
    assert sorted(job.taken) == [(number, k) for number in range(2) for k in range(8)]
    assert (job.most == 1) == sequential
    assert (leaf.number, leaf.job) == (2, job)  # it applies the tiles that are read


def test_an_infinity_of_one_model_is_an_error_in_every_thread(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bad = {name: rng.standard_normal(shape).astype(BF16) for name, shape in sorted(SHAPES.items())}
    bad["model.embed_tokens.weight"][900, 7] = np.inf
    write_checkpoint(tmp_path / "bad", bad)
    recipe = {**TIES, "models": [{"model": "a"}, {"model": str(tmp_path / "bad")}]}
    source = computed(folder, recipe)
    source.set_run(Resources(tile_bytes=1))
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            read(source, "model.embed_tokens.weight", slice(k, k + 1))
        except NonFinite as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert "bad, tensor model.embed_tokens.weight" in str(errors[0])
    source.set_run(allow_nonfinite=True)
    assert not np.isfinite(read(source, "model.embed_tokens.weight").astype(np.float32)).all()
    source.close()


def test_a_copied_tensor_is_where_its_model_has_it(folder: Path) -> None:
    source = computed(folder, {"merge_method": "passthrough", "models": [{"model": "a"}]})
    with open_checkpoint(folder / "a") as model:
        place, location = model.location("model.norm.weight"), source.location("model.norm.weight")
        assert place is not None
        assert location is not None
        assert location[1] == place[1]
        assert read(source, "model.norm.weight").tobytes() == model.read("model.norm.weight").tobytes()
    merged = computed(folder, LINEAR)
    assert merged.location("model.norm.weight") is None
    source.close()
    merged.close()


def test_a_copied_part_of_a_tensor_is_where_its_model_has_it(folder: Path) -> None:
    name, part = "model.embed_tokens.weight", TensorSpec("part", DTYPES["BF16"], (7, 300))
    step = Step(part, COPY, (Read(0, name, Block(2 * 300, 7, 300, 300)),))
    plan = PlanDraft(Provenance("test"), [ModelInput("a", "", "")], [step], [Settings({}, ({},))]).finish()
    with open_checkpoint(folder / "a") as model:
        source = ComputedSource(plan, [model], "part")
        place = model.location(name)
        assert place is not None
        assert source.location("part") == (place[0], place[1] + 2 * 300 * 2)
        assert read(source, "part").tobytes() == model.read(name)[2:9].tobytes()


@pytest.mark.parametrize(("method", "models", "passes"), [("linear", 2, 0), ("ties", 3, 1)])
def test_a_tensor_is_read_from_its_models_and_once_more_for_each_statistics_pass(
    method: str, models: int, passes: int, folder: Path
) -> None:
    source = computed(folder, METHODS[method])
    read_bytes = models * source.specs["lm_head.weight"].nbytes
    assert source.read_bytes("lm_head.weight") == (read_bytes, passes * read_bytes)
    assert source.statistics_passes("lm_head.weight") == passes
    source.close()


@pytest.mark.long
def test_jobs_that_are_forgotten_are_made_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written(folder, METHODS["dare_ties"], tmp_path / "out")
    monkeypatch.setattr("weightsmith._engine.computed._FEW", 1)
    monkeypatch.setattr("weightsmith._engine.computed._HELD_BYTES", 0)
    source = computed(folder, METHODS["dare_ties"])
    source.set_run(Resources(tile_bytes=1))
    for rows in (slice(0, 500), slice(500, 1100)):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert read(source, name, rows).tobytes() == expected[name][rows].tobytes()
    assert len(source._merges) == 1
    source.close()


# ---- merges that need more than single tiles


WHOLE = {
    "ties of the whole model": {**TIES, "parameters": {"weight": 1, "density": 0.3, "scope": "model"}},
    "ramplus": {**TIES, "merge_method": "ramplus", "parameters": {}},
    "tsv_m": {**TIES, "merge_method": "tsv_m", "parameters": {"weight": 1}},
    "ties with its spectrum changed": {**TIES, "parameters": {"weight": 1, "density": 0.3, "spectrum": "flatten"}},
}


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with linear layers."""
    root = tmp_path_factory.mktemp("layers")
    for seed, name in enumerate("abc"):
        write(root / name, seed, shapes={**SHAPES, **LINEAR_LAYERS})
    return root


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_products_and_whole_matrices_give_what_the_engine_writes(name: str, layers: Path, tmp_path: Path) -> None:
    expected = written(layers, WHOLE[name], tmp_path / "out")
    source = opened(layers, WHOLE[name], Resources(2, tile_bytes=100_000, aligned_bytes=0))
    assert bool(source.plan.products) != source.holds_matrices  # both kinds are among them
    for tensor, array in expected.items():
        assert read(source, tensor).tobytes() == array.tobytes(), tensor
    source.close()


@pytest.mark.long
def test_one_whole_matrix_is_held_where_memory_is_short(layers: Path, tmp_path: Path) -> None:
    expected = written(layers, WHOLE["tsv_m"], tmp_path / "out")
    source = opened(layers, WHOLE["tsv_m"], Resources(1, resident_bytes=1))
    for _ in range(2):
        for tensor in LINEAR_LAYERS:
            assert read(source, tensor).tobytes() == expected[tensor].tobytes()
    held = [merge.leaf for merge in source._merges.values() if merge.leaf.resident_bytes]
    assert [leaf.leaf.out.name for leaf in held] == [f"{LAYER}up_proj.weight"]
    source.close()
