"""A model on the Hub as the target of an output: weight files are uploaded one by one, and one commit adds all files.

    merged-1a2b3c4d                       the local name of hf://org/merged; no such folder is ever made
    .merged-1a2b3c4d.weightsmith-staging/ in the current folder: lock, journal and products as for any output
      content/                            weight files that are not uploaded yet; at the end, all other files

Uploaded files are visible to nobody until one commit adds all files of the model, and deletes those of a model that it
replaces. The notes name the commit that the run began with. The Hub makes ours only on top of that one. `push` uploads a folder
that is finished.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import NOTHING_WRITTEN, NotFound, PushFailed, StoreError, first_line
from weightsmith._files.hub import UNKNOWN, open_repository
from weightsmith._files.remote.addresses import is_address
from weightsmith._files.remote.folder import RemoteFile
from weightsmith._outputs.hub_repository import (
    MAIN,
    PREFIX,
    BranchMoved,
    HubAddress,
    HubContent,
    HubRepository,
    content_of,
    is_hub_address,
    moved,
    no_bars,
    parse_hub_address,
    uploaded,
)
from weightsmith._outputs.local import occupied
from weightsmith._outputs.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    check_ours,
    compare,
    decode_manifest,
    list_files,
)
from weightsmith.abc.output import FilesGone, OutputScheme, OutputSpec, Progress, Target, Unfinished, Verified

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete


ATTRIBUTES = ".gitattributes"
"""What the Hub keeps in LFS: it creates this file, and no output replaces it."""
CARD = "README.md"
"""Replaced by a new card, and kept where the output has none: people edit it on the model's page."""


def check_vacant(repository: HubRepository, commit: str, *, overwrite: bool) -> tuple[str, ...]:
    """The files of a commit that a new model replaces: those of the model there. Raises OutputExists if others would be lost.

    With `overwrite`, files are replaced only if weightsmith's manifest, which is with them, lists all of them.
    """
    files = repository.files(commit)
    names = [name for name in files if name != ATTRIBUTES]
    if not names:
        return ()
    address = repository.address
    if not overwrite:
        fix = "choose another name or branch, or replace this model with --overwrite (overwrite=True)"
        raise occupied("the repository already holds files", address, fix, holds=names)
    others = [name for name in names if name != CARD]
    if not others:
        return ()

    def manifest() -> Manifest:
        if MANIFEST_NAME not in files:
            raise NotFound("there is no manifest", where=str(address))
        return repository.manifest(commit)

    fix = "choose another name or branch, or remove these files yourself"
    ours = check_ours(
        manifest,
        lambda manifest: [name for name in others if name not in manifest.names],
        lambda manifest: (),
        lambda why, lost: occupied(f"will not be overwritten: {why}", address, fix, lost=lost or others),
    )
    return tuple(name for name in names if name in ours.names)


def check_not_read(address: HubAddress, reads: Iterable[str]) -> None:
    """Raise PushFailed if the run reads from the branch. reads: what it reads, as the user names it."""
    for read in reads:
        if address in _models(read):
            what = f"the run reads {address.spec}, which would be replaced"
            raise PushFailed(what, where=str(address), fix="choose another name or branch", state=NOTHING_WRITTEN)


def _models(read: str) -> Iterator[HubAddress]:
    """The models on the Hub that a name may mean: a model, and its adapter after a `+`."""
    for text in read.split("+"):
        if is_hub_address(text) or not is_address(text):
            repo, _, branch = (text[len(PREFIX) :] if is_hub_address(text) else text).partition("@")
            yield HubAddress(repo.strip("/"), branch or MAIN)


def holds(files: Mapping[str, HubContent], model: Mapping[str, HubContent]) -> bool:
    """A commit with these `files` holds exactly this `model`; it may have the files that the Hub makes besides."""
    others = files.keys() - model.keys() - {ATTRIBUTES, CARD}
    return not others and all(name in files and content.is_same(files[name]) for name, content in model.items())


