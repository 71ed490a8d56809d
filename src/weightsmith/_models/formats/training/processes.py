"""What checkpoints with a file for each process have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsmith._base.errors import FormatError, raised_at
from weightsmith._base.files import DAMAGED, Extent, FileState, of_tensor, show
from weightsmith._files.pytorch import Archive, StoredView, view_of
from weightsmith._files.state_pickle import Storage, Tensor, describe
from weightsmith._models.sources.boxes import FIX, BoxedTensor, BoxedTensors
from weightsmith._models.sources.files import SourceFile

MISSING = "Get the missing files: each process of the run has written its own."
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Classes:
    """Names of classes that pickles may have besides tensors: those that begin so, and single ones."""

    starts: tuple[str, ...]
    single: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name.startswith(self.starts) or name in self.single)


@dataclass(slots=True)
class ProcessFile:
    """A file of a process: what it holds, and the storages that were named in it."""

    path: Path
    state: FileState
    archive: Archive
    seen: dict[str, Storage] = field(default_factory=dict)

    def view(self, name: str, tensor: Any) -> StoredView:
        """A tensor of the file, checked. Raises FormatError and Unsupported."""
        with raised_at(str(self.path)):
            if type(tensor) is not Tensor:
                raise FormatError(f"{show(name)} is {describe(tensor)}, not a tensor", fix=DAMAGED)
            with of_tensor(name):
                return view_of(name, tensor, self.path, self.archive, self.seen)


class RankTensors(BoxedTensors):
    """The tensors of all processes. Where each has all of a tensor, reading it compares what they have.

    copies  name → the tensor, of each process that has all of it
    """

    def __init__(self, copies: Mapping[str, tuple[BoxedTensor, ...]], files: Sequence[SourceFile], where: str) -> None:
        super().__init__({name: tensors[0] for name, tensors in copies.items()}, files, where)
        self._copies = copies

    def location(self, name: str) -> tuple[int, int] | None:
        location = super().location(name)
        return location if len(self._copies[name]) == 1 else None

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        self._find(name)
        return tuple(extent for tensor in self._copies[name] for extent in self._extents(tensor, start_byte, nbytes))

    def _read(self, tensor: BoxedTensor, start_byte: int, out: memoryview) -> None:
        super()._read(tensor, start_byte, out)
        for copy in self._copies[tensor.spec.name][1:]:
            for i in range(0, len(out), _COMPARED_BYTES):
                values = out[i : i + _COMPARED_BYTES]
                others = memoryview(bytearray(len(values)))
                super()._read(copy, start_byte + i, others)
                if values != others:
                    what = f"tensor {show(tensor.spec.name)} has other values than in {tensor.file.name}"
                    raise FormatError(f"{what}, and each file has all of it", where=str(copy.file), fix=FIX)
