"""The `transplanted_rows` product: the rows of the tokens that a model lacks.

For each table (embedding, head) it makes an array of rows, in the dtype of the table, with the error of each row and how it was
made. The steps of the output read a row from the model where it has one, else from this array.

With the filter of poorly trained tokens (`magikarp`), which rows are missing depends on the tables themselves. Then the array
has all rows of the output.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding
from weightsmith._base.report.blocks import Column, Table
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._base.text import markdown_table
from weightsmith._base.torch_use import usable_device
from weightsmith._features.transplant.approximations import APPROXIMATIONS, find_approximation
from weightsmith._plans import COPY, Block, Product, ProductSettings, Read, Step
from weightsmith.abc.approximation import Choices, Floats, Numbers, Problem, Side, Tables
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

OP = "transplanted_rows"
NAME = "rows of missing tokens"

ORIGINS = ("approximated", "composed", "kept", "unused")
"""How a row was made: by the approximation; from pieces; the model's own; a row that is hardly used."""

CHUNK_ELEMENTS = 2 << 20
"""Elements of a table to read at once."""

SIDES: tuple[Side, ...] = ("model", "donor")


@dataclass(frozen=True, slots=True)
class RowTable:
    """One table.

    name     the model's tensor
    kind     `embedding`, `head`, or `bias`: one number for each token
    cols     elements of a row of the model, and of the donor; 0: the donor's rows are not read
    sizes    rows of the model, and of the donor
    model_rows  the model's row for each id of the output; -1 where there is none
    missing  ids whose rows are made
    """

    name: str
    kind: str
    cols: tuple[int, int]
    sizes: tuple[int, int]
    model_rows: tuple[int, ...]
    missing: tuple[int, ...]

    def outs(self, dtype: DType) -> tuple[TensorSpec, ...]:
        """The arrays: rows [n, cols], errors [n], and how they were made [n], an index into `ORIGINS`."""
        n = len(self.missing)
        return (
            TensorSpec(f"{self.name}: rows", dtype, (n, self.cols[0])),
            TensorSpec(f"{self.name}: errors", DTYPES["F32"], (n,)),
            TensorSpec(f"{self.name}: made", DTYPES["I32"], (n,)),
        )

    def chunks(self, side: Side) -> Iterator[tuple[str, int, int]]:
        """The steps that its rows are read with: name, first row, number of rows."""
        i = SIDES.index(side)
        rows = max(1, CHUNK_ELEMENTS // max(1, self.cols[i]))
        for first in range(0, self.sizes[i] if self.cols[i] else 0, rows):
            yield f"{self.name}: {side} {first}", first, min(rows, self.sizes[i] - first)

    def steps(self, reads: Sequence[tuple[int, TensorSpec] | None]) -> Iterator[Step]:
        """reads: for the model and the donor its number in the plan and its tensor; None: not read."""
        for side, read in zip(SIDES, reads, strict=True):
            if read is None:
                continue
            model, spec = read
            cols = self.cols[SIDES.index(side)]
            for name, first, rows in self.chunks(side):
                block = Block(first * cols, rows, cols, cols)
                yield Step(TensorSpec(name, spec.dtype, (rows, cols)), COPY, (Read(model, spec.name, block),))

    def problem(self, work: RowWork, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Why the numbers cannot be right; "". shapes: of the steps of the product"""
        if self.kind not in ("embedding", "head", "bias"):
            return "it is no table"
        if self.cols[0] < 1 or min(self.cols[1], *self.sizes) < 0:
            return "it has no rows of that size"
        if self.kind != "bias" and not self.cols[1] and find_approximation(work.approximation).donor:
            return f"{work.approximation} needs the donor's rows"
        for side, cols in zip(SIDES, self.cols, strict=True):
            for name, _, rows in self.chunks(side):
                if shapes.get(name) != (rows, cols):
                    return f"it has no step {name!r}"
        ids = range(len(self.model_rows))
        limits = (
            (self.model_rows, range(-1, self.sizes[0]), "a row that the model lacks"),
            (self.missing, range(min(len(ids), self.sizes[1])) if self.cols[1] else ids, "an id that the donor lacks"),
            (work.shared, ids, "a shared token that the output lacks"),
            ((row for pieces in work.pieces.values() for row in pieces), range(self.sizes[0]), "a piece that the model lacks"),
        )
        return next((what for numbers, allowed, what in limits if any(n not in allowed for n in numbers)), "")


@dataclass(frozen=True, slots=True)
class RowWork(ProductSettings):
    """The settings of the product.

    approximation  its name
    match_norms    rows get the norm predicted from the shared tokens
    noise, scale   added to and multiplied with new rows; 0 and 1 for neither
    magikarp       leave out poorly trained tokens
    shared         ids of tokens that both have, which approximations use
    pieces         missing id → rows of the model that its token is composed of
    unused         rows that are surely not trained, of the model and of the donor
    untied         whether the head has weights of its own, of the model and of the donor
    tokens         missing id → token, for the report
    counts         missing id → how often it occurs in the user's text; None without a text
    """

    approximation: str
    choices: Choices
    match_norms: bool
    noise: float
    scale: float
    magikarp: bool
    tables: tuple[RowTable, ...]
    shared: tuple[int, ...]
    pieces: Mapping[str, tuple[int, ...]]
    unused: tuple[tuple[int, ...], tuple[int, ...]]
    untied: tuple[bool, bool]
    tokens: Mapping[str, str]
    counts: Mapping[str, int] | None

    def product(self, dtypes: Sequence[DType], steps: Sequence[Step]) -> Product:
        """The product. dtypes: of the tables."""
        outs = tuple(out for table, dtype in zip(self.tables, dtypes, strict=True) for out in table.outs(dtype))
        return Product(NAME, OP, outs, self.to_json(), tuple(steps))

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if self.approximation not in APPROXIMATIONS or not self.tables or self.choices.k < 1:
            return f"there is no approximation {self.approximation!r} of {len(self.tables)} tables with k = {self.choices.k}"
        for table in self.tables:
            if problem := table.problem(self, shapes):
                return f"{table.name}: {problem}"
        if 3 * len(self.tables) != len(product.outs):
            return "its arrays are not those of its tables"
        dtypes = [out.dtype for out in product.outs[::3]]
        return "" if product.outs == self.product(dtypes, ()).outs else "its arrays are not those of its tables"


class ContextTables:
    """`Tables` of one table of a product."""

    def __init__(self, context: ProductContext, table: RowTable) -> None:
        self._context, self._table = context, table

    def chunks(self, side: Side) -> Iterator[tuple[int, Floats]]:
        for name, first, _ in self._table.chunks(side):
            yield first, self._context.load([name])[name]

    def rows(self, side: Side, numbers: Sequence[int] | Numbers) -> Floats:
        asked = np.asarray(numbers, np.int64)
        order = np.argsort(asked, kind="stable")
        ascending = asked[order]
        out = np.empty((len(asked), self._table.cols[SIDES.index(side)]), np.float32)
        chunks = list(self._table.chunks(side))
        # One buffer for all: memory of this size, freed and asked for again, is scattered over the allocator's arenas.
        buffer = np.empty((max((rows for _, _, rows in chunks), default=0), out.shape[1]), np.float32)
        for name, first, rows in chunks:
            begin, end = np.searchsorted(ascending, [first, first + rows])
            if begin < end:
                self._context.fill({name: buffer[:rows]})
                out[order[begin:end]] = buffer[ascending[begin:end] - first]
        return out


def _compute(context: ProductContext) -> Arrays:
    work = RowWork.of(context.product)
    arrays = context.create()
    poor = _poorly_trained(context, work) if work.magikarp else None
    for i, table in enumerate(work.tables):
        context.progress(i, len(work.tables))
        rows, errors, origins = arrays[3 * i : 3 * i + 3]
        _make(context, work, table, poor, rows, errors, origins)
    return arrays


def _make(
    context: ProductContext,
    work: RowWork,
    table: RowTable,
    poor: tuple[frozenset[int], frozenset[int]] | None,
    rows: npt.NDArray[Any],
    errors: Floats,
    origins: npt.NDArray[np.int32],
) -> None:
    """Fill the arrays of one table."""
    tables, ids = ContextTables(context, table), np.array(table.missing, np.int64)
    model_rows, shared = np.array(table.model_rows, np.int64), np.array(work.shared, np.int64)
    shared = shared[(model_rows[shared] >= 0) & (shared < (table.sizes[1] or len(model_rows)))]
    todo = np.ones(len(ids), bool)
    errors[:] = np.nan
    if poor is not None:
        bad = [np.isin(numbers, list(poor_rows)) for numbers, poor_rows in zip((model_rows[ids], ids), poor, strict=True)]
        has = model_rows[ids] >= 0
        kept, unused = has & (~bad[0] | bad[1]), ~has & bad[1]
        todo = ~kept & ~unused
        rows[kept], origins[kept] = tables.rows("model", model_rows[ids][kept]), ORIGINS.index("kept")
        nowhere = tables.rows("model", np.array(work.unused[0][-1:], np.int64)) if work.unused[0] else 0
        rows[unused], origins[unused] = nowhere, ORIGINS.index("unused")
        shared = shared[~np.isin(model_rows[shared], list(poor[0])) & ~np.isin(shared, list(poor[1]))]
    if not todo.any():
        return
    approximation = find_approximation("mean" if table.kind == "bias" else work.approximation)
    problem = Problem(
        missing=ids[todo],
        shared=np.stack([shared, model_rows[shared]], 1),
        pieces=[tuple(work.pieces.get(str(number), ())) for number in ids[todo].tolist()],
        head=table.kind == "head",
        tables=tables,
        choices=work.choices,
        device=usable_device(context.device) if approximation.torch else "cpu",
        threads=context.threads,
        check=lambda: context.progress(work.tables.index(table), len(work.tables)),
    )
    if approximation.donor and not len(shared):
        approximation = find_approximation("mean")
    approximated = approximation.make(problem)
    new = approximated.rows
    if work.match_norms and table.kind != "bias":
        new = matched(new, problem, use_donor=bool(table.cols[1]))
    if work.noise:
        new = new + np.float32(work.noise) * problem.random().standard_normal(new.shape, np.float32)
    rows[todo], errors[todo] = new * np.float32(work.scale), approximated.errors
    origins[todo] = ORIGINS.index("approximated") if approximated.composed is None else np.where(approximated.composed, 1, 0)


def _poorly_trained(context: ProductContext, work: RowWork) -> tuple[frozenset[int], frozenset[int]]:
    """Rows of the model and of the donor that are poorly trained in any table."""
    poor_of_side: list[frozenset[int]] = []
    for i, side in enumerate(SIDES):
        bad: set[int] = set(work.unused[i])
        for table in work.tables:
            if table.kind != "bias" and table.cols[i]:
                lengths = work.untied[i] and table.kind == "embedding"
                bad |= poorly_trained(ContextTables(context, table), side, work.unused[i], by_length=lengths)
        poor_of_side.append(frozenset(bad))
    return poor_of_side[0], poor_of_side[1]


def _report(product: Product, arrays: Arrays) -> Transplant:
    work = RowWork.of(product)
    counts = work.counts
    rows = (
        NewRow(
            number,
            work.tokens.get(str(number), ""),
            None if np.isnan(error) else error,
            ORIGINS[way],
            None if counts is None else counts.get(str(number), 0),
        )
        for number, error, way in zip(work.tables[0].missing, arrays[1].tolist(), arrays[2].tolist(), strict=True)
    )
    return Transplant(work.approximation, tuple(rows))


def _installed(product: Product) -> str:
    return APPROXIMATIONS.identity(RowWork.of(product).approximation)


KIND = ProductKind(
    "approximating missing tokens", compute=_compute, check=RowWork.check, report=_report, installed=_installed, device=True
)


# ---- The length of new rows: the norm predicted from the shared tokens.

OUTLIERS = 0.01
"""Share of the shared rows at either end whose lengths no new row gets."""


def matched(rows: Floats, problem: Problem, *, use_donor: bool) -> Floats:
    """Rows with the same directions and the expected lengths; a row of zeros stays.

    use_donor  the length follows from that of the donor's row, by a line through the logarithms of the lengths of the shared
               tokens; else it is their median
    """
    if not len(problem.shared):
        return rows
    lengths = _lengths(problem.values())
    expected: npt.NDArray[np.float64] = np.full(len(rows), np.median(lengths))
    if use_donor:
        theirs, missing = np.log(_lengths(problem.atoms())), np.log(_lengths(problem.targets()))
        spread = theirs - theirs.mean()
        slope = (spread @ np.log(lengths)) / max(spread @ spread, 1e-30)
        low, high = np.quantile(lengths, [OUTLIERS, 1 - OUTLIERS])
        expected = np.clip(np.exp(np.log(lengths).mean() + slope * (missing - theirs.mean())), low, high)
    return (rows * (expected / _lengths(rows))[:, None]).astype(np.float32)


def _lengths(rows: Floats) -> npt.NDArray[np.float64]:
    return np.maximum(np.linalg.norm(rows, axis=1).astype(np.float64), 1e-30)


# ---- Tokens that are in a vocabulary, and hardly ever were in the training data.
#
# Land and Bartolo 2024, "Fishing for Magikarp", https://arxiv.org/abs/2405.05417: the rows of such tokens are near the mean
# of rows that were surely not trained, and in an embedding with a head of its own they are short.

SHARE = 0.01
"""The largest share of the other rows that each criterion may call poorly trained."""

SIMILAR = 0.5
"""A row with a smaller cosine to the untrained ones is not called so."""


def poorly_trained(tables: Tables, side: Side, unused: Sequence[int], *, by_length: bool) -> frozenset[int]:
    """Numbers of rows that are poorly trained, besides the unused ones.

    unused     rows that are surely not trained
    by_length  short rows count too
    """
    lengths = np.concatenate([np.linalg.norm(rows, axis=1) for _, rows in tables.chunks(side)])
    bad, known = np.zeros(len(lengths), bool), np.ones(len(lengths), bool)
    known[list(unused)] = False
    if not known.any():
        return frozenset()
    if by_length:
        bad |= lengths < np.quantile(lengths[known], SHARE)
    if len(unused):
        mean = tables.rows(side, unused).mean(0, dtype=np.float64)
        mean = (mean / max(float(np.linalg.norm(mean)), 1e-30)).astype(np.float32)
        cosines = np.concatenate([rows @ mean for _, rows in tables.chunks(side)]) / np.maximum(lengths, 1e-30)
        bad |= cosines > max(float(np.quantile(cosines[known], 1 - SHARE)), SIMILAR)
    numbers: npt.NDArray[np.int64] = np.flatnonzero(bad)
    return frozenset(numbers.tolist())


# ---- the report


FILE_NAME = "transplant.json"

SHOWN = 20
"""Missing tokens that the table of a text lists."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that was made.

    number  id of the token
    token   the text that it stands for; bytes that are not UTF-8 as `\\xc3`
    error   of the donor's row, relative; None if that is not approximated
    how     `approximated`, `composed`, `kept` or `unused`
    count   in the user's text; None without a text
    """

    number: int
    token: str
    error: float | None
    how: str
    count: int | None


@dataclass(frozen=True, slots=True)
class Transplant:
    """The report of a transplant.

    approximation  its name
    rows           the rows that were made, by id
    """

    approximation: str
    rows: tuple[NewRow, ...]

    @property
    def error(self) -> float | None:
        """The mean relative error of the donor's rows; None if none is approximated."""
        errors = [row.error for row in self.rows if row.error is not None]
        return sum(errors) / len(errors) if errors else None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "approximation": self.approximation,
            "tokens": len(self.rows),
            "how": dict(Counter(row.how for row in self.rows)),
            "mean_error": self.error,
            "rows": [
                {"id": row.number, "token": row.token, "how": row.how, "error": row.error}
                | ({} if row.count is None else {"count": row.count})
                for row in self.rows
            ],
        }

    def summary_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows: the missing tokens that occur in the user's text most often; no rows without a text."""
        head = ("missing token", "in the text", "how", "error")
        frequent = sorted((row for row in self.rows if row.count), key=lambda row: (-(row.count or 0), row.number))
        return head, [
            (_shown(row.token), f"{row.count:,}", row.how, "" if row.error is None else f"{row.error:.2f}")
            for row in frequent[:SHOWN]
        ]

    def summary(self) -> str:
        """One line."""
        ways = ", ".join(f"{n:,} {how}" for how, n in Counter(row.how for row in self.rows).items())
        text = f"{len(self.rows):,} rows by {self.approximation}: {ways or 'none was missing'}"
        text += "" if self.error is None else f"; mean error {self.error:.3f}"
        counts = [row.count for row in self.rows if row.count]
        if any(row.count is not None for row in self.rows):
            text += f"; {len(counts):,} of these tokens occur in the text, {sum(counts):,} times"
        return text

    def files(self) -> Mapping[str, bytes]:
        """The report as JSON."""
        return {FILE_NAME: (json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n").encode()}

    def section(self) -> str:
        """A section for the model card."""
        head, rows = self.summary_table()
        text = f"\n## Missing tokens\n\n{self.summary()}. `{FILE_NAME}` has each of them.\n"
        if rows:
            text += f"\n{markdown_table(head, rows)}\n"
        return text

    def blocks(self) -> list[Table]:
        """How the missing tokens were found, and each of them."""
        counted = any(row.count is not None for row in self.rows)
        counts = (Column("in the text", "count"),) if counted else ()
        columns = Column("id", "count"), Column("token"), Column("how"), Column("error", "number", "relative"), *counts
        rows = tuple(
            (
                row.number,
                json.dumps(row.token, ensure_ascii=False),
                row.how,
                row.error,
                *((row.count,) if counted else ()),
            )
            for row in self.rows
        )
        return [Table("Missing tokens", columns, rows, self.summary())]

    def warnings(self, where: str) -> list[Finding]:
        """None."""
        return []


def _shown(token: str) -> str:
    """A token in quotes; a long one is cut.

    >>> _shown("word"), _shown("-" * 90)
    ("'word'", "'------------------------'... (90)")
    """
    return repr(token) if len(token) <= 24 else f"{token[:24]!r}... ({len(token)})"
