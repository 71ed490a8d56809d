"""`--push`: the finished folder as a model on a stand-in for the Hub."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import weightsmith
from tests.cli_help import Ran
from tests.execution.test_cards import RECIPE
from tests.execution.test_cards import here as here
from tests.fake_hub import ATTRIBUTES, FakeHub, environment, serve, silent, use
from tests.fork_help import forked, forked_cli
from weightsmith._base.errors import PushFailed
from weightsmith._outputs import hub_repository
from weightsmith._outputs.hub import check_push, push


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve({}) as hub:
        yield hub


def run(hub: FakeHub, here: Path, *args: object, **env: str) -> Ran:
    return forked_cli(*args, env=hub.environment(here / "home", HF_TOKEN="hf_good") | env, cwd=here)


def recipe(here: Path) -> str:
    (here / "recipe.yml").write_text(json.dumps(RECIPE))
    return "recipe.yml"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_merge_is_pushed_as_a_private_model(hub: FakeHub, here: Path) -> None:
    done = run(hub, here, "merge", recipe(here), "out", "--push", "org/merged", "--json")
    assert done.code == 0, done.err
    assert hub.pushed == {"org/merged": files(here / "out")}
    assert hub.created[0]["name"] == "merged"
    assert "private" in (hub.created[0].get("visibility"), *(key for key, value in hub.created[0].items() if value is True))
    assert json.loads(done.out)["url"] == f"{hub.url}/org/merged"
    assert 'from_pretrained("org/merged"' in hub.pushed["org/merged"]["README.md"].decode()
    assert weightsmith.verify(here / "out").tensors == 1
    assert all(seen.authorization == "Bearer hf_good" for seen in hub.seen if seen.path.startswith("/api"))


@pytest.mark.long
def test_a_public_model_into_a_repository_that_exists_by_run(hub: FakeHub, here: Path) -> None:
    hub.put("org/merged", {"old.txt": b"stays", ".gitattributes": ATTRIBUTES})
    (here / "plan.json").write_text(run(hub, here, "plan", recipe(here), "--json").out)
    assert hub.seen == []
    done = run(hub, here, "run", "plan.json", "out", "--push", "org/merged", "--public")
    assert done.code == 0, done.err
    assert f"uploaded to {hub.url}/org/merged" in done.out
    assert hub.created == []
    assert hub.pushed == {"org/merged": {"old.txt": b"stays"} | files(here / "out")}
    refused = run(hub, here, "run", "plan.json", "out2", "--part", "1/2", "--push", "org/merged")
    assert refused.code == 2
    assert "a part publishes nothing" in refused.err


@pytest.mark.matrix("/lfs/")
@pytest.mark.slow
@pytest.mark.parametrize("fails", ["/api/repos/create", "/lfs/", "/api/models/org/merged/commit"])
def test_a_failed_upload_leaves_the_output_and_says_how_to_push_it_again(fails: str, hub: FakeHub, here: Path) -> None:
    hub.fails[fails] = 403
    done = run(hub, here, "merge", recipe(here), "out", "--push", "org/merged")
    assert done.code == 3
    assert "the upload failed" in done.err
    assert f"The output is finished and complete in {here / 'out'}" in done.err
    assert weightsmith.verify(here / "out").tensors == 1
    assert hub.pushed.get("org/merged", {}) == {}
    hub.fails.clear()
    (command,) = re.findall(r"Upload it again: `(.*)`", done.err)
    hf, *args = shlex.split(command)
    assert (hf, args[0], args[-1]) == ("hf", "upload", "--private")

    def upload() -> None:
        (command,) = entry_points(group="console_scripts", name=hf)
        sys.argv = [hf, *args]
        command.load()()

    again = forked(upload, hub.environment(here / "home", HF_TOKEN="hf_good"), here)
    assert again.code == 0, again.err
    assert hub.pushed == {"org/merged": files(here / "out")}


def test_an_interrupted_upload_leaves_the_output_too(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(hub, monkeypatch)
    repository = check_push("org/x@v2")

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repository.api, "upload_folder", interrupted)
    with pytest.raises(PushFailed, match="the upload was interrupted") as caught:
        push(repository, tmp_path, public=True, message="")
    assert f"`hf upload org/x {tmp_path} . --revision v2`" in str(caught.value)
    assert f"complete in {tmp_path}" in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("repo", "env", "words"),
    [
        ("merged", {}, "not a name that a model can have on the Hub"),
        ("org/a--b", {}, "not a name that a model can have on the Hub"),
        ("org/merged", {"HF_TOKEN": ""}, "uploading requires a token of the Hub, and none is set"),
        ("org/merged", {"HF_TOKEN": "hf_bad"}, "the Hub does not accept the token"),
        ("org/merged", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE=1 forbids uploading"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_the_merge(
    repo: str, env: dict[str, str], words: str, hub: FakeHub, here: Path
) -> None:
    done = run(hub, here, "merge", recipe(here), "out", "--push", repo, **env)
    assert done.code == 3
    assert words in done.err
    assert "Nothing was written." in done.err
    assert not (here / "out").exists()
    assert hub.pushed == {}


@pytest.mark.long
def test_a_hub_that_never_answers_is_found_before_the_merge(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_repository, "PATIENCE", replace(hub_repository.PATIENCE, failures=1, first_seconds=0.0))
    with silent() as hub:
        done = run(hub, here, "merge", recipe(here), "out", "--push", "org/merged", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert done.code == 3
    assert "the Hub does not answer" in done.err
    assert not (here / "out").exists()


@pytest.mark.long
def test_push_is_an_option_of_python(hub: FakeHub, here: Path) -> None:
    env = hub.environment(here / "home", HF_TOKEN="hf_good")
    done = forked(lambda: print(weightsmith.merge(RECIPE, "out", push="org/merged", progress=False).url), env, here)
    assert done.out.strip() == f"{hub.url}/org/merged", done.err
    assert hub.pushed == {"org/merged": files(here / "out")}
    assert environment(here)["HF_HUB_DISABLE_XET"] == "1"
