"""A number that a command of the user's finds about a model, such as a benchmark's score.

The command names the folder of the model, `{model}`. It prints the number in its last line, or JSON that has it: in what it
prints, or in a file that it writes into a temporary folder, `{output}`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from weightsmith._base.errors import NonFinite, WeightsmithError
from weightsmith._base.files import read_bounded
from weightsmith._base.options import named, option_error
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._reports.options import EvaluateSettings

MODEL = "{model}"
"""Stands for the folder of the model in a command."""

OUTPUT = "{output}"
"""Stands for a folder for JSON files, which is removed afterwards."""

READ_BYTES = 1 << 20
"""Bytes read from the end of what a command prints."""

JSON_BYTES = 64 << 20
"""The largest JSON file that is read."""

END_SECONDS = 5
"""For a command to end by itself when it is told to."""

_SHOWN = 8
"""Lines of a failed command's output that a message shows."""


class CommandFailed(WeightsmithError):
    """A command ended with an error, took too long, or gave no number."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that measures a model. Make it with `of`.

    name     of its option
    text     as the user wrote it
    metric   keys of the number in JSON, with slashes between them; a minus before them changes its sign. "": no JSON
    seconds  after which it is ended
    shell    whether a shell runs it
    """

    name: str
    text: str
    metric: str
    seconds: float
    shell: bool

    @classmethod
    def of(cls, name: str, text: str, settings: EvaluateSettings) -> Command:
        """Raises ParameterError for a command that cannot be read or has no place for the model; for a time that is none."""
        seconds = seconds_of("command_timeout", settings.command_timeout)
        command = cls(name, text, settings.metric or "", seconds, settings.shell)
        if MODEL not in text:
            raise option_error(name, f"the command does not name the model: {text!r}", f"write {MODEL} in place of its folder")
        if OUTPUT in text and not command.metric:
            fix = "name it with --metric (metric), such as results/mine/acc"
            raise option_error(name, f"{OUTPUT} is for JSON files, but nothing says where in them the number is", fix)
        command._words({})
        return command

    @classmethod
    def asked(cls, settings: EvaluateSettings) -> Command | None:
        """The command of the options; None if there is none. Raises ParameterError, for options without their command too."""
        if settings.command is not None:
            return cls.of("command", settings.command, settings)
        for name in ("metric", "command_timeout", "shell"):
            if getattr(settings, name):
                raise option_error(name, "it is for a command, and there is none", f"name one with {named('command')}")
        return None

    @property
    def options(self) -> tuple[str, ...]:
        """The options that reproduce it on the command line, except its time limit."""
        metric = ("--metric", self.metric) if self.metric else ()
        return ("--command", self.text, *metric, *(["--shell"] if self.shell else []))

    @property
    def identity(self) -> list[object]:
        """Everything besides the model that the number depends on, as JSON values."""
        return [self.text, self.metric, self.shell]

    def measured(self, model: Path) -> float:
        """Run the command, and find its number.

        model  folder of the model

        Raises CommandFailed if it fails, takes too long or gives no number; NonFinite for one that is NaN or infinite.
        """
        # Made only for a command that names it: a run that is killed cannot remove it.
        with _output_folder() if OUTPUT in self.text else contextlib.nullcontext("") as output:
            words = self._words({MODEL: str(model.absolute()), OUTPUT: output})
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaint:
                status = self._run(words, out, complaint)
                lines, complaints = _end(out), _end(complaint)
            if status is None:
                what = f"the command took longer than {self.seconds:g} s: {self._shown(words)}"
                raise self._failed(what, complaints or lines, "give it more time with --command-timeout (command_timeout)")
            if status:
                what = f"the command ended with status {status}: {self._shown(words)}"
                raise self._failed(what, complaints or lines, "run it yourself to see why")
            number = self._number(lines, complaints, words, Path(output))
        if not math.isfinite(number):
            raise NonFinite(f"the command printed {number}", where=self.name)
        return number

    def _words(self, places: Mapping[str, str]) -> list[str]:
        """The program and its arguments, with folders in place of their names."""
        if self.shell:
            return ["/bin/sh", "-c", _filled(self.text, {place: shlex.quote(folder) for place, folder in places.items()})]
        try:
            words = shlex.split(self.text)
        except ValueError as error:
            raise option_error(self.name, f"the command cannot be read: {error}") from None
        return [_filled(word, places) for word in words]

    def _shown(self, words: Sequence[str]) -> str:
        return words[-1] if self.shell else shlex.join(words)

    def _run(self, words: Sequence[str], out: IO[bytes], complaint: IO[bytes]) -> int | None:
        """The status that a command ends with; None if it took too long. What it started ends with it, if it is not let end."""
        try:
            running = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=complaint, start_new_session=True)
        except OSError as error:
            raise self._failed(f"{words[0]} cannot be run: {error.strerror}", [], "check the command") from error
        try:
            return running.wait(None if math.isinf(self.seconds) else self.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_all(running)

    def _number(self, lines: Sequence[str], complaints: Sequence[str], words: Sequence[str], output: Path) -> float:
        if OUTPUT in self.text:
            return self._in_files(output, complaints or lines)
        if not lines:
            raise self._failed(f"the command printed nothing: {self._shown(words)}", complaints)
        if self.metric:
            return self._in_json(_last_json(lines), lines, f"what the command printed: {self._shown(words)}")
        try:
            return float(lines[-1])
        except ValueError:
            what = f"the last line of the command is no number: {self._shown(words)}"
            raise self._failed(what, lines) from None

    def _in_files(self, output: Path, lines: Sequence[str]) -> float:
        """The number in the JSON files that the command wrote; they must not differ."""
        files = sorted(path for path in output.rglob("*.json") if path.is_file() and not path.is_symlink())
        if not files:
            raise self._failed(f"the command wrote no .json file into {OUTPUT}", lines, "check the command")
        values = []
        for path in files:
            try:
                values.append(parse(read_bounded(path, JSON_BYTES), unique=False))
            except (JsonError, WeightsmithError) as error:
                raise self._failed(f"{path.name}, which the command wrote, {error}", lines, "check the command") from error
        having = [value for value in values if isinstance(_at(value, self._keys), int | float)]
        if len({_at(value, self._keys) for value in having}) > 1:
            raise self._failed(f"{len(having)} files have different values of {self._path}", lines, "write one file")
        return self._in_json((having or values)[0], lines, files[0].name)

    def _in_json(self, value: object, lines: Sequence[str], where: str) -> float:
        number = _at(value, self._keys)
        if isinstance(number, bool) or not isinstance(number, int | float):
            known = [f"there are: {', '.join(_paths(value)) or 'none'}"]
            what = f"there is no number {self._path} in {where}"
            raise self._failed(what, known if value is not None else lines, "choose another --metric (metric)")
        return -float(number) if self.metric.startswith("-") else float(number)

    @property
    def _path(self) -> str:
        return self.metric.removeprefix("-")

    @property
    def _keys(self) -> list[str]:
        return self._path.split("/")

    def _failed(
        self, what: str, lines: Sequence[str], fix: str = "write the number into the last line, or name it with --metric"
    ) -> CommandFailed:
        return CommandFailed(what, where=self.name, details=lines[-_SHOWN:], fix=fix)


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", re.IGNORECASE)


def seconds_of(name: str, text: str | None) -> float:
    """Seconds from `90s`, `30m` or `2h`; None: no limit. name: of the option. Raises ParameterError.

    >>> seconds_of("time", "1.5h"), seconds_of("time", None)
    (5400.0, inf)
    """
    if text is None:
        return math.inf
    match = _TIME.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise option_error(name, f"must be a time such as 90s, 30m or 2h, not {text!r}")
    return float(match[1]) * {"s": 1, "h": 3600}.get(match[2].lower(), 60)


def _filled(text: str, places: Mapping[str, str]) -> str:
    """A text with folders in place of their names. A name inside a folder's path stays."""
    return re.sub("|".join(map(re.escape, (MODEL, OUTPUT))), lambda match: places.get(match[0], match[0]), text)


def _output_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="weightsmith-command-")


def _end_all(running: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, and the processes of its group."""
    if running.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGTERM)
    try:
        running.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _last_json(lines: Sequence[str]) -> Any:
    """The JSON object that ends the lines: of one line or of several. None: there is none."""
    starts = [i for i in range(len(lines)) if lines[i].startswith("{")]
    for start in [*starts[-1:], *starts[:-1]]:
        with contextlib.suppress(JsonError):
            return parse("\n".join(lines[start:]).encode(), unique=False)
    return None


def _at(value: Any, keys: Sequence[str]) -> Any:
    """The value under a path of keys; None if there is none. A number is an index into a list."""
    for key in keys:
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return None
    return value


def _paths(value: Any) -> Iterator[str]:
    """The paths of the numbers in an object, the first dozen."""
    todo, count = [("", value)], 0
    while todo and count < 12:
        path, value = todo.pop(0)
        if isinstance(value, dict):
            todo += [(f"{path}/{key}" if path else str(key), item) for key, item in value.items()]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            count += 1
            yield path


def _end(file: IO[bytes]) -> list[str]:
    """The last lines of a file that are not empty."""
    size = file.seek(0, 2)
    file.seek(max(0, size - READ_BYTES))
    text = file.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]
