"""System calls of the store: reserved space, atomic renames, fsync.

Linux has all of them. If a file system or another operating system lacks a call, another one replaces it, or the function
returns False and the caller does without.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightsmith._base import files
from weightsmith._base.errors import NOTHING_WRITTEN, NoSpace, StoreError

TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})  # open, by this process or by all
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_NO_LINKS = _UNSUPPORTED | {errno.EPERM, errno.EMLINK}
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2


@functools.cache
def _libc(name: str) -> Callable[..., int] | None:
    """A C library function with 64-bit offsets, or None if the C library does not have it."""
    try:
        function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    if name == "fstatfs":
        function.argtypes = (ctypes.c_int, ctypes.c_char_p)
    elif name == "fallocate":
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    else:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def reserve(fd: int, nbytes: int) -> bool:
    """Set the file's length to `nbytes` and reserve its blocks; False if only the length could be set.

    Not os.posix_fallocate: on file systems without fallocate, glibc's writes into every block, which takes as long as
    the work itself. Raises OSError (ENOSPC, EDQUOT, EFBIG) if there is not enough space.
    """
    if os.fstat(fd).st_size > nbytes:
        os.ftruncate(fd, nbytes)
    fallocate = _libc("fallocate")
    if fallocate is not None and nbytes:
        while fallocate(fd, 0, 0, nbytes) != 0:
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        else:
            return True
    os.ftruncate(fd, nbytes)
    return False


_SHARING = frozenset({0x9123683E, 0x58465342, 0xCA451A4E, 0x6969, 0xFE534D42, 0xFF534D42, 0x7461636F})
"""btrfs, xfs, bcachefs, nfs, smb2, cifs, ocfs2: they can copy by reference, within the file system or on the server."""


_IN_MEMORY = frozenset({0x01021994})
"""tmpfs."""


def copies_by_reference(fd: int) -> bool:
    """The file system of this open file may copy without moving the bytes through memory (copy_file_range)."""
    return hasattr(os, "copy_file_range") and _file_system(fd) in _SHARING


def is_in_memory(fd: int) -> bool:
    """The file system of this open file is in memory. To reserve blocks there is to fill them with zeros."""
    return _file_system(fd) in _IN_MEMORY


def _file_system(fd: int) -> int:
    """The kind of the file system of an open file, as Linux numbers them; 0 if unknown."""
    fstatfs = _libc("fstatfs") if sys.platform == "linux" else None  # elsewhere struct statfs is longer than the buffer
    about = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; f_type comes first
    if fstatfs is None or fstatfs(fd, about) != 0:
        return 0
    return int.from_bytes(about.raw[:8], sys.byteorder)


def open_own(path: Path, flags: int, *, keep: bool = False) -> int:
    """Open or create a file that is written in place: a regular file with one name, not a link.

    If the file has other names (hard links), it is replaced here by a new file, and the other names keep the old one.

    flags  O_RDWR, O_APPEND and the like
    keep   copy the old bytes into the new file; False: it starts empty

    Raises StoreError for anything but a file, without opening it; OSError.
    """
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise StoreError(f"{files.file_kind(mode)}, not a file, so it was not opened", where=str(path), fix="remove it")
    fd = os.open(path, flags, 0o666)
    if os.fstat(fd).st_nlink == 1:
        return fd
    try:
        data = _contents(fd) if keep else b""
    finally:
        os.close(fd)
    path.unlink()
    fd = os.open(path, flags | os.O_EXCL, 0o666)
    try:
        files.write_all(fd, memoryview(data), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_own_folder(path: Path) -> None:
    """Make a folder and those above it, if they are not there. Raises StoreError for anything but a folder; OSError."""
    with suppress(FileExistsError):
        path.mkdir(parents=True)
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise StoreError(
            f"{files.file_kind(mode)}, not a folder, so nothing was written there", where=str(path), fix="remove it"
        )


def read_own(path: Path, max_bytes: int) -> bytes | None:
    """All bytes of a file, None if it is missing. Raises StoreError if it is not a regular file, or too large."""
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise StoreError("not a file, so it was not opened", where=str(path), fix="remove it", state=NOTHING_WRITTEN)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise StoreError(what, where=str(path), fix="remove it", state=NOTHING_WRITTEN) from error
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > max_bytes:
            raise StoreError(f"{nbytes:,} bytes: at most {max_bytes:,} are read", where=str(path), fix="remove it")
        return _contents(fd)
    finally:
        os.close(fd)


def _contents(fd: int) -> bytes:
    """All bytes of an open file."""
    data = bytearray(os.fstat(fd).st_size)
    return bytes(data[: files.read_all(fd, memoryview(data), 0)])


def sync_data(fd: int) -> None:
    """Make the bytes of an open file durable."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: its fsync leaves the bytes in the drive's cache
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
            return
        except OSError:  # a network file system
            pass
    getattr(os, "fdatasync", os.fsync)(fd)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Does nothing on network file systems that refuse fsync for folders."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED | {errno.EBADF}:
            raise
    finally:
        os.close(fd)


def lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file, or raise BlockingIOError if another process holds the lock. False if there are no locks.

    shared  with all others that lock it shared
    """
    flock = getattr(fcntl, "flock", None)
    if flock is None:
        return False
    try:
        flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def has_locks(folder: Path) -> bool:
    """Whether files in this folder, or in the first that exists above it, can be locked. True where no file can be made."""
    above = next((path for path in (folder, *folder.parents) if path.is_dir()), folder)
    try:
        with tempfile.TemporaryFile(dir=above) as file:
            return lock(file.fileno())
    except OSError:
        return True


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    renameat2 = _libc("renameat2")
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fspath(source), None, os.fspath(target))


def exchange(first: Path, second: Path) -> bool:
    """Swap two existing names atomically; False if the file system cannot."""
    return _renameat2(first, second, _RENAME_EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file to a name that must not exist, atomically if the file system can. Raises FileExistsError."""
    if _renameat2(source, target, _RENAME_NOREPLACE):
        return
    try:
        os.link(source, target, follow_symlinks=False)  # atomic too, and refuses an existing name
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        source.rename(target)
        return
    source.unlink()


def available_bytes(folder: Path) -> int:
    """Bytes this user can still write on the file system of `folder`."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files if `count` more would not fit; the hard limit stays as it is."""
    files.raise_open_files(count + 256)  # inputs, libraries, sockets


def no_space(folder: Path, needed_bytes: int, *, state: str, cause: OSError | None = None) -> NoSpace:
    """The error for a file system that cannot hold `needed_bytes` more."""
    free = available_bytes(folder)
    reason = {
        errno.EDQUOT: "your disk quota there is used up",
        errno.EFBIG: "the file size limit (ulimit -f, or the file system's) is smaller than a weight file",
    }.get(cause.errno or 0 if cause else 0, "")
    details = [f"needed     {needed_bytes:,} bytes", f"available  {free:,} bytes"]
    return NoSpace(
        "no space for the output" + (f": {reason}" if reason else ""),
        where=str(folder),
        details=details,
        fix="raise the limit, or write smaller files with --max-shard-size (max_shard_bytes)"
        if cause is not None and cause.errno == errno.EFBIG
        else f"free {max(needed_bytes - free, 0):,} bytes there, or write to another disk"
        if needed_bytes > free
        else "free space there, or write to another disk",
        state=state,
    )


def remove_tree(folder: Path) -> None:
    """Delete a folder and its contents without following links. Does nothing if it does not exist. Raises StoreError."""

    def failed(function: Callable[..., object], path: str | Path, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            what, fix = f"cannot be removed: {info[1].strerror or info[1]}", f"remove {folder} yourself"
            raise StoreError(what, where=str(path), fix=fix) from info[1]

    shutil.rmtree(folder, onerror=failed)
