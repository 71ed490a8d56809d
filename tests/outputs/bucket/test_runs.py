"""Merges into buckets of real servers: the bytes of local ones, through kills and faults, and no credentials anywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import weightsmith
from tests.bucket_help import (
    ACCOUNT,
    ACCOUNT_KEY,
    AZURITE,
    FAULTS,
    GOOGLE,
    KEYS,
    MOTO,
    SEAWEED,
    FaultyProxy,
    Refusing,
    Server,
    environment_at,
    environment_of,
)
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from tests.output_help import tree
from weightsmith._base.errors import OutputExists, ParameterError, StoreError
from weightsmith._files.remote import retries
from weightsmith._outputs import bucket, bucket_store
from weightsmith._outputs.bucket import BucketTarget

pytestmark = pytest.mark.store

__all__ = ["cli"]

HIDDEN, INNER, LAYERS = 64, 128, 3
MODELS = ("base", "a", "b")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
SUM = [{"model": name, "parameters": {"weight": 0.5}} for name in ("a", "b")]
TASKS = [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in ("a", "b")]
RECIPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("merge", {"merge_method": "linear", "models": SUM}, {}),
    "ties": ("merge", {"merge_method": "ties", "base_model": "base", "models": TASKS}, {}),
    "shards": ("merge", {"merge_method": "linear", "models": SUM}, {"max_shard_bytes": 100_000}),
    "ties of a model": (
        "merge",
        {"merge_method": "ties", "base_model": "base", "models": TASKS, "parameters": {"scope": "model"}},
        {},
    ),
    "stack": (
        "merge",
        {
            "merge_method": "passthrough",
            "slices": [
                {"sources": [{"model": "a", "layer_range": [0, 2]}]},
                {"sources": [{"model": "b", "layer_range": [1, 3]}]},
            ],
        },
        {},
    ),
    "fp8": ("merge", {"merge_method": "linear", "models": SUM}, {"quantize": "fp8-dynamic"}),
    "moe": (
        "moe",
        {"base_model": "base", "gate_mode": "random", "experts": [{"source_model": name} for name in ("a", "b")]},
        {"check_loading": False},
    ),
}


def make_llamas(root: Path, hidden: int = HIDDEN, inner: int = INNER, layers: int = LAYERS) -> None:
    """The models of `MODELS`, with a tokenizer each."""
    for seed, name in enumerate(MODELS):
        rng = np.random.default_rng(seed)
        shapes = {"model.embed_tokens": (96, hidden), "lm_head": (96, hidden), "model.norm": (hidden,)}
        for i in range(layers):
            at = f"model.layers.{i}"
            shapes |= {f"{at}.self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
            shapes |= {f"{at}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
            shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
            shapes |= {f"{at}.{norm}_layernorm": (hidden,) for norm in ("input", "post_attention")}
        tensors = {f"{key}.weight": rng.standard_normal(shape, np.float32) for key, shape in shapes.items()}
        config = LLAMA | {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        write_checkpoint(root / name, tensors, config)
        (root / name / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_llamas(tmp_path)
    return tmp_path


def run(case: str, out: str, **overrides: Any) -> weightsmith.Merged:
    function, recipe, options = RECIPES[case]
    return getattr(weightsmith, function)(recipe, out, progress=False, **options, **overrides)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [(MOTO, "linear"), (MOTO, "ties of a model"), (MOTO, "fp8"), (MOTO, "moe"), (GOOGLE, "shards"), (AZURITE, "shards")],
)
def test_the_objects_are_the_files_of_a_local_run(
    here: Path, new_server: Callable[[str], Server], kind: str, case: str
) -> None:
    server = new_server(kind)
    run(case, "out")
    merged = run(case, server.address("models/out"))
    assert str(merged.out) == server.address("models/out")
    assert server.contents("models/out") == tree(here / "out")
    assert server.contents("models").keys() == {f"out/{name}" for name in tree(here / "out")}
    assert server.uploads() == []
    assert {path.name for path in here.iterdir()} == {*MODELS, "out"}
    assert weightsmith.verify(str(merged.out)).nbytes == weightsmith.verify("out").nbytes


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), [(SEAWEED, "moe"), (GOOGLE, "ties"), (AZURITE, "ties")])
def test_parts_of_many_megabytes_and_an_output_that_is_replaced(
    tmp_path: Path, new_server: Callable[[str], Server], kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server(kind)
    monkeypatch.chdir(tmp_path)
    make_llamas(tmp_path, hidden=768, inner=1536, layers=1)  # 26 MB
    run(case, "out")
    run(case, server.address("models/out"))
    assert server.contents("models/out") == tree(tmp_path / "out")
    with pytest.raises(OutputExists):
        run(case, server.address("models/out"))
    run(case, server.address("models/out"), overwrite=True)
    assert server.contents("models").keys() == {f"out/{name}" for name in tree(tmp_path / "out")}
    assert weightsmith.verify(server.address("models/out")).tensors > 10


SHARD = 100_000
AVERAGE = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"


KILLED = """
import itertools, os, signal, sys, weightsmith
from weightsmith._outputs.bucket import BucketTarget
put, done = BucketTarget.put, itertools.count(1)
def counted(self, name, file):
    value = put(self, name, file)
    if next(done) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return value
