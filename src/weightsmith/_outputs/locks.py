"""The marks and locks of a staging folder: whose it is, and who works in it.

    lock                  held alone to build the whole output, shared by processes that build parts; names its holder
    parts/lock-2-of-4     held by the one process that builds this part; names it
    parts/lock-products   held by the one process that computes products which several parts need
    parts/lock-helpers    shared by the processes that wait for these products, and do tasks for that one
    parts/lock-driver     held by the process that has others do parts, as long as they may begin one

A lock is a file locked with flock. Closing the file releases it, so the lock of a dead process is free.

Files are written in place and deleted here, so a folder created by someone else is refused. A folder is ours if it is empty,
or if it holds our `lock` and either a journal with a readable line or nothing else. The journal's first line is on disk before
anything else is created, and the journal is removed last.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, Busy, Finding, StoreError
from weightsmith._base.files import file_kind, read_all
from weightsmith._outputs import disk
from weightsmith._outputs.journal import Entries, read_further, read_journal

LOCK, JOURNAL, SPACE, CONTENT, OLD, PRODUCTS, PARTS = "lock", "journal", "space", "content", "old", "products", "parts"
ADDRESS = "address"
"""Key of a note: the address of the output, if it is no local folder."""
OWNER = "process "
"""Start of the text in our locks."""

_FOLDERS = (CONTENT, OLD, PRODUCTS, PARTS)
_FILES = (LOCK, JOURNAL, SPACE)


def check_kinds(folder: Path) -> None:
    """Raise StoreError unless this is a folder whose entries have the right kinds, with a lock or journal if it is not empty.

    Opens only the journal. Another process may be building or removing the folder meanwhile.
    """
    mode = _mode(folder)
    if stat.S_ISLNK(mode):
        raise foreign(folder, "it is a symbolic link, which is not followed")
    if mode and not stat.S_ISDIR(mode):
        raise foreign(folder, "it is not a folder")
    names = _names(folder)
    for name in _FOLDERS:
        mode = _mode(folder / name)
        if mode and not stat.S_ISDIR(mode):
            raise foreign(folder, f"{name} in it is {file_kind(mode)}, not a folder")
    for name in _FILES:
        mode = _mode(folder / name)
        if mode and not stat.S_ISREG(mode):
            raise foreign(folder, f"{name} in it is {file_kind(mode)}, not a file")
    if names and LOCK not in names and not read_journal(folder / JOURNAL).lines:
        raise foreign(folder, f"it holds {names[0]!r}, but neither a lock nor a journal")


def check_made_by_us(folder: Path, lock_text: str, entries: Entries) -> None:
    """Raise StoreError unless the folder carries our marks. Call with the lock held, before writing to it."""
    if lock_text and not lock_text.startswith(OWNER):
        raise foreign(folder, f"the text in {LOCK} was not written by weightsmith")
    if entries.lines:
        return
    others = [
        name
        for name in _names(folder)
        if name != LOCK and not (name == JOURNAL and (lock_text or not (folder / name).lstat().st_size))
    ]
    if others:
        raise foreign(folder, f"it holds {others[0]!r}, but no journal of weightsmith")


def check_content(folder: Path) -> None:
    """Raise StoreError for a pipe, socket or device at the top level of the content."""
    for name in _names(folder):
        mode = _mode(folder / name)
        if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise foreign(folder, f"{name!r} in it is {file_kind(mode)}")


def foreign(folder: Path, why: str) -> StoreError:
    """The error for a staging folder that weightsmith did not create."""
    what = f"the folder for unfinished work exists, but was not created by weightsmith: {why}"
    fix = "move it away, or remove it, and run again; or choose another output folder"
    return StoreError(what, where=str(folder), fix=fix, state=NOTHING_WRITTEN)


def _mode(path: Path) -> int:
    """The mode of a path without following links; 0 if it does not exist."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  names alone, in one call
    except FileNotFoundError:
        return []


DRIVER, HELPERS = "lock-driver", "lock-helpers"


