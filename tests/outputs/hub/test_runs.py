"""Merges into models on the Hub: the bytes of local ones, through kills, faults and other people's commits."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import fake_hub
from tests.cli_help import Cli, cli
from tests.fake_hub import ATTRIBUTES, CUT, LOST, TOKEN, FakeHub, Fault, Seen, no_fault
from tests.fork_help import Forked, forked_cli
from tests.output_help import tree
from tests.outputs.bucket.test_runs import MODELS, RECIPES
from weightsmith._base.errors import Busy, CannotResume, OutputExists, ParameterError, PushFailed, StoreError
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._execution.output import check_options
from weightsmith._execution.run import Callbacks
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs import hub_repository
from weightsmith._outputs.hub_repository import HubContent, HubRepository, parse_hub_address
from weightsmith._outputs.local import LocalTarget
from weightsmith._outputs.staging import Staging
from weightsmith._outputs.weight_files import FILLED, UPLOADS, StreamedFiles
from weightsmith._planning.options import RecipeOptions

__all__ = ["cli"]

OUT = "hf://org/out"
SHARD = 60_000
"""Bytes of a weight file: the merges have about ten."""


def run(case: str = "ties", out: str = OUT, **overrides: Any) -> weightsmith.Merged:
    function, recipe, options = RECIPES[case]
    options = {**options, "max_shard_bytes": SHARD, **overrides}
    return getattr(weightsmith, function)(recipe, out, progress=False, **options)  # type: ignore[no-any-return]


def local(here: Path, case: str = "ties", repo: str = "org/out", **options: Any) -> dict[str, bytes]:
    """The files of the same run into a folder. repo: the model on the Hub that its card names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTarget, "spec", repo)
        run(case, str(here / "out"), **options)
    return tree(here / "out")


def staging(here: Path) -> list[Path]:
    return [path for path in here.iterdir() if path.name not in (*MODELS, "out")]


def uploads(hub: FakeHub) -> list[str]:
    return hub.asked("PUT", "/lfs/*")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["shards", "ties of a model", "fp8", "moe"])
def test_the_files_are_those_of_a_local_run(here: Path, hub: FakeHub, case: str) -> None:
    merged = run(case)
    assert str(merged.out) == OUT
    assert merged.url == f"{hub.url}/org/out"
    assert hub.pushed == {"org/out": local(here, case)}
    assert staging(here) == []
    model = hub.written["org/out"]
    assert (model.visibility, len(model.commits), model.head().message) == ("private", 2, merged.plan.provenance.title)
    assert [request["visibility"] for request in hub.created] == ["private"]
    assert len(uploads(hub)) == len(set(uploads(hub))) == len(merged.plan.layout.shards)
    assert hub.leaked == []


@pytest.mark.long
def test_the_bytes_are_those_of_a_pushed_folder(here: Path, hub: FakeHub) -> None:
    run()
    streamed = hub.written.pop("org/out").files()
    run(out="out", push="org/out")
    assert hub.pushed == {"org/out": streamed}
    assert tree(here / "out") == streamed


@pytest.mark.long
def test_few_weight_files_exist_at_a_time(here: Path, hub: FakeHub) -> None:
    most = 0
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, len(list(here.glob(".out-*/content/*.safetensors"))))

    hub.fault = lambda seen: time.sleep(0.05) if seen.method == "PUT" else None  # type: ignore[func-returns-value]
    thread = threading.Thread(target=look)
    thread.start()
    try:
        merged = run("ties of a model", max_shard_bytes=50_000, threads=2)
    finally:
        done.set()
        thread.join()
    assert len(merged.plan.layout.shards) > 2 * (UPLOADS + FILLED)
    assert UPLOADS < most <= UPLOADS + FILLED


@pytest.mark.long
def test_large_files_are_uploaded_in_parts(here: Path, hub: FakeHub) -> None:
    hub.part_bytes, hub.page = 7_000, 3
    run("linear")
    assert uploads(hub) == []
    assert len(hub.asked("PUT", "/lfs-part/*")) > 50
    assert hub.pushed == {"org/out": local(here, "linear")}


