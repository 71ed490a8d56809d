"""Thirty checkpoints of a run: in the memory of two, with few files open at once, planned in no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests import plan_help
from tests.cli_help import environment
from tests.mini import write_checkpoint
from tests.plan_help import plan
from tests.work import steps
from weightsmith._engine.resources import INPUTS_BYTES, MIN_TILE_BYTES, TILE_BYTES, fit_tile_bytes, peak_memory_bytes

pytestmark = pytest.mark.process

MANY = 30
CONFIG = {"model_type": "llama", "architectures": ["X"], "num_hidden_layers": 2, "vocab_size": 2_000}


def tensors(seed: int = 0, rows: int = 1_000) -> dict[str, np.ndarray]:
    """10 MB of bf16 in three tensors of several tiles each, and one small one."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (rows, 1_000), "model.norm.weight": (1_000,)}
    shapes |= {f"model.layers.{i}.mlp.up_proj.weight": (2 * rows, 1_000) for i in range(2)}
    return {name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def measured(folder: Path, code: str) -> list[Any]:
    """What a program prints as JSON, a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    measurements: list[Any] = json.loads(done.stdout)
    return measurements


# ---- memory


def test_tiles_of_many_inputs_take_no_more_than_those_of_a_few() -> None:
    assert [fit_tile_bytes(None, 2, n) for n in (1, 2, 4, 8)] == [TILE_BYTES] * 4
    for n in range(8, 65):
        assert fit_tile_bytes(None, 2, n) * n <= INPUTS_BYTES
    assert fit_tile_bytes(None, 2, 1000) == MIN_TILE_BYTES
    assert fit_tile_bytes(300_000_000, 2, MANY) <= fit_tile_bytes(None, 2, MANY)
    most = peak_memory_bytes(fit_tile_bytes(None, 2, 8), 2, 8)
    assert peak_memory_bytes(fit_tile_bytes(None, 2, MANY), 2, MANY) <= most


PEAKS = """
import json
import weightsmith
peaks = []
for recipe in RECIPES:
    weightsmith.merge(recipe, "out", threads=2, fsync=False, overwrite=True)
    # not ru_maxrss, which a child inherits from the process that forked it
    peaks += [int(l.split()[1]) / 1024 for l in open("/proc/self/status") if l.startswith("VmHWM")]
print(json.dumps(peaks))
"""


@pytest.mark.slow
def test_thirty_models_take_the_memory_of_three(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "run" / "checkpoint-0", tensors(), CONFIG)
    for i in range(1, MANY + 1):
        folder = tmp_path / "run" / f"checkpoint-{i}"
        folder.mkdir()
        for name in ("model.safetensors", "config.json"):
            os.link(whole / name, folder / name)  # another model of the same bytes, without the room on the disk
    recipes = []
    for count, pattern in ((3, "./run/checkpoint-[123]"), (MANY, "./run/checkpoint-[!0]*")):
        models = [{"model": pattern, "parameters": {"weight": 1}}]
        recipes.append({"merge_method": "ties", "base_model": "./run/checkpoint-0", "models": models})
        assert len(plan(_in(tmp_path, recipes[-1])).steps[0].inputs) == count + 1
    three, many = measured(tmp_path, f"RECIPES = {recipes!r}\n{PEAKS}")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == (whole / "model.safetensors").stat().st_size
    with weightsmith.open_checkpoint(tmp_path / "out") as out, weightsmith.open_checkpoint(whole) as one:
        assert all((out.read(name) == one.read(name)).all() for name in one.specs)
    # Two threads hold 8 MiB of inputs each instead of 2; 60 MiB more without the bound.
    assert many - three < 30, (three, many)


def _in(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with its paths below a folder."""
    text = json.dumps(recipe).replace('"./run', f'"{folder}/run')
    measurement: dict[str, Any] = json.loads(text)
    return measurement


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_memory(tmp_path: Path) -> None:
    for i in range(12):
        write_checkpoint(tmp_path / f"checkpoint-{i}", tensors(i, rows=200), CONFIG)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": f"{tmp_path}/checkpoint-*"}],
        "parameters": {"weight": {"ema": 0.9}},
    }
    outputs = set()
    for i, options in enumerate(({"threads": 1}, {"threads": 3}, {"threads": 2, "max_memory_bytes": 185_000_000})):
        weightsmith.merge(recipe, tmp_path / f"out{i}", fsync=False, **options)  # type: ignore[arg-type]
        outputs.add((tmp_path / f"out{i}" / "model.safetensors").read_bytes())
    assert len(outputs) == 1
    weights = [0.9**11, *(0.1 * 0.9 ** (11 - i) for i in range(1, 12))]
    name = "model.layers.1.mlp.up_proj.weight"
    exact = sum(w * tensors(i, rows=200)[name].astype(np.float64) for i, w in enumerate(weights))
    with weightsmith.open_checkpoint(tmp_path / "out0") as out:
        np.testing.assert_array_equal(out.read(name), exact.astype(np.float32).astype(ml_dtypes.bfloat16))


