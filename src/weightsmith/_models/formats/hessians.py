"""Codes that suit what enters a weight: GPTQ's rounding, for any format of integers with scales.

The rounding is GPTQ's (Frantar et al. 2022, https://arxiv.org/abs/2210.17323), over groups of input features that each have a
number of bits, as in ExLlamaV2. The error of a feature is passed on to those after it, so that the layer's output changes
least. With a Hessian, torch computes the factorisation and the products of matrices.

**Determinism.** The result depends on the arguments alone: loops over elements are compiled kernels, and torch computes on one
thread, on arrays that it aligns. Quantise several matrices at once to use several threads. Other processors and other versions
of torch may round differently.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NonFinite, ParameterError
from weightsmith._base.torch_use import Tensor, one_thread
from weightsmith.abc.product import Arrays, Floats
from weightsmith.abc.stored import FactoredHessian, Unread

Places = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]
ScalesOf = Callable[[int, Floats], tuple[Floats, Places]]
"""(number of a group, its rows [r, N']) → scales [s, N'], and which of them each row has."""


class Group(NamedTuple):
    """Some input features that share a number of bits, and for each output feature a scale."""

    bits: int
    rows: int


Groups = tuple[Group, ...]

TILE = 128
"""Rows whose errors are passed on to all later rows in one product of matrices; more if a group is larger."""
INVERTED = 512
"""Rows and columns of a block of an inverse. The products of its blocks on several threads are those of one."""
SORTED = 256
"""Rows of a Hessian that are put in order at once."""
COPIED = 1024
"""Output features whose inputs are put in order at once: a multiple of `PADDED`."""
PADDED = 32
"""A multiple of it are the output features of codes for float16."""

DAMPING = 0.12
"""Share of the Hessian's mean diagonal that is added to it."""
MIN_DAMPING = 1e-5
ATTEMPTS = 10

SHARES = tuple(np.float32(share) for share in (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55))
"""Shares of the range of a group that are tried."""

PREPARE_BYTES = 13
"""For each number of a Hessian that `prepare` takes, besides the Hessian."""


def prepare(hessian: Floats, *, sort: bool = True, threads: int = 1) -> FactoredHessian:
    """Sort, damp, factorise and invert a Hessian.

    hessian  float32 [K, K]: Σ xxᵀ over the inputs x of a layer; any scale
    sort     False leaves features in their own order. `down_proj` of an MLP with biases needs it: the loader moves the order of
             its inputs to the outputs of gate and up, but not to their biases
    threads  that may compute; the result does not depend on their number

    If the damped Hessian is not positive definite, more damping is added, up to `ATTEMPTS` times. Inputs that are always zero
    need no special case. Raises NonFinite, and ParameterError if no damping helps.

    Cost: K³ / 3 multiplications in float64, and 13 K² bytes besides the Hessian.
    """
    import torch

    check_hessian(hessian)
    diagonal = hessian.diagonal().astype(np.float64)
    order = np.argsort(-diagonal, kind="stable") if sort else np.arange(len(diagonal))
    k, damping = len(order), max(DAMPING * float(diagonal.mean()), MIN_DAMPING)
    with one_thread():
        # Its columns are contiguous, as LAPACK needs them: any other matrix is copied.
        work = torch.empty(k, k, dtype=torch.float64).mT

        def fill() -> None:
            # Factorised from the last feature to the first: H = R Rᵀ with R upper triangular, and U = R⁻¹.
            for top in range(0, k, SORTED):
                work.mT[top : top + SORTED].numpy()[:] = hessian[order[::-1][top : top + SORTED]][:, order[::-1]]

        damped_cholesky(work, fill, damping)
        _invert(work, threads)
        factor = torch.empty(k, k)
        factor.numpy()[:] = work.numpy()[::-1, ::-1]
    return FactoredHessian(order, factor)


def check_hessian(hessian: Floats) -> None:
    """Raise NonFinite for one that has NaN or infinity."""
    if not np.isfinite(hessian).all():
        raise NonFinite("the Hessian of a layer contains NaN or infinity", fix="check the model's activations")


def check_side(hessian: Floats | FactoredHessian | None, inputs: int) -> None:
    """Raise ParameterError for one that is not of as many inputs as a weight has: some of its codes would not be written."""
    if hessian is None:
        return
    sides = hessian.shape if isinstance(hessian, np.ndarray) else (len(hessian.order), *hessian.factor.shape)
    if wrong := [side for side in sides if side != inputs]:
        raise ParameterError(f"a Hessian of {wrong[0]:,} inputs for a weight of {inputs:,}")


def damped_cholesky(work: Tensor, fill: Callable[[], None], damping: float) -> None:
    """Factorise a Hessian in place, float64, with as much damping as it takes. Raises ParameterError if none helps.

    fill  writes the Hessian into `work`
    """
    import torch

    failed = torch.empty((), dtype=torch.int32)
    for attempt in range(1, ATTEMPTS + 1):
        fill()
        work.diagonal().add_(attempt * damping)
        torch.linalg.cholesky_ex(work, out=(work, failed))
        if not failed and bool(work.diagonal().isfinite().all()):
            return
    raise ParameterError(f"the Hessian of a layer is not positive definite, even with {ATTEMPTS * damping:.3g} on its diagonal")


def _invert(lower: Tensor, threads: int) -> None:
    """Invert a lower triangular matrix in place, float64, zeros above its diagonal.

    Columns of blocks, from the last to the first. What is below the diagonal becomes -A · B · C: the inverse of what is to its
    right, the column, and the inverse of the block on the diagonal. Each thread computes some blocks of the column.
    """
    import torch

    k = len(lower)
    blocks = [slice(first, min(first + INVERTED, k)) for first in range(0, k, INVERTED)]

    def invert(block: slice) -> None:
        with one_thread():
            identity = torch.eye(block.stop - block.start, dtype=torch.float64)
            lower[block, block] = torch.linalg.solve_triangular(lower[block, block].contiguous(), identity, upper=False)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(invert, blocks))
        for column in reversed(blocks):
            below = lower[column.stop :, column] @ lower[column, column]

            def substitute(block: slice, column: slice = column, below: Tensor = below) -> None:
                with one_thread():
                    row = lower[block, column.stop : block.stop]
                    lower[block, column] = (row @ below[: block.stop - column.stop]).neg_()

            list(pool.map(substitute, [block for block in blocks if block.start >= column.stop]))


