"""`weightsmith inspect`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.diff import number
from weightsmith._app.cli.work import working
from weightsmith._base.errors import printable
from weightsmith._base.options import RunOptions
from weightsmith._base.text import count, fact, result, say, section, show_table, size

if TYPE_CHECKING:
    from weightsmith._reports.look.inspect import Inspection, TensorStatistics

_SHOWN = 40  # tensors that are listed one by one


@options.expand
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, weight file, Hub id, base+adapter or adapter.")],
    running: RunOptions,
    tensors: Annotated[
        list[str] | None, typer.Argument(metavar="[GLOB]...", help="Only tensors whose names match.", show_default=False)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors; show norms, extremes, zeros, NaN and outlier rows.")
    ] = False,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Describe a model or an adapter.

    Layers, parameters, dtypes, vocabulary, quantisation, licence. Reads headers only, unless --stats is given; those of Hub
    models by byte range.
    """
    with working("reading the model's headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.look.inspect import inspect as look
        from weightsmith._reports.look.pages import inspection_page

        with meter(quiet=quiet or not stats) as shown:
            found = look(
                model, tensors=tensors or (), stats=stats, threads=running.threads, stream=running.stream, progress=shown
            )
        work.present(lambda: inspection_page(found), found.to_json, lambda: _show(found, each=bool(tensors)))


def _show(found: Inspection, *, each: bool) -> None:
    _facts(found)
    result()
    rows = [(p.name, f"{p.tensors:,}", f"{p.elements:,}", f"{p.elements / max(1, found.elements):.1%}") for p in found.parts]
    show_table(("part", "tensors", "parameters", "share"), rows, right={1, 2, 3})
    if each and len(found.tensors) <= _SHOWN:
        result()
        show_table(("tensor", "dtype", "shape"), [(s.name, s.dtype.name, " x ".join(map(str, s.shape))) for s in found.tensors])
    if found.statistics is not None:
        result()
        _statistics(found.statistics, each=each and len(found.statistics) <= _SHOWN)


def _facts(found: Inspection) -> None:
    name = found.architecture + (f" ({found.model_type})" if found.model_type else "")
    fact("model", f"{name or 'no config.json'}{f', at {found.revision}' if found.revision else ''}")
    nbytes = sum(nbytes for _, nbytes in found.files)
    dtypes = ", ".join(f"{d.name} {d.elements / max(1, sum(x.elements for x in found.dtypes)):.0%}" for d in found.dtypes)
    fact("weights", f"{found.elements:,} parameters in {count(len(found.tensors), 'tensor')}")
    fact("files", f"{size(nbytes)} in {count(len(found.files), 'file')}; {dtypes}")
    if found.quantised:
        fact("quant", found.quantised)
    for stack in found.stacks:
        fact("layers", f"{count(stack.layers, 'layer')}: {stack.prefix}0 to {stack.layers - 1}")
    if found.experts[0]:
        fact("experts", f"{found.experts[0]:,}, of which each token uses {found.experts[1]:,}")
    tokenizer = found.tokenizer
    if tokenizer is not None:
        template = "with" if tokenizer.chat_template else "without"
        rows = f"; the embedding has {tokenizer.rows:,} rows" if tokenizer.rows else ""
        fact(
            "tokens", f"{tokenizer.tokens:,} ({tokenizer.family}, {tokenizer.added:,} added), {template} a chat template{rows}"
        )
    if found.tied is not None:
        fact("head", "the embedding (tied)" if found.tied else "a separate matrix")
    if found.context:
        fact("context", f"{found.context:,} positions")
    if found.adapter is not None:
        ranks = ", ".join(f"rank {rank} in {count(n, 'module')}" for rank, n in found.adapter.ranks.items())
        fact("adapter", f"LoRA for {found.adapter.base or 'an unnamed model'}: {ranks}")
        whole = f"; saved whole: {', '.join(found.adapter.replaced)}" if found.adapter.replaced else ""
        fact("", f"modules {', '.join(found.adapter.modules)}{whole}")
    if found.licence:
        fact("licence", found.licence)
    if found.lineage:
        fact("from", ", ".join(found.lineage))
    for text in found.notes:
        fact("note", text)


def _statistics(found: Sequence[TensorStatistics], *, each: bool) -> None:
    from weightsmith._reports.look.nonfinite import together

    groups: dict[str, list[TensorStatistics]] = {}
    for tensor in found:
        groups.setdefault(tensor.name if each else tensor.place.group, []).append(tensor)
    rows = []
    for name, own in groups.items():
        known = [t for t in own if t.nans + t.infinities < t.elements]
        norm = math.hypot(*(t.norm for t in known)) if known else math.nan
        low, high = min((t.low for t in known), default=math.nan), max((t.high for t in known), default=math.nan)
        zeros, elements = sum(t.zeros for t in own), sum(t.elements for t in own)
        bad, outliers = together(t.nonfinite for t in own), sum(len(t.outliers) for t in own)
        numbers = number(norm, ".4g"), number(low, ".3g"), number(high, ".3g"), f"{zeros / elements:.2%}"
        rows.append((name, *numbers, f"{bad.nans:,}", f"{bad.infinities:,}", f"{outliers:,}"))
    head = ("tensor" if each else "layer", "norm", "lowest", "highest", "zeros", "NaN", "inf", "outliers")
    show_table(head, rows, right=set(range(1, len(head))))
    bad = together(t.nonfinite for t in found)
    if bad:
        say(f"{bad}. The other columns count finite elements only.")
    largest = sorted((o[1], t.name, o[0]) for t in found for o in t.outliers)[::-1][:8]
    if largest:
        section("rows with the largest norms")
        show_table(
            ("tensor", "row", "norm / mean"), [(printable(n), f"{row:,}", f"{x:.1f}") for x, n, row in largest], right={1, 2}
        )
