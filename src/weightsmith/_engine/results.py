"""What a run keeps: what its products have made, which is a source of tensors that fills up; and what its jobs remember."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.files import Extent
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.arrays import release_pages
from weightsmith._plans import Plan, Product
from weightsmith.abc.job import Bytes, Result


class Results:
    """The arrays of a plan's products: names, dtypes and shapes from the start, values once computed.

    specs  of all arrays
    """

    paths: tuple[Path, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.specs: Mapping[str, TensorSpec] = {out.name: out for product in plan.products for out in product.outs}
        self._products = {product.name: product for product in plan.products}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, product: Product, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Enter the arrays of a finished product."""
        for out, array in zip(product.outs, arrays, strict=True):
            assert (array.shape, array.dtype) == (out.shape, out.dtype.numpy), (out, array.shape, array.dtype)
        with self._lock:
            self._digests.pop(product.name, None)
            self._arrays |= {out.name: np.ascontiguousarray(a) for out, a in zip(product.outs, arrays, strict=True)}

    def release(self, names: Collection[str]) -> None:
        """Let the system take back the memory of arrays of these products that are mapped from files."""
        with self._lock:
            arrays = [self._arrays[out.name] for name in names for out in self._products[name].outs if out.name in self._arrays]
        for array in arrays:
            release_pages(array)

    def drop(self, product: Product) -> None:
        """Nothing needs this product any more."""
        with self._lock:
            for out in product.outs:
                self._arrays.pop(out.name, None)

    def recall(self, name: str, checksum: str) -> None:
        """Enter the checksum of a product whose arrays were removed: all that were computed from it are finished, or it is
        computed again.
        """
        with self._lock:
            self._digests[name] = bytes.fromhex(checksum)

    def known(self, name: str) -> bool:
        """True if `digest` knows this product: it has been computed, by this run or an earlier one."""
        return name in self._digests or self.finished(name)

    def arrays(self, name: str) -> Sequence[npt.NDArray[Any]]:
        """The arrays of a finished product."""
        with self._lock:
            return [self._arrays[out.name] for out in self._products[name].outs]

    def finished(self, name: str) -> bool:
        """True if this product has been computed."""
        with self._lock:
            return all(out.name in self._arrays for out in self._products[name].outs)

    def digest(self, names: Collection[str], *, allow_nonfinite: bool = False) -> str:
        """What a tensor was made from: the arrays of these finished products (xxh3_128, hex; "" for no products).

        Tensors that were not checked for NaN have a different digest, so that a run that checks computes them again.
        """
        unchecked = "+nonfinite" if allow_nonfinite else ""
        if not names:
            return unchecked
        digest = xxhash.xxh3_128()
        for name in sorted(names):
            if name not in self._digests:
                hasher = xxhash.xxh3_128()
                for out in self._products[name].outs:
                    hasher.update(self._arrays[out.name].reshape(-1).view(np.uint8).data)
                    release_pages(self._arrays[out.name])
                self._digests[name] = hasher.digest()
            digest.update(name.encode() + b"\0" + self._digests[name])
        return digest.hexdigest() + unchecked

    def array(self, name: str) -> npt.NDArray[Any]:
        """One array of a finished product."""
        return self._arrays[name]

    def array_or_zeros(self, name: str) -> npt.NDArray[Any]:
        """One array; zeros while it is not made, so that jobs can be asked for their passes."""
        return self._arrays[name] if name in self._arrays else np.zeros(self.specs[name].shape, self.specs[name].dtype.numpy)

    def of(self, name: str) -> Result:
        """What a job sees of a product, whose arrays are those of `array_or_zeros`."""
        product = self._products[name]
        arrays = tuple(self.array_or_zeros(out.name) for out in product.outs)
        return Result(product.settings, product.models, arrays)

    # ---- as a source of tensors

    def extents(self, name: str, start_byte: int, nbytes: int) -> tuple[Extent, ...]:
        """No file."""
        return ()

    def location(self, name: str) -> None:
        """They are in no file."""

    def natural_dtype(self, name: str) -> DType:
        return self.specs[name].dtype

    def preferred_rows(self, name: str) -> int:
        """They are in memory: any rows."""
        return 1

    def read_into(self, name: str, start_byte: int, out: memoryview | Bytes) -> None:
        """Fill `out` with the array's bytes from `start_byte` on."""
        target = np.frombuffer(out, np.uint8)
        array = self._arrays[name]
        target[:] = array.reshape(-1).view(np.uint8)[start_byte : start_byte + target.size]
        release_pages(array)


# ---- What jobs remember from one merge to the next of the same inputs (`Job.recall`). Large arrays are kept on disk


LARGE_BYTES = 64 << 10
"""Arrays of at least so many bytes are kept on disk."""

