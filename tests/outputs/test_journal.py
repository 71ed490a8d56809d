"""The journal: reading some of its lines, and reading on while it grows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from weightsmith._outputs.journal import Finished, Journal, encoded, read_further, read_journal, read_lines, tensor_line
from weightsmith._outputs.locks import FollowedJournals

NAMES = ["a", "b.weight", 'quo"te', "back\\slash", "ümlaut", "a,b"]


def write(path: Path) -> None:
    journal = Journal(path)
    journal.start("plan", "layout", {}, 3)
    for i, name in enumerate(NAMES):
        journal.tensor(name, Finished(f"{i:032x}"))
    journal.product("p", "0" * 32)
    journal.close()


def test_the_lines_of_some_tensors_are_read_and_all_others_but_tensors(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    whole = read_journal(tmp_path / "journal")
    assert list(whole.tensors) == NAMES
    for name in NAMES:
        journal = read_journal(tmp_path / "journal", {name})
        assert journal.tensors[name] == whole.tensors[name]
        assert (journal.plan, journal.products, journal.lines) == (whole.plan, whole.products, whole.lines)
    assert "a" not in read_journal(tmp_path / "journal", ()).tensors


def test_a_damaged_line_is_ignored_whichever_tensors_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    data = path.read_bytes()
    path.write_bytes(data + data.splitlines(keepends=True)[2].replace(b"b.weight", b"b.w\xffight"))
    for names in (None, {"a"}, ()):
        journal = read_journal(path, names)
        assert (journal.plan, journal.lines) == ("plan", len(NAMES) + 2)


def test_a_journal_is_read_further_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    first, at = read_further(path, 0)
    assert not first.products
    path.write_bytes(data)
    rest, end = read_further(path, at)
    assert list(rest.products) == ["p"]
    assert not rest.tensors
    assert end == len(data)


def test_the_journals_of_parts_are_followed_as_they_come_and_grow(tmp_path: Path) -> None:
    followed = FollowedJournals(tmp_path)
    assert followed.look(["1-of-2"]) == set()
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "journal-1-of-2")
    assert followed.look(["1-of-2"]) == set(NAMES)
    write(tmp_path / "parts" / "journal-2-of-2")
    assert followed.look(["1-of-2", "2-of-2"]) == set(NAMES)
    assert followed.look(["1-of-2", "2-of-2"]) == set()


@pytest.mark.parametrize("name", ["w", 'a"b\\c\n', "größe \U0001f600", "\x7f"])
@pytest.mark.parametrize("distance", [None, (0.0, 1e300), (0.1, 2.5e-17)])
def test_the_line_of_a_tensor_is_what_json_makes_of_it(name: str, distance: tuple[float, float] | None) -> None:
    for differing, nonfinite in itertools.product([False, True], repeat=2):
        done = Finished("0" * 32, "f" * 32 + "+nonfinite", distance, differing, nonfinite)
        assert tensor_line(name, done) == encoded(["tensor", name, *done])
        assert read_lines(tensor_line(name, done)).tensors == {name: done}
