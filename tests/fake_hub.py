"""A stand-in for the Hugging Face hub on 127.0.0.1: model info, file tree, files by byte range, and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

Files = dict[str, bytes]
COMMIT = "c" * 40


class Seen(NamedTuple):
    """One request."""

    method: str
    path: str
    authorization: str
    range: str


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
    pushed     org/name → files that were committed to it
    """

    repos: dict[tuple[str, str], Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    ranges: bool = True
    sizes: bool = True
    cdn: int = 0
    fails: dict[str, int] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    pushed: dict[str, Files] = field(default_factory=dict)
    objects: Files = field(default_factory=dict)
    url: str = ""
    sent: int = 0
    signatures: dict[str, int] = field(default_factory=dict)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that uses this hub and no other, and caches in `home`."""
        return environment(home) | {"HF_ENDPOINT": self.url} | more

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
    return env | {"PYTHONPATH": os.pathsep.join(sys.path), "no_proxy": "127.0.0.1"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

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
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        token, span = self.headers.get("authorization", ""), self.headers.get("range", "")
        self.hub.seen.append(Seen(self.command, path, token, span))
        for start, status in self.hub.fails.items():
            if path.startswith(start):
                self._json({"error": "refused by the test"}, status)
                return
        if path.startswith("/cdn/"):
            self._signed(path)
        elif self.command in ("GET", "HEAD"):
            self._read(path)
        else:
            self._write(path, body)

    def _read(self, path: str) -> None:
        if path == "/api/whoami-v2":
            good = self.headers.get("authorization") == "Bearer hf_good"
            self._json({"name": "someone", "type": "user"} if good else {"error": "bad token"}, 200 if good else 401)
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, what, revision = "/".join(parts[2:4]), (parts[4:5] or ["revision"])[0], (parts[5:6] or ["main"])[0]
        else:
            repo, what, revision = "/".join(parts[:2]), parts[2], parts[3]
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

    def _write(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            self.hub.created.append(json.loads(body))
            name = f"{self.hub.created[-1]['organization']}/{self.hub.created[-1]['name']}"
            status = 409 if name in self.hub.pushed else 200
            self.hub.pushed.setdefault(name, {})
            self._json({"url": f"{self.hub.url}/{name}", "id": name}, status)
        elif path == "/api/validate-yaml":  # of a model card
            front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            good = isinstance(front.get("tags"), list)
            self._json({"errors": [] if good else [{"message": "no tags"}], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            asked = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "lfs" if p.endswith(".safetensors") else "regular"} for p in asked]
            self._json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [{**o, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}} for o in objects]
            self._json({"transfer": "basic", "objects": upload})
        elif path.startswith("/lfs/"):
            self.hub.objects[path.removeprefix("/lfs/")] = body
            self._json({})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._error("EntryNotFound", 404)

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.pushed[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.pushed[repo][value["path"]] = self.hub.objects[value["oid"]]
        self._json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{repo}/commit/{COMMIT}"})

    def _error(self, code: str, status: int) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
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


@contextmanager
def serve(repos: dict[tuple[str, str], Files], refs: dict[str, str] | None = None) -> Iterator[FakeHub]:
    """A hub that listens until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(dict(repos), {"main": COMMIT, **(refs or {})}, url=f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
