"""The interface of an approximation of missing tokens: the problem that it solves, and what it works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Side = Literal["model", "donor"]


class Tables(Protocol):
    """The tables of embeddings, or heads, of the model and of the donor."""

    def rows(self, side: Side, numbers: Sequence[int] | Numbers) -> Floats:
        """Rows by number: float32 [len(numbers), C]."""

    def chunks(self, side: Side) -> Iterator[tuple[int, Floats]]:
        """All rows, some at a time: the number of the first, and float32 [n, C]."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user may choose of an approximation; see `TransplantSettings`.

    k                  shared tokens for one missing token
    weight_scheme      of `common_interpolation`
    cosine_similarity  of `common_interpolation`: nearest by angle, not by distance
    subword_method     how pieces are put together
    heads, rope_bases  of `mp_rope`: attention heads and RoPE base of the model and of the donor
    seed               of random rows
    """

    k: int = 64
    weight_scheme: str = "distance_proportional"
    cosine_similarity: bool = False
    subword_method: str = "mean"
    heads: tuple[int, int] = (1, 1)
    rope_bases: tuple[float, float] = (1e4, 1e4)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """The missing tokens of one table.

    missing  their ids, which are their rows in the donor's table: int64 [n]
    shared   tokens that both have: the donor's row, the model's row: int64 [N, 2]
    pieces   rows of the model that a missing token is composed of; () if it cannot be
    head     the table is a head of its own
    tables   where rows come from
    device   torch device of linear algebra
    threads  for linear algebra
    check    to be called often; raises if the run has ended
    """

    missing: Numbers
    shared: Numbers
    pieces: Sequence[tuple[int, ...]]
    head: bool
    tables: Tables
    choices: Choices = Choices()
    device: str = "cpu"
    threads: int = 1
    check: Callable[[], None] = lambda: None

    def targets(self) -> Floats:
        """The donor's rows of the missing tokens: [n, D]."""
        return self.tables.rows("donor", self.missing)

    def atoms(self) -> Floats:
        """The donor's rows of the shared tokens: [N, D]."""
        return self.tables.rows("donor", self.shared[:, 0])

    def values(self) -> Floats:
        """The model's rows of the shared tokens: [N, M]."""
        return self.tables.rows("model", self.shared[:, 1])

    def random(self) -> np.random.Generator:
        """Random numbers that depend on the seed alone."""
        return np.random.Generator(np.random.Philox(self.choices.seed))


@dataclass(frozen=True, slots=True)
class Approximated:
    """The rows of the missing tokens.

    rows      float32 [n, M]
    errors    float32 [n]: |row - approximation| / |row| in the donor's table; NaN where the donor's row is not approximated
    composed  bool [n]: from pieces; None: none is
    """

    rows: Floats
    errors: Floats
    composed: npt.NDArray[np.bool_] | None = None

    @classmethod
    def without_errors(cls, rows: Floats, *, composed: bool = False) -> Approximated:
        """Rows that do not approximate the donor's."""
        return cls(rows, np.full(len(rows), np.nan, np.float32), np.full(len(rows), composed))


@dataclass(frozen=True, slots=True)
class Approximation:
    """A way to make the rows of missing tokens.

    name     in `--approximation`
    summary  one sentence
    source   paper, or where it comes from
    make     computes the rows of one table
    donor    it needs the donor's rows
    pieces   it needs the pieces of tokens
    torch    it needs torch
    reads    the fields of `Choices` that it reads, besides the seed
    """

    name: str
    summary: str
    source: str
    make: Callable[[Problem], Approximated]
    donor: bool = False
    pieces: bool = False
    torch: bool = False
    reads: tuple[str, ...] = ()


# ---- Mean and covariance of the rows of a table.
