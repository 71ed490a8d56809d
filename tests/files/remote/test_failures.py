"""Which failures pass and which stay, for every client; and panics, which are no `Exception`."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from weightsmith._base.errors import CheckpointError, StoreError
from weightsmith._files.remote import retries
from weightsmith._files.remote.retries import Again, Panicked, causes, lasting, no_panic, passes
from weightsmith._outputs.bucket_store import Bucket, Passing


class PanicException(BaseException):
    """As pyo3's."""


def wrapped(inner: BaseException) -> Exception:
    """An error of a client, with another one as its cause."""
    try:
        raise ConnectionError("the client's own words") from inner
    except ConnectionError as error:
        return error


STAYS = [
    (ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"), "certificate is not trusted"),
    (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "does not speak TLS"),
    (ssl.SSLError("[X509: NO_CERTIFICATE_OR_CRL_FOUND] no certificate or crl found"), "certificates cannot be read"),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "the host does not exist"),
    (FileNotFoundError(2, "No such file or directory", "/no/ca.pem"), "a file of its settings cannot be read"),
    (ValueError("Port out of range 0-65535"), "cannot be sent (ValueError: Port out of range 0-65535)"),
    (UnicodeEncodeError("ascii", "ä", 0, 1, "ordinal not in range(128)"), "cannot be sent (UnicodeEncodeError"),
    (ImportError("Using SOCKS proxy, but the 'socksio' package is not installed"), "socksio"),
    (Panicked("PanicException: InvalidHeaderValue"), "InvalidHeaderValue"),
    (RuntimeError("Generic S3 error: HTTP error: builder error"), "builder error"),
    (RuntimeError("dns error: failed to lookup address information: Name or service not known"), "the host does not exist"),
]
PASS = [
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ConnectionResetError(104, "Connection reset by peer"),
    TimeoutError("timed out"),
    ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    RuntimeError("error sending request"),
    RuntimeError("dns error: failed to lookup address information: Temporary failure in name resolution"),
]


@pytest.mark.parametrize(("error", "words"), STAYS, ids=lambda one: str(one)[:30])
def test_what_stays_is_told_wherever_it_is_in_the_chain(error: Exception, words: str) -> None:
    for failure in (error, wrapped(error), wrapped(wrapped(error))):
        if isinstance(error, ValueError | ImportError) and failure is not error:
            continue  # of a client that answers a failed connection with one: see below
        finding = lasting(failure, "AWS_ENDPOINT_URL")
        assert finding is not None, failure
        assert words in finding.what
        assert finding.fix


@pytest.mark.parametrize("error", PASS, ids=lambda one: str(one)[:30])
def test_what_passes(error: Exception) -> None:
    assert lasting(error) is None
    assert lasting(wrapped(error)) is None


@pytest.mark.slow
def test_an_answer_in_parts_that_is_cut_off_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients see a ValueError then, in the size of the next part; stores send lists in parts."""
    slept = _no_sleep(monkeypatch)
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2 * (retries.PATIENCE.failures + 1)):
                connection, _ = server.accept()
                with connection:
                    requests.append(connection.recv(9999))
                    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")

        threading.Thread(target=answer, daemon=True).start()
        variables = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}
        for name, value in (variables | {"ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        bucket = Bucket("s3", "bucket")
        for look in (lambda: bucket.read("key", 100), lambda: list(bucket.names("key"))):
            with pytest.raises(Passing, match="does not answer"):
                look()
    assert len(requests) == 2 * (retries.PATIENCE.failures + 1) == len(slept) + 2


def test_causes_that_go_in_circles_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert [*causes(first)] == [first, second]


def test_a_panic_is_an_error_and_an_interrupt_is_an_interrupt() -> None:
    with pytest.raises(Panicked, match="PanicException: called unwrap"), no_panic():
        raise PanicException("called unwrap")
    for error_class in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):
        with pytest.raises(error_class), no_panic():
            raise error_class


def test_statuses() -> None:
    assert [status for status in range(100, 600) if passes(status)] == [
        408, 425, 429, *(status for status in range(500, 600) if status not in (501, 505)),
    ]  # fmt: skip


def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.mark.long
@pytest.mark.parametrize(("error", "_words"), STAYS, ids=lambda one: str(one)[:30])
def test_no_client_asks_twice_for_what_stays(error: Exception, _words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that catches the errors of a client, with that error in place of an answer."""
    slept, asked = _no_sleep(monkeypatch), list[str]()

    def broken(*args: Any, **options: Any) -> Any:
        asked.append("")
        raise error

    for look, kind in _clients(monkeypatch, broken):
        asked.clear()
        with pytest.raises(kind):
            look()
        assert (len(asked), slept) == (1, []), look


@pytest.mark.long
def test_a_panic_in_any_client_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = _no_sleep(monkeypatch)

    def broken(*args: Any, **options: Any) -> Any:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    for look, kind in _clients(monkeypatch, broken):
        with pytest.raises(kind, match="PanicException"):
            look()
    assert not slept


def _clients(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]) -> list[tuple[Callable[[], object], type[Exception]]]:
    """A request through each client, which ends in `broken`, and what it must raise."""
    import huggingface_hub
    import obstore

    from weightsmith._files.remote.addresses import parse_address
    from weightsmith._files.remote.http import HttpFile
    from weightsmith._files.remote.stores import Store
    from weightsmith._outputs.hub_repository import HubRepository, parse_hub_address

    for name, value in {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9", "AZURE_STORAGE_USE_EMULATOR": "true", "HF_TOKEN": "hf_x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(obstore, "list_with_delimiter", broken)
    monkeypatch.setattr(obstore, "get", broken)
    monkeypatch.setattr(obstore, "put", broken)
    store = Store(parse_address("s3://bucket/model"))
    buckets = [Bucket(scheme, "b") for scheme in ("s3", "gs", "az")]
    hub = HubRepository(parse_hub_address("hf://org/name"))
    monkeypatch.setattr(hub.api, "whoami", broken)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: type("Client", (), {"build_request": broken}))

    def listed() -> None:
        retries.retry_request(lambda: store.objects() and None, "s3://bucket/model")

    def fetched() -> None:
        retries.fetch(store.file("f", 10, "e"), 0, 5, lambda at, piece: None)

    def streamed() -> None:
        retries.fetch(HttpFile("http://127.0.0.1:9/f", "the file", 10, "", {}), 0, 5, lambda at, piece: None)

    return [
        (listed, CheckpointError),
        (fetched, CheckpointError),
        (streamed, CheckpointError),
        *((partial(bucket.mark, "k"), StoreError) for bucket in buckets),
        *((partial(bucket.put, "k", b""), StoreError) for bucket in buckets),
        (hub.check_token, StoreError),
    ]


@pytest.mark.slow
def test_what_passes_is_asked_again_by_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = _no_sleep(monkeypatch)

    def reset(*args: Any, **options: Any) -> Any:
        raise ConnectionResetError(104, "Connection reset by peer")

    for look, kind in _clients(monkeypatch, reset):
        slept.clear()
        with pytest.raises(kind):
            look()
        assert len(slept) >= 3, look


def test_the_bound_of_buckets_is_for_what_passes() -> None:
    bucket = Bucket("s3", "b")
    assert isinstance(bucket._failed(TimeoutError(), "a list", "k"), Passing)
    stays = bucket._failed(ValueError("no"), "a list", "k")
    assert not isinstance(stays, Passing)
    assert "run again" not in str(stays)
    with pytest.raises(Again):
        raise Again("it passes")
