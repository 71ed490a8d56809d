"""A model on the Hub as the target of an output: weight files are uploaded one by one, and one commit adds all files.

    merged-1a2b3c4d                       the local name of hf://org/merged; no such folder is ever made
    .merged-1a2b3c4d.weightsmith-staging/ in the current folder: lock, journal and products as for any output
      content/                            weight files that are not uploaded yet; at the end, all other files

Uploaded files are visible to nobody until one commit adds all files of the model, and deletes those of a model that it
replaces. The notes name the commit that the run began with. The Hub makes ours only on top of that one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import StoreError
from weightsmith._outputs.hub.address import HubAddress, parse_hub_address
from weightsmith._outputs.hub.contents import check_not_read, check_vacant, holds, verify_hub
from weightsmith._outputs.hub.repository import BranchMoved, Content, HubRepository, content_of, moved, no_bars, uploaded
from weightsmith._outputs.manifest import list_files
from weightsmith.abc.output import FilesGone, OutputScheme, OutputSpec, Progress, Target, Unfinished, Verified

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_PARENT, _PUBLISHING = "parent", "publishing"
"""Keys of notes: the commit to build on; what was about to be committed."""
_SHA1, _SHA256 = re.compile("[0-9a-f]{40}|"), re.compile("[0-9a-f]{64}|")


class HubTarget(Target):
    """A branch on the Hub."""

    publication = "commit"

    def __init__(self, address: HubAddress) -> None:
        """Send nothing."""
        self.address = address
        self._notes: MutableMapping[str, Any] = {}
        self._spec: OutputSpec
        self._repository: HubRepository
        self._parent = ""
        self._replaced: tuple[str, ...] = ()
        self._is_committed = False
        self._bars = ExitStack()

    def __str__(self) -> str:
        return str(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HubTarget) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    @property
    def name(self) -> str:
        """The name without the organisation."""
        return self.address.name

    @property
    def spec(self) -> str:
        """As `--push` takes it."""
        return self.address.spec

    @property
    def url(self) -> str:
        """The address of the model's page."""
        return self.address.url

    @property
    def local(self) -> Path:
        """A name in the current folder, which no other address, and no other Hub, has."""
        return self.address.local

    # what is there

    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str], notes: Mapping[str, Any]) -> None:
        repository = HubRepository(self.address)
        check_not_read(self.address, reads)
        repository.check_token()
        head = repository.head()
        if head is None:
            return
        new, parent = _contents(notes.get(_PUBLISHING)), notes.get(_PARENT)
        if isinstance(parent, str) and parent != head:
            return  # `connect` says what has changed
        if not new or not holds(repository.files(head), new):
            check_vacant(repository, head, overwrite=overwrite)

    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        return verify_hub(self.address, progress)

    def connect(self, spec: OutputSpec, notes: MutableMapping[str, Any], files: Mapping[str, Any]) -> Collection[str]:
        """Create repository and branch if they are missing, and find out what is there.

        Raises PushFailed if the hub cannot be used, or if the branch has changed since an interrupted run began.
        """
        self._spec, self._notes = spec, notes
        self._repository = HubRepository(self.address)
        self._bars.enter_context(no_bars())
        try:
            self._find_parent()
        except StoreError as error:
            if created := self._repository.created:
                error.state = error.state or f"Nothing was uploaded. {created}"
            raise
        return [name for name, value in files.items() if _content(value) is None]

    def _find_parent(self) -> None:
        notes, head = self._notes, self._repository.create(public=self._spec.public)
        parent = notes.get(_PARENT)
        if isinstance(parent, str) and parent != head:
            new = _contents(notes.get(_PUBLISHING))
            ours = self._repository.since(parent, lambda commit: self._is_ours(commit, new)) if new else ""
            if ours == head:
                self._parent, self._is_committed = head, True  # the run was interrupted after its commit
                self._replaced = tuple(new)
                return
            notes[_PARENT] = head
            raise moved(self.address, ours or parent, head, committed=bool(ours))
        self._parent = head
        self._replaced = check_vacant(self._repository, head, overwrite=self._spec.overwrite)
        if parent is None:
            notes[_PARENT] = head

    def _is_ours(self, commit: str, new: Mapping[str, Content]) -> bool:
        return bool(new) and holds(self._repository.files(commit), new)

    # finished files

    def put(self, name: str, file: Path) -> Any:
        addition = self._repository.upload(file, name)
        return [file.stat().st_size, addition.upload_info.sha256.hex()]

    def publish(self, content: Path, files: Mapping[str, Any], *, fsync: bool) -> None:
        """Commit all files at once. Raises BranchMoved if someone else has committed meanwhile. What is uploaded stays."""
        put = _contents(files)
        others = {name: content_of(content / name) for name in list_files(content)}
        new = put | others
        self._notes[_PUBLISHING] = {name: list(content_now) for name, content_now in new.items()}
        if not (self._is_committed and self._is_ours(self._parent, new)):
            self._commit(content, put, others)

    def _commit(self, content: Path, put: Mapping[str, Content], others: Mapping[str, Content]) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        new = {**put, **others}
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(uploaded(name, put_content) for name, put_content in put.items()),
            *(CommitOperationAdd(name, content / name) for name in others),
            *(CommitOperationDelete(name) for name in self._replaced if name not in new),
        ]
        try:
            self._repository.commit(operations, self._parent, self._spec.message, lambda commit: self._is_ours(commit, new))
        except BranchMoved:
            with suppress(OSError, StoreError):
                self._notes[_PARENT] = self._repository.head()
            raise
        except StoreError as error:
            if gone := self._gone(put):
                what = f"the Hub no longer has {len(gone):,} of the uploaded files, the first is {gone[0]}"
                fix = "run again: these are computed and uploaded again"
                lost = FilesGone(what, where=str(self), details=error.finding.details, fix=fix)
                lost.names = gone
                raise lost from error
            raise

    def _gone(self, put: Mapping[str, Content]) -> list[str]:
        """The uploaded files that the Hub no longer has."""
        try:
            return self._repository.missing(put)
        except StoreError:  # the first error says more
            return []

    def close(self) -> None:
        """Show progress bars of huggingface_hub again."""
        self._bars.close()


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
    if not isinstance(value, Mapping):
        return {}
    known = {name: content for name, note in value.items() if (content := _content(note)) is not None}
    return known if len(known) == len(value) else {}


def hub_target(text: str) -> HubTarget:
    """The target that an address names. Raises as `parse_hub_address` does."""
    return HubTarget(parse_hub_address(text))


def _unfinished(where: str) -> Iterator[Unfinished]:
    """In the current folder."""
    from weightsmith._outputs.unfinished import find_folders

    path = parse_hub_address(where).local
    return (work for work in find_folders(Path()) if str(work.out).startswith(path.name))


SCHEME = OutputScheme(hub_target, _unfinished)
