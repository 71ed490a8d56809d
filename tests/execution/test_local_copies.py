"""Inputs that are read from copies on this machine's own disk: the bytes are the same, and a copy that differs is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import weightsmith
from tests.cli_help import Cli
from tests.cli_help import cli as cli
from tests.execution.distributed.threads import Threads
from tests.files.remote.servers import model, serve, write
from tests.files.remote.test_streaming import content, linear
from weightsmith._base.errors import CheckpointError, ParameterError
from weightsmith._execution.cluster import share_out
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._files.safetensors import read_header
from weightsmith._models.sources import files
from weightsmith._planning.planner.reopen import load_plan, reopen

SHARD = 200_000


class Folders:
    """Two models on a share, copies of them, a plan of a merge, and its output without copies."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.copies = root, root / "own disk"
        models = [write(root / "share" / name, model(k, layers=3, width=96)) for k, name in enumerate(("a", "b"))]
        self.weights = sorted(path for folder in models for path in folder.glob("*.safetensors"))
        self.expected = root / "expected"
        self.plan = weightsmith.plan(linear(*models), max_shard_bytes=SHARD, check_loading=False)
        weightsmith.run(self.plan, self.expected, fsync=False, progress=False)
        shutil.copytree(root / "share", self.copies)
        self.opened: list[Path] = []
        plain = files._open_readonly

        def opened(path: Path) -> int:
            self.opened.append(path)
            return plain(path)

        monkeypatch.setattr(files, "_open_readonly", opened)

    def run(self, out: str = "out", **options: object) -> weightsmith.Merged | None:
        keywords = {"fsync": False, "progress": False, "local_copy": self.copies, **options}
        return weightsmith.run(self.plan, self.root / out, **keywords)  # type: ignore[arg-type]

    @property
    def from_the_share(self) -> list[Path]:
        """Weight files of the share that were opened for their tensors."""
        return [path for path in self.opened if path in self.weights]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    return Folders(tmp_path, monkeypatch)


@pytest.mark.long
def test_the_bytes_are_the_same_and_no_tensor_is_read_from_the_share(folders: Folders) -> None:
    merged = folders.run()
    assert merged is not None
    assert content(folders.root / "out") == content(folders.expected)
    assert folders.from_the_share == []
    assert merged.copied_bytes == merged.read_bytes > 0
    assert [m.ref for m in merged.plan.models] == [m.ref for m in folders.plan.models]
    assert str(folders.copies) not in (folders.root / "out" / "weightsmith.json").read_text()


def test_a_file_without_a_copy_is_read_from_the_share(folders: Folders) -> None:
    shutil.rmtree(folders.copies / "b")
    merged = folders.run()
    assert merged is not None
    assert content(folders.root / "out") == content(folders.expected)
    assert {path.parent.name for path in folders.from_the_share} == {"b"}
    assert 0 < merged.copied_bytes < merged.read_bytes


@pytest.mark.long
def test_parts_read_copies_and_the_last_run_needs_none(folders: Folders) -> None:
    for k in (1, 2):
        assert folders.run(part=(k, 2)) is None
    assert folders.from_the_share == []
    merged = folders.run(local_copy=None)
    assert merged is not None
    assert merged.resumed == len(folders.plan.steps)
    assert content(folders.root / "out") == content(folders.expected)


@pytest.mark.long
def test_a_run_resumes_without_its_copies(folders: Folders) -> None:
    assert folders.run(part=(1, 2)) is None
    shutil.rmtree(folders.copies)
    merged = folders.run(local_copy=None)
    assert merged is not None
    assert 0 < merged.resumed < len(folders.plan.steps)
    assert content(folders.root / "out") == content(folders.expected)


@pytest.mark.long
def test_workers_read_copies(folders: Folders) -> None:
    workers = Threads(2)
    with reopen(folders.plan) as prepared:
        options = RunOptions(fsync=False, local_copy=str(folders.copies))
        helpers = lambda *arguments: share_out(*arguments, workers=workers)  # noqa: E731
        merged = execute(prepared, folders.root / "out", options, helpers=helpers)
    assert merged.copied_bytes == merged.read_bytes > 0
    assert folders.from_the_share == []
    assert content(folders.root / "out") == content(folders.expected)


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def renamed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"norm.weight", b"nerm.weight"))


