"""Opening a file that somebody else named: what can go wrong is said once, here.

Also `show`, the only way a value from a file may enter a message: clipped, and with control characters escaped, so that
a hostile name can neither flood nor repaint a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import reprlib
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weightsmith._base.errors import CheckpointError, FormatError, NotFound
from weightsmith._base.redaction import redacted
from weightsmith._base.tensors import TensorSpec

INTERRUPTED = "Get the file again: the download was probably interrupted."
DAMAGED = "The file is damaged, or was written by a faulty tool: download or export it again."
RESAVE = "Load it with torch 1.6 or later in an isolated environment, and save it again with torch.save(state_dict, path)."

_COMPARED_BYTES = 1 << 20
_LOOKALIKES = (
    (b"version ", "It is a git-lfs pointer, not the weights: run `git lfs pull` in its folder."),
    (b"PK\x03\x04", "It looks like a PyTorch checkpoint under another name: rename it to .bin."),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", f"It has the format of PyTorch before 1.6. {RESAVE}"),
    (b"\x80", f"It is a bare pickle. {RESAVE}"),
    (b"GGUF", "It is a GGUF file under another name: rename it to .gguf."),
    (b"\x1f\x8b", "It is compressed with gzip: unpack it first."),
    (b"<", "It is a web page, not the weights: the download went wrong."),
)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # disk full, quota, file size limit
_MAC_OPEN_MAX = 10_240  # macOS refuses more, although it calls the hard limit infinite
_seeking = threading.Lock()

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 160
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 12


def expand_user(name: str | os.PathLike[str]) -> Path:
    """The path that a name stands for: `~` is the home folder. What has no home (`~nobody/x`) is kept: opening it says so."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  Path.expanduser raises where there is no home


def fix_for_windows_path(name: str) -> str:
    r"""What to write in place of a Windows path: its name here, with drives as WSL mounts them. "" for other paths.

    >>> fix_for_windows_path(r".\models"), fix_for_windows_path(r"\\wsl$\Ubuntu\home\me\fr"), fix_for_windows_path("org/name")
    ('Write ./models.', 'Write /home/me/fr.', '')
    >>> fix_for_windows_path(r"\\server\share\fr")
    'Mount the shared folder, and write its path here.'
    """
    path = name.replace("\\", "/")
    if linux := _WSL.match(path):
        return f"Write {linux[1] or '/'}."
    if name.startswith("\\\\"):
        return "Mount the shared folder, and write its path here."
    drive, colon, rest = path.partition(":")
    if colon and len(drive) == 1 and drive.isascii() and drive.isalpha() and rest.startswith("/"):
        mount = f"/mnt/{drive.lower()}"
        return f"Write {mount}{rest}." if is_folder(Path(mount)) else "Mount the drive, and write its path here."
    return f"Write {path}." if path != name else ""


_WSL = re.compile(r"//(?:wsl\$|wsl\.localhost)/[^/]+(/.*)?$", re.IGNORECASE)
"""The files of a Linux in WSL, as Windows names them."""


def exists(path: Path) -> bool:
    """Whether there is anything, links followed; not if nobody can tell: a name too long, a NUL, no permission."""
    return os.path.exists(path)  # noqa: PTH110  Path.exists raises for these


def is_folder(path: Path) -> bool:
    """Whether there is a folder, links followed; not if nobody can tell. Opening it then says why."""
    return os.path.isdir(path)  # noqa: PTH112  Path.is_dir raises for these


