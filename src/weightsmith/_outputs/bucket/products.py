"""Products of a plan in a bucket, for other processes: the bytes of their arrays, in objects of at most `PIECE_BYTES`.

A reader compares them with their checksum, which is that of the same product in a local folder (`outputs.local.products`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from weightsmith._outputs.bucket.client import Bucket, not_ours
from weightsmith._outputs.checksum import byte_view, hash_bytes
from weightsmith._outputs.local.products import Arrays

PIECE_BYTES = 32 << 20


def put_product(bucket: Bucket, prefix: str, name: str, arrays: Arrays, token: str) -> str:
    """Upload the arrays of a product: their checksum (xxh3_128, hex). prefix: of all products; token: of the work.

    Raises StoreError where an object of another program is.
    """
    digest = xxhash.xxh3_128()
    for key, piece in _pieces(prefix, name, [np.ascontiguousarray(array) for array in arrays]):
        digest.update(piece)
        found = bucket.head(key)
        if found is not None and not found.token:
            raise not_ours(key)
        bucket.put(key, piece.tobytes(), token)
    return digest.hexdigest()


def get_product(bucket: Bucket, prefix: str, name: str, arrays: Arrays, checksum: str) -> bool:
    """Fill the arrays of a product. False if its bytes are missing, or have another checksum."""
    digest = xxhash.xxh3_128()
    for key, piece in _pieces(prefix, name, arrays):
        found = bucket.read(key, PIECE_BYTES)
        if found is None or len(found.data) != piece.nbytes:
            return False
        digest.update(found.data)
        piece[:] = found.data
    return digest.hexdigest() == checksum


def _pieces(prefix: str, name: str, arrays: Arrays) -> Iterator[tuple[str, memoryview]]:
    """Keys and bytes of its objects. The name of a product may contain any character."""
    for number, array in enumerate(arrays):
        view = byte_view(array.reshape(-1).view(np.uint8))
        for start in range(0, view.nbytes, PIECE_BYTES):
            yield f"{prefix}/{hash_bytes(name.encode())}-{number}-{start // PIECE_BYTES}", view[start : start + PIECE_BYTES]