@pytest.mark.long
def test_files_are_uploaded_through_xet_where_the_hub_has_it(
    here: Path, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hf_xet")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    folder = tmp_path_factory.mktemp("xet")
    hub.xet = str(folder)
    merged = run("linear")
    weights = {shard.name for shard in merged.plan.layout.shards}
    files = hub.written["org/out"].head().files
    assert {name: files[name].oid for name in weights} == {
        name: hashlib.sha256(data).hexdigest() for name, data in local(here, "linear").items() if name in weights
    }
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert stored > 0.9 * sum(shard.nbytes for shard in merged.plan.layout.shards)
    assert uploads(hub) == []
    assert staging(here) == []


# options


@pytest.mark.long
def test_a_branch_begins_empty_and_the_card_names_it(here: Path, hub: FakeHub) -> None:
    run("linear")
    merged = run(out="hf://org/out@v2/ties", commit_message="second", public=True)
    model = hub.written["org/out"]
    assert (str(merged.out), merged.url) == ("hf://org/out@v2/ties", f"{hub.url}/org/out/tree/v2/ties")
    assert (model.visibility, model.head("v2/ties").message) == ("private", "second")
    assert 'from_pretrained("org/out", revision="v2/ties"' in model.files("v2/ties")["README.md"].decode()
    assert model.files("v2/ties") == local(here, repo="org/out@v2/ties")
    assert model.files() != model.files("v2/ties")


@pytest.mark.long
def test_the_upload_of_the_last_files_is_shown(here: Path, hub: FakeHub) -> None:
    seen: list[tuple[int, int]] = []
    shown, sent = threading.Event(), itertools.count(1)

    def uploading(done: int, total: int) -> None:
        seen.append((done, total))
        shown.set()

    with prepare_any(RECIPES["linear"][1], RecipeOptions(max_shard_bytes=SHARD), QuantizeSettings()) as prepared:
        shards = prepared.plan.layout.shards

        def hold(request: Seen) -> Fault:  # the last file, until its upload is shown
            if request.method == "PUT" and next(sent) == len(shards):
                shown.wait(10)
            return None

        hub.fault = hold
        execute(prepared, OUT, RunOptions(), Callbacks(uploading=uploading))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {sum(shard.nbytes for shard in shards)}
    assert seen[0][0] < seen[0][1]  # a later one may show everything: the upload's thread still has to clean up


@pytest.mark.long
def test_a_public_model_is_public(here: Path, hub: FakeHub) -> None:
    run("linear", public=True)
    assert hub.written["org/out"].visibility == "public"


@pytest.mark.long
def test_a_folder_is_pushed_to_a_branch_with_a_message(here: Path, hub: FakeHub) -> None:
    merged = run("linear", "out", push="org/out@v3", commit_message="third")
    assert merged.url == f"{hub.url}/org/out/tree/v3"
    assert hub.written["org/out"].head("v3").message == "third"
    assert hub.written["org/out"].files("v3") == tree(here / "out")
    assert hub.written["org/out"].files() == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"push": "org/other"}, "--push uploads a local folder"),
        ({"keep_stages": True}, "results of stages are kept in local folders"),
        ({"out": "out", "commit_message": "x"}, "there is no commit"),
    ],
)
def test_options_that_such_an_output_lacks_are_rejected(here: Path, hub: FakeHub, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        run("linear", **options)
    assert (staging(here), hub.seen) == ([], [])


def test_a_cluster_does_not_write_to_the_hub() -> None:
    with pytest.raises(ParameterError, match="one process uploads weight files to the Hub"):
        check_options(OUT, RunOptions(ray="local"))


# existing repositories


@pytest.mark.long
def test_a_model_is_replaced_only_with_overwrite_and_loses_its_files_in_the_same_commit(here: Path, hub: FakeHub) -> None:
    run("stack")
    model, before = hub.written["org/out"], hub.written["org/out"].branches["main"]
    with pytest.raises(OutputExists, match="the repository already holds files"):
        run("linear", max_shard_bytes=10**6)
    assert (staging(here), model.branches["main"]) == ([], before)
    run("linear", max_shard_bytes=10**6, overwrite=True)
    assert model.commits[model.branches["main"]].parent == before
    assert model.files() == local(here, "linear", max_shard_bytes=10**6)


@pytest.mark.slow
def test_other_peoples_files_are_never_replaced(here: Path, hub: FakeHub) -> None:
    hub.put("org/out", {"notes.txt": b"mine", ".gitattributes": ATTRIBUTES})
    with pytest.raises(OutputExists, match="would be lost") as caught:
        run(overwrite=True)
    assert "notes.txt" in str(caught.value)
    assert hub.pushed == {"org/out": {"notes.txt": b"mine"}}


@pytest.mark.long
def test_a_card_that_somebody_wrote_stays_if_the_output_has_none(here: Path, hub: FakeHub) -> None:
    hub.put("org/out", {"README.md": b"mine", ".gitattributes": ATTRIBUTES})
    with pytest.raises(OutputExists, match="already holds files"):
        run("linear")
    run("linear", overwrite=True, card=False)
    assert hub.pushed["org/out"] == {"README.md": b"mine"} | local(here, "linear", card=False)


@pytest.mark.long
def test_a_manifest_that_was_edited_lists_nothing(here: Path, hub: FakeHub) -> None:
    run("linear")
    hub.put("org/out", {"weightsmith.json": b"{}"})
    with pytest.raises(OutputExists, match=r"its weightsmith\.json cannot be used"):
        run(overwrite=True)


@pytest.mark.long
def test_no_more_of_a_manifest_is_read_than_one_can_have(here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.put("org/out", {"weightsmith.json": bytes(32 << 20)})
    model = HubRepository(parse_hub_address(OUT))
    monkeypatch.setattr(hub_repository, "MAX_MANIFEST_BYTES", 1 << 20)
    with pytest.raises(PushFailed, match="more than the 1,048,576 bytes that a manifest can have"):
        run("linear", overwrite=True)
    tracemalloc.start()
    try:
        with pytest.raises(PushFailed, match="more than the 1,048,576 bytes"):
            model.manifest(commit)
        assert tracemalloc.get_traced_memory()[1] < 48 << 20  # 32 MiB are the server's
    finally:
        tracemalloc.stop()
    assert len(hub.asked("GET", "/org/out/resolve/*")) == 2


def test_the_model_that_is_read_is_not_replaced(here: Path, hub: FakeHub) -> None:
    from weightsmith._outputs.hub import check_not_read

    check_not_read(parse_hub_address("hf://org/a@new"), ["org/a", "./x", "s3://org/a"])
    for read in ("org/a", "hf://org/a", "org/a@main+org/adapter", "./x+org/a"):
        with pytest.raises(PushFailed, match="the run reads org/a, which would be replaced"):
            check_not_read(parse_hub_address("hf://org/a"), [read])


# faults


REQUESTS = [
    ("GET", "/api/models/org/out/revision"),
    ("POST", "/api/repos/create"),
    ("GET", "/api/models/org/out/tree"),
    ("POST", "/api/models/org/out/preupload"),
    ("POST", "/org/out.git/info/lfs/objects/batch"),
    ("PUT", "/lfs/"),
    ("POST", "/lfs-verify"),
    ("POST", "/api/validate-yaml"),
    ("POST", "/api/models/org/out/commit"),
]


@pytest.mark.matrix("503")
@pytest.mark.slow
@pytest.mark.parametrize("fault", [500, 503, 429, CUT, LOST])
def test_a_request_that_fails_once_is_repeated(here: Path, hub: FakeHub, fault: int | str) -> None:
    """One of each kind fails."""
    faults = [failing(method, start, fault, times=1) for method, start in REQUESTS]
    met = [0] * len(faults)

    def first(seen: Seen) -> Fault:
        for i, fault in enumerate(faults):
            if answer := fault(seen):
                met[i] += 1
                return answer
        return None

    hub.fault = first
    run("linear")
    assert met == [1] * len(faults)
    model = hub.written["org/out"]
    assert len(model.commits) == 2
    hub.fault = no_fault
    assert model.files() == local(here, "linear")


def failing(method: str, start: str, fault: int | str, times: int, skip: int = 0) -> Callable[[Seen], Fault]:
    """Fail the next so many requests of a kind."""
    countdown = [skip, times]
    lock = threading.Lock()

    def fail(seen: Seen) -> Fault:
        if seen.method == method and seen.path.startswith(start):
            with lock:
                if countdown[0]:
                    countdown[0] -= 1
                elif countdown[1]:
                    countdown[1] -= 1
                    return fault
        return None

    return fail


@pytest.mark.matrix("*commit-503*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "status", "words"),
    [
        ("/lfs/", 500, "the Hub answered with 500 (uploading model-0000"),
        ("/api/models/org/out/preupload", 401, "the Hub does not accept the token (uploading"),
        ("/api/models/org/out/preupload", 403, "the token may not do this (uploading"),
        ("/org/out.git/info/lfs/objects/batch", 404, "no such repository or branch"),
        ("/api/models/org/out/commit", 403, "the token may not do this (the commit)"),
        ("/api/models/org/out/commit", 503, "the Hub answered with 503 (the commit)"),
        ("/api/models/org/out/commit", 429, "kept refusing so many requests (the commit)"),
    ],
)
def test_a_fault_that_stays_is_one_clear_error_and_the_same_command_resumes(
    here: Path, hub: FakeHub, start: str, status: int, words: str
) -> None:
    hub.fails[start] = status
    with pytest.raises(PushFailed) as caught:
        run("linear")
    assert words in str(caught.value)
    assert "run again to resume" in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert len(hub.written["org/out"].commits) == 1
    assert sum(seen.path.startswith(start) for seen in hub.seen if seen.method != "GET") <= 100
    hub.fails.clear()
    before = len(uploads(hub)) if start != "/lfs/" else 0
    again = run("linear")
    assert again.resumed > 0
    assert hub.pushed == {"org/out": local(here, "linear")}
    if before:
        assert len(uploads(hub)) == len(set(uploads(hub)))


@pytest.mark.long
def test_the_token_is_in_no_file_and_goes_to_no_other_host(here: Path, hub: FakeHub) -> None:
    hub.fails["/api/models/org/out/commit"] = 500
    with pytest.raises(PushFailed):
        run("linear")
    (folder,) = staging(here)
    assert all(TOKEN.encode() not in data for data in tree(folder).values())
    hub.fails.clear()
    run("linear")
    assert all(TOKEN.encode() not in data for data in hub.pushed["org/out"].values())
    assert hub.leaked == []


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("hf://out", "not a name that a model can have"),
        ("hf://org/a/b", "not a name that a model can have"),
        ("hf://org/out@" + "0" * 40, "a commit cannot be written to"),
        ("hf://org/out@a..b", "not a name that a branch can have"),
        ("hf://user:hf_s3cret@org/out", "not a name that a model can have"),
        ("hf://org/out@v2?token=hf_s3cret", "not a name that a branch can have"),
    ],
)
def test_addresses_that_cannot_be_are_rejected(here: Path, hub: FakeHub, out: str, words: str) -> None:
    with pytest.raises(PushFailed, match=words) as caught:
        run(out=out)
    assert "Nothing was written." in str(caught.value)
    assert "hf_s3cret" not in str(caught.value)
    assert (staging(here), hub.seen) == ([], [])


