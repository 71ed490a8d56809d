"""`weightsmith diff`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import working
from weightsmith._base.errors import printable
from weightsmith._base.options import RunOptions
from weightsmith._base.pages.values import Mark, finite_or_mark, written
from weightsmith._base.text import fact, result, say, section, show_table

if TYPE_CHECKING:
    from weightsmith._reports.look.comparison import Alignment, Comparison
    from weightsmith._reports.look.files import Change
    from weightsmith._reports.look.values import Difference, GroupDifference, TensorDifference

_SHOWN = 12
"""Changed keys and rows that are listed."""


@options.expand
def diff(
    models: Annotated[list[str], typer.Argument(metavar="A B...", help="Folders, weight files, Hub ids or base+adapter.")],
    running: RunOptions,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="BASE", help="Compare the task vectors of two or more models: their changes to BASE."),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option("--tensors", metavar="GLOB", help="Only tensors whose names match, one row each (repeatable)."),
    ] = None,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Show the differences between models A and B.

    Compares weights, config, tokenizer and chat template, and summarises the differences in words. With --base: compares the
    task vectors of two or more models in pairs: cosines, sign conflicts, shared largest elements, shared leading directions.

    For each part and layer: the share of elements that differ, the norm of the delta relative to A, the cosine of A and B, and
    the rank of the deltas (the median of those of low rank above the rounding noise, and the number of the others).
    """
    # Each thread decomposes small matrices of its own: BLAS's threads would only wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with working("reading the models' headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.look.diff import diff as compare
        from weightsmith._reports.look.pages import comparison_page, difference_page
        from weightsmith._reports.look.values import Difference as Two

        with meter(quiet=quiet) as shown:
            how: dict[str, Any] = {} if base is None else {"base": base}
            how |= {"tensors": tensors or (), "threads": running.threads, "stream": running.stream, "progress": shown}
            found: Difference | Comparison = compare(*models, **how)
        each = bool(tensors)
        if isinstance(found, Two):
            work.present(lambda: difference_page(found), found.to_json, lambda: _show(found, each=each))
        else:
            work.present(lambda: comparison_page(found), found.to_json, lambda: _show_comparison(found, each=each))


def _show(found: Difference, *, each: bool) -> None:
    fact("A", found.names[0])
    fact("B", found.names[1])
    result()
    for sentence in found.reading:
        say(printable(sentence))
    _changes("config.json", found.files.config)
    _changes("generation_config.json", found.files.generation)
    if not found.total.changed and not any(found.total.nonfinite):
        return
    _table("part", [found.total, *found.parts])
    _table("layer", found.layers)
    if each:
        result()
        show_table(_HEAD("tensor"), [_tensor_row(tensor) for tensor in found.tensors], right=_RIGHT)
    if found.moved:
        section("rows that changed most, relative to their norm")
        rows = [
            (row.tensor, f"{row.row:,}", repr(row.token) if row.token else "", percent(row.share, 2))
            for row in found.moved[:_SHOWN]
        ]
        show_table(("tensor", "row", "token", "moved"), rows, right={1, 3})


def _changes(name: str, found: Sequence[Change]) -> None:
    if not found:
        return
    from weightsmith._app.cli.summary import short

    section(name)
    rows = [(change.key, short(change.old, 24), short(change.new, 24)) for change in found[:_SHOWN]]
    show_table(("key", "A", "B"), rows)
    if len(found) > _SHOWN:
        say(f"and {len(found) - _SHOWN:,} more")


def _HEAD(first: str) -> tuple[str, ...]:
    return first, "changed", "delta / A", "cosine", "rank"


_RIGHT = {1, 2, 3, 4}


def _table(first: str, groups: Sequence[GroupDifference]) -> None:
    result()
    show_table(_HEAD(first), [_row(group) for group in groups], right=_RIGHT)


def _row(group: GroupDifference) -> tuple[str, ...]:
    low = "" if group.ranks is None else f"{group.ranks[1]:,}"
    full, high = (f"{n:,} {what}" if n else "" for n, what in ((group.full, "full"), (group.high, "high")))
    ranks = ", ".join(filter(None, [low, full, high])) or "-"
    return *_measured(group), ranks


