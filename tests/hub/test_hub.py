"""Hub models without network: huggingface_hub's own client against a small server on this machine, and its cache."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

COMMIT, OLD = "c" * 40, "0" * 40
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A = np.arange(6, dtype=np.float32)

BIN_INDEX = "pytorch_model.bin.index.json"
BIN_ONE, BIN_TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def pickled(tensors: dict[str, np.ndarray]) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, file)
    return file.getvalue()


LORA = {f"base_model.model.w.lora_{part}.weight": A[:2].reshape(shape) for part, shape in (("A", (1, 2)), ("B", (2, 1)))}
CONFIG = {"model_type": "llama", "auto_map": {"AutoModel": "modeling_x.XModel"}}
GOOD = {
    ONE: save({"a": A}),
    TWO: save({"b": A + 1}),
    INDEX: json.dumps({"weight_map": {"a": ONE, "b": TWO}}).encode(),
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "modeling_x.py": b"raise SystemExit('never run')",
    "README.md": b"# card",
    "consolidated.safetensors": save({"a": A, "b": A}),
    "pytorch_model.bin": b"a pickle",
    "original/params.json": b"{}",
}
REPOS = {
    ("org/good", COMMIT): GOOD,
    ("org/good", OLD): {"model.safetensors": save({"old": A})},
    ("org/pickles", COMMIT): {"pytorch_model.pkl": b"a pickle", "config.json": b"{}", "tokenizer.json": b"[]"},
    ("org/gguf", COMMIT): {"x.Q4_K_M.gguf": b"GGUF"},
    ("org/adapter", COMMIT): {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "lora_alpha": 2}',
        "adapter_model.safetensors": save(LORA),
        "adapter_model.bin": b"a pickle",
        "tokenizer.json": b"{}",
        "README.md": b"# card",
    },
    ("org/old-adapter", COMMIT): {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "lora_alpha": 2}',
        "adapter_model.bin": pickled(LORA),
    },
    ("org/torch", COMMIT): {
        BIN_ONE: pickled({"a": A}),
        BIN_TWO: pickled({"b": A + 1}),
        BIN_INDEX: json.dumps({"weight_map": {"a": BIN_ONE, "b": BIN_TWO}}).encode(),
        "config.json": b"{}",
        "training_args.bin": b"a pickle",
        "optimizer.pt": b"a pickle",
        "other.bin": b"a pickle",
    },
    ("org/matrix", COMMIT): {"model.safetensors": save({"w.weight": A[:4].reshape(2, 2)})},
    ("org/escape", COMMIT): GOOD | {INDEX: json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()},
}


class Hub(BaseHTTPRequestHandler):
    """The three calls that a download makes: model info, file tree, file."""

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.seen.append((self.command, path, self.headers.get("authorization", "")))  # type: ignore[attr-defined]
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, what, revision = "/".join(parts[2:4]), (parts[4:5] or ["revision"])[0], (parts[5:6] or ["main"])[0]
        else:
            repo, what, revision = "/".join(parts[:2]), parts[2], parts[3]
        commit = {"main": COMMIT, "v1": OLD}.get(revision, revision)
        files = REPOS.get((repo, commit))
        if repo == "org/gated":
            self.reply(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        elif files is None:
            known = any(name == repo for name, _ in REPOS)
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}, body)
        elif what == "revision":
            siblings = [{"rfilename": name} for name in files]
            self.reply(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode(), {}, body)
        elif what == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self.reply(200, json.dumps(tree).encode(), {}, body)
        else:
            data = files["/".join(parts[4:])]
            etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
            self.reply(200, data, etag, body)

    def reply(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import json, sys
from weightsmith.checkpoint import open_checkpoint
from weightsmith.errors import WeightsmithError
try:
    with open_checkpoint(sys.argv[1], **json.loads(sys.argv[2])) as c:
        print(json.dumps({
            "revision": c.revision, "folder": str(c.folder), "files": c.files, "ignored": c.ignored, "config": c.config,
            "weights": c.weights, "tensors": {n: c.read(n).tolist() for n in c.specs},
            "cached": sorted(p.name for p in c.folder.iterdir()),
        }))
except WeightsmithError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


APPLIED = """
import json, sys
from contextlib import ExitStack
from weightsmith.planner.inputs import open_models
from weightsmith.recipe.references import parse_reference
with ExitStack() as stack:
    (model,), problems = open_models([parse_reference(sys.argv[1], "")], stack)
    found = {"error": [str(p) for p in problems]} if model is None else {n: model.read(n).tolist() for n in model.specs}
    print(json.dumps(found | ({} if model is None else {"revision": model.revision})))