def test_without_a_network_or_a_token_nothing_is_begun(here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(PushFailed, match="the Hub does not accept the token"):
        run()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "none"))
    with pytest.raises(PushFailed, match="none is set"):
        run()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PushFailed, match="HF_HUB_OFFLINE=1 forbids uploading"):
        run()
    assert (staging(here), hub.written) == ([], {})


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("start", ["/api/models/org/out/branch", "/api/models/org/out/commits"])
def test_an_error_after_the_repository_was_created_says_so(here: Path, hub: FakeHub, start: str, existed: bool) -> None:
    if existed:
        hub.put("org/out", {"notes.txt": b"mine", ".gitattributes": ATTRIBUTES})
    hub.fails[start] = 403
    with pytest.raises(PushFailed, match="the token may not do this") as caught:
        run("linear", f"{OUT}@v2")
    state = "Nothing was uploaded. The empty private repository org/out was created."
    assert caught.value.state == ("Nothing was written." if existed else state)
    assert (staging(here), [*hub.written["org/out"].branches]) == ([], ["main"])


def test_a_repository_that_keeps_weights_in_git_is_rejected(here: Path, hub: FakeHub) -> None:
    hub.put("org/out", {".gitattributes": b"*.bin filter=lfs\n"})
    with pytest.raises(PushFailed, match=r"does not take this weight file, because of its \.gitattributes"):
        run("linear")


