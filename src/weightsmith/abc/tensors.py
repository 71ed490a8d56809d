"""The interface of every source of tensors, and the checks that all sources share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from weightsmith._base.errors import CheckpointError, Finding, NotFound, ParameterError, nearest
from weightsmith._base.files import Extent, Opener, show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.hf_folder import FolderWeights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Buffer = memoryview | npt.NDArray[np.uint8]
    """Writable, C-contiguous bytes."""


class Tensors(Protocol):
    """A source: tensors by name, read on demand.

    Unknown names raise NotFound, byte ranges outside a tensor ParameterError, and reads after `close` CheckpointError.
    `weightsmith.testing.SourceTests` checks all of this for a kind of source.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → dtype and shape, in model order: names sorted with their numbers as numbers."""

    @property
    def identity(self) -> str:
        """Hash of names, headers and sizes, which a plan depends on. Equal for a copy of the same files."""

    @property
    def state(self) -> str:
        """Hash of the identity and of each file's inode and change time, which interrupted work depends on.

        Differs if a file was replaced by another of equal size and modification time (cp -p, rsync -t, tar x).
        """

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the source, in natural order."""

    def read_into(self, name: str, start_byte: int, out: Buffer) -> None:
        """Fill `out` with the tensor's bytes from `start_byte` on. Thread-safe.

        Raises CheckpointError for an I/O error and for a file that has changed since it was opened.
        """

    def location(self, name: str) -> tuple[int, int] | None:
        """(file descriptor, offset of the tensor's first byte in that file), for `os.copy_file_range` and the like.

        The descriptor belongs to the source and stays open until `close`. None for a tensor that is not stored as plain bytes.
        """

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """The parts of remote files that are read for these bytes of a tensor, at most; () if all of it is on this disk.

        They are fetched ahead, and counted before anything is read.
        """

    def preferred_rows(self, name: str) -> int:
        """The number of rows to read at once so that no byte is read twice: 1 for plain bytes, more for blocked formats."""

    def natural_dtype(self, name: str) -> DType:
        """The default output dtype of the tensor."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError, naming the file, if a file differs from when it was opened.

        Compares device, inode, size, mtime_ns and ctime_ns of descriptors and paths. Reading changes none of these.
        """

    def close(self) -> None:
        """Close all files, once no thread reads any more. May be called twice."""


def spec_of(specs: Mapping[str, TensorSpec], name: str, where: str) -> TensorSpec:
    """The spec of a tensor. Raises NotFound for an unknown name."""
    try:
        return specs[name]
    except KeyError:
        raise NotFound(f"no tensor {show(name)}{nearest(name, specs)}", where=where) from None


def check_range(spec: TensorSpec, start_byte: int, count: int, where: str) -> None:
    """Raise ParameterError unless `count` bytes from `start_byte` lie inside the tensor."""
    if start_byte < 0 or start_byte + count > spec.nbytes:
        raise ParameterError(
            f"bytes {start_byte:,} to {start_byte + count:,} are not inside tensor {show(spec.name)} of {spec.nbytes:,} bytes",
            where=where,
        )


def byte_view(out: Buffer) -> memoryview:
    """A buffer as a memoryview of bytes."""
    return (out if isinstance(out, memoryview) else out.data).cast("B")


def closed(where: str) -> CheckpointError:
    """The error of a read after `close`."""
    return CheckpointError("this checkpoint is closed", where=where, fix="Open it again.")


