"""The trials of a search in a file: a first line that says what is searched, then one line of JSON for each trial.

Each line ends with a hash of itself. A last line that is torn by a crash is dropped; any other that does not match its hash is
an error. A search that finds its own file reads its trials instead of computing them.

Several processes may share a search. Each locks the trial that it makes, and the file while it adds a line. A process that is
killed loses its locks, and so only the trial that it was making: another process makes that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from weightsmith._base.errors import Busy, CannotResume, OutputExists, StoreError, undoing
from weightsmith._base.files import open_regular
from weightsmith._base.idioms import Closing
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._planning.recipe import Scalar

MAX_BYTES = 256 << 20
HASH = "hash"
KIND = "weightsmith tune"


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate and its losses.

    number       from 1
    values       of the values to tune
    nats         of each row of each text to tune on; None for rows that it was not scored on
    divergences  from the reference, likewise; () without one
    slopes       of the objective, by one unit of each number, for a search along its gradient; () for others
    error        why it has no losses; "" if it has
    """

    number: int
    values: tuple[Scalar, ...]
    nats: tuple[tuple[float | None, ...], ...] = ()
    divergences: tuple[tuple[float | None, ...], ...] = ()
    slopes: tuple[float, ...] = ()
    error: str = ""

    @property
    def whole(self) -> bool:
        """Whether it was scored on all rows."""
        return bool(self.nats) and all(value is not None for text_nats in self.nats for value in text_nats)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        line: dict[str, Any] = {"trial": self.number, "values": list(self.values)}
        if self.error:
            return {**line, "error": self.error}
        line["nats"] = [list(values) for values in self.nats]
        if self.divergences:
            line["divergences"] = [list(values) for values in self.divergences]
        return {**line, "slopes": list(self.slopes)} if self.slopes else line

    @classmethod
    def of(cls, data: Mapping[str, Any], rows: Sequence[int], n_values: int) -> Trial:
        """From JSON values. rows: of each text. Raises ValueError."""
        values, error = data.get("values"), data.get("error", "")
        number = data.get("trial")
        if type(number) is not int or not isinstance(values, list) or len(values) != n_values or not isinstance(error, str):
            raise ValueError("it is no trial")
        if not all(isinstance(value, bool | int | float | str) for value in values):
            raise ValueError("a value is none")
        nats = _numbers(data.get("nats", []), [] if error else rows)
        divergences = _numbers(data["divergences"], rows) if "divergences" in data else ()
        slopes = data.get("slopes", [])
        if not isinstance(slopes, list) or len(slopes) > n_values or not all(_is_finite(value) for value in slopes):
            raise ValueError("a slope is not a finite number")
        return cls(number, tuple(values), nats, divergences, tuple(slopes), error)


def _numbers(lists: object, rows: Sequence[int]) -> tuple[tuple[float | None, ...], ...]:
    if not isinstance(lists, list) or [len(values) if isinstance(values, list) else -1 for values in lists] != list(rows):
        raise ValueError("its losses are not those of the rows")
    for values in lists:
        for value in values:
            if value is not None and not _is_finite(value):
                raise ValueError("a loss is not a finite number")
    return tuple(tuple(values) for values in lists)


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