# other people's commits, and other processes


@pytest.mark.long
@pytest.mark.parametrize("status", [None, 409])
def test_a_commit_of_someone_else_is_reported_and_never_undone(here: Path, hub: FakeHub, status: int | None) -> None:
    theirs = ""

    def commit(seen: Seen) -> int | None:
        nonlocal theirs
        if not theirs and "/commit/" in seen.path:
            theirs = hub.put("org/out", {"README.md": b"---\ntags: [a]\n---\nmine"})
            return status
        return None

    hub.fault = commit
    with pytest.raises(PushFailed, match="the branch was changed after this run began") as caught:
        run("linear")
    assert theirs in str(caught.value)
    assert hub.pushed == {"org/out": {"README.md": b"---\ntags: [a]\n---\nmine"}}
    with pytest.raises(OutputExists, match="already holds files"):
        run("linear")
    sent = len(uploads(hub))
    run("linear", overwrite=True)
    assert len(uploads(hub)) == sent
    assert hub.written["org/out"].head().parent == theirs
    assert hub.pushed == {"org/out": local(here, "linear")}


@pytest.mark.long
def test_a_commit_of_someone_else_between_two_runs_is_reported(here: Path, hub: FakeHub) -> None:
    hub.fails["/api/models/org/out/commit"] = 403
    with pytest.raises(PushFailed):
        run("linear")
    hub.fails.clear()
    theirs = hub.put("org/out", {"README.md": b"mine"})
    with pytest.raises(PushFailed, match="the branch was changed after this run began"):
        run("linear", overwrite=True)
    assert hub.written["org/out"].branches["main"] == theirs
    run("linear", overwrite=True)
    assert hub.pushed == {"org/out": local(here, "linear")}


