"""The requests that a plan predicts are those that its run makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import weightsmith
from tests.bucket_help import MOTO, CountingProxy, Request, Server, environment_at
from tests.cli_help import Cli, cli
from tests.outputs.bucket.test_runs import make_llamas, put_models
from weightsmith._outputs.bucket_store import put_requests

pytestmark = pytest.mark.store

__all__ = ["cli"]


@pytest.fixture
def server(new_server: Callable[[str], Server]) -> Server:
    return new_server(MOTO)


@pytest.fixture
def proxy(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingProxy]:
    """Between this process and a store that holds the models, of which a large matrix has 9.4 MB."""
    monkeypatch.chdir(tmp_path)
    make_llamas(tmp_path, hidden=768, inner=3072, layers=1)
    put_models(server, tmp_path)
    with closing(CountingProxy(server.port)) as proxy:
        for name, value in environment_at("s3", proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy


def written(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.method in ("PUT", "POST")]


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_bytes", [12_000_000, 1_000_000_000])
def test_reads_and_writes_of_a_bucket(proxy: CountingProxy, server: Server, max_shard_bytes: int) -> None:
    models = [{"model": server.address(f"in/{name}")} for name in ("a", "b")]
    recipe = {"merge_method": "ties", "base_model": server.address("in/base"), "models": models}
    recipe |= {"parameters": {"weight": 0.5, "density": 0.5}}
    plan = weightsmith.plan(recipe, max_shard_bytes=max_shard_bytes)
    proxy.requests.clear()
    summary = plan.summary()
    opening, transfer, upload = summary.opening, summary.transfer, summary.upload
    reads = [request for request in proxy.requests if request.key]
    assert (opening.requests, opening.nbytes) == (len(reads), sum(request.received for request in reads))
    assert transfer.passes == 2

    proxy.requests.clear()
    weightsmith.merge(recipe, server.address("models/out"), progress=False, max_shard_bytes=max_shard_bytes)
    reads = [request for request in proxy.requests if request.method == "GET" and request.key.startswith("in/")]
    assert len(reads) == opening.requests + transfer.requests + len(summary.downloads)
    bytes_read = opening.nbytes + transfer.network_bytes + summary.download_bytes
    assert sum(request.received for request in reads) == bytes_read
    writes = written(proxy.requests)
    assert len(writes) == upload.bucket_writes
    assert upload.files == len(server.names("models/out/"))
    sent = sum(request.sent for request in writes if request.key.endswith(".safetensors") and request.method == "PUT")
    assert sent == upload.nbytes
    puts = [sum(r.key.endswith(shard.name) for r in writes) for shard in plan.layout.shards]
    assert puts == [put_requests(shard.nbytes) for shard in plan.layout.shards]
    assert max(puts) > 3


@pytest.mark.slow
def test_looks_at_a_bucket_and_the_text_of_a_plan(proxy: CountingProxy, server: Server, cli: Cli) -> None:
    Path("r.json").write_text(json.dumps({"merge_method": "linear", "models": [{"model": "a"}], "parameters": {"weight": 1}}))
    out = server.address("models/out")
    command = ["r.json", out, "--max-shard-size", "5MB"]
    upload = json.loads(cli("plan", *command, "--json").out)["summary"]["upload"]
    text = cli("plan", *command).out
    row = next(line for line in text.splitlines() if line.startswith("upload"))
    files, writes, reads = upload["files"], upload["bucket_writes"], upload["bucket_reads"]
    assert row.endswith(f" in {files} files, by {writes} requests, and {reads} that look at objects")
    assert not [line for line in cli("plan", "r.json", "out").out.splitlines() if line.startswith("upload")]
    assert proxy.requests == []

    assert cli("merge", *command).code == 0
    seen = [request for request in proxy.requests if not request.key.startswith("in/")]
    assert len(written(seen)) == writes
    assert len(seen) - len(written(seen)) == reads


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_a_report_and_large_other_files(proxy: CountingProxy, server: Server, inside: bool) -> None:
    tokens = {f"t{i:07}": i for i in range(600_000)}
    text = json.dumps({"model": {"type": "BPE", "vocab": tokens, "merges": []}})
    assert len(text) > 8 << 20
    for name in ("base", "a"):
        Path(name, "tokenizer.json").write_text(text)
    models = [{"model": "a", "parameters": {"weight": 0.5, "density": 0.5}}]
    recipe = {"merge_method": "ties", "base_model": "base", "models": models}
    out = server.address("models/out")
    options = {"max_shard_bytes": 12_000_000, "report": f"{out}/report.html" if inside else "page.html"}
    upload = weightsmith.plan(recipe, max_shard_bytes=12_000_000).summary(report=options["report"]).upload
    proxy.requests.clear()
    weightsmith.merge(recipe, out, progress=False, check_loading=False, **options)
    writes = written(proxy.requests)
    assert len(writes) == upload.bucket_writes
    assert sum(request.key.endswith("tokenizer.json") for request in writes) == put_requests(len(text)) == 4
    names = server.names("models/out/")
    assert {"report.html", "distance.svg"} <= {name.rpartition("/")[2] for name in names} or not inside
    assert upload.files == len(names)


def test_a_file_of_any_size_has_no_more_parts_than_a_store_takes() -> None:
    assert [put_requests(n) for n in (1, 8 << 20, (8 << 20) + 1, 80 << 30, 1 << 40)] == [1, 1, 4, 9002, 9002]