def file_names(folder: Path) -> list[str]:
    """Names of the files in a folder, sorted. Raises CheckpointError."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise _unreadable(folder, error) from error


def real_path(path: Path) -> Path:
    """The absolute path, with its links followed as far as they lead: a loop of links stays, as does an impossible name."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # a NUL
        return path.absolute()


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
    elsewhere      the file itself, if it is not on this disk
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    elsewhere: RemoteBytes | None = field(default=None, compare=False)

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """The state in the result of `os.stat` or `os.fstat`."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @classmethod
    def of_remote(cls, file: RemoteBytes) -> FileState:
        """The state of a file that is not on this disk: nothing but its size."""
        return cls(0, 0, file.nbytes, 0, 0, file)

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


class RemoteBytes(Protocol):
    """A file that is not on this disk.

    nbytes   size
    version  equal for equal content: a commit, or what the server calls an ETag
    streams  True: it is read where it is. False: it is to be downloaded, and until then only headers are read
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def version(self) -> str: ...

    @property
    def streams(self) -> bool: ...

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on. Thread-safe. Raises CheckpointError, also if the file has changed."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file has changed since it was first read."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of a file that is read where it is."""

    file: RemoteBytes
    offset: int
    nbytes: int


class RandomAccess(Protocol):
    """An open file, on this disk or elsewhere, that is read at any place.

    state  as it was when it was opened; of a file elsewhere, its size alone
    """

    @property
    def state(self) -> FileState: ...

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`; fewer than `nbytes` only where the file ends. Raises CheckpointError for an I/O error."""


Opener = Callable[[Path], AbstractContextManager[RandomAccess]]
"""Opens the file that has, or will have, a path."""


class LocalFile:
    """A regular file on this disk."""

    def __init__(self, file: io.FileIO, path: Path) -> None:
        self._file, self._path = file, path
        self.state = FileState.of(os.fstat(file.fileno()))

    def read_at(self, offset: int, nbytes: int) -> bytes:
        available = min(nbytes, self.state.nbytes - offset)  # no allocation for a length that is a lie
        data = b""
        try:
            self._file.seek(offset)
            while len(data) < available and (piece := self._file.read(available - len(data))):
                data = data + piece if data else piece  # one piece, in general: no copy of a header of 100 MB
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(self._path)) from error
        return data


@contextlib.contextmanager
def of_tensor(name: str, suffix: str = "") -> Iterator[None]:
    """Begin what errors of the block say with the name of a tensor. suffix: after the name

    >>> with of_tensor("q.weight"):
    ...     raise FormatError("it is empty")
    Traceback (most recent call last):
    weightsmith._base.errors.FormatError: tensor 'q.weight': it is empty
      -> The file is damaged, or was written by a faulty tool: download or export it again.
    """
    try:
        yield
    except CheckpointError as error:
        what = f"tensor {show(name)}{suffix}: {error.finding.what}"
        raise type(error)(what, where=error.finding.where, fix=error.finding.fix or DAMAGED) from None


@contextlib.contextmanager
def open_local(path: Path) -> Iterator[LocalFile]:
    """Open a file of this disk to be read at any place. Raises as `open_regular`."""
    with open_regular(path) as file:
        yield LocalFile(file, path)


def read_into(fd: int, out: memoryview, offset: int) -> int:
    """Read bytes at `offset` into `out`; how many, 0 at the end of the file. Raises OSError.

    One call of `preadv`. Where the system has none, `pread` and a copy, or a seek and a read, one thread at a time.
    """
    if hasattr(os, "preadv"):
        try:
            return os.preadv(fd, [out], offset)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
    if hasattr(os, "pread"):
        data = os.pread(fd, len(out), offset)
    else:
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(out))
    out[: len(data)] = data
    return len(data)


