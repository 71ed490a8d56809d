"""A branch of a model on the Hub as the place of an output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._outputs.hub.address import HubAddress, parse_hub_address
from weightsmith._outputs.local.target import check_out
from weightsmith.abc.output import OutputScheme

if TYPE_CHECKING:
    from weightsmith._files.containers import Layout
    from weightsmith._plans.parts import Together
    from weightsmith.abc.output import OutputBackend, OutputSpec, Progress, Unfinished, Verified


class HubPlace(HubAddress):
    """See `Place`."""

    def backend(self, spec: OutputSpec) -> OutputBackend:
        """A folder on this machine, from which files are uploaded. Raises PushFailed without a network or a token."""
        from weightsmith._outputs.hub.commit import HubCommit
        from weightsmith._outputs.local.backend import FolderBackend

        return FolderBackend(check_out(self.local), replace(spec, overwrite=False, protected=()), HubCommit(self, spec))

    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str]) -> None:
        """See `Place.check_free`."""
        from weightsmith._outputs.hub.commit import check_free

        check_free(self, overwrite=overwrite, reads=reads)

    def together(self, layout: Layout) -> Together:
        """One process builds all tensors."""
        return ()

    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        """See `Place.verify`."""
        from weightsmith._outputs.hub.contents import verify_hub

        return verify_hub(self, progress)


def hub_place(text: str) -> HubPlace:
    """The place that an address names. Raises as `parse_hub_address` does."""
    found = parse_hub_address(text)
    return HubPlace(found.repo, found.branch)


def _unfinished(where: str) -> Iterator[Unfinished]:
    """In the current folder."""
    from weightsmith._outputs.local.unfinished import find_folders

    path = parse_hub_address(where).local
    return (each for each in find_folders(Path()) if str(each.out).startswith(path.name))


SCHEME = OutputScheme(hub_place, _unfinished)
