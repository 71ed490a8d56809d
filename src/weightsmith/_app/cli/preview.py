"""`weightsmith preview`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.diff import share
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._base.options import QuantizeSettings, RecipeOptions, RunOptions
from weightsmith._base.pages.values import Mark
from weightsmith._base.text import count, fact, result, show_table, size, warn

if TYPE_CHECKING:
    from weightsmith._app.cli.summary import Summary
    from weightsmith._reports.look.preview import GroupPreview, Kept, Preview

_MODELS = 6
"""Models that are columns of tables."""


@options.expand
def preview(
    recipe: options.Recipe,
    planning: RecipeOptions,
    running: RunOptions,
    full: Annotated[bool, typer.Option("--full", help="Compute the whole merge instead of a sample; write nothing.")] = False,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Predict the effect of RECIPE on its models.

    Computes a sample, which takes seconds. Writes nothing.

    For each model, by part and by layer: the share of its delta's energy that survives, the share of elements that the merge
    moves the other way, and the share that is dropped. Also the distance from the base, and the cost of merging.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see diff.py
    with working("reading the recipe and the models' headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._app.cli.summary import summarise
        from weightsmith._execution.progress import meter
        from weightsmith._features.any_recipe import prepare_any
        from weightsmith._planning.planner.prepared import stream
        from weightsmith._reports.look.pages import preview_page
        from weightsmith._reports.look.preview import preview_of

        with prepare_any(options.recipe_source(recipe), planning, QuantizeSettings(), check=True) as prepared:
            show_warnings(prepared)
            if running.stream:
                stream(prepared.inputs)
            summary = summarise(prepared, running)
            with meter(quiet=quiet) as shown:
                found = preview_of(prepared, full=full, threads=running.threads, progress=shown)
            for finding in found.warnings:
                warn(finding)
            costs = {
                "read_bytes_at_most": summary.read_bytes,
                "write_bytes": summary.file_bytes,
                "peak_memory_bytes": summary.memory.peak_bytes,
                "threads": summary.memory.threads,
            }
            data = found.to_json() | {"merge": costs}
            work.present(lambda: preview_page(found, costs), lambda: data, lambda: _show(found, summary))


def _show(found: Preview, summary: Summary) -> None:
    from weightsmith._reports.look.comparison import letters

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
    """In place of a number: a model that does not differ, is not merged, or holds NaN or infinities."""
    from weightsmith._reports.look.nonfinite import mark_of

    if kept is not None and kept.norm == 0:
        return Mark.SAME.word
    mark = None if group.measured else mark_of(group.nonfinite)
    return (mark or (Mark.NOTHING if kept is None else Mark.UNDEFINED)).word
