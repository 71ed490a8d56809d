"""What products have made: a source of tensors that fills up while a plan runs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

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
