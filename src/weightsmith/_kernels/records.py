"""Arguments that kernels share, as records: a record of arrays costs a kernel a few microseconds a call, and nothing inside."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Inputs(NamedTuple):
    """One tile of the inputs: raw uint8 [inputs, >= bytes], and codes int64 [inputs], the `DType.code` of each."""

    raw: np.ndarray
    codes: np.ndarray


class Encoded(NamedTuple):
    """Elements of one tensor as they are stored: data uint8 [bytes], and the dtype's `DType.code`."""

    data: np.ndarray
    code: int
