"""A run of bytes from a server that misbehaves is the right bytes, or one clear error."""

from __future__ import annotations

import hashlib
import io
import logging
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.files.remote.servers import FAULTS, Server, serve
from weightsmith._base.errors import CheckpointError
from weightsmith._files.remote import retries
from weightsmith._files.remote.http import HttpFile, _asked_seconds, _target, tag_of
from weightsmith._files.remote.retries import Patience, fetch

DATA = np.random.default_rng(0).bytes(300_000)
SECRET = "Bearer hf_secret"


@pytest.fixture
def site() -> Iterator[Server]:
    with serve({"m/x.bin": DATA, "m/y.bin": DATA}) as site:
        yield site


def file_of(site: Server, name: str = "m/x.bin", token: str = "") -> HttpFile:
    tag = tag_of({"etag": f'"{hashlib.sha1(DATA).hexdigest()}"'})
    headers = {"authorization": token} if token else {}
    return HttpFile(f"{site.url}/{name}", "the file", len(DATA), tag, headers, tag=tag)


def read(file: HttpFile, first: int, end: int) -> bytes:
    out = bytearray()
    fetch(file, first, end, lambda at, piece: out.extend(piece))
    return bytes(out)


def test_a_part_is_asked_for_exactly(site: Server) -> None:
    file = file_of(site)
    assert read(file, 1000, 5000) == DATA[1000:5000]
    assert read(file, 0, len(DATA)) == DATA
    assert site.ranges == [("m/x.bin", 1000, 5000), ("m/x.bin", 0, len(DATA))]
    assert site.sent == 4000 + len(DATA)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, "lying"])
def test_a_fault_that_passes_leaves_the_right_bytes(fault: str, site: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    if fault == "stall":
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    file = file_of(site)
    for first, end in ((1000, 250_000), (0, 100_000), (0, len(DATA)), (len(DATA) - 5, len(DATA))):
        site.faults = [fault, fault]
        assert read(file, first, end) == DATA[first:end], fault


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("drop", "no answer from 127.0.0.1"),
        ("503", "status 503"),
        ("whole", "the whole file where a part was asked for"),
        ("other", "Content-Range 'bytes 1001-5000/300000'"),
        ("short", "'3999' bytes of 4,000"),
        ("long", "'4001' bytes of 4,000"),
        ("encoded", "encodes the file: 'gzip'"),
    ],
)
def test_a_fault_that_stays_is_one_error(fault: str, words: str, site: Server) -> None:
    site.faults = [f"*{fault}"]
    with pytest.raises(CheckpointError, match="the file: cannot be read: ") as caught:
        read(file_of(site), 1000, 5000)
    assert words in str(caught.value)
    assert "after 8 more attempts" in str(caught.value)
    assert len(site.ranges) == 9


def test_a_server_without_byte_ranges_is_one_error_at_once(site: Server) -> None:
    site.parts = False
    with pytest.raises(CheckpointError, match="it does not know byte ranges") as caught:
        read(file_of(site), 1000, 5000)
    assert "Download the model" in str(caught.value)
    assert len(site.headers) == 1


def test_of_a_server_without_byte_ranges_the_start_of_a_file_is_read_and_no_parts(site: Server) -> None:
    site.parts = False
    file = file_of(site)
    file.check_parts()  # nothing is known yet
    assert read(file, 0, len(DATA)) == DATA
    file.check_parts()
    assert read(file, 0, 5000) == DATA[:5000]
    with pytest.raises(CheckpointError, match="it does not know byte ranges"):
        file.check_parts()


def test_a_body_that_breaks_off_is_continued_where_it_stopped(site: Server) -> None:
    site.faults = ["cut", "cut"]
    assert read(file_of(site), 0, 200_000) == DATA[:200_000]
    (_, a, _), (_, b, _), (_, c, _) = site.ranges
    assert (a, b, c) == (0, 100_000, 150_000)


