"""The description of a tensor: dtype, name, shape, and its division into grains. Frozen values, no I/O.

Start here. Every other room uses these values:

* `DType`: an element type of safetensors files, by its name there (`BF16`).
* `TensorSpec`: name, dtype, shape.
* `NamedTensors`: tensors by name, as a dict has values: for checkpoints, and for results of commands.
* a *grain*: the unit of division of a tensor. Whole rows, about 65,536 elements, depending only on the shape. Tiles are runs
  of whole grains, statistics are summed per grain and then over grains in order, and checksums are computed per grain. So
  results do not depend on the tile size or the assignment to threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


GRAIN_ELEMENTS = 1 << 16  # 128 KiB of bf16: long enough to hash and sum at full speed, short enough to balance threads


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    name       safetensors' name: `BF16`; of a type of blocks, ggml's: `Q4_K`
    itemsize   bytes; of a type of blocks, bytes of a block
    torch      name in config.json and recipes: `bfloat16`
    floating   whether it can be merged; other dtypes are copied
    code       small integer for the compiled codecs; -1 without a codec
    block      elements of a row that are stored together; 1 but for ggml's types of blocks
    """

    name: str
    itemsize: int
    torch: str
    floating: bool
    code: int = -1
    block: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype (ml_dtypes' for bf16 and fp8)."""
        import numpy as np

        if self.name == "BF16" or self.name.startswith("F8_"):
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.torch))
        return np.dtype(self.torch)


DTYPES = {
    d.name: d
    for d in (
        DType("F64", 8, "float64", True, 4),
        DType("F32", 4, "float32", True, 0),
        DType("F16", 2, "float16", True, 2),
        DType("BF16", 2, "bfloat16", True, 1),
        DType("F8_E4M3", 1, "float8_e4m3fn", True, 3),
        DType("F8_E5M2", 1, "float8_e5m2", True, 5),
        DType("F8_E8M0", 1, "float8_e8m0fnu", False),
        DType("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", False),
        DType("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", False),
        DType("C64", 8, "complex64", False),
        DType("I64", 8, "int64", False),
        DType("I32", 4, "int32", False),
        DType("I16", 2, "int16", False),
        DType("I8", 1, "int8", False),
        DType("U64", 8, "uint64", False),
        DType("U32", 4, "uint32", False),
        DType("U16", 2, "uint16", False),
        DType("U8", 1, "uint8", False),
        DType("BOOL", 1, "bool", False),
    )
}
"""The dtypes weightsmith reads and writes, by safetensors name."""

BLOCKS = {
    d.name: d
    for d in (
        DType("Q4_0", 18, "", False, block=32),
        DType("Q4_1", 20, "", False, block=32),
        DType("Q5_0", 22, "", False, block=32),
        DType("Q5_1", 24, "", False, block=32),
        DType("Q8_0", 34, "", False, block=32),
        DType("Q2_K", 84, "", False, block=256),
        DType("Q3_K", 110, "", False, block=256),
        DType("Q4_K", 144, "", False, block=256),
        DType("Q5_K", 176, "", False, block=256),
        DType("Q6_K", 210, "", False, block=256),
        DType("IQ1_S", 50, "", False, block=256),
        DType("IQ1_M", 56, "", False, block=256),
        DType("IQ2_XXS", 66, "", False, block=256),
        DType("IQ2_XS", 74, "", False, block=256),
        DType("IQ2_S", 82, "", False, block=256),
        DType("IQ3_XXS", 98, "", False, block=256),
        DType("IQ3_S", 110, "", False, block=256),
        DType("IQ4_NL", 18, "", False, block=32),
        DType("IQ4_XS", 136, "", False, block=256),
        DType("TQ1_0", 54, "", False, block=256),
        DType("TQ2_0", 66, "", False, block=256),
        DType("MXFP4", 17, "", False, block=32),
        DType("NVFP4", 36, "", False, block=64),
    )
}
"""ggml's types of blocks, by ggml's name: codes and scales of `block` elements of a row, as GGUF files store them."""

BY_TORCH_NAME = {d.torch: d for d in DTYPES.values()}

DTYPE_NAMES = ("bfloat16", "float16", "float32", "float64")
"""The possible dtypes of output weights, by torch's names."""


def dtype_name(dtype: object) -> str:
    """The name of a dtype, given as a string, a numpy dtype or a torch dtype.

    >>> import numpy as np
    >>> dtype_name("torch.bfloat16"), dtype_name(np.float16), dtype_name(np.dtype("float32"))
    ('bfloat16', 'float16', 'float32')
    """
    return str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype).removeprefix("torch.")


BY_CODE = {d.code: d for d in DTYPES.values() if d.code >= 0}


def promote(a: DType, b: DType) -> DType:
    """The smallest floating-point dtype that holds both, which is the default output dtype of a merge.

    >>> promote(DTYPES["BF16"], DTYPES["F16"]).name
    'F32'
    """
    if a == b:
        return a
    wide = max(a, b, key=lambda d: d.itemsize)
    if "F64" in (a.name, b.name) or "F32" in (a.name, b.name):
        return wide
    if a.itemsize == b.itemsize:  # bf16 with f16, e4m3 with e5m2: neither holds the other
        return DTYPES["F32"] if a.itemsize == 2 else DTYPES["BF16"]
    return wide


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor.

    >>> TensorSpec("w", DTYPES["BF16"], (3, 4)).nbytes
    24
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk. Rows of a type of blocks are whole blocks."""
        return math.prod(self.shape) // self.dtype.block * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"


MAX_STACKED = 1024
"""A three-dimensional tensor whose first dimension is at most this may be a stack of matrices, one per expert."""


def grain_elements(shape: tuple[int, ...]) -> int:
    """Elements per grain of a tensor of this shape: whole rows, about 65,536 elements.

    Vectors are divided anywhere; a row longer than 65,536 is a grain. In a stack of matrices, no grain spans two matrices,
    so each expert has separate statistics.

    >>> grain_elements((1000, 4096)), grain_elements((7,)), grain_elements((5, 100_000))
    (65536, 65536, 100000)
    >>> grain_elements((8, 24, 4096))  # 12 rows, not 16
    49152
    """
    cols = shape[-1] if len(shape) > 1 else 1
    if math.prod(shape) == 0:
        return GRAIN_ELEMENTS
    rows = max(1, GRAIN_ELEMENTS // cols)
    if len(shape) == 3 and shape[0] <= MAX_STACKED:
        rows = min(rows, shape[1])
        while shape[1] % rows:
            rows -= 1
    return cols * rows


class NamedTensors(ABC):
    """Tensors by name: `model["lm_head.weight"]`, `in`, `len`, iteration, `keys`, `items`.

    Only `[]`, `items` and `read` read tensor data, one tensor at a time. Not a `Mapping`: a recipe may be one.
    """

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → dtype and shape, in model order."""

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor as a new numpy array (ml_dtypes for bf16 and fp8), or some of its rows.

        Raises NotFound for an unknown tensor.
        """

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __bool__(self) -> bool:
        return True  # A checkpoint is not None, however few tensors it has.

    def keys(self) -> KeysView[str]:
        """The names of the tensors, in model order."""
        return self.specs.keys()

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tensors, in model order. Each tensor is read when it is reached."""
        return ((name, self[name]) for name in self.specs)
