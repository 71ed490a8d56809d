"""Opening a file that somebody else named: what can go wrong is said once, here.

Also `show`, the only way a value from a file may enter a message: clipped, and with control characters escaped, so that
a hostile name can neither flood nor repaint a terminal.
"""

from __future__ import annotations

import io
import os
import reprlib
import stat
from dataclasses import dataclass
from pathlib import Path

from weightsmith.errors import CheckpointError, FormatError, NotFound
from weightsmith.tensors import TensorSpec

DAMAGED = "The file is damaged, or was written by a faulty tool: download or export it again."
RESAVE = "Load it with torch 1.6 or later in an isolated environment, and save it again with torch.save(state_dict, path)."

_LOOKALIKES = (
    (b"version ", "It is a git-lfs pointer, not the weights: run `git lfs pull` in its folder."),
    (b"PK\x03\x04", "It looks like a PyTorch checkpoint under another name: rename it to .bin."),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", f"It has the format of PyTorch before 1.6. {RESAVE}"),
    (b"\x80", f"It is a bare pickle. {RESAVE}"),
    (b"GGUF", "It is a GGUF file under another name: get the original checkpoint."),
    (b"\x1f\x8b", "It is compressed with gzip: unpack it first."),
    (b"<", "It is a web page, not the weights: the download went wrong."),
)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 160
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 12


def expand_user(name: str | os.PathLike[str]) -> Path:
    """The path that a name stands for: `~` is the home folder. What has no home (`~nobody/x`) is kept: opening it says so."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  Path.expanduser raises where there is no home


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and where its bytes are.

    spec    name, dtype, shape
    file    the file, as it was opened
    offset  of the first byte, from the start of the file
    """

    spec: TensorSpec
    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file's metadata says of it. Reading changes none of this; any change of the content changes some of it.

    device, inode  which file it is
    nbytes         size
    mtime_ns       when the content was modified; any program can set it
    ctime_ns       when content or metadata was changed; only the file system sets it
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """The state in the result of `os.stat` or `os.fstat`."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def difference(self, now: FileState) -> str:
        """What another state has different, in words; "" when they are equal.

        >>> FileState(1, 2, 300, 4, 5).difference(FileState(1, 2, 400, 6, 6))
        '300 bytes then, 400 now'
        """
        if self == now:
            return ""
        if self.nbytes != now.nbytes:
            return f"{self.nbytes:,} bytes then, {now.nbytes:,} now"
        if (self.device, self.inode) != (now.device, now.inode):
            return f"another file has its name (inode {self.inode} then, {now.inode} now)"
        if self.mtime_ns != now.mtime_ns:
            return f"modification time {self.mtime_ns:,} ns then, {now.mtime_ns:,} ns now"
        return f"change time (ctime) {self.ctime_ns:,} ns then, {now.ctime_ns:,} ns now"


def show(value: object) -> str:
    r"""A value read from a file, as text for a message.

    >>> show("a\x1b[2J"), len(show("a" * 10**6))
    ("'a\\x1b[2J'", 160)
    """
    try:
        return _repr.repr(value)
    except ValueError:  # an int of more digits than Python agrees to print
        return f"<{type(value).__name__} too long to show>"


def lookalike(start: bytes) -> str:
    """What to do with weights that begin like a file of another format; how damaged files are replaced if with none.

    >>> lookalike(b"<!DOCTYPE html>")
    'It is a web page, not the weights: the download went wrong.'
    """
    if start[8:9] == b"{":
        return "It looks like a safetensors file under another name: rename it to .safetensors."
    return next((fix for magic, fix in _LOOKALIKES if start.startswith(magic)), DAMAGED)


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
            fix="Look at the file before using it: such a size is a mistake or an attack.",
        )
    return bytes(data)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device"}
    return kinds.get(stat.S_IFMT(mode), "device")