@pytest.mark.long
def test_a_commit_whose_answer_was_lost_is_found_under_one_of_someone_else(here: Path, hub: FakeHub) -> None:
    theirs = ""

    def fault(seen: Seen) -> Fault:
        nonlocal theirs
        model = hub.written.get("org/out")
        if "/commit/" in seen.path:
            return LOST
        if not theirs and model is not None and len(model.commits) == 2:
            theirs = hub.put("org/out", dict(model.files()) | {"README.md": b"mine", ".gitattributes": ATTRIBUTES})
        return None

    hub.fault = fault
    run("linear")
    model = hub.written["org/out"]
    assert (model.branches["main"], len(model.commits)) == (theirs, 3)
    assert model.files() == local(here, "linear") | {"README.md": b"mine"}
    assert staging(here) == []


@pytest.mark.long
def test_killed_after_its_commit_and_then_changed_by_someone_else_it_is_not_said_that_nothing_was_committed(
    here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Staging, fsync: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "_clean_up", killed)
        with pytest.raises(KeyboardInterrupt):
            run("linear")
    model = hub.written["org/out"]
    ours = model.branches["main"]
    theirs = hub.put("org/out", dict(model.files()) | {"README.md": b"mine", ".gitattributes": ATTRIBUTES})
    with pytest.raises(
        PushFailed, match="an interrupted run has committed this model, and the branch was changed after that"
    ) as caught:
        run("linear")
    assert ours in str(caught.value)
    assert theirs in str(caught.value)
    assert "nothing was committed" not in str(caught.value).lower()
    assert (model.branches["main"], len(model.commits)) == (theirs, 3)


@pytest.mark.long
def test_one_process_at_a_time(here: Path, hub: FakeHub) -> None:
    inside: list[BaseException] = []
    once = threading.Lock()  # uploads are parallel

    def second(seen: Seen) -> None:
        if seen.method == "PUT" and once.acquire(blocking=False):
            with pytest.raises(Busy) as caught:
                run("linear")
            inside.append(caught.value)

    hub.fault = second
    run("linear")
    assert len(inside) == 1
    assert len(hub.written["org/out"].commits) == 2


