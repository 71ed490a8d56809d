"""The interface of an encoding: how the rows of a tensor become stored bytes, in one or several tensors.

To add one, add a file with an `Encoding` and list it in `ENCODINGS`. An encoding only defines which names, dtypes and shapes
it supports; the planner decides which tensors of a model to encode (not norms and routers, nor embeddings and heads for most).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsmith.tensors import TensorSpec

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.float32]

WHOLE = 1 << 62
"""`Encoding.align_rows` of an encoding that needs all rows of a matrix at once."""


class Encoding(Protocol):
    """One way to store a tensor. Stateless: any thread may encode any rows in any order.

    name        in plans: `fp8-dynamic`
    align_rows  runs of rows start at a multiple of this, and end at a multiple or at the end of the tensor. `WHOLE`: all rows
                come at once
    whole       the number of stored tensors, the last of `outs`, that belong to the whole tensor, not to its rows
    product     the kind of product whose array for the tensor `encode` gets; "" if it needs the rows alone
    vocabulary  whether embeddings and output heads are encoded too
    """

    @property
    def name(self) -> str: ...

    @property
    def align_rows(self) -> int: ...

    @property
    def whole(self) -> int: ...

    @property
    def product(self) -> str: ...

    @property
    def vocabulary(self) -> bool: ...

    def refusal(self, spec: TensorSpec) -> str:
        """Why a tensor cannot be encoded, judged by name, dtype and shape; "" if it can."""
        ...

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors. All but the `whole` ones have something for each row, or for each band of `align_rows` rows.

        spec  the tensor, with its dtype without this encoding

        Raises Unsupported with the reason of `refusal`.
        """
        ...

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """Fill `outs` with rows first_row … first_row + n of each stored tensor, and with all of the `whole` ones.

        rows       float32 [n, cols], C-contiguous
        first_row  a multiple of `align_rows`
        outs       one uint8 buffer for each of `outs(spec)`, exactly the size of these rows, or of the whole tensor
        numbers    the product's array for this tensor, or the table that its step names, float32; empty without either

        Encodes NaN and infinity as the format allows; callers reject them. Raises NonFinite for a finite number that the
        format cannot hold.
        """
        ...

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Top-level keys that config.json needs so that readers decode the tensors; {} for plain tensors.

        ignored  names of the linear modules that are not encoded: `lm_head`, `model.layers.0.mlp.gate`
        """
        ...


def array_name(encoding: Encoding, tensor: str) -> str:
    """The name of the array that the product of an encoding makes for a tensor.

    >>> array_name(find_encoding("nvfp4a16"), "q_proj.weight")  # doctest: +SKIP
    'magnitudes: q_proj.weight'
    """
    return f"{encoding.product}: {tensor}"
