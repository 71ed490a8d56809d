"""The trials of a search in a file: a first line that says what is searched, then one line of JSON for each trial.

Each line ends with a hash of itself. A last line that is torn by a crash is dropped; any other that does not match its hash is
an error. A search that finds its own file reads its trials instead of computing them. One process at a time has the file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import xxhash

from weightsmith._base.dataclass import dataclass
from weightsmith._base.errors import Busy, CannotResume, OutputExists, StoreError
from weightsmith._base.files import open_regular
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
        return bool(self.nats) and all(value is not None for own in self.nats for value in own)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        found: dict[str, Any] = {"trial": self.number, "values": list(self.values)}
        if self.error:
            return {**found, "error": self.error}
        found["nats"] = [list(own) for own in self.nats]
        if self.divergences:
            found["divergences"] = [list(own) for own in self.divergences]
        return {**found, "slopes": list(self.slopes)} if self.slopes else found

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


def _numbers(found: object, rows: Sequence[int]) -> tuple[tuple[float | None, ...], ...]:
    if not isinstance(found, list) or [len(own) if isinstance(own, list) else -1 for own in found] != list(rows):
        raise ValueError("its losses are not those of the rows")
    for own in found:
        for value in own:
            if value is not None and not _is_finite(value):
                raise ValueError("a loss is not a finite number")
    return tuple(tuple(own) for own in found)


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


class Journal:
    """The file; close it, or use it as a context manager.

    trials  that it has
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], rows: Sequence[int], n_values: int, *, resume: bool = True
    ) -> None:
        """
        about   what is searched: the first line
        rows    of each text
        resume  False: begin again, in place of an earlier search

        Raises Busy if another process has it; CannotResume for the journal of another search, and for a damaged one;
        OutputExists for a file that is not a journal.
        """
        self.path = path
        self._file = _opened(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            fix = "wait for it, or choose another name for the output"
            raise Busy("another process is tuning into this journal", where=str(path), fix=fix) from error
        try:
            self.trials = self._read(about, rows, n_values, resume=resume)
        except BaseException:
            self._file.close()
            raise

    def _read(self, about: Mapping[str, Any], rows: Sequence[int], n_values: int, *, resume: bool) -> list[Trial]:
        data = self._file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise self._damaged(1, f"the file is larger than {MAX_BYTES >> 20} MiB")
        lines = data.split(b"\n")
        torn = lines.pop()
        found, end = list[dict[str, Any]](), 0
        for number, line in enumerate(lines, 1):
            value = _checked(line)
            if value is None and number == len(lines) and not torn and number > 1:
                torn = line  # a crash may leave a line end behind other bytes
                break
            if value is None:
                if number == 1:
                    what, fix = "the file exists, and is no journal of weightsmith tune", "choose another name, or remove it"
                    raise OutputExists(what, where=str(self.path), fix=fix)
                raise self._damaged(number, "it does not match its hash")
            found.append(value)
            end += len(line) + 1
        if not found and torn and not torn.startswith(b'{"kind": "weightsmith tune"'):
            what, fix = "the file exists, and is no journal of weightsmith tune", "choose another name, or remove it"
            raise OutputExists(what, where=str(self.path), fix=fix)
        wanted = json.loads(json.dumps({"kind": KIND, **about}))
        if not resume or (len(found) == 1 and found[0] != wanted):  # nothing is lost of a search without trials
            found, end = [], 0
        self._file.seek(end)
        self._file.truncate()
        if not found:
            self._write(wanted)
            return []
        if found[0] != wanted:
            different = [key for key in wanted if found[0].get(key) != wanted[key]]
            what = f"this journal is of another search: {', '.join(different) or 'its keys'} differ"
            fix = "choose another name for the output, or begin again with --no-resume (resume=False)"
            raise CannotResume(what, where=str(self.path), fix=fix)
        trials = []
        for number, value in enumerate(found[1:], 2):
            try:
                trial = Trial.of(value, rows, n_values)
                if trial.number != number - 1:
                    raise ValueError(f"it is trial {trial.number}")
            except ValueError as error:
                raise self._damaged(number, str(error)) from error
            trials.append(trial)
        return trials

    def add(self, trial: Trial) -> None:
        """Add a trial; it is on the disk when this returns."""
        self._write(trial.to_json())
        self.trials.append(trial)

    def _write(self, value: Mapping[str, Any]) -> None:
        text = json.dumps(value)
        try:
            self._file.write(f'{text[:-1]}, "{HASH}": "{_hash(text.encode())}"}}\n'.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(f"the journal cannot be written: {error.strerror}", where=str(self.path)) from error

    def _damaged(self, number: int, why: str) -> CannotResume:
        fix = "restore the file, or begin again with --no-resume (resume=False)"
        return CannotResume(f"the journal is damaged: {why}", where=f"{self.path}:{number}", fix=fix)

    def close(self) -> None:
        """Let other processes have it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def _opened(path: Path) -> BinaryIO:
    try:
        if os.path.lexists(path):
            open_regular(path).close()
        return path.open("r+b" if path.exists() else "x+b")
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