DISK_SHARE = 0.5
"""The most of the free space of the disk that they take."""


class JobMemory:
    """A memory for the jobs of each tensor and its inputs."""

    def __init__(self, folder: Path | None = None, most: int | None = None, spare_bytes: int = 0) -> None:
        """
        folder  where large arrays are kept, in a file without a name, which goes with the process; None: they are not kept
        most    large arrays of one tensor, at least 1; the one that was not used for longest makes room. None: any number
        spare_bytes  of the disk that others need
        """
        self._arrays = _ArrayFile(folder, spare_bytes)
        self._most = most
        self._memories = dict[object, _SpilledDict]()
        self._once = set[object]()

    def of(self, key: object) -> MutableMapping[object, Any]:
        """The memory of a tensor and its inputs."""
        return self._memories.setdefault(key, _SpilledDict(self._arrays, self._most, self._once))

    def read_once(self, kind: object) -> None:
        """From now on, a large array whose key begins with `kind` makes room for others once it is read."""
        self._once.add(kind)


class _SpilledDict(MutableMapping[object, Any]):
    """A dictionary whose large arrays are on disk. An array that does not fit there is forgotten: it is computed again."""

    def __init__(self, arrays: _ArrayFile, most: int | None, once: Collection[object] = ()) -> None:
        self._arrays, self._most, self._once = arrays, most, once
        self._values = dict[object, Any]()

    def __getitem__(self, key: object) -> Any:
        value = self._values[key]
        if not isinstance(value, _ArrayPlace):
            return value
        self._values[key] = self._values.pop(key)  # the last in order is the one that was used last
        try:
            array = self._arrays.read(value)
        except OSError:
            raise KeyError(key) from None
        if isinstance(key, tuple) and key[0] in self._once:
            del self._values[key]
            self._arrays.free(value)
        return array

    def __setitem__(self, key: object, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.nbytes >= LARGE_BYTES:
            place = self._arrays.write(value, self._freed())
            if place is None:
                return
            value = place
        self._values[key] = value

    def _freed(self) -> _ArrayPlace | None:
        """Forget the array that was not used for longest, if there is no room for one more. Where it was."""
        places = [key for key, value in self._values.items() if isinstance(value, _ArrayPlace)]
        return self._values.pop(places[0]) if self._most is not None and len(places) >= self._most else None

    def __contains__(self, key: object) -> bool:
        return key in self._values  # without a look at the disk

    def __delitem__(self, key: object) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[object]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _ArrayPlace:
    """Where an array is in the file."""

    def __init__(self, offset: int, like: npt.NDArray[Any]) -> None:
        self.offset, self.dtype, self.shape, self.nbytes = offset, like.dtype, like.shape, like.nbytes


class _ArrayFile:
    """Arrays one after the other in a file without a name."""

    def __init__(self, folder: Path | None, spare_bytes: int) -> None:
        self._folder, self._spare_bytes = folder, spare_bytes
        self._file: IO[bytes] | None = None
        self._free = dict[int, list[int]]()
        self._end = 0
        self._limit = 0
        self._lock = threading.Lock()

    def write(self, array: npt.NDArray[Any], freed: _ArrayPlace | None = None) -> _ArrayPlace | None:
        """Write an array where one of as many bytes was that is forgotten or freed, or append it.

        None if there is no folder, or the disk has no room for it.
        """
        with self._lock:
            try:
                if self._folder is None:
                    return None
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
                    weakref.finalize(self, self._file.close)
                    free_bytes = shutil.disk_usage(self._folder).free
                    self._limit = min(int(DISK_SHARE * free_bytes), free_bytes - self._spare_bytes)
                offset = self._end
                if freed is not None and freed.nbytes == array.nbytes:
                    offset = freed.offset
                elif offsets := self._free.get(array.nbytes):
                    offset = offsets.pop()
                if offset + array.nbytes > self._limit:
                    return None
                data, done = _bytes(np.ascontiguousarray(array)), 0
                while done < array.nbytes:
                    done += os.pwrite(self._file.fileno(), data[done:], offset + done)
            except OSError:
                return None
            self._end = max(self._end, offset + array.nbytes)
            return _ArrayPlace(offset, array)

    def free(self, place: _ArrayPlace) -> None:
        """Let another array of as many bytes take its place."""
        with self._lock:
            self._free.setdefault(place.nbytes, []).append(place.offset)

    def read(self, place: _ArrayPlace) -> npt.NDArray[Any]:
        """An array, as a new one. Raises OSError if the disk does not give it back."""
        assert self._file is not None
        array, done = np.empty(place.shape, place.dtype), 0
        data = _bytes(array)
        while done < array.nbytes:
            got = os.preadv(self._file.fileno(), [data[done:]], place.offset + done)
            if not got:
                raise OSError("the file ends early")
            done += got
        return array


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
