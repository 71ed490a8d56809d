"""exl3: trellis codes, as exllamav3 loads them. `layout.py` describes the tensors.

The name of an encoding has its rate: `exl3 4`, `exl3 2.5`. A matrix is encoded as a whole, because its inputs have scales of
their own.

Each weight is divided by a scale of its output and of its input, and given their random signs. The rotation of blocks of
128 x 128 then makes all numbers nearly normally distributed, with a variance of 1, for which each rate has the best factor to
the values of the codebook.

**With what enters a weight**, errors are compensated by LDLQ (Tseng et al. 2024, https://arxiv.org/abs/2406.11235): the Hessian
of the inputs, rotated like the weight, is L D Lᵀ with blocks of 16 x 16. Rows of 16 inputs are encoded from the last to the
first, and what the errors of later rows cause is added to those before, times L. Then only D weighs the errors. torch computes
the factorisation and the products of matrices.

**Determinism.** As in `formats/hessians.py`. Output features do not depend on each other, so those of a matrix are encoded on
several threads, always the same ones together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.torch_use import Tensor, one_thread
from weightsmith._models.formats.exl3.layout import (
    BLOCK,
    CODEBOOKS,
    MUL1,
    RATES,
    Floats,
    Halves,
    Rate,
    padded_size,
    stored_specs,
    values_of,
)
from weightsmith._models.formats.hessians import MIN_DAMPING, check_hessian, check_side, damped_cholesky
from weightsmith._models.formats.matrices import SUFFIX, WholeEncoding, matrix_refusal
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import FactoredHessian, Float16, HessianForm, Kind, Unread

FAMILY = "exl3"

ROWS = 16
"""Inputs that are encoded at once: those of a tile."""

DAMPING = 0.025
"""Share of the rotated Hessian's mean diagonal that is added to it."""

COLUMNS = 512
"""Outputs that are encoded together, on one thread."""

_BAND = 1024
_INPUT_SIGNS, _OUTPUT_SIGNS = 0x45584C33, 0x45584C34
"""Keys of the random signs."""

Words = npt.NDArray[np.uint32]
Floats64 = npt.NDArray[np.float64]


class Search(NamedTuple):
    """How the streams of a rate are found. Measured with normally distributed weights.

    gain    what numbers with a variance of 1 are multiplied by
    units   of 1, in which the search computes
    around  see `encode_tiles`: 128, as in exllamav3, makes errors 0.3 to 1% smaller, in a third more time
    """

    gain: float
    units: float
    around: int = 64


