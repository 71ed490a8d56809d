"""Merges into buckets of real servers: the bytes of local ones, through kills and faults, and no credentials anywhere."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
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
    EqualParts,
    FaultyProxy,
    Server,
    environment_at,
    environment_of,
)
from tests.cli_help import Cli, cli
from tests.fork_help import Forked, forked
from tests.mini import write_checkpoint
from tests.output_help import tree
from weightsmith._app.cli import main
from weightsmith._base.errors import OutputExists, ParameterError, StoreError
from weightsmith._base.installation import install
from weightsmith._files.remote import retries
from weightsmith._outputs.bucket import parts, uploads
from weightsmith._outputs.bucket.contents import open_bucket
from weightsmith._outputs.bucket.prefix import parse_prefix

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
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)
    return tmp_path


def run(case: str, out: str, **more: Any) -> weightsmith.Merged:
    function, recipe, options = RECIPES[case]
    return getattr(weightsmith, function)(recipe, out, progress=False, **options, **more)  # type: ignore[no-any-return]


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


def merge_and_die(out: str, after: int) -> None:
    """In a copy of this process: a merge that is killed after so many parts."""
    upload, done = uploads.Uploads._upload, itertools.count(1)

    def counted(self: Any, each: Any) -> None:
        upload(self, each)
        if next(done) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    uploads.Uploads._upload = counted  # type: ignore[method-assign]
    uploads.SAVE_SECONDS = 0.0
    weightsmith.merge("r.yml", out, progress=False)


def merge_slowly(out: str, seconds: float) -> None:
    """In a copy of this process: the command, each of whose uploads takes so long."""
    upload = uploads.Uploads._upload
    uploads.Uploads._upload = lambda self, each: (time.sleep(seconds), upload(self, each))  # type: ignore[assignment,method-assign]
    parts.PART_BYTES = 200_000
    sys.argv = ["weightsmith", "merge", "r.yml", out]
    main()


AVERAGE = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"


@pytest.mark.slow
def test_killed_half_way_and_resumed_no_part_is_uploaded_twice(
    here: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = server.address("out")
    Path("r.yml").write_text(AVERAGE)
    ran = forked(lambda: merge_and_die(out, 12))
    assert ran.code == -signal.SIGKILL, ran.err
    assert server.contents("out") == {}
    assert len(server.uploads()) == 1
    before = server.parts()
    assert len(before) >= 12
    sent = count_uploads(server, monkeypatch)
    merged = weightsmith.merge("r.yml", out, progress=False)
    weightsmith.merge("r.yml", "out", progress=False)
    assert server.contents("out") == tree(here / "out")
    assert server.uploads() == []
    assert merged.resumed > 0
    whole = sum(place.nbytes for place in merged.plan.layout.places.values()) + len(merged.plan.layout.shards[0].header)
    assert sum(sent) == whole - sum(before)


def count_uploads(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the parts that are uploaded from now on."""
    kind, sent = type(open_bucket(parse_prefix(server.address("x")))), list[int]()
    upload = kind.upload
    monkeypatch.setattr(kind, "upload", lambda self, *given: (sent.append(len(given[3])), upload(self, *given))[1])
    return sent


