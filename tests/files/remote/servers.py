"""A web server on 127.0.0.1 that serves a folder by byte range, and misbehaves on demand; and models to serve."""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from safetensors.numpy import save

FAULTS = (
    "drop",  # the connection closes before an answer
    "reset",  # it is reset in the middle of the body
    "cut",  # it closes in the middle of the body
    "short",  # the body has fewer bytes than asked for, and its length says so
    "long",  # it has more
    "other",  # the answer is another range, and says so
    "whole",  # the answer is the whole file
    "encoded",  # the answer says that it is compressed
    "429",
    "500",
    "503",
    "stall",  # nothing comes for longer than the client waits
)


IN_A_ROW = 4
"""Faults that are drawn for one run of bytes before it is sent: half of what a client takes."""


@dataclass
class Server:
    """What is served, what was asked for, and how the server misbehaves.

    files   path → content; a path is relative to the server's root
    faults  to commit, the next one last; `*` for a permanent one
    share   of requests that meet a fault drawn from `drawn`, up to `most` of them, and up to `IN_A_ROW` of those for one
            run of bytes: the same ones whatever the order of the runs
    ranges  spans of the requests for parts: (path, first, end)
    sent    bytes of bodies
    tags    False: no ETag
    parts   False: every answer is the whole file, as of a server that knows no byte ranges
    redirects, announced   path → where it is; headers of the answers that say so
    """

    files: dict[str, bytes]
    faults: list[str] = field(default_factory=list)
    share: float = 0.0
    drawn: tuple[str, ...] = FAULTS
    most: int = 1_000_000
    seed: int = 0
    tags: bool = True
    parts: bool = True
    stall_seconds: float = 1.0
    woken: int = 0  # answers that came after a stall
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    headers: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)
    sent: int = 0
    url: str = ""
    redirects: dict[str, str] = field(default_factory=dict)
    announced: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.go_on = threading.Event()  # ends every stall
        self._asked: Counter[tuple[str, int]] = Counter()
        self._in_a_row: Counter[tuple[str, int]] = Counter()

    def fault(self, path: str, end: int) -> str:
        """What goes wrong with a request for bytes up to `end`; "" for nothing. A client that goes on asks for the same end."""
        with self._lock:
            if self.faults:
                name = self.faults[-1] if self.faults[-1].startswith("*") else self.faults.pop()
                return name.removeprefix("*")
            run = path, end
            self._asked[run] += 1
            drawing = random.Random(f"{self.seed} {path} {end} {self._asked[run]}")
            if len(self.committed) < self.most and self._in_a_row[run] < IN_A_ROW and drawing.random() < self.share:
                self._in_a_row[run] += 1
                self.committed.append(drawing.choice(self.drawn))
                return self.committed[-1]
            self._in_a_row[run] = 0
        return ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the second packet of an answer waits 40 ms for the acknowledgement of the first

    @property
    def site(self) -> Server:
        return self.server.site  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).strip("/")
        self.site.headers.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        if path in self.site.redirects:
            self._send(302, b"", {"Location": self.site.redirects[path], **self.site.announced})
            return
        data = self.site.files.get(path)
        if data is None:
            self._send(404, b"nothing here", {})
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'} if self.site.tags else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if self.site.parts:
            headers["Accept-Ranges"] = "bytes"
        if asked is None or not self.site.parts:
            self._send(200, data, headers)
            return
        first, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        self.site.ranges.append((path, first, end))
        self._part(self.site.fault(path, end), data, first, end, headers)

    def _part(self, fault: str, data: bytes, first: int, end: int, headers: dict[str, str]) -> None:
        body, span = data[first:end], (first, end)
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "stall":
            self.site.go_on.wait(self.site.stall_seconds)
            self.site.woken += 1
        if fault in ("429", "500", "503"):
            self._send(int(fault), b"not now", {"Retry-After": "0"} if fault != "500" else {})
            return
        if fault == "whole":
            self._send(200, data, headers)
            return
        if fault == "short":
            body = body[:-1]
        if fault == "long":
            body += b"\xa5"
        if fault == "other":
            span = first + 1, end + 1
            body = b"\xa5" * len(body)
        if fault == "encoded":
            headers = {**headers, "Content-Encoding": "gzip"}
        headers = {**headers, "Content-Range": f"bytes {span[0]}-{span[1] - 1}/{len(data)}"}
        if fault == "lying":
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            body = body[:-1]
        self._send(206, body, headers, upto=len(body) // 2 if fault in ("cut", "reset") else None)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _send(self, status: int, body: bytes, headers: dict[str, str], upto: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body if upto is None else body[:upto]
        self.site.sent += len(body)
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True
        if upto is not None:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""


@contextmanager
def serve(files: dict[str, bytes], **settings: Any) -> Iterator[Server]:
    """A server that listens until the block ends."""
    server = _Server(("127.0.0.1", 0), _Handler)
    site = Server(files, url=f"http://127.0.0.1:{server.server_port}", **settings)
    server.site = site  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def model(seed: int, layers: int = 4, width: int = 64, shards: int = 1) -> dict[str, bytes]:
    """The files of a small llama without a tokenizer."""
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": rng.normal(size=(96, width)).astype(np.float32)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        for part in ("q", "k", "v", "o"):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = rng.normal(size=(width, width)).astype(np.float32)
        for part, shape in (("gate", (2 * width, width)), ("up", (2 * width, width)), ("down", (width, 2 * width))):
            tensors[f"{prefix}mlp.{part}_proj.weight"] = rng.normal(size=shape).astype(np.float32)
        for part in ("input", "post_attention"):
            tensors[f"{prefix}{part}_layernorm.weight"] = rng.normal(size=width).astype(np.float32)
    tensors["model.norm.weight"] = rng.normal(size=width).astype(np.float32)
    tensors["lm_head.weight"] = rng.normal(size=(96, width)).astype(np.float32)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 96,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    files = {"config.json": json.dumps(config).encode(), "generation_config.json": b"{}"}
    if shards == 1:
        return files | {"model.safetensors": save(tensors)}
    names = list(tensors)
    weight_map = {}
    for k in range(shards):
        file, shard_names = f"model-{k + 1:05}-of-{shards:05}.safetensors", names[k::shards]
        files[file] = save({name: tensors[name] for name in shard_names})
        weight_map |= dict.fromkeys(shard_names, file)
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """A local folder with these files."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
