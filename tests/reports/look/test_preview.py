"""`preview`: what a merge did to its models, before it is made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.kernels import reference
from tests.reports.look.models import changed, low_rank, save, trained, weights
from weightsmith._base.errors import PlanError, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._plans import COPY, Block, Gather, ModelInput, Plan, Provenance, Read, Settings, Step, Table
from weightsmith._reports.look import preview as module
from weightsmith._reports.look.preview import KIND, sample, survivals

Recipe = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("preview")
    return {
        "base": save(folder / "base", weights()),
        "a": changed(folder / "a", low_rank(6, 1)),
        "b": changed(folder / "b", trained),
        "c": changed(folder / "c", low_rank(6, 3, size=0.01)),
    }


def recipe(folders: Mapping[str, Path], method: str = "ties", names: str = "abc", **parameters: Any) -> Recipe:
    per_model = {"weight": 1.0, "density": 0.5} if method == "ties" else {"weight": 1.0}
    models = [{"model": str(folders[name]), "parameters": dict(per_model)} for name in names]
    return {"merge_method": method, "base_model": str(folders["base"]), "models": models, "parameters": parameters}


def preview(of: Recipe, **options: Any) -> weightsmith.Preview:
    return weightsmith.preview(of, progress=False, **options)


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a fifth of the matrices of the small models."""
    monkeypatch.setattr(module, "SAMPLE_ELEMENTS", 8192)
    monkeypatch.setattr(module, "GROUP_ELEMENTS", 320)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "parameters"), [("ties", {}), ("ties", {"scope": "model"}), ("tsv_m", {})], ids=["tiles", "product", "matrices"]
)
def test_in_full_it_is_what_the_merge_does(
    folders: Mapping[str, Path], tmp_path: Path, method: str, parameters: dict[str, Any]
) -> None:
    if method == "tsv_m":
        pytest.importorskip("torch")
    of = recipe(folders, method, **parameters)
    previewed = preview(of, full=True)
    assert (previewed.looked_at, previewed.names) == (previewed.elements, tuple(str(folders[name]) for name in "abc"))
    weightsmith.merge(of, tmp_path / "merged", progress=False)
    opened = {name: weightsmith.open_checkpoint(path) for name, path in {**folders, "m": tmp_path / "merged"}.items()}
    names = list(opened["base"].specs)
    values = {name: [model.read(n).astype(np.float32).reshape(-1) for n in names] for name, model in opened.items()}
    deltas = {
        k: np.concatenate([x - y for x, y in zip(v, values["base"], strict=True)]).astype(float) for k, v in values.items()
    }
    assert previewed.total.delta == pytest.approx(np.linalg.norm(deltas["m"]), rel=1e-6)
    assert previewed.total.base == pytest.approx(np.linalg.norm(np.concatenate(values["base"]).astype(float)), rel=1e-6)
    for name, kept in zip("abc", previewed.total.models, strict=True):
        energy, survives, used, against, dropped, apart = reference.survival(deltas["m"], deltas[name])
        assert kept is not None
        assert kept.norm == pytest.approx(math.sqrt(energy), rel=1e-6)
        assert kept.survives == pytest.approx(survives / energy, rel=1e-6)
        assert (kept.against, kept.dropped) == pytest.approx((against / used, dropped / used), rel=1e-9)
        assert kept.apart == pytest.approx(math.sqrt(apart / energy), rel=1e-6)
        assert kept.error == 0


@pytest.mark.long
def test_what_is_small_is_not_sampled(folders: Mapping[str, Path]) -> None:
    assert preview(recipe(folders)).to_json() == preview(recipe(folders), full=True).to_json()


@pytest.mark.long
def test_a_sample_is_within_its_error_of_the_whole(folders: Mapping[str, Path], small_samples: None) -> None:
    sampled, full = preview(recipe(folders)), preview(recipe(folders), full=True)
    assert sampled.looked_at < 0.3 * sampled.elements == 0.3 * full.elements
    pairs = [
        (mine, theirs)
        for groups in ((sampled.parts, full.parts), (sampled.layers, full.layers), ([sampled.total], [full.total]))
        for a, b in zip(*groups, strict=True)
        for mine, theirs in zip(a.models, b.models, strict=True)
        if mine is not None and theirs is not None and not math.isnan(mine.survives) and mine.error
    ]
    outside = sum(abs(mine.survives - theirs.survives) > mine.error for mine, theirs in pairs)
    assert len(pairs) > 30
    assert outside <= 0.1 * len(pairs)
    assert sampled.total.delta == pytest.approx(full.total.delta, rel=0.05)


