"""Models in an object store. The tests use moto's S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load

import weightsmith
from tests.files.remote.servers import model, write
from tests.files.remote.test_streaming import content, linear
from weightsmith._base.errors import CheckpointError, NotFound, PlanError, Unsupported
from weightsmith._base.installation import install
from weightsmith._files.remote import stores
from weightsmith._files.remote.addresses import parse_address

pytestmark = pytest.mark.store

WEIGHTS = "model.safetensors"


def test_without_the_package_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(Unsupported, match="the package obstore, which reads object stores, is not installed") as caught:
        weightsmith.open_checkpoint("s3://models/a")
    assert install("remote") in str(caught.value)


def test_an_error_of_a_store_shows_no_signature() -> None:
    error = OSError("GET https://x.example/a?X-Amz-Signature=s3cret failed\nmore")
    failure = stores.Store.failure(_STORE, error, "")  # type: ignore[arg-type]
    assert str(failure) == "the store does not answer as it should (OSError: GET https://x.example/a?... failed)"


class _Exceptions:
    """Types of obstore's exceptions, none of which is raised."""

    PreconditionError = NotModifiedError = NotFoundError = PermissionDeniedError = UnauthenticatedError = KeyError


_STORE = SimpleNamespace(_obstore=SimpleNamespace(exceptions=_Exceptions), _endpoint="the address")


def test_an_object_whose_list_has_no_etag_has_that_of_its_first_answer() -> None:
    answers = [{"size": 10, "e_tag": tag} for tag in (None, '"a"', '"a"', None, '"b"')]
    store = SimpleNamespace(where="s3://b/x", head=lambda name: answers.pop(0))
    file = stores.StoreFile(store, "n", 10, "")  # type: ignore[arg-type]
    for _ in range(4):
        file.check_unchanged()
    with pytest.raises(CheckpointError, match="has changed since it was first read: '\"a\"' then, '\"b\"' now"):
        file.check_unchanged()
    assert file.version == ""  # what a plan and the spool know it by


def test_an_etag_that_the_list_gives_without_quotes_is_that_of_the_answers() -> None:
    store = SimpleNamespace(where="az://b/x", head=lambda name: {"size": 10, "e_tag": '"0x8D"'})
    file = stores.StoreFile(store, "n", 10, "0x8D")  # type: ignore[arg-type]
    file.check_unchanged()
    assert file.version == '"0x8D"'


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("obstore", reason="obstore, which reads object stores, is not installed")
    pytest.importorskip("moto.server", reason="needs moto: a fake S3 server")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(line.split("Running on ")[1].split()[0] for line in server.stdout if "Running on http" in line)
            for _ in range(100):
                try:
                    urllib.request.urlopen(f"{url}/moto-api/", timeout=1).read()
                    break
                except OSError:
                    time.sleep(0.1)
            yield url
        finally:
            server.terminate()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store in a bucket, and the environment that reads it."""
    from obstore.store import S3Store

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "s3cret", "REGION": "us-east-1", "ENDPOINT_URL": endpoint}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/models", method="PUT")).read()
    yield S3Store("models", client_options={"allow_http": True})
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).read()


def put(bucket: Any, folder: str, files: dict[str, bytes]) -> None:
    import obstore

    for name, data in files.items():
        obstore.put(bucket, f"{folder}/{name}", data)


@pytest.mark.slow
def test_a_merge_of_models_in_a_bucket(bucket: Any, tmp_path: Path) -> None:
    models = [model(k, layers=2, shards=1 + k) for k in range(2)]
    for k, files in enumerate(models):
        put(bucket, f"some/m{k}", files)
        write(tmp_path / f"m{k}", files)
    weightsmith.merge(linear(tmp_path / "m0", tmp_path / "m1"), tmp_path / "expected", fsync=False, progress=False)
    recipe = linear("s3://models/some/m0", "s3://models/some/m1/")
    done = weightsmith.merge(recipe, tmp_path / "out", fsync=False, progress=False)
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    weights = [data for files in models for name, data in files.items() if name.endswith(".safetensors")]
    tensors = [array for data in weights for array in load(data).values()]
    assert done.fetched_bytes == sum(array.nbytes for array in tensors)
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert b"s3cret" not in written


@pytest.mark.slow
def test_one_object_and_what_is_not_there(bucket: Any) -> None:
    put(bucket, "m", model(0, layers=1))
    with weightsmith.open_checkpoint(f"s3://models/m/{WEIGHTS}") as checkpoint:
        assert checkpoint.read("model.norm.weight").shape == (64,)
    with pytest.raises(NotFound, match="no file of a model is there"):
        weightsmith.open_checkpoint("s3://models/nothing")
    with pytest.raises(NotFound, match="no such object, or no such bucket"):
        weightsmith.open_checkpoint("s3://no-such-bucket/m")


@pytest.mark.slow
def test_an_object_that_changes_is_one_error(bucket: Any, tmp_path: Path) -> None:
    put(bucket, "m", model(0, layers=1))
    plan = weightsmith.plan(linear("s3://models/m"))
    with weightsmith.open_checkpoint("s3://models/m") as checkpoint:
        put(bucket, "m", model(1, layers=1))
        for act in (checkpoint.check_unchanged, lambda: checkpoint.read("lm_head.weight")):
            with pytest.raises(CheckpointError, match="the object has changed since it was first read"):
                act()
    with pytest.raises(PlanError, match="have changed since the plan was made"):
        weightsmith.run(plan, tmp_path / "out", fsync=False, progress=False)


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_one_error(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match="the store does not answer as it should") as caught:
        weightsmith.open_checkpoint("s3://models/m")
    assert "after 8 more attempts" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_addresses_of_azure_have_a_container() -> None:
    assert parse_address("az://container/some/folder").host == "container"
