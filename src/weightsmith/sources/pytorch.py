"""PyTorch's zip checkpoints: .bin, .pt, .pth and .ckpt, one file or shards. Nothing in them is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith.errors import Unsupported
from weightsmith.formats.carried import TRAINING
from weightsmith.formats.hf_folder import Weights, choose_weights, natural_key
from weightsmith.formats.pytorch import SUFFIXES, StoredView, read_pickle_header, read_view
from weightsmith.sources.base import byte_view, check_range, spec_of
from weightsmith.sources.files import SourceFile, SourceFiles, unite
from weightsmith.sources.kind import Index, Kind, Opened
from weightsmith.tensors import DType, TensorSpec

if TYPE_CHECKING:
    from weightsmith.sources.base import Buffer

STRIDED_BYTES = 2 << 20
"""Of a tensor whose rows are not together in the file: what is best read at once, since each read may sweep its storage."""

_FIRST = ("pytorch_model.bin", "diffusion_pytorch_model.bin")  # what transformers and diffusers write
_SLICED = re.compile(r"consolidated\.\d+\.pth")


class StoredViews:
    """A source whose tensors are views of storages in files: transposed, sliced, expanded, or plain runs of bytes.

    stored  name → the view; names that share a storage are tensors of their own, as they are in the file
    files   every file that `stored` names, in natural order
    where   the model as the user named it, for messages
    """

    def __init__(self, stored: Mapping[str, StoredView], files: Sequence[SourceFile], where: str) -> None:
        self.specs: Mapping[str, TensorSpec] = {name: stored[name].spec for name in sorted(stored, key=natural_key)}
        self._stored = stored
        self._where = where
        self._files = SourceFiles(files, where)
        self.paths, self.identity, self.state = self._files.paths, self._files.identity, self._files.state

    def kept_as(self, name: str) -> DType:
        return spec_of(self.specs, name, self._where).dtype

    def preferred_rows(self, name: str) -> int:
        spec = spec_of(self.specs, name, self._where)
        if self._stored[name].contiguous:
            return 1
        row_bytes = spec.shape[-1] * spec.dtype.itemsize
        return max(1, min(spec.nbytes, STRIDED_BYTES) // row_bytes)

    def location(self, name: str) -> tuple[int, int] | None:
        spec_of(self.specs, name, self._where)
        view = self._stored[name]
        return (self._files.fd(view.file), view.start) if view.contiguous else None

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        spec = spec_of(self.specs, name, self._where)
        view, into = self._stored[name], byte_view(out)
        check_range(spec, start_byte, len(into), str(view.file))
        read_view(partial(self._files.read, view.file, name), view, start_byte, into)

    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    def close(self) -> None:
        self._files.close()


def choose(names: Sequence[str], where: str) -> Weights | None:
    """Which PyTorch files hold the model; None where there are none. What a training run leaves beside a model is not weights.

    Raises Unsupported for Meta's `consolidated.00.pth`, `.01.pth`, …, which hold slices of each tensor, else as
    `choose_weights`.
    """
    chosen = choose_weights([n for n in names if not TRAINING.fullmatch(n.lower())], where, SUFFIXES, _FIRST)
    if chosen is not None and sum(_SLICED.fullmatch(name) is not None for name in chosen.files) > 1:
        raise Unsupported(
            f"{chosen.files[0]} and the files like it hold slices of each tensor, one for each device",
            where=where,
            fix="Use the checkpoint in transformers' format of the same model.",
        )
    return chosen


def open_files(paths: Sequence[Path], index: Index | None, where: str) -> Opened:
    """The tensors of PyTorch files; paths in natural order. Reads pickles and zip directories only, and checks them.

    Raises as `read_pickle_header` and `unite`.
    """
    headers = {path: read_pickle_header(path) for path in paths}
    stored = unite((header.tensors for header in headers.values()), paths[0].parent, index)
    files = [SourceFile(path, header.state, header.digest) for path, header in headers.items()]
    notes = tuple(note for header in headers.values() for note in header.notes)
    return Opened(StoredViews(stored, files, where), notes=notes)


KIND = Kind("PyTorch", SUFFIXES, tuple(f"*{suffix}.index.json" for suffix in SUFFIXES), choose, open_files)
