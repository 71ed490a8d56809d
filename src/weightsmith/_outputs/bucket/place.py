"""A prefix in a bucket as the place of an output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._outputs.bucket.prefix import Prefix, parse_prefix
from weightsmith.abc.output import OutputScheme

if TYPE_CHECKING:
    from weightsmith._files.containers import Layout
    from weightsmith._plans.parts import Together
    from weightsmith.abc.output import OutputBackend, OutputSpec, Progress, Unfinished, Verified


class BucketPlace(Prefix):
    """See `Place`."""

    def backend(self, spec: OutputSpec) -> OutputBackend:
        """Raises StoreError without the library of the store."""
        from weightsmith._outputs.bucket.backend import BucketBackend

        return BucketBackend(self, spec)

    def check_free(self, *, overwrite: bool, protected: Sequence[Path], reads: Sequence[str]) -> None:
        """See `Place.check_free`."""
        from weightsmith._outputs.bucket.unfinished import check_free

        check_free(self, overwrite=overwrite, reads=reads)

    def together(self, layout: Layout) -> Together:
        """The tensors of a group: see `bucket.parts`."""
        from weightsmith._outputs.bucket.backend import together

        return together(self, layout)

    def verify(self, *, threads: int, progress: Progress | None) -> Verified:
        """See `Place.verify`."""
        from weightsmith._outputs.bucket.contents import verify_bucket

        return verify_bucket(self, progress)


def bucket_place(text: str) -> BucketPlace:
    """The place that an address names. Raises as `parse_prefix` does."""
    found = parse_prefix(text)
    return BucketPlace(found.scheme, found.bucket, found.prefix)


def _unfinished(where: str) -> Iterator[Unfinished]:
    from weightsmith._outputs.bucket.unfinished import find_uploads

    return find_uploads(parse_prefix(where, folder=True))


SCHEME = OutputScheme(bucket_place, _unfinished)
