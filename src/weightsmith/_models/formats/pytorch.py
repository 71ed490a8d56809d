"""PyTorch's zip checkpoints, one file or shards, which are read without executing code from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from weightsmith._base.files import Extent, Opener, open_local
from weightsmith._files.pytorch import StoredView, read_pickle_header, read_view
from weightsmith._models.sources.files import FileTensors, SourceFile, unite
from weightsmith.abc.tensors import Index, OpenedFiles

STRIDED_BYTES = 2 << 20
"""Bytes to read at once from a tensor whose rows are scattered: each read may scan its whole storage."""


class StoredViews(FileTensors[StoredView]):
    """A source whose tensors are views of storages in files: transposed, sliced, expanded or contiguous.

    Names that share a storage are separate tensors.
    """

    def preferred_rows(self, name: str) -> int:
        view = self._find(name)
        if view.contiguous:
            return 1
        row_bytes = view.spec.shape[-1] * view.spec.dtype.itemsize
        return max(1, min(view.spec.nbytes, STRIDED_BYTES) // row_bytes)

    def location(self, name: str) -> tuple[int, int] | None:
        view = self._find(name)
        return self._files.location(view.file, view.start) if view.contiguous else None

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        view = self._find(name)
        if view.contiguous:
            return self._files.extents(view.file, view.start + start_byte, nbytes)
        return self._files.extents(view.file, view.start, view.span)

    def _read(self, tensor: StoredView, start_byte: int, out: memoryview) -> None:
        read_view(partial(self._files.read, tensor.file, tensor.spec.name), tensor, start_byte, out)


def open_pytorch(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors of PyTorch files; paths in natural order. Reads and checks only pickles and zip directories.

    Raises as `read_pickle_header` and `unite`.
    """
    headers = {path: read_pickle_header(path, open_file) for path in paths}
    stored = unite((header.tensors for header in headers.values()), paths[0].parent, index)
    files = [SourceFile(path, header.state, header.digest) for path, header in headers.items()]
    notes = tuple(note for header in headers.values() for note in header.notes)
    settings = {key: text for header in headers.values() for key, text in header.metadata.items()}
    return OpenedFiles(StoredViews(stored, files, where), settings, notes=notes)
