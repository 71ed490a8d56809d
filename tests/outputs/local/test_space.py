"""A full disk is found before the work, and one that fills up meanwhile costs nothing that is finished."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.output_help import NAMES, layout, open_staging, put
from weightsmith._base.errors import NoSpace, StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import make_layout
from weightsmith._outputs import disk
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.places import verify
from weightsmith._outputs.save import save_file, save_model

MIB = 1 << 20


def big(nbytes: int) -> list[TensorSpec]:
    return [TensorSpec("big", DTYPES["U8"], (nbytes,))]


@pytest.mark.parametrize("can_reserve", [True, False])
def test_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, can_reserve: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_reserve:
        monkeypatch.setattr(disk, "_libc", lambda _: None)
    needed = disk.available_bytes(tmp_path) + (64 << 30)  # other tests free some at the same time
    with pytest.raises(NoSpace) as caught:
        open_staging(tmp_path / "out", make_layout(big(needed), needed), "plan")
    for word in ("needed", f"{needed:,}"[:5], "available", "Free ", "Nothing was written"):
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.path[:0] = sys.argv[2:]
import numpy as np
from weightsmith._base.errors import NoSpace, StoreError
from weightsmith._files.containers import make_layout
from weightsmith._outputs.save import save_file
from tests.output_help import open_staging
from weightsmith._base.tensors import DTYPES, TensorSpec
for work in (
    lambda: open_staging(sys.argv[1] + "/out", make_layout([TensorSpec("big", DTYPES["U8"], (2 << 20,))], 9 << 20), "p"),
    lambda: save_file({"big": np.zeros(2 << 20, "u1")}, sys.argv[1] + "/big.safetensors"),
):
    try:
        work()
    except NoSpace as error:
        print(error)
"""


@pytest.mark.long
def test_a_file_size_limit_is_found_before_the_work_and_said(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), *sys.path], capture_output=True, text=True, check=True
    )
    assert result.stdout.count("ulimit -f") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 8 MiB."""
    monkeypatch.setattr(disk, "_IN_MEMORY", frozenset())
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_files_in_memory_are_not_filled_with_zeros_first(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would clear every page, in one thread, before the threads write them all."""

    def held(nbytes: int) -> int:
        with open_staging(tmpfs / "out", make_layout(big(nbytes), 9 * MIB), "plan") as staging:
            place = staging.location("big")
            assert place is not None
            about = os.fstat(place[0])
            assert about.st_size > nbytes
            return about.st_blocks * 512

    assert held(4 * MIB) > 4 * MIB
    monkeypatch.undo()
    assert held(5 * MIB) < MIB
    with pytest.raises(NoSpace):
        held(8 * MIB)


def fill(folder: Path) -> Path:
    """A neighbour takes all the space that is left."""
    path = folder / "neighbour"
    with path.open("wb", buffering=0) as file:
        for step in (MIB, 4096):
            try:
                while True:
                    file.write(bytes(step))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
    return path


def test_what_was_reserved_is_released_when_it_is_not_enough(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "available_bytes", lambda _: 10**15)  # as with a quota: the disk says one thing, writes another
    specs = [TensorSpec(f"t{i}", DTYPES["U8"], (3 * MIB,)) for i in range(4)]
    with pytest.raises(NoSpace):
        open_staging(tmpfs / "out", make_layout(specs, 3 * MIB), "plan")
    assert list(tmpfs.iterdir()) == []


def test_a_journal_that_cannot_be_begun_releases_what_was_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(NoSpace):
        open_staging(tmp_path / "out", layout(), "plan")
    assert list(tmp_path.iterdir()) == []


def test_reserved_space_is_ours_when_a_neighbour_fills_the_disk(tmpfs: Path) -> None:
    with open_staging(tmpfs / "out", make_layout(big(5 * MIB), 9 * MIB), "plan") as staging:
        fill(tmpfs)
        staging.write("big", 0, np.ones(5 * MIB, np.uint8))


def test_a_disk_that_fills_up_before_publish_leaves_a_state_to_resume(tmpfs: Path) -> None:
    out = tmpfs / "out"
    with open_staging(out, layout(), "plan") as staging:
        put(staging)
        neighbour = fill(tmpfs)
        with pytest.raises(NoSpace) as caught:
            staging.add_file("tokenizer.json", bytes(MIB))
        assert f"kept in {staging_folder(out)}" in str(caught.value)
        with pytest.raises(NoSpace):
            staging.publish({"filler": "x" * MIB})
    assert not out.exists()
    neighbour.unlink()
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == set(NAMES)
        staging.add_file("tokenizer.json", bytes(MIB))
        staging.publish({})
    verify(out)


