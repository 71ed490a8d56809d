"""Models that are streamed by workers: nothing is downloaded whole, and what was fetched is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import fake_hub
from tests.execution.distributed.threads import Threads
from tests.fake_hub import COMMIT
from tests.files.remote.servers import model, serve, write
from tests.files.remote.test_streaming import RECIPES, WEIGHTS, content, needed, run, served, stack
from weightsmith._execution import execute as execution
from weightsmith._execution.cluster import share_out
from weightsmith._execution.options import RunOptions
from weightsmith._execution.run import Merged
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions

pytestmark = pytest.mark.process

SCRIPT = """
import json, sys
from tests.execution.distributed.test_streamed import merge
print(merge(json.loads(sys.argv[1]), "out", stream=True).fetched_bytes)
"""


def merge(recipe: Any, out: Any, **options: Any) -> Merged:
    """A merge whose parts one thread does: what is read ahead belongs to one run of a process."""
    workers = Threads(1)
    with prepare_any(recipe, RecipeOptions(check_loading=False), QuantizeSettings()) as prepared:
        try:
            running = RunOptions(fsync=False, threads=1, **options)
            return execution.execute(prepared, out, running, helpers=partial(share_out, workers=workers))
        finally:
            workers.join()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times"), [("linear", 1), ("model_ties", 2)])  # by the worker of the products too
def test_what_workers_fetch_is_counted(name: str, times: int, tmp_path: Path) -> None:
    models = [model(k, layers=4, width=96) for k in range(3)]
    run(name, RECIPES[name](*(write(tmp_path / f"m{k}", files) for k, files in enumerate(models))), tmp_path / "whole")
    with serve(served(models)) as site:
        done = merge(RECIPES[name](*(f"{site.url}/m{k}" for k in range(3))), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert done.fetched_bytes == times * needed(name, models)


@pytest.mark.slow
def test_hub_models_are_streamed_by_workers_and_not_downloaded(tmp_path: Path) -> None:
    models = [model(k, layers=8, width=320) for k in range(2)]
    with fake_hub.serve({(f"org/m{k}", COMMIT): files for k, files in enumerate(models)}) as hub:
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(stack("org/m0", "org/m1"))],
            env=hub.environment(tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert not list(tmp_path.glob(f"hub/*/snapshots/*/{WEIGHTS}"))
    assert int(ran.stdout) == needed("stack", models)