class Locks:
    """The locks that this process holds in a staging folder.

    folder    the staging folder
    out       the final folder, for messages
    warnings  what the user should know
    """

    def __init__(self, folder: Path, out: Path) -> None:
        """Hold none."""
        self.folder, self.out = folder, out
        self.warnings: tuple[Finding, ...] = ()
        self._files: list[FileIO] = []

    @property
    def held(self) -> bool:
        """The lock is held, alone or shared."""
        return bool(self._files)

    def take(self) -> Entries:
        """Take the lock for this process alone, and read the journals. Creates the folder if necessary.

        Raises Busy if another process holds it, StoreError for a folder that is not ours.
        """
        path = self.folder / LOCK
        for _ in range(100):  # its owner may be removing the folder
            try:
                self.folder.mkdir()
            except FileExistsError:
                check_kinds(self.folder)
            try:
                with ExitStack() as closing:
                    file = closing.enter_context(_open(path, os.O_CREAT))
                    locked = self._lock(file)
                    about = os.fstat(file.fileno())
                    if path.lstat().st_ino != about.st_ino:
                        continue
                    entries = read_journals(self.folder)
                    check_made_by_us(self.folder, _text(file), entries)
                    if about.st_nlink > 1:  # leave this file to its other names
                        path.unlink()
                        continue
                    _sign(file)
                    if not locked:
                        what = "this file system has no locks, so nothing stops a second process from building the same output"
                        self.warnings = (Finding(what, str(path)),)
                    self._files.append(file)
                    closing.pop_all()
                    return entries
            except FileNotFoundError:
                pass
        raise StoreError("the lock cannot be taken: other processes keep removing it", where=str(self.folder), fix="run again")

    def _lock(self, file: FileIO) -> bool:
        try:
            return disk.lock(file.fileno())
        except BlockingIOError:
            what = f"{_text(file) or 'another process'} is building this output now"
            fix = "wait until it has ended, stop it, or choose another output folder"
            raise Busy(what, where=str(self.out), fix=fix, state=NOTHING_WRITTEN) from None

    def share(self) -> Entries | None:
        """Share the lock with other parts, and read the journals, all but the tensors.

        None if a process holds the lock alone or nothing is prepared.
        """
        path = self.folder / LOCK
        try:
            with ExitStack() as closing:
                file = closing.enter_context(_open(path))
                if not disk.lock(file.fileno(), shared=True):
                    raise self._no_locks()
                entries = read_journals(self.folder, ())
                if path.lstat().st_ino != os.fstat(file.fileno()).st_ino or not entries.lines:
                    return None
                self._files.append(file)
                closing.pop_all()
                return entries
        except (FileNotFoundError, BlockingIOError):
            return None

    def let_in(self) -> None:
        """Share the lock that this process holds alone, so that others can do parts. Raises StoreError."""
        for file in self._files:
            try:
                if not disk.lock(file.fileno(), shared=True):
                    raise self._no_locks()
            except BlockingIOError:  # a conversion gives the lock up for a moment
                raise self._taken() from None

    def take_back(self, seconds: float) -> None:
        """Hold the lock alone again, when the processes that did parts have left. Raises Busy if one stays so long."""
        for file in self._files:
            self._wait(file, seconds)
            try:
                same = (self.folder / LOCK).lstat().st_ino == os.fstat(file.fileno()).st_ino
            except FileNotFoundError:
                same = False
            if not same:
                raise self._taken()

    @contextmanager
    def lead(self, seconds: float) -> Iterator[None]:
        """Show the processes that do parts for this one that it is there: `check_led` looks. seconds: to wait for the lock."""
        (self.folder / PARTS).mkdir(exist_ok=True)
        with FileIO(disk.open_own(self.folder / PARTS / DRIVER, os.O_RDWR), "r+") as file:
            self._wait(file, seconds)  # a process that looks holds it for a moment
            yield

    def check_led(self) -> None:
        """Raise StoreError unless another process is seen to `lead`.

        Those that look share the lock, so that none takes another one for the driver.
        """
        what = "the locks of this folder are not shared between machines"
        fix = "mount it so that they are (NFS: without nolock and local_lock; Lustre: with flock), or leave --ray out"
        try:
            with _open(self.folder / PARTS / DRIVER) as file:
                disk.lock(file.fileno(), shared=True)
        except BlockingIOError:
            return
        except FileNotFoundError:
            what, fix = "this machine does not see the folder of the driver", "write to a folder that all machines share"
        raise StoreError(f"{what}, or the driver has ended", where=str(self.folder), fix=fix)

    def _wait(
        self,
        file: FileIO,
        seconds: float,
        waiting: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Lock a file alone. Raises Busy if another process holds the lock so long.

        waiting    called once if one does
        meanwhile  called repeatedly while one does
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                disk.lock(file.fileno())
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._taken() from None
                if waiting is not None:
                    waiting()
                    waiting = None
                meanwhile()
                time.sleep(0.05)

    def _no_locks(self) -> StoreError:
        what = "this file system has no locks, which the processes that do parts need"
        fix = "run the plan in one process, without a part, or choose an output folder on another disk"
        return StoreError(what, where=str(self.out.parent), fix=fix)

    def _taken(self) -> Busy:
        what = "another process has taken the unfinished work, or is still doing a part of it"
        return Busy(what, where=str(self.out), fix="run again")

    def take_part(self, part: str) -> None:
        """Take the lock of a part, by its label. Raises Busy if another process holds it."""
        (self.folder / PARTS).mkdir(exist_ok=True)
        file = FileIO(disk.open_own(self.folder / PARTS / f"lock-{part}", os.O_RDWR), "r+")
        self._files.append(file)
        try:
            disk.lock(file.fileno())
        except BlockingIOError:
            what = f"another process is doing part {part.replace('-', ' ')}"
            fix = "wait until it has ended, or do another part"
            raise Busy(what, where=str(self.out), fix=fix, state=NOTHING_WRITTEN) from None
        _sign(file)

    @contextmanager
    def products(
        self, waiting: Callable[[], None] | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Wait for the lock on the products, and hold it.

        waiting    called once if another process holds it
        meanwhile  called repeatedly while another process holds it
        """
        with FileIO(disk.open_own(self.folder / PARTS / "lock-products", os.O_RDWR), "r+") as file:
            self._wait(file, math.inf, waiting, meanwhile)
            yield

    def close(self) -> None:
        """Release all. May be called twice, also after an interrupted call."""
        for file in self._files:
            file.close()
        self._files.clear()


def is_held(folder: Path) -> bool:
    """True if any process holds the lock, alone or shared. A free lock is held for a moment to find out."""
    try:
        file = _open(folder / LOCK)
    except FileNotFoundError:
        return False
    with file:
        try:
            disk.lock(file.fileno())
            return False
        except BlockingIOError:
            return True


def read_journals(folder: Path, names: Collection[str] | None = None) -> Entries:
    """The entries of the journal and of the journals of parts. names: see `read_journal`."""
    entries = read_journal(folder / JOURNAL, names)
    for path in part_journals(folder):
        part = read_journal(path, names)
        entries.tensors |= part.tensors
        entries.products |= part.products
        entries.files |= part.files
    return entries


def part_journals(folder: Path) -> list[Path]:
    """The journals of parts."""
    return sorted((folder / PARTS).glob("journal-*"))


class FollowedJournals:
    """Follows the journals of parts as they grow. On a network file system, what they show may be some seconds old.

    products  those that were finished in what was read
    """

    def __init__(self, folder: Path) -> None:
        """folder: the staging folder."""
        self.products: set[str] = set()
        self._folder = folder
        self._read: dict[str, int] = {}

    def look(self, parts: Iterable[str]) -> set[str]:
        """The tensors of these parts (labels) that have been finished since the last call for them."""
        names: set[str] = set()
        for part in parts:
            with suppress(OSError):
                entries, self._read[part] = read_further(self._folder / PARTS / f"journal-{part}", self._read.get(part, 0))
                names.update(entries.tensors)
                self.products.update(entries.products)
        return names


def _open(path: Path, flags: int = 0) -> FileIO:
    return FileIO(os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+")


def _sign(lock: FileIO) -> None:
    """Write into a lock whose it is."""
    os.ftruncate(lock.fileno(), 0)
    os.pwrite(lock.fileno(), f"{OWNER}{os.getpid()} on {socket.gethostname()}".encode(), 0)


def _text(lock: FileIO) -> str:
    text = bytearray(300)
    return text[: read_all(lock.fileno(), memoryview(text), 0)].decode(errors="replace")
