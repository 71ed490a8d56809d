"""`weightsmith verify`: silence is not an answer, damage has an exit code of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_help import Cli, cli, work
from weightsmith import open_checkpoint

__all__ = ["cli", "work"]


@pytest.mark.slow
def test_a_checkpoint_as_written_is_said_to_be_so(cli: Cli, work: Path) -> None:
    cli("merge", "linear.yml", "out")
    ran = cli("verify", "out")
    assert ran.code == 0
    assert "out: OK, 6 tensors and 4 other files match their checksums" in ran.out
    assert "not of this checkpoint" not in ran.err
    (work / "out/note.txt").write_text("mine")
    ran = cli("verify", "out", "--json")
    printed = json.loads(ran.out)
    assert (ran.code, printed["tensors"], printed["files"], printed["extra"]) == (0, 6, 4, ["note.txt"])
    assert "note.txt" in ran.err
    ran = cli("verify", "out", "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_one_flipped_bit_ends_with_4_and_names_the_tensor(cli: Cli, work: Path) -> None:
    cli("merge", "linear.yml", "out")
    path = work / "out/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with open_checkpoint(work / "out") as out:
        last = max(out.specs, key=lambda name: out.source.location(name) or (0, 0))
    ran = cli("verify", "out", "--threads", "1")
    assert ran.code == 4
    assert "error[corrupt]: " in ran.err
    assert f"tensor {last}: differs" in ran.err
    assert ran.out == ""


def test_a_folder_that_cannot_be_checked_ends_with_3(cli: Cli, work: Path) -> None:
    for folder in ("a", "nowhere"):
        ran = cli("verify", folder)
        assert ran.code == 3
        assert "error[not-found]: " in ran.err
