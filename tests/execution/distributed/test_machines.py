"""Workers on machines that share nothing but a store, from which they read models too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import weightsmith
from tests.bucket_help import AZURITE, GOOGLE, Server, environment_at, environment_of
from tests.cases import swept
from tests.execution.distributed.processes import PART_BYTES, Processes, environment
from tests.output_help import tree
from tests.outputs.bucket.conftest import front, moto, new_server, ports, server, spool
from weightsmith._execution import cluster
from weightsmith._execution import execute as execution
from weightsmith._execution.cluster import share_out
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import NO_CALLBACKS, Callbacks, Merged
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import Prepared

pytestmark = pytest.mark.process

__all__ = ["front", "moto", "new_server", "ports", "server", "spool"]

MODELS = ("base", "a", "b")
SHARD = 40_000
LINEAR = """merge_method: linear
models: [{model: MODELS/a}, {model: MODELS/b}]
parameters: {weight: 0.5}
"""
TIES = """merge_method: ties
base_model: MODELS/base
models: [{model: MODELS/a}, {model: MODELS/b}]
parameters: {weight: 0.5, density: 0.5, scope: model}
"""
STACK = """slices:
- sources: [{model: MODELS/a, layer_range: [0, 2]}]
- sources: [{model: MODELS/b, layer_range: [0, 2]}]
merge_method: passthrough
"""
MOE = """base_model: MODELS/base
gate_mode: hidden
experts:
- {source_model: MODELS/a, positive_prompts: [a cat]}
- {source_model: MODELS/b, positive_prompts: [a dog]}
"""
CASES: dict[str, tuple[str, str | None]] = {
    "linear": (LINEAR, None),
    "ties": (TIES, None),
    "stack": (STACK, None),
    "moe": (MOE, None),
    "fp8": (LINEAR, "fp8-dynamic"),
    "gguf": (LINEAR, "gguf-q4_0"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's folder."""
    pytest.importorskip("obstore", reason="models in buckets need obstore")
    pytest.importorskip("transformers")
    monkeypatch.setattr(cluster, "PART_BYTES", PART_BYTES)
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[Server], Processes]]:
    """Workers, and models that are in the bucket alone."""
    from tests.calibration_help import save_model

    started: list[Processes] = []

    def start(server: Server) -> Processes:
        for seed, name in enumerate(MODELS):
            for file in save_model(tmp_path / "made" / name, seed=seed).iterdir():
                server.put(f"in/{name}/{file.name}", file.read_bytes())
                file.unlink()
        started.append(Processes(2, tmp_path, environment_of(server)))
        return started[-1]

    yield start
    for processes in started:
        processes.close()


def prepare(case: str, models: str) -> Prepared:
    text, quantize = CASES[case]
    Path("r.yml").write_text(text.replace("MODELS", models))
    return prepare_any(
        "r.yml", RecipeOptions(quantize=quantize, check_loading=False, max_shard_bytes=SHARD), QuantizeSettings()
    )


def merge(case: str, models: str, out: str, workers: Processes | None, callbacks: Callbacks = NO_CALLBACKS) -> Merged:
    helpers = None if workers is None else partial(share_out, workers=workers)
    with prepare(case, models) as prepared:
        return execution.execute(prepared, out, RunOptions(threads=2), callbacks, helpers=helpers)


def check_and_merge(case: str, here: Path, server: Server, workers: Processes, callbacks: Callbacks = NO_CALLBACKS) -> Merged:
    """A merge, whose objects are compared with the files of one process."""
    merge(case, server.address("in"), "out", None)
    merged = merge(case, server.address("in"), server.address("x/out"), workers, callbacks)
    assert server.contents("x") == {f"out/{name}": data for name, data in tree(here / "out").items()}
    assert server.uploads() == []
    assert {path.name for path in here.iterdir()} == {"out", "r.yml"}
    return merged


@pytest.mark.slow
@pytest.mark.parametrize("case", swept(CASES, ["ties", "moe", "gguf"]))
def test_the_objects_are_the_files_of_one_process(
    here: Path, moto: Server, machines: Callable[[Server], Processes], case: str
) -> None:
    if case == "gguf":
        pytest.importorskip("libgguf")
    workers = machines(moto)
    merged = check_and_merge(case, here, moto, workers)
    assert len(workers.started) > 1
    assert bool(workers.started[0].part is None) == bool(merged.plan.products) == (case in ("ties", "moe"))
    assert merged.fetched_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("server", [GOOGLE, AZURITE], indirect=True)
def test_each_other_kind_of_store(here: Path, server: Server, machines: Callable[[Server], Processes]) -> None:
    check_and_merge("ties", here, server, machines(server))


@pytest.mark.slow
def test_a_machine_that_dies_half_way(here: Path, moto: Server, machines: Callable[[Server], Processes]) -> None:
    workers = machines(moto)
    workers.variables["SLOW"] = "0.3"
    killed: list[int] = []

    def kill(now: weightsmith.Progress) -> None:
        if now.tensors > 3 and not killed and workers.running:
            process = next(iter(workers.running.values()))
            killed.append(process.pid)
            process.kill()

    check_and_merge("ties", here, moto, workers, Callbacks(kill))
    assert workers.lost


DRIVER = """
import sys
from pathlib import Path
from tests.bucket_help import environment_at
from tests.execution.distributed.processes import PART_BYTES, Processes
from tests.execution.distributed.test_machines import merge
from weightsmith._execution import cluster
cluster.PART_BYTES = PART_BYTES
models, out, port, root = sys.argv[1:]
merge("ties", models, out, Processes(2, Path(root), {**environment_at("s3", int(port)), "SLOW": "0.5"}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", swept(["workers", "one process"], ["workers"]))
def test_a_driver_that_is_killed_and_run_again(
    here: Path, moto: Server, machines: Callable[[Server], Processes], again: str, tmp_path: Path
) -> None:
    workers = machines(moto)
    models, out = moto.address("in"), moto.address("x/out")
    merge("ties", models, "out", None)
    command = [sys.executable, "-c", DRIVER, models, out, str(moto.port), str(tmp_path / "first")]
    first = subprocess.Popen(command, cwd=here, env=environment(tmp_path / "home", environment_at("s3", moto.port)))
    try:
        while sum(name.endswith(".safetensors") for name in moto.contents("x")) < 3:
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    merged = merge("ties", models, out, workers if again == "workers" else None)
    assert merged.resumed > 0
    contents = moto.contents("x")
    assert {name: data for name, data in contents.items() if name.startswith("out/")} == {
        f"out/{name}": data for name, data in tree(here / "out").items()
    }
    leftovers = {name for name in contents if not name.startswith("out/")}
    assert leftovers == set()
    assert moto.uploads() == []
