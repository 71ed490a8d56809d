"""`weightsmith diff`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.errors import printable
from weightsmith.progress import meter, no_bars_in_logs
from weightsmith.text import fact, heading, result, say, show_json, show_table

if TYPE_CHECKING:
    from weightsmith.look.comparison import Alignment, Comparison
    from weightsmith.look.files import Change
    from weightsmith.look.values import Difference, GroupDifference, TensorDifference

_SHOWN = 12
"""Changed keys, tensors and rows that are listed."""


def diff(
    models: Annotated[list[str], typer.Argument(metavar="A B...", help="Folders, weight files, hub ids, or base+adapter.")],
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="BASE", help="Compare what two or more models have changed in BASE: their task vectors."
        ),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensors", metavar="GLOB", help="Only tensors whose names match, each in a row; may be given several times."
        ),
    ] = None,
    threads: options.Threads = None,
    stream: options.Stream = False,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Show what model B differs in from model A.

    Weights, config, tokenizer, chat template; and in words what that probably means.

    With --base: how the task vectors of two or more models fit together, pair by pair: their cosines, how often their signs
    conflict, how much of their largest elements and of their leading directions they share.

    For each part and layer: the share of elements that differ, the norm of the delta over that of A, the cosine of A and B, and
    the rank of the deltas: the middle one of those that are of low rank above the rounding noise, and how many are not.
    """
    # Each thread decomposes small matrices of its own: BLAS's threads would only wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with failures(as_json=as_json):
        no_bars_in_logs(quiet=quiet)
        from weightsmith.look.diff import diff as compare
        from weightsmith.look.pages import comparison_page, difference_page
        from weightsmith.look.values import Difference as Two
        from weightsmith.pages import check_page, write_page

        if report is not None:
            check_page(report)

        with meter(quiet=quiet) as shown:
            if base is None:
                found: Difference | Comparison = compare(
                    *models, tensors=tensors or (), threads=threads, stream=stream, progress=shown
                )
            else:
                found = compare(*models, base=base, tensors=tensors or (), threads=threads, stream=stream, progress=shown)
        if report is not None:
            write_page(report, difference_page(found) if isinstance(found, Two) else comparison_page(found))
        if as_json:
            show_json(found.to_json())
        elif not quiet:
            if isinstance(found, Two):
                _show(found, each=bool(tensors))
            else:
                _show_comparison(found, each=bool(tensors))


def _show(found: Difference, *, each: bool) -> None:
    fact("A", found.names[0])
    fact("B", found.names[1])
    result()
    for sentence in found.reading:
        say(printable(sentence))
    _changes("config.json", found.files.config)
    _changes("generation_config.json", found.files.generation)
    if not found.total.changed:
        return
    _table("part", [found.total, *found.parts])
    _table("layer", found.layers)
    if each:
        result()
        show_table(_HEAD("tensor"), [_tensor_row(tensor) for tensor in found.tensors], right=_RIGHT)
    if found.moved:
        result()
        result(heading("rows that moved most, by their own norm"))
        rows = [
            (row.tensor, f"{row.row:,}", repr(row.token) if row.token else "", f"{row.share:.2%}")
            for row in found.moved[:_SHOWN]
        ]
        show_table(("tensor", "row", "token", "moved"), rows, right={1, 3})


def _changes(name: str, found: Sequence[Change]) -> None:
    if not found:
        return
    from weightsmith.cli.summary import short

    result()
    result(heading(name))
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
    full = f"{group.full:,} full" if group.full else ""
    ranks = ", ".join(filter(None, [low, full])) or "-"
    return group.name, f"{group.changed_share:.1%}", share(group.share), cosine(group.cosine), ranks


def _tensor_row(tensor: TensorDifference) -> tuple[str, ...]:
    rank = "-" if tensor.leading is None else "full" if tensor.leading.rank is None else str(tensor.leading.rank)
    return tensor.name, f"{tensor.changed_share:.1%}", share(tensor.share), cosine(tensor.cosine), rank


def _show_comparison(found: Comparison, *, each: bool) -> None:
    from weightsmith.look.comparison import letters

    names = letters(len(found.names))
    fact("base", found.base)
    for letter, name in zip(names, found.names, strict=True):
        fact(letter, name)
    result()
    for sentence in found.reading:
        say(printable(sentence))
    if found.missing:
        first = printable(found.missing[0])
        say(f"Not compared: {len(found.missing):,} tensors that not all have in one shape, the first {first}.")
    result()
    result(heading("all tensors"))
    rows = [
        (f"{names[i]} {names[j]}", f"{total.cosines[n]:.4f}", f"{total.overlaps[n]:.1%}", f"{total.subspaces[n]:.1%}")
        for total in [found.total]
        for n, (i, j) in enumerate(found.pairs)
    ]
    show_table(("pair", "cosine", "largest 1% in common", "leading directions in common"), rows, right={1, 2, 3})
    result()
    show_table(("model", "norm", "of the longest"), _norms(names, found.total), right={1, 2})
    for title, own in (("part", found.parts), ("layer", found.layers), ("tensor", found.tensors if each else ())):
        if own:
            result()
            head = (title, "conflicts", *(f"{names[i]} {names[j]}" for i, j in found.pairs[:_PAIRS]))
            show_table(head, [_alignment(group) for group in own], right=set(range(1, len(head))))


_PAIRS = 6
"""Pairs of models whose cosines are columns."""


def _norms(names: Sequence[str], total: Alignment) -> list[tuple[str, ...]]:
    longest = max(total.norms) or 1.0
    return [(name, f"{norm:.4g}", f"{norm / longest:.0%}") for name, norm in zip(names, total.norms, strict=True)]


def _alignment(group: Alignment) -> tuple[str, ...]:
    conflicts = f"{group.conflict_share:.1%}" if group.shared else "-"
    return group.name, conflicts, *("-" if math.isnan(c) else f"{c:.3f}" for c in group.cosines[:_PAIRS])


def share(value: float) -> str:
    """A share with three digits.

    >>> share(0.01234), share(0.0), share(0.0000123)
    ('1.23%', '0%', '0.00123%')
    """
    return f"{100 * value:.3g}%" if math.isfinite(value) and (value == 0 or value >= 1e-6) else f"{100 * value:.2e}%"


def cosine(value: float) -> str:
    """A cosine; near 1 with what is left to 1.

    >>> cosine(0.5), cosine(0.99999), cosine(1.0)
    ('0.5000', '1 - 1e-05', '1')
    """
    return "1" if value > 1 - 1e-12 else f"1 - {1 - value:.1g}" if value > 0.9995 else f"{value:.4f}"