def trained(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(byte ^ 1 for byte in data[len(data) // 2 :]))


def with_one_tensor_trained(path: Path) -> None:
    """The middle of one tensor changes, and none of the pages at equal distances."""
    data, before = path.read_bytes(), files.sample_files([path])
    for tensor in read_header(path).tensors:
        middle = tensor.offset + tensor.spec.nbytes // 2
        path.write_bytes(data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 64]) + data[middle + 64 :])
        if files.sample_files([path]) == before:
            return
    raise AssertionError("every tensor has a sampled page in its middle")


def damaged(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (shorter, "another size"),
        (renamed, "another header"),
        (trained, "other weights"),
        (with_one_tensor_trained, "other weights"),
        (damaged, "is damaged"),
    ],
)
def test_a_copy_that_differs_is_an_error_with_both_values(folders: Folders, change: Callable[[Path], None], what: str) -> None:
    copy = next((folders.copies / "b").glob("*.safetensors"))
    change(copy)
    with pytest.raises(ParameterError, match=what) as caught:
        folders.run()
    assert caught.value.finding.where == str(copy)
    assert any("original" in line for line in caught.value.finding.details)
    assert not (folders.root / "out").exists()


def test_a_copy_that_changes_during_the_run_is_an_error(folders: Folders) -> None:
    copy = next((folders.copies / "b").glob("*.safetensors"))

    def change(progress: object) -> None:
        copy.touch()

    with pytest.raises(CheckpointError, match="changed after it was opened") as caught:
        folders.run(progress=change)
    assert caught.value.finding.where == str(copy)


def test_a_folder_without_any_copy_is_an_error(folders: Folders) -> None:
    folders.copies.rename(folders.root / "elsewhere")
    with pytest.raises(ParameterError, match="no such folder"):
        folders.run()
    folders.copies.mkdir()
    with pytest.raises(ParameterError, match="has none of 2 weight files of the plan") as caught:
        folders.run()
    assert str(folders.copies / "a") in caught.value.finding.details[0]


@pytest.mark.parametrize("what", ["a symbolic link to no file", "a folder, not a file", "a pipe, not a file"])
def test_a_copy_that_is_no_file_is_an_error(folders: Folders, what: str) -> None:
    copy = next(folders.copies.rglob("*.safetensors"))
    copy.unlink()
    make = {"symbolic": lambda: copy.symlink_to(copy.name), "folder,": copy.mkdir, "pipe,": lambda: os.mkfifo(copy)}
    make[what.split()[1]]()
    with pytest.raises(ParameterError, match=f"the local copy is {what}") as caught:
        folders.run()
    assert caught.value.finding.where == str(copy)


@pytest.mark.long
def test_models_of_one_name_have_the_folders_above_them_in_the_names_of_their_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [write(tmp_path / name / "base", model(k, layers=3, width=96)) for k, name in enumerate(("x", "y"))]
    options = {"fsync": False, "progress": False, "check_loading": False}
    weightsmith.merge(linear(*models), tmp_path / "expected", **options)  # type: ignore[arg-type]
    copies = tmp_path / "copies"
    shutil.copytree(models[0], copies / "base")
    with pytest.raises(ParameterError, match="two models have files of this name") as caught:
        weightsmith.merge(linear(*models), tmp_path / "out", local_copy=copies, **options)  # type: ignore[arg-type]
    assert "x/base/" in caught.value.finding.fix or "y/base/" in caught.value.finding.fix
    shutil.rmtree(copies / "base")
    for folder in models:
        shutil.copytree(folder, copies / folder.parent.name / "base")
    merged = weightsmith.merge(linear(*models), tmp_path / "out", local_copy=copies, **options)  # type: ignore[arg-type]
    assert merged.copied_bytes == merged.read_bytes
    assert content(tmp_path / "out") == content(tmp_path / "expected")


