"""A range of a strided tensor's logical bytes, gathered from its storage with few, bounded reads.

The logical tensor is row-major and contiguous; its storage is not, because it was transposed, sliced or expanded. The range
is cut into boxes (whole rows, whole matrices, and what is left at both ends). In a box the dimensions of small strides
are read at once, with the gaps between their elements, as long as the gaps are cheaper to read than to skip and all of it
fits into 1 MiB; over the others it loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
