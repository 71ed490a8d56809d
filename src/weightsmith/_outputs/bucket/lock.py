"""The lock of an output in a bucket: an object created by a conditional write, and renewed while its owner lives.

A process that is killed leaves its lock. The next one takes it over, by a conditional write too, if its owner is dead (where
both are on one machine) or has not renewed it for `STALE_SECONDS` by the clock of the store. An owner that finds its lock
taken over, or cannot renew it in time, stops.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, Busy, Finding, StoreError, legible
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._outputs.bucket.client import Bucket, NoConditions, Object, not_ours
from weightsmith._outputs.local.claim import OWNER

RENEW_SECONDS = 20.0
STALE_SECONDS = 120.0
_MAX_BYTES = 1 << 16
_OWNER, _PROCESS, _ID = "owner", "process", "id"


class Lock:
    """The lock of one output.

    bucket, key  of the lock
    out          the output, for messages
    warnings     what the user should know
    """

    def __init__(self, bucket: Bucket, key: str, out: str) -> None:
        """Hold nothing."""
        self._bucket, self._key, self._out = bucket, key, out
        self.warnings: tuple[Finding, ...] = ()
        own = f"{OWNER}{os.getpid()} on {socket.gethostname()}"
        self._own = {_OWNER: own, _PROCESS: _this_process(), _ID: secrets.token_hex(8)}
        self._etag = ""
        self._count = 0
        self._renewed = 0.0
        self._lost = False
        self._mutex = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """The lock was taken, and not released."""
        return bool(self._etag)

    def take(self) -> None:
        """Take the lock. Raises Busy if a live process holds it, StoreError if another program's object has its name."""
        began = time.monotonic()
        self._look()  # first: a store without conditional writes would write over it
        try:
            etag = self._bucket.create(self._key, self._text())
            if etag is None:
                etag = self._take_over()
            else:
                self._etag = etag
                self._count += 1  # other bytes: a store that ignores conditions writes them
                if self._bucket.create(self._key, self._text()) is not None:
                    raise NoConditions("it wrote over the lock")
        except NoConditions:
            self._bucket.put(self._key, self._text())
            etag = "*"
            what = "this store has no conditional writes, so nothing stops a second process from building the same output"
            self.warnings = (Finding(what, self._out),)
        self._etag, self._renewed = etag, began
        if etag != "*":
            self.renew()  # now, so that the user is told of a store that replaces without a condition
            self._thread = threading.Thread(target=self._keep, name="weightsmith-lock", daemon=True)
            self._thread.start()

    def _take_over(self) -> str:
        """Take the lock of a dead owner."""
        found = self._look()
        if found is None:  # just released
            etag = self._bucket.create(self._key, self._text())
        elif (left := _seconds_left(found)) > 0:
            owner = _field(found, _OWNER) or "another process"
            raise Busy(
                f"{owner} is building this output, and renewed its lock {max(found.age_seconds, 0):.0f} s ago",
                where=self._out,
                fix=f"wait until it has ended, stop it, or choose another output. If it died, run again in {left:.0f} s: "
                "a lock that is not renewed is taken over",
                state=NOTHING_WRITTEN,
            )
        else:
            etag = self._replace(found.etag)
        if etag is None:
            what = "another process has just begun to build this output"
            raise Busy(what, where=self._out, fix="run again", state=NOTHING_WRITTEN)
        return etag

    def _look(self) -> Object | None:
        """The lock as it is stored."""
        found = self._bucket.read(self._key, _MAX_BYTES)
        if found is not None and not is_lock(found):
            raise not_ours(self._key)
        return found

    def _keep(self) -> None:
        while not self._end.wait(RENEW_SECONDS):
            try:
                self.renew()
            except StoreError:  # not reachable: `check` says so, if it stays that way
                continue

    def renew(self) -> None:
        """Renew the lock now. Raises StoreError if another process has taken it over."""
        with self._mutex:
            if not self._etag or self._etag == "*":
                return
            began = time.monotonic()
            self._count += 1
            etag = self._replace(self._etag)
            if etag is None and (found := self._read_own()) is not None:  # the answer to an earlier renewal was lost
                etag = self._replace(found.etag)
            if etag is None:
                self._lost = True
            else:
                self._etag, self._renewed = etag, began
        self.check()

    def _replace(self, etag: str) -> str | None:
        """Write the lock in place of the version with this ETag: its own; None if that version is no longer there."""
        try:
            return self._bucket.replace(self._key, self._text(), etag)
        except NoConditions:  # stores have had If-None-Match alone for a while
            what = "this store replaces objects without a condition, so two processes might take over the same lock at once"
            self.warnings = (Finding(what, self._out),)
            found = self._bucket.read(self._key, _MAX_BYTES)
            return self._bucket.put(self._key, self._text()) if found is not None and found.etag == etag else None

    def _read_own(self) -> Object | None:
        """The lock as it is stored; None if it is not ours."""
        found = self._bucket.read(self._key, _MAX_BYTES)
        return found if found is not None and _field(found, _ID) == self._own[_ID] else None

    def check(self) -> None:
        """Raise StoreError unless the lock is surely still ours. Sends nothing."""
        late = self._etag not in ("", "*") and time.monotonic() - self._renewed > STALE_SECONDS * 0.75
        if self._lost or late:
            raise StoreError(
                "another process has taken over this output"
                if self._lost
                else "the lock could not be renewed in time, so another process may have taken over this output",
                where=self._out,
                fix="wait until that process has ended, and run again" if self._lost else "check the network, and run again",
            )

    def release(self) -> None:
        """Give the lock back. May be called twice. An unreachable store is no error: the lock becomes stale."""
        self._end.set()
        with self._mutex:
            held, self._etag = self.held, ""
        if held:
            with suppress(StoreError):
                if self._read_own() is not None:
                    self._bucket.delete(self._key)

    def _text(self) -> bytes:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return json.dumps(self._own | {"renewed": self._count, "time": now}).encode()


