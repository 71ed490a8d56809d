"""The interface of an encoding: how the rows of a tensor become stored bytes, in one or several tensors.

To add one, add a file with an `Encoding` and list it in `ENCODINGS`. An encoding only defines which names, dtypes and shapes
it supports; the planner decides which tensors of a model to encode (not embeddings, heads, norms and routers).
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
    """One way to store a tensor. Stateless: any thread may encode any rows in any order.

    name        in recipes and plans: `fp8-dynamic`
    align_rows  runs of rows start at a multiple of this, and end at a multiple or at the end of the tensor
    """

    @property
    def name(self) -> str: ...

    @property
    def align_rows(self) -> int: ...

    def refusal(self, spec: TensorSpec) -> str:
        """Why a tensor cannot be encoded, judged by name, dtype and shape; "" if it can."""
        ...

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors. All have the first dimension of `spec`, so that their rows correspond.

        spec  the tensor, with its dtype without this encoding

        Raises Unsupported with the reason of `refusal`.
        """
        ...

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes]) -> None:
        """Fill `outs` with rows first_row … first_row + n of each stored tensor.

        rows       float32 [n, cols], C-contiguous
        first_row  a multiple of `align_rows`
        outs       one uint8 buffer for each of `outs(spec)`, exactly the size of these rows

        Encodes NaN and infinity as the format allows; callers reject them.
        """
        ...

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Top-level keys that config.json needs so that readers decode the tensors; {} for plain tensors.

        ignored  names of the linear modules that are not encoded: `lm_head`, `model.layers.0.mlp.gate`
        """
        ...
