"""Servers for the tests of outputs in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bucket_help import MOTO, SEAWEED, MemoryBucket, Server, environment_of, serving
from weightsmith.buckets import contents, staging, unfinished, uploads, verify


@pytest.fixture(autouse=True)
def spool(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the spool: not the cache of whoever runs the tests."""
    from huggingface_hub import constants

    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    """The bucket `bkt` in memory."""
    MemoryBucket.stores.clear()
    for module in (contents, staging, unfinished, uploads, verify):
        if hasattr(module, "open_bucket"):
            monkeypatch.setattr(module, "open_bucket", MemoryBucket.open)
    yield MemoryBucket("bkt")
    MemoryBucket.stores.clear()


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    with serving(MOTO) as port:
        yield port


@pytest.fixture(scope="session")
def seaweed_port() -> Iterator[int]:
    with serving(SEAWEED) as port:
        yield port


def _server(kind: str, port: int, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in environment_of(port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return Server(kind, port)


@pytest.fixture
def moto(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A new bucket of moto, which the environment names."""
    return _server(MOTO, moto_port, monkeypatch)


@pytest.fixture
def seaweed(seaweed_port: int, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A new bucket of SeaweedFS, which the environment names."""
    return _server(SEAWEED, seaweed_port, monkeypatch)
