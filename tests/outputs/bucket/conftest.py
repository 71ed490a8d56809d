"""Servers for the tests of outputs in buckets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.bucket_help import (
    AZURITE,
    GOOGLE,
    MOTO,
    SEAWEED,
    AzureServer,
    GoogleFront,
    GoogleServer,
    MemoryBucket,
    S3Server,
    Server,
    environment_of,
    serving,
)
from weightsmith._outputs import bucket_store


@pytest.fixture(autouse=True)
def spool(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the spool: not the cache of whoever runs the tests."""
    from huggingface_hub import constants

    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """A bucket in memory, in place of any other."""
    memory, plain = MemoryBucket(), bucket_store.Bucket._ask

    def ask(self: bucket_store.Bucket, operation: str, key: str, request: Callable[[], Any], patience: Any = None) -> Any:
        def counted() -> Any:
            memory.asked(operation, key)
            return request()

        return plain(self, operation, key, counted, patience)

    monkeypatch.setattr(bucket_store, "open_store", lambda *_: (memory.store, "the memory"))
    monkeypatch.setattr(bucket_store.Bucket, "_ask", ask)
    return memory


@pytest.fixture(scope="session")
def ports() -> Iterator[Callable[[str], int]]:
    """The port of a server of a kind, which is started when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(serving(kind)))


@pytest.fixture(scope="session")
def front(ports: Callable[[str], int]) -> Iterator[Callable[[], GoogleFront]]:
    """Google's APIs, at one address."""
    with ExitStack() as stack:
        yield cache(lambda: stack.enter_context(closing(GoogleFront(ports(GOOGLE), ports(MOTO)))))


@pytest.fixture
def new_server(
    ports: Callable[[str], int], front: Callable[[], GoogleFront], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Server]:
    """A new bucket of a server of a kind, which the environment names."""

    def new(kind: str) -> Server:
        server = _new(kind, ports, front)
        for name in os.environ:
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR")):
                monkeypatch.delenv(name)
        for name, value in environment_of(server).items():
            monkeypatch.setenv(name, value)
        return server

    return new


def _new(kind: str, ports: Callable[[str], int], front: Callable[[], GoogleFront]) -> Server:
    if kind == GOOGLE:
        return GoogleServer(front())
    return AzureServer(ports(kind)) if kind == AZURITE else S3Server(kind, ports(kind))


@pytest.fixture
def moto(new_server: Callable[[str], Server]) -> Server:
    """A new bucket of moto."""
    return new_server(MOTO)


@pytest.fixture
def seaweed(new_server: Callable[[str], Server]) -> Server:
    """A new bucket of SeaweedFS."""
    return new_server(SEAWEED)


@pytest.fixture(params=[MOTO, GOOGLE, AZURITE])
def server(request: pytest.FixtureRequest, new_server: Callable[[str], Server]) -> Server:
    """A new bucket, in a store of each kind."""
    return new_server(request.param)
