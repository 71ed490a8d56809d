"""The `factors` product: low-rank factors of the differences of some matrices, those of one layer.

The factors of a matrix have its largest rank. They come from a randomised singular value decomposition, or from an exact one,
whichever the plan says. The randomised one looks in the span of all blocks of some power iterations, a Krylov space (Musco and
Musco 2015, https://arxiv.org/abs/1504.05477), and not of the last block alone: of a matrix of noise, whose singular values are
nearly equal, factors of rank 32 then keep 98% of what the best ones keep, instead of 85%. Each block is orthogonal to those
before it (block Lanczos), so the product of the matrix with the basis is known when the basis is.

The energy that factors keep is exact in both cases: B @ A is a projection of the difference. How much more the best factors of
that rank could keep has a bound, which holds except with a probability of 1e-10 (Halko, Martinsson and Tropp 2011,
https://arxiv.org/abs/0909.4061, lemma 4.1).

**Determinism.** One thread computes the factors of a matrix, and its random numbers depend on its name alone. So the result is
the same for any number of threads, as long as processor and torch are the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._base.idioms import grouped
from weightsmith._base.options import option_error
from weightsmith._base.tensors import DTYPES, MAX_STACKED, TensorSpec
from weightsmith._base.torch_use import one_thread, usable_device
from weightsmith._methods.jobs.decompose import thin_svd
from weightsmith._plans import Product, ProductSettings, Step
from weightsmith.abc.product import Arrays, Floats, ProductContext, ProductKind

Tensor = Any  # torch is optional, so mypy cannot use its type

OVERSAMPLING = 16
"""Columns of the random sketch besides those asked for."""

POWER = 2
"""Power iterations of the bound, and the fewest of the basis."""

MORE_POWER = 5
"""Power iterations of the basis, if it has not too many columns then."""

FEW = 1024
"""Singular values of a matrix that may all be computed where a sixth of them are asked for."""

NEGLIGIBLE = 1e-5
"""Share of a block's longest row that is mostly rounding, in float32."""

PROBES = 10
"""Random vectors that the bound is estimated with; it fails with a probability of 10^-PROBES."""

SAMPLED_ROWS = 128
"""Rows of the fine-tune that its rounding is estimated from."""

WORK_BYTES = 2 << 30
"""Limit of the matrices that are held at once, if the run has no limit."""

FACTS = ("energy", "noise", "bound", "intruders")

CHECKED = 10
"""Largest singular vectors of a fine-tune that may be intruders."""

UNLIKE = 0.5
"""An intruder has a smaller cosine than this with each singular vector of the base."""

Form = Literal["linear", "transposed", "embedding"]