def quantise_fixed_groups(weight: Floats, hessian: FactoredHessian, bits: int, scales: Floats) -> Floats:
    """GPTQ for symmetric integers with a scale for each output feature and each group of neighbouring inputs, as in w4a16.

    weight   float32 [N, K], finite
    hessian  of its inputs
    bits     2 to 8
    scales   float32 [N, groups], positive: readers compute code · scale

    Returns codes, float32 [N, K]: integers of -2^(bits - 1) … 2^(bits - 1) - 1.

    Features are rounded in the order of the Hessian, but groups and scales are those of the plain weight: readers need no table
    of groups (`g_idx`). Cost as for `quantise_matrix`, without the scale search.
    """
    n, k = weight.shape
    order = hessian.order
    by_group, size = np.ascontiguousarray(scales.T), k // scales.shape[1]
    groups = tuple(Group(bits, min(TILE, k - first)) for first in range(0, k, TILE))
    codes = np.empty((n, k), np.float32)

    def scales_of(number: int, rows: Floats) -> tuple[Floats, Places]:
        return by_group, order[number * TILE :][: len(rows)] // size

    for number, codes_of_group in enumerate(rounded(weight, hessian, groups, scales_of)):
        codes[:, order[number * TILE :][: len(codes_of_group)]] = codes_of_group.T
    codes -= 1 << (bits - 1)
    return codes


