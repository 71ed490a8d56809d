"""Merges into buckets of real servers: the bytes of local ones, through kills and faults, and no credentials anywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.bucket_help import FAULTS, KEYS, FaultyProxy, Server
from tests.cli_help import Cli, cli, environment
from tests.mini import write_checkpoint
from tests.store_help import tree
from weightsmith.buckets import client, parts
from weightsmith.errors import OutputExists, ParameterError, StoreError

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
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)
    return tmp_path


def run(case: str, out: str, **more: Any) -> weightsmith.Merged:
    function, recipe, options = RECIPES[case]
    return getattr(weightsmith, function)(recipe, out, progress=False, **options, **more)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("case", RECIPES)
def test_the_objects_are_the_files_of_a_local_run(here: Path, moto: Server, case: str) -> None:
    run(case, "out")
    merged = run(case, f"s3://{moto.bucket}/models/out")
    assert str(merged.out) == f"s3://{moto.bucket}/models/out"
    assert moto.contents("models/out") == tree(here / "out")
    assert moto.contents("models").keys() == {f"out/{name}" for name in tree(here / "out")}
    assert moto.uploads() == []
    assert {path.name for path in here.iterdir()} == {*MODELS, "out"}
    assert weightsmith.verify(str(merged.out)).nbytes == weightsmith.verify("out").nbytes


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ties", "moe"])
def test_seaweedfs_takes_parts_of_many_megabytes(
    tmp_path: Path, seaweed: Server, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_llamas(tmp_path, hidden=1024, inner=2048, layers=2)
    run(case, "out")
    run(case, f"s3://{seaweed.bucket}/models/out")
    assert seaweed.contents("models/out") == tree(tmp_path / "out")
    with pytest.raises(OutputExists):
        run(case, f"s3://{seaweed.bucket}/models/out")
    run(case, f"s3://{seaweed.bucket}/models/out", overwrite=True)
    assert seaweed.contents("models").keys() == {f"out/{name}" for name in tree(tmp_path / "out")}
    assert weightsmith.verify(f"s3://{seaweed.bucket}/models/out").tensors > 10


KILLED = """
import os, sys
from weightsmith.buckets import parts, uploads
import weightsmith
parts.PART_BYTES, uploads.SAVE_SECONDS = 20_000, 0.0
upload, count = uploads.Uploads._upload, 0
def counted(self, each):
    global count
    upload(self, each)
    count += 1
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
uploads.Uploads._upload = counted
weightsmith.merge("r.yml", sys.argv[1], progress=False)
"""
SLOW = """
import time
from weightsmith.buckets import uploads
from weightsmith.cli import main
upload = uploads.Uploads._upload
uploads.Uploads._upload = lambda self, each: (time.sleep(2), upload(self, each))
main()
"""
AVERAGE = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"


@pytest.mark.slow
def test_killed_half_way_and_resumed_no_part_is_uploaded_twice(
    here: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://{moto.bucket}/out"
    Path("r.yml").write_text(AVERAGE)
    command = [sys.executable, "-c", KILLED, out, "12"]
    ran = subprocess.run(command, env=environment(), cwd=here, capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
    assert moto.contents("out") == {}
    (key,) = moto.uploads()
    listed = moto.client.list_multipart_uploads(Bucket=moto.bucket)["Uploads"][0]["UploadId"]
    before = moto.client.list_parts(Bucket=moto.bucket, Key=key, UploadId=listed)["Parts"]
    assert len(before) >= 12
    sent: list[int] = []
    upload = client.Bucket.upload
    monkeypatch.setattr(client.Bucket, "upload", lambda self, *given: (sent.append(len(given[3])), upload(self, *given))[1])
    merged = weightsmith.merge("r.yml", out, progress=False)
    weightsmith.merge("r.yml", "out", progress=False)
    assert moto.contents("out") == tree(here / "out")
    assert merged.resumed > 0
    whole = sum(place.nbytes for place in merged.plan.layout.places.values()) + len(merged.plan.layout.shards[0].header)
    assert sum(sent) == whole - sum(part["Size"] for part in before)


@pytest.mark.slow
def test_ctrl_c_leaves_work_that_one_of_two_processes_resumes(here: Path, moto: Server) -> None:
    make_llamas(here, hidden=1024, inner=4096)
    Path("r.yml").write_text(AVERAGE)
    out = f"s3://{moto.bucket}/x/out"

    def start(*how: str) -> subprocess.Popen[str]:
        command = [sys.executable, *how, "merge", "r.yml", out]
        return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first = start("-c", SLOW)  # it is not done before the signal
    while ".out.weightsmith-staging/journal" not in moto.contents("x"):
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    assert f"What was uploaded is kept at {out}" in first.communicate()[1]
    assert first.returncode == 130
    assert [*moto.contents("x")] == [".out.weightsmith-staging/journal"]  # no lock
    both = [start("-m", "weightsmith"), start("-m", "weightsmith")]
    ended = [process.communicate() for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 3], ended
    refused = next(streams[1] for process, streams in zip(both, ended, strict=True) if process.returncode == 3)
    assert re.search("error\\[(busy|output-exists)\\]", refused)
    weightsmith.merge("r.yml", "out", progress=False)
    assert moto.contents("x") == {f"out/{name}": data for name, data in tree(here / "out").items()}
    assert moto.uploads() == []


@pytest.mark.slow
def test_five_hundred_faults_and_not_one_wrong_byte(here: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost requests, lost and cut answers, 429, 500 and 503."""
    faults = [fault for fault in FAULTS if fault != "damage"]  # moto compares no checksums
    _run_through_faults(here, moto, faults, 500, monkeypatch)


