"""The staging area of an output: a folder next to its final name, which one rename publishes.

    parent/
      out/                              the final name: nothing, or the checkpoint that will be replaced
      .out.weightsmith-staging/
        lock                            locked by the process that builds the output (`outputs.local.locks`)
        space                           reserves the space of the files that are not weights, until they are added
        journal                         which tensors are finished, with checksums
        content/                        becomes out/
        products/                       values computed before some tensors, one file each
        parts/                          locks and journals of processes that build one part each
        old/                            only where the file system cannot swap two names: the replaced checkpoint

The final name never shows an incomplete output. If publishing was cut off, the next run completes or undoes it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, StoreError
from weightsmith._outputs.journal import Entries, read_journal
from weightsmith._outputs.local import disk
from weightsmith._outputs.local.claim import CONTENT, JOURNAL, LOCK, OLD, PARTS, PRODUCTS, SPACE, check_content
from weightsmith._outputs.local.locks import Locks
from weightsmith._outputs.local.target import check_out, remove_checkpoint
from weightsmith._outputs.manifest import MANIFEST_NAME

STAGING_SUFFIX = ".weightsmith-staging"


def staging_folder(out: Path) -> Path:
    """The staging folder of an output folder: in the same parent, so that publishing is a rename."""
    return out.parent / f".{out.name}{STAGING_SUFFIX}"


def left_behind(error: OSError | StoreError, where: Path | str, fix: str = "") -> Finding:
    """The warning that an output is published, while something that is no longer needed could not be removed.

    where  what remains, if the error does not say it
    fix    "": the error's
    """
    finding = Finding("") if isinstance(error, OSError) else error.finding
    reason = finding.what or (error.strerror if isinstance(error, OSError) else "") or str(error)
    what = f"the output is published and complete, but cleaning up failed: {reason}"
    return Finding(what, finding.where or str(where), finding.details, fix or finding.fix or f"remove {where} yourself")


class StagingArea:
    """The staging folder of one output.

    out       the final folder
    folder    the staging folder
    content   the folder in it that becomes `out`
    locks     those that this process holds in it
    """

    def __init__(self, out: Path) -> None:
        """Change nothing on disk."""
        self.out = out
        self.folder = staging_folder(out)
        self.content = self.folder / CONTENT
        self.locks = Locks(self.folder, out)

    # an interrupted publish

    def is_published(self, entries: Entries) -> bool:
        """Whether the output is there that a journal was about to publish."""
        return entries.published is not None and _identity(self.out) == entries.published

    def recover(self, entries: Entries) -> None:
        """Complete or undo a publish that was cut off. The folder may be gone afterwards: see `locks.held`."""
        old = self.folder / OLD
        if self.is_published(entries):
            self.remove_replaced()  # it was published; only what it replaced is left
            self.remove()
        elif entries.lines == 0:
            self.remove()  # cut off before anything was finished, or at the end of its removal
        elif entries.published is not None and self.content.is_dir() and not _is_inode(self.content, entries.published[1]):
            raise StoreError(
                f"an interrupted overwrite of {self.out} left the replaced checkpoint here, and the new one is no longer there",
                where=str(self.content),
                fix=f"move that checkpoint to where it belongs, or remove {self.folder}, and run again",
                state=NOTHING_WRITTEN,
            )
        elif old.is_dir() and not self.out.exists():
            old.rename(self.out)
        elif old.is_dir():
            what = f"an interrupted overwrite of {self.out} left the replaced checkpoint here, and a new folder has its name"
            raise StoreError(what, where=str(old), fix="move one of the two away and run again")

    # removing

    def remove_replaced(self) -> None:
        """Remove the checkpoint that the published one has replaced. Raises StoreError: see `remove_checkpoint`."""
        for folder in (self.content, self.folder / OLD):
            remove_checkpoint(folder)

    def remove_other_files(self, weights: set[str]) -> None:
        """Remove from the content what an earlier run added to these weight files; this run adds its own."""
        check_content(self.content)
        kept = {parent for name in weights for parent in (self.content / name).parents if parent != self.content}
        folders = [self.content]
        while folders:
            for entry in list(folders.pop().iterdir()):
                if entry.is_dir() and not entry.is_symlink():
                    if entry in kept:
                        folders.append(entry)
                    else:
                        disk.remove_tree(entry)
                elif entry.relative_to(self.content).as_posix() not in weights or entry.is_symlink():
                    entry.unlink()

    def empty(self) -> None:
        """Remove everything of ours but the lock; last the journal, which marks the rest as ours."""
        for name in (CONTENT, PRODUCTS, PARTS):
            disk.remove_tree(self.folder / name)
        (self.folder / SPACE).unlink(missing_ok=True)
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder and release the lock. The folder itself stays if it holds files that are not ours."""
        try:
            self.empty()
            (self.folder / LOCK).unlink()
            self.folder.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # another process has just started here, or the user put a file into it
                raise
        finally:
            self.locks.close()


def _is_inode(path: Path, inode: int) -> bool:
    # Not the device: after a reboot the same disk may have another number.
    return path.lstat().st_ino == inode


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a published checkpoint, None when there is none."""
    try:
        about = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(about.st_mode) or not (path / MANIFEST_NAME).exists():
        return None
    return about.st_dev, about.st_ino


def staged_plan(out: str | os.PathLike[str]) -> str:
    """The plan hash of interrupted work for this output folder, "" if there is none."""
    return read_journal(staging_folder(check_out(out)) / JOURNAL).plan