"""


def run(
    hub: ThreadingHTTPServer | None, home: Path, ref: str, *, cwd: Path | None = None, script: str = SCRIPT, **kwargs: Any
) -> dict[str, Any]:
    """Open `ref` in a fresh process (huggingface_hub reads its environment once) and tell what came of it."""
    if hub is not None:
        hub.seen.clear()  # type: ignore[attr-defined]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    env |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "no_proxy": "127.0.0.1"}
    env |= {"HF_HUB_OFFLINE": "1"} if hub is None else {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    command = [sys.executable, "-c", script, ref, json.dumps(kwargs)]
    done = subprocess.run(command, env=env, cwd=cwd or home, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def downloads(hub: ThreadingHTTPServer) -> set[str]:
    return {path.split("/", 5)[-1] for method, path, _ in hub.seen if method == "GET" and "/resolve/" in path}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_hub_model_is_downloaded_once_and_then_found_offline(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/good")
    assert got["tensors"] == {"a": A.tolist(), "b": (A + 1).tolist()}
    assert got["revision"] == COMMIT
    assert Path(got["folder"]).is_relative_to(tmp_path / "hub")
    assert (got["config"], got["weights"]) == (CONFIG, [ONE, TWO])
    assert got["files"] == ["config.json", "modeling_x.py", "tokenizer.json"]
    assert got["ignored"] == ["consolidated.safetensors"]
    needed = {ONE, TWO, INDEX, *got["files"]}
    assert downloads(hub) == needed
    assert set(got["cached"]) == needed

    again = run(hub, tmp_path, "org/good")
    assert again == got
    assert downloads(hub) == set()

    offline = run(None, tmp_path, "org/good")
    assert offline == got | {"ignored": []}  # it is not in the cache
    assert run(None, tmp_path, f"org/good@{COMMIT}") == offline


@pytest.mark.slow
def test_an_adapter_s_two_files_are_downloaded(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    expected = {"w.weight": [[0.0, 1.0], [2.0, 5.0]], "revision": f"{COMMIT}+{COMMIT}"}
    assert run(hub, tmp_path, f"org/matrix+org/adapter@{COMMIT}", script=APPLIED) == expected
    assert downloads(hub) == {"model.safetensors", "adapter_config.json", "adapter_model.safetensors"}
    assert run(None, tmp_path, f"org/matrix+org/adapter@{COMMIT}", script=APPLIED) == expected
    (no_adapter,) = run(hub, tmp_path, "org/matrix+org/good", script=APPLIED)["error"]
    assert "org/good: no adapter of PEFT: there is no adapter_config.json and no adapter_model.safetensors" in no_adapter
    (gone,) = run(hub, tmp_path, "org/matrix+org/none", script=APPLIED)["error"]
    assert "org/none: neither a local path nor a model on the hub" in gone


@pytest.mark.slow
def test_an_adapter_without_safetensors_is_downloaded_as_a_pickle(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    expected = run(hub, tmp_path, "org/matrix+org/adapter", script=APPLIED)
    assert run(hub, tmp_path, "org/matrix+org/old-adapter", script=APPLIED) == expected
    assert downloads(hub) == {"adapter_config.json", "adapter_model.bin"}
    assert run(None, tmp_path, "org/matrix+org/old-adapter", script=APPLIED) == expected


@pytest.mark.slow
def test_of_pytorch_files_those_of_the_model_are_downloaded(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/torch")
    assert got["tensors"] == {"a": A.tolist(), "b": (A + 1).tolist()}
    assert (got["weights"], got["ignored"]) == ([BIN_ONE, BIN_TWO], ["other.bin"])
    assert downloads(hub) == {BIN_ONE, BIN_TWO, BIN_INDEX, "config.json"}
    assert run(None, tmp_path, "org/torch") == got | {"ignored": []}


@pytest.mark.slow
def test_revisions(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/good@v1")
    assert (got["revision"], got["tensors"], got["config"]) == (OLD, {"old": A.tolist()}, None)
    assert run(hub, tmp_path, "org/good", revision=OLD)["tensors"] == {"old": A.tolist()}
    gone = run(hub, tmp_path, "org/good@v9")
    assert gone["error"] == "NotFound"
    assert gone["message"].startswith("org/good@v9: the hub model exists, but not this revision")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repo", "error", "words"),
    [
        ("org/pickles", "Unsupported", "org/pickles: no weights in a format that is read"),
        ("org/gguf", "Unsupported", "org/gguf: only GGUF weights"),
        ("org/escape", "FormatError", "leaves the folder through '..'"),
        ("org/gated", "CheckpointError", "org/gated: this hub model is gated"),
        ("org/none", "NotFound", "org/none: neither a local path nor a model on the hub"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_before_weights_are_downloaded(
    repo: str, error: str, words: str, hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    got = run(hub, tmp_path, repo)
    assert got["error"] == error
    assert words in got["message"]
    assert downloads(hub) <= {"config.json", INDEX}


def test_the_token_and_the_cache_folder_are_used(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/good", token="hf_secret", cache_dir=str(tmp_path / "elsewhere"))
    assert Path(got["folder"]).is_relative_to(tmp_path / "elsewhere")
    assert {auth for _, _, auth in hub.seen} == {"Bearer hf_secret"}  # type: ignore[attr-defined]
    assert not (tmp_path / "hub").exists()


def cache(home: Path, files: dict[str, bytes], repo: str = "org/cached", commit: str = COMMIT) -> Path:
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


def test_offline_the_cache_is_enough(tmp_path: Path) -> None:
    snapshot = cache(tmp_path, {name: data for name, data in GOOD.items() if "/" not in name})
    (snapshot / "original").mkdir()
    got = run(None, tmp_path, "org/cached")
    assert (got["revision"], got["folder"], got["weights"]) == (COMMIT, str(snapshot), [ONE, TWO])
    assert got["tensors"] == {"a": A.tolist(), "b": (A + 1).tolist()}
    assert got["files"] == ["config.json", "modeling_x.py", "tokenizer.json"]
    assert run(None, tmp_path, str(snapshot))["files"] == got["files"]  # the snapshot's path is a local folder like any


def test_offline_a_half_downloaded_model_is_noticed(tmp_path: Path) -> None:
    cache(tmp_path, {name: GOOD[name] for name in (ONE, INDEX, "config.json")})
    got = run(None, tmp_path, "org/cached")
    assert got["error"] == "FormatError"
    assert f"names the file '{TWO}' (tensor 'b'), which does not exist" in got["message"]


def test_offline_and_not_cached(tmp_path: Path) -> None:
    (tmp_path / "models" / "llama-medic").mkdir(parents=True)
    got = run(None, tmp_path, "models/llama-medik")
    assert got["error"] == "NotFound"
    assert "neither a local path nor a model in the hub cache" in got["message"]
    assert "did you mean 'llama-medic'?" in got["message"]


def test_a_hub_that_does_not_answer_is_an_error_or_the_cache(tmp_path: Path) -> None:
    dead = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    dead.seen = []  # type: ignore[attr-defined]
    dead.server_close()  # the port is known, and nobody listens
    assert run(dead, tmp_path, "org/cached")["error"] == "NotFound"
    cache(tmp_path, {"model.safetensors": save({"a": A})})
    assert run(dead, tmp_path, "org/cached")["tensors"] == {"a": A.tolist()}


def test_an_impossible_hub_id(tmp_path: Path) -> None:
    got = run(None, tmp_path, "org/a--b")
    assert (got["error"], "nor a valid hub id" in got["message"]) == ("NotFound", True)


def test_a_local_folder_wins_over_a_hub_id(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "org" / "good").mkdir(parents=True)
    (tmp_path / "org" / "good" / "model.safetensors").write_bytes(save({"local": A}))
    assert run(hub, tmp_path, "org/good")["tensors"] == {"local": A.tolist()}
    assert hub.seen == []  # type: ignore[attr-defined]
