"""What is in a branch on the Hub: what may be replaced, and what must not be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from weightsmith._base.errors import NOTHING_WRITTEN, NotFound, PushFailed
from weightsmith._files.hub import UNKNOWN, open_repository
from weightsmith._files.remote.addresses import is_address
from weightsmith._files.remote.folder import RemoteFile
from weightsmith._outputs.compare import check_ours, compare
from weightsmith._outputs.hub.address import MAIN, SCHEME, HubAddress, is_hub_address
from weightsmith._outputs.hub.repository import Content, HubRepository
from weightsmith._outputs.local.target import occupied
from weightsmith._outputs.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, decode_manifest
from weightsmith.abc.output import Progress, Verified

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
            repo, _, branch = (text[len(SCHEME) :] if is_hub_address(text) else text).partition("@")
            yield HubAddress(repo.strip("/"), branch or MAIN)


def holds(files: Mapping[str, Content], model: Mapping[str, Content]) -> bool:
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
        raise NotFound("there is no manifest, so nothing to compare with", where=where, fix=fix)

    @cache
    def file(name: str) -> RemoteFile:
        return RemoteFile(repository.ranges(name))

    def read(name: str, start: int, nbytes: int) -> bytes:
        data = bytearray(max(0, min(nbytes, present[name] - start)))
        file(name).read_into(start, memoryview(data))
        return bytes(data)

    manifest = decode_manifest(read(MANIFEST_NAME, 0, present[MANIFEST_NAME]), where)
    return compare(str(address), manifest, present, read, progress)
