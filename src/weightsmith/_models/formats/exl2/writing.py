"""exl2: codes of 2 to 8 bits in groups of input features, as ExLlamaV2 loads them. `layout.py` describes the tensors.

The name of an encoding has the setting of the matrix: `exl2 5@0.1/g128+4@0.9/g128`. A matrix is encoded as a whole, because all
of its output features share the largest scale of a group.

Codes are rounded to nearest, with scales found by a search over the weights alone, and features sorted by their norm; or
chosen for a layer's inputs (`formats/hessians.py`), with features sorted by the Hessian's diagonal. Codes are chosen with the
scales that the loader computes in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.exl2.layout import (
    SUFFIXES,
    Floats,
    Halves,
    Params,
    groups_of,
    pack_codes,
    packed_rows,
    padded,
    params,
    scale_values,
    stored_specs,
    why_illegal,
)
from weightsmith._models.formats.exl2.reading import decode_columns, read_parameters
from weightsmith._models.formats.hessians import Codes, Groups, Places, ScalesOf, check_side, round_plainly, rounded
from weightsmith._models.formats.matrices import SUFFIX, WholeEncoding, matrix_refusal
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import (
    FactoredHessian,
    Float16,
    HessianForm,
    Kind,
    Unread,
)

FAMILY = "exl2"
_UNSORTED = " unsorted"
_BAND = 1024

GRID = np.linspace(0.70, 1.20, 97)
"""Factors that the scale search tries."""
_FIRST_GUESS = 48


@dataclass(frozen=True, slots=True)
class Exl2Matrix:
    """The stored tensors of a linear layer; `layout.py` describes them.

    q_weight      int32 [R, N']: N' is N rounded up to a multiple of 32
    q_scale       int32 [G, N' / 8]
    q_scale_max   float16 [G]
    q_groups      int16 [2 G]
    q_invperm     int32 [K]
    out_features  N
    """

    q_weight: npt.NDArray[np.int32]
    q_scale: npt.NDArray[np.int32]
    q_scale_max: Halves
    q_groups: npt.NDArray[np.int16]
    q_invperm: npt.NDArray[np.int32]
    out_features: int

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int32 | np.int16 | np.float16], ...]:
        """The tensors in the order of `layout.SUFFIXES`."""
        return self.q_weight, self.q_scale, self.q_scale_max, self.q_groups, self.q_invperm


def store(shape: tuple[int, int], groups: Groups, order: Places, codes_of: Callable[[ScalesOf], Iterator[Codes]]) -> Exl2Matrix:
    """Search scales, and pack codes.

    shape     [N, K] of the weight
    groups    bits and rows, in stored order
    order     int64 [K]: the input feature of each row
    codes_of  called with the scale search; yields the codes of each group, uint8 [rows, N']

    Raises Unsupported for groups or a shape that ExLlamaV2 cannot load.
    """
    from weightsmith._kernels.codes import pack_down

    n, k = shape
    if why := why_illegal(groups, k):
        raise Unsupported(f"the matrix [{n}, {k}] cannot be stored as EXL2: {why}")
    cols, guess = padded(n), _FIRST_GUESS
    nibbles, tops = np.empty((len(groups), cols), np.uint8), np.empty(len(groups), np.float16)

    def scales_of(number: int, rows: Floats) -> tuple[Floats, Places]:
        nonlocal guess
        nibbles[number], tops[number], scales, guess = find_scales(rows, groups[number].bits, guess)
        return scales[None], np.zeros(len(rows), np.int64)

    words, starts, packed = np.empty((packed_rows(groups), cols), np.uint32), [], 0
    for group, codes in zip(groups, codes_of(scales_of), strict=True):
        starts.append((group.bits, packed))
        end = packed + group.rows * group.bits // 32
        pack_down(codes, group.bits, words[packed:end])
        packed = end
    inverse = np.empty(k, np.int32)
    inverse[order] = np.arange(k, dtype=np.int32)
    return Exl2Matrix(words.view(np.int32), pack_codes(nibbles), tops, np.array(starts, np.int16).ravel(), inverse, n)


def by_norm(weight: Floats) -> Places:
    """Input features, those with the largest weights first: int64 [K]. Without data, these count most.

    It also puts features of similar size into one group.
    """
    squares = np.zeros(weight.shape[1])
    for top in range(0, len(weight), _BAND):
        squares += np.square(weight[top : top + _BAND], dtype=np.float64).sum(0)
    return np.argsort(-squares, kind="stable")


def quantise_matrix(weight: Floats | Unread, hessian: FactoredHessian | None, groups: Groups) -> Exl2Matrix:
    """Quantise the weight of a linear layer.

    weight   float32 [N, K], or what reads it; rounded to float16 first; not modified
    hessian  of its inputs; None: plain rounding, features in their own order
    groups   bits and rows, in stored order (`formats.exl2.layout.groups_of`)

    N is padded to a multiple of 32 with rows that decode to zeros.

    Raises NonFinite for a weight that float16 cannot hold; Unsupported for groups or a shape that ExLlamaV2 cannot load
    (`formats.exl2.layout.why_illegal`); ParameterError for a Hessian of another number of inputs.

    Cost: about 1,000 operations for each weight, most of them in the scale search; with a Hessian N K² more, and those of
    `prepare`. Memory besides weight and result: one group of rows, and with a Hessian 4 N K bytes.
    """
    check_side(hessian, weight.shape[1])
    order = np.arange(weight.shape[1]) if hessian is None else hessian.order
    return store(weight.shape, groups, order, lambda scales_of: rounded(weight, hessian, groups, scales_of, half=True))


def dequantise_matrix(matrix: Exl2Matrix) -> Halves:
    """The weight as the loader decodes it: float16 [N, K], bit for bit.

    Independent of `quantise_matrix`: nothing is used but the stored tensors. Raises FormatError if they contradict each other.
    """
    parameters = read_parameters(matrix.q_groups, matrix.q_scale_max, matrix.q_invperm, len(matrix.q_weight))
    return decode_columns(matrix.q_weight, matrix.q_scale, parameters)[: matrix.out_features]


def find_scales(rows: Floats, bits: int, guess: int) -> tuple[npt.NDArray[np.uint8], np.float16, Floats, int]:
    """The scale codes [N'], the largest scale, the scales [N'] as the loader computes them, and their place in the grid."""
    from weightsmith._kernels.exl2 import best_scale

    base = (np.abs(rows).max(0) + np.float32(1e-12)) / np.float32(((1 << bits) - 1) / 2)
    largest = float(base.max())
    which = (np.clip(np.rint(16 * np.sqrt(base / np.float32(largest))), 1, 16) - 1).astype(np.uint8)
    tops = np.minimum(largest * GRID, 65504).astype(np.float16)
    table = scale_values(tops, np.arange(16))
    best = best_scale(rows, which, table, bits, 1 / largest, guess)
    return which, tops[best], table[best][which], best


@dataclass(frozen=True, slots=True)
class Exl2(WholeEncoding):
    """Matrices `X.weight` → `X.q_weight`, `X.q_scale`, …, all with one setting.

    sort  features by their norm, or by the Hessian's diagonal; False leaves them in their own order
    """

    kind: ClassVar[Kind] = "integer"
    whole: ClassVar[int] = len(SUFFIXES)
    float16: ClassVar[Float16] = "always"
    params: Params
    sort: bool = True

    @property
    def name(self) -> str:
        """As `exl2 4/g64 unsorted`."""
        return f"{FAMILY} {self.params}{'' if self.sort else _UNSORTED}"

    @property
    def bits(self) -> float:
        return sum(bits * share for bits, share in zip(self.params.bits, self.params.proportions, strict=True))

    @property
    def group(self) -> int:
        """The smallest: those of a matrix are of one size for each number of bits."""
        return min(self.params.group_sizes)

    @property
    def hessian(self) -> HessianForm:
        return "sorted" if self.sort else "in order"

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts matrices named `….weight` with a multiple of 32 columns."""
        return matrix_refusal(spec) or why_illegal(groups_of(self.params, spec.shape[1]), spec.shape[1])

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The five tensors.

        >>> from weightsmith._base.tensors import DTYPES
        >>> for out in parse("exl2 4/g128").outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 256)))[:2]:
        ...     print(out)
        q_proj.q_weight [32, 64] I32
        q_proj.q_scale [2, 8] I32
        """
        n, k = spec.shape
        return stored_specs(spec.name.removesuffix(SUFFIX), groups_of(self.params, k), k, n)

    def rounded(self, weight: Floats) -> Arrays:
        n, k = weight.shape
        groups, order = groups_of(self.params, k), by_norm(weight) if self.sort else np.arange(k)
        return store((n, k), groups, order, lambda scales_of: round_plainly(weight, order, groups, scales_of, half=True)).arrays

    def quantise(self, weight: Floats | Unread, hessian: Floats | FactoredHessian | None, threads: int) -> Arrays:
        assert not isinstance(hessian, np.ndarray)
        return quantise_matrix(weight, hessian, groups_of(self.params, weight.shape[1])).arrays

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Floats:
        stored: dict[str, Any] = dict(zip(SUFFIXES, arrays, strict=True))
        return dequantise_matrix(Exl2Matrix(**stored, out_features=shape[0])).astype(np.float32)


def find(name: str) -> Exl2 | None:
    """The encoding of a name; None for a name of others. Raises ValueError."""
    return parse(name) if name.partition(" ")[0] == FAMILY else None


def parse(name: str) -> Exl2:
    """The encoding of a name. Raises ValueError.

    >>> parse("exl2 4/g64 unsorted")
    Exl2(params=Params(bits=(4,), proportions=(1.0,), group_sizes=(64,)), sort=False)
    """
    encoding = Exl2(params(name.removeprefix(f"{FAMILY} ").removesuffix(_UNSORTED)), sort=not name.endswith(_UNSORTED))
    if encoding.name != name:
        raise ValueError(name)
    return encoding
