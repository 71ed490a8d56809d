"""What an earlier run left: a manifest, and journals of unfinished work."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import LINEAR, Kind, Rng, merge
from scripts.fuzz.models import make_models
from scripts.fuzz.mutators import mutate_checksummed, mutate_journal, mutate_json


def _use_manifest(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith
    from weightsmith._outputs.local import check_vacant
    from weightsmith._outputs.places import find_folders

    yield lambda: weightsmith.verify("made")
    yield lambda: weightsmith.inspect("made")
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "made"}]})
    yield lambda: find_folders(Path())
    yield lambda: check_vacant(Path("made").absolute(), overwrite=True)
    if rng.random() < 0.2:
        yield lambda: weightsmith.merge(LINEAR, "made", threads=1, fsync=False, overwrite=True)


def _use_journal(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    from weightsmith._outputs.places import find_folders

    yield lambda: find_folders(Path())
    yield lambda: merge(LINEAR)


def _unfinished_upload() -> Any:
    """A bucket in memory with the unfinished work of a small checkpoint, the same each time; and what finishes it."""
    from tests.bucket_help import MemoryBucket
    from tests.output_help import NAMES, layout, open_staging, put
    from weightsmith._outputs import bucket_store

    for folder in Path().glob(".out-*"):
        shutil.rmtree(folder)
    memory = MemoryBucket()
    bucket_store.open_store = lambda *_: (memory.store, "the memory")

    def build(names: Sequence[str], *, publish: bool) -> None:
        with open_staging("s3://bkt/models/out", layout(), "plan", facts={"seed": "1"}) as opened:
            put(opened, names)
            if publish:
                opened.publish({})
            else:
                opened.weights.drain(None)

    build(NAMES[:4], publish=False)
    return memory, lambda: build(NAMES, publish=True)


_CLAIM = "models/.out.weightsmith-staging/claim"


def _make_claim() -> None:
    memory, _ = _unfinished_upload()
    Path("claim").write_bytes(memory.get(_CLAIM))


def _use_claim(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    def run() -> None:
        from tests.output_help import BY_NAME, data, layout

        memory, finish = _unfinished_upload()
        memory.put(_CLAIM, Path(file).read_bytes())
        finish()
        contents = memory.contents("models/out")
        for name in BY_NAME:
            shard, offset, nbytes = layout().places[name]
            assert contents[layout().shards[shard].name][offset : offset + nbytes] == data(name).tobytes(), name

    yield run


def _make_manifest() -> None:
    make_models()
    from weightsmith import merge

    merge(LINEAR, "made", threads=1, fsync=False)


def _interrupt() -> None:
    class Stop(Exception):
        pass

    def stop(now: Any) -> None:
        if now.tensors > 5:
            raise Stop

    with contextlib.suppress(Stop):
        merge(LINEAR, progress=stop)


_JOURNAL = ".out.weightsmith-staging/journal"


KINDS = {
    "manifest": Kind(_make_manifest, ("made/weightsmith.json",), mutate_checksummed, _use_manifest),
    "journal": Kind(make_models, (_JOURNAL,), mutate_journal, _use_journal, _interrupt),
    "bucket-claim": Kind(_make_claim, ("claim",), mutate_json, _use_claim),
}