def read_all(fd: int, out: memoryview, offset: int) -> int:
    """Read until `out` is full or the file ends; how many bytes. Thread-safe. Raises OSError."""
    total = 0
    while total < out.nbytes and (n := read_into(fd, out[total:], offset + total)):
        total += n
    return total


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write every byte of a 1-D view of bytes at `offset`. Thread-safe. Raises OSError."""
    while data.nbytes:
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n


def raise_open_files(target: int) -> bool:
    """Raise the soft limit of open files towards `target`, as far as the system allows; False if it stays as it is."""
    try:
        import resource
    except ImportError:
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        target = min(hard, target)
    if soft == resource.RLIM_INFINITY:
        return False
    for limit in (target, min(target, _MAC_OPEN_MAX)):
        if limit > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return True
    return False


def show(value: object) -> str:
    r"""A value read from a file, as text for a message.

    >>> show("a\x1b[2J"), len(show("a" * 10**6))
    ("'a\\x1b[2J'", 160)
    """
    try:
        return _repr.repr(redacted(value) if isinstance(value, str) else value)  # part of a secret would not look like one
    except ValueError:  # an int of more digits than Python agrees to print
        return f"<{type(value).__name__} too long to show>"


def show_all(values: Sequence[object], most: int = 5) -> str:
    """`show` of each value, or of the first ones of many.

    >>> show_all("abc", 2)
    "'a', 'b', …"
    """
    return ", ".join([*map(show, values[:most]), *(["…"] if len(values) > most else [])])


def lookalike(start: bytes) -> str:
    """What to do with weights that begin like a file of another format; how damaged files are replaced if with none.

    >>> lookalike(b"<!DOCTYPE html>")
    'It is a web page, not the weights: the download went wrong.'
    """
    if start[8:9] == b"{":
        return "It looks like a safetensors file under another name: rename it to .safetensors."
    return next((fix for magic, fix in _LOOKALIKES if start.startswith(magic)), DAMAGED)


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two regular files hold the same bytes; not if one cannot be read."""
    try:
        with open_regular(a) as one, open_regular(b) as other:
            while (piece := one.read(_COMPARED_BYTES)) == other.read(_COMPARED_BYTES):
                if not piece:
                    return True
    except (OSError, CheckpointError):
        pass
    return False


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered and closed on exec. Symlinks are followed.

    Raises NotFound (missing, or a link that leads nowhere), FormatError (a folder, pipe, socket or device: opening a pipe
    would wait for ever) or CheckpointError (no permission, an I/O error, a path that cannot be).
    """
    try:
        _check_regular(path, path.stat())
        # Not to wait, even if a pipe has just taken the file's place.
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
        try:
            _check_regular(path, os.fstat(file.fileno()))
        except FormatError:
            file.close()
            raise
        return file
    except FileNotFoundError as error:
        if path.is_symlink():
            what = f"a symbolic link to {path.readlink()}, which does not exist"
            raise NotFound(what, where=str(path), fix="Restore the link's target, or download the checkpoint again.") from error
        raise NotFound("no such file", where=str(path)) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # a NUL byte in the path
        raise NotFound(f"no such file: {error}", where=str(path)) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    fix = "change its permissions" if isinstance(error, PermissionError) else ""
    return CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path), fix=fix)


def _check_regular(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise FormatError(f"not a regular file, but {file_kind(about.st_mode)}", where=str(path))


def open_bounded(path: Path, max_bytes: int) -> io.FileIO:
    """Open a regular file of at most `max_bytes`. Raises FormatError when it is larger, else as `open_regular`."""
    file = open_regular(path)
    try:
        _check_size(path, os.fstat(file.fileno()).st_size, max_bytes)
    except FormatError:
        file.close()
        raise
    return file


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """A whole file of at most `max_bytes`. Raises as `open_bounded`."""
    with open_bounded(path, max_bytes) as file:
        try:
            nbytes = os.fstat(file.fileno()).st_size
            data, piece = b"", b"?"
            while piece and len(data) <= max_bytes:  # once, unless the file grows meanwhile
                piece = file.read(max(nbytes - len(data), 0) + 1)
                data = data + piece if data else piece
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    _check_size(path, len(data), max_bytes)
    return data


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file, whole or not at all; an earlier one of that name is replaced. durable: wait for the disk.

    Raises OSError.
    """
    import tempfile

    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:80]}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _check_size(path: Path, nbytes: int, max_bytes: int) -> None:
    if nbytes > max_bytes:
        what = f"{nbytes:,} bytes, and at most {max_bytes:,} are read from a file of this kind"
        raise FormatError(what, where=str(path), fix="Look at the file before using it: such a size is a mistake or an attack.")


def file_kind(mode: int) -> str:
    """The kind of a file, for messages."""
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: "a file",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")
