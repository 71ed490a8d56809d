"""A checkpoint being built for the Hub: its weight files are uploaded one by one, and one commit adds all files.

    merged-1a2b3c4d                       the local name of hf://org/merged; no such folder is ever made
    .merged-1a2b3c4d.weightsmith-staging/ in the current folder: lock, journal and products as for any output
      content/                            weight files that are not uploaded yet; at the end, all other files

Uploaded files are visible to nobody until one commit adds all files of the model, and deletes those of a model that it
replaces. The journal names the commit that the run began with. The Hub makes ours only on top of that one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._outputs.hub.address import CAPABILITIES, HubAddress
from weightsmith._outputs.hub.contents import check_not_read, check_vacant, holds
from weightsmith._outputs.hub.files import StreamedUploads
from weightsmith._outputs.hub.repository import BranchMoved, Content, HubRepository, content_of, moved, no_bars, uploaded
from weightsmith._outputs.journal import Entries, Journal, read_journal
from weightsmith._outputs.local.area import left_behind, staging_folder
from weightsmith._outputs.local.claim import JOURNAL
from weightsmith._outputs.local.target import check_out
from weightsmith._outputs.manifest import list_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsmith._outputs.local.backend import FolderBackend
    from weightsmith.abc.output import OutputSpec

_PARENT, _PUBLISHING, _UPLOADED = "parent", "publishing", "uploaded "
"""Keys of notes in the journal: the commit to build on; what was about to be committed; what is uploaded, by name."""
_SHA1, _SHA256 = re.compile("[0-9a-f]{40}|"), re.compile("[0-9a-f]{64}|")


class HubCommit:
    """A branch on the Hub, to which the files of a folder are committed; see `local.backend.Destination`.

    out  its address
    """

    capabilities = CAPABILITIES
    kept = "What is finished is uploaded or kept in {folder}; run again to resume."

    def __init__(self, out: HubAddress, spec: OutputSpec) -> None:
        """Send nothing. Raises PushFailed without a network or a token, or if the run reads from the branch."""
        self.out, self._spec = out, spec
        self._repository = HubRepository(out)
        check_not_read(out, spec.reads)
        self._files: StreamedUploads
        self._parent = ""
        self._replaced: tuple[str, ...] = ()
        self._is_committed = False
        self._bars = ExitStack()

    def weights(self, backend: FolderBackend, entries: Entries) -> StreamedUploads:
        """The weight files, each in the folder until it is uploaded."""
        found = {key.removeprefix(_UPLOADED): value for key, value in entries.notes.items() if key.startswith(_UPLOADED)}
        known = {name: each for name, value in found.items() if (each := _content(value)) is not None}

        def upload(path: Path, name: str) -> Content:
            """Upload a weight file, and enter it in the journal."""
            addition = self._repository.upload(path, name)
            content = Content(path.stat().st_size, "", addition.upload_info.sha256.hex())
            backend.note(_UPLOADED + name, [content.nbytes, content.sha256])
            return content

        self._files = StreamedUploads(backend.area.content, backend.spec.layout, entries.tensors, known, upload)
        return self._files

    def connect(self, backend: FolderBackend) -> None:
        """Create repository and branch if they are missing, and begin to upload.

        Raises PushFailed if the hub cannot be used, or if the branch has changed since an interrupted run began.
        """
        try:
            self._bars.enter_context(no_bars())
            self._find_parent(backend)
            self._files.start(backend.records)
        except BaseException as error:
            if not backend.holds_work:
                with suppress(StoreError):
                    backend.discard()
            if isinstance(error, StoreError):
                error.state = error.state or self._state(backend)
            raise

    def _find_parent(self, backend: FolderBackend) -> None:
        """Find out what the branch stands for, and what is there."""
        notes, head = backend.notes, self._repository.create(public=self._spec.public)
        parent, publishing = notes.get(_PARENT), notes.get(_PUBLISHING)
        if isinstance(parent, str) and parent != head:
            wanted = _contents(publishing)
            ours = self._repository.since(parent, lambda commit: self._is_ours(commit, wanted)) if wanted else ""
            if ours == head:
                self._parent, self._is_committed = head, True  # the run was interrupted after its commit
                self._replaced = tuple(wanted)
                return
            backend.note(_PARENT, head)
            raise moved(self.out, ours or parent, head, committed=bool(ours))
        self._parent = head
        self._replaced = check_vacant(self._repository, head, overwrite=self._spec.overwrite)
        if parent is None:
            backend.note(_PARENT, head)

    def _is_ours(self, commit: str, wanted: Mapping[str, Content]) -> bool:
        return bool(wanted) and holds(self._repository.files(commit), wanted)

    def _state(self, backend: FolderBackend) -> str:
        if not backend.holds_work:
            created = self._repository.created
            return f"Nothing was uploaded. {created}" if created else NOTHING_WRITTEN
        return f"Nothing was committed. {backend.kept}"

    def publish(self, backend: FolderBackend, journal: Journal, *, fsync: bool) -> HubAddress:
        """Commit all files at once. Raises BranchMoved if someone else has committed meanwhile. What is uploaded stays."""
        folder = backend.area.content
        others = {name: content_of(folder / name) for name in list_files(folder)}
        wanted = self._files.uploaded | others
        journal.note(_PUBLISHING, {name: list(content) for name, content in wanted.items()})
        if not (self._is_committed and self._is_ours(self._parent, wanted)):
            self._commit(backend, others, wanted)
        try:
            backend.discard()
        except (OSError, StoreError) as error:
            backend.left = (left_behind(error, backend.folder),)
        backend.close()
        return self.out

    def _commit(self, backend: FolderBackend, others: Mapping[str, Content], wanted: Mapping[str, Content]) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(uploaded(name, content) for name, content in self._files.uploaded.items()),
            *(CommitOperationAdd(name, backend.area.content / name) for name in others),
            *(CommitOperationDelete(name) for name in self._replaced if name not in wanted),
        ]
        try:
            self._repository.commit(operations, self._parent, self._spec.message, lambda commit: self._is_ours(commit, wanted))
        except BranchMoved:
            with suppress(OSError, StoreError):
                backend.note(_PARENT, self._repository.head())
            raise
        except StoreError as error:
            if lost := self._forget_lost(backend):
                what = f"the Hub no longer has {len(lost):,} of the uploaded files, the first is {lost[0]}"
                fix = "run again: these are computed and uploaded again"
                raise StoreError(what, where=str(self.out), details=error.finding.details, fix=fix) from error
            raise

    def _forget_lost(self, backend: FolderBackend) -> list[str]:
        """Enter in the journal which uploaded files the Hub no longer has: their names."""
        try:
            lost = self._repository.missing(self._files.uploaded)
        except StoreError:  # the first error says more
            return []
        for name in lost:
            backend.note(_UPLOADED + name, None)
        return lost

    def close(self) -> None:
        """Show progress bars of huggingface_hub again."""
        self._bars.close()


def check_free(out: HubAddress, *, overwrite: bool, reads: Sequence[str]) -> None:
    """Raise as `Staging.open` will if the output cannot be written. Changes nothing."""
    repository = HubRepository(out)
    check_not_read(out, reads)
    repository.check_token()
    head = repository.head()
    if head is None:
        return
    wanted = _contents(read_journal(staging_folder(check_out(out.local)) / JOURNAL).notes.get(_PUBLISHING))
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


def _contents(value: object) -> dict[str, Content]:
    """What a note of many files says; {} if it is none, or one of them is none."""
    if not isinstance(value, dict):
        return {}
    found = {name: content for name, each in value.items() if (content := _content(each)) is not None}
    return found if len(found) == len(value) else {}
