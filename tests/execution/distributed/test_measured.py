"""Plans that begin with a measurement: this process measures, and workers do the parts of the plan that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.bucket_help import MemoryBucket
from tests.execution.distributed.threads import Threads
from tests.models.lora.test_lora import DOWN, INNER, H, Q, adapter, base, factors
from tests.output_help import tree
from tests.outputs.bucket.conftest import memory, spool
from weightsmith._execution import cluster
from weightsmith._execution import execute as execution
from weightsmith._execution.cluster import share_out
from weightsmith._execution.options import RunOptions
from weightsmith._features.adapters.extract import prepare_extraction
from weightsmith._features.adapters.options import ExtractSettings
from weightsmith._planning.planner.prepared import Prepared

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.calibration_help import prepared_for, save_model, settings

__all__ = ["memory", "spool"]


def calibrated(name: str) -> Prepared:
    """A model of random numbers, to be stored in a format that is chosen, and rounded, by the states of a text."""
    folder = Path("model")
    if not folder.exists():
        save_model(folder)
    options = {"bits": 4.1} if name == "exl2" else {"bits": None, "uniform": False}
    return prepared_for(folder, settings(Path(), **options), name)


def extracted() -> Prepared:
    """An adapter whose ranks follow from the spectra."""
    folder = Path("base")
    if not folder.exists():
        adapter(base(folder) and Path("a"), factors(Q, H, H) | factors(DOWN, H, INNER))
    return prepare_extraction("base+a", "base", ExtractSettings(energy=0.9))


CASES: dict[str, Callable[[], Prepared]] = {
    "exl2": partial(calibrated, "exl2"),
    "gguf": partial(calibrated, "gguf-q4_k_m"),
    "lora": extracted,
}


@pytest.fixture
def here(tmp_path: Path, memory: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "PART_BYTES", 2000)
    yield tmp_path
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "the measurement is removed"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_process(here: Path, memory: MemoryBucket, case: str) -> None:
    if case == "gguf":
        pytest.importorskip("libgguf")
    options = RunOptions(threads=1, fsync=False)
    with CASES[case]() as prepared:
        execution.execute(prepared, "alone/out", options)
    for out in ("shared/out", "s3://bkt/x/out"):
        workers = Threads(2)
        with CASES[case]() as prepared:
            try:
                execution.execute(prepared, out, options, helpers=partial(share_out, workers=workers))
            finally:
                workers.join()
        assert {share.part for share in workers.started} - {None}
    assert tree(here / "shared") == tree(here / "alone")
    assert memory.contents("x") == tree(here / "alone")
