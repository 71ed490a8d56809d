"""`weightsmith preview`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith.cli import options
from weightsmith.cli.diff import share
from weightsmith.cli.failures import failures, wrote
from weightsmith.cli.merge import show_warnings
from weightsmith.errors import printable
from weightsmith.options import QuantizeSettings, RecipeOptions, RunOptions
from weightsmith.pages.values import Mark
from weightsmith.progress import meter, no_bars_in_logs
from weightsmith.text import count, fact, result, show_json, show_table, size, status_line, warn

if TYPE_CHECKING:
    from weightsmith.cli.summary import Summary
    from weightsmith.look.preview import GroupPreview, Kept, Preview

_MODELS = 6
"""Models that are columns of tables."""


@options.expand("routing_report", "quantize", "adapter_rank", "adapter_space", "max_shard_bytes")
def preview(
    recipe: options.Recipe,
    planning: RecipeOptions,
    full: Annotated[bool, typer.Option("--full", help="Compute the whole merge, not a sample of it; write nothing.")] = False,
    threads: options.Threads = None,
    stream: options.Stream = False,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Show what merging RECIPE will do to its models.

    From a sample that takes seconds. Writes nothing.

    For each model: how much of the energy of its delta survives, how often the merge moves the other way, and how much is
    dropped; by part and by layer. Beside it how far the merge moves from the base, and what merging takes.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see diff.py
    with failures(as_json=as_json), status_line("reading the recipe and the models' headers", quiet=quiet or as_json):
        no_bars_in_logs(quiet=quiet)
        from weightsmith.api import prepare_any
        from weightsmith.cli.summary import summarise
        from weightsmith.look.pages import preview_page
        from weightsmith.look.preview import preview_of
        from weightsmith.pages import check_page, write_page
        from weightsmith.planner.prepared import stream as stream_weights

        if report is not None:
            check_page(report)

        with prepare_any(options.recipe_source(recipe), planning, QuantizeSettings(), check=True) as prepared:
            show_warnings(prepared)
            if stream:
                stream_weights(prepared.inputs)
            summary = summarise(prepared, RunOptions(threads=threads))
            with meter(quiet=quiet) as shown:
                found = preview_of(prepared, full=full, threads=threads, progress=shown)
            if report is not None:
                write_page(report, preview_page(found, _costs(summary)))
                wrote(f"The page is written: {printable(str(report))}")
            for finding in found.warnings:
                warn(finding)
            if as_json:
                show_json(found.to_json() | {"merge": _costs(summary)})
            elif not quiet:
                _show(found, summary)


def _costs(summary: Summary) -> dict[str, int]:
    return {
        "read_bytes_at_most": summary.read_bytes,
        "write_bytes": summary.file_bytes,
        "peak_memory_bytes": summary.memory.peak_bytes,
        "threads": summary.memory.threads,
    }


def _show(found: Preview, summary: Summary) -> None:
    from weightsmith.look.comparison import letters

    names = letters(len(found.names))
    fact("method", found.method)
    fact("base", found.base)
    for letter, name in zip(names, found.names, strict=True):
        fact(letter, name)
    sampled = f"{found.looked_at / found.elements:.1%} of" if found.looked_at < found.elements else "all"
    left_out = f"; {count(len(found.left_out), 'tensor')} cannot be sampled" if found.left_out else ""
    fact("looked", f"at {sampled} {found.elements:,} elements{left_out}")
    memory = summary.memory
    fact("merging", f"reads {size(summary.read_bytes)} at most, and writes {size(summary.file_bytes)}")
    fact("", f"with {size(memory.peak_bytes)} of memory at most, on {count(memory.threads, 'thread')}")
    result()
    head = ("model", "survives", "opposed", "dropped", "distance", "delta")
    show_table(head, [_model(letter, found.total, i) for i, letter in enumerate(names)], right={1, 2, 3, 4, 5})
    for title, groups in (("part", found.parts), ("layer", found.layers)):
        result()
        columns = (title, "moved", *names[:_MODELS])
        show_table(columns, _rows(groups), right=set(range(1, len(columns))))


def _model(letter: str, total: GroupPreview, i: int) -> tuple[str, ...]:
    kept = total.models[i]
    if kept is None or math.isnan(kept.survives):
        mark = _mark(kept, total)
        return letter, mark, mark, mark, mark, "0" if kept is not None and kept.norm == 0 else mark
    error = f" ± {kept.error:.1%}" if kept.error else ""
    shares = f"{kept.survives:.1%}{error}", f"{kept.against:.1%}", f"{kept.dropped:.1%}"
    return letter, *shares, f"{kept.apart:.2f}", f"{kept.norm:.4g}"


def _rows(groups: Sequence[GroupPreview]) -> list[tuple[str, ...]]:
    return [
        (
            group.name,
            share(group.share) if group.measured else _mark(None, group),
            *(_mark(k, group) if k is None or math.isnan(k.survives) else f"{k.survives:.1%}" for k in group.models[:_MODELS]),
        )
        for group in groups
    ]


def _mark(kept: Kept | None, group: GroupPreview) -> str:
    """For what has no number: a model that does not differ, that is not merged, or that holds NaN or infinities."""
    from weightsmith.look.nonfinite import mark_of

    if kept is not None and kept.norm == 0:
        return Mark.SAME.word
    mark = None if group.measured else mark_of(group.nonfinite)
    return (mark or (Mark.NOTHING if kept is None else Mark.UNDEFINED)).word
