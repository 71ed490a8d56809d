"""Opening a file that somebody else named: what can go wrong is said once, here.

Also `show`, the only way a value from a file may enter a message: clipped, and with control characters escaped, so that
a hostile name can neither flood nor repaint a terminal.
"""

from __future__ import annotations

import io
import reprlib
import stat
from pathlib import Path

from weightsmith.errors import CheckpointError, FormatError, NotFound

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 160
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 12


def show(value: object) -> str:
    r"""A value read from a file, as text for a message.

    >>> show("a\x1b[2J"), len(show("a" * 10**6))
    ("'a\\x1b[2J'", 160)
    """
    try:
        return _repr.repr(value)
    except ValueError:  # an int of more digits than Python agrees to print
        return f"<{type(value).__name__} too long to show>"


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered and closed on exec. Symlinks are followed.

    Raises NotFound (missing, or a link that leads nowhere), FormatError (a folder, pipe or device: opening a pipe would
    wait for ever) or CheckpointError (no permission, an I/O error).
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise FormatError(f"not a regular file, but a {_kind(mode)}", where=str(path))
        return path.open("rb", buffering=0)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise NotFound(
                f"a symbolic link to {path.readlink()}, which does not exist",
                where=str(path),
                fix="Restore the link's target, or download the checkpoint again.",
            ) from error
        raise NotFound("no such file", where=str(path)) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """A whole file of at most `max_bytes`. Raises FormatError when it is larger, else as `open_regular`."""
    with open_regular(path) as file:
        try:
            data = bytearray()
            while chunk := file.read(max_bytes + 1 - len(data)):
                data += chunk
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    if len(data) > max_bytes:
        nbytes = path.stat().st_size
        raise FormatError(
            f"{nbytes:,} bytes, and at most {max_bytes:,} are read from a file of this kind",
            where=str(path),
            fix="Such a size is a mistake or an attack: look at the file before using it.",
        )
    return bytes(data)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device"}
    return kinds.get(stat.S_IFMT(mode), "device")