SEARCH = {
    Rate(2): Search(1.05, 20),
    Rate(3): Search(1.02, 30),
    Rate(4): Search(1.0, 45),
    Rate(5): Search(0.98, 65),
    Rate(6): Search(0.96, 95),
    Rate(7): Search(0.93, 105),
    Rate(8): Search(0.9, 115, 48),
    Rate(10): Search(0.87, 200, 48),
    Rate(12): Search(0.85, 280, 48),
    Rate(14): Search(0.79, 909, 32),
    Rate(16): Search(0.77, 1667, 32),
}


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a matrix with their signs, padded with zeros.

    inputs   float16 [K]: `suh`
    outputs  float16 [N]: `svh`
    """

    inputs: Halves
    outputs: Halves


@dataclass(frozen=True, slots=True)
class Exl3Matrix:
    """The stored tensors of a linear layer; see `layout.py`. words: the trellis, uint32 [K / 16, N / 16, 8 · bits]."""

    words: Words
    scales: Scales

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int16 | np.float16 | np.int32], ...]:
        """The tensors in the order of `stored_specs`."""
        marker = np.array(CODEBOOKS[MUL1], np.uint32).view(np.int32)
        return self.words.view(np.int16), self.scales.inputs, self.scales.outputs, marker


def of_arrays(arrays: Sequence[npt.NDArray[Any]]) -> Exl3Matrix:
    """The matrix with these tensors."""
    trellis, inputs, outputs, _ = arrays
    return Exl3Matrix(trellis.view(np.uint32), Scales(inputs, outputs))


def find_scales(weight: Floats, rate: Rate) -> Scales:
    """Scales that make the numbers of each block of 128 x 128 of a weight [N, K] alike.

    An output's scale is the square root of its norm, so that errors are moved to outputs with large weights without being
    proportional to them: with equal weight on all outputs, that makes their sum smallest. An input's scale is its norm.

    Raises NonFinite, also for a weight whose scale float16 cannot hold.
    """
    n, k = weight.shape
    norms = np.zeros(padded_size(n))
    for top in range(0, n, _BAND):
        norms[top : min(top + _BAND, n)] = np.square(weight[top : top + _BAND], dtype=np.float64).mean(1)
    if not np.isfinite(norms).all():
        raise NonFinite("a weight is NaN or infinite", fix="repair the model")
    levelled = _levelled(np.sqrt(np.sqrt(norms)), np.sqrt(norms))
    outputs: Halves = (levelled * _signs(len(norms), _OUTPUT_SIGNS)).astype(np.float16)
    factors = _inverse(outputs)[:n].astype(np.float64)
    squares = np.zeros(padded_size(k))
    for top in range(0, n, _BAND):
        squares[:k] += np.square(weight[top : top + _BAND] * factors[top : top + _BAND, None]).sum(0)
    inputs = np.sqrt(squares / len(norms))
    inputs *= np.repeat(np.sqrt((inputs.reshape(-1, BLOCK) > 0).mean(1)), BLOCK) / SEARCH[rate].gain
    if inputs.max() > np.finfo(np.float16).max:
        what = "a weight is too large for a scale in float16"
        raise NonFinite(what, fix="repair the model, or choose another format")
    signed: Halves = (inputs * _signs(len(inputs), _INPUT_SIGNS)).astype(np.float16)
    return Scales(signed, outputs)


def _levelled(scales: Floats64, sizes: Floats64) -> Floats64:
    """Scales so that Σ (size / scale)² is 1 for each block on average: multiplied by one number for each."""
    levelled, mean = np.zeros_like(scales), np.sqrt(np.square(sizes).mean())
    if not mean:
        return levelled
    ratios = np.divide(sizes / mean, scales, out=np.zeros_like(scales), where=scales > 0)
    level = np.sqrt(np.square(ratios).reshape(-1, BLOCK).mean(1))
    levelled[:] = scales * np.repeat(level, BLOCK)
    return levelled


def _signs(count: int, key: int) -> npt.NDArray[np.float64]:
    """1 or -1."""
    from weightsmith._kernels.randomness import random_words

    words = np.empty(count + 512, np.uint32)
    first = random_words(key, 0, count, words)
    return 1 - 2 * (words[first : first + count] >> 31).astype(np.float64)


def _inverse(scales: Halves) -> Floats:
    """float32: 1 / scale; 0 where it is 0."""
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)


def rotated(rows: Floats, factors: Floats, output_factors: Floats) -> Floats:
    """float32 [K, n padded]: H (rows · factors · own)ᵀ H of outputs. factors: of inputs; own: of these outputs, padded."""
    from weightsmith._kernels.trellis import rotate_rows

    turned = np.empty((len(factors), len(output_factors)), np.float32)
    part = np.empty((len(factors), BLOCK), np.float32)
    for top in range(0, len(output_factors), BLOCK):
        rotate_rows(np.ascontiguousarray(rows[top : top + BLOCK]), factors, output_factors[top : top + BLOCK], part)
        turned[:, top : top + BLOCK] = part
    return turned


class Encoder:
    """Finds streams of one rate. For one thread."""

    def __init__(self, rate: Rate) -> None:
        search = SEARCH[rate]
        steps = rate.steps
        units, by_step, farthest, most = _tables(rate)
        self._settings = steps, search.units, search.around, values_of(MUL1), units, by_step, farthest, most
        self._costs = np.empty((259, 1 << (16 - int(steps.min()))), most.dtype)
        self._words = rate.words // 2

    def encode(self, rows: Floats, words: Words) -> Floats:
        """The values of 16 rows of rotated weights, float32 [16, n]. words: uint32 [n / 16, words of a tile], filled."""
        from weightsmith._kernels.trellis import encode_tiles

        tiles = rows.reshape(16, -1, 16).transpose(1, 0, 2).reshape(-1, 256)
        streams, values = np.empty((len(tiles), self._words), np.uint32), np.empty((len(tiles), 256), np.float32)
        encode_tiles(np.ascontiguousarray(tiles[:, _order()]), *self._settings, self._costs, streams, values)
        words[:] = streams
        plain = np.empty_like(values)
        plain[:, _order()] = values
        return plain.reshape(-1, 16, 16).transpose(1, 0, 2).reshape(16, -1)


@cache
def _order() -> npt.NDArray[np.int64]:
    """int64 [256]: the place in a row-major tile of each weight of a stream."""
    from weightsmith._kernels.trellis import PLACES

    order: npt.NDArray[np.int64] = PLACES // BLOCK * 16 + PLACES % BLOCK
    return order


@cache
def _tables(rate: Rate) -> tuple[Any, Any, Any, Any]:
    """The arguments `values`, `sorted_values`, `farthest` and `most` of `encode_tiles`."""
    wide = rate.steps.max() >= 7
    narrow, costs = (np.int32, np.uint32) if wide else (np.int16, np.uint16)
    farthest = 1 << 14 if wide else 127
    values = np.rint(values_of(MUL1) * np.float32(SEARCH[rate].units)).astype(narrow)
    by_step = np.stack([np.ascontiguousarray(values.reshape(-1, 1 << bits).T).reshape(-1) for bits in rate.steps])
    return values, by_step, narrow(farthest), costs(np.iinfo(costs).max - farthest * farthest)


def store(
    weight: Floats, rate: Rate, scales: Scales, columns: Callable[[Floats, Encoder, Words], None], threads: int = 1
) -> Exl3Matrix:
    """Encode a weight [N, K], `COLUMNS` outputs at a time.

    columns  encodes rotated weights [K, n]; fills words [K / 16, n / 16, …]
    """
    factors, output_factors = _inverse(scales.inputs), _inverse(scales.outputs)
    words = np.empty((len(factors) // 16, len(output_factors) // 16, rate.words // 2), np.uint32)

    def encode(first: int) -> None:
        part = slice(first, first + COLUMNS)
        columns(
            rotated(weight[part], factors, output_factors[part]), Encoder(rate), words[:, first // 16 : (first + COLUMNS) // 16]
        )

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(encode, range(0, len(output_factors), COLUMNS)))
    return Exl3Matrix(words, scales)


def encode_plainly(target: Floats, encoder: Encoder, words: Words) -> None:
    """The nearest streams of rotated weights [K, n]."""
    for first in range(0, len(target), 16):
        encoder.encode(target[first : first + 16], words[first // 16])


# ---- codes for what enters a weight


def quantise_matrix(weight: Floats | Unread, hessian: Floats | None, rate: Rate, threads: int = 1) -> Exl3Matrix:
    """Quantise the weight of a linear layer.

    weight   float32 [N, K], or what reads it; not modified
    hessian  float32 [K, K]: Σ xxᵀ over the inputs x; any scale. None: the nearest streams
    threads  the result does not depend on them

    Raises NonFinite; ParameterError for a Hessian that no damping makes positive definite, or of another number of inputs.

    Cost: about 25 million operations on integers of 16 bits for each weight's 65,536 states; with a Hessian N K² / 2 + K³ / 3
    multiplications. Memory besides weight and result: 12 K bytes and 0.5 to 17 MB for each thread's outputs, and those of
    `factorise`.
    """
    check_side(hessian, weight.shape[1])
    plain = weight if isinstance(weight, np.ndarray) else weight.read()[0]
    scales = find_scales(plain, rate)
    if hessian is None:
        return store(plain, rate, scales, encode_plainly, threads)
    factor = factorise(hessian, scales.inputs)

    def columns(target: Floats, encoder: Encoder, words: Words) -> None:
        _compensate(target, factor, encoder, words)

    with one_thread():
        return store(plain, rate, scales, columns, threads)


def factorise(hessian: Floats, inputs: Halves) -> Tensor:
    """L of the rotated Hessian: torch float32 [K padded, K padded], unit lower triangular in blocks of 16.

    inputs  float16 [K padded]: the scales of the weight's inputs. Errors are multiplied by them

    Raises as `quantise_matrix`.
    """
    import torch

    check_hessian(hessian)
    scales = inputs.astype(np.float32)
    k = len(scales)
    with one_thread():
        turned = rotated(hessian, scales, scales)
        work = torch.empty(k, k, dtype=torch.float64)
        damping = max(DAMPING * float(turned.diagonal().mean(dtype=np.float64)), MIN_DAMPING * float(np.square(scales).mean()))
        damped_cholesky(work, lambda: work.copy_(torch.from_numpy(turned)), damping)
        for first in range(0, k, ROWS):
            part = work[first:, first : first + ROWS]
            diagonal = part[:ROWS].clone()
            torch.linalg.solve_triangular(diagonal, part.clone(), upper=False, left=False, out=part)
        return work.float()


def _compensate(target: Floats, factor: Tensor, encoder: Encoder, words: Words) -> None:
    """Encode rotated weights [K, n] from the last rows to the first. factor: L; only what is below its diagonal is used."""
    import torch

    weights = torch.from_numpy(target)
    errors, caused = torch.empty_like(weights), torch.zeros_like(weights)
    for end in range(len(target), 0, -BLOCK):
        begin = end - BLOCK
        for first in range(end - ROWS, begin - 1, -ROWS):
            last = first + ROWS
            rows = weights[first:last]
            moved = rows + caused[first:last]
            if last < end:
                moved.addmm_(factor[last:end, first:last].T, errors[last:end])
            values = encoder.encode(moved.numpy(), words[first // ROWS])
            torch.sub(rows, torch.from_numpy(np.ascontiguousarray(values)), out=errors[first:last])
        if begin:
            caused[:begin].addmm_(factor[begin:end, :begin].T, errors[begin:end])


def dequantise_matrix(matrix: Exl3Matrix, shape: tuple[int, int], rate: Rate) -> Floats:
    """The weight as it is read: float32 [N, K]. Nothing is used but the stored tensors."""
    from weightsmith._kernels.trellis import dequantise_trellis

    weight = np.empty(shape, np.float32)
    inputs, outputs = matrix.scales.inputs.astype(np.float32), matrix.scales.outputs.astype(np.float32)
    for top in range(0, shape[0], BLOCK):
        words = np.ascontiguousarray(matrix.words[:, top // 16 : (top + BLOCK) // 16]).reshape(-1)
        scales = outputs[top : top + BLOCK]
        dequantise_trellis(words, rate.steps, values_of("mul1"), inputs, scales, top, 0, shape, 0, weight.reshape(-1))
    return weight


# ---- the encoding


@dataclass(frozen=True, slots=True)
class Exl3(WholeEncoding):
    """Matrices `X.weight` → `X.trellis`, `X.suh`, `X.svh`, `X.mul1`, all with one rate."""

    kind: ClassVar[Kind] = "trellis"
    whole: ClassVar[int] = 4
    hessian: ClassVar[HessianForm] = "whole"
    float16: ClassVar[Float16] = "always"
    rate: Rate

    @property
    def name(self) -> str:
        """As `exl3 2.5`."""
        return f"{FAMILY} {self.rate}"

    @property
    def bits(self) -> float:
        return self.rate.bits

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts matrices named `….weight`."""
        return matrix_refusal(spec)

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The four tensors.

        >>> from weightsmith._base.tensors import DTYPES
        >>> for out in parse("exl3 2.5").outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 256)))[:2]:
        ...     print(out)
        q_proj.trellis [16, 8, 40] I16
        q_proj.suh [256] F16
        """
        n, k = spec.shape
        return stored_specs(spec.name.removesuffix(SUFFIX), self.rate, k, n)

    def rounded(self, weight: Floats) -> Arrays:
        return quantise_matrix(weight, None, self.rate).arrays

    def quantise(self, weight: Floats | Unread, hessian: Floats | FactoredHessian | None, threads: int) -> Arrays:
        assert not isinstance(hessian, FactoredHessian)
        return quantise_matrix(weight, hessian, self.rate, threads).arrays

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Floats:
        outputs, inputs = shape
        return dequantise_matrix(of_arrays(arrays), (outputs, inputs), self.rate)


def find(name: str) -> Exl3 | None:
    """The encoding of a name; None for a name of others. Raises ValueError."""
    return parse(name) if name.partition(" ")[0] == FAMILY else None


def parse(name: str) -> Exl3:
    """The encoding of a name. Raises ValueError.

    >>> parse("exl3 2.5").bits
    2.5
    """
    encoding = next((encoding for encoding in map(Exl3, RATES) if encoding.name == name), None)
    if encoding is None:
        raise ValueError(name)
    return encoding
