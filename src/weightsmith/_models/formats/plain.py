"""Plain numbers, in safetensors files and PyTorch's: weights that are not quantised.

They are written as one tensor, rounded to nearest even. `plain F16` stores float16, whatever the dtype without the encoding is.

`pytorch.py` reads PyTorch's zip checkpoints (.bin, .pt, .pth and .ckpt, one file or shards).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from weightsmith._base.errors import NonFinite, Unsupported
from weightsmith._base.files import Opener, open_local, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._files.copied import TRAINING
from weightsmith._files.hf_folder import PYTORCH_SUFFIXES, FolderWeights, choose_weights
from weightsmith._files.safetensors import Header, read_header
from weightsmith._models.sources.files import PlainFiles, SourceFile, unite
from weightsmith._plans import PLAIN
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import Bytes, Encoding, Kind, Rows, StoredFormat
from weightsmith.abc.tensors import FileKind, Index, OpenedFiles

# ---- safetensors: one file, or shards with or without an index


def open_safetensors(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    """The tensors of safetensors files; paths in natural order. Reads and checks only headers.

    `metadata` is the files' `__metadata__` without keys on which files disagree. Raises as `read_header` and `unite`.
    """
    headers = {path: read_header(path, open_file) for path in paths}
    stored = unite((header.tensors for header in headers.values()), paths[0].parent, index)
    files = [SourceFile(path, header.state, header.digest) for path, header in headers.items()]
    return OpenedFiles(PlainFiles(stored, files, where), _common_metadata(headers.values()))


def _common_metadata(headers: Iterable[Header]) -> dict[str, str]:
    common: dict[str, str] = {}
    disputed = set()
    for header in headers:
        for key, value in header.metadata.items():
            if common.setdefault(key, value) != value:
                disputed.add(key)
    return {key: value for key, value in common.items() if key not in disputed}


# ---- PyTorch's files

_FIRST = ("pytorch_model.bin", "diffusion_pytorch_model.bin")  # what transformers and diffusers write
_SLICED = re.compile(r"consolidated\.\d+\.pth")


def choose_pytorch(names: Sequence[str], where: str) -> FolderWeights | None:
    """The PyTorch files that hold the model, or None. Optimizer states and similar files are not weights.

    Raises Unsupported for Meta's `consolidated.00.pth`, `.01.pth`, …, which hold slices of each tensor, else as
    `choose_weights`.
    """
    chosen = choose_weights([n for n in names if not TRAINING.fullmatch(n.lower())], where, PYTORCH_SUFFIXES, _FIRST)
    if chosen is not None and sum(_SLICED.fullmatch(name) is not None for name in chosen.files) > 1:
        raise Unsupported(
            f"{chosen.files[0]} and similar files hold slices of each tensor, one per device",
            where=where,
            fix="Use the same model's checkpoint in transformers' format.",
        )
    return chosen


def _open_pytorch(paths: Sequence[Path], index: Index | None, where: str, open_file: Opener = open_local) -> OpenedFiles:
    from weightsmith._models.formats.pytorch import open_pytorch  # a model of safetensors files needs no reader of pickles

    return open_pytorch(paths, index, where, open_file)


# ---- writing


@dataclass(frozen=True, slots=True)
class Plain(Encoding):
    """Rows → a tensor of any shape.

    dtype  of the tensor; None: `spec.dtype`
    """

    kind: ClassVar[Kind] = "plain"
    dtype: DType | None = None

    @property
    def name(self) -> str:
        return PLAIN if self.dtype is None else f"{PLAIN} {self.dtype}"

    @property
    def bits(self) -> float:
        """0: those of each tensor."""
        return 0 if self.dtype is None else 8 * self.dtype.itemsize

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts every floating-point tensor."""
        return "" if spec.dtype.floating else f"it is {spec.dtype}, not floating point"

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensor itself.

        >>> from weightsmith._base.tensors import DTYPES
        >>> print(*Plain().outs(TensorSpec("w", DTYPES["BF16"], (3, 4))))
        w [3, 4] BF16
        """
        return (spec if self.dtype is None else replace(spec, dtype=self.dtype),)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """As `Encoding.encode`; a value that overflows becomes an infinity (NaN in F8_E4M3).

        Raises NonFinite if `dtype` is given and cannot hold a finite number.
        """
        from weightsmith._kernels.codecs import encode, first_nonfinite

        flat, dtype = rows.reshape(-1), self.dtype or spec.dtype
        encode(flat, flat.size, dtype.code, 0, outs[0])
        if self.dtype is not None and (at := first_nonfinite(outs[0], dtype.code, flat.size)) >= 0 and np.isfinite(flat[at]):
            raise NonFinite(
                f"{float(flat[at])} is not a number that {dtype.torch} can hold", where=f"output tensor {show(spec.name)}"
            )

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Rows:
        return np.array(arrays[0], np.float32).reshape(shape)


ENCODING = Plain()


def parse(name: str) -> Plain | None:
    """The encoding of a name, `plain F16`; None for a name of others. Raises ValueError."""
    family, _, dtype = name.partition(" ")
    if family != PLAIN or not dtype:
        return None
    if dtype not in DTYPES or not DTYPES[dtype].floating:
        raise ValueError(name)
    return Plain(DTYPES[dtype])


FILES = (
    FileKind("safetensors", (".safetensors",), ("*.safetensors.index.json",), choose_weights, open_safetensors),
    FileKind(
        "PyTorch",
        PYTORCH_SUFFIXES,
        tuple(f"*{suffix}.index.json" for suffix in PYTORCH_SUFFIXES),
        choose_pytorch,
        _open_pytorch,
    ),
)
FORMAT = StoredFormat("plain", "plain numbers", files=FILES, unlisted=(ENCODING,), parse=parse)
