"""Router weights are a product: they are computed while the engine copies, kept, found again, and part of the plan."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.features.mixture.test_gates import models, recipe_of, told
from weightsmith._app.api import moe, plan
from weightsmith._base.errors import CannotResume, CheckpointError, PlanError, Unsupported, WeightsmithError
from weightsmith._engine.local import Progress
from weightsmith._engine.product_graph import ProductGraph
from weightsmith._features.mixture import router
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._plans import Product
from weightsmith.abc.product import ProductContext

__all__ = ["models"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST_NAME}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Router weights are there when it is set, and not before."""
    opened = threading.Event()
    plain = router.route

    def route(*args: Any) -> Any:
        assert opened.wait(60)
        return plain(*args)

    monkeypatch.setattr(router, "route", route)
    return opened


def interrupt_when_waiting(gate: threading.Event) -> Callable[[Progress], None]:
    """Stops the engine when all else is done; the computation ends a little later, as a long one would."""

    def interrupt(now: Progress) -> None:
        if now.waiting:
            threading.Timer(0.3, gate.set).start()
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.long
def test_all_else_is_done_before_router_weights_are_there(models: Path, tmp_path: Path, gate: threading.Event) -> None:
    recipe = recipe_of(models, told(0, 1))
    seen: list[Progress] = []

    def progress(now: Progress) -> None:
        seen.append(now)
        if now.waiting and now.tensors == now.total_tensors - 2:  # a router in each of two layers
            assert now.computation is not None
            gate.set()

    merged = moe(recipe, tmp_path / "out", progress=progress)
    assert gate.is_set()
    assert not seen[-1].waiting
    assert seen[-1].tensors == seen[-1].total_tensors == len(merged.plan.steps)
    assert {f.name for f in tmp_path.iterdir()} == {"out"}
    moe(recipe, tmp_path / "again")
    assert tree(tmp_path / "out") == {k: v.replace(b"again", b"out") for k, v in tree(tmp_path / "again").items()}


@pytest.mark.long
def test_ctrl_c_while_it_waits_keeps_what_is_copied(models: Path, tmp_path: Path, gate: threading.Event) -> None:
    recipe = recipe_of(models, told(0, 1))

    with pytest.raises(KeyboardInterrupt):
        moe(recipe, tmp_path / "out", progress=interrupt_when_waiting(gate))
    assert not any(thread.name == "weightsmith-product" for thread in threading.enumerate())
    assert not (tmp_path / "out").exists()
    merged = moe(recipe, tmp_path / "out")
    assert merged.resumed == len(merged.plan.steps) - 2
    moe(recipe, tmp_path / "fresh")
    assert tree(tmp_path / "out") == {k: v.replace(b"fresh", b"out") for k, v in tree(tmp_path / "fresh").items()}


