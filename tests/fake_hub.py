"""A stand-in for the Hugging Face hub on 127.0.0.1: model info, file tree, files by byte range, and uploads."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

Files = dict[str, bytes]
COMMIT = "c" * 40


class Seen(NamedTuple):
    """One request."""

    method: str
    path: str
    authorization: str
    range: str


class Stored(NamedTuple):
    """A file of a commit.

    lfs    its bytes are not in the repository itself
    known  its SHA-256, if the bytes are in Xet's store and not here
    """

    data: bytes
    lfs: bool = False
    known: str = ""

    @property
    def oid(self) -> str:
        """As the hub compares it with what is to be uploaded."""
        return self.known or (hashlib.sha256(self.data).hexdigest() if self.lfs else _git_sha1(self.data))


class Commit(NamedTuple):
    """A commit. parent: "" for the first."""

    parent: str
    message: str
    files: Mapping[str, Stored]


@dataclass
class Written:
    """A model that can be written to: its branches and commits. oid: of a branch's last commit."""

    visibility: str = "private"
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: Mapping[str, Stored]) -> str:
        """Move a branch to a new commit."""
        parent = self.branches.get(branch, "")
        oid = _sha1(f"{len(self.commits)} {parent} {message}".encode())
        self.commits[oid] = Commit(parent, message, dict(files))
        self.branches[branch] = oid
        return oid

    def head(self, branch: str = "main") -> Commit:
        """The last commit of a branch."""
        return self.commits[self.branches[branch]]

    def files(self, branch: str = "main") -> Files:
        """The files of a branch, but for what the hub itself has created."""
        return {name: file.data for name, file in self.head(branch).files.items() if name != ".gitattributes"}


ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n*.gguf filter=lfs diff=lfs merge=lfs -text\n"
"""Of a new repository."""
TOKEN = "hf_good"
CUT, LOST = "cut", "lost"
Fault = int | str | Callable[[], object] | None


def no_fault(seen: Seen) -> None:
    """Every request is answered."""


@dataclass
class FakeHub:
    """What the hub has, what was asked of it, and how it misbehaves.

    repos      (org/name, commit) → files
    refs       branch or tag → commit, of every repository
    ranges     False: every answer is the whole file
    sizes      False: the list of files does not say how large they are, as of some mirrors
    cdn        weights are at another host, behind an address whose signature serves so many requests; 0: they are not
    fails      start of a path → status with which requests for it are refused
    sent       bytes of files that were sent by byte range
    created    body of each request that creates a repository
    written    org/name → a model that can be written to
    objects    sha256 → what was uploaded through LFS
    fault      called with each request before it is answered: a status to refuse it with, `CUT` to close the connection, `LOST`
               to do what is asked and close the connection without an answer, a function to call in place of that answer, or
               None
    refusal    what such an answer says, in its body and, on one line, in a header
    part_bytes files that are larger are uploaded in parts of this size
    page       files in one page of a listing
    xet        folder in which hf_xet stores what it uploads, in place of Xet's servers; "": uploads go through LFS
    leaked     requests to other hosts that brought a token
    """

    repos: dict[tuple[str, str], Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    ranges: bool = True
    sizes: bool = True
    cdn: int = 0
    fails: dict[str, int] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, Written] = field(default_factory=dict)
    objects: Files = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    fault: Callable[[Seen], Fault] = no_fault
    refusal: str = "refused by the test"
    part_bytes: int = 1 << 40
    page: int = 1000
    xet: str = ""
    leaked: list[Seen] = field(default_factory=list)
    url: str = ""
    sent: int = 0
    signatures: dict[str, int] = field(default_factory=dict)

    def environment(self, home: Path, **options: str) -> dict[str, str]:
        """The environment of a process that uses this hub and no other, and caches in `home`."""
        return environment(home) | {"HF_ENDPOINT": self.url} | options

    @property
    def pushed(self) -> dict[str, Files]:
        """org/name → files of its main branch."""
        return {name: model.files() for name, model in self.written.items()}

    def put(self, name: str, files: Files, branch: str = "main") -> str:
        """Have files committed by someone else; creates the model: the commit."""
        model = self.written.setdefault(name, Written())
        before = model.head(branch).files if branch in model.branches else {}
        new = {name: Stored(data, name.endswith(".safetensors")) for name, data in files.items()}
        return model.commit(branch, "by someone else", {**before, **new})

    def asked(self, method: str, pattern: str) -> list[str]:
        """The paths of the requests that match."""
        return [seen.path for seen in self.seen if seen.method == method and fnmatch.fnmatch(seen.path, pattern)]

    def downloads(self) -> set[str]:
        """Names of the files of which any byte was downloaded."""
        return {seen.path.split("/", 5)[-1] for seen in self.seen if seen.method == "GET" and "/resolve/" in seen.path}

    def whole(self) -> set[str]:
        """Names of the files that were downloaded from the start, without a range."""
        return {s.path.split("/", 5)[-1] for s in self.seen if s.method == "GET" and "/resolve/" in s.path and not s.range}


