"""The journal: what a crash leaves is dropped or refused, another search's is refused, and processes share its trials."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsmith._base.errors import Busy, CannotResume, OutputExists
from weightsmith._reports.tuning.journal import Journal, Trial

ABOUT = {"recipe": "abc", "seed": 3}
TRIALS = [
    Trial(1, (0.1, "ties"), ((1.5, 1 / 3), (2.0,))),
    Trial(2, (0.2, "ties"), ((1.25, None), (2.5,)), ((0.5, None), (0.25,))),
    Trial(3, (0.2, "ties"), ((1.25, 2.0), (2.5,)), slopes=(0.1 + 0.2,)),
    Trial(4, (0.3, "dare"), error="weight 0.3: NaN in 'a\u2028b'"),
]


def read(journal: Journal) -> list[Trial]:
    return [*journal.trials.values()]


def opened(path: Path, about: dict[str, Any] = ABOUT, **options: Any) -> Journal:
    return Journal(path, about, [2, 1], 2, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with opened(tmp_path / "t.jsonl") as journal:
        for trial in TRIALS:
            journal.add(trial)
    return tmp_path / "t.jsonl"


def test_trials_are_read_again_exactly(path: Path) -> None:
    with opened(path) as journal:
        assert read(journal) == TRIALS
        assert [trial.whole for trial in read(journal)] == [True, False, True, False]


def test_a_last_line_cut_anywhere_is_dropped_and_the_file_goes_on(path: Path) -> None:
    data = path.read_bytes()
    start = data.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(data)):
        path.write_bytes(data[:end])
        with opened(path) as journal:
            assert read(journal) == TRIALS[:-1]
            journal.add(TRIALS[-1])
        assert path.read_bytes() == data


def test_a_first_line_that_was_cut_begins_again(path: Path) -> None:
    first = path.read_bytes().split(b"\n")[0]
    for end in (0, 40, len(first)):
        path.write_bytes(first[:end])
        with opened(path) as journal:
            assert read(journal) == []
        assert path.read_bytes() == first + b"\n"


def test_any_other_damage_is_an_error_that_names_the_line(path: Path) -> None:
    data = path.read_bytes()
    lines = data.split(b"\n")
    for at in range(len(lines[0]) + 1, len(lines[0]) + len(lines[1])):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CannotResume, match=r"t\.jsonl:2: the journal is damaged"), opened(path):
            pass
        assert path.read_bytes() == changed
    path.write_bytes(b"\n".join([lines[0], lines[2], *lines[2:]]))
    with pytest.raises(CannotResume, match=r"t\.jsonl:3: the journal is damaged: trial 2 is there twice"), opened(path):
        pass


def test_the_journal_of_another_search_is_refused(path: Path) -> None:
    with pytest.raises(CannotResume, match="of another search: seed differ"), opened(path, {**ABOUT, "seed": 4}):
        pass
    with opened(path, {**ABOUT, "seed": 4}, resume=False) as journal:
        assert read(journal) == []
    with opened(path, {**ABOUT, "seed": 4}) as journal:
        assert read(journal) == []


@pytest.mark.parametrize("text", ["a letter\n", "{}\n", '{"trial": 1}', "no line end"])
def test_a_file_that_is_no_journal_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    for resume in (True, False):
        with pytest.raises(OutputExists), opened(tmp_path / "t.jsonl", resume=resume):
            pass
    assert (tmp_path / "t.jsonl").read_text() == text


def test_a_trial_is_made_by_one_process_and_seen_by_the_others(path: Path) -> None:
    fifth, sixth = (Trial(number, (0.5, "ties"), ((1.0, 2.0), (3.0,))) for number in (5, 6))
    with opened(path) as one, opened(path) as other:
        assert (one.seat, other.seat) == (0, 1)
        assert [one.take([4, 5, 6]), other.take([4, 5, 6]), other.take([5])] == [5, 6, None]
        other.add(sixth)
        one.add(fifth)
        other.refresh()
        assert read(other) == [*TRIALS, sixth, fifth]
        assert one.take([5, 6]) is None
    with opened(path) as journal:
        assert (journal.seat, read(journal)) == (0, [*TRIALS, sixth, fifth])


@pytest.mark.process
@pytest.mark.slow
def test_a_process_that_is_killed_loses_its_trial_alone(path: Path) -> None:
    """What it was writing is torn; another process makes the trial, and writes in its place."""
    code = f"""
import os
from tests.reports.tuning.test_journal import Path, opened
journal = opened(Path({str(path)!r}))
assert journal.take([5, 6]) == 5
print("taken", flush=True)
input()
with open(journal.path, "ab") as file:
    file.write(b'{{"trial": 5, "values": [0.5')
os.kill(os.getpid(), 9)
"""
    with (
        opened(path) as journal,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
    ):
        assert killed.stdout is not None
        assert killed.stdout.readline() == "taken\n"
        assert journal.take([5]) is None
        killed.communicate("go\n")
        assert killed.returncode == -9
        assert journal.take([5]) == 5
        fifth = Trial(5, (0.5, "ties"), ((1.0, 2.0), (3.0,)))
        journal.add(fifth)
    with opened(path) as journal:
        assert read(journal) == [*TRIALS, fifth]


def test_a_search_that_others_work_on_is_not_begun_again(path: Path) -> None:
    before = path.read_bytes()
    with opened(path), pytest.raises(Busy, match="another process is tuning"):
        opened(path, resume=False)
    assert path.read_bytes() == before
    with opened(path, resume=False) as journal:
        assert read(journal) == []


def test_a_search_without_trials_does_not_hold_up_another(tmp_path: Path) -> None:
    """As the first candidate of a command that is misspelt leaves it."""
    opened(tmp_path / "t.jsonl").close()
    with opened(tmp_path / "t.jsonl", {**ABOUT, "seed": 4}) as journal:
        journal.add(TRIALS[0])
    with pytest.raises(CannotResume, match="seed differ"):
        opened(tmp_path / "t.jsonl")
