"""An encoding: how the rows of a tensor become stored bytes, in one tensor or in several that belong together.

A new one is a file with an `Encoding`, listed in `ENCODINGS`. Which tensors of a model are encoded is not decided here: the
planner knows embeddings, heads, norms and routers; an encoding only says which names, dtypes and shapes it can take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsmith.tensors import TensorSpec

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.float32]


class Encoding(Protocol):
    """One way to store a tensor. Without state: any thread may encode any rows in any order.

    name        in recipes and plans: `fp8-dynamic`
    align_rows  rows are encoded in runs that begin at a multiple of this many, and end at one or with the tensor
    """

    @property
    def name(self) -> str: ...

    @property
    def align_rows(self) -> int: ...

    def refusal(self, spec: TensorSpec) -> str:
        """Why a tensor cannot be encoded, or "" when it can: its name, dtype and shape alone."""
        ...

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors. The first dimension of each is that of `spec`, so that rows of one are rows of all.

        spec  the tensor, with the dtype that it would have without this encoding

        Raises Unsupported with the reason of `refusal`.
        """
        ...

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes]) -> None:
        """Fill `outs` with rows first_row … first_row + n of each stored tensor.

        rows       float32 [n, cols], C-contiguous
        first_row  a multiple of `align_rows`
        outs       one uint8 buffer for each of `outs(spec)`, of exactly the bytes of these rows

        NaN and infinities are encoded as the format allows; refusing them is the caller's.
        """
        ...

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """What config.json must hold for readers to find the codes, as keys of its top level; {} for plain tensors.

        ignored  names of the linear modules that are stored as they are: `lm_head`, `model.layers.0.mlp.gate`
        """
        ...