@pytest.mark.long
def test_unfinished_work_of_another_recipe_is_not_lost(here: Path, hub: FakeHub) -> None:
    hub.fails["/api/models/org/out/commit"] = 403
    with pytest.raises(PushFailed):
        run("linear")
    hub.fails.clear()
    with pytest.raises(CannotResume):
        run("ties")
    run("ties", resume=False)
    assert hub.pushed == {"org/out": local(here, "ties")}


# interrupted runs


def start(case: str, hub: FakeHub, here: Path) -> Forked:
    return Forked(lambda: run(case), hub.environment(here.parent / "home", HF_TOKEN=TOKEN), here)


@pytest.mark.matrix("moe-PUT*", "*/commit-0", "moe-GET*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "method", "path", "skip"),
    [
        ("moe", "POST", "/api/repos/create", 0),
        ("ties of a model", "PUT", "/lfs/", 0),
        ("moe", "PUT", "/lfs/", 4),
        ("ties of a model", "POST", "/lfs-verify", 2),
        ("moe", "POST", "/api/validate-yaml", 0),
        ("ties of a model", "POST", "/api/models/org/out/commit", 0),
        ("moe", "GET", "/after the commit", 0),
    ],
)
def test_a_killed_run_resumes(here: Path, hub: FakeHub, case: str, method: str, path: str, skip: int) -> None:
    killed = failing(method, path, 1, 1, skip)
    process: list[Forked] = []

    def fault(seen: Seen) -> Fault:
        if path == "/after the commit":
            return process[0].kill if "/commit/" in seen.path else None
        if killed(seen):
            process[0].kill()
            return CUT
        return None

    hub.fault = fault
    process.append(start(case, hub, here))
    assert process[0].wait().code == -signal.SIGKILL
    hub.fault = no_fault
    stored = set(hub.objects)
    hub.seen.clear()
    merged = run(case)
    assert merged.url
    assert hub.pushed == {"org/out": local(here, case)}
    assert len(hub.written["org/out"].commits) == 2
    assert not {name.removeprefix("/lfs/") for name in uploads(hub)} & stored
    if skip:
        assert merged.resumed > 0
    assert staging(here) == []


@pytest.mark.long
def test_what_an_earlier_run_has_uploaded_is_not_even_computed_again(here: Path, hub: FakeHub) -> None:
    hub.fails["/api/models/org/out/commit"] = 403
    with pytest.raises(PushFailed):
        run("linear")
    hub.fails.clear()
    again = run("linear")
    assert (again.written_bytes, again.resumed) == (0, len(again.plan.steps))
    assert len(uploads(hub)) == len(set(uploads(hub)))


@pytest.mark.long
def test_files_that_the_hub_has_removed_meanwhile_are_uploaded_again(here: Path, hub: FakeHub) -> None:
    hub.fails["/api/models/org/out/commit"] = 403
    with pytest.raises(PushFailed):
        run("linear")
    hub.fails.clear()
    hub.objects.pop(sorted(hub.objects)[0])
    with pytest.raises(StoreError, match="the Hub no longer has 1 of the uploaded files"):
        run("linear")
    again = run("linear")
    assert 0 < again.written_bytes < sum(shard.nbytes for shard in again.plan.layout.shards) / 3
    assert hub.pushed == {"org/out": local(here, "linear")}


