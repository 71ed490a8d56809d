"""How many singular values of a difference are worth storing, and how much of it they keep.

**Noise.** A fine-tune stored in 16 bits was rounded, and the difference from its base has the rounding errors in it: a matrix
of full rank, which no few factors can keep, and which is not worth keeping. Its entries are about independent, so its singular
values lie below s (√rows + √cols), s² being their variance (Marchenko and Pastur 1967). s² is what the dtype's steps at the
fine-tune's values say, or what the smaller singular values leave, whichever is less. How much of a singular value above that
edge is signal follows from its size (Gavish and Donoho 2017, https://arxiv.org/abs/1405.7511, for the Frobenius norm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightsmith._base.idioms import grouped
from weightsmith._base.options import option_error

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