@pytest.mark.long
def test_it_depends_on_neither_threads_nor_run(folders: Mapping[str, Path], small_samples: None) -> None:
    one, three = (json.dumps(preview(recipe(folders), threads=n).to_json(), allow_nan=False) for n in (1, 3))
    assert one == three


@pytest.mark.long
def test_what_may_be_wrong_is_said_in_words(folders: Mapping[str, Path]) -> None:
    of = recipe(folders, "task_arithmetic", "ab")
    of["models"][0]["parameters"]["weight"] = {"filter": "mlp", "value": 0.01}
    of["models"][0]["parameters"]["weight"] = [0.01, 0.01, 1, 1]
    (warning,) = (w.what for w in preview(of).warnings if "loses" in w.what)
    assert "of the energy of its delta in layers 0" in warning
    assert warning.startswith(str(folders["a"]))
    of = recipe(folders, "task_arithmetic", "ac")
    of["models"][0]["parameters"]["weight"] = 4.0
    assert any("as far from" in w.what for w in preview(of).warnings)
    of = recipe(folders, "task_arithmetic", "a")
    of["models"].append({"model": str(folders["base"]), "parameters": {"weight": 1.0}})
    assert preview(recipe(folders)).warnings == ()


@pytest.mark.long
def test_methods_that_look_at_the_whole_model_are_sampled(folders: Mapping[str, Path]) -> None:
    assert preview(recipe(folders, scope="model")).total.models[0].survives > 0.1  # type: ignore[union-attr]


@pytest.mark.long
def test_methods_of_whole_matrices_are_sampled(folders: Mapping[str, Path]) -> None:
    pytest.importorskip("torch")
    previewed = preview(recipe(folders, "tsv_m"))
    assert all(kept is not None and kept.survives > 0 for kept in previewed.total.models)


def test_a_merge_without_a_base_is_compared_with_its_first_model(folders: Mapping[str, Path]) -> None:
    models = [{"model": str(folders[name]), "parameters": {"weight": 0.5}} for name in "ab"]
    previewed = preview({"merge_method": "linear", "models": models})
    assert (previewed.base, previewed.names) == (str(folders["a"]), (str(folders["b"]),))
    (kept,) = previewed.total.models
    assert kept is not None
    assert kept.survives == pytest.approx(0.25, abs=0.02)
    assert kept.apart == pytest.approx(0.5, abs=0.02)


def test_what_merges_nothing_has_no_preview(folders: Mapping[str, Path]) -> None:
    slices = [{"sources": [{"model": str(folders["base"]), "layer_range": [0, 4]}]}]
    with pytest.raises(Unsupported, match="nothing is merged, so there is nothing to preview"):
        preview({"merge_method": "passthrough", "slices": slices})
    with pytest.raises(PlanError):
        preview({"merge_method": "tise"})


def test_a_sample_takes_the_same_rows_of_what_is_gathered_and_of_its_fallback(small_samples: None) -> None:
    spec, rows = TensorSpec("w", DTYPES["BF16"], (400, 64)), np.arange(400, dtype=np.int32)
    block = Block(0, 400, 64, 64)
    tables = Table.of(rows), Table.of(np.where(rows % 2, rows, -1)), Table.of(rows[::-1])
    gather = Gather(1, block, fallback=(Read(0, "w", Gather(2, block)),))
    step = Step(spec, "linear", (Read(0, "w"), Read(1, "w", gather)), settings=0)
    settings = Settings({"normalize": True}, ({"weight": 1.0}, {"weight": 1.0}))
    inputs = ModelInput("a", "", ""), ModelInput("b", "", "")
    sampled = sample(Plan(Provenance("linear"), inputs, (step,), (settings,), tables=tables))
    (sampled_step,) = sampled.plan.steps
    chosen, taken = (read.view for read in sampled_step.inputs)
    assert isinstance(chosen, Gather)
    assert isinstance(taken, Gather)
    picked = sampled.plan.tables[chosen.table].array  # type: ignore[index]
    assert sampled_step.out.shape == (len(picked), 64)
    assert sampled.sizes == {"w": 400 * 64}
    assert (sampled.plan.tables[taken.table].array == tables[1].array[picked]).all()  # type: ignore[index]
    (fallback,) = taken.fallback
    assert (sampled.plan.tables[fallback.view.table].array == 399 - picked).all()  # type: ignore[union-attr,index]


def test_a_product_that_does_not_fit_its_steps_is_rejected() -> None:
    spec = TensorSpec("w", DTYPES["BF16"], (8, 8))
    reads = tuple(Read(k, "w") for k in range(3))
    assert KIND.check(survivals("p", [Step(spec, COPY, reads)])) == ""
    assert "a base, a merge and models" in KIND.check(survivals("p", [Step(spec, COPY, reads[:2])]))
