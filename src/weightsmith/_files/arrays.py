"""Arrays in memory and in files: mapped from a file, or streamed in pieces without a contiguous copy of the whole.

A mapped array needs no memory of its own. Of a tensor that is streamed, strides, overlaps, broadcasts, sharing and devices do
not matter: it is split along its leading dimensions into views of at most a tile, each of which is copied into one reused
buffer. A contiguous tensor in host memory is not copied. Elements are treated as integers of their width, which preserves NaN
payloads.

torch is never imported here: whoever passes a torch tensor has already imported it.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._base.tensors import BY_TORCH_NAME, DType, TensorSpec


def map_arrays(fd: int, specs: Sequence[TensorSpec], access: int = mmap.ACCESS_READ) -> list[npt.NDArray[Any]]:
    """Arrays that lie one after another in a file from its start. access: `mmap.ACCESS_READ` or `ACCESS_WRITE`."""
    nbytes = sum(spec.nbytes for spec in specs)
    data = mmap.mmap(fd, nbytes, access=access) if nbytes else b""
    arrays, at = [], 0
    for spec in specs:
        arrays.append(_array(data, spec, at))
        at += spec.nbytes
    return arrays


def map_array(fd: int, spec: TensorSpec, start_byte: int) -> npt.NDArray[Any]:
    """An array of a file, read-only. The file may be closed. Raises OSError or ValueError if the file is too short."""
    first = start_byte // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    nbytes = start_byte - first + spec.nbytes
    data = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ, offset=first) if spec.nbytes else b""
    return _array(data, spec, start_byte - first if spec.nbytes else 0)


def _array(data: mmap.mmap | bytes, spec: TensorSpec, start_byte: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, spec.dtype.numpy, spec.size, start_byte).reshape(spec.shape)


def release_pages(array: npt.NDArray[Any]) -> None:
    """Let the system take back the memory that shows a mapped array; its file keeps the numbers. Others are left alone."""
    map_ = _map_of(array)
    if map_ is not None and hasattr(mmap, "MADV_DONTNEED"):
        map_.madvise(mmap.MADV_DONTNEED)


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array is mapped from a file."""
    return _map_of(array) is not None


def _map_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None


TILE_BYTES = 1 << 22
_SCRATCH_BYTES = 1 << 17  # for a transposing copy; fits in the L2 cache
_SCRATCH_PAD_BYTES = 64  # rows a power of two apart would share a cache set
_TORCH_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Bytes = NDArray[np.uint8]
Identity = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One tensor to write.

    spec      its name, dtype and shape
    array     its elements as unsigned integers (either byte order), any strides; None if `remote`
    remote    a torch tensor that is not plain host memory (on a device, or lazily negated or conjugated); else None
    identity  equal for two tensors that are the same elements in memory; None if there are no elements
    """

    spec: TensorSpec
    array: NDArray[Any] | None
    remote: Any
    identity: Identity | None


def view_of(name: str, tensor: Any) -> View:
    """The view of a numpy array or torch tensor. Reads and copies no elements.

    Raises StoreError, naming the tensor, for anything a safetensors file cannot hold.
    """
    if isinstance(tensor, np.ma.MaskedArray):
        raise _refused(name, "a masked array, and a file cannot hold the mask", "fill it: tensor.filled(0)")
    if isinstance(tensor, np.ndarray | np.generic):
        return _numpy_view(name, np.asarray(tensor))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_view(name, tensor, torch)
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    raise _refused(name, f"a {kind}", "pass a numpy array or a torch tensor")


def _refused(name: str, what: str, fix: str) -> StoreError:
    return StoreError(f"this is {what}; it cannot be stored", where=name, fix=fix, state=NOTHING_WRITTEN)


def _known(name: str, dtype_name: str) -> DType:
    dtype = BY_TORCH_NAME.get(dtype_name)
    if dtype is None:
        raise _refused(name, f"a tensor of dtype {dtype_name}", f"convert it to one of {', '.join(BY_TORCH_NAME)}")
    return dtype


def _identity(device: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str) -> Identity:
    steps = tuple(stride for stride, length in zip(strides, shape, strict=True) if length > 1)
    return device, address, shape, steps, kind


def _numpy_view(name: str, array: NDArray[Any]) -> View:
    dtype = _known(name, array.dtype.name)
    order = array.dtype.byteorder
    swapped = not array.dtype.isnative
    if swapped and array.dtype.kind == "c":  # as integers, the two parts of a number would change places
        raise _refused(name, "a complex array in the other byte order", f"convert it: array.astype({dtype.torch!r})")
    integers = array.view(np.dtype(f"u{dtype.itemsize}").newbyteorder(order if swapped else "="))
    address = int(array.__array_interface__["data"][0])
    kind = dtype.name + ("-swapped" if swapped else "")
    identity = _identity("cpu", address, array.shape, array.strides, kind) if array.size else None
    return View(TensorSpec(name, dtype, array.shape), integers, None, identity)


def _torch_view(name: str, tensor: Any, torch: Any) -> View:
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _refused(name, f"a {kind.__qualname__}, whose elements are stored elsewhere", "extract the plain tensor first")
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise _refused(name, "an uninitialised parameter", "run the module once first")
    if tensor.is_quantized:
        raise _refused(name, f"a quantised tensor ({tensor.dtype})", "store tensor.int_repr() and its scales")
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        raise _refused(name, f"a tensor of layout {layout}", "convert it first: tensor.to_dense()")
    if tensor.device.type == "meta":
        raise _refused(name, "a meta tensor, which has no elements", "load its elements first")
    dtype = _known(name, str(tensor.dtype).removeprefix("torch."))
    plain = tensor.detach().as_subclass(torch.Tensor)
    shape = tuple(plain.shape)
    lazy = "-negated" * plain.is_neg() + "-conjugated" * plain.is_conj()
    identity = None
    if plain.numel():
        strides = tuple(step * dtype.itemsize for step in plain.stride())
        identity = _identity(str(plain.device), plain.data_ptr(), shape, strides, dtype.name + lazy)
    spec = TensorSpec(name, dtype, shape)
    if plain.device.type != "cpu" or lazy:
        return View(spec, None, plain, identity)
    integers = plain.view(getattr(torch, _TORCH_INTEGERS[dtype.itemsize])).numpy()
    return View(spec, integers.view(f"u{dtype.itemsize}"), None, identity)


def pieces(view: View, tile: Bytes) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, little-endian, in runs of at most a tile.

    tile  uint8 [TILE_BYTES], overwritten: a piece is valid until the next one is requested

    Extra memory: the tile, 128 KiB of scratch, and one piece on the device.
    """
    array, width, size = view.array, view.spec.dtype.itemsize, view.spec.size
    if not size:
        return
    if array is not None and array.flags.c_contiguous and array.dtype.isnative:
        flat = array.reshape(-1).view(np.uint8).data
        for start in range(0, flat.nbytes, TILE_BYTES):
            yield flat[start : start + TILE_BYTES]
        return
    run = 1  # elements of a piece: as many whole rows, matrices and so on as fit
    for length in reversed(view.spec.shape):
        if run * length * width > TILE_BYTES:
            break
        run *= length
    run *= TILE_BYTES // width // run
    for start in range(0, size, run):
        out = tile[: min(run, size - start) * width]
        read_into(view, start, out)
        yield out.data