@pytest.mark.slow
def test_damaged_bodies_are_sent_again(here: Path, seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 8 << 20)
    make_llamas(here, hidden=512, inner=1024, layers=2)
    _run_through_faults(here, seaweed, FAULTS, 20, monkeypatch)


def _run_through_faults(here: Path, server: Server, faults: Any, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.005)
    proxy = FaultyProxy(server.port, 0.3, faults)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    try:
        run("ties", "out")
        for number in range(100):
            out = f"runs/{number}/out"
            run("ties", f"s3://{server.bucket}/{out}")
            assert server.contents(out) == tree(here / "out")
            assert server.contents(f"runs/{number}").keys() == {f"out/{name}" for name in tree(here / "out")}
            if sum(proxy.counts.values()) >= wanted and all(proxy.counts.values()):
                break
        assert sum(proxy.counts.values()) >= wanted, proxy.counts
        assert server.uploads() == []
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_store_that_keeps_failing_is_one_error_and_the_run_resumes(
    here: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    proxy = FaultyProxy(moto.port, 1.0, ["status"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    with pytest.raises(StoreError, match=r"the store kept answering .* \((429|500|503)\)"):
        run("linear", f"s3://{moto.bucket}/out")
    proxy.close()
    with pytest.raises(StoreError, match="does not answer") as found:
        run("linear", f"s3://{moto.bucket}/out")
    assert "AWS_ENDPOINT_URL" in str(found.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto.port}")
    run("linear", f"s3://{moto.bucket}/out")
    run("linear", "out")
    assert moto.contents("out") == tree(here / "out")


@pytest.mark.slow
def test_credentials_are_in_no_object_message_or_file(
    here: Path, moto: Server, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSMITH_DEBUG", "1")
    Path("r.yml").write_text(AVERAGE)
    done = cli("merge", "r.yml", f"s3://{moto.bucket}/out")
    again = cli("merge", "r.yml", f"s3://{moto.bucket}/out")
    missing = cli("merge", "r.yml", "s3://there-is-no-such-bucket/out")
    assert (done.code, again.code, missing.code) == (0, 3, 3)
    assert "NoSuchBucket" in missing.err
    assert "create the bucket" in missing.err.lower()
    texts = [ran.out + ran.err for ran in (done, again, missing)]
    objects = [*moto.contents("out").values(), *tree(here).values()]
    for secret in KEYS.values():
        assert not any(secret in text for text in texts)
        assert not any(secret.encode() in data for data in objects)


def test_credentials_that_are_missing_are_one_error(here: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="no usable credentials") as found:
        run("linear", f"s3://{moto.bucket}/out")
    assert "AWS_PROFILE" in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["stack", "moe"])
def test_from_a_bucket_into_the_same_one_hardly_anything_is_uploaded(
    tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)  # of tensors of up to 2 MB, as 8 MiB of a model of 70 B
    make_llamas(tmp_path, hidden=256, inner=2048)
    for path in (path for name in MODELS for path in (tmp_path / name).iterdir()):
        key = f"in/{path.parent.name}/{path.name}"
        moto.client.put_object(Bucket=moto.bucket, Key=key, Body=path.read_bytes())
    sent: list[int] = []
    upload = client.Bucket.upload
    monkeypatch.setattr(client.Bucket, "upload", lambda self, *given: (sent.append(len(given[3])), upload(self, *given))[1])
    run(case, "out")
    function, recipe, options = RECIPES[case]
    there = json.loads(re.sub(r'"(base|a|b)"', rf'"s3://{moto.bucket}/in/\1"', json.dumps(recipe)))
    merged = getattr(weightsmith, function)(there, f"s3://{moto.bucket}/out", progress=False, **options)
    weights = {name: data for name, data in tree(tmp_path / "out").items() if name.endswith(".safetensors")}
    assert {name: moto.contents("out")[name] for name in weights} == weights
    whole = sum(map(len, weights.values()))
    assert sum(sent) < whole / 100, (sum(sent), whole)
    assert merged.fetched_bytes > 0
    with pytest.raises(StoreError, match="the run reads"):
        getattr(weightsmith, function)(there, f"s3://{moto.bucket}/in/a", progress=False, overwrite=True, **options)
    assert len(moto.contents("in/a")) == 3


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("s3://bkt/out", {"push": "org/name"}, "--push uploads a local folder"),
        ("s3://bkt/out", {"keep_stages": True}, "results of stages are kept in local folders"),
        ("gs://bkt/out", {}, "does not write to gs://"),
    ],
)
def test_what_a_bucket_does_not_have_is_refused(here: Path, out: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((StoreError, ParameterError), match=re.escape(message)):
        run("linear", out, **options)
    assert {path.name for path in here.iterdir()} == {*MODELS}


@pytest.mark.parametrize("part", [(1, 2), "products"])
def test_a_part_of_a_plan_needs_a_local_folder(here: Path, monkeypatch: pytest.MonkeyPatch, part: Any) -> None:
    plan = weightsmith.plan(RECIPES["linear"][1])
    monkeypatch.setattr("weightsmith.execution.run._download", lambda *given: pytest.fail("it downloads"))
    with pytest.raises(ParameterError, match="parts of a plan share a local folder"):
        weightsmith.run(plan, "s3://bkt/out", part=part, progress=False)


def test_a_plan_runs_into_a_bucket(here: Path, moto: Server, cli: Cli) -> None:
    Path("plan.json").write_text(json.dumps(weightsmith.plan(RECIPES["ties"][1]).to_json()))
    assert cli("run", "plan.json", f"s3://{moto.bucket}/out", "--json").code == 0
    weightsmith.run("plan.json", "out", progress=False)
    assert moto.contents("out") == tree(here / "out")


@pytest.mark.slow
def test_clean_and_verify_from_the_command_line(here: Path, moto: Server, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    out = f"s3://{moto.bucket}/models/out"

    def stop(progress: weightsmith.Progress) -> None:
        if progress.tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(RECIPES["linear"][1], out, progress=stop)
    assert len(moto.uploads()) == 1
    assert "models/.out.weightsmith-staging" in cli("clean", out).out
    assert len(moto.uploads()) == 1
    assert cli("clean", f"s3://{moto.bucket}/models", "--yes").code == 0
    assert moto.uploads() == []
    assert moto.contents("models") == {}
    assert "no unfinished work" in cli("clean", f"s3://{moto.bucket}").out
    run("linear", out)
    assert "OK" in cli("verify", out).out
    moto.client.put_object(Bucket=moto.bucket, Key="models/out/config.json", Body=b"{}")
    damaged = cli("verify", out)
    assert damaged.code == 4
    assert "config.json: differs" in damaged.err


def test_the_library_that_is_missing_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("botocore", "botocore.session", "botocore.config"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreError, match="requires botocore") as found:
        run("linear", "s3://bkt/out")
    assert "pip install 'weightsmith[remote]'" in str(found.value)
    assert os.path.exists("a")  # noqa: PTH110