def test_progress_renews_the_patience(site: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PATIENCE", Patience(failures=2, progress_bytes=20_000, first_seconds=0.0))
    site.faults = ["cut"] * 3
    assert read(file_of(site), 0, len(DATA)) == DATA
    site.faults = ["cut"] * 9
    with pytest.raises(CheckpointError, match="after 2 more attempts"):
        read(file_of(site), 0, len(DATA))


def test_a_file_that_changes_is_one_error_at_once(site: Server) -> None:
    for changed, words in ((DATA[::-1], "etag "), (DATA + b"!", "300,000 bytes then, 300,001 now")):
        file = file_of(site)
        assert read(file, 0, 10) == DATA[:10]
        site.files["m/x.bin"] = changed
        site.ranges.clear()
        with pytest.raises(CheckpointError, match="the file has changed since it was first read") as caught:
            read(file, 10, 20)
        assert words in str(caught.value)
        assert len(site.ranges) == 1
        with pytest.raises(CheckpointError, match="has changed"):
            file.check_unchanged()
        site.files["m/x.bin"] = DATA
        file_of(site).check_unchanged()


def test_a_file_that_is_gone_is_one_error(site: Server) -> None:
    file = file_of(site)
    del site.files["m/x.bin"]
    with pytest.raises(CheckpointError, match="no longer has it"):
        read(file, 0, 10)
    with pytest.raises(CheckpointError, match="no longer has it"):
        file.check_unchanged()


def test_a_token_goes_to_no_other_host(site: Server) -> None:
    with serve({"blob": DATA}) as other:
        site.redirects["m/x.bin"] = f"{other.url}/blob?signature=s3cret"
        file = file_of(site, token=SECRET)
        assert read(file, 0, 10) == DATA[:10]
        assert read(file, 10, 20) == DATA[10:20]
        assert [headers.get("authorization") for _, headers in site.headers] == [SECRET]  # resolved once
        assert [headers.get("authorization") for _, headers in other.headers] == [None, None]


def test_an_address_that_expires_is_asked_for_again(site: Server) -> None:
    with serve({"one": DATA, "two": DATA}) as other:
        site.redirects["m/x.bin"] = f"{other.url}/one?signature=s3cret"
        file = file_of(site)
        assert read(file, 0, 10) == DATA[:10]
        del other.files["one"]
        site.redirects["m/x.bin"] = f"{other.url}/two?signature=s3cret"
        assert read(file, 10, 20) == DATA[10:20]
        other.files["two"] = DATA[::-1]
        with pytest.raises(CheckpointError, match="has changed"):
            read(file, 20, 30)


@pytest.mark.parametrize("name", ["X-Repo-Commit", "X-Linked-ETag"])
def test_a_redirect_that_announces_other_content_is_one_error(name: str, site: Server) -> None:
    with serve({"one": DATA, "two": DATA[::-1]}) as other:
        site.redirects["m/x.bin"] = f"{other.url}/one"
        site.announced = {name: "first"}
        pinned = ("x-repo-commit", "first") if name == "X-Repo-Commit" else ("", "")
        file = HttpFile(f"{site.url}/m/x.bin", "the file", len(DATA), "first", {}, pinned=pinned)
        assert read(file, 0, 10) == DATA[:10]
        del other.files["one"]
        site.redirects["m/x.bin"], site.announced = f"{other.url}/two", {name: "second"}
        with pytest.raises(CheckpointError, match=r"has changed since it was first read: .* 'first' then, 'second' now"):
            read(file, 10, 20)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.setLevel(level)
    root.removeHandler(handler)


def test_no_error_and_no_log_shows_a_signature_or_a_token(site: Server, log: io.StringIO) -> None:
    with serve({"one": DATA}) as other:
        site.redirects["m/x.bin"] = f"{other.url}/one?signature=s3cret"
        file = file_of(site, token=SECRET)
        assert read(file, 0, 10) == DATA[:10]
        other.faults = ["*drop"]
        with pytest.raises(CheckpointError) as caught:
            read(file, 0, 10)
    shown = f"{caught.value} {log.getvalue()}"
    assert "/one" in log.getvalue()
    assert "s3cret" not in shown
    assert "hf_secret" not in shown


@pytest.mark.parametrize(
    "target",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "",
        "gopher://x",
        "http://10.0.0.5/x",
        "http://127.0.0.1@10.0.0.5/x",
        "//10.0.0.5",
    ],
)
def test_a_redirect_to_another_protocol_or_to_plain_http_elsewhere_is_refused(target: str, site: Server) -> None:
    site.redirects["m/x.bin"] = target
    with pytest.raises(CheckpointError, match="redirects to an address that is not read"):
        read(file_of(site), 0, 10)


