"""What is in a branch on the Hub: what may be replaced, and what must not be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from weightsmith._base.errors import NOTHING_WRITTEN, OutputExists, PushFailed, WeightsmithError
from weightsmith._files.remote.addresses import is_address
from weightsmith._outputs.hub.address import MAIN, SCHEME, HubAddress, is_hub_address
from weightsmith._outputs.hub.repository import Content, HubRepository
from weightsmith._outputs.local.target import occupied
from weightsmith._outputs.manifest import MANIFEST_NAME

ATTRIBUTES = ".gitattributes"
"""What the Hub keeps in LFS: it creates this file, and no output replaces it."""
CARD = "README.md"
"""Replaced by a new card, and kept where the output has none: people edit it on the model's page."""


def check_vacant(repository: HubRepository, commit: str, *, overwrite: bool) -> tuple[str, ...]:
    """The files of a commit that a new model replaces: those of the model there. Raises OutputExists if others would be lost.

    With `overwrite`, files are replaced only if weightsmith's manifest, which is with them, lists all of them.
    """
    found = repository.files(commit)
    names = [name for name in found if name != ATTRIBUTES]
    if not names:
        return ()
    address = repository.address
    if not overwrite:
        fix = "choose another name or branch, or replace this model with --overwrite (overwrite=True)"
        raise occupied("the repository already holds files", address, fix, holds=names)
    listed: set[str] = set()
    if MANIFEST_NAME in found:
        try:
            manifest = repository.manifest(commit)
        except PushFailed:
            raise
        except WeightsmithError as error:
            raise _kept(address, f"its manifest cannot be used: {error.finding.what}") from error
        listed = {MANIFEST_NAME, *manifest.weights, *manifest.files}
    if lost := [name for name in names if name not in listed and name != CARD]:
        raise _kept(address, "it holds what no manifest of weightsmith lists, and that would be lost", lost)
    return tuple(name for name in names if name in listed)


def _kept(address: HubAddress, reason: str, lost: Sequence[str] = ()) -> OutputExists:
    fix = "choose another name or branch, or remove these files yourself"
    return occupied(f"will not be overwritten: {reason}", address, fix, lost=lost)


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


def holds(found: Mapping[str, Content], wanted: Mapping[str, Content], *, other: Collection[str] = (ATTRIBUTES, CARD)) -> bool:
    """A commit with the files `found` holds exactly the model `wanted`. other: names that it may have besides."""
    return all(name in found and content.is_same(found[name]) for name, content in wanted.items()) and not (
        found.keys() - wanted.keys() - {*other}
    )