BucketTarget.put = counted
weightsmith.merge("r.yml", sys.argv[1], progress=False, max_shard_bytes=100_000)
"""
"""A merge that is killed after four files."""
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from weightsmith._app.cli import main
from weightsmith._outputs.bucket import BucketTarget
put, (out, seconds) = BucketTarget.put, sys.argv[1:]
BucketTarget.put = lambda self, name, file: (time.sleep(float(seconds)), put(self, name, file))[1]
sys.argv = ["weightsmith", "merge", "r.yml", out, "--max-shard-size", "100KB"]
main()
"""
"""The command, each of whose files takes so long to upload."""


def spawned(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own: obstore's threads do not survive a fork."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_killed_half_way_and_resumed_no_file_is_uploaded_twice(
    here: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = server.address("out")
    Path("r.yml").write_text(AVERAGE)
    killed = spawned(KILLED, out)
    said = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, said
    remaining = server.contents("out")
    assert remaining
    assert all(name.endswith(".safetensors") for name in remaining), "nothing that a loader takes for a model"
    sent, put = [], BucketTarget.put
    monkeypatch.setattr(BucketTarget, "put", lambda self, name, file: (sent.append(name), put(self, name, file))[1])
    merged = weightsmith.merge("r.yml", out, progress=False, max_shard_bytes=SHARD)
    weightsmith.merge("r.yml", "out", progress=False, max_shard_bytes=SHARD)
    assert server.contents("out") == tree(here / "out")
    assert server.names("") == [f"out/{name}" for name in sorted(tree(here / "out"))]
    assert merged.resumed > 0
    assert len(merged.plan.layout.shards) - 4 <= len(sent) <= len(merged.plan.layout.shards) - 3
    assert {path.name for path in here.iterdir()} == {*MODELS, "out", "r.yml"}


@pytest.mark.slow
def test_ctrl_c_leaves_work_that_one_of_two_processes_resumes(here: Path, moto: Server) -> None:
    Path("r.yml").write_text(AVERAGE)
    out = moto.address("x/out")
    first = spawned(SLOW, out, "0.3")
    while not any(name.startswith("out/") for name in moto.contents("x")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    stopped = first.communicate()[1]
    assert "Finished tensors are kept in" in stopped
    assert first.returncode == 130
    both = [spawned(SLOW, out, "0.1") for _ in range(2)]
    texts = [process.communicate()[1] for process in both]
    ended = sorted(zip([process.returncode for process in both], texts, strict=True))
    assert [code for code, _ in ended] == [0, 3], ended
    assert re.search("error\\[(busy|output-exists)\\]", ended[1][1])
    weightsmith.merge("r.yml", "out", progress=False, max_shard_bytes=SHARD)
    assert moto.contents("x") == {f"out/{name}": data for name, data in tree(here / "out").items()}
    assert moto.uploads() == []


UNDAMAGED = [fault for fault in FAULTS if fault != "damage"]
"""Lost requests, lost and cut answers, 429, 500 and 503; not all servers compare checksums."""


@pytest.mark.slow
def test_many_faults_and_not_one_wrong_byte(here: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_through_faults(here, server, UNDAMAGED, 60, monkeypatch)


@pytest.mark.sweep
def test_five_hundred_faults_and_not_one_wrong_byte(here: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_through_faults(here, moto, UNDAMAGED, 500, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SEAWEED])
def test_damaged_bodies_are_sent_again(
    here: Path, new_server: Callable[[str], Server], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llamas(here, hidden=512, inner=1024, layers=2)
    _run_through_faults(here, new_server(kind), FAULTS, 20, monkeypatch)


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any waits between attempts."""
    monkeypatch.setattr(retries, "PATIENCE", retries.Patience(most_seconds=0.005))


def through(proxy: FaultyProxy, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_at(server.scheme, proxy.port).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("scheme", "code"),
    [("s3", "BadDigest"), ("s3", "XAmzContentSHA256Mismatch"), ("gs", "InvalidDigest"), ("az", "Md5Mismatch")],
)
def test_a_body_that_never_arrives_as_it_was_sent_is_sent_so_often_and_no_more(
    tmp_path: Path, scheme: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = refusing_store(scheme, 400, code, monkeypatch), tmp_path / "file"
    file.write_bytes(b"tensors")
    with closing(store):
        with pytest.raises(bucket_store.Damaged, match=rf"a file does not arrive as it was sent \({code}\)"):
            bucket_store.Bucket(scheme, "bkt").put_file("out/file", file, "token")
        assert store.bodies == [b"tensors"] * (1 + retries.PATIENCE.failures)


@pytest.mark.parametrize(("scheme", "code"), [("s3", "NoSuchBucket"), ("gs", "NoSuchBucket"), ("az", "ContainerNotFound")])
def test_a_bucket_that_is_missing_is_asked_for_once(scheme: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = refusing_store(scheme, 404, code, monkeypatch)
    opened = bucket_store.Bucket(scheme, "bkt")
    with closing(store):
        for request in (lambda: opened.names("out"), lambda: opened.folders("out"), lambda: opened.put("out/file", b"x")):
            with pytest.raises(StoreError, match="no such bucket"):
                request()
        assert len(store.bodies) == 3


def refusing_store(scheme: str, status: int, code: str, monkeypatch: pytest.MonkeyPatch) -> Refusing:
    """A `Refusing` that the environment names."""
    hasty(monkeypatch)
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    store = Refusing(status, code)
    for name, value in environment_at(scheme, store.port).items():
        monkeypatch.setenv(name, value)
    return store


@pytest.mark.parametrize("most_seconds", [0.0, 0.005, 0.1])
def test_no_bound_of_the_waits_stops_the_store_s_client(
    tmp_path: Path, most_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = refusing_store("s3", 503, "SlowDown", monkeypatch), tmp_path / "file"
    file.write_bytes(b"tensors")
    patience = retries.Patience(failures=3, first_seconds=0.0, most_seconds=most_seconds)
    monkeypatch.setattr(retries, "PATIENCE", patience)
    with closing(store):
        with pytest.raises(bucket_store.Passing, match="503"):
            bucket_store.Bucket("s3", "bkt").put_file("out/file", file, "token")
        assert len(store.bodies) == 8  # four times by the client, which is asked twice


def _run_through_faults(here: Path, server: Server, faults: Any, least_faults: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty(monkeypatch)
    proxy = FaultyProxy(server.port, 0.3, faults)
    through(proxy, server, monkeypatch)
    try:
        run("ties", "out")
        for number in range(100):
            out = f"runs/{number}/out"
            run("ties", server.address(out))
            assert server.contents(out) == tree(here / "out")
            assert server.contents(f"runs/{number}").keys() == {f"out/{name}" for name in tree(here / "out")}
            if sum(proxy.counts.values()) >= least_faults and all(proxy.counts.values()):
                break
        assert sum(proxy.counts.values()) >= least_faults, proxy.counts
        assert server.parts() == []  # an upload whose first answer was lost stays, without parts: nobody knows its id
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_store_that_keeps_failing_is_one_error_and_the_run_resumes(
    here: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty(monkeypatch)
    proxy = FaultyProxy(server.port, 1.0, ["status"])
    through(proxy, server, monkeypatch)
    with pytest.raises(StoreError, match=r"the store does not answer .* as it should"):
        run("linear", server.address("out"))
    proxy.close()
    with pytest.raises(StoreError, match=r"does not answer|cannot be reached") as caught:
        run("linear", server.address("out"))
    assert "check " in str(caught.value).lower()
    for name, value in environment_of(server).items():
        monkeypatch.setenv(name, value)
    run("linear", server.address("out"))
    run("linear", "out")
    assert server.contents("out") == tree(here / "out")


@pytest.mark.slow
def test_credentials_are_in_no_object_message_or_file(
    here: Path, server: Server, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSMITH_DEBUG", "1")
    Path("r.yml").write_text(AVERAGE)
    done = cli("merge", "r.yml", server.address("out"))
    again = cli("merge", "r.yml", server.address("out"))
    missing = cli("merge", "r.yml", f"{server.scheme}://there-is-no-such-bucket/out")
    assert (done.code, again.code, missing.code) == (0, 3, 3)
    assert "no such bucket" in missing.err
    texts = [ran.out + ran.err for ran in (done, again, missing)]
    objects = [*server.contents("out").values(), *tree(here).values()]
    for secret in (*KEYS.values(), ACCOUNT_KEY):
        assert not any(secret in text for text in texts)
        assert not any(secret.encode() in data for data in objects)


def put_models(server: Server, folder: Path) -> None:
    for path in (path for name in MODELS for path in (folder / name).iterdir()):
        server.put(f"in/{path.parent.name}/{path.name}", path.read_bytes())


def in_bucket(recipe: dict[str, Any], server: Server) -> dict[str, Any]:
    """A recipe that reads the models from a bucket."""
    return json.loads(re.sub(r'"(base|a|b)"', rf'"{server.address("in")}/\1"', json.dumps(recipe)))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_in_azure_a_signature_is_enough_and_is_shown_nowhere(
    here: Path, new_server: Callable[[str], Server], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    server = new_server(AZURITE)
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    may = ContainerSasPermissions(read=True, write=True, create=True, delete=True, list=True)
    end = datetime.now(UTC) + timedelta(hours=1)
    sas = generate_container_sas(ACCOUNT, server.bucket, account_key=ACCOUNT_KEY, permission=may, expiry=end)
    secret = sas.partition("sig=")[2].partition("&")[0]
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.port}/{ACCOUNT}")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas)
    monkeypatch.setenv("WEIGHTSMITH_DEBUG", "1")
    put_models(server, here)
    run("stack", "out")
    Path("r.json").write_text(json.dumps(in_bucket(RECIPES["stack"][1], server)))
    done = cli("merge", "r.json", server.address("out"))
    assert done.code == 0, done.err
    weights = (here / "out/model.safetensors").read_bytes()
    assert server.contents("out")["model.safetensors"] == weights
    missing = cli("merge", "r.json", "az://another/out")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas.replace("sig=", "sig=X"))
    unread = cli("merge", "r.json", "other")
    Path("r.yml").write_text(AVERAGE)
    unwritten = cli("merge", "r.yml", server.address("other"))
    assert (missing.code, unread.code, unwritten.code) == (3, 1, 3)
    assert "the store refuses access" in unread.err
    assert "the keys may not do this" in unwritten.err
    texts = [text for ran in (done, missing, unread, unwritten) for text in (ran.out, ran.err)]
    assert not any(secret in text or unquote(secret) in text for text in texts)
    assert not any(secret.encode() in data for data in (*server.contents("out").values(), *tree(here / "out").values()))


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("s3://bkt/out", {"push": "org/name"}, "--push uploads a local folder"),
        ("s3://bkt/out", {"keep_stages": True}, "results of stages are kept in local folders"),
    ],
)
def test_what_a_bucket_does_not_have_is_refused(here: Path, out: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((StoreError, ParameterError), match=re.escape(message)):
        run("linear", out, **options)
    assert {path.name for path in here.iterdir()} == {*MODELS}


@pytest.mark.slow
def test_a_plan_runs_into_a_bucket(here: Path, server: Server, cli: Cli) -> None:
    Path("plan.json").write_text(json.dumps(weightsmith.plan(RECIPES["ties"][1]).to_json()))
    assert cli("run", "plan.json", server.address("out"), "--json").code == 0
    weightsmith.run("plan.json", "out", progress=False)
    assert server.contents("out") == tree(here / "out")


@pytest.mark.slow
def test_clean_and_verify_from_the_command_line(here: Path, moto: Server, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    out = moto.address("models/out")

    def stop(progress: weightsmith.Progress) -> None:
        if progress.tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(RECIPES["linear"][1], out, progress=stop, max_shard_bytes=SHARD)
    leftovers = {*moto.contents("models")}
    assert ".out.weightsmith-staging/claim" in leftovers
    assert "a process is working on it" in cli("clean", out).err
    monkeypatch.setattr(bucket.Claim, "is_running", False)
    assert "models/.out.weightsmith-staging" in cli("clean", out).out
    assert leftovers <= {*moto.contents("models")}, "a file was on its way"
    assert cli("clean", moto.address("models"), "--yes").code == 0
    assert moto.contents("models") == {}
    assert {path.name for path in here.iterdir()} == {*MODELS}
    assert "no unfinished work" in cli("clean", moto.address("")).out
    run("linear", out)
    assert "OK" in cli("verify", out).out
    moto.put("models/out/config.json", b"{}")
    damaged = cli("verify", out)
    assert damaged.code == 4
    assert "config.json: has 2 bytes" in damaged.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "missing", "message"),
    [
        ("s3", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "no usable credentials"),
        ("gs", ["STORAGE_EMULATOR_HOST"], "no usable credentials"),
        ("az", ["AZURE_STORAGE_CONNECTION_STRING"], "Account must be specified"),
    ],
)
def test_credentials_that_are_missing_are_one_error(
    here: Path, scheme: str, missing: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"s3": "botocore", "gs": "google.auth", "az": "azure.storage.blob"}[scheme])
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)
    variables = {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": str(here)}
    for name, value in (environment_at(scheme, 1) | variables).items():
        if name not in missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=message) as caught:
        run("linear", f"{scheme}://bkt/out")
    assert re.search("AWS_PROFILE|GOOGLE_APPLICATION_CREDENTIALS|AZURE_STORAGE_ACCOUNT_NAME", str(caught.value))


def test_a_claim_in_a_bucket_removes_no_work_of_another_output(
    here: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket may hold a claim that anyone has written, with any folder of this machine in it."""
    folder = here / ".mine.weightsmith-staging"
    folder.mkdir()
    (folder / bucket.JOURNAL).write_text("")
    removed = list[Path]()
    monkeypatch.setattr("weightsmith._outputs.places.remove_work", removed.append)
    ended = subprocess.Popen(["true"])
    ended.wait()
    claim = bucket.Claim("t" * 32, "plan", ended.pid, socket.gethostname(), str(folder))
    out = bucket.parse_bucket_address(moto.address("models/out"))
    bucket._remove(out, claim)
    assert removed == []