def test_the_hub_is_asked_about_a_hundred_uploaded_files_at_a_time(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import lfs

    batches: list[int] = []

    def ask(infos: list[Any], *args: Any) -> Any:
        batches.append(len(infos))
        return known(infos, *args)

    known = lfs.post_lfs_batch_info
    monkeypatch.setattr(lfs, "post_lfs_batch_info", ask)
    hub.put("org/out", {})
    files = {f"{i}.safetensors": HubContent(1, "", hashlib.sha256(b"%d" % i).hexdigest()) for i in range(250)}
    hub.objects = {file.sha256: b"x" for name, file in files.items() if name not in ("7.safetensors", "249.safetensors")}
    model = HubRepository(parse_hub_address(OUT))
    assert model.missing(files) == ["7.safetensors", "249.safetensors"]
    assert batches == [100, 100, 50]
    assert model.missing({}) == []


def test_the_disk_is_looked_at_before_anything_is_computed(here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._outputs import disk

    monkeypatch.setattr(disk, "available_bytes", lambda folder: 4 * SHARD)
    with pytest.raises(weightsmith.NoSpace, match="until they are uploaded") as caught:
        run("linear")
    assert "--max-shard-size" in str(caught.value)
    assert hub.written == {}


@pytest.mark.long
def test_the_command_line(here: Path, hub: FakeHub) -> None:
    (here / "recipe.yml").write_text(json.dumps(RECIPES["linear"][1]))
    env = hub.environment(here.parent / "home", HF_TOKEN=TOKEN) | {"COLUMNS": "200"}
    done = forked_cli("merge", "recipe.yml", OUT, "--max-shard-size", "60KB", env=env, cwd=here)
    assert done.code == 0, done.err
    assert f"uploaded to {hub.url}/org/out" in done.out
    assert "Upload" not in done.err
    assert hub.pushed["org/out"].keys() == local(here, "linear").keys() | {"recipe.yml"}


@pytest.mark.slow
def test_every_byte_on_the_hub_is_verified(here: Path, hub: FakeHub) -> None:
    merged = run("linear", f"{OUT}@v2")
    verified = weightsmith.verify(str(merged.out))
    local(here, "linear", "org/out@v2")
    assert (verified.tensors, verified.nbytes) == (len(merged.plan.steps), weightsmith.verify("out").nbytes)
    assert (verified.folder, verified.extra) == (f"{OUT}@v2", ())
    model = hub.written["org/out"]
    name = merged.plan.layout.shards[1].name
    data = model.files("v2")[name]
    hub.put("org/out", {name: data[:-1] + bytes([data[-1] ^ 1]), "config.json": b"{}"}, "v2")
    with pytest.raises(weightsmith.Corrupt) as caught:
        weightsmith.verify(f"{OUT}@v2")
    text = str(caught.value)
    assert "config.json: has 2 bytes, not the 346" in text
    assert f"differs from what was written ({name})" in text
    with pytest.raises(weightsmith.NotFound, match="there is no manifest"):
        weightsmith.verify(OUT)


@pytest.mark.long
def test_unfinished_work_is_listed_and_removed(here: Path, hub: FakeHub, cli: Cli) -> None:
    hub.fails["/api/models/org/out/commit"] = 403
    with pytest.raises(PushFailed):
        run("linear")
    (folder,) = staging(here)
    assert cli("clean", "hf://org/other").out == "no unfinished work to remove\n"
    assert folder.name in cli("clean", OUT).out
    cli("clean", OUT, "--yes")
    assert staging(here) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["streamed", "quantised", "adapter"])
def test_other_commands_and_streamed_models(here: Path, hub: FakeHub, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is read from the Hub where it is; `quantize`; `extract_lora`, whose second plan follows from the first."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here.parent / "cache"))
    for name in MODELS:
        hub.put(f"org/{name}", tree(here / name))
    weights = [{"model": f"hf://org/{name}", "parameters": {"weight": 0.5}} for name in ("a", "b")]
    monkeypatch.setattr(LocalTarget, "spec", "org/out")
    for out in (OUT, str(here / "out")):
        if kind == "streamed":
            recipe = {"merge_method": "linear", "models": weights}
            merged = weightsmith.merge(recipe, out, stream=True, max_shard_bytes=SHARD, progress=False)
            assert merged.fetched_bytes > 0
        elif kind == "quantised":
            weightsmith.quantize("a", out, "fp8-dynamic", progress=False)
        else:
            weightsmith.extract_lora("a", "base", out, max_rank=4, progress=False)
    assert hub.pushed["org/out"] == tree(here / "out")
    assert {path.name for path in here.iterdir()} == {*MODELS, "out"}


@pytest.mark.long
@pytest.mark.parametrize("how", ["an error", "Ctrl-C"])
def test_threads_that_wait_for_an_upload_are_woken_when_the_run_ends(here: Path, hub: FakeHub, how: str) -> None:
    began = threading.Event()
    ended = threading.Event()
    answered = []

    def fault(seen: Seen) -> None:
        if seen.method == "PUT":
            began.set()
            ended.wait(200)
            answered.append(seen)

    def progress(now: weightsmith.Progress) -> None:
        if began.is_set() and now.tensors > 3:
            time.sleep(0.3)  # until the others wait
            raise KeyboardInterrupt if how == "Ctrl-C" else RuntimeError("an error")

    hub.fault = fault
    try:
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            weightsmith.merge(RECIPES["linear"][1], OUT, progress=progress, max_shard_bytes=SHARD)
        assert answered == [], "the run has waited for the upload"
        assert hub.asked("POST", "/api/models/org/out/commit/*") == []
    finally:
        ended.set()
    hub.fault = no_fault
    run("linear")
    assert hub.pushed == {"org/out": local(here, "linear")}


@pytest.mark.long
def test_many_faults_make_nothing_wrong(here: Path, hub: FakeHub) -> None:
    hub.part_bytes = 20_000
    rng, lock = random.Random(15), threading.Lock()
    faults = refused = 0

    def fault(seen: Seen) -> Fault:
        nonlocal faults
        with lock:
            if rng.random() < 0.45:
                return None
            faults += 1
            return rng.choice([CUT, LOST, 429, 500, 502, 503, 504])

    expected = local(here, "linear")
    for _ in range(2):
        hub.fault = fault
        for _ in range(100):
            try:
                run("linear")
                break
            except PushFailed:
                refused += 1
        hub.fault = no_fault
        assert hub.pushed == {"org/out": expected}
        assert len(hub.written["org/out"].commits) == 2
        assert staging(here) == []
        hub.written.clear()
        hub.objects.clear()
    print(faults, "faults,", refused, "runs that gave up")
    assert faults > 100


@pytest.mark.long
def test_a_file_whose_last_tensors_end_at_the_same_moment_is_uploaded_once(
    here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = StreamedFiles._offer

    def late(self: StreamedFiles, number: int) -> None:
        time.sleep(0.05)
        offer(self, number)

    monkeypatch.setattr(StreamedFiles, "_offer", late)
    run("linear", threads=4)
    assert hub.pushed == {"org/out": local(here, "linear")}
    assert len(uploads(hub)) == len(set(uploads(hub)))


@pytest.mark.long
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_after_its_commit_a_run_with_fewer_files_leaves_none_of_them(
    here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    def killed(self: Staging, fsync: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "_clean_up", killed)
        with pytest.raises(KeyboardInterrupt):
            run("linear", report="hf://org/out/report.html")
    assert len(hub.written["org/out"].commits) == 2
    run("linear", overwrite=overwrite)
    assert hub.pushed == {"org/out": local(here, "linear")}


@pytest.mark.long
def test_a_folder_that_cannot_be_removed_after_the_commit_is_named(
    here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Staging) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Staging, "_remove", denied)
    (warning,) = run("linear").warnings
    assert "published and complete, but cleaning up failed: Permission denied" in warning.what
    assert warning.where == str(staging(here)[0])
    assert "run again" not in warning.fix
    assert len(hub.written["org/out"].commits) == 2


@pytest.mark.long
@pytest.mark.parametrize("max_shard_bytes", [SHARD, 1_000_000_000])
def test_a_plan_predicts_the_requests_that_write(here: Path, hub: FakeHub, max_shard_bytes: int) -> None:
    upload = weightsmith.plan(RECIPES["linear"][1], max_shard_bytes=max_shard_bytes).summary().upload
    run("linear", max_shard_bytes=max_shard_bytes)
    assert sum(seen.method in ("PUT", "POST") for seen in hub.seen) == upload.hub_writes
    assert len(hub.pushed["org/out"]) == upload.files
    assert sum(len(data) for data in hub.objects.values()) == upload.nbytes


@pytest.mark.long
def test_a_plan_counts_the_requests_of_other_large_files(here: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_hub, "ATTRIBUTES", fake_hub.ATTRIBUTES + b"*.model filter=lfs diff=lfs merge=lfs -text\n")
    (here / "a/tokenizer.model").write_bytes(b"\n\x05\n\x03abc")
    upload = weightsmith.plan(RECIPES["linear"][1], max_shard_bytes=SHARD).summary().upload
    run("linear")
    assert "tokenizer.model" in hub.pushed["org/out"]
    assert sum(seen.method in ("PUT", "POST") for seen in hub.seen) == upload.hub_writes
    assert len(hub.pushed["org/out"]) == upload.files
