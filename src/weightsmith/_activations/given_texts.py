"""Texts that a Python call gives as strings: files of them, while the call lasts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from weightsmith._activations.rows import is_text

GivenText = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a text, or several of them."""

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files of the texts of a call.

    paths  of each argument
    names  path → what results call it, for files that hold strings
    """

    paths: Mapping[str, list[str]]
    names: Mapping[str, str]

    def named(self, paths: Sequence[str]) -> tuple[str, ...]:
        """What results call these files."""
        return tuple(self.names.get(path, path) for path in paths)


@contextmanager
def as_files(**given: GivenText) -> Iterator[TextFiles]:
    """Files of the texts of a call. The strings of one argument are the documents of one text, a .jsonl file that is deleted
    at the end."""
    paths, names = dict[str, list[str]](), dict[str, str]()
    with ExitStack() as stack:
        for argument, value in given.items():
            items = [value] if isinstance(value, str | os.PathLike) else list(value)
            texts = [item for item in items if is_text(item)]
            paths[argument] = [os.fspath(item) for item in items if not is_text(item)]
            if texts:
                folder = stack.enter_context(TemporaryDirectory(prefix="weightsmith-text-"))
                path = Path(folder, f"{argument}.jsonl")
                path.write_text("".join(f"{json.dumps(text)}\n" for text in texts), "utf-8")
                paths[argument].append(str(path))
                names[str(path)] = _name(str(texts[0]), len(texts))
        yield TextFiles(paths, names)


def _name(first: str, count: int) -> str:
    """What results call the texts of an argument.

    >>> _name("Hello,\\n world.", 3)
    "'Hello, world.' and 2 more"
    """
    start = " ".join(first.split())
    start = start if len(start) <= _SHOWN else f"{start[: _SHOWN - 3]}..."
    return f"'{start}'" + (f" and {count - 1} more" if count > 1 else "")