@pytest.mark.parametrize(
    ("url", "location", "target"),
    [
        ("http://127.0.0.1:1/a", "http://localhost:2/b", "http://localhost:2/b"),
        ("http://127.0.0.1:1/a", "HTTPS://cdn.example/b", "HTTPS://cdn.example/b"),
        ("http://mirror.lan/a", "/b", "http://mirror.lan/b"),  # HF_ENDPOINT=http://mirror.lan
        ("http://mirror.lan/a", "http://other.lan/b", ""),
        ("https://cdn.example/a", "http://cdn.example/a", ""),
        ("https://cdn.example/a", "http://127.0.0.1/a", ""),
    ],
)
def test_where_a_redirect_may_lead(url: str, location: str, target: str) -> None:
    if target:
        assert _target(url, location, "") == target
    else:
        with pytest.raises(CheckpointError, match="redirects to an address that is not read"):
            _target(url, location, "")


def test_redirects_that_never_end_are_refused(site: Server) -> None:
    site.redirects |= {"m/x.bin": f"{site.url}/m/y.bin", "m/y.bin": f"{site.url}/m/x.bin"}
    with pytest.raises(CheckpointError, match="redirects more than 6 times"):
        read(file_of(site), 0, 10)


def test_a_host_that_does_not_exist_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine's resolver says of such a name is its own: some do not answer at times."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    file = HttpFile("https://nowhere.invalid/x", "the file", 10, "", {})
    with pytest.raises(CheckpointError, match=r"cannot be read from nowhere\.invalid: the host does not exist"):
        read(file, 0, 10)


@pytest.mark.slow
def test_a_server_that_trickles_is_given_up(site: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trickle:
        where, nbytes, version = "the file", 1000, ""
        requests = 0

        def request(self, first: int, end: int) -> Iterator[bytes]:
            self.requests += 1
            for at in range(first, end):
                time.sleep(0.01)
                yield DATA[at : at + 1]

        def check_unchanged(self) -> None:
            pass

    monkeypatch.setattr(retries, "PATIENCE", Patience(failures=2, first_seconds=0.0, slow_seconds=0.05))
    trickle = Trickle()
    with pytest.raises(CheckpointError, match=r"bytes came in 0 s, after 2 more attempts"):
        fetch(trickle, 0, 1000, lambda at, piece: None)
    assert trickle.requests == 3


@pytest.mark.parametrize("brought", [0, 400])
def test_answers_that_end_early_end_the_patience(brought: int) -> None:
    class Short:
        where, nbytes, version = "the file", 1000, ""

        def request(self, first: int, end: int) -> Iterator[bytes]:
            if first < brought:
                yield DATA[first:brought]

        def check_unchanged(self) -> None:
            pass

    with pytest.raises(CheckpointError, match=rf"the answer ended after 0 of {1000 - brought:,} bytes, after 8 more attempts"):
        fetch(Short(), 0, 1000, lambda at, piece: None)


def test_how_long_a_server_asks_to_wait() -> None:
    date = "Sun, 22 Nov 2026 10:00:00 GMT"
    assert _asked_seconds({"retry-after": "7"}) == 7
    assert _asked_seconds({"retry-after": "Sun, 22 Nov 2026 10:00:30 GMT", "date": date}) == 30  # whatever our clock says
    assert _asked_seconds({"retry-after": "Sun, 22 Nov 2026 09:00:30 GMT", "date": date}) == 0
    assert [_asked_seconds({"retry-after": text}) for text in ("", "soon", "-3", "٣")] == [0, 0, 0, 0]


def test_a_server_that_asks_for_too_much_patience_is_an_error(site: Server) -> None:
    class Busy:
        where, nbytes, version = "the file", 10, ""

        def request(self, first: int, end: int) -> Iterator[bytes]:
            raise retries.Again("the server answers with status 429", 3600)
            yield b""

        def check_unchanged(self) -> None:
            pass

    with pytest.raises(CheckpointError, match="the server asks to wait 3,600 s"):
        fetch(Busy(), 0, 10, lambda at, piece: None)


def test_waiting_ends_when_nobody_needs_the_bytes(site: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PATIENCE", Patience(first_seconds=60, most_seconds=60))
    site.faults = ["*500"]
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(retries.Stopped):
        fetch(file_of(site), 0, 10, lambda at, piece: None, stop)
