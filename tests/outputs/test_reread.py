"""Re-reading gives the checksum of what is on disk, however the work is divided, and no checksum for what is not there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from weightsmith._outputs import checksum
from weightsmith._outputs.checksum import StoredBytes, combine, hash_grains, read_at

DATA = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 26])
@pytest.mark.parametrize("piece_bytes", [7, 64, 1 << 22])
def test_parts_pieces_and_threads_do_not_change_the_checksum(
    tmp_path: Path, threads: int, part_bytes: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "PART_BYTES", part_bytes)
    monkeypatch.setattr(checksum, "PIECE_BYTES", piece_bytes)
    (tmp_path / "file").write_bytes(b"head" + DATA)
    with (tmp_path / "file").open("rb") as file:
        read = partial(read_at, file.fileno())
        stored = [StoredBytes("a", read, 4, 5000, 48), StoredBytes("b", read, 10, 96, 96)]
        checksums = checksum.reread(stored, threads=threads)
    assert checksums == {"a": combine(hash_grains(DATA, 48)), "b": combine(hash_grains(DATA[6:102], 96))}


def test_bytes_of_another_tensor_do_not_stand_in_for_lost_ones(tmp_path: Path) -> None:
    twice = b"same bytes" * 2
    (tmp_path / "file").write_bytes(twice[:-3])
    with (tmp_path / "file").open("rb") as file:
        read = partial(read_at, file.fileno())
        stored = [StoredBytes("first", read, 0, 10, 100), StoredBytes("second", read, 10, 10, 100)]
        checksums = checksum.reread(stored, threads=1)
    assert checksums == {"first": combine(hash_grains(b"same bytes", 100)), "second": ""}


def test_a_file_that_cannot_be_read_is_like_one_that_is_not_there(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:  # open for writing only
        assert checksum.reread([StoredBytes("a", partial(read_at, file.fileno()), 0, 10, 100)]) == {"a": ""}


def test_an_error_in_the_progress_callback_ends_the_work(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError(done, total)

    (tmp_path / "file").write_bytes(DATA)
    with (tmp_path / "file").open("rb") as file, pytest.raises(KeyError):
        checksum.reread([StoredBytes("a", partial(read_at, file.fileno()), 0, 5000, 48)], threads=2, progress=fail)
