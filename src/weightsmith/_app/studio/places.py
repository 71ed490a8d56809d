"""The folders that the studio may read and write, and what it finds there."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

from weightsmith import CheckpointError, NotFound, ParameterError, WeightsmithError
from weightsmith.plugin import ModelRef, check_out, is_pattern, is_weights, names_ema

RESULTS = "results"
"""Where results go: a folder of their own, beside no model of the user's."""
MAX_FOUND = 500
"""Models that are listed."""
MAX_FOLDERS = 20_000
"""Folders that are looked into."""
DEPTH = 4
"""Levels of folders: the hub's cache has models--org--name/snapshots/commit."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model or an adapter in one of the folders. ref: as a recipe names it."""

    ref: str
    adapter: bool


@dataclass(frozen=True, slots=True)
class Places:
    """What may be read and written.

    folders  models in these may be read; resolved
    out      results are folders in this one, which `folders` contain; resolved. The first result creates it
    hub      models of the Hub may be named
    alone    nobody but the user of this machine can reach the page: results may be replaced
    """

    folders: tuple[Path, ...]
    out: Path
    hub: bool = True
    alone: bool = True

    @classmethod
    def of(
        cls, folders: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None, *, hub: bool = True
    ) -> Places:
        """Some folders. out: `RESULTS` in the current folder if it is None. It need not exist.

        Raises NotFound for a folder that does not exist, ParameterError for an `out` that is an address, StoreError for one
        that cannot be created.
        """
        if out is not None and "://" in os.fspath(out):
            raise ParameterError("results of the studio are written to a local folder", where="--out", fix="name a folder")
        readable = [_existing(folder) for folder in folders]
        with _of_folder():
            written = check_out(real_path(expand_user(RESULTS if out is None else out).absolute()) / _ANY).parent
        if not any(written.is_relative_to(folder) for folder in readable):
            readable.append(written)
        return cls(tuple(readable), written, hub)

    def check(self, ref: ModelRef) -> WeightsmithError | None:
        """Why a model of a recipe may not be read; None if it may. Whether it exists is for the planner to find out."""
        if ref.lora is not None and not names_ema(ref.lora.path) and (problem := self.check(ref.lora)):
            return problem
        try:
            path = expand_user(ref.path)
            if is_pattern(ref):
                inside = self._holds_matches(ref.path)
            elif path.is_absolute() or ref.path.startswith(("~", ".")) or os.path.lexists(path):
                inside = self.holds(path)
            else:
                return self._no_hub_model(ref)
        except (OSError, ValueError, RuntimeError):  # a name too long, a NUL, a circle of links
            return NotFound("no such folder or file", where=ref.where)
        if inside:
            return None
        what = f"{ref.path} is outside the folders that the studio was started with"
        details = (f"these are {', '.join(map(str, self.folders))}",)
        return CheckpointError(what, where=ref.where, details=details, fix="start it with this folder too")

    def _holds_matches(self, pattern: str) -> bool:
        """Whether all that a pattern matches is in the folders. What is outside is not searched."""
        start = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        if ".." in Path(pattern).parts or not self.holds(expand_user(start or ".")):
            return False
        return all(self.holds(Path(path)) for path in glob.iglob(str(expand_user(pattern))))  # noqa: PTH207

    def _no_hub_model(self, ref: ModelRef) -> WeightsmithError | None:
        if not self.hub:
            what = f"{ref.path} is not in the studio's folders, and the studio was started without the Hub"
            return NotFound(what, where=ref.where, fix="choose one of the models that the page lists")
        if not _HUB_ID.fullmatch(ref.path):
            what = f"{ref.path} is neither a folder nor a Hub id"
            return NotFound(what, where=ref.where, fix="write org/name, or choose one of the models that the page lists")
        return None

    def holds(self, path: Path) -> bool:
        """Whether a path, its links followed, is in one of the folders."""
        real = real_path(path)
        return any(real.is_relative_to(folder) for folder in self.folders)

    def target(self, name: str) -> Path:
        """The folder of a result. Raises ParameterError for a name that is not a plain one."""
        if not _NAME.fullmatch(name):
            what = f"{name!r} cannot be the name of a result"
            raise ParameterError(what, where="name", fix="write up to 100 letters, digits, '-', '_' and '.'")
        return self.out / name

    def on_base(self, models: Iterable[str], base: str) -> list[str]:
        """The models as a merge names them: an adapter is applied to the base."""
        adapters = {known.ref for known in self.models() if known.adapter}
        plain = [model.rpartition("+")[2] if model.rpartition("+")[2] in adapters else model for model in models]
        return [f"{base}+{model}" if model in adapters and base else model for model in plain]

    def models(self) -> tuple[ListedModel, ...]:
        """The models and adapters in the folders, by path; at most `MAX_FOUND`."""
        by_ref: dict[str, ListedModel] = {}
        for folder in self.folders:
            for path, adapter in _walk(folder):
                if self.holds(path):
                    ref = reference(path)
                    by_ref.setdefault(ref, ListedModel(ref, adapter))
                if len(by_ref) >= MAX_FOUND:
                    break
        return tuple(by_ref[ref] for ref in sorted(by_ref))


_ANY = "name"
"""The name of a result while there is none."""


@contextmanager
def _of_folder() -> Iterator[None]:
    """Name the folder of the results in errors, not a result in it."""
    try:
        yield
    except WeightsmithError as error:
        error.finding = replace(error.finding, where=error.finding.where.removesuffix(f"/{_ANY}"))
        raise


def is_this_machine(host: str) -> bool:
    """Whether a server at this address can be reached from this machine alone.

    >>> [is_this_machine(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "192.168.1.5", "")]
    [True, True, True, False, False, False, False]
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def expand_user(name: str | os.PathLike[str]) -> Path:
    """The path that a name stands for: `~` is the home folder. What has no home (`~nobody/x`) is kept."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  Path.expanduser raises where there is no home


def real_path(path: Path) -> Path:
    """The absolute path, with its links followed as far as they lead: a loop of links stays, as does an impossible name."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # a NUL
        return path.absolute()


def reference(path: Path) -> str:
    """A path as a recipe names it: from the current folder on if it is in it.

    >>> reference(Path("/no/such"))
    '/no/such'
    """
    here = Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) and path != here else str(path)


def _existing(folder: str | os.PathLike[str]) -> Path:
    path = expand_user(os.fspath(folder))
    try:
        if path.is_dir():
            return path.resolve()
        why = ""
    except (OSError, ValueError) as error:  # a name too long, a NUL
        why = f": {error.strerror if isinstance(error, OSError) else error}"
    raise NotFound(f"no such folder{why}", where=str(path), fix="name folders with models")


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Folders that hold weights, and GGUF files; an adapter or not. Folders inside a model are not searched."""
    queue, seen = [(folder, 0)], 0
    while queue and seen < MAX_FOLDERS:
        place, depth = queue.pop(0)
        seen += 1
        try:
            names = sorted(entry.name for entry in os.scandir(place))
        except OSError:
            continue
        if "adapter_config.json" in names:
            yield place, True
        elif "config.json" in names and any(map(is_weights, names)):
            yield place, False
        else:
            yield from ((place / name, False) for name in names if name.endswith(".gguf"))
            if depth < DEPTH:
                inner = (place / name for name in names if not name.startswith("."))
                queue += [(path, depth + 1) for path in inner if path.is_dir() and not path.is_symlink()]
