"""Histories of outputs at every target, against a perfect model: `weightsmith.testing.run_histories`.

`WEIGHTSMITH_HISTORIES=2000` runs so many for each target, for as long as they take.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bucket_help import AZURITE, GOOGLE, MOTO, SEAWEED, MemoryBucket, Server
from tests.fake_hub import FakeHub
from tests.output_help import tree
from tests.outputs.bucket.conftest import front, memory, new_server, ports, spool
from tests.outputs.hub.conftest import hub
from weightsmith._outputs.bucket import parse_bucket_address
from weightsmith._outputs.hub import hub_target
from weightsmith._outputs.local import LocalTarget
from weightsmith.testing import OutputCase, run_histories

__all__ = ["front", "hub", "memory", "new_server", "ports", "spool"]

pytestmark = pytest.mark.timeout(0 if "WEIGHTSMITH_HISTORIES" in os.environ else 300)

NUMBERS = itertools.count()


def histories(default: int) -> int:
    return int(os.environ.get("WEIGHTSMITH_HISTORIES") or default)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_local_folder(here: Path) -> None:
    def case() -> OutputCase:
        out = here / f"{next(NUMBERS)}" / "out"

        def put(name: str, data: bytes) -> None:
            out.mkdir(exist_ok=True, parents=True)
            (out / name).write_bytes(data)

        return OutputCase(lambda: LocalTarget(str(out)), lambda: tree(out), put)

    run_histories(case, histories(40))


@pytest.mark.long
def test_a_bucket(memory: MemoryBucket) -> None:
    @contextmanager
    def fails(number: int, error: BaseException) -> Iterator[None]:
        """Before the n-th request that changes something, and each one after it."""
        changes = itertools.count(1)

        def before(operation: str, key: str) -> None:
            if operation in ("a file", "a small object", "a deletion") and next(changes) >= number:
                raise error

        memory.before = before
        try:
            yield
        finally:
            memory.before = lambda operation, key: None

    def case() -> OutputCase:
        prefix = f"{next(NUMBERS)}/out"
        return OutputCase(
            lambda: parse_bucket_address(f"s3://bkt/{prefix}"),
            lambda: memory.contents(prefix),
            lambda name, data: memory.put(f"{prefix}/{name}", data),
            fails,
        )

    run_histories(case, histories(40))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", [MOTO, SEAWEED, GOOGLE, AZURITE])
def test_a_real_store(new_server: Callable[[str], Server], kind: str) -> None:
    server = new_server(kind)

    def case() -> OutputCase:
        prefix = f"{next(NUMBERS)}/out"
        return OutputCase(
            lambda: parse_bucket_address(server.address(prefix)),
            lambda: server.contents(prefix),
            lambda name, data: server.put(f"{prefix}/{name}", data),
        )

    run_histories(case, histories(20))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(0)  # hypothesis would shrink a history that is stopped
def test_the_hub(hub: FakeHub) -> None:
    def case() -> OutputCase:
        name = f"org/out{next(NUMBERS)}"
        return OutputCase(
            lambda: hub_target(f"hf://{name}"),
            lambda: {file: data for file, data in hub.pushed.get(name, {}).items() if file != ".gitattributes"},
            lambda file, data: hub.put(name, dict(hub.pushed.get(name, {})) | {file: data}),
        )

    run_histories(case, histories(20))
