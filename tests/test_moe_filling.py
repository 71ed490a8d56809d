"""Router weights are computed while the engine copies: order, interruption, errors."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.test_moe_gates import models, recipe_of, told
from weightsmith.api import execute, execute_mixture, moe
from weightsmith.engine.local import Progress
from weightsmith.errors import CannotResume, PlanError, WeightsmithError
from weightsmith.mixture import PreparedMoe, build, prepare_moe
from weightsmith.store.manifest import MANIFEST_NAME

__all__ = ["models"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST_NAME}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Router weights are there when it is set, and not before."""
    opened = threading.Event()
    plain = build.route

    def route(*args: Any, **kwargs: Any) -> Any:
        assert opened.wait(60)
        return plain(*args, **kwargs)

    monkeypatch.setattr(build, "route", route)
    return opened


def interrupt_when_waiting(gate: threading.Event) -> Callable[[Progress], None]:
    """Stops the engine when all else is done; the computation ends a little later, as a long one would."""

    def interrupt(now: Progress) -> None:
        if now.waiting:
            threading.Timer(0.3, gate.set).start()
            raise KeyboardInterrupt

    return interrupt


def test_all_else_is_done_before_router_weights_are_there(models: Path, tmp_path: Path, gate: threading.Event) -> None:
    recipe = recipe_of(models, told(0, 1))
    seen: list[Progress] = []

    def progress(now: Progress) -> None:
        seen.append(now)
        if now.waiting and now.tensors == now.total_tensors - 2:  # a router in each of two layers
            gate.set()

    merged = moe(recipe, tmp_path / "out", progress=progress)
    assert gate.is_set()
    assert not seen[-1].waiting
    assert seen[-1].tensors == seen[-1].total_tensors == len(merged.plan.steps)
    assert {f.name for f in tmp_path.iterdir()} == {"out"}
    moe(recipe, tmp_path / "again")
    assert tree(tmp_path / "out") == {k: v.replace(b"again", b"out") for k, v in tree(tmp_path / "again").items()}


def test_ctrl_c_while_it_waits_keeps_what_is_copied(models: Path, tmp_path: Path, gate: threading.Event) -> None:
    recipe = recipe_of(models, told(0, 1))

    with pytest.raises(KeyboardInterrupt):
        moe(recipe, tmp_path / "out", progress=interrupt_when_waiting(gate))
    assert not any(thread.name == "weightsmith-fill" for thread in threading.enumerate())
    assert not (tmp_path / "out").exists()
    merged = moe(recipe, tmp_path / "out")
    assert merged.resumed == len(merged.plan.steps) - 2
    moe(recipe, tmp_path / "fresh")
    assert tree(tmp_path / "out") == {k: v.replace(b"fresh", b"out") for k, v in tree(tmp_path / "fresh").items()}


def test_a_computation_that_nobody_waits_for_ends_with_its_layer(models: Path, tmp_path: Path) -> None:
    """The engine's progress function raises while the first layer is computed."""
    at_work, layers = threading.Event(), []

    def filling(done: int, total: int) -> None:
        layers.append(done)
        at_work.set()
        time.sleep(0.5)

    def interrupt(now: Progress) -> None:
        if at_work.is_set():
            raise KeyboardInterrupt

    with prepare_moe(recipe_of(models, told(0, 1))) as prepared, pytest.raises(KeyboardInterrupt):
        execute_mixture(prepared, tmp_path / "out", filling=filling, progress=interrupt)
    assert set(layers) == {0}


def test_an_error_of_the_prompts_leaves_nothing(models: Path, tmp_path: Path) -> None:
    """It is found while experts are copied: no run of this recipe can go on from them."""
    experts = [{"positive_prompts": ["zzz"]}, {"positive_prompts": ["yyy"]}]
    with pytest.raises(PlanError, match="have the same router weights"):
        moe(recipe_of(models, experts, gate_mode="hidden"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_is_not_finite_leaves_nothing(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "a", tmp_path / "a")
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "a/model.safetensors", {"format": "pt"})
    recipe = recipe_of(models, told(0, 1)) | {"base_model": str(tmp_path / "a")}
    with pytest.raises(WeightsmithError, match="hidden states are not finite in layer 1") as caught:
        moe(recipe, tmp_path / "out")
    assert "Nothing was written." in str(caught.value)
    assert {f.name for f in tmp_path.iterdir()} == {"a"}


def test_an_error_of_a_later_run_keeps_what_an_earlier_one_copied(models: Path, tmp_path: Path, gate: threading.Event) -> None:
    recipe = recipe_of(models, told(0, 1))
    with pytest.raises(KeyboardInterrupt):
        moe(recipe, tmp_path / "out", progress=interrupt_when_waiting(gate))
    with pytest.raises(PlanError, match="the device 'warp'"):
        moe(recipe, tmp_path / "out", device="warp")
    assert moe(recipe, tmp_path / "out").resumed


def test_a_plan_that_nobody_fills_is_an_error(models: Path, tmp_path: Path) -> None:
    with prepare_moe(recipe_of(models, told(0, 1))) as prepared, pytest.raises(ValueError, match="not computed"):
        execute(prepared.prepared, tmp_path / "out")


def test_router_weights_are_not_computed_twice(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after they were computed."""
    from weightsmith.store import staging

    recipe = recipe_of(models, told(0, 1))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "publish", fail)
        with pytest.raises(KeyboardInterrupt):
            moe(recipe, tmp_path / "out")
    monkeypatch.setattr(build, "route", fail)
    merged = moe(recipe, tmp_path / "out")
    assert merged.resumed == len(merged.plan.steps)
    assert (tmp_path / "out/routing.json").exists()
    assert {f.name for f in tmp_path.iterdir()} == {"out"}


def test_work_with_other_prompts_is_not_gone_on_with(models: Path, tmp_path: Path) -> None:
    """Everything the router weights follow from is part of what is resumed: they themselves are not known yet."""

    def interrupt(now: Progress) -> None:
        if now.tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moe(recipe_of(models, told(0, 1)), tmp_path / "out", progress=interrupt)
    with pytest.raises(CannotResume):
        moe(recipe_of(models, told(0, 2)), tmp_path / "out")


def test_identity_is_of_what_router_weights_follow_from(models: Path) -> None:
    def identity(**more: Any) -> str:
        with prepare_moe(recipe_of(models, told(0, 1), **more)) as prepared:
            assert isinstance(prepared, PreparedMoe)
            return prepared.computed.state_hash

    found = [identity(), identity(gate_mode="hidden"), identity(router_scale=2), identity(gate_mode="random")]
    assert len(set(found)) == len(found)
    assert identity() == found[0]
    others = [told(0, 1), told(0, 2), [{}, {}]]
    for mode, kinds in (("random", 1), ("cheap_embed", 2)):
        told_apart = set()
        for experts in others[: 3 if mode == "random" else 2]:
            with prepare_moe(recipe_of(models, experts, gate_mode=mode)) as prepared:
                assert isinstance(prepared, PreparedMoe)
                told_apart.add(prepared.identify())
        assert len(told_apart) == kinds  # prompts count where they are used
