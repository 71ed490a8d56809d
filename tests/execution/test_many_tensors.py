"""Memory of models with many small tensors: what a tensor takes stays below what the plan counts for it."""

from __future__ import annotations

import gc
import secrets
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from weightsmith._execution.options import tensors_bytes
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions

FEW, MANY = 1_000, 3_000
QUIET: dict[str, Any] = {"progress": False, "check_loading": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of models with few and with many tensors, in several files."""
    folder, rng = tmp_path_factory.mktemp("models"), np.random.default_rng(0)
    for n in (FEW, MANY):
        for model in "ab":
            numbers = rng.standard_normal((n, 8, 8)).astype(np.float16)
            tensors = {f"model.layers.{i // 50}.mlp.experts.{i % 50}.up_proj.weight": numbers[i] for i in range(n)}
            config = {"model_type": "x"}
            weightsmith.save_model(tensors, folder / f"{model}{n}", max_shard_bytes=n * 128 // 4, config=config, fsync=False)
    return folder


def recipe(models: Path, n: int) -> dict[str, Any]:
    listed = [{"model": str(models / f"{model}{n}"), "parameters": {"weight": 0.5}} for model in "ab"]
    return {"merge_method": "linear", "models": listed}


def counted(models: Path, n: int) -> int:
    """What a plan counts for the records of the tensors."""
    with prepare_any(recipe(models, n), RecipeOptions(check_loading=False), QuantizeSettings()) as prepared:
        return tensors_bytes(prepared)


def merge(models: Path, out: Path, n: int) -> None:
    weightsmith.merge(recipe(models, n), out / secrets.token_hex(4), threads=1, fsync=False, **QUIET)


def plan(models: Path, out: Path, n: int) -> None:
    weightsmith.plan(recipe(models, n), check_loading=False).summary()


def run_part(models: Path, out: Path, n: int) -> None:
    plan = weightsmith.plan(recipe(models, n), max_shard_bytes=n * 128 // 4, check_loading=False)
    weightsmith.run(plan, out / secrets.token_hex(4), part=(1, 2), threads=1, progress=False)


def diff(models: Path, out: Path, n: int) -> None:
    str(weightsmith.diff(models / f"a{n}", models / f"b{n}", threads=1, progress=False))


def bytes_of_a_tensor(work: Callable[[int], None]) -> float:
    """The slope of the peak. What is compiled and imported once is there before."""
    work(FEW)
    peaks = []
    for n in (FEW, MANY):
        gc.collect()
        tracemalloc.start()
        try:
            work(n)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return (peaks[1] - peaks[0]) / (MANY - FEW)


@pytest.mark.matrix("merge")
@pytest.mark.long
@pytest.mark.parametrize("command", [plan, merge, run_part], ids=lambda command: command.__name__)
def test_a_tensor_takes_less_than_the_plan_counts(command: Callable[..., None], models: Path, tmp_path: Path) -> None:
    counted_bytes = (counted(models, MANY) - counted(models, FEW)) / (MANY - FEW)
    taken = bytes_of_a_tensor(lambda n: command(models, tmp_path, n))
    assert taken < counted_bytes


@pytest.mark.process
@pytest.mark.slow
def test_a_comparison_takes_a_few_kilobytes_for_a_tensor(models: Path, tmp_path: Path) -> None:
    taken = bytes_of_a_tensor(lambda n: diff(models, tmp_path, n))
    assert taken < 4_000