@pytest.mark.long
def test_results_of_other_recipes_are_computed_from_copies(folders: Folders) -> None:
    a, b = (folders.root / "share" / name for name in ("a", "b"))
    recipe = {"models": [{"model": linear(a, b)}, {"model": str(b)}], "merge_method": "linear", "parameters": {"weight": 0.5}}
    options = {"fsync": False, "progress": False, "check_loading": False}
    weightsmith.merge(recipe, folders.root / "nested", **options)  # type: ignore[arg-type]
    folders.opened.clear()
    merged = weightsmith.merge(recipe, folders.root / "out", local_copy=folders.copies, **options)  # type: ignore[arg-type]
    assert content(folders.root / "out") == content(folders.root / "nested")
    assert folders.from_the_share == []
    assert merged.copied_bytes == merged.read_bytes > 0


@pytest.mark.long
def test_a_base_with_an_adapter_is_read_from_the_copy_of_the_base(folders: Folders) -> None:
    a = folders.root / "share" / "a"
    weightsmith.extract_lora(a, folders.root / "share" / "b", folders.root / "adapter", max_rank=4, fsync=False, progress=False)
    recipe = {"models": [{"model": f"{a}+{folders.root / 'adapter'}"}], "merge_method": "linear", "parameters": {"weight": 1.0}}
    options = {"fsync": False, "progress": False, "check_loading": False}
    weightsmith.merge(recipe, folders.root / "adapted", **options)  # type: ignore[arg-type]
    folders.opened.clear()
    merged = weightsmith.merge(recipe, folders.root / "out", local_copy=folders.copies, **options)  # type: ignore[arg-type]
    assert content(folders.root / "out") == content(folders.root / "adapted")
    assert folders.from_the_share == []
    assert 0 < merged.copied_bytes < merged.read_bytes


@pytest.mark.long
def test_nothing_is_fetched_of_a_remote_model_that_has_a_copy(tmp_path: Path) -> None:
    models = [model(k, layers=3, width=96) for k in range(2)]
    served = {f"m{k}/{name}": data for k, data_of in enumerate(models) for name, data in data_of.items()}
    options = {"fsync": False, "progress": False, "check_loading": False}
    for k in range(2):
        write(tmp_path / "copies" / f"m{k}", models[k])
    with serve(served) as site:
        places = [f"{site.url}/m{k}" for k in range(2)]
        weightsmith.merge(linear(*places), tmp_path / "expected", **options)  # type: ignore[arg-type]
        merged = weightsmith.merge(linear(*places), tmp_path / "out", local_copy=tmp_path / "copies", **options)  # type: ignore[arg-type]
    assert merged.fetched_bytes == 0
    assert merged.copied_bytes == merged.read_bytes > 0
    assert content(tmp_path / "out") == content(tmp_path / "expected")


@pytest.mark.long
def test_the_command_says_how_much_it_read_from_copies(folders: Folders, cli: Cli) -> None:
    plan = folders.root / "plan.json"
    plan.write_text(json.dumps(folders.plan.to_json()))
    assert load_plan(plan) == folders.plan
    part = cli("run", plan, folders.root / "out", "--local-copy", folders.copies, "--part", "1/2")
    assert part.code == 0
    assert "from local copies" in part.err
    ran = cli("run", plan, folders.root / "out", "--local-copy", folders.copies)
    assert ran.code == 0
    assert "read from local copies" in ran.out


@pytest.mark.long
def test_only_the_driver_of_a_ray_cluster_needs_no_copy(folders: Folders) -> None:
    shutil.rmtree(folders.copies)
    helpers = lambda *arguments: share_out(*arguments, workers=Threads(2))  # noqa: E731
    for options in (RunOptions(), RunOptions(processes=2, threads=2)):
        with reopen(folders.plan) as prepared, pytest.raises(ParameterError, match="no such folder"):
            execute(
                prepared, folders.root / "out", replace(options, fsync=False, local_copy=str(folders.copies)), helpers=helpers
            )
    with reopen(folders.plan) as prepared:
        options = RunOptions(fsync=False, ray="auto", local_copy=str(folders.copies))
        merged = execute(prepared, folders.root / "out", options, helpers=helpers)
    assert merged.copied_bytes == 0
    assert content(folders.root / "out") == content(folders.expected)