@dataclass(frozen=True, slots=True)
class CodesOf:
    """(weight [N, K], scales [N, groups]) → codes that suit the weight's inputs, float32 [N, K]: integers of -2^(bits - 1) …
    2^(bits - 1) - 1."""

    hessian: FactoredHessian
    bits: int

    def __call__(self, weight: Floats, scales: Floats) -> Floats:
        return quantise_fixed_groups(weight, self.hessian, self.bits, scales)

    def narrowed(self, weight: Floats, grid: Callable[[np.float32], tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
        """The scales and zeros of groups whose ranges are narrower where what this clips costs less than what it gains.

        weight  float32 [N, K], finite
        grid    (share of the ranges) → scales and zeros, float32 [N, groups] each, as `group_costs` takes them

        Of `SHARES`, each group gets the first of those with the least errors that later features cannot make up for.
        """
        from weightsmith._kernels.codes import group_costs

        steps, zeros = grid(SHARES[0])
        least, totals = np.empty((2, *steps.shape))
        group, costs = weight.shape[1] // steps.shape[1], self.costs
        group_costs(weight, group, steps, zeros, self.bits, costs, least)
        for share in SHARES[1:]:
            tried_steps, tried_zeros = grid(share)
            group_costs(weight, group, tried_steps, tried_zeros, self.bits, costs, totals)
            better = totals < least
            least[better], steps[better], zeros[better] = totals[better], tried_steps[better], tried_zeros[better]
        return steps, zeros

    def narrowed_scales(self, weight: Floats, scales_of: Callable[[np.float32], Floats]) -> Floats:
        """`narrowed` for symmetric codes. scales_of: (share of the ranges) → scales, float32 [N, groups]."""

        def grid(share: np.float32) -> tuple[Floats, Floats]:
            scales = scales_of(share)
            return scales, np.full_like(scales, 1 << (self.bits - 1))

        return self.narrowed(weight, grid)[0]

    @property
    def costs(self) -> Floats:
        """What the square of an error of each input feature costs, float32 [K]: what later features cannot make up for."""
        costs = np.empty(len(self.hessian.order), np.float32)
        costs[self.hessian.order] = self.hessian.factor.diagonal().numpy() ** -2
        return costs


def quantise_groups(
    weight: Floats | Unread, hessian: FactoredHessian | None, bits: int, encode: Callable[[Floats, CodesOf | None], Arrays]
) -> Arrays:
    """The stored arrays of a weight in fixed groups. encode: (weight, what chooses its codes) → them.

    Raises NonFinite; ParameterError for a Hessian of another number of inputs.
    """
    check_side(hessian, weight.shape[1])
    plain = weight if isinstance(weight, np.ndarray) else weight.read()[0]
    if not np.isfinite(plain).all():
        raise NonFinite("a weight is NaN or infinite", fix="repair the model")
    if hessian is None:
        return encode(plain, None)
    return encode(plain, CodesOf(hessian, bits))


# ---- rounding


def _padded(features: int) -> int:
    return -(-features // PADDED) * PADDED


def rows_of(weight: Floats, features: Places, *, half: bool) -> Floats:
    """Some columns of a weight as rows: float32 [r, N'].

    half  round them to float16, and pad N with zeros to a multiple of `PADDED`

    Raises NonFinite for a number that float16 cannot hold.
    """
    part = weight[:, features].T
    if not half:
        return np.ascontiguousarray(part)
    n = len(weight)
    rows = np.zeros((len(part), _padded(n)), np.float32)
    with np.errstate(over="ignore"):
        rows[:, :n] = part.astype(np.float16)
    if not np.isfinite(rows).all():
        raise NonFinite("a weight is not a number that float16 can hold, and its values are float16", fix="repair the model")
    return rows


def round_plainly(weight: Floats, order: Places, groups: Groups, scales_of: ScalesOf, *, half: bool) -> Iterator[Codes]:
    """The codes of each group, rounded to nearest, features in this order: uint8 [rows, N']. half: see `rows_of`."""
    from weightsmith._kernels.exl2 import quantise_rows

    none, first = np.empty((0, 0), np.float32), 0
    for number, group in enumerate(groups):
        rows = rows_of(weight, order[first : first + group.rows], half=half)
        codes = np.empty(rows.shape, np.uint8)
        quantise_rows(rows, *scales_of(number, rows), group.bits, half, none, codes, none)
        yield codes
        first += group.rows


def rounded(
    weight: Floats | Unread, prepared: FactoredHessian | None, groups: Groups, scales_of: ScalesOf, *, half: bool = False
) -> Iterator[Codes]:
    """The codes of each group: uint8 [rows, N']. `scales_of` sees rows with the errors of earlier groups taken into account.

    half  weights and values are rounded to float16, and N is padded

    A row's error is passed on to the rest of its group at once, to the rest of a run of up to `TILE` rows after the group, and
    to all later rows after the run.
    """
    plain, pages = (weight, None) if isinstance(weight, np.ndarray) else weight.read()
    if prepared is None:
        yield from round_plainly(plain, np.arange(plain.shape[1]), groups, scales_of, half=half)
        return
    import torch

    from weightsmith._kernels.exl2 import quantise_rows

    order, factor = prepared.order, prepared.factor
    cols = _padded(len(plain)) if half else len(plain)
    w, errors = torch.empty(len(order), cols), torch.empty(max(TILE, *(group.rows for group in groups)), cols)
    for top in range(0, len(plain), COPIED):
        some = rows_of(plain[top : top + COPIED], order, half=half)
        w[:, top : top + some.shape[1]].numpy()[:] = some
        copied_bytes = plain[: top + COPIED].nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        if pages is not None and copied_bytes and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED, 0, copied_bytes)  # gives the memory back, and loses the numbers
    number = begin = 0
    for run in _runs(groups):
        first, end = begin, begin + sum(group.rows for group in run)
        for group in run:
            last = first + group.rows
            rows, caused = w[first:last], errors[first - begin : last - begin]
            codes = np.empty(rows.shape, np.uint8)
            block = factor[first:last, first:last].contiguous().numpy()
            quantise_rows(rows.numpy(), *scales_of(number, rows.numpy()), group.bits, half, block, codes, caused.numpy())
            yield codes
            _pass_on(caused, factor[first:last, last:end], w[last:end])
            first, number = last, number + 1
        _pass_on(errors[: end - begin], factor[begin:end, end:], w[end:])
        begin = end


def _pass_on(errors: Tensor, factor: Tensor, rows: Tensor) -> None:
    """Subtract what the errors of rounded rows cause from later rows."""
    if len(rows):
        with one_thread():
            rows.addmm_(factor.T, errors, alpha=-1)


def _runs(groups: Groups) -> Iterator[list[Group]]:
    """Neighbouring groups of up to `TILE` rows together."""
    run: list[Group] = []
    for group in groups:
        if run and sum(g.rows for g in run) + group.rows > TILE:
            yield run
            run = []
        run.append(group)
    yield run
