"""`weightsmith diff`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.progress import meter, no_bars_in_logs
from weightsmith.text import fact, heading, printable, result, say, show_table

if TYPE_CHECKING:
    from weightsmith.look.files import Change
    from weightsmith.look.values import Difference, GroupDifference, TensorDifference

_SHOWN = 12
"""Changed keys, tensors and rows that are listed."""


def diff(
    models: Annotated[list[str], typer.Argument(metavar="A B", help="Folders, weight files, hub ids, or base+adapter.")],
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensors", metavar="GLOB", help="Only tensors whose names match, each in a row; may be given several times."
        ),
    ] = None,
    threads: options.Threads = None,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Show what model B differs in from model A: weights, config, tokenizer, chat template; and what that probably means.

    For each part and layer: the share of elements that differ, the norm of the delta over that of A, the cosine of A and B, and
    the rank of the deltas: the middle one of those that are of low rank above the rounding noise, and how many are not.
    """
    if len(models) != 2:
        raise typer.BadParameter(f"two models are compared, not {len(models)}.", param_hint="A B")
    # Each thread decomposes small matrices of its own: BLAS's threads would only wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with failures(as_json=as_json):
        no_bars_in_logs(quiet=quiet)
        from weightsmith.look.diff import diff as compare
        from weightsmith.look.pages import difference_page
        from weightsmith.pages import check_page, write_page

        if report is not None:
            check_page(report)

        with meter(quiet=quiet) as shown:
            found = compare(*models, tensors=tensors or (), threads=threads, progress=shown)
        if report is not None:
            write_page(report, difference_page(found))
        if as_json:
            result(json.dumps(found.to_json(), ensure_ascii=False))
        elif not quiet:
            _show(found, each=bool(tensors))


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