@dataclass(frozen=True, slots=True)
class FactorTarget:
    """A module whose weight becomes factors.

    module   its name; of experts that are one parameter, the parameter's
    form     `linear`: the weight is [outputs, inputs], and its difference B @ A; else the difference is (B @ A)ᵀ
    rank     of the factors
    exact    an exact decomposition, not a randomised one
    experts  matrices that are one parameter, each with factors of its own; 0: a single matrix
    group    targets of the same group get the same rank; "": the target is in none
    """

    module: str
    form: Form
    rank: int
    exact: bool
    experts: int = 0
    group: str = ""

    def outs(self, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """The arrays: A [rank, inputs], B [outputs, rank], singular values, and `FACTS`. shape: of one matrix.

        Of experts, A is [experts, rank · inputs], and B [outputs, rank · experts]: the first columns of both are what PEFT
        has for a smaller rank. Values and facts are one row for each expert.
        """
        outputs, inputs = shape if self.form == "linear" else shape[::-1]
        f32, f64 = DTYPES["F32"], DTYPES["F64"]
        stacked = (self.experts,) if self.experts else ()
        return (
            TensorSpec(f"{self.module}: A", f32, (*stacked, self.rank * inputs) if stacked else (self.rank, inputs)),
            TensorSpec(f"{self.module}: B", f32, (outputs, self.rank * max(1, self.experts))),
            TensorSpec(f"{self.module}: values", f64, (*stacked, self.rank)),
            TensorSpec(f"{self.module}: facts", f64, (*stacked, len(FACTS))),
        )

    @property
    def matrices(self) -> tuple[str, ...]:
        """The name of its weight, or of each expert's: those of the steps of the differences."""
        return tuple(f"{self.module}[{e}]" for e in range(self.experts)) or (f"{self.module}.weight",)

    @staticmethod
    def tuned(matrix: str) -> str:
        """The name of the step of a matrix in the fine-tune."""
        return f"{matrix.removesuffix('.weight')}: fine-tuned"


@dataclass(frozen=True, slots=True)
class FactorWork(ProductSettings):
    """The settings of a product.

    targets    in the order of the arrays
    spread     the singular values are shared between A and B; else all of them are in A
    before     elements of the matrices of earlier products, and `total` of all: for the progress
    intruders  what intruder dimensions of the fine-tune are multiplied with before its difference is decomposed
    """

    targets: tuple[FactorTarget, ...]
    spread: bool
    before: int
    total: int
    intruders: float = 1.0

    def product(self, name: str, steps: tuple[Step, ...]) -> Product:
        """The product. steps: of each matrix the difference, and what it is in the fine-tune."""
        shapes = {step.out.name: step.out.shape for step in steps}
        outs = tuple(out for target in self.targets for out in target.outs(shapes[target.matrices[0]]))
        return Product(name, "factors", outs, self.to_json(), steps)

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if not 0 <= self.intruders <= 1:
            return f"its intruder dimensions are scaled by {self.intruders:g}, not by 0 to 1"
        for target in self.targets:
            if not 0 <= target.experts <= MAX_STACKED:
                return f"{target.experts:,} experts"
            for name in target.matrices:
                if len(shapes.get(name, ())) != 2 or shapes.get(target.tuned(name)) != shapes[name]:
                    return f"it has no steps for the matrix {name!r}"
            (shape, *others) = {shapes[name] for name in target.matrices}
            if others or not 0 < target.rank <= min(shape):
                return f"rank {target.rank:,} of matrices {sorted(map(list, [shape, *others]))}"
        outs = self.product(product.name, product.steps).outs
        return "" if self.targets and outs == product.outs else "its arrays are not those of its matrices"


@dataclass(frozen=True, slots=True)
class Decomposed:
    """A difference ≈ left @ right, its singular values, and facts about it.

    left    float32 [rows, rank]
    right   float32 [rank, cols]
    values  float64 [rank], descending
    energy  squared Frobenius norm of the difference
    bound   squared spectral norm of what no factors of this basis can hold, or more; 0 for an exact decomposition
    """

    left: Floats
    right: Floats
    values: npt.NDArray[np.float64]
    energy: float
    bound: float


def prefers_exact(rank: int, rows: int, cols: int) -> bool:
    """Whether an exact decomposition is preferred to a randomised one.

    It costs less if about half of the ranks are requested. For a sixth of the ranks of a small matrix it costs up to twice as
    much, but keeps more, because the basis of a randomised one then has only one or two blocks.
    """
    short, width = min(rows, cols), rank + OVERSAMPLING
    return 2 * width >= short or (short <= FEW and 6 * width >= short)


def decompose(delta: Floats, rank: int, seed: int, *, exact: bool, spread: bool = True, device: str = "cpu") -> Decomposed:
    """The factors of a matrix. delta: float32 [rows, cols], finite; rank: at most the shorter side.

    Cost of a randomised decomposition: in float32, about three products of the matrix with rank + `OVERSAMPLING` columns for
    each power iteration. Cost of an exact one: in float64, the matrix times itself over the longer side, and eigenvectors.
    """
    import torch

    matrix = torch.from_numpy(delta).to(device)
    energy = sum(float(rows.double().square().sum()) for rows in matrix.split(max(1, (1 << 20) // delta.shape[1])))
    if energy == 0:  # no decomposition is needed
        rows, cols = delta.shape
        return Decomposed(np.zeros((rows, rank), np.float32), np.zeros((rank, cols), np.float32), np.zeros(rank), 0.0, 0.0)
    if exact:
        left, values, right = thin_svd(matrix.double(), rank)
        bound = 0.0
    else:
        basis, projected = _krylov(matrix, rank, seed)
        small, values, right = thin_svd(projected.double(), rank)
        left = (small.T.float() @ basis).T
        bound = _bound(matrix, basis, seed, energy)
    scale = values.sqrt() if spread else torch.ones_like(values)
    left, right = left * scale, right * (values / torch.where(scale > 0, scale, torch.ones_like(scale)))[:, None]
    f32, f64 = torch.float32, torch.float64
    return Decomposed(_numpy(left, f32), _numpy(right, f32), _numpy(values, f64), energy, bound)


def _blocks(rank: int, rows: int, cols: int) -> tuple[int, int]:
    """Power iterations, and how many of their last blocks the basis has: half as many rows as the shorter side at most."""
    kept = max(1, min(MORE_POWER + 1, min(rows, cols) // (2 * (rank + OVERSAMPLING))))
    return max(POWER, kept - 1), kept


def _krylov(matrix: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of nearly all that the `rank` largest singular values span, and its product with the matrix.

    Both have the vectors as rows: float32 [k, rows] and [k, cols], fewer if the matrix has no more directions. So all products
    have few rows on their left: with few columns on their right they take up to ten times as long.
    """
    import torch

    power, kept = _blocks(rank, *matrix.shape)
    width = min(rank + OVERSAMPLING, *matrix.shape)
    block = _orthonormal(_random(matrix, width, seed) @ matrix.T)
    for _ in range(power + 1 - kept):
        block = _orthonormal(_orthonormal(block @ matrix) @ matrix.T)
    basis, projected = (torch.empty(kept * width, n, device=matrix.device) for n in matrix.shape)
    used = 0
    for _ in range(kept):
        if used:
            block = _directions(_orthonormal(projected[used - len(block) : used]) @ matrix.T, basis[:used])
        if not len(block):
            break
        after = used + len(block)
        basis[used:after] = block
        projected[used:after] = block @ matrix
        used = after
    return basis[:used], projected[:used]


def _directions(rows: Tensor, basis: Tensor) -> Tensor:
    """The directions of some rows that an orthonormal basis does not have, orthonormal: none but rounding errors may be left.

    Without those that are smaller than `NEGLIGIBLE` of the longest row: normalised, they would not be orthogonal to the basis.
    """
    import torch

    rest = _outside(rows, basis)
    gram = rest.double()
    values, vectors = torch.linalg.eigh(gram @ gram.T)
    kept = values > NEGLIGIBLE**2 * float(rows.double().square().sum(1).max())
    new = (vectors[:, kept] / values[kept].sqrt()).T.float() @ rest
    return _orthonormal(_outside(new, basis))


def _orthonormal(rows: Tensor) -> Tensor:
    import torch

    return torch.linalg.qr(rows.T).Q.T


def _outside(rows: Tensor, basis: Tensor) -> Tensor:
    """What rows have outside of the span of orthonormal ones."""
    return rows - (rows @ basis.T) @ basis


def _bound(matrix: Tensor, basis: Tensor, seed: int, energy: float) -> float:
    """A bound of the squared spectral norm of what the basis leaves of a matrix: the rest R.

    From R (RᵀR)^POWER instead of R, as many equal singular values would make the bound loose.
    """
    if energy == 0:
        return 0.0
    rest = _outside(_random(matrix, PROBES, seed + 1) @ matrix.T, basis)
    for _ in range(POWER):
        rest = _outside((rest @ matrix) @ matrix.T / energy, basis)
    longest = math.sqrt(float(rest.double().square().sum(1).max()) / energy)
    return energy * math.pow(10 * math.sqrt(2 / math.pi) * longest, 2 / (2 * POWER + 1))


def _random(matrix: Tensor, rows: int, seed: int) -> Tensor:
    """Normal numbers that depend on the seed alone, not on the device: [rows, columns of the matrix]."""
    import torch

    numbers = np.random.Generator(np.random.Philox(seed)).standard_normal((rows, matrix.shape[1]), np.float32)
    return torch.from_numpy(numbers).to(matrix.device)


def _numpy(tensor: Tensor, dtype: Any) -> Any:
    return np.ascontiguousarray(tensor.to("cpu", dtype).numpy())


def scale_intruders(delta: Floats, tuned: Floats, scale: float, *, by_rows: bool, device: str = "cpu") -> tuple[Floats, int]:
    """The difference from the base with the fine-tune's intruder dimensions scaled, and how many there are.

    Intruder dimensions (Shuttleworth et al. 2024, https://arxiv.org/abs/2410.21228) are singular vectors of the fine-tune, of
    outputs and with large values, that are unlike all of the base's. Scaling them down keeps more of what the base knew, for
    some of what was trained. PEFT's `reduce_intruder_dimension` does the same, with the same limits and a scale of 0.75.

    delta, tuned  float32 [rows, cols]
    by_rows       outputs are the rows; else the columns

    Cost: an exact decomposition of the base and one of the fine-tune, in float64.
    """
    import torch

    difference, after = (torch.from_numpy(delta_or_tuned).to(device).double() for delta_or_tuned in (delta, tuned))
    if not by_rows:
        difference, after = difference.T, after.T
    known, _, _ = thin_svd(after - difference)
    u, values, vt = thin_svd(after, CHECKED)
    intruders = ((u.T @ known).abs().amax(1) < UNLIKE) & (values > 0)
    changed = difference + (scale - 1) * (u[:, intruders] * values[intruders]) @ vt[intruders]
    return _numpy(changed if by_rows else changed.T, torch.float32), int(intruders.sum())


def rounding_noise(weights: Floats) -> float:
    """The mean square of the error with which weights were rounded, if they have the values of a 16-bit dtype; else about 0.

    A step of the dtype at a value is as long as at the power of two below it; the mean square of a uniform error is a twelfth
    of its square.

    >>> rounding_noise(np.float32([[1.0, 1.0]])) == 2.0**-14 / 12, rounding_noise(np.float32([[1.0, 1.0001]])) < 1e-14
    (True, True)
    """
    bits = np.ascontiguousarray(weights).view(np.uint32)
    digits, smallest = (7, -133) if not (bits & 0xFFFF).any() else (10, -24) if not (bits & 0x1FFF).any() else (23, -149)
    _, exponents = np.frexp(weights[weights != 0].astype(np.float64))
    steps = np.ldexp(1.0, np.maximum(exponents - 1 - digits, smallest))
    return float(np.square(steps).sum() / 12 / max(1, weights.size))


def _compute(context: ProductContext) -> Arrays:
    work, device = FactorWork.of(context.product), usable_device(context.device)
    specs = {step.out.name: step.out for step in context.product.steps}
    largest = max(_work_bytes(target, *specs[target.matrices[0]].shape) for target in work.targets)
    limit = WORK_BYTES if context.memory_bytes is None else context.memory_bytes
    threads = max(1, min(context.threads if device == "cpu" else 1, limit // largest))
    reading, done = threading.Lock(), [work.before]

    def make(target: FactorTarget) -> list[npt.NDArray[Any]]:
        factors = [matrix(target, name) for name in target.matrices]
        if not target.experts:
            return factors[0]
        a, b, values, facts = zip(*factors, strict=True)
        rows = np.stack([row.reshape(-1) for row in a])
        return [rows, np.stack(b, axis=2).reshape(len(b[0]), -1), np.stack(values), np.stack(facts)]

    def matrix(target: FactorTarget, name: str) -> list[npt.NDArray[Any]]:
        spec = specs[name]
        with reading:  # one matrix is read while others are decomposed
            context.progress(done[0], work.total)
            delta = context.load([name])[name]
            sample = np.unique(np.linspace(0, spec.shape[0] - 1, SAMPLED_ROWS).astype(np.int64)).tolist()
            noise = rounding_noise(context.rows(target.tuned(name), sample))
            if work.intruders != 1:
                tuned = context.load([target.tuned(name)])[target.tuned(name)]
        intruders = 0
        if work.intruders != 1 and delta.any():
            delta, intruders = scale_intruders(delta, tuned, work.intruders, by_rows=target.form == "linear", device=device)
        seed = xxhash.xxh64_intdigest(name.encode())
        factors = decompose(delta, target.rank, seed, exact=target.exact, spread=work.spread, device=device)
        with reading:
            done[0] += spec.size
        a, b = (
            (factors.right, factors.left)
            if target.form == "linear"
            else (_transposed(factors.left), _transposed(factors.right))
        )
        return [a, b, factors.values, np.array([factors.energy, noise, factors.bound, intruders])]

    with one_thread(), ThreadPoolExecutor(threads) as pool:
        return [array for arrays in pool.map(make, work.targets) for array in arrays]


def _transposed(matrix: Floats) -> Floats:
    return np.ascontiguousarray(matrix.T)


def _work_bytes(target: FactorTarget, rows: int, cols: int) -> int:
    """What the decomposition of a matrix holds."""
    short = min(rows, cols)
    if target.exact:
        return 4 * rows * cols + 8 * (2 * rows * cols + 4 * short * short)
    return 4 * rows * cols + 24 * (rows + cols) * (target.rank + OVERSAMPLING) * _blocks(target.rank, rows, cols)[1]


KIND = ProductKind("decomposing", compute=_compute, check=FactorWork.check, device=True)


# ---- How many singular values of a difference are worth storing, and how much of it they keep.
#
# **Noise.** A fine-tune stored in 16 bits was rounded, and the difference from its base has the rounding errors in it: a matrix
# of full rank, which no few factors can keep, and which is not worth keeping. Its entries are about independent, so its
# singular values lie below s (√rows + √cols), s² being their variance (Marchenko and Pastur 1967). s² is what the dtype's steps
# at the fine-tune's values say, or what the smaller singular values leave, whichever is less. How much of a singular value
# above that edge is signal follows from its size (Gavish and Donoho 2017, https://arxiv.org/abs/1405.7511, for the Frobenius
# norm).


Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spectrum:
    """The difference of one matrix: its largest singular values, and facts about the others.

    values  float64 [n], descending
    energy  squared Frobenius norm
    noise   variance of the rounding errors, by the dtype
    bound   squared spectral norm of what the basis of the values leaves out, or more
    """

    rows: int
    cols: int
    values: Vector
    energy: float
    noise: float
    bound: float

    @property
    def size(self) -> int:
        """Parameters that one more rank takes."""
        return self.rows + self.cols

    def kept(self, rank: int) -> float:
        """The share of the energy that factors of a rank keep; 1 of nothing."""
        return self._share(float(self._squares[rank]))

    def possible(self, rank: int) -> float:
        """The share that the best factors of a rank keep, or more: an upper bound."""
        squares = float(self._squares[rank]), float(self._squares[-1])
        rest = max(0.0, self.energy - squares[1])
        return self._share(squares[0] + min(rank * self.bound, rest))

    def signal_kept(self, rank: int) -> float:
        """The share of the signal that factors of a rank keep; 1 if there is none."""
        return min(1.0, float(self.signals[:rank].sum()) / self.signal) if self.signal > 0 else 1.0

    @property
    def noise_share(self) -> float:
        """The share of the energy that is noise."""
        return self._share(self.energy - self.signal) if self.energy else 0.0

    @cached_property
    def signal(self) -> float:
        """The energy of the signal, that of values which are not known included."""
        total = float(self.signals.sum())
        if len(self.values) < min(self.rows, self.cols) and len(self.signals) and self.signals[-1] > 0:
            k = len(self.values)
            total += max(0.0, self.energy - float(self._squares[-1]) - self.variance * (self.rows - k) * (self.cols - k))
        return total

    @cached_property
    def variance(self) -> float:
        """The variance of an entry's noise: by the dtype, or by what the larger singular values leave, whichever is less.

        The larger ones are those above the edge of noise that would explain all that they leave.
        """
        for k in range(min(len(self.values), min(self.rows, self.cols) - 1) + 1):
            rest = max(0.0, self.energy - float(self._squares[k])) / ((self.rows - k) * (self.cols - k))
            if k == len(self.values) or self.values[k] <= self._edge(rest):
                break
        return float(min(self.noise, rest))

    def _edge(self, variance: float) -> float:
        """The largest singular value of noise, with a margin for chance (about three of its standard deviations)."""
        margin = 1 + math.pow(min(self.rows, self.cols), -2 / 3)
        return math.sqrt(variance) * (math.sqrt(self.rows) + math.sqrt(self.cols)) * margin

    @cached_property
    def signals(self) -> Vector:
        """The energy of the signal in each singular value: float64 [n]."""
        unit = math.sqrt(self.variance * max(self.rows, self.cols))
        if unit == 0:
            return np.square(self.values)
        beta = min(self.rows, self.cols) / max(self.rows, self.cols)
        y = np.where(self.values > self._edge(self.variance), self.values / unit, 1 + math.sqrt(beta))
        shrunk = np.sqrt(np.maximum(np.square(np.square(y) - beta - 1) - 4 * beta, 0)) / y
        energies: Vector = np.square(shrunk * unit)
        return energies

    @cached_property
    def _squares(self) -> Vector:
        return np.concatenate([[0.0], np.cumsum(np.square(self.values))])

    def _share(self, energy: float) -> float:
        return min(1.0, energy / self.energy) if self.energy > 0 else 1.0


@dataclass(frozen=True, slots=True)
class _Together:
    """Matrices that get the same rank; see `Spectrum` for the fields.

    limit  the largest rank: what the matrix with most singular values needs, at most what all of them have
    """

    size: int
    limit: int
    signals: Vector
    signal: float

    @classmethod
    def of(cls, spectra: Sequence[Spectrum], sv_epsilon: float) -> _Together:
        known = min(len(spectrum.values) for spectrum in spectra)
        limit = min(known, max(int((spectrum.values > sv_epsilon).sum()) for spectrum in spectra))
        signals = np.sum([spectrum.signals[:known] for spectrum in spectra], axis=0)
        return cls(sum(s.size for s in spectra), limit, signals, sum(s.signal for s in spectra))


def choose_ranks(
    spectra: Sequence[Spectrum],
    *,
    energy: float | None,
    max_parameters: int | None,
    sv_epsilon: float,
    groups: Sequence[str] = (),
) -> list[int]:
    """A rank for each matrix; 0 for one that does not differ, or holds noise only.

    energy          the smallest rank that keeps this share of the signal
    max_parameters  of all factors: spent where a parameter keeps most of the signal
    sv_epsilon      singular values that are not larger are not counted
    groups          for each matrix the name of its group, whose matrices get the same rank, as if they were one; "": none

    Without `energy` and `max_parameters`, all singular values that are known. Raises ParameterError if nothing fits.
    """
    names = [name or str(i) for i, name in enumerate(groups or [""] * len(spectra))]
    members = grouped(zip(names, spectra, strict=True))
    together = [_Together.of(members_of_group, sv_epsilon) for members_of_group in members.values()]
    if energy is not None:
        ranks = [_by_energy(group, energy) for group in together]
    elif max_parameters is not None:
        ranks = _within(together, max_parameters)
    else:
        ranks = [group.limit for group in together]
    chosen = dict(zip(members, ranks, strict=True))
    return [chosen[name] for name in names]


def _by_energy(spectrum: _Together, share: float) -> int:
    if spectrum.signal <= 0:
        return 0
    kept = np.cumsum(spectrum.signals) / spectrum.signal
    return min(spectrum.limit, int(np.searchsorted(kept, share * (1 - 1e-12))) + 1)


def _within(spectra: Sequence[_Together], budget: int) -> list[int]:
    """Values in the order of signal for each parameter; equal ones in the order of the matrices."""
    limits = [spectrum.limit for spectrum in spectra]
    gains = np.concatenate([s.signals[:n] / s.size for s, n in zip(spectra, limits, strict=True)])
    owners = np.repeat(np.arange(len(spectra)), limits)
    ranks, rest = [0] * len(spectra), budget
    for i in np.argsort(-gains, kind="stable").tolist():
        owner = int(owners[i])
        if gains[i] > 0 and spectra[owner].size <= rest:
            ranks[owner] += 1
            rest -= spectra[owner].size
    if not any(ranks) and any(gains > 0):
        least = min(spectrum.size for spectrum in spectra)
        what = f"must be at least {least:,}, which the smallest factors take, not {budget:,}"
        raise option_error("max_parameters", what, "allow more parameters")
    return ranks