class Journal(Closing):
    """The file; close it, or use it as a context manager. Several processes may have it, and share its trials.

    trials  by number; in the order of the file, which is not that of the numbers where processes share it
    seat    from 0: no other process that has the file now has the same
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], rows: Sequence[int], n_values: int, *, resume: bool = True
    ) -> None:
        """
        about   what is searched: the first line
        rows    of each text
        resume  False: begin again, in place of an earlier search

        Raises Busy if the file has to be begun again and another process has it; CannotResume for the journal of another
        search, and for a damaged one; OutputExists for a file that is not a journal.
        """
        self.path = path
        self.trials: dict[int, Trial] = {}
        self._wanted = json.loads(json.dumps({"kind": KIND, **about}))
        self._rows, self._n_values = rows, n_values
        self._end = self._lines = 0
        self._taken: int | None = None
        self._file = _opened(path)
        with undoing(self._file.close):
            with self._alone():
                self._begin(resume=resume)
                lock(self._file, _PRESENT, fcntl.LOCK_SH, wait=True)
                self.seat = next(n for n in range(_SEATS) if lock(self._file, _SEAT + n, fcntl.LOCK_EX))

    def _begin(self, *, resume: bool) -> None:
        """Read what is there, or begin a file."""
        entries = self._unread()
        self._check_kind(entries)
        is_other = bool(entries) and entries[0] != self._wanted
        if not resume or (is_other and len(entries) == 1):  # nothing is lost of a search without trials
            entries = []
        elif is_other:
            different = [key for key in self._wanted if entries[0].get(key) != self._wanted[key]]
            what = f"this journal is of another search: {', '.join(different) or 'its keys'} differ"
            fix = "choose another name for the output, or begin again with --no-resume (resume=False)"
            raise CannotResume(what, where=str(self.path), fix=fix)
        if entries:
            self._enter(entries)
            return
        if not lock(self._file, _PRESENT, fcntl.LOCK_EX):
            fix = "wait for it, or choose another name for the output"
            raise Busy("another process is tuning into this journal", where=str(self.path), fix=fix)
        self._end = self._lines = 0
        self._write(self._wanted)

    def _check_kind(self, entries: Sequence[Mapping[str, Any]]) -> None:
        if entries:
            return
        self._file.seek(0)
        data = self._file.read(64)
        if data and (b"\n" in data or not data.startswith(b'{"kind": "weightsmith tune"'[: len(data)])):
            what, fix = "the file exists, and is no journal of weightsmith tune", "choose another name, or remove it"
            raise OutputExists(what, where=str(self.path), fix=fix)

    def refresh(self) -> None:
        """Read what other processes have added. Raises CannotResume if the file is damaged."""
        with self._alone():
            self._enter(self._unread())

    def _unread(self) -> list[dict[str, Any]]:
        """The values of the lines that were not read yet, without a last line that a crash has torn."""
        self._file.seek(self._end)
        data = self._file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise self._damaged(1, f"the file is larger than {MAX_BYTES >> 20} MiB")
        lines = data.split(b"\n")
        torn, entries = lines.pop(), list[dict[str, Any]]()
        for number, line in enumerate(lines, 1):
            value = _checked(line)
            if value is None and number == len(lines) and not torn and self._lines + number > 1:
                break  # a crash may leave a line end behind other bytes
            if value is None:
                if self._lines + number == 1:
                    return []
                raise self._damaged(self._lines + number, "it does not match its hash")
            entries.append(value)
            self._end += len(line) + 1
        self._lines += len(entries)
        return entries

    def _enter(self, values: Sequence[Mapping[str, Any]]) -> None:
        first = self._lines - len(values) + 1
        for number, value in enumerate(values, first):
            if number == 1:
                continue
            try:
                trial = Trial.of(value, self._rows, self._n_values)
                if trial.number in self.trials:
                    raise ValueError(f"trial {trial.number} is there twice")
            except ValueError as error:
                raise self._damaged(number, str(error)) from error
            self.trials[trial.number] = trial

    def take(self, numbers: Iterable[int]) -> int | None:
        """The first of these trials that is not in the file and that no other process is making; None if there is none.

        It is this process's until it adds it or ends.
        """
        for number in numbers:
            if lock(self._file, _TRIAL + number, fcntl.LOCK_EX):
                self._taken = number
                self.refresh()  # it may have been added before it was free
                if number not in self.trials:
                    return number
                self._let_go()
        return None

    def _let_go(self) -> None:
        if self._taken is not None:
            lock(self._file, _TRIAL + self._taken, fcntl.LOCK_UN)
            self._taken = None

    def add(self, trial: Trial) -> None:
        """Add a trial; it is on the disk when this returns."""
        with self._alone():
            self._enter(self._unread())
            self._write(trial.to_json())
        self.trials[trial.number] = trial
        self._let_go()

    def _write(self, value: Mapping[str, Any]) -> None:
        """Add a line, in place of one that was torn."""
        text = json.dumps(value)
        line = f'{text[:-1]}, "{HASH}": "{_hash(text.encode())}"}}\n'.encode()
        try:
            self._file.seek(self._end)
            self._file.truncate()
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(f"the journal cannot be written: {error.strerror}", where=str(self.path)) from error
        self._end += len(line)
        self._lines += 1

    def _damaged(self, number: int, why: str) -> CannotResume:
        fix = "restore the file, or begin again with --no-resume (resume=False)"
        return CannotResume(f"the journal is damaged: {why}", where=f"{self.path}:{number}", fix=fix)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process reads or writes."""
        lock(self._file, _TEXT, fcntl.LOCK_EX, wait=True)
        try:
            yield
        finally:
            lock(self._file, _TEXT, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave it to other processes."""
        self._file.close()


# Locks are on bytes beyond the end of the file. The system releases those of a process that ends, however it ends.
_TEXT = 1 << 40
_PRESENT = _TEXT + 1
_SEAT = _TEXT + 2
_SEATS = 1 << 10
_TRIAL = _SEAT + _SEATS


def lock(file: IO[bytes], place: int, kind: int, *, wait: bool = False) -> bool:
    """Lock a byte of a file, or release it, for this open file: other open files of this process count as others.

    kind  `fcntl.LOCK_EX`, `LOCK_SH` or `LOCK_UN`

    Returns False if another has it. Raises StoreError where files cannot be locked.
    """
    lock_type = {fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}[kind]
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
            fcntl.fcntl(file, command, struct.pack("hhqqi4x", lock_type, os.SEEK_SET, place, 1, 0))
        else:  # not Linux: the locks are the process's
            fcntl.lockf(file, kind if wait or kind == fcntl.LOCK_UN else kind | fcntl.LOCK_NB, 1, place)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EACCES:
            return False
        fix = "choose a folder on a file system with locks"
        raise StoreError(f"the journal cannot be locked: {error.strerror}", where=file.name, fix=fix) from error
    return True


def _opened(path: Path) -> IO[bytes]:
    try:
        if os.path.lexists(path):
            open_regular(path).close()
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)
    except OSError as error:
        what = f"the journal cannot be written: {error.strerror}"
        raise StoreError(what, where=str(path), fix="choose another folder") from error


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def _checked(line: bytes) -> dict[str, Any] | None:
    """The value of a line without its hash; None if it does not match."""
    head, separator, tail = line.rpartition(f', "{HASH}": "'.encode())
    text = head + b"}"
    if not separator or tail != f'{_hash(text)}"}}'.encode():
        return None
    try:
        value = parse(text)
    except JsonError:
        return None
    return value if isinstance(value, dict) else None
