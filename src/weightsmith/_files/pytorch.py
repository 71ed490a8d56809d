"""PyTorch's zip checkpoints (.bin, .pt, .pth, .ckpt): which tensors a file holds, and where their bytes are.

    <name>/data.pkl      the pickle: the state dict, its tensors as views of storages
    <name>/data/<key>    the bytes of one storage, uncompressed
    <name>/byteorder     `little`; older files have none

The pickle is read as data and never run (`state_pickle`). What has no plain state dict inside is refused with what can be
done about it: older formats, TorchScript, whole modules, sparse and quantised tensors. No tensor data is read.

A tensor is row-major and contiguous here; its storage is not, if it was transposed, sliced or expanded. A range of its bytes is
then gathered with few, bounded reads. The range is cut into boxes (whole rows, whole matrices, and what is left at both ends).
In a box the dimensions of small strides are read at once, with the gaps between their elements, as long as the gaps are cheaper
to read than to skip and all of it fits into 1 MiB; over the others it loops.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from weightsmith._base.errors import Finding, FormatError, Unsupported, raised_at
from weightsmith._base.files import (
    DAMAGED,
    RESAVE,
    FileState,
    Opener,
    RandomAccess,
    lookalike,
    of_tensor,
    open_local,
    show,
    show_all,
)
from weightsmith._base.tensors import BY_TORCH_NAME, DType, TensorSpec
from weightsmith._files.safetensors import MAX_BYTES, MAX_DIMENSIONS, checked_product
from weightsmith._files.state_pickle import (
    CONVERT,
    MAX_PICKLE_BYTES,
    STORAGES,
    Global,
    Mapping,
    Storage,
    Tensor,
    describe,
    interpret,
)
from weightsmith._files.zip_records import Record, read_at, read_records

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


SPAN_BYTES = 1 << 20
"""What is read at once, gaps included."""
GAP_BYTES = 16 << 10
"""A gap of at most this many bytes is read, a longer one is skipped: a call costs as much as copying about 10 kB."""

ReadAt = Callable[[int, memoryview], None]
"""(offset in the file, buffer): fills the buffer, or raises."""


def simplify(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides without dimensions of 1, neighbours joined where they are contiguous. For non-empty tensors.

    >>> simplify((2, 1, 3, 4), (24, 5, 4, 1))
    ((2, 12), (24, 1))
    """
    dims: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * stride:
            dims[-1] = (dims[-1][0] * n, stride)
        else:
            dims.append((n, stride))
    return tuple(n for n, _ in dims), tuple(stride for _, stride in dims)


