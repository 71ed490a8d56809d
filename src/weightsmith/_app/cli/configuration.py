"""Settings that a user makes once: in a file or in the environment. They are defaults of the command line, not of Python.

A flag wins over a variable, a variable over the file of the current folder, that over the user's own file. The file of the
current folder may be anyone's: it can neither run code, replace anything, nor say where models and tokens go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError, nearest
from weightsmith._base.files import open_regular
from weightsmith._base.options import Option, options_of
from weightsmith._execution.options import RunOptions

FILE = "weightsmith.toml"
PROJECT = "pyproject.toml"
CHOSEN = "WEIGHTSMITH_CONFIG"
"""Variable that names the user's file; empty for none."""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    key       in a file
    variable  in the environment
    help      what it does
    option    whose default it is; None for one of every command
    user_only  only the user's own file may have it
    """

    key: str
    variable: str
    help: str
    option: Option | None = None
    user_only: bool = False

    def read(self, value: object, *, text: bool) -> Any:
        """The value, checked. text: it is from the environment. Raises ValueError."""
        if self.option is not None and self.option.type is not bool:
            return self.option.read(value, text=text or (self.option.nbytes and isinstance(value, str)))
        if self.user_only:
            if not isinstance(value, str) or not value:
                raise ValueError(f"must be a string, not {value!r}")
            return value
        if text:
            words = {"1": True, "true": True, "0": False, "false": False}
            value = words.get(str(value).lower(), value)
        if not isinstance(value, bool):
            raise ValueError(f"must be {'1 or 0' if text else 'true or false'}, not {value!r}")
        return value


@dataclass(frozen=True, slots=True)
class InForce:
    """A setting that is in force. source: `variable NAME`, or file and line."""

    setting: Setting
    value: Any
    source: str


def settings() -> dict[str, Setting]:
    """All settings, by key."""
    of_runs = {}
    for option in options_of(RunOptions).values():
        if option.setting:
            key = option.flag().removeprefix("--")
            of_runs[key] = Setting(key, f"WEIGHTSMITH_{key.upper().replace('-', '_')}", option.sentence(str), option)
    of_every_command = (
        Setting("quiet", "WEIGHTSMITH_QUIET", "Hide progress and summary."),
        Setting("hub-cache", "HF_HUB_CACHE", "Folder for downloaded Hub models.", user_only=True),
        Setting("hub-endpoint", "HF_ENDPOINT", "Address of the Hub; your token is sent there.", user_only=True),
    )
    return of_runs | {setting.key: setting for setting in of_every_command}


def user_file() -> Path | None:
    """The user's own file, whether it is there or not; None if there is to be none."""
    chosen = os.environ.get(CHOSEN)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(home).expanduser() / "weightsmith" / FILE
    except RuntimeError:  # no HOME, and no such user
        return None


def in_force() -> dict[str, InForce]:
    """The settings that are made anywhere, by key. Raises ParameterError for what is wrong, with its line or variable."""
    known = settings()
    chosen: dict[str, InForce] = {}
    users_file = user_file()
    if users_file is not None and (users_file.is_file() or os.environ.get(CHOSEN)):
        chosen |= _of_file(users_file, known, (), is_users=True)
    if Path(FILE).exists():
        chosen |= _of_file(Path(FILE), known, (), is_users=False)
    elif Path(PROJECT).is_file():
        chosen |= _of_file(Path(PROJECT), known, ("tool", "weightsmith"), is_users=False)
    for setting in known.values():
        text = os.environ.get(setting.variable)
        if text and not setting.user_only:  # those of the Hub's library are read and checked where it is imported
            try:
                chosen[setting.key] = InForce(setting, setting.read(text, text=True), f"variable {setting.variable}")
            except ValueError as error:
                raise _wrong(str(error), setting.variable, "correct the variable, or unset it") from None
        elif text:
            chosen[setting.key] = InForce(setting, text, f"variable {setting.variable}")
    return chosen


def _of_file(path: Path, known: Mapping[str, Setting], table: tuple[str, ...], *, is_users: bool) -> dict[str, InForce]:
    with open_regular(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _wrong(f"is larger than {_MAX_BYTES:,} bytes", str(path), "remove what is no setting")
    if table and b"weightsmith" not in data:  # another program's, which may be broken
        return {}
    import tomllib

    try:
        text = data.decode()
        values: Any = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        line = re.search(r"\(at line (\d+)", str(error))
        raise _wrong(f"not valid TOML: {error}", f"{path}:{line[1]}" if line else str(path), "correct the file") from None
    for name in table:
        values = values.get(name, {}) if isinstance(values, dict) else {}
    if not isinstance(values, dict):
        raise _wrong(f"[{'.'.join(table)}] must be a table", str(path), "correct the file")
    in_file = {}
    for key, value in values.items():
        where = f"{path}:{_line(text, key, table)}"
        setting = known.get(key)
        if setting is None:
            what = f"unknown setting {key!r}{nearest(key, known)}"
            raise _wrong(what, where, f"write one of {', '.join(known)}; other options belong on the command line")
        if setting.user_only and not is_users:
            what = f"{key} decides where models come from and tokens go, so a project's file cannot set it"
            raise _wrong(what, where, f"set it in {user_file() or FILE}, or as the variable {setting.variable}")
        try:
            in_file[key] = InForce(setting, setting.read(value, text=False), where)
        except ValueError as error:
            raise _wrong(f"{key} {error}", where, "correct the value") from None
    return in_file


def _line(text: str, key: str, table: tuple[str, ...]) -> int:
    """The line of a key; 1 if it is written in another way."""
    inside = not table
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
            inside = header[1].replace('"', "").replace(" ", "") == ".".join(table)
        if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", line) and inside:
            return number
        if re.match(rf"\s*\[\s*{re.escape(key)}\s*[.\]]", line):
            return number
    return 1


def _wrong(what: str, where: str, fix: str) -> ParameterError:
    return ParameterError(what, where=where, fix=fix, state=NOTHING_WRITTEN)