def environment(home: Path) -> dict[str, str]:
    """The environment of a process without a hub, that caches in `home`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    return env | {"PYTHONPATH": os.pathsep.join(sys.path), "no_proxy": "127.0.0.1,localhost"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the second packet of an answer waits 40 ms for the acknowledgement of the first

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        token, span = self.headers.get("authorization", ""), self.headers.get("range", "")
        seen = Seen(self.command, path, token, span)
        self.hub.seen.append(seen)
        if token and not self.headers.get("host", "").startswith("127.0.0.1"):
            self.hub.leaked.append(seen)
        self.instead: Callable[[], object] | None = None
        fault: Fault = next((status for start, status in self.hub.fails.items() if path.startswith(start)), None)
        fault = self.hub.fault(seen) if fault is None else fault
        if fault == CUT:
            self.close_connection = True
            return
        if isinstance(fault, int):
            line = re.sub(r"[\r\n]|[^\x00-\xff]", "", self.hub.refusal)
            self._send(fault, json.dumps({"error": self.hub.refusal}).encode(), {"X-Error-Message": line})
            return
        if fault == LOST:
            self.instead = lambda: None
        elif callable(fault):
            self.instead = fault
        if path.startswith("/cdn/"):
            self._signed(path)
        elif self.command in ("GET", "HEAD"):
            self._read(path)
        else:
            self._write(path, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _read(self, path: str) -> None:
        if path == "/api/whoami-v2":
            good = self.headers.get("authorization") == "Bearer hf_good"
            self._json({"name": "someone", "type": "user"} if good else {"error": "bad token"}, 200 if good else 401)
            return
        parts = path.strip("/").split("/")
        if len(parts) < 3:  # names of coding agents, for the user agent
            self._error("", 404)
            return
        if parts[:2] == ["api", "models"]:
            repo, what, revision = "/".join(parts[2:4]), (parts[4:5] or ["revision"])[0], (parts[5:6] or ["main"])[0]
        else:
            repo, what, revision = "/".join(parts[:2]), parts[2], parts[3]
        if repo in self.hub.written:
            revision = "/".join(parts[5:]) or "main" if what == "revision" else revision
            self._read_written(self.hub.written[repo], repo, what, revision, "/".join(parts[4:]))
            return
        commit = self.hub.refs.get(revision, revision)
        files = self.hub.repos.get((repo, commit))
        if repo == "org/gated":
            self._error("GatedRepo", 403)
        elif files is None:
            known = any(name == repo for name, _ in self.hub.repos)
            self._error("RevisionNotFound" if known else "RepoNotFound", 404)
        elif what == "revision":
            sizes = {name: {"size": len(data)} if self.hub.sizes else {} for name, data in files.items()}
            siblings = [{"rfilename": name, **size} for name, size in sizes.items()]
            self._json({"id": repo, "sha": commit, "siblings": siblings})
        elif what == "tree":
            self._json([{"type": "file", "path": n, "size": len(d), "oid": _sha1(d)} for n, d in files.items()])
        else:
            self._file(files["/".join(parts[4:])], commit)

    def _signed(self, path: str) -> None:
        """A file at the other host, while its signature is valid."""
        signature = urlsplit(self.path).query
        self.hub.signatures[signature] -= 1
        if self.hub.signatures[signature] < 0:
            self._send(403, b"expired", {})
            return
        repo, commit, name = path.removeprefix("/cdn/").rsplit("/", 2)
        data = self.hub.repos[repo, commit][name]
        self._send_file(data, {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def _file(self, data: bytes, commit: str) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.cdn and path.endswith(".safetensors") and self.command == "GET":
            signature = f"signature=s3cret{len(self.hub.signatures)}"
            self.hub.signatures[signature] = self.hub.cdn
            repo, name = "/".join(path.strip("/").split("/")[:2]), path.rpartition("/")[2]
            host = f"http://localhost:{self.server.server_address[1]}"
            headers = {"Location": f"{host}/cdn/{repo}/{commit}/{name}?{signature}", "X-Repo-Commit": commit}
            self._send(302, b"elsewhere", headers | {"X-Linked-ETag": f'"{_sha1(data)}"'})
            return
        self._send_file(data, {"ETag": f'"{_sha1(data)}"', "X-Repo-Commit": commit})

    def _send_file(self, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if asked is None or not self.hub.ranges:
            self._send(200, data, headers)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.hub.sent += last + 1 - first
        self._send(206, data[first : last + 1], headers)

    def _read_written(self, model: Written, repo: str, what: str, revision: str, name: str) -> None:
        if self._token() != TOKEN and (model.visibility == "private" or self._token()):
            self._error("RepoNotFound", 401)
            return
        oid = model.branches.get(revision, revision)
        if oid not in model.commits:
            self._error("RevisionNotFound", 404)
            return
        files = model.commits[oid].files
        if what == "xet-write-token":
            self._json({"casUrl": f"local://{self.hub.xet}", "exp": int(time.time()) + 600, "accessToken": "x"})
        elif what == "revision":
            siblings = [{"rfilename": name, "size": len(file.data)} for name, file in files.items()]
            self._json({"id": repo, "sha": oid, "siblings": siblings})
        elif what == "tree":
            self._tree(files)
        elif what == "commits":
            entries = []
            while oid:
                commit = model.commits[oid]
                entries.append(
                    {"id": oid, "authors": [], "date": "2026-11-22T00:00:00.000Z", "title": commit.message, "message": ""}
                )
                oid = commit.parent
            self._json(entries)
        elif name not in files:
            self._error("EntryNotFound", 404)
        else:
            self._send_file(files[name].data, {"ETag": f'"{files[name].oid}"', "X-Repo-Commit": oid})

    def _tree(self, files: Mapping[str, Stored]) -> None:
        """A page of a listing, and where the next one is."""
        entries = []
        for name, file in files.items():
            lfs = {"lfs": {"oid": file.oid, "size": len(file.data), "pointerSize": 130}} if file.lfs else {}
            entries.append({"type": "file", "path": name, "size": len(file.data), "oid": _git_sha1(file.data), **lfs})
        query = parse_qs(urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + self.hub.page < len(entries):
            path = urlsplit(self.path).path
            headers["Link"] = f'<{self.hub.url}{path}?recursive=true&cursor={start + self.hub.page}>; rel="next"'
        self._send(200, json.dumps(entries[start : start + self.hub.page]).encode(), headers)

    def _token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def _write(self, path: str, body: bytes) -> None:
        if path == "/api/validate-yaml":  # of a model card
            front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            good = isinstance(front.get("tags"), list)
            self._json({"errors": [] if good else [{"message": "no tags"}], "warnings": []})
        elif path.startswith("/lfs/"):
            self._store(path.removeprefix("/lfs/"), body)
        elif match := re.fullmatch("/lfs-part/([0-9a-f]{64})/([0-9]+)", path):
            self.hub.parts[match[1], int(match[2])] = body
            self._send(200, b"", {"ETag": f'"{_sha1(body)}"'})
        elif path.startswith("/lfs-complete/"):
            self._complete(json.loads(body))
        elif self._token() != TOKEN:
            self._error("RepoNotFound" if path.startswith("/api/models/") else "", 401)
        elif path == "/api/repos/create":
            self.hub.created.append(json.loads(body))
            name = f"{self.hub.created[-1]['organization']}/{self.hub.created[-1]['name']}"
            status = 409 if name in self.hub.written else 200
            if status == 200:
                self.hub.written[name] = Written(self.hub.created[-1].get("visibility", "public"))
                self.hub.written[name].commit("main", "initial commit", {".gitattributes": Stored(ATTRIBUTES)})
            self._json({"url": f"{self.hub.url}/{name}", "id": name}, status)
        elif path == "/lfs-verify":
            about = json.loads(body)
            good = len(self.hub.objects.get(about["oid"], b"")) == about["size"]
            self._json({}, 200 if good else 404)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._json({"transfer": "basic", "objects": [self._object(item) for item in json.loads(body)["objects"]]})
        elif match := re.fullmatch("/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", path):
            if match[1] not in self.hub.written:
                self._error("RepoNotFound", 404)
                return
            model = self.hub.written[match[1]]
            if match[2] == "branch":
                self._branch(model, match[3], json.loads(body))
            elif match[3] not in model.branches:
                self._error("RevisionNotFound", 404)
            elif match[2] == "preupload":
                self._preupload(model.head(match[3]).files, json.loads(body)["files"])
            else:
                self._commit(match[1], match[3], [json.loads(line) for line in body.splitlines()])
        else:
            self._error("EntryNotFound", 404)

    def _branch(self, model: Written, branch: str, asked: dict[str, str]) -> None:
        start = asked.get("startingPoint", "main")
        if branch in model.branches:
            self._json({"error": "Reference already exists"}, 409)
            return
        model.branches[branch] = model.branches.get(start, start)
        self._json({})

    def _preupload(self, files: Mapping[str, Stored], asked: list[dict[str, Any]]) -> None:
        patterns = [line.split()[0] for line in files[".gitattributes"].data.decode().splitlines()] if files else []
        answers = []
        for path in (item["path"] for item in asked):
            lfs = any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
            oid = {"oid": files[path].oid} if path in files else {}
            answers.append({"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, **oid})
        self._json({"files": answers})

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        """How to upload an object: at once or in parts, at another host; nothing if it is there."""
        oid, size = asked["oid"], asked["size"]
        if oid in self.hub.objects:
            return asked
        other = f"http://localhost:{self.server.server_address[1]}"
        verify = {"href": f"{self.hub.url}/lfs-verify"}
        if size <= self.hub.part_bytes:
            return {**asked, "actions": {"upload": {"href": f"{other}/lfs/{oid}?signature=s3cret"}, "verify": verify}}
        count = -(-size // self.hub.part_bytes)
        header = {str(i): f"{other}/lfs-part/{oid}/{i}?signature=s3cret" for i in range(1, count + 1)}
        upload = {"href": f"{other}/lfs-complete/{oid}", "header": {"chunk_size": str(self.hub.part_bytes), **header}}
        return {**asked, "actions": {"upload": upload, "verify": verify}}

    def _store(self, oid: str, data: bytes) -> None:
        good = hashlib.sha256(data).hexdigest() == oid
        if good:
            self.hub.objects[oid] = data
        self._json({}, 200 if good else 400)

    def _complete(self, asked: dict[str, Any]) -> None:
        parts = [self.hub.parts.pop((asked["oid"], part["partNumber"])) for part in asked["parts"]]
        assert [f'"{_sha1(part)}"' for part in parts] == [part["etag"] for part in asked["parts"]]
        self._store(asked["oid"], b"".join(parts))

    def _commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        model = self.hub.written[repo]
        header, files = lines[0]["value"], dict(model.head(branch).files)
        if header.get("parentCommit", model.branches[branch]) != model.branches[branch]:
            self._json({"error": "A commit has happened since. Please refresh and try again."}, 412)
            return
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = Stored(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile" and self.hub.xet:
                files[value["path"]] = Stored(b"", lfs=True, known=value["oid"])
            elif line["key"] == "lfsFile":
                if len(self.hub.objects.get(value["oid"], b"")) != value["size"]:
                    self._json({"error": "Your push was rejected: an LFS pointer pointed to a file that does not exist"}, 400)
                    return
                files[value["path"]] = Stored(self.hub.objects[value["oid"]], lfs=True)
            else:
                assert line["key"] == "deletedFile", line
                del files[value["path"]]
        oid = model.commit(branch, header["summary"], files)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

    def _error(self, code: str, status: int) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        if self.instead is not None:
            self.instead()
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(data)
            except ConnectionError:  # who asked has read enough
                self.close_connection = True


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _git_sha1(data: bytes) -> str:
    return _sha1(b"blob %d\0" % len(data) + data)


@contextmanager
def serve(repos: dict[tuple[str, str], Files], refs: dict[str, str] | None = None) -> Iterator[FakeHub]:
    """A hub that listens until the block ends, and until runs that have failed end their last uploads.

    An upload that finds no server makes huggingface_hub close the client of the whole process, with connections of the next
    test.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(dict(repos), {"main": COMMIT, **(refs or {})}, url=f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.fault = no_fault
        for worker in threading.enumerate():
            if worker.name.startswith("weightsmith-upload"):
                worker.join(20)
        server.shutdown()
        server.server_close()
        thread.join()


def use(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub use this hub and no other, in this process."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


@contextmanager
def silent() -> Iterator[FakeHub]:
    """A hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:  # the kernel accepts for it
        yield FakeHub(url=f"http://127.0.0.1:{listener.getsockname()[1]}")


def cache(home: Path, files: Files, repo: str = "org/cached", commit: str = COMMIT) -> Path:
    """A cache as huggingface_hub leaves it: blobs, and a snapshot of links to them."""
    base = home / "hub" / f"models--{repo.replace('/', '--')}"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    (base / "refs" / "main").write_text(commit)
    snapshot = base / "snapshots" / commit
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        (base / "blobs" / digest).write_bytes(data)
        (snapshot / name).symlink_to(Path("../../blobs") / digest)
    return snapshot
