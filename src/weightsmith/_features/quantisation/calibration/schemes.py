"""Weights in an encoding, with a Hessian: EXL2, and the integers with scales for groups of inputs (w4a16, w8a16).

Each stores what the encoding of the same name in `_models/formats` stores without a Hessian, with other codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from weightsmith._base.tensors import TensorSpec
from weightsmith._features.quantisation.exl2.matrix import (
    FactoredHessian,
    Unread,
    dequantise_matrix,
    quantise_fixed_groups,
    quantise_matrix,
)
from weightsmith._models.formats import find_encoding
from weightsmith._models.formats.compressed_tensors.integers import PACKED, decode_packed, encode_packed
from weightsmith._models.formats.exl2.layout import SUFFIXES, groups_of
from weightsmith._models.formats.exl2.writing import Exl2Matrix, parse
from weightsmith.abc.product import Arrays, Floats

_EXL2 = "exl2 "


def takes_hessian(encoding: str) -> bool:
    """Whether weights in this encoding can be calibrated.

    >>> [name for name in ("exl2 4/g128", "w4a16", "w8a16-g64", "fp8-dynamic") if takes_hessian(name)]
    ['exl2 4/g128', 'w4a16', 'w8a16-g64']
    """
    return encoding.startswith(_EXL2) or encoding in PACKED


def keeps_order(encoding: str) -> bool:
    """Whether input features must stay in their own order."""
    return encoding.startswith(_EXL2) and not parse(encoding).sort


def quantise(weight: Floats | Unread, encoding: str, hessian: FactoredHessian | None) -> Arrays:
    """The stored arrays of a weight, float32 [N, K], or of what reads it. hessian: of its inputs; None rounds to nearest."""
    if encoding.startswith(_EXL2):
        return quantise_matrix(weight, hessian, groups_of(parse(encoding).params, weight.shape[1])).arrays
    plain, (bits, _) = weight if isinstance(weight, np.ndarray) else weight.read()[0], PACKED[encoding]
    return encode_packed(plain, encoding, lambda scales: quantise_fixed_groups(plain, hessian, bits, scales))


def dequantise(arrays: Arrays, encoding: str, shape: tuple[int, ...]) -> Floats:
    """The weight as loaders compute it: float32 [N, K]."""
    if not encoding.startswith(_EXL2):
        return decode_packed(arrays, encoding)
    stored: dict[str, Any] = dict(zip(SUFFIXES, arrays, strict=True))
    return dequantise_matrix(Exl2Matrix(**stored, out_features=shape[0])).astype(np.float32)


def split(weights: Mapping[str, str], specs: Mapping[str, TensorSpec], arrays: Arrays) -> Iterator[tuple[str, Arrays]]:
    """The stored arrays of each weight. weights: encodings by name; arrays: of all of them, in order."""
    rest = iter(arrays)
    for name, encoding in weights.items():
        yield name, [next(rest) for _ in find_encoding(encoding).outs(specs[name])]
