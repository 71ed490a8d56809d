"""The file in which bytes wait."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weightsmith._base.errors import NoSpace, StoreError
from weightsmith._files.remote.ahead import Spool, spool_folder


def read(spool: Spool, slot: int, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    spool.read(slot, offset, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("lacks", [(), ("preadv",), ("preadv", "pread")])
def test_slots_hold_what_was_written(lacks: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in lacks:
        monkeypatch.delattr(os, name)
    plainly = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: plainly(fd, data[:3], at))  # as a signal may cut it
    spool = Spool(10, tmp_path)
    slots = [spool.take(), spool.take()]
    for slot in slots:
        spool.write(slot, 0, b"0123456789"[slot:])
        spool.write(slot, 9, memoryview(b"x"))
    assert [read(spool, slot, 2, 8) for slot in slots] == [b"2345678x", b"3456789x"]
    spool.give_back(slots[0])
    assert spool.has_free
    assert [spool.take(), spool.take(), spool.slots] == [0, 2, 3]
    assert not spool.has_free


def test_the_file_has_no_name_and_its_descriptor_lives_as_long_as_the_spool(tmp_path: Path) -> None:
    spool = Spool(10, tmp_path)
    assert list(tmp_path.iterdir()) == []
    fd = spool._fd
    assert os.fstat(fd).st_dev == tmp_path.stat().st_dev
    del spool
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, StoreError)])
def test_what_the_disk_refuses_is_one_error(
    code: int, kind: type[StoreError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    spool = Spool(10, tmp_path)
    with pytest.raises(StoreError, match="shorter than what was written"):
        read(spool, 0, 0, 1)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(
        StoreError, match=rf"{tmp_path}: cannot use the temporary cache file for streamed data: {os.strerror(code)}"
    ) as caught:
        spool.write(0, 0, b"x")
    assert type(caught.value) is kind
    with pytest.raises(StoreError, match="No such file or directory"):
        Spool(10, tmp_path / "none")


def test_it_is_in_the_cache_of_the_hub_or_with_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr("tempfile.gettempdir", lambda: "/temporary")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "a" / "hub"))
    assert spool_folder() == tmp_path / "a" / "hub"
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert spool_folder() == Path("/temporary")