def _tensor_row(tensor: TensorDifference) -> tuple[str, ...]:
    return *_measured(tensor), written(tensor.rank)


def _measured(found: GroupDifference | TensorDifference) -> tuple[str, ...]:
    """Name, share that differs, distance and cosine; marks where nothing differs, and for NaN and infinities."""
    from weightsmith._reports.look.nonfinite import mark_of

    mark = None if found.measured else mark_of(found.nonfinite)
    moved = share(found.share) if found.changed else Mark.SAME.word
    angle = cosine(found.cosine)
    return (
        found.name,
        percent(found.changed_share),
        mark.word if mark and found.changed else moved,
        mark.word if mark else angle,
    )


def _show_comparison(found: Comparison, *, each: bool) -> None:
    from weightsmith._reports.look.comparison import letters

    names = letters(len(found.names))
    fact("base", found.base)
    for letter, name in zip(names, found.names, strict=True):
        fact(letter, name)
    result()
    for sentence in found.reading:
        say(printable(sentence))
    if found.missing:
        first = printable(found.missing[0])
        say(f"Not compared: {len(found.missing):,} tensors that some models lack or have in another shape, such as {first}.")
    section("all tensors")
    rows = [
        (f"{names[i]} {names[j]}", number(total.cosines[n], ".4f"), percent(total.overlaps[n]), percent(total.subspaces[n]))
        for total in [found.total]
        for n, (i, j) in enumerate(found.pairs)
    ]
    show_table(("pair", "cosine", "largest 1% in common", "leading directions in common"), rows, right={1, 2, 3})
    result()
    show_table(("model", "norm", "relative norm"), _norms(names, found.total), right={1, 2})
    for title, own in (("part", found.parts), ("layer", found.layers), ("tensor", found.tensors if each else ())):
        if own:
            result()
            head = (title, "conflicts", *(f"{names[i]} {names[j]}" for i, j in found.pairs[:_PAIRS]))
            show_table(head, [_alignment(group) for group in own], right=set(range(1, len(head))))


_PAIRS = 6
"""Pairs of models whose cosines are columns."""


def _norms(names: Sequence[str], total: Alignment) -> list[tuple[str, ...]]:
    longest = max(total.norms)
    return [
        (name, number(norm, ".4g"), percent(norm / longest if longest else math.nan, 0))
        for name, norm in zip(names, total.norms, strict=True)
    ]


def _alignment(group: Alignment) -> tuple[str, ...]:
    from weightsmith._reports.look.nonfinite import mark_of

    mark = None if group.measured else mark_of(group.nonfinite)
    values = percent(group.conflict_share), *(number(c, ".3f") for c in group.cosines[:_PAIRS])
    return group.name, *(mark.word if mark else value for value in values)


def share(value: float) -> str:
    """A share with three digits.

    >>> share(0.01234), share(0.0), share(0.0000123), share(math.inf), share(math.nan)
    ('1.23%', '0%', '0.00123%', 'new', '?')
    """
    found = finite_or_mark(value)
    if isinstance(found, Mark):
        return found.word
    return f"{100 * value:.3g}%" if value == 0 or value >= 1e-6 else f"{100 * value:.2e}%"


def percent(value: float, digits: int = 1) -> str:
    """A share with some digits after the point.

    >>> percent(0.5), percent(0.5, 0), percent(math.nan)
    ('50.0%', '50%', '?')
    """
    return written(finite_or_mark(value)) if not math.isfinite(value) else f"{value:.{digits}%}"


def number(value: float, digits: str) -> str:
    """A number in a format.

    >>> number(0.5, ".3f"), number(math.nan, ".3f")
    ('0.500', '?')
    """
    return f"{value:{digits}}" if math.isfinite(value) else written(value)


def cosine(value: float) -> str:
    """A cosine; near 1 with what is left to 1.

    >>> cosine(0.5), cosine(0.99999), cosine(1.0), cosine(math.nan)
    ('0.5000', '1 - 1e-05', '1', '?')
    """
    if math.isnan(value):
        return written(value)
    return "1" if value > 1 - 1e-12 else f"1 - {1 - value:.1g}" if value > 0.9995 else f"{value:.4f}"