def digest(facts: object) -> str:
    """xxh3_128 of JSON values, hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, separators=(",", ":")).encode())


def read(source: Tensors, name: str, rows: slice | None = None, *, where: str = "") -> np.ndarray:
    """A tensor as a new numpy array, in the machine's byte order (ml_dtypes for bf16 and fp8).

    rows   a slice with step 1 along the first dimension; only these rows are read
    where  the source, for messages

    Raises ParameterError for another step and for rows of a 0-d tensor, else as `Tensors.read_into`.
    """
    import numpy as np

    spec = spec_of(source.specs, name, where)
    shape, start_byte = spec.shape, 0
    if rows is not None:
        if not shape:
            raise ParameterError(f"tensor {show(name)} has no rows: its shape is []")
        start, stop, step = rows.indices(shape[0])
        if step != 1:
            raise ParameterError(f"tensor {show(name)}: the step of rows must be 1, not {step}")
        row_bytes = spec.nbytes // max(1, shape[0])
        shape, start_byte = (max(0, stop - start), *shape[1:]), start * row_bytes
    array = np.empty(shape, dtype=spec.dtype.numpy)
    raw = array.reshape(-1).view(np.uint8)
    if raw.size:
        source.read_into(name, start_byte, raw)
        if sys.byteorder == "big" and spec.dtype.itemsize > 1:
            raw.view(f"u{spec.dtype.itemsize}").byteswap(inplace=True)
    return array


# ---- The description of a file format, which a stored format lists in `StoredFormat.files`


Index = tuple[Path, Mapping[str, str]]
"""The path of an index file, and its map of tensor name → file name."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where a file has a tensor, or a part of one.

    tensor  of the file, by its name there
    dtype   in the file; it may be a type of blocks
    first   element of the file's tensor, as `Verbatim.source` gives it, that is the first
    """

    tensor: str
    dtype: DType
    first: int = 0


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a file has a tensor of the model.

    encoding  that would store it so, by its name; "": none that is known, or its numbers are not those of the file
    parts     what the encoding's stored tensors are in the file, one for each
    order     of its rows or columns in the file; None: that of the model
    types     what the file says of the types of all its tensors
    decoded   its numbers are computed from codes
    """

    encoding: str
    parts: tuple[StoredPart, ...]
    order: object = None
    types: object = None
    decoded: bool = False


@dataclass(frozen=True, slots=True)
class Verbatim:
    """What files hold as the files have it, for an output of the same format that keeps it.

    source     under the files' names; types of blocks as U8, a row of bytes for each row
    stored_as  (a name of the decoded model) → how the files have the tensor; None: not so that it can be copied
    header     of the files, in the words of their format: what `OpenedFiles.files` say in others
    """

    source: Tensors
    stored_as: Callable[[str], StoredAs | None]
    header: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """Open weight files.

    source    their tensors
    metadata  the files' metadata
    notes     warnings for the user
    files     config.json, the tokenizer and other files, of a format whose weight files contain all of the model: name →
              content. They take the place of what is in the folder
    card      what the files say of the model: its name, licence and origin, with the keys of a model card's front matter
    decoded   the quantisation of the weights, which the source decodes; "" if there is none
    verbatim  the tensors as the files have them; None: `source` has them so
    """

    source: Tensors
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Finding, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)
    decoded: str = ""
    verbatim: Verbatim | None = None


@dataclass(frozen=True, slots=True)
class FileKind:
    """A file format.

    name      for messages: `safetensors`
    suffixes  of its weight files, lower case; a path with such a suffix is opened as a single file
    indexes   patterns of its index files, which are downloaded first to determine the weight files
    choose    the weight files among the files of a folder: (names, where for messages) → None if there are none of this
              format (as with an adapter). Looks only at names, so it works before a hub repository is downloaded. Raises
              FormatError for files that contradict each other
    open      the tensors of its files: (paths, index or None, the model as the user named it, opener of files). Reads only
              headers. Raises FormatError, Unsupported, NotFound, CheckpointError
    joins     its files are those of the processes of a training run, each with parts of tensors
    owns      whether a file is one of its own, judged by its path, whatever its suffix
    """

    name: str
    suffixes: tuple[str, ...]
    indexes: tuple[str, ...]
    choose: Callable[[Sequence[str], str], FolderWeights | None]
    open: Callable[[Sequence[Path], Index | None, str, Opener], OpenedFiles]
    joins: bool = False
    owns: Callable[[Path], bool] = lambda path: False
