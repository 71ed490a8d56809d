"""Workers on machines that share nothing but a store of S3, from which they read models too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.bucket_help import Server, environment_of
from tests.buckets.conftest import moto, moto_port, spool
from tests.distributed.processes import PART_BYTES, Processes, environment
from tests.store_help import tree
from weightsmith import execution
from weightsmith.api import prepare_any
from weightsmith.buckets import parts, uploads
from weightsmith.distributed import driver
from weightsmith.distributed.driver import share_out
from weightsmith.execution import NO_CALLBACKS, Callbacks, Merged
from weightsmith.options import QuantizeSettings, RecipeOptions, RunOptions

__all__ = ["moto", "moto_port", "spool"]

MODELS = ("base", "a", "b")
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
def here(tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's folder. The models are in the bucket alone."""
    pytest.importorskip("obstore", reason="models in buckets need obstore")
    pytest.importorskip("transformers")
    from tests.calibration_help import save_model

    for seed, name in enumerate(MODELS):
        for file in save_model(tmp_path / "made" / name, seed=seed).iterdir():
            moto.client.put_object(Bucket=moto.bucket, Key=f"in/{name}/{file.name}", Body=file.read_bytes())
            file.unlink()
    monkeypatch.setattr(parts, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(driver, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(uploads, "SAVE_SECONDS", 0.0)
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def workers(tmp_path: Path, moto: Server) -> Iterator[Processes]:
    found = Processes(2, tmp_path, environment_of(moto.port))
    yield found
    found.close()


def prepare(case: str, bucket: str) -> Any:
    text, quantize = CASES[case]
    (Path("r.yml")).write_text(text.replace("MODELS", f"s3://{bucket}/in"))
    return prepare_any("r.yml", RecipeOptions(quantize=quantize, check_loading=False), QuantizeSettings())


def merge(case: str, bucket: str, out: str, workers: Any, callbacks: Callbacks = NO_CALLBACKS) -> Merged:
    helpers = None if workers is None else partial(share_out, workers=workers)
    with prepare(case, bucket) as prepared:
        return execution.execute(prepared, out, RunOptions(threads=2), callbacks, helpers=helpers)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_objects_are_the_files_of_one_process(
    here: Path, moto: Server, workers: Processes, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "gguf":
        pytest.importorskip("libgguf")
    merge(case, moto.bucket, "out", None)
    merged = merge(case, moto.bucket, f"s3://{moto.bucket}/x/out", workers)
    assert moto.contents("x") == {f"out/{name}": data for name, data in tree(here / "out").items()}
    assert moto.uploads() == []
    assert {path.name for path in here.iterdir()} == {"out", "r.yml"}
    assert len(workers.started) > 1
    assert bool(merged.plan.products) == (case in ("ties", "moe"))
    assert bool(workers.started[0].part is None) == bool(merged.plan.products)
    assert merged.fetched_bytes > 0


@pytest.mark.slow
def test_a_machine_that_dies_half_way(here: Path, moto: Server, workers: Processes) -> None:
    merge("ties", moto.bucket, "out", None)
    workers._given = {**workers._given, "SLOW": "0.3"}
    killed: list[int] = []

    def kill(now: weightsmith.Progress) -> None:
        if now.tensors > 3 and not killed and workers.running:
            process = next(iter(workers.running.values()))
            killed.append(process.pid)
            process.kill()

    merge("ties", moto.bucket, f"s3://{moto.bucket}/x/out", workers, Callbacks(kill))
    assert workers.lost
    assert moto.contents("x") == {f"out/{name}": data for name, data in tree(here / "out").items()}
    assert moto.uploads() == []


DRIVER = """
import sys
from pathlib import Path
from tests.bucket_help import environment_of
from tests.distributed.processes import PART_BYTES, Processes
from tests.distributed.test_machines import merge
from weightsmith.buckets import parts, uploads
from weightsmith.distributed import driver
driver.PART_BYTES = PART_BYTES
parts.PART_BYTES, uploads.SAVE_SECONDS = PART_BYTES, 0.0
bucket, port, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
merge("ties", bucket, f"s3://{bucket}/x/out", Processes(2, root, {**environment_of(port), "SLOW": "0.5"}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", ["workers", "one process"])
def test_a_driver_that_is_killed_and_run_again(
    here: Path, moto: Server, workers: Processes, again: str, tmp_path: Path
) -> None:
    merge("ties", moto.bucket, "out", None)
    command = [sys.executable, "-c", DRIVER, moto.bucket, str(moto.port), str(tmp_path / "first")]
    first = subprocess.Popen(command, cwd=here, env={**environment(tmp_path / "home", environment_of(moto.port))})
    try:
        while sum("/parts/" in name for name in moto.contents("x")) < 4:  # two parts are done, and two begun
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    merged = merge("ties", moto.bucket, f"s3://{moto.bucket}/x/out", workers if again == "workers" else None)
    assert merged.resumed > 0
    found = moto.contents("x")
    assert {name: data for name, data in found.items() if name.startswith("out/")} == {
        f"out/{name}": data for name, data in tree(here / "out").items()
    }
    left = {name for name in found if not name.startswith("out/")}
    assert all(re.search("staging/parts/", name) for name in left), "of workers that had not noticed"
    assert moto.uploads() == []
