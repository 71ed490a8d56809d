"""Merges of models that are streamed: the bytes of a local merge, and no more traffic than needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import weightsmith
from tests import fake_hub
from tests.cli_help import Ran
from tests.fake_hub import COMMIT, FakeHub
from tests.files.remote.servers import model, serve, write
from tests.fork_help import forked_cli
from weightsmith._base.errors import CheckpointError, PlanError
from weightsmith._files.remote import ahead
from weightsmith._files.remote.folder import HEAD_BYTES

WEIGHTS = "model.safetensors"
LAYERS = 8
Recipe = dict[str, Any]


def linear(*places: object) -> Recipe:
    return {"merge_method": "linear", "models": [{"model": str(p), "parameters": {"weight": 1}} for p in places]}


def ties(*places: object) -> Recipe:
    base, *others = map(str, places)
    models = [{"model": p, "parameters": {"weight": 1, "density": 0.5}} for p in others]
    return {"merge_method": "ties", "base_model": base, "models": models}


def model_ties(*places: object) -> Recipe:
    merge_recipe = ties(*places)
    return {**merge_recipe, "parameters": {"scope": "model"}}


def stack(*places: object) -> Recipe:
    ranges = [([0, 2], places[0]), ([4, 6], places[1])]
    slices = [{"sources": [{"model": str(place), "layer_range": span}]} for span, place in ranges]
    return {"merge_method": "passthrough", "slices": slices}


def mixture(*places: object) -> Recipe:
    experts = [{"source_model": str(p), "positive_prompts": [""]} for p in places[1:]]
    return {"base_model": str(places[0]), "gate_mode": "random", "architecture": "mixtral", "experts": experts}


RECIPES = {"linear": linear, "ties": ties, "model_ties": model_ties, "stack": stack, "mixture": mixture}


def run(name: str, recipe: Recipe, out: Path, **options: Any) -> weightsmith.Merged:
    command = weightsmith.moe if name == "mixture" else weightsmith.merge
    return command(recipe, out, fsync=False, progress=False, check_loading=False, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}


@pytest.fixture(scope="module")
def models() -> list[dict[str, bytes]]:
    return [model(k, layers=LAYERS, width=96) for k in range(3)]


@pytest.fixture
def local(models: list[dict[str, bytes]], tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"local{k}", files) for k, files in enumerate(models)]


def served(models: list[dict[str, bytes]]) -> dict[str, bytes]:
    return {f"m{k}/{name}": data for k, files in enumerate(models) for name, data in files.items()}


@pytest.mark.matrix("linear")
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_bytes_are_those_of_a_local_merge_in_spite_of_faults(
    name: str, models: list[dict[str, bytes]], local: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 64 << 10)
    run(name, RECIPES[name](*local), tmp_path / "expected")
    faults = ("drop", "reset", "cut", "short", "long", "other", "whole", "encoded", "429", "500", "503")
    with serve(served(models), share=0.35, drawn=faults, seed=len(name)) as site:
        places = [f"{site.url}/m{k}" for k in range(3)]
        done = run(name, RECIPES[name](*places), tmp_path / "out")
        assert content(tmp_path / "out") == content(tmp_path / "expected")
        assert len(site.committed) >= 12
    assert done.fetched_bytes == needed(name, models)


def needed(name: str, models: list[dict[str, bytes]]) -> int:
    """Bytes of the tensors that a recipe reads, each once."""
    arrays = [load(files[WEIGHTS]) for files in models]
    if name in ("linear", "ties", "model_ties"):
        return sum(array.nbytes for model_arrays in arrays for array in model_arrays.values())
    if name == "mixture":
        experts = sum(
            array.nbytes for model_arrays in arrays[1:] for tensor, array in model_arrays.items() if ".mlp." in tensor
        )
        return experts + sum(array.nbytes for tensor, array in arrays[0].items() if ".mlp." not in tensor)
    spans = ((0, 1), (4, 5))
    chosen = [
        array.nbytes
        for model_arrays, numbers in zip(arrays, spans, strict=False)
        for tensor, array in model_arrays.items()
        if any(f".layers.{n}." in tensor for n in numbers)
    ]
    return sum(chosen) + sum(array.nbytes for tensor, array in arrays[0].items() if ".layers." not in tensor)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, pytest.param(4, marks=pytest.mark.sweep)])
def test_hundreds_of_faults_change_no_byte(
    local: list[Path], models: list[dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 16 << 10)
    run("ties", ties(*local), tmp_path / "expected")
    faults = 0
    for seed in range(runs):
        drawn = ("drop", "reset", "cut", "short", "long", "other", "whole", "encoded", "429", "500", "503", "lying")
        with serve(served(models), share=0.3, drawn=drawn, seed=seed) as site:
            run("ties", ties(*(f"{site.url}/m{k}" for k in range(3))), tmp_path / f"out{seed}")
            faults += len(site.committed)
        assert content(tmp_path / f"out{seed}") == content(tmp_path / "expected")
    assert faults >= 125 * runs


@pytest.mark.long
def test_a_server_that_breaks_for_good_leaves_work_to_resume(
    local: list[Path], models: list[dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 64 << 10)
    monkeypatch.setattr(ahead, "AHEAD_BLOCKS", 4)
    run("linear", linear(*local), tmp_path / "expected")
    with serve(served(models)) as site:
        recipe = linear(*(f"{site.url}/m{k}" for k in range(3)))

        def break_it(now: Any) -> None:
            if now.tensors >= 20:
                site.faults = ["*500"]

        with pytest.raises(CheckpointError, match="the server answers with status 500, after 8 more attempts"):
            weightsmith.merge(recipe, tmp_path / "out", fsync=False, progress=break_it, threads=1)
        assert not (tmp_path / "out").exists()
        site.faults = []
        done = run("linear", recipe, tmp_path / "out")
        assert done.resumed >= 20
        assert done.fetched_bytes < needed("linear", models)
    assert content(tmp_path / "out") == content(tmp_path / "expected")


@pytest.mark.long
def test_a_model_that_changes_during_a_merge_is_one_error(
    models: list[dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 64 << 10)
    monkeypatch.setattr(ahead, "AHEAD_BLOCKS", 4)
    with serve(served(models)) as site:
        recipe = linear(*(f"{site.url}/m{k}" for k in range(3)))

        def change(now: Any) -> None:
            site.files[f"m1/{WEIGHTS}"] = models[2][WEIGHTS]

        with pytest.raises(CheckpointError, match=rf"m1/{WEIGHTS}: the file has changed since it was first read"):
            weightsmith.merge(recipe, tmp_path / "out", fsync=False, progress=change, threads=1)
        assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_result_of_another_recipe_reads_its_models_once(tmp_path: Path) -> None:
    def staged(*places: object) -> list[Recipe]:
        inner = {**ties(*places), "name": "inner"}
        return [inner, {**ties("inner", places[0], places[2]), "name": "outer"}]

    tensors = [{"w": np.random.default_rng(k).normal(size=(2048, 512)).astype(np.float32)} for k in range(3)]
    models = [{"config.json": b"{}", WEIGHTS: save(model_tensors)} for model_tensors in tensors]  # several tiles in a matrix
    local = [write(tmp_path / f"local{k}", files) for k, files in enumerate(models)]
    weightsmith.merge(staged(*local), tmp_path / "expected", fsync=False, progress=False)
    with serve(served(models)) as site:
        places = [f"{site.url}/m{k}" for k in range(3)]
        done = weightsmith.merge(staged(*places), tmp_path / "out", fsync=False, progress=False, stream_cache_bytes=1)
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    assert done.fetched_bytes == sum(model_tensors["w"].nbytes for model_tensors in tensors)


@pytest.mark.long
def test_an_interrupt_does_not_wait_for_a_silent_server(
    models: list[dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 64 << 10)
    monkeypatch.setattr(ahead, "AHEAD_BLOCKS", 4)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 250)
    with serve(served(models)) as site:
        recipe = linear(*(f"{site.url}/m{k}" for k in range(3)))
        calls = list[int]()

        def interrupt(now: Any) -> None:
            site.stall_seconds = 200
            site.faults = ["*stall"]
            calls.append(now.tensors)
            if len(calls) > 4:  # by then all threads wait for the server
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            weightsmith.merge(recipe, tmp_path / "out", fsync=False, progress=interrupt)
        assert site.woken == 0, "the merge has waited for an answer"
        site.faults = []
        site.go_on.set()


@pytest.mark.long
def test_what_is_looked_at_is_streamed_too(models: list[dict[str, bytes]], local: list[Path]) -> None:
    with serve(served(models)) as site:
        places = [f"{site.url}/m{k}" for k in range(2)]
        assert weightsmith.inspect(places[0], stats=True, progress=False).statistics is not None
        far, near = (weightsmith.diff(*map(str, models), progress=False) for models in (places, local[:2]))
        assert far.total == near.total
        site.sent = 0
        weightsmith.preview(linear_of_base(places), progress=False)
    assert site.sent < 2 * needed("linear", models[:2]) + 6 * HEAD_BYTES


def linear_of_base(places: list[str]) -> Recipe:
    return {**linear(*places), "base_model": places[0], "merge_method": "task_arithmetic"}


@pytest.mark.long
def test_a_plan_is_run_with_the_files_that_it_was_made_for(models: list[dict[str, bytes]], tmp_path: Path) -> None:
    with serve(served(models)) as site:
        plan = weightsmith.plan(linear(f"{site.url}/m0", f"{site.url}/m1"))
        weightsmith.run(plan, tmp_path / "out", fsync=False, progress=False)
        site.files[f"m1/{WEIGHTS}"] = models[2][WEIGHTS]  # the same header
        with pytest.raises(PlanError, match="the files of this model have changed since the plan was made"):
            weightsmith.run(plan, tmp_path / "other", fsync=False, progress=False)


# the hub


@pytest.fixture
def hub(models: list[dict[str, bytes]]) -> Iterator[FakeHub]:
    large = [model(k, layers=LAYERS, width=320) for k in range(2)]
    with fake_hub.serve({(f"org/m{k}", COMMIT): files for k, files in enumerate(large)}) as hub:
        yield hub


def command(hub: FakeHub, home: Path, *args: object, **env: str) -> Ran:
    return forked_cli(*args, env=hub.environment(home) | env, cwd=home)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("address", ["org/m{}", "hf://org/m{}@main"])
def test_a_hub_model_is_streamed(address: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.cdn = 2
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(stack(*(address.format(k) for k in range(2)))))
    flags = ["--stream"] if address.startswith("org") else []
    planned = command(hub, tmp_path, "plan", recipe, *flags, "--no-check-loading", "--json", HF_TOKEN="hf_secret")
    assert planned.code == 0, planned.err
    summary = json.loads(planned.out)["summary"]
    arrays = [load(hub.repos[f"org/m{k}", COMMIT][WEIGHTS]) for k in range(2)]
    needed_bytes = needed("stack", [hub.repos[f"org/m{k}", COMMIT] for k in range(2)])
    assert summary["stream"]["needed_bytes"] == summary["stream"]["network_bytes"] == needed_bytes
    assert summary["download_bytes"] == 0  # the plan has read each generation_config.json
    assert needed_bytes < 0.3 * sum(array.nbytes for model_arrays in arrays for array in model_arrays.values())

    hub.sent = 0
    done = command(hub, tmp_path, "merge", recipe, "out", "--no-check-loading", *flags, HF_TOKEN="hf_secret")
    assert done.code == 0, done.err
    assert "streamed" in done.out
    assert hub.sent == needed_bytes + 2 * HEAD_BYTES
    assert not list(tmp_path.glob(f"hub/*/snapshots/*/{WEIGHTS}"))
    assert {seen.authorization for seen in hub.seen if seen.path.startswith("/cdn/")} == {""}
    assert {seen.authorization for seen in hub.seen if "/resolve/" in seen.path} == {"Bearer hf_secret"}
    assert min(hub.signatures.values()) <= 0  # some have expired

    for text in (done.out, done.err, planned.out, *(p.read_text() for p in (tmp_path / "out").glob("*.[jmy]*"))):
        assert "hf_secret" not in text
        assert "s3cret" not in text
    write_all(hub, tmp_path)
    expected = stack(tmp_path / "m0", tmp_path / "m1")
    run("stack", expected, tmp_path / "expected")
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    card = (tmp_path / "out/README.md").read_text()
    assert "](https://huggingface.co/org/m0)" in card
    assert "base_model:\n- org/m0\n" in card


def write_all(hub: FakeHub, folder: Path) -> None:
    for (name, _), files in hub.repos.items():
        write(folder / name.removeprefix("org/"), files)


@pytest.mark.long
def test_a_cached_model_is_read_from_the_cache_and_the_planned_commit_is_pinned(hub: FakeHub, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(linear("org/m0", "org/m1")))
    planned = command(hub, tmp_path, "plan", recipe, "--no-check-loading", "--json")
    (tmp_path / "plan.json").write_text(planned.out)
    snapshot = tmp_path / "hub" / "models--org--m0" / "snapshots" / COMMIT
    (snapshot / WEIGHTS).write_bytes(hub.repos["org/m0", COMMIT][WEIGHTS])
    other = "d" * 40
    hub.repos["org/m1", other] = hub.repos["org/m0", COMMIT]  # the same header
    hub.repos["org/m0", other] = hub.repos["org/m1", COMMIT]
    hub.refs["main"] = other
    hub.seen.clear()
    done = command(hub, tmp_path, "run", "plan.json", "out", "--stream")
    assert done.code == 0, done.err
    assert {seen.path.split("/")[2] for seen in hub.seen if seen.path.endswith(WEIGHTS)} == {"m1"}
    assert all(COMMIT in seen.path for seen in hub.seen if "/resolve/" in seen.path)
    hub.repos = {key: files for key, files in hub.repos.items() if key[1] == COMMIT}
    write_all(hub, tmp_path)
    run("linear", linear(tmp_path / "m0", tmp_path / "m1"), tmp_path / "expected")
    assert content(tmp_path / "out") == content(tmp_path / "expected")