def read_into(view: View, start: int, out: Bytes) -> None:
    """Fill `out` with a tensor's bytes, as `pieces` yields them, from element `start` on. Thread-safe.

    out  uint8, contiguous: a whole number of elements, all inside the tensor
    """
    width = view.spec.dtype.itemsize
    array = view.array
    if array is not None and array.flags.c_contiguous and array.dtype.isnative:
        out[:] = array.reshape(-1).view(np.uint8)[start * width : start * width + out.size]
        return
    done = 0
    for part in _run(view.remote if array is None else array, start, start + out.size // width):
        end = done + _elements(part.shape) * width
        if array is None:
            _fetch(out[done:end], part)
        else:
            _copy(out[done:end].view(array.dtype.newbyteorder("=")).reshape(part.shape), part)
        done = end


def _run(array: Any, first: int, end: int) -> Iterator[Any]:
    """Sub-views that cover elements first … end in row-major order, of a numpy array or torch tensor."""
    if array.ndim == 0 or first == end:
        yield from (array,) if first < end else ()
        return
    row = _elements(array.shape[1:])
    whole, last = -(-first // row), end // row
    if whole > last:
        yield from _run(array[last], first - last * row, end - last * row)
        return
    if first < whole * row:
        yield from _run(array[whole - 1], first - (whole - 1) * row, row)
    if whole < last:
        yield array[whole:last]
    if last * row < end:
        yield from _run(array[last], 0, end - last * row)


def _elements(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _copy(out: NDArray[Any], part: NDArray[Any]) -> None:
    """Copy `part`, of any strides, into the C-contiguous `out`.

    If the last dimension is not contiguous in memory (a transposed matrix), blocks are gathered in memory order into
    a small scratch buffer and transposed there: 1-2.5 GB/s, compared with 0.1 for np.copyto alone.
    """
    steps = [abs(step) if length > 1 else 0 for step, length in zip(part.strides, part.shape, strict=True)]
    nearest = min((step for step in steps if step), default=0)
    if part.nbytes <= _SCRATCH_BYTES or steps[-1] <= nearest:
        np.copyto(out, part)
        return
    order = sorted(range(part.ndim - 1), key=lambda axis: -steps[axis])  # memory order of the other dimensions
    lengths = [part.shape[axis] for axis in order]
    pad = _SCRATCH_PAD_BYTES // out.itemsize
    width = max(1, _SCRATCH_BYTES // (out.itemsize * _elements((*lengths[:-1], lengths[-1] + pad))))
    scratch = np.empty((width, *lengths[:-1], lengths[-1] + pad), out.dtype)[..., : lengths[-1]]
    back = [0] * part.ndim  # position of each dimension of `part` in the scratch, where its last dimension comes first
    for position, axis in enumerate(order):
        back[axis] = position + 1
    for start in range(0, part.shape[-1], width):
        block = part[..., start : start + width]
        turned = scratch[: block.shape[-1]]
        np.copyto(turned, block.transpose([part.ndim - 1, *order]))
        np.copyto(out[..., start : start + width], turned.transpose(back))


def _fetch(out: Bytes, part: Any) -> None:
    """Copy a torch tensor of any device and strides into `out`. Resolves lazy negation and conjugation."""
    sys.modules["torch"].from_numpy(out).view(part.dtype).reshape(part.shape).copy_(part)