@pytest.mark.slow
def test_ctrl_c_leaves_work_that_one_of_two_processes_resumes(here: Path, moto: Server) -> None:
    make_llamas(here, hidden=256, inner=1024)
    Path("r.yml").write_text(AVERAGE)
    out = moto.address("x/out")

    first = Forked(lambda: merge_slowly(out, 2))  # 60 parts, 8 at a time: it is not done before the signal
    while ".out.weightsmith-staging/journal" not in moto.contents("x"):
        assert not first.ended(), first.wait()
        time.sleep(0.02)
    first.kill(signal.SIGINT)
    stopped = first.wait()
    assert f"Uploaded parts are kept at {out}" in stopped.err
    assert stopped.code == 130
    assert [*moto.contents("x")] == [".out.weightsmith-staging/journal"]  # no lock
    both = [Forked(lambda: merge_slowly(out, 0.1)) for _ in range(2)]
    ended = sorted([each.wait() for each in both], key=lambda ran: ran.code)
    assert [ran.code for ran in ended] == [0, 3], ended
    assert re.search("error\\[(busy|output-exists)\\]", ended[1].err)
    weightsmith.merge("r.yml", "out", progress=False)
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
    monkeypatch.setattr(parts, "PART_BYTES", 8 << 20)
    make_llamas(here, hidden=512, inner=1024, layers=2)
    _run_through_faults(here, new_server(kind), FAULTS, 20, monkeypatch)


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any waits between attempts."""
    monkeypatch.setattr(retries, "PATIENCE", retries.Patience(most_seconds=0.005))


def through(proxy: FaultyProxy, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_at(server.scheme, proxy.port).items():
        monkeypatch.setenv(name, value)


def _run_through_faults(here: Path, server: Server, faults: Any, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
            if sum(proxy.counts.values()) >= wanted and all(proxy.counts.values()):
                break
        assert sum(proxy.counts.values()) >= wanted, proxy.counts
        assert server.parts() == []  # an upload whose first answer was lost stays, without parts: nobody knows its id
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_store_that_takes_parts_of_one_size_only(here: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("r.yml").write_text(AVERAGE)
    weightsmith.merge("r.yml", "out", progress=False)
    with closing(EqualParts(moto.port)) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{front.port}")
        with pytest.raises(StoreError, match="InvalidPart"):
            weightsmith.merge("r.yml", moto.address("refused"), progress=False)
        monkeypatch.setenv("WEIGHTSMITH_EQUAL_PARTS", "1")
        ran = forked(lambda: merge_and_die(moto.address("out"), 12))
        assert ran.code == -signal.SIGKILL, ran.err
        sent = count_uploads(moto, monkeypatch)
        weightsmith.merge("r.yml", moto.address("out"), progress=False)
    assert moto.contents("out") == tree(here / "out")
    assert 0 < len(sent) <= -(-len((here / "out/model.safetensors").read_bytes()) // 20_000) - 12


@pytest.mark.slow
def test_a_store_that_keeps_failing_is_one_error_and_the_run_resumes(
    here: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty(monkeypatch)
    proxy = FaultyProxy(server.port, 1.0, ["status"])
    through(proxy, server, monkeypatch)
    with pytest.raises(StoreError, match=r"the store kept answering .* \((429|500|503)\)"):
        run("linear", server.address("out"))
    proxy.close()
    with pytest.raises(StoreError, match="does not answer") as found:
        run("linear", server.address("out"))
    assert "check the network" in str(found.value).lower()
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
    assert re.search("NoSuchBucket|ContainerNotFound|404", missing.err)
    assert re.search("create the (bucket|container)", missing.err.lower())
    texts = [ran.out + ran.err for ran in (done, again, missing)]
    objects = [*server.contents("out").values(), *tree(here).values()]
    for secret in (*KEYS.values(), ACCOUNT_KEY):
        assert not any(secret in text for text in texts)
        assert not any(secret.encode() in data for data in objects)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), [(MOTO, "moe"), (GOOGLE, "stack"), (AZURITE, "stack")])
def test_from_a_bucket_into_the_same_one_hardly_anything_is_uploaded(
    tmp_path: Path, new_server: Callable[[str], Server], kind: str, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    pytest.importorskip("obstore")
    server = new_server(kind)
    monkeypatch.chdir(tmp_path)
    copies = kind != GOOGLE  # which has no copies of ranges
    # of tensors of up to 0.5 MB, as 8 MiB of a model of 70 B
    monkeypatch.setattr(parts, "PART_BYTES", 20_000 if copies else 200_000)
    make_llamas(tmp_path, hidden=128, inner=1024)
    put_models(server, tmp_path)
    sent = count_uploads(server, monkeypatch)
    run(case, "out")
    function, recipe, options = RECIPES[case]
    there = in_bucket(recipe, server)
    merged = getattr(weightsmith, function)(there, server.address("out"), progress=False, **options)
    weights = {name: data for name, data in tree(tmp_path / "out").items() if name.endswith(".safetensors")}
    assert {name: server.contents("out")[name] for name in weights} == weights
    whole = sum(map(len, weights.values()))
    assert sum(sent) < whole / 30 if copies else sum(sent) == whole, (sum(sent), whole)
    assert merged.fetched_bytes > 0
    with pytest.raises(StoreError, match="the run reads"):
        getattr(weightsmith, function)(there, server.address("in/a"), progress=False, overwrite=True, **options)
    assert len(server.contents("in/a")) == 3


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
    sent = count_uploads(server, monkeypatch)
    Path("r.json").write_text(json.dumps(in_bucket(RECIPES["stack"][1], server)))
    done = cli("merge", "r.json", server.address("out"))
    assert done.code == 0, done.err
    weights = (here / "out/model.safetensors").read_bytes()
    assert server.contents("out")["model.safetensors"] == weights
    assert 0 < sum(sent) < len(weights) * 2 / 3  # the rest was copied
    missing = cli("merge", "r.json", "az://another/out")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas.replace("sig=", "sig=X"))
    unread = cli("merge", "r.json", "other")
    Path("r.yml").write_text(AVERAGE)
    unwritten = cli("merge", "r.yml", server.address("other"))
    assert (missing.code, unread.code, unwritten.code) == (3, 1, 3)
    assert "the store refuses access" in unread.err
    assert "(403)" in unwritten.err
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


@pytest.mark.parametrize("part", [(1, 2), "products"])
def test_a_part_of_a_plan_needs_a_local_folder(here: Path, monkeypatch: pytest.MonkeyPatch, part: Any) -> None:
    plan = weightsmith.plan(RECIPES["linear"][1])
    monkeypatch.setattr("weightsmith._execution.run._download", lambda *given: pytest.fail("it downloads"))
    with pytest.raises(ParameterError, match="parts of a plan share a local folder"):
        weightsmith.run(plan, "s3://bkt/out", part=part, progress=False)


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
        weightsmith.merge(RECIPES["linear"][1], out, progress=stop)
    assert len(moto.uploads()) == 1
    assert "models/.out.weightsmith-staging" in cli("clean", out).out
    assert len(moto.uploads()) == 1
    assert cli("clean", moto.address("models"), "--yes").code == 0
    assert moto.uploads() == []
    assert moto.contents("models") == {}
    assert "no unfinished work" in cli("clean", moto.address("")).out
    run("linear", out)
    assert "OK" in cli("verify", out).out
    moto.put("models/out/config.json", b"{}")
    damaged = cli("verify", out)
    assert damaged.code == 4
    assert "config.json: has 2 bytes" in damaged.err


@pytest.mark.parametrize(
    ("scheme", "modules", "message", "extra"),
    [
        ("s3", ["botocore", "botocore.session", "botocore.config"], "requires botocore", "remote"),
        ("gs", ["google.auth", "google.auth.transport.requests"], "requires google-auth", "gcs"),
        ("az", ["azure.core", "azure.storage.blob"], "requires azure-storage-blob", "azure"),
    ],
)
def test_the_library_that_is_missing_is_named(
    here: Path, scheme: str, modules: list[str], message: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreError, match=message) as found:
        run("linear", f"{scheme}://bkt/out")
    assert install(extra) in str(found.value)
    assert {path.name for path in here.iterdir()} == {*MODELS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "missing", "message"),
    [
        ("s3", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "no usable credentials"),
        ("gs", ["STORAGE_EMULATOR_HOST"], "no usable credentials"),
        ("az", ["AZURE_STORAGE_CONNECTION_STRING"], "does not name the account"),
    ],
)
def test_credentials_that_are_missing_are_one_error(
    here: Path, scheme: str, missing: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"s3": "botocore", "gs": "google.auth", "az": "azure.storage.blob"}[scheme])
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)
    more = {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": str(here)}
    for name, value in (environment_at(scheme, 1) | more).items():
        if name not in missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=message) as found:
        run("linear", f"{scheme}://bkt/out")
    assert re.search("AWS_PROFILE|GOOGLE_APPLICATION_CREDENTIALS|AZURE_STORAGE_ACCOUNT_NAME", str(found.value))