# ---- files and time


@pytest.mark.slow
def test_more_weight_files_than_may_be_open_at_first(tmp_path: Path) -> None:
    for i in range(MANY):
        write_checkpoint(tmp_path / f"checkpoint-{i}", plan_help.decoder(8, seed=i), plan_help.config(8), max_shard_bytes=100)
    assert len(list((tmp_path / "checkpoint-0").glob("*.safetensors"))) * MANY > 400
    code = (
        "import json, resource, weightsmith\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "recipe = {'merge_method': 'linear', 'models': [{'model': './checkpoint-*', 'parameters': {'weight': 1}}]}\n"
        "print(json.dumps(len(weightsmith.merge(recipe, 'out', fsync=False).plan.models)))"
    )
    assert measured(tmp_path, code) == MANY


@pytest.mark.slow
def test_work_grows_with_the_models_not_with_their_square(tmp_path: Path) -> None:
    shapes = {f"mlp.experts.{i}.w.weight": (2, 2) for i in range(20)}
    extra = {f"model.layers.{i}.{name}": shape for i in range(24) for name, shape in shapes.items()}
    for i in range(MANY):
        plan_help.model(tmp_path / f"checkpoint-{i}", 24, seed=0, extra=extra)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": f"{tmp_path}/checkpoint-*"}],
        "parameters": {"weight": {"lawa": 5}},
    }
    p = plan(recipe)  # 17,000 inputs
    assert (len(p.steps), len(p.models)) == (24 * 24 + 3, MANY)
    few = {**recipe, "models": [{"model": f"{tmp_path}/checkpoint-{i}"} for i in range(MANY // 3)]}
    assert steps(lambda: plan(recipe)) < 3.3 * steps(lambda: plan(few))


# ---- models that count for nothing


def runs(folder: Path, count: int) -> list[str]:
    return [str(plan_help.model(folder / f"checkpoint-{i}", 2, seed=i)) for i in range(count)]


def test_models_that_a_schedule_leaves_out_are_not_read(tmp_path: Path) -> None:
    names = runs(tmp_path, 5)
    listed = [{"model": name} for name in names]
    recipe = {"merge_method": "linear", "models": listed, "parameters": {"weight": {"lawa": 2}}}
    p = plan(recipe)
    assert {i.model for step in p.steps for i in step.inputs} == {3, 4}
    assert {(d.model, d.reason) for d in p.dropped} == {(k, "its weight is 0") for k in range(3)}
    (note,) = [w for w in p.warnings if "not read" in w.what]
    assert note.what == "3 models are not read: their weights are 0 for every tensor"
    assert note.details == tuple(names[:3])
    weightsmith.merge(recipe, tmp_path / "a", fsync=False)
    two = {"merge_method": "linear", "models": listed[3:], "parameters": {"weight": 0.5}}
    weightsmith.merge(two, tmp_path / "b", fsync=False)
    held = [(tmp_path / out / "model.safetensors").read_bytes() for out in "ab"]
    assert held[0] == held[1]


def test_a_model_that_counts_for_some_tensors_is_read_for_those(tmp_path: Path) -> None:
    names = runs(tmp_path, 2)
    some = {"weight": [{"filter": "mlp", "value": 1}, {"value": 0}]}
    recipe = {
        "merge_method": "linear",
        "models": [{"model": n, "parameters": w} for n, w in zip(names, ({"weight": 1}, some), strict=True)],
    }
    p = plan(recipe)
    for step in p.steps:
        assert [i.model for i in step.inputs] == ([0, 1] if "mlp" in step.out.name else [0])
    assert not [w for w in p.warnings if "not read" in w.what]
    held = [weightsmith.open_checkpoint(n) for n in names]
    tensors = [{name: m.read(name) for name in m.specs} for m in held]
    for m in held:
        m.close()
    zero = weightsmith.merge_state_dicts("linear", [t | {} for t in tensors], weight=[1, 0])
    assert {n: a.tobytes() for n, a in zero.items()} == {n: a.tobytes() for n, a in tensors[0].items()}


def test_where_all_weights_are_zero_all_models_are_read(tmp_path: Path) -> None:
    listed = [{"model": n} for n in runs(tmp_path, 2)]
    p = plan({"merge_method": "linear", "models": listed, "parameters": {"weight": 0, "normalize": False}})
    assert all(len(step.inputs) == 2 for step in p.steps)


def test_methods_without_weights_read_every_model(tmp_path: Path) -> None:
    base, *names = runs(tmp_path, 3)
    p = plan({"merge_method": "model_stock", "base_model": base, "models": [{"model": n} for n in names]})
    assert all(len(step.inputs or step.pieces[0].inputs) == 3 for step in p.steps)