def test_saving_to_a_full_disk_leaves_the_earlier_file(tmpfs: Path) -> None:
    save_file({"a": np.ones(MIB, np.uint8)}, tmpfs / "m.safetensors")
    before = (tmpfs / "m.safetensors").read_bytes()
    with pytest.raises(NoSpace):
        save_file({"a": np.ones(9 * MIB, np.uint8)}, tmpfs / "m.safetensors")
    with pytest.raises(NoSpace):
        save_model({"a": np.ones(9 * MIB, np.uint8)}, tmpfs / "model")
    assert [p.name for p in tmpfs.iterdir()] == ["m.safetensors"]
    assert (tmpfs / "m.safetensors").read_bytes() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_fails_for_space_says_so_and_keeps_the_work(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with open_staging(out, layout(), "plan") as staging:
        put(staging, NAMES[:2])

        def full(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(NoSpace, match=r"kept in .* run again") as caught:
                staging.write("head", 0, b"1")
        assert ("--max-shard-size (max_shard_bytes)" in caught.value.finding.fix) == (code == errno.EFBIG)
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == set(NAMES[:2])


def test_a_journal_line_that_did_not_fit_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with open_staging(out, layout(), "plan") as staging:
        write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, line: write(fd, line[:20]))
            with pytest.raises(NoSpace, match="no space"):
                put(staging, ["embed"])
        put(staging, ["norm"])
    with open_staging(out, layout(), "plan") as staging:
        assert staging.finished == {"norm"}


def test_a_file_system_without_fallocate_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_libc", lambda _: None)
    with (tmp_path / "file").open("w+b") as file:
        assert disk.reserve(file.fileno(), 100) is False
        assert os.fstat(file.fileno()).st_size == 100
    with open_staging(tmp_path / "out", layout(), "plan") as staging:
        put(staging)
        staging.publish({})
    verify(tmp_path / "out")


# files beside the weights


def test_the_space_of_other_files_is_counted_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "available_bytes", lambda _: 20 * MIB)
    open_staging(tmp_path / "out", layout(), "plan", other_bytes=19 * MIB).discard()
    with pytest.raises(NoSpace) as caught:
        open_staging(tmp_path / "out", layout(), "plan", other_bytes=21 * MIB)
    assert "Free 1,0" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_merge_counts_what_is_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weightsmith
    from tests.plan_help import model

    a = model(tmp_path / "a")
    with (tmp_path / "a" / "tokenizer.json").open("wb") as file:
        file.truncate(30 * MIB)
    monkeypatch.setattr(disk, "available_bytes", lambda _: 20 * MIB)
    monkeypatch.setattr("weightsmith._engine.local.run", lambda *_, **__: pytest.fail("read"))
    recipe = {"merge_method": "linear", "models": [{"model": a}], "parameters": {"weight": 1}}
    with pytest.raises(NoSpace, match="no space for the output"):
        weightsmith.merge(recipe, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("as_file", [True, False])
def test_a_disk_that_is_full_at_the_end_says_what_is_missing(
    tmp_path: Path, as_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bytes(12_345))
    with open_staging(tmp_path / "out", layout(), "plan") as staging:
        put(staging)
        monkeypatch.setattr(disk, "available_bytes", lambda _: 0)
        monkeypatch.setattr("weightsmith._outputs.area.create_file", full)
        with pytest.raises(NoSpace) as caught:
            staging.add_file("tokenizer.json", tmp_path / "tokenizer.json" if as_file else bytes(12_345))
        assert "needed     12,345 bytes" in str(caught.value)
        with pytest.raises(NoSpace) as caught:
            staging.publish({})
        assert "needed     0 bytes" not in str(caught.value)


def test_an_input_that_cannot_be_read_is_not_a_failure_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")

    class Bad(io.FileIO):
        def readinto(self, *_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        read = readinto  # type: ignore[assignment]

    with open_staging(tmp_path / "out", layout(), "plan") as staging:
        put(staging)
        monkeypatch.setattr("weightsmith._outputs.area.open_regular", lambda path: Bad(path))
        with pytest.raises(StoreError) as caught:
            staging.add_file("tokenizer.json", tmp_path / "tokenizer.json")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'}: cannot be read: Input/output error")
    assert "are kept in" in message
    assert "writing" not in message


def test_a_file_that_became_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with open_staging(tmp_path / "out", layout(), "plan") as staging, pytest.raises(StoreError, match="pipe"):
        staging.add_file("tokenizer.json", tmp_path / "tokenizer.json")


def test_the_space_of_other_files_is_ours_when_a_neighbour_fills_the_disk(tmpfs: Path) -> None:
    out = tmpfs / "out"
    with open_staging(out, layout(), "plan", other_bytes=2 * MIB) as staging:
        put(staging)
        neighbour = fill(tmpfs)
        staging.add_file("tokenizer.json", bytes(MIB))
        staging.add_file("vocab.json", bytes(MIB - 65_536))
        neighbour.unlink()
        staging.publish({})
    verify(out)
    assert list(tmpfs.iterdir()) == [out]


def test_the_space_of_other_files_is_counted_once_when_work_is_resumed(tmpfs: Path) -> None:
    for _ in range(2):
        with open_staging(tmpfs / "out", layout(), "plan", other_bytes=5 * MIB) as staging:
            reserved = staging.folder / "space"
            assert reserved.stat().st_blocks * 512 == 5 * MIB
            staging.finished  # noqa: B018
    with open_staging(tmpfs / "out", layout(), "plan", other_bytes=MIB) as staging:
        assert reserved.stat().st_size == MIB
        staging.discard()
    assert list(tmpfs.iterdir()) == []
