"""PyTorch's zip checkpoints: .bin, .pt, .pth and .ckpt, one file or shards. Executes no code from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import Extent, Opener, open_local
from weightsmith._files.copied import TRAINING
from weightsmith._files.hf_folder import Weights, choose_weights
from weightsmith._files.pytorch import SUFFIXES, StoredView, read_pickle_header, read_view
from weightsmith._models.sources.files import FileTensors, SourceFile, unite
from weightsmith.abc.files import FileKind, Index, Opened

STRIDED_BYTES = 2 << 20
"""Bytes to read at once from a tensor whose rows are scattered: each read may scan its whole storage."""

_FIRST = ("pytorch_model.bin", "diffusion_pytorch_model.bin")  # what transformers and diffusers write
_SLICED = re.compile(r"consolidated\.\d+\.pth")


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


def choose(names: Sequence[str], where: str) -> Weights | None:
    """The PyTorch files that hold the model, or None. Optimizer states and similar files are not weights.

    Raises Unsupported for Meta's `consolidated.00.pth`, `.01.pth`, …, which hold slices of each tensor, else as
    `choose_weights`.
    """
    chosen = choose_weights([n for n in names if not TRAINING.fullmatch(n.lower())], where, SUFFIXES, _FIRST)
    if chosen is not None and sum(_SLICED.fullmatch(name) is not None for name in chosen.files) > 1:
        raise Unsupported(
            f"{chosen.files[0]} and similar files hold slices of each tensor, one per device",
            where=where,
            fix="Use the same model's checkpoint in transformers' format.",
        )
    return chosen


def open_files(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> Opened:
    """The tensors of PyTorch files; paths in natural order. Reads and checks only pickles and zip directories.

    Raises as `read_pickle_header` and `unite`.
    """
    headers = {path: read_pickle_header(path, open_file) for path in paths}
    stored = unite((header.tensors for header in headers.values()), paths[0].parent, index)
    files = [SourceFile(path, header.state, header.digest) for path, header in headers.items()]
    notes = tuple(note for header in headers.values() for note in header.notes)
    return Opened(StoredViews(stored, files, where), notes=notes)


KIND = FileKind("PyTorch", SUFFIXES, tuple(f"*{suffix}.index.json" for suffix in SUFFIXES), choose, open_files)
