"""A checkpoint being built for the Hub: `store.Staging` for outputs whose weight files are uploaded one by one.

    merged-1a2b3c4d                       the local name of hf://org/merged; no such folder is ever made
    .merged-1a2b3c4d.weightsmith-staging/ in the current folder: lock, journal and products as for any output
      content/                            weight files that are not uploaded yet; at the end, all other files

Uploaded files are visible to nobody until one commit adds all files of the model, and deletes those of a model that it
replaces. The journal names the commit that the run began with. The Hub makes ours only on top of that one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weightsmith.containers import Layout
from weightsmith.errors import NOTHING_WRITTEN, Finding, StoreError
from weightsmith.outputs.hub.address import HubAddress
from weightsmith.outputs.hub.contents import check_not_read, check_vacant, holds
from weightsmith.outputs.hub.files import PassingFiles
from weightsmith.outputs.hub.repository import (
    BranchMoved,
    Content,
    HubRepository,
    content_of,
    moved,
    no_bars,
    uploaded,
)
from weightsmith.outputs.journal import Entries, Finished, read_journal
from weightsmith.outputs.local.area import left_behind, staging_folder
from weightsmith.outputs.local.claim import JOURNAL
from weightsmith.outputs.local.target import check_out
from weightsmith.outputs.manifest import list_files
from weightsmith.outputs.reread import Progress
from weightsmith.outputs.staging import Staging

if TYPE_CHECKING:
    from weightsmith.formats.files import Extent
    from weightsmith.outputs.checksum import BytesLike
    from weightsmith.outputs.local.products import Arrays
    from weightsmith.plans import Product

_PARENT, _PUBLISHING, _UPLOADED = "parent", "publishing", "uploaded "
"""Keys of notes in the journal: the commit to build on; what was about to be committed; what is uploaded, by name."""
_SHA1, _SHA256 = re.compile("[0-9a-f]{40}|"), re.compile("[0-9a-f]{64}|")


class HubStaging:
    """A checkpoint being built for the Hub; see `store.Staging`, whose methods it has.

    out        the address of the output
    folder     the staging folder on this machine, for messages
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed
    """

    def __init__(
        self, out: HubAddress, repository: HubRepository, message: str, overwrite: bool, uploading: Progress | None
    ) -> None:
        """Use `HubStaging.open`."""
        self.out = out
        self._repository, self._message, self._overwrite, self._uploading = repository, message, overwrite, uploading
        self._local: Staging
        self._weights: PassingFiles
        self._parent = ""
        self._replaced: tuple[str, ...] = ()
        self._is_committed = False
        self._left: tuple[Finding, ...] = ()
        self._bars = ExitStack()

    @classmethod
    def open(
        cls,
        out: HubAddress,
        layout: Layout,
        plan_hash: str,
        *,
        facts: Mapping[str, str],
        resume: bool,
        overwrite: bool,
        reads: Sequence[str],
        public: bool,
        message: str,
        other_bytes: int = 0,
        threads: int = 2,
        progress: Progress | None = None,
        uploading: Progress | None = None,
    ) -> HubStaging:
        """Lock the staging folder on this machine, and create repository and branch if they are missing.

        reads    what the run reads, as the user names it: never replaced
        public   who may see a repository that is created now; the default is its owner alone
        message  of the commit
        uploading  called by `publish` while the last files are uploaded

        Everything else is as for `store.Staging.open`. Raises OutputExists, CannotResume, Busy, NoSpace, and PushFailed if the
        hub cannot be used, or if the branch has changed since an interrupted run began.
        """
        repository = HubRepository(out)
        check_not_read(out, reads)
        staging = cls(out, repository, message, overwrite, uploading)
        staging._local = Staging.open(
            out.local_name,
            layout,
            plan_hash,
            facts=facts,
            resume=resume,
            other_bytes=other_bytes,
            threads=threads,
            progress=progress,
            weights=staging._make_weights,
        )
        try:
            staging._bars.enter_context(no_bars())
            staging._connect(public)
            staging._weights.start(staging._local.finished)
        except BaseException as error:
            if not staging.holds_work:
                with suppress(StoreError):
                    staging._local.discard()
            staging.close()
            if isinstance(error, StoreError):
                error.state = error.state or staging._state
            raise
        return staging

    def _make_weights(self, content: Path, layout: Layout, entries: Entries) -> PassingFiles:
        found = {key.removeprefix(_UPLOADED): value for key, value in entries.notes.items() if key.startswith(_UPLOADED)}
        known = {name: each for name, value in found.items() if (each := _content(value)) is not None}
        self._weights = PassingFiles(content, layout, entries.tensors, known, self._upload)
        return self._weights

    def _connect(self, public: bool) -> None:
        """Find out what the branch stands for, and what is there."""
        notes, head = self._local.notes, self._repository.create(public=public)
        parent, publishing = notes.get(_PARENT), notes.get(_PUBLISHING)
        if isinstance(parent, str) and parent != head:
            wanted = _contents(publishing) if isinstance(publishing, dict) else {}
            ours = self._repository.since(parent, lambda commit: self._is_ours(commit, wanted)) if wanted else ""
            if ours == head:
                self._parent, self._is_committed = head, True  # the run was interrupted after its commit
                self._replaced = tuple(wanted)
                return
            self._local.note(_PARENT, head)
            raise moved(self.out, ours or parent, head, committed=bool(ours))
        self._parent = head
        self._replaced = check_vacant(self._repository, head, overwrite=self._overwrite)
        if parent is None:
            self._local.note(_PARENT, head)

    def _is_ours(self, commit: str, wanted: Mapping[str, Content]) -> bool:
        return bool(wanted) and holds(self._repository.files(commit), wanted)

    def _upload(self, path: Path, name: str) -> Content:
        """Upload a weight file, and enter it in the journal."""
        addition = self._repository.upload(path, name)
        content = Content(path.stat().st_size, "", addition.upload_info.sha256.hex())
        self._local.note(_UPLOADED + name, [content.nbytes, content.sha256])
        return content

    @property
    def folder(self) -> Path:
        """The staging folder on this machine."""
        return self._local.folder

    @property
    def layout(self) -> Layout:
        """Where every byte goes."""
        return self._local.layout

    @property
    def plan_hash(self) -> str:
        """Identity of the plan."""
        return self._local.plan_hash

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return self._local.warnings + self._left

    @property
    def _state(self) -> str:
        if not self.holds_work:
            created = self._repository.created
            return f"Nothing was uploaded. {created}" if created else NOTHING_WRITTEN
        return f"Nothing was committed. What is finished is uploaded or kept in {self.folder}; run again to resume."

    # tensors

    @property
    def finished(self) -> frozenset[str]:
        """See `store.Staging.finished`; those of uploaded files too."""
        return self._local.finished

    @property
    def records(self) -> dict[str, Finished]:
        """See `store.Staging.records`."""
        return self._local.records

    @property
    def holds_work(self) -> bool:
        """See `store.Staging.holds_work`."""
        return self._local.holds_work

    def location(self, name: str) -> tuple[int, int] | None:
        """See `store.Staging.location`; None for a tensor that an earlier run has finished."""
        with self._kept():
            return self._local.location(name)

    def write(self, name: str, start_byte: int, buffer: BytesLike) -> None:
        """See `store.Staging.write`. Waits while too many files wait for their upload. Raises what failed there."""
        with self._kept():
            self._local.write(name, start_byte, buffer)

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """Does nothing: the Hub copies whole files alone."""

    def redo(self, names: Collection[str]) -> bool:
        """See `store.Staging.redo`. Those of uploaded files must get the same bytes: `finish` compares."""
        return False

    def finish(self, name: str, done: Finished) -> None:
        """See `store.Staging.finish`. A file whose tensors are all finished is uploaded."""
        with self._kept():
            before = self._local.records.get(name) if self._weights.is_taken(name) else None
            if before is not None and before.checksum != done.checksum:
                raise StoreError(
                    "computed again, this tensor differs from what an earlier run has stored",
                    where=f"{self.out}, tensor {name}",
                    fix="run again with --no-resume (resume=False), which computes everything again",
                )
            self._local.finish(name, done)
            self._weights.finished(name)

    def abandon(self) -> None:
        """Wake threads that wait for an upload: the run has failed."""
        self._weights.abandon()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Say what is left, in errors of the store."""
        try:
            yield
        except StoreError as error:
            kept = f"What is finished is uploaded or kept in {self.folder}; run again to resume."
            error.state = error.state or kept
            raise
        except OSError as error:
            fix = "check the disk and its permissions, and run again"
            raise StoreError(f"writing failed: {error.strerror}", where=str(self.folder), fix=fix) from error

    # products

    @property
    def products(self) -> dict[str, str]:
        """See `store.Staging.products`."""
        return self._local.products

    def product(self, product: Product) -> Arrays | None:
        """See `store.Staging.product`."""
        return self._local.product(product)

    def create(self, product: Product) -> Arrays | None:
        """See `store.Staging.create`."""
        return self._local.create(product)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """See `store.Staging.keep`."""
        return self._local.keep(product, arrays)

    def forget(self, product: Product) -> None:
        """See `store.Staging.forget`."""
        self._local.forget(product)

    @contextmanager
    def only_process(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """One process builds an output on the Hub."""
        yield

    # other files, and the end

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """See `store.Staging.add_file`."""
        self._local.add_file(name, data)

    def publish(self, manifest: Mapping[str, Any], *, fsync: bool = True) -> HubAddress:
        """Upload what is left, and commit all files at once.

        Raises StoreError if a tensor is missing, BranchMoved if someone else has committed meanwhile. What is uploaded stays.
        """
        with self._kept():
            self._weights.drain(self._uploading)
            folder = self._local.complete(manifest)
            others = {name: content_of(folder / name) for name in list_files(folder)}
            wanted = self._weights.uploaded | others
            self._local.note(_PUBLISHING, {name: list(content) for name, content in wanted.items()})
            if not (self._is_committed and self._is_ours(self._parent, wanted)):
                self._commit(folder, others, wanted)
        try:
            self._local.discard()
        except (OSError, StoreError) as error:
            self._left = (left_behind(error, self.folder),)
        self.close()
        return self.out

    def _commit(self, folder: Path, others: Mapping[str, Content], wanted: Mapping[str, Content]) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(uploaded(name, content) for name, content in self._weights.uploaded.items()),
            *(CommitOperationAdd(name, folder / name) for name in others),
            *(CommitOperationDelete(name) for name in self._replaced if name not in wanted),
        ]
        try:
            self._repository.commit(operations, self._parent, self._message, lambda commit: self._is_ours(commit, wanted))
        except BranchMoved:
            with suppress(StoreError):
                self._local.note(_PARENT, self._repository.head())
            raise
        except StoreError as error:
            if lost := self._forget_lost():
                what = f"the hub no longer has {len(lost):,} of the uploaded files, the first is {lost[0]}"
                fix = "run again: these are computed and uploaded again"
                raise StoreError(what, where=str(self.out), details=error.finding.details, fix=fix) from error
            raise

    def _forget_lost(self) -> list[str]:
        """Enter in the journal which uploaded files the hub no longer has: their names."""
        try:
            lost = self._repository.missing(self._weights.uploaded)
        except StoreError:  # the first error says more
            return []
        for name in lost:
            self._local.note(_UPLOADED + name, None)
        return lost

    @property
    def is_open(self) -> bool:
        """False once it is published, closed or discarded."""
        return self._local.is_open

    def discard(self) -> None:
        """Remove the staging folder. What was uploaded is part of no commit, and visible to nobody."""
        self._local.discard()
        self.close()

    def close(self) -> None:
        """End the uploads after their current request, and release the lock; `open` resumes. May be called twice."""
        self._local.close()
        self._bars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_free(out: HubAddress, *, overwrite: bool, reads: Sequence[str]) -> None:
    """Raise as `HubStaging.open` will if the output cannot be written. Changes nothing."""
    repository = HubRepository(out)
    check_not_read(out, reads)
    repository.check_token()
    head = repository.head()
    if head is None:
        return
    publishing = read_journal(staging_folder(check_out(out.local_name)) / JOURNAL).notes.get(_PUBLISHING)
    wanted = _contents(publishing) if isinstance(publishing, dict) else {}
    if not wanted or not holds(repository.files(head), wanted):
        check_vacant(repository, head, overwrite=overwrite)


def _content(value: object) -> Content | None:
    """What a note of a file says; None if it is none."""
    match value:
        case [int(nbytes), str(sha256)]:
            content = Content(nbytes, "", sha256)
        case [int(nbytes), str(sha1), str(sha256)]:
            content = Content(nbytes, sha1, sha256)
        case _:
            return None
    return content if _SHA1.fullmatch(content.sha1) and _SHA256.fullmatch(content.sha256) else None


def _contents(value: Mapping[str, object]) -> dict[str, Content]:
    """What a note of many files says; {} if one of them is none."""
    found = {name: content for name, each in value.items() if (content := _content(each)) is not None}
    return found if len(found) == len(value) else {}
