"""Weights in an encoding, with a Hessian: EXL2, and the integers with scales for groups of inputs (w4a16, w8a16).

Each stores what the encoding of the same name in `_models/formats` stores without a Hessian, with other codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats import find_encoding
from weightsmith._models.formats.exl2.layout import SUFFIXES, groups_of
from weightsmith._models.formats.exl2.writing import Exl2Matrix, parse
from weightsmith.abc.product import Arrays, Floats

if TYPE_CHECKING:
    from weightsmith._features.quantisation.exl2.matrix import FactoredHessian, Unread

_EXL2 = "exl2 "
_INTEGERS = re.compile(r"w([48])a16(?:-g(\d+))?")
_GROUP = 128


def takes_hessian(encoding: str) -> bool:
    """Whether weights in this encoding can be calibrated.

    >>> [name for name in ("exl2 4/g128", "w4a16", "w8a16-g64", "fp8-dynamic") if takes_hessian(name)]
    ['exl2 4/g128', 'w4a16', 'w8a16-g64']
    """
    return encoding.startswith(_EXL2) or _INTEGERS.fullmatch(encoding) is not None


def problem(candidates: Iterable[tuple[str, str]], specs: Mapping[str, TensorSpec]) -> str:
    """Why weights cannot be calibrated in these encodings, or "". candidates: name and encoding; specs: by name."""
    for name, encoding in candidates:
        if name not in specs or not takes_hessian(encoding):
            return "it has no step for a weight, or cannot calibrate its encoding"
        try:
            if why := find_encoding(encoding).refusal(specs[name]):
                return why
        except WeightsmithError as error:
            return error.finding.what
    return ""


def keeps_order(encoding: str) -> bool:
    """Whether input features must stay in their own order."""
    return encoding.startswith(_EXL2) and not parse(encoding).sort


def quantise(weight: Floats | Unread, encoding: str, hessian: FactoredHessian | None) -> Arrays:
    """The stored arrays of a weight, float32 [N, K], or of what reads it. hessian: of its inputs; None rounds to nearest."""
    from weightsmith._features.quantisation.exl2.matrix import quantise_fixed_groups, quantise_matrix

    if encoding.startswith(_EXL2):
        return quantise_matrix(weight, hessian, groups_of(parse(encoding).params, weight.shape[1])).arrays
    bits, group = _integers(encoding)
    plain = weight if isinstance(weight, np.ndarray) else weight.read()[0]
    codes, scales = quantise_fixed_groups(plain, hessian, bits, group, DTYPES["BF16"])
    each = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // each), np.uint32)
    unsigned = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint32)
    for i in range(each):
        words |= unsigned[:, i::each] << np.uint32(bits * i)
    return words.view(np.int32), scales, np.array(weight.shape, np.int64)


def dequantise(arrays: Sequence[npt.NDArray[Any]], encoding: str, shape: tuple[int, ...]) -> Floats:
    """The weight as loaders compute it: float32 [N, K]."""
    from weightsmith._features.quantisation.exl2.matrix import dequantise_matrix

    if encoding.startswith(_EXL2):
        stored: dict[str, Any] = dict(zip(SUFFIXES, arrays, strict=True))
        return dequantise_matrix(Exl2Matrix(**stored, out_features=shape[0])).astype(np.float32)
    bits, group = _integers(encoding)
    packed, scales, _ = arrays
    words, each = packed.view(np.uint32), 32 // bits
    codes = np.empty(shape, np.float32)
    for i in range(each):
        codes[:, i::each] = words >> np.uint32(bits * i) & np.uint32((1 << bits) - 1)
    codes -= 1 << (bits - 1)
    codes *= np.repeat(scales.astype(np.float32), group, axis=1)
    return codes


def _integers(encoding: str) -> tuple[int, int]:
    match = _INTEGERS.fullmatch(encoding)
    assert match is not None, encoding
    return int(match[1]), int(match[2] or _GROUP)


def split(
    weights: Mapping[str, str], specs: Mapping[str, TensorSpec], arrays: Arrays
) -> Iterator[tuple[str, Sequence[npt.NDArray[Any]]]]:
    """The stored arrays of each weight. weights: encodings by name; arrays: of all of them, in order."""
    rest = iter(arrays)
    for name, encoding in weights.items():
        yield name, [next(rest) for _ in find_encoding(encoding).outs(specs[name])]
