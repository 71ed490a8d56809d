"""Real models of many architectures, merged and loaded by transformers with no missing, unexpected or mismatched key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import zoo
from weightsmith.errors import PlanError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models is not our concern


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def merged(recipe: dict[str, Any], out: Path) -> weightsmith.Merged:
    return weightsmith.merge(recipe, out, fsync=False)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_mean_of_two_models_loads_and_is_the_mean(name: str, tmp_path: Path) -> None:
    a, b = zoo.save(name, tmp_path / "a", 1), zoo.save(name, tmp_path / "b", 2)
    weight = {"parameters": {"weight": 0.5}}
    done = merged({"merge_method": "linear", "models": [{"model": str(a), **weight}, {"model": str(b), **weight}]}, tmp_path / "out")
    _, info = zoo.load(name, tmp_path / "out")
    assert info == {}
    first, second, out = tensors(a), tensors(b), tensors(tmp_path / "out")
    assert out.keys() == first.keys()
    assert done.plan.dropped == ()
    assert done.warnings == ()
    for key, value in out.items():
        assert value.dtype == first[key].dtype
        mean = (first[key].astype(np.float64) + second[key].astype(np.float64)) / 2
        assert np.array_equal(value, mean.astype(value.dtype)), key
