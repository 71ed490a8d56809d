"""`weightsmith clean` and `weightsmith doctor`."""

from __future__ import annotations

import fcntl
import json
import re
import socket
import threading
import tomllib
from pathlib import Path

import pytest

from tests.cli_help import Cli, cli, run_process, work
from weightsmith._app.cli import housekeeping
from weightsmith._engine.local import Progress

__all__ = ["cli", "work"]

STAGED = ".out.weightsmith-staging"


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this user."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("weightsmith._reports.evaluate.opening.cache_home", lambda: folder)
    return folder


@pytest.fixture
def unfinished(work: Path) -> Path:
    """The staging folder of a merge that was interrupted."""
    import weightsmith

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge(work / "linear.yml", work / "out", progress=interrupt)
    assert (work / STAGED).is_dir()
    return work / STAGED


@pytest.mark.slow
def test_unfinished_work_is_listed_and_removed_only_on_request(cli: Cli, work: Path, unfinished: Path) -> None:
    ran = cli("clean")
    assert ran.code == 0
    assert STAGED in ran.out
    assert "1 folder" in ran.out
    assert unfinished.is_dir()
    assert "to remove them: weightsmith clean --yes" in ran.out
    assert f"to remove them: weightsmith clean {work} --yes" in cli("clean", str(work)).out
    (entry,) = json.loads(cli("clean", str(work), "--json").out)
    assert (entry["folder"], entry["out"], entry["removed"]) == (str(unfinished), str(work / "out"), False)
    assert entry["bytes"] > 0
    assert "removed 1 folder" in cli("clean", "--yes").out
    assert not unfinished.exists()
    assert "no unfinished work" in cli("clean").out


def test_what_evaluations_have_left_is_found_without_a_name(cli: Cli, work: Path, unfinished: Path, home: Path) -> None:
    folder = home / "evaluations" / ".evaluation-0123456789ab.weightsmith-staging"
    folder.parent.mkdir()
    unfinished.rename(folder)
    assert str(folder) in cli("clean").out.replace("\n", "")
    assert "no unfinished work" in cli("clean", str(work)).out
    assert "removed 1 folder" in cli("clean", "--yes").out
    assert not folder.exists()


def test_work_that_was_listed_is_still_resumed(cli: Cli, work: Path, unfinished: Path) -> None:
    cli("clean")
    assert cli("merge", "linear.yml", "out", "--quiet").code == 0
    assert not unfinished.exists()


@pytest.mark.parametrize("mode", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_folder_in_which_a_process_works_is_not_removed(cli: Cli, work: Path, unfinished: Path, mode: int) -> None:
    with (unfinished / "lock").open("r+") as lock:
        fcntl.flock(lock, mode)
        ran = cli("clean", "--yes")
        assert ran.code == 0
        assert "a process is working in it" in ran.err
        assert "no unfinished work to remove" in ran.out
        assert (unfinished / "journal").is_file()


def test_a_folder_of_the_users_with_such_a_name_is_not_removed(cli: Cli, work: Path) -> None:
    (work / STAGED).mkdir()
    (work / STAGED / "thesis.txt").write_text("mine")
    ran = cli("clean", "--yes")
    assert "not removable" in ran.err
    assert (work / STAGED / "thesis.txt").read_text() == "mine"


def test_a_link_with_such_a_name_is_not_followed(cli: Cli, work: Path) -> None:
    (work / "mine").mkdir()
    (work / "mine" / "lock").write_text("process 1")
    (work / STAGED).symlink_to(work / "mine")
    assert "symbolic link" in cli("clean", "--yes").err
    assert (work / "mine" / "lock").exists()


def test_a_checkpoint_that_an_interrupted_overwrite_left_is_put_back(cli: Cli, work: Path, unfinished: Path) -> None:
    (unfinished / "old").mkdir()
    (unfinished / "old" / "model.safetensors").write_bytes(b"the earlier one")
    assert cli("clean", "--yes").code == 0
    assert (work / "out" / "model.safetensors").read_bytes() == b"the earlier one"
    assert not unfinished.exists()


def test_a_folder_that_does_not_exist_is_an_error(cli: Cli, work: Path) -> None:
    ran = cli("clean", "nowhere")
    assert ran.code == 3
    assert "error[not-found]: nowhere: no such folder" in ran.err


# ---- doctor


@pytest.mark.long
def test_the_doctor_names_the_files_that_may_have_settings(work: Path) -> None:
    (work / "mine.toml").touch()
    for chosen, named in (("", "./weightsmith.toml"), ("mine.toml", "mine.toml or ./weightsmith.toml")):
        ran = run_process("doctor", cwd=work, env={"HF_HUB_OFFLINE": "1", "WEIGHTSMITH_CONFIG": chosen})
        assert f"none; {named} may have them" in ran.out


@pytest.mark.slow
def test_the_doctor_shows_packages_cores_memory_disk_and_the_hub(work: Path) -> None:
    ran = run_process("doctor", "--json", cwd=work, env={"HF_HUB_OFFLINE": "1"})
    assert ran.code == 0
    report = json.loads(ran.out)
    assert all(report["packages"].values())
    assert report["cores"] >= 1
    assert 0 < report["memory_available_bytes"] <= report["memory_bytes"]
    assert (report["disk"]["folder"], report["disk"]["free_bytes"] > 0) == (str(work), True)
    assert report["hub"]["answer"] == "not asked: HF_HUB_OFFLINE is set"
    text = run_process("doctor", "sub/folder", cwd=work, env={"HF_HUB_OFFLINE": "1"}).out
    for word in ("weightsmith", "numba", "cores", "memory", "disk", "kernels", "hub"):
        assert word in text


def test_a_missing_package_is_named_and_the_code_is_1(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "REQUIRED", ("numpy", "no-such-package"))
    hub = {"endpoint": "", "cache": "", "token": False, "offline": True, "answer": ""}
    monkeypatch.setattr(housekeeping, "_hub", lambda: hub)
    ran = cli("doctor")
    assert ran.code == 1
    assert re.search(r"no-such-package +MISSING", ran.out)


@pytest.mark.slow
def test_a_hub_that_accepts_and_never_answers_is_waited_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "HUB_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        answer = housekeeping._hub()["answer"]
    assert "no answer" in answer or "timed out" in answer


def test_a_hub_that_answers_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        assert housekeeping._ask(f"http://127.0.0.1:{server.getsockname()[1]}").startswith("answers, in ")
        thread.join()


def test_the_doctor_knows_packages_of_every_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for extra, needs in project["optional-dependencies"].items():
        if extra not in ("test", "dev", "site", "dist", "demo"):
            names = {re.split(r"[>=\[]", need)[0] for need in needs}
            assert names & housekeeping.OPTIONAL.keys(), extra