@pytest.mark.slow
def test_a_computation_that_nobody_waits_for_ends_with_its_layer(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress function raises while the first layer is computed."""
    done: list[int] = []
    plain = ProductGraph.context

    def slow(self: ProductGraph, product: Product, *args: Any) -> ProductContext:
        context = plain(self, product, *args)

        def progress(*now: int) -> None:
            context.progress(*now)
            time.sleep(0.3)

        return replace(context, progress=progress)

    monkeypatch.setattr(ProductGraph, "context", slow)

    def interrupt(now: Progress) -> None:
        if now.computation is not None and now.computation.total:
            done.append(now.computation.done)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moe(recipe_of(models, told(0, 1)), tmp_path / "out", progress=interrupt)
    assert len(done) == 1
    assert not any(thread.name == "weightsmith-product" for thread in threading.enumerate())


def test_an_error_of_the_prompts_leaves_nothing(models: Path, tmp_path: Path) -> None:
    """It is found while experts are copied: no run of this recipe can resume from them."""
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


@pytest.mark.cpu
@pytest.mark.slow
def test_an_error_of_a_later_run_keeps_what_an_earlier_one_copied(
    models: Path, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(models, told(0, 1))
    with pytest.raises(KeyboardInterrupt):
        moe(recipe, tmp_path / "out", progress=interrupt_when_waiting(gate))
    with pytest.raises(CannotResume, match="device: cpu -> warp"):
        moe(recipe, tmp_path / "out", device="warp")

    def fail(*args: Any) -> None:
        raise Unsupported("no router today")

    with monkeypatch.context() as patch:
        patch.setattr(router, "route", fail)
        with pytest.raises(Unsupported, match="no router today"):
            moe(recipe, tmp_path / "out")
    assert moe(recipe, tmp_path / "out").resumed


@pytest.mark.long
@pytest.mark.parametrize("damaged", [False, True])
def test_router_weights_are_not_computed_twice(
    damaged: bool, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after they were computed; what is damaged on the disk is computed again."""
    from weightsmith._outputs import staging

    recipe = recipe_of(models, told(0, 1))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "publish", fail)
        with pytest.raises(KeyboardInterrupt):
            moe(recipe, tmp_path / "out")
    (file,) = next(tmp_path.glob(".out.*/products")).iterdir()
    calls: list[int] = []
    plain = router.route
    monkeypatch.setattr(router, "route", lambda *args: calls.append(1) or plain(*args))
    if damaged:
        data = bytearray(file.read_bytes())
        data[7] ^= 1
        file.write_bytes(data)
    merged = moe(recipe, tmp_path / "out")
    assert len(calls) == damaged
    assert merged.resumed == len(merged.plan.steps) - 2 * damaged
    assert (tmp_path / "out/routing.json").exists()
    assert {f.name for f in tmp_path.iterdir()} == {"out"}


@pytest.mark.slow
def test_work_with_other_prompts_is_not_resumed(models: Path, tmp_path: Path) -> None:
    """Everything the router weights follow from is part of the plan."""

    def interrupt(now: Progress) -> None:
        if now.tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moe(recipe_of(models, told(0, 1)), tmp_path / "out", progress=interrupt)
    with pytest.raises(CannotResume, match=r"experts\[1\]\.positive_prompts\[0\]: .* -> "):
        moe(recipe_of(models, told(0, 2)), tmp_path / "out")


@pytest.mark.slow
def test_the_plan_is_of_what_router_weights_follow_from(models: Path, tmp_path: Path) -> None:
    def router(**options: Any) -> Any:
        (product,) = plan(recipe_of(models, told(0, 1), **options)).products
        return product

    products = [router(), router(gate_mode="hidden"), router(router_scale=2), router(gate_mode="random")]
    assert all(a != b for i, a in enumerate(products) for b in products[:i])
    assert router() == products[0]
    for mode, kinds in (("random", 1), ("cheap_embed", 2)):
        others = [told(0, 1), told(0, 2)]
        apart = {str(plan(recipe_of(models, experts, gate_mode=mode)).products) for experts in others}
        assert len(apart) == kinds  # prompts count where they are used


def test_a_tokenizer_that_changes_is_another_plan(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "a", tmp_path / "a")
    recipe = recipe_of(models, told(0, 1)) | {"base_model": str(tmp_path / "a")}
    first = plan(recipe)
    file = tmp_path / "a/tokenizer.json"
    file.write_text(file.read_text().replace("w59", "w5x"))
    assert plan(recipe).hash != first.hash


def test_a_tokenizer_that_changes_after_it_was_planned_is_an_error(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models / "a", tmp_path / "a")
    recipe = recipe_of(models, told(0, 1)) | {"base_model": str(tmp_path / "a")}
    plain = router.route

    def route(*args: Any) -> Any:
        (tmp_path / "a/tokenizer.json").write_text("{}")
        return plain(*args)

    monkeypatch.setattr(router, "route", route)
    with pytest.raises(CheckpointError, match="has changed since the plan was made"):
        moe(recipe, tmp_path / "out")
    assert {f.name for f in tmp_path.iterdir()} == {"a"}