class LeaderLock:
    """The lock of the process for which this one builds a part: it ends when the lock is given back, or taken over.

    Another process may hold it. Nothing is written.
    """

    warnings: tuple[Finding, ...] = ()

    def __init__(self, bucket: Bucket, key: str, out: str) -> None:
        """Follow nothing."""
        self._bucket, self._key, self._out = bucket, key, out
        self._id = ""
        self._seen = 0.0
        self._end = threading.Event()

    @property
    def held(self) -> bool:
        """The lock was found, and this not released."""
        return bool(self._id) and not self._end.is_set()

    def take(self) -> None:
        """Find the lock. Raises StoreError if no process holds it."""
        self._seen = time.monotonic()
        self._id = self._found()
        self.check()
        threading.Thread(target=self._keep, name="weightsmith-lock", daemon=True).start()

    def _keep(self) -> None:
        while not self._end.wait(RENEW_SECONDS):
            began = time.monotonic()
            try:
                if self._found() != self._id:
                    self._id = ""
            except StoreError:  # not reachable: `check` says so, if it stays that way
                continue
            self._seen = began

    def _found(self) -> str:
        """Whose lock it is now; "" if there is none."""
        found = self._bucket.read(self._key, _MAX_BYTES)
        return "" if found is None else _field(found, _ID)

    def check(self) -> None:
        """Raise StoreError unless that process surely held its lock a while ago. Sends nothing."""
        if not self._id:
            what = "the process that this one works for has ended"
        elif time.monotonic() - self._seen > STALE_SECONDS:
            what = "the lock could not be read for a while, so the process that this one works for may have ended"
        else:
            return
        raise StoreError(what, where=self._out, fix="run again")

    def release(self) -> None:
        """Follow it no longer. May be called twice."""
        self._end.set()


def is_lock(found: Object) -> bool:
    """Whether it is a lock, and not an object of another program."""
    return bool(_field(found, _ID)) and _field(found, _OWNER).startswith(OWNER)


def is_held(found: Object) -> bool:
    """True if the owner of this lock is alive, as far as can be known."""
    return _seconds_left(found) > 0


def _seconds_left(found: Object) -> float:
    """Seconds until this lock may be taken over."""
    process = _field(found, _PROCESS)
    machine, _, rest = process.rpartition(" ")
    here, _, _ = _this_process().rpartition(" ")
    if machine and machine == here and rest.partition("@")[0].isdecimal() and rest != _started(int(rest.partition("@")[0])):
        return 0.0
    return STALE_SECONDS - found.age_seconds


def _field(found: Object, name: str) -> str:
    """A text of a lock; "" if it has none."""
    try:
        value = parse(found.data)[name]
    except (JsonError, KeyError, TypeError):
        return ""
    return legible(value, 200) if isinstance(value, str) else ""


def _this_process() -> str:
    """Machine since its start, namespace of process numbers, process and when it began; "" where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {_started(os.getpid())}"
    except OSError:
        return ""


def _started(process: int) -> str:
    """A live process of this machine, and when it began; "" if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (OSError, ValueError):
        return ""
    fields = text.rpartition(")")[2].split()  # the name before may contain anything
    return "" if fields[0] == "Z" else f"{process}@{fields[19]}"