def gather(
    read_at: ReadAt, offset: int, itemsize: int, shape: Sequence[int], strides: Sequence[int], start_byte: int, out: memoryview
) -> None:
    """Fill `out` with the logical bytes of a non-empty strided tensor from `start_byte` on.

    offset   of its first element in the file, in bytes
    strides  in elements, none negative
    out      writable bytes; the range must lie inside the tensor, and may begin and end within an element

    Memory: SPAN_BYTES. Raises what `read_at` raises.
    """
    import numpy as np

    shape, strides = simplify(shape, strides)
    strides = tuple(stride * itemsize for stride in strides)
    element, skipped = divmod(start_byte, itemsize)
    if skipped or len(out) < itemsize:
        one = np.empty(1, f"u{itemsize}")
        _gather_elements(read_at, offset, shape, strides, element, one)
        head = memoryview(one.tobytes())[skipped : skipped + len(out)]
        out[: len(head)] = head
        out, element = out[len(head) :], element + 1
    whole = len(out) // itemsize
    if whole:
        _gather_elements(read_at, offset, shape, strides, element, np.frombuffer(out, f"u{itemsize}", whole))
    if rest := len(out) - whole * itemsize:
        gather(read_at, offset, itemsize, shape, [s // itemsize for s in strides], (element + whole) * itemsize, out[-rest:])


def _gather_elements(
    read_at: ReadAt,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    start: int,
    out: npt.NDArray[np.unsignedinteger[Any]],
) -> None:
    """As `gather`, in elements: `out` from element `start` on."""
    done = 0
    for index, box in boxes_of_range(shape, start, start + len(out)):
        n = math.prod(box)
        first = offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
        gather_box(read_at, first, strides, out[done : done + n].reshape(box))
        done += n


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(index, shape) of the boxes that follow each other in the flat range, at most two for each dimension.

    >>> list(boxes_of_range((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while start < end:
        # The outermost axis of which one step begins here and fits.
        axis = next((k for k, n in enumerate(inner) if start % n == 0 and end - start >= n), None)
        if axis is None:  # no dimension: a single element
            yield (), ()
            return
        index = tuple(start // n % dim for n, dim in zip(inner, shape, strict=True))
        count = min((end - start) // inner[axis], shape[axis] - index[axis])
        yield index, (1,) * axis + (count,) + shape[axis + 1 :]
        start += count * inner[axis]


def gather_box(read_at: ReadAt, offset: int, strides: tuple[int, ...], out: npt.NDArray[np.unsignedinteger[Any]]) -> None:
    """Fill an array from elements that lie `strides` bytes apart, the first at `offset`."""
    import numpy as np

    span = out.itemsize  # bytes of one read
    steps = [1] * out.ndim  # how far each dimension advances from one read to the next
    for axis in sorted(range(out.ndim), key=lambda k: strides[k]):
        n, stride = out.shape[axis], strides[axis]
        if n == 1 or stride == 0:
            steps[axis] = n
            continue
        if stride - span > GAP_BYTES:
            break
        steps[axis] = min(n, max(1, 1 + (SPAN_BYTES - span) // stride))
        span += (steps[axis] - 1) * stride
        if steps[axis] < n:
            break
    buffer = memoryview(bytearray(span))
    for starts in itertools.product(*(range(0, n, step) for n, step in zip(out.shape, steps, strict=True))):
        places: list[Any] = [slice(start, start + step) for start, step in zip(starts, steps, strict=True)]
        target = out[(..., *places)]  # an array even without dimensions
        nbytes = out.itemsize + sum((n - 1) * stride for n, stride in zip(target.shape, strides, strict=True))
        read_at(offset + sum(start * stride for start, stride in zip(starts, strides, strict=True)), buffer[:nbytes])
        target[...] = np.ndarray(target.shape, out.dtype, buffer, strides=strides)


NESTED = ("state_dict", "model_state_dict", "model", "module")  # where trainers put the model's state dict
TRAINED = re.compile(
    r"(optim(izer)?s?|(lr_)?schedulers?|(grad_)?scaler|(cuda_|torch_)?rng)(_states?)?(_dict)?"
)  # a trainer's state
PARALLEL = "module."  # what DataParallel adds to every name


@dataclass(frozen=True, slots=True)
class StoredView:
    """A tensor as a view of a storage in a file.

    spec           name, dtype, shape
    file           the file, as it was opened
    offset         of the storage's first byte, from the start of the file
    first          offset of the tensor's first element in the storage, in elements
    strides        in elements, one for each dimension, none negative; 0 where a dimension was expanded
    """

    spec: TensorSpec
    file: Path
    offset: int
    first: int
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Its bytes are in the file as they would be in a safetensors file, from `start` on."""
        return self.spec.size <= 1 or simplify(self.spec.shape, self.strides)[1] == (1,)

    @property
    def start(self) -> int:
        """Offset of the tensor's first byte, from the start of the file."""
        return self.offset + self.first * self.spec.dtype.itemsize

    @property
    def span(self) -> int:
        """Bytes from the tensor's first element to its last, with what lies between them."""
        if not self.spec.size:
            return 0
        steps = sum((n - 1) * stride for n, stride in zip(self.spec.shape, self.strides, strict=True))
        return (steps + 1) * self.spec.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PickleHeader:
    """All that a file says of its tensors, checked.

    tensors   in the order of the state dict; tied tensors are each in it, with the same place
    ignored   entries that are no tensors of the model: `epoch`, `optimizer`, `state_dict.version`
    notes     what was done to find the tensors: which state dict was taken, which prefix was removed
    state     of the file, taken before it was read
    digest    xxh3_128 of the pickle and the zip directory (which holds a CRC-32 of each storage), hex
    metadata  HQQ's settings of each module, JSON under `HQQ_SETTINGS`; {} in other files
    """

    tensors: tuple[StoredView, ...]
    ignored: tuple[str, ...]
    notes: tuple[Finding, ...]
    state: FileState
    digest: str
    metadata: dict[str, str]


def read_pickle_header(path: Path, open_file: Opener = open_local) -> PickleHeader:
    """Read and check the tensor table of a PyTorch checkpoint. Nothing in the file is executed.

    open_file  for a file that is not on this disk

    The state dict is the file's only value, or one of its entries `state_dict`, `model_state_dict`, `model` and `module`.
    The prefix `module.` is removed when all names have it.

    Raises FormatError for bytes that break the format and for two candidates, Unsupported for what is not a plain state
    dict of dense tensors in the zip format, NotFound and CheckpointError when the file cannot be read. Cost: about 0.3 s
    for 10,000 tensors.
    """
    with raised_at(str(path)):
        return _read_pickle_header(path, open_file)


def _read_pickle_header(path: Path, open_file: Opener) -> PickleHeader:
    where = str(path)
    if path.suffix == ".distcp":
        what = "one part of a distributed checkpoint (.distcp)"
        raise Unsupported(what, fix="Join the parts with torch.distributed.checkpoint.format_utils.dcp_to_torch_save.")
    with open_file(path) as file:
        state = file.state
        archive = read_archive(file, state.nbytes)

    by_module = _by_module(archive.value)
    metadata = {HQQ_SETTINGS: json.dumps({"modules": by_module.settings})} if by_module else {}
    outer, state_dict, ignored, notes = _find_state_dict(by_module.tensors if by_module else archive.value, where)
    tensors, skipped = _split(state_dict, outer)
    if skipped:
        notes.append(Finding(f"entries of the state dict that are no tensors are ignored: {show_all(skipped)}", where))
    if tensors and all(name.startswith(PARALLEL) and name != PARALLEL for name in tensors):
        tensors = {name.removeprefix(PARALLEL): tensor for name, tensor in tensors.items()}
        notes.append(Finding(f"the prefix {show(PARALLEL)} of all names was removed (the model was a DataParallel)", where))
    seen: dict[str, Storage] = {}
    views = []
    for name, tensor in tensors.items():
        with of_tensor(name):  # the inner message is short; the name is added here, once
            views.append(view_of(name, tensor, path, archive, seen))
    return PickleHeader(
        tensors=tuple(views),
        ignored=(*ignored, *skipped),
        notes=tuple(notes),
        state=state,
        digest=archive.digest,
        metadata=metadata,
    )


@dataclass(frozen=True, slots=True)
class Archive:
    """What torch.save has written, not yet checked.

    value    as the pickle says it
    prefix   the folder that all members are in
    records  where the members are, by name
    digest   xxh3_128 of the pickle and the zip directory, hex
    """

    value: Any
    prefix: str
    records: dict[str, Record]
    digest: str


def read_archive(file: RandomAccess, nbytes: int, classes: Container[str] = ()) -> Archive:
    """The pickle and the directory of an archive of torch.save. nbytes: its size; classes: as for `interpret`.

    Raises as `read_pickle_header`; the errors do not name the file.
    """
    _check_magic(read_at(file, 0, min(512, nbytes)))
    records, directory = read_records(file, nbytes)
    prefix = _check_members(records)
    order = records.get(f"{prefix}/byteorder")
    if order is not None:
        _check_byteorder(read_at(file, order.offset, min(order.nbytes, 64)))
    pickled = records[f"{prefix}/data.pkl"]
    if pickled.nbytes > MAX_PICKLE_BYTES:
        what = f"the pickle has {pickled.nbytes:,} bytes, and at most {MAX_PICKLE_BYTES:,} are read"
        raise Unsupported(what, fix=CONVERT)
    text = read_at(file, pickled.offset, pickled.nbytes)
    digest = xxhash.xxh3_128_hexdigest(len(text).to_bytes(8, "little") + text + directory)
    return Archive(interpret(text, classes), prefix, records, digest)


def read_view(read: ReadAt, view: StoredView, start_byte: int, out: memoryview) -> None:
    """Fill `out` with bytes of the logical tensor (row-major, contiguous) from `start_byte` on.

    read  (offset in `view.file`, writable bytes): fills them from there, or raises
    out   writable bytes; all of them are filled; the range must be inside the tensor

    One read for a contiguous view. Others are gathered, with at most 1 MiB of memory. Raises what `read` raises.
    """
    if not len(out):
        return
    if view.contiguous:
        read(view.start + start_byte, out)
    else:
        gather(read, view.start, view.spec.dtype.itemsize, view.spec.shape, view.strides, start_byte, out)


def _check_magic(start: bytes) -> None:
    if start.startswith(b"PK\x03\x04"):
        return
    if start[257:262] == b"ustar":
        raise Unsupported("a tar archive: the format of PyTorch before 0.1.10", fix=RESAVE)
    kind = Unsupported if start.startswith(b"\x80") else FormatError
    raise kind(f"not a PyTorch zip file (first bytes {show(start[:8])})", fix=lookalike(start))


def _check_members(records: dict[str, Record]) -> str:
    """The folder that all members are in."""
    folders = list(dict.fromkeys(name.split("/")[0] for name in records))
    prefix = folders[0] if folders else ""
    if f"{prefix}/constants.pkl" in records or any(name.startswith(f"{prefix}/code/") for name in records):
        fix = "Load it with torch.jit.load in an isolated environment, and save its state_dict() with torch.save."
        raise Unsupported("a TorchScript archive, which is a program with weights inside", fix=fix)
    if len(folders) != 1 or f"{prefix}/data.pkl" not in records:
        what = "a zip archive, but not one of PyTorch: its members are not those of one folder with a data.pkl"
        fix = "Name the file that torch.save wrote; unpack the archive first if it is inside."
        raise FormatError(what, details=(f"it holds {show_all(list(records)) or 'nothing'}",), fix=fix)
    if packed := [name for name, record in records.items() if record.compressed]:
        what = f"its member {show(packed[0])} is compressed; torch.save stores them as they are"
        raise FormatError(what, fix="Unpack it, and pack it without compression (zip -0): another tool packed it again.")
    return prefix


def _check_byteorder(order: bytes) -> None:
    if order == b"big":
        what = "its numbers are big-endian: it was written on another kind of machine"
        raise Unsupported(what, fix="Load it with torch on a little-endian machine, and save it again.")
    if order != b"little":
        raise FormatError(f"its byte order is {show(order)}, neither little nor big", fix=DAMAGED)


HQQ_SETTINGS = "_hqq"
_CODES, _META, _NESTED_META = "W_q", "meta", ("meta_zero", "meta_scale")
_MAX_ENTRIES = 1_000_000  # of all modules; values may be shared, so that a small pickle has very many


@dataclass(frozen=True, slots=True)
class _Modules:
    """What HQQ's `qmodel.pt` holds: a dict for each module, flattened.

    tensors   by the names that a state dict has: `model.norm.weight`, `model.layers.0.mlp.up_proj.W_q`
    settings  of the modules with codes: numbers, texts, lists, dicts of the same
    """

    tensors: Mapping
    settings: dict[str, dict[str, Any]]


def _by_module(value: Any) -> _Modules | None:
    """A dict of dicts, some of which have HQQ's codes; None for anything else. Raises FormatError, Unsupported."""
    if type(value) is not Mapping or not value.flat:
        return None
    parts = value.flat[1::2]
    if not all(type(part) is Mapping for part in parts) or not any(_CODES in _texts(part) for part in parts):
        return None
    modules, entries = _Modules(Mapping(), {}), 0
    for module, part in _entries(value):
        inlined = [(key, inner) for key, inner in _entries(part) if key == _META and type(inner) is Mapping]
        items = [(key, inner) for key, inner in _entries(part) if not (inlined and key == _META)]
        items += [item for _, meta in inlined for item in _entries(meta)]
        nested = [(f"{key}.", inner) for key, inner in items if _text(key) in _NESTED_META and type(inner) is Mapping]
        settings: dict[str, Any] = {}
        for prefix, flat in (("", items), *((key, _entries(inner)) for key, inner in nested)):
            entries += len(flat)
            if entries > _MAX_ENTRIES:
                raise Unsupported(f"its modules have more than {_MAX_ENTRIES:,} entries", fix=f"{CONVERT} It may be an attack.")
            for key, inner in flat:
                name = prefix + _text(key)
                if type(inner) is Tensor:
                    modules.tensors.flat += [f"{_text(module)}.{name}", inner]
                elif (setting := _setting(inner)) is not None:
                    settings[name] = setting
        if _CODES in _texts(part):
            modules.settings[_text(module)] = settings
    return modules


def _texts(mapping: Mapping) -> list[str]:
    return [key for key in mapping.flat[::2] if type(key) is str]


def _setting(value: Any) -> Any:
    """A value of a module as JSON: a number, a text, the numbers of a shape, the name of a dtype. None for others."""
    if type(value) is Global:
        return value.name
    if type(value) is tuple:
        return list(value) if len(value) <= MAX_DIMENSIONS and all(type(n) is int for n in value) else None
    return value if type(value) in (bool, int, float, str) else None


def _find_state_dict(value: Any, where: str) -> tuple[str, Mapping, list[str], list[Finding]]:
    """Key of the state dict ("" at the top level), the state dict, the other entries' names, and notes."""
    if type(value) is not Mapping:
        raise Unsupported(f"it holds {describe(value)}, not a state dict", fix=_SAVE_STATE_DICT)
    entries = _entries(value)
    n_top = _count_tensors(value)
    n_model = sum(type(v) is Tensor and not TRAINED.fullmatch(_text(key)) for key, v in entries)
    nested = [(key, v) for key, v in entries if type(key) is str and key in NESTED and type(v) is Mapping and _count_tensors(v)]
    candidates = [show(key) for key, _ in nested]
    if any(_count_tensors(v) <= n_model for _, v in nested):
        candidates.append(f"the top level ({n_model:,} tensors)")
    if len(candidates) > 1:
        what = f"several state dicts: {' and '.join(candidates)}; which one is the model is not said"
        raise FormatError(what, fix="Load the file with torch in an isolated environment, and save the one that is meant.")
    if nested:
        key, state_dict = nested[0]
        others = [_text(k) for k, _ in entries if k is not key]
        what = f"the tensors are those of its entry {show(key)}"
        if others:
            what += f"; ignored: {show_all(others)}"
        return key, state_dict, others, [Finding(what, where)]
    if n_top:
        return "", value, [], []
    keys = show_all([_text(key) for key, _ in entries], 8)
    raise Unsupported(
        "no state dict: neither the top level nor "
        + ", ".join(map(show, NESTED))
        + (f" holds tensors; its entries are {keys}" if entries else " holds tensors; it is empty"),
        fix=_SAVE_STATE_DICT,
    )


_SAVE_STATE_DICT = "Load it with torch in an isolated environment, and save model.state_dict() with torch.save."


def _split(state_dict: Mapping, outer: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a state dict by name, and the names of its other entries, which must not hold tensors of the model."""
    tensors: dict[str, Tensor] = {}
    skipped = []
    seen: set[int] = set()
    for key, value in _entries(state_dict):
        if type(value) is Tensor:
            if type(key) is not str:
                raise FormatError(f"a tensor has the name {describe(key)}, which is not a string", fix=DAMAGED)
            tensors[key] = value
            continue
        name = _text(key)
        if not TRAINED.fullmatch(name) and _holds_tensors(value, seen):
            what = f"the entry {show(name)} of the state dict is {describe(value)} with tensors inside, not a tensor"
            raise Unsupported(what, fix=_SAVE_STATE_DICT)
        skipped.append(f"{outer}.{name}" if outer else name)
    return tensors, skipped


def _entries(mapping: Mapping) -> list[tuple[Any, Any]]:
    """Keys and values; a duplicate name is an error, where a Python dict would silently keep the last."""
    names: set[str] = set()
    for key in mapping.flat[::2]:
        if type(key) is str:
            if key in names:
                raise FormatError(f"the name {show(key)} is in a dict twice", fix=DAMAGED)
            names.add(key)
    return list(mapping.items())


def _text(key: Any) -> str:
    return key if type(key) is str else describe(key)


def _count_tensors(mapping: Mapping) -> int:
    return sum(type(value) is Tensor for value in mapping.flat[1::2])


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """A tensor is somewhere inside. `seen` holds what was searched before: values may be shared, and hold themselves."""
    todo = [value]
    while todo:
        value = todo.pop()
        if type(value) is Tensor:
            return True
        if isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            todo += value.flat if isinstance(value, Mapping) else value
    return False


def view_of(name: str, tensor: Tensor, path: Path, archive: Archive, seen: dict[str, Storage]) -> StoredView:
    """A tensor of an archive, with every number checked.

    path  of the file, as it was opened
    seen  the first storage of each key, for all tensors of an archive

    Raises FormatError and Unsupported, which do not name the tensor.
    """
    prefix, records = archive.prefix, archive.records
    storage = tensor.storage
    dtype, item = _dtype(tensor.dtype or STORAGES[storage.kind]), _dtype(STORAGES[storage.kind])
    if tensor.bits:
        raise Unsupported("a conjugated or negated view, whose values are not in the file", fix=CONVERT)
    shape, strides, first = tensor.shape, tensor.strides, tensor.first
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
        raise FormatError("its shape and strides are not tuples of one length")
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"shape has {len(shape):,} dimensions, at most {MAX_DIMENSIONS} are allowed")
    for number in (first, storage.elements, *shape, *strides):
        if type(number) is not int or not 0 <= number <= MAX_BYTES:
            raise FormatError(f"its shape, strides or offset holds {describe(number)}, not an integer from 0 to 2^63")
    checked_product(dtype, shape)

    record = records.get(f"{prefix}/data/{storage.key}")
    if record is None:
        raise FormatError(f"its storage {show(storage.key)} is not in the file")
    other = seen.setdefault(storage.key, storage)
    if (other.kind, other.elements) != (storage.kind, storage.elements):
        raise FormatError(
            f"its storage {show(storage.key)} is {storage.elements:,} elements of {storage.kind} here, "
            f"and {other.elements:,} of {other.kind} elsewhere"
        )
    if not 0 <= record.nbytes - storage.elements * item.itemsize < item.itemsize:
        raise FormatError(
            f"its storage {show(storage.key)} has {record.nbytes:,} bytes in the file, "
            f"and {storage.elements:,} elements of {item} in the pickle"
        )
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > record.nbytes:
        raise FormatError(
            f"its last element is number {last:,} of a storage of {record.nbytes // dtype.itemsize:,} "
            f"(shape {show(shape)}, strides {show(strides)}, offset {first:,})"
        )
    return StoredView(TensorSpec(name, dtype, shape), path, record.offset, first, strides)


def _dtype(name: str) -> DType:
    dtype = BY_TORCH_NAME.get(name)
    if dtype is None:
        what = f"dtype {show(name)} is not supported; supported are {', '.join(BY_TORCH_NAME)}"
        raise Unsupported(what, fix="Convert the tensor to one of these first.")
    return dtype