def verify_hub(address: HubAddress, progress: Progress | None) -> Verified:
    """Compare every byte of a model on the Hub with its manifest. Raises NotFound without one, Corrupt for differences."""
    repository = open_repository(address.repo, address.branch)
    present = {name: nbytes for name, nbytes in repository.sizes.items() if name != ATTRIBUTES}
    if UNKNOWN in present.values():
        fix = "download the model, and verify its folder"
        raise NotFound("the Hub does not list the sizes of the files", where=str(address), fix=fix)
    where = f"{address}/{MANIFEST_NAME}"
    if present.get(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1) > MAX_MANIFEST_BYTES:
        fix = "name a model that weightsmith wrote"
        raise NotFound("there is no manifest to compare with", where=where, fix=fix)

    @cache
    def file(name: str) -> RemoteFile:
        return RemoteFile(repository.ranges(name))

    def read(name: str, start: int, nbytes: int) -> bytes:
        data = bytearray(max(0, min(nbytes, present[name] - start)))
        file(name).read_into(start, memoryview(data))
        return bytes(data)

    manifest = decode_manifest(read(MANIFEST_NAME, 0, present[MANIFEST_NAME]), where)
    return compare(str(address), manifest, present, read, progress)


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

    def _is_ours(self, commit: str, new: Mapping[str, HubContent]) -> bool:
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

    def _commit(self, content: Path, put: Mapping[str, HubContent], others: Mapping[str, HubContent]) -> None:
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

    def _gone(self, put: Mapping[str, HubContent]) -> list[str]:
        """The uploaded files that the Hub no longer has."""
        try:
            return self._repository.missing(put)
        except StoreError:  # the first error says more
            return []

    def close(self) -> None:
        """Show progress bars of huggingface_hub again."""
        self._bars.close()


def _content(value: object) -> HubContent | None:
    """What a note of a file says; None if it is none."""
    match value:
        case [int(nbytes), str(sha256)]:
            content = HubContent(nbytes, "", sha256)
        case [int(nbytes), str(sha1), str(sha256)]:
            content = HubContent(nbytes, sha1, sha256)
        case _:
            return None
    return content if _SHA1.fullmatch(content.sha1) and _SHA256.fullmatch(content.sha256) else None


def _contents(value: object) -> dict[str, HubContent]:
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
    from weightsmith._outputs.places import find_folders

    path = parse_hub_address(where).local
    return (work for work in find_folders(Path()) if str(work.out).startswith(path.name))


SCHEME = OutputScheme(hub_target, _unfinished)


def check_push(spec: str) -> HubRepository:
    """Check, before hours of work, that a model may be pushed: a valid name, a network, a token that the Hub accepts.

    spec  org/name, or org/name@branch

    Raises PushFailed.
    """
    try:
        repository = HubRepository(parse_hub_address(spec))
        repository.check_token()
    except PushFailed as error:
        error.state = NOTHING_WRITTEN
        raise
    return repository


def push(repository: HubRepository, folder: Path, *, public: bool, message: str) -> str:
    """Upload a finished folder: the address of the model. Files of other names in the repository stay.

    public   who may see a repository that is created now; one that exists stays as visible as it is
    message  of the commit

    Raises PushFailed, which says how to upload the folder again.
    """
    import shlex

    address = repository.address
    try:
        repository.create(public=public)
        repository.api.upload_folder(repo_id=address.repo, folder_path=folder, revision=address.branch, commit_message=message)
    except (Exception, KeyboardInterrupt) as error:
        command = ["hf", "upload", address.repo, str(folder), ".", *([] if public else ["--private"])]
        command += [] if address.branch == MAIN else ["--revision", address.branch]
        details = error.finding.details if isinstance(error, PushFailed) else (f"{type(error).__name__}: {first_line(error)}",)
        raise PushFailed(
            "the upload was interrupted" if isinstance(error, KeyboardInterrupt) else "the upload failed",
            where=str(address),
            details=() if isinstance(error, KeyboardInterrupt) else details,
            fix=f"upload it again: `{shlex.join(command)}`",
            state=f"The output is finished and complete in {folder}",
        ) from error
    return address.url
