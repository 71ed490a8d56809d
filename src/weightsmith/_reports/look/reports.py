"""The reports of inspections, differences, comparisons and previews."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from weightsmith._base.idioms import grouped
from weightsmith._base.report.blocks import (
    Block,
    Code,
    Column,
    Curves,
    Facts,
    Mark,
    Pictures,
    Report,
    Table,
    Unit,
    Value,
    finite_or_mark,
    heat_maps,
    many,
    span_of,
    written,
)
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count, size, some
from weightsmith._execution.report import share_of
from weightsmith._reports.look.diff import Alignment, Comparison, letters
from weightsmith._reports.look.difference import Difference, GroupDifference, TensorDifference
from weightsmith._reports.look.inspect import Amount, Inspection, TensorStatistics
from weightsmith._reports.look.models import OUTSIDE, FileDifference, LayerPlace, by_layer_and_part
from weightsmith._reports.look.preview import GroupPreview, Preview
from weightsmith._reports.look.surveys import mark_of, shares, together

SPECTRA = 8
"""Parts whose spectra are drawn."""
PAIRS = 6
"""Pairs, or models, that have heat maps."""
_TENSORS, _LAYERS = "tensors", "layers"
_name = attrgetter("name")
_LEFT_OUT = "Norms and cosines are of the tensors without NaN and infinities."


def difference_report(difference: Difference) -> Report:
    """What a model differs in from another."""
    a, b = difference.names
    total = difference.total
    blocks: list[Block] = []
    if difference.total.changed or any(difference.total.nonfinite):
        placed = [(tensor.place, tensor) for tensor in difference.tensors]
        about = "Frobenius norm of B - A over that of A, of all matrices of a part in a layer together."
        moved = "How far the weights moved"
        blocks += heat_maps(moved, placed, _together, "share", about, scale="log", detail=_TENSORS, name=_name)
        about = "The singular values of the delta above the rounding noise. The middle one, where there are several matrices."
        blocks += heat_maps("Rank of the deltas", placed, _middle_rank, "count", about, detail=_TENSORS, name=_name)
        blocks += _by_layer(difference.layers)
        blocks += _spectra(difference.tensors)
    blocks.append(_models(difference))
    if difference.total.changed or any(difference.total.nonfinite):
        blocks += [_groups("Parts", "part", [difference.total, *difference.parts])]
        blocks += [replace(_groups("Layers", "layer", difference.layers), name=_LAYERS)]
        tensors = _table("Tensors", _DIFFERENCE, difference.tensors, name=_TENSORS)
        blocks.append(replace(tensors, pictures=tuple(map(_pictures, difference.tensors))))
    if difference.moved:
        columns = Column("tensor"), Column("row", "count"), Column("token"), Column("moved", "share", "‖delta‖ / ‖row of A‖")
        rows = tuple(
            (row.tensor, row.row, _quoted(row.token) if row.token else "", finite_or_mark(row.share))
            for row in difference.moved
        )
        blocks.append(Table("Rows that moved most", columns, rows))
    blocks += _files(difference.files)
    for title, names in ((f"Only in {a}", difference.only_a), (f"Only in {b}", difference.only_b)):
        if names:
            blocks.append(Table(title, (Column("tensor"),), tuple((name,) for name in names)))
    if difference.different:
        specs = tuple((name, *specs_of) for name, specs_of in difference.different)
        blocks.append(Table("Not comparable", (Column("tensor"), Column("A"), Column("B")), specs))
    blocks.append(Code("Reproduce", shlex.join(["weightsmith", "diff", a, b])))
    numbers = (
        (f"moved, ‖B - A‖ / ‖A‖{_of_measured(total)}", written(finite_or_mark(total.share), "share")),
        ("elements that differ", written(total.changed_share, "share")),
        (f"cosine of A and B{_of_measured(total)}", written(total.cosine, "cosine")),
    )
    title, models = f"{b}, compared with {a}", tuple(zip("AB", difference.names, strict=True))
    return Report(title, difference.reading, tuple(blocks), difference.to_json, numbers, models)


def comparison_report(comparison: Comparison) -> Report:
    """The task vectors of several models, side by side."""
    names = letters(len(comparison.names))
    pairs = [f"{names[i]} and {names[j]}" for i, j in comparison.pairs]
    blocks = _task_vector_pictures(comparison, pairs)
    blocks.append(Facts("Models", (("base", comparison.base), *zip(names, comparison.names, strict=True))))
    blocks += _task_vector_tables(comparison, names, pairs)
    blocks.append(Code("Reproduce", shlex.join(["weightsmith", "diff", "--base", comparison.base, *comparison.names])))
    total = comparison.total
    known = [(abs(cosine), pair, cosine) for pair, cosine in zip(pairs, total.cosines, strict=True) if math.isfinite(cosine)]
    _, pair, cosine = max(known, default=(0.0, "the models", math.nan))
    overlaps = [overlap for overlap in total.overlaps if math.isfinite(overlap)]
    numbers = (
        (f"cosine of {pair}{', the largest' if len(pairs) > 1 else ''}", written(cosine, "number")),
        ("signs in conflict", written(total.conflict_share, "share")),
        ("largest elements in common", written(max(overlaps, default=math.nan), "share")),
    )
    models = (("base", comparison.base), *zip(names, comparison.names, strict=True))
    title = f"Task vectors of {len(comparison.names)} models"
    return Report(title, comparison.reading, tuple(blocks), comparison.to_json, numbers, models)


def _task_vector_pictures(comparison: Comparison, pairs: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    placed = [(tensor.place, tensor) for tensor in comparison.tensors if tensor.place is not None]
    about = "Share of the elements that two or more models change in which their signs differ."
    blocks += heat_maps("Conflicts of signs", placed, _conflicts, "share", about, detail=_TENSORS, span=(0.0, 1.0), name=_name)
    span = span_of([cosine for tensor in comparison.tensors for cosine in tensor.cosines[:PAIRS]], "diverging")
    for k, pair in enumerate(pairs[:PAIRS]):
        about = "Cosine of the deltas of the two models. The middle one, where there are several matrices."
        blocks += heat_maps(
            f"Cosine of {pair}",
            placed,
            partial(_cosine, k),
            "number",
            about,
            scale="diverging",
            detail=_TENSORS,
            span=span,
            group="Cosines of the deltas",
            name=_name,
        )
    by_layer = [layer for layer in comparison.layers if layer.name != OUTSIDE]
    if by_layer:
        lines = tuple((pair, tuple(layer.cosines[k] for layer in by_layer)) for k, pair in enumerate(pairs[:PAIRS]))
        blocks.append(Curves("Cosines by layer", lines, "layer", "cosine", first=0))
    return blocks


def _task_vector_tables(comparison: Comparison, names: Sequence[str], pairs: Sequence[str]) -> list[Block]:
    blocks: list[Block] = []
    total, longest = comparison.total, max(comparison.total.norms)
    lengths = tuple(
        (name, norm, norm / longest if longest else Mark.UNDEFINED) for name, norm in zip(names, total.norms, strict=True)
    )
    blocks.append(Table("Lengths", (Column("model"), Column("norm", "number"), Column("relative norm", "share")), lengths))
    columns = (
        Column("pair"),
        Column("cosine", "number", "of the deltas"),
        Column("largest in common", "share", "of the largest 1% of elements of each delta; 1% by chance"),
        Column("directions in common", "share", "mean squared cosine of the angles between the 8 leading directions"),
    )
    rows = tuple((pair, total.cosines[k], total.overlaps[k], total.subspaces[k]) for k, pair in enumerate(pairs))
    blocks.append(Table("Pairs", columns, rows))
    tables = (
        ("Parts", comparison.parts, ""),
        ("Layers", comparison.layers, _LAYERS),
        ("Tensors", comparison.tensors, _TENSORS),
    )
    for title, groups, name in tables:
        heads = (
            Column(title.lower()[:-1]),
            Column("conflicts", "share"),
            *(Column(f"cosine {pair}", "number") for pair in pairs),
        )
        values: tuple[tuple[Value, ...], ...] = tuple(
            (g.name, _mark(g) or g.conflict_share, *(_mark(g) or cosine for cosine in g.cosines)) for g in groups
        )
        places = tuple((_place(g.place) if g.place else ("", "")) for g in groups) if name == _TENSORS else ()
        blocks.append(Table(title, heads, values, name=name, places=places))
    if comparison.missing:
        blocks.append(Table("Not in all models", (Column("tensor"),), tuple((name,) for name in comparison.missing)))
    return blocks


def preview_report(preview: Preview) -> Report:
    """What a merge will do to its models, and what it will cost."""
    names = letters(len(preview.names))
    sampled = f"{written(preview.looked_at / max(1, preview.elements), 'share')} of {many(preview.elements)} elements"
    facts: list[tuple[str, Value]] = [
        ("method", preview.method),
        ("base", preview.base),
        *zip(names, preview.names, strict=True),
    ]
    facts.append(("sample", sampled))
    facts += [("not sampled", count(len(preview.left_out), "tensor"))] if preview.left_out else []
    merge, memory = preview.summary, preview.summary.memory
    facts += [("reads, at most", size(merge.read_bytes)), ("writes", size(merge.write_bytes))]
    facts += [("memory, at most", size(memory.peak_bytes)), ("threads", f"{memory.threads:,}")]
    costs = {"read_bytes_at_most": merge.read_bytes, "write_bytes": merge.write_bytes}
    costs |= {"peak_memory_bytes": memory.peak_bytes, "threads": memory.threads}
    blocks: list[Block] = []
    about = "Frobenius norm of merge - base over that of the base."
    blocks += heat_maps("Distance from the base", preview.cells, _distance, "share", about, scale="log", detail="cells")
    group, about = "What survives of the models", "Share of the energy of each model's delta that is in the merge."
    for i, name in enumerate(names[:PAIRS]):
        title, of_model = f"What survives of {name}", partial(_survives, i)
        blocks += heat_maps(title, preview.cells, of_model, "share", about, detail="cells", span=(0.0, 1.0), group=group)
    by_layer = [layer for layer in preview.layers if layer.name != OUTSIDE]
    if by_layer:
        lines = tuple((name, tuple(_number(_survives(i, [g])) for g in by_layer)) for i, name in enumerate(names[:PAIRS]))
        blocks.append(Curves("What survives, by layer", lines, "layer", "share of the energy", "share", first=0))
    blocks += [Facts("The merge", tuple(facts)), _survival(preview, names)]
    every = [group for _, group in preview.cells]
    places = tuple(_place(place) for place, _ in preview.cells)
    blocks += [_kept("Parts", preview.parts, names), replace(_kept("Layers", preview.layers, names), name=_LAYERS)]
    blocks.append(replace(_kept("Parts of layers", every, names), name="cells", places=places))
    if preview.plan.recipe:
        blocks.append(Code("Recipe", preview.plan.recipe))
    share = written(finite_or_mark(preview.total.share), "share")
    kept = [k.survives for k in preview.total.models if k is not None and math.isfinite(k.survives)]
    verdict, warnings = f"The merge is {share} away from its base", [f"{finding.what}." for finding in preview.warnings]
    numbers = [("distance from the base", share)]
    if kept:
        low, high = (written(value, "share") for value in (min(kept), max(kept)))
        survives = low if low == high else f"{low} to {high}"
        verdict += f", and keeps {survives} of the energy of {'its model' if len(kept) == 1 else 'each model'}'s delta"
        numbers.append(("energy that survives", survives))
    against = [k.against for k in preview.total.models if k is not None and math.isfinite(k.against)]
    numbers += [("signs turned over, at most", written(max(against), "share"))] if against else []
    summary = [*warnings, f"{verdict}."] if preview.stops else [f"{verdict}.", *warnings]
    models = (("base", preview.base), *zip(names, preview.names, strict=True))
    title, data = f"Preview of a merge with {preview.method}", preview.to_json() | {"merge": costs}
    return Report(title, tuple(summary), tuple(blocks), data, tuple(numbers), models)


def inspection_report(inspection: Inspection) -> Report:
    """What a model is."""
    blocks: list[Block] = []
    facts: list[Block] = [
        _facts(inspection),
        _amounts("Parts", inspection.parts, decoded=bool(inspection.quantised)),
        _amounts("Dtypes", inspection.dtypes),
    ]
    statistics = inspection.statistics
    if statistics is not None:
        placed = [(tensor.place, tensor) for tensor in statistics]
        about = "Of the elements of a part in a layer."
        blocks += heat_maps("Standard deviation", placed, _deviation, "number", about, detail=_TENSORS, name=_name)
        about = "The largest magnitude in a part of a layer, over the standard deviation there."
        blocks += heat_maps("Largest element", placed, _peak, "number", about, scale="log", detail=_TENSORS, name=_name)
        blocks += [*facts, _layers(statistics)]
        rows = sorted(((s.name, row, share) for s in statistics for row, share in s.outliers), key=lambda row: -row[2])
        if rows:
            columns = Column("tensor"), Column("row", "count"), Column("norm / mean", "number")
            blocks.append(Table("Rows with the largest norms", columns, tuple(rows)))
        tensors = _table("Tensors", _STATISTICS, statistics, name=_TENSORS)
        blocks.append(replace(tensors, pictures=tuple(Pictures((), *shares(one.magnitudes)) for one in statistics)))
    else:
        blocks += facts
        specs = tuple((spec.name, spec.dtype.name, _shape(spec), spec.size) for spec in inspection.tensors)
        heads = Column("tensor"), Column("dtype"), Column("shape"), Column("elements", "count")
        blocks.append(Table("Tensors", heads, specs, name=_TENSORS))
    stats = ["--stats"] if statistics is not None else []
    blocks.append(Code("Reproduce", shlex.join(["weightsmith", "inspect", inspection.name, *stats])))
    dtypes = ", ".join(amount.name for amount in sorted(inspection.dtypes, key=lambda amount: -amount.nbytes)[:3])
    kind = "" if inspection.adapter is None else f"A {inspection.adapter.title} adapter"
    what = inspection.architecture or kind or "A model without config.json"
    summary = [f"{what} of {many(inspection.elements)} parameters in {count(len(inspection.tensors), 'tensor')}, {dtypes}."]
    held = together(one.nonfinite for one in statistics or ())
    summary = [f"The weights have {held}.", *summary] if held else summary
    numbers = [("parameters", many(inspection.elements)), ("weight files", size(sum(nbytes for _, nbytes in inspection.files)))]
    layers = sum(stack.layers for stack in inspection.stacks)
    numbers += [("layers", f"{layers:,}")] if layers else []
    return Report(inspection.name, (*summary, *inspection.notes), tuple(blocks), inspection.to_json, tuple(numbers))


def _pictures(tensor: TensorDifference) -> Pictures:
    return Pictures(
        tuple(tensor.leading.values) if tensor.leading is not None else (), *shares(tensor.magnitudes), "difference"
    )


def _together(tensors: Sequence[TensorDifference]) -> float | Mark:
    if not any(tensor.changed for tensor in tensors):
        return Mark.SAME
    mark = mark_of(counts for tensor in tensors for counts in tensor.nonfinite)
    return mark or finite_or_mark(
        share_of(*(math.hypot(*norms) for norms in zip(*((t.delta, t.a) for t in tensors), strict=True)))
    )


def _middle_rank(tensors: Sequence[TensorDifference]) -> float | Mark:
    """The middle one of several; one that is not known is higher than those that are, and a full one is the highest."""
    changed = [tensor for tensor in tensors if tensor.changed]
    mark = mark_of(counts for tensor in changed for counts in tensor.nonfinite)
    if mark is not None and any(tensor.linear for tensor in changed):
        return mark
    order = (Mark.HIGH, Mark.FULL)
    ranks = sorted(
        (tensor.rank for tensor in changed if not isinstance(tensor.rank, Mark) or tensor.rank in order),
        key=lambda rank: (1 + order.index(rank), 0) if isinstance(rank, Mark) else (0, rank),
    )
    if ranks:
        return ranks[(len(ranks) - 1) // 2]
    return (changed or tensors)[0].rank if any(tensor.linear for tensor in tensors) else Mark.NOTHING


def _deviation(tensors: Sequence[TensorStatistics]) -> float | Mark:
    mark = mark_of(tensor.nonfinite for tensor in tensors)
    if mark is not None:
        return mark
    elements = sum(tensor.elements for tensor in tensors)
    mean = math.fsum(tensor.mean * tensor.elements for tensor in tensors) / elements
    squares = math.fsum((tensor.deviation**2 + (tensor.mean - mean) ** 2) * tensor.elements for tensor in tensors) / elements
    return math.sqrt(squares)


def _peak(tensors: Sequence[TensorStatistics]) -> float | Mark:
    deviation = _deviation(tensors)
    if isinstance(deviation, Mark):
        return deviation
    return max(max(abs(t.low), abs(t.high)) for t in tensors) / deviation if deviation else Mark.UNDEFINED


def _conflicts(tensors: Sequence[Alignment]) -> float | Mark:
    mark, shared = (
        mark_of(counts for tensor in tensors for counts in tensor.nonfinite),
        sum(tensor.shared for tensor in tensors),
    )
    return mark or (sum(tensor.conflicts for tensor in tensors) / shared if shared else Mark.NOTHING)


def _cosine(pair: int, tensors: Sequence[Alignment]) -> float | Mark:
    mark = mark_of(counts for tensor in tensors for counts in tensor.nonfinite)
    known = sorted(tensor.cosines[pair] for tensor in tensors if math.isfinite(tensor.cosines[pair]))
    return mark or (known[(len(known) - 1) // 2] if known else Mark.NOTHING)


def _distance(groups: Sequence[GroupPreview]) -> float | Mark:
    (group,) = groups
    return _mark(group) or (finite_or_mark(group.share) if group.delta else Mark.SAME)


def _survives(model: int, groups: Sequence[GroupPreview]) -> float | Mark:
    (group,) = groups
    kept = group.models[model]
    if kept is None:
        return Mark.NOTHING
    return _mark(group) or (Mark.SAME if kept.norm == 0 else kept.survives)


def _mark(group: Alignment | GroupPreview | GroupDifference | TensorDifference) -> Mark | None:
    """The mark of what cannot be measured because of NaN and infinities; the numbers of a group are of its other tensors."""
    return None if group.measured else mark_of(group.nonfinite)


def _number(value: float | Mark) -> float | None:
    return None if isinstance(value, Mark) else value


def _kept(title: str, groups: Sequence[GroupPreview], names: Sequence[str]) -> Table:
    moved = Column("moved", "share", "Frobenius norm of merge - base over that of the base")
    columns = Column("name"), moved, *(Column(name, "share") for name in names), Column("elements", "count")
    rows = tuple((g.name, _distance([g]), *(_survives(i, [g]) for i in range(len(names))), g.elements) for g in groups)
    return Table(title, columns, rows, "Columns of models: the share of the energy of the delta that survives.")


def _survival(preview: Preview, names: Sequence[str]) -> Table:
    columns = (
        Column("model"),
        Column("survives", "share", "of the energy of its delta"),
        Column("±", "share", "two standard errors of the sample"),
        Column("opposed", "share", "of the elements that it changed, those that the merge moves the other way"),
        Column("dropped", "share", "of these elements, those that the merge leaves as in the base"),
        Column("distance", "number", "from the merge to the model, over the norm of its delta"),
        Column("delta", "number", "norm of the model's delta"),
    )
    rows: list[tuple[Value, ...]] = []
    for name, kept in zip(names, preview.total.models, strict=True):
        if kept is not None and kept.norm == 0:
            rows.append((name, *[Mark.SAME] * 5, 0.0))
        elif kept is not None:
            rows.append((name, kept.survives, kept.error, kept.against, kept.dropped, kept.apart, kept.norm))
    return Table("What survives of the models", columns, tuple(rows))


def _models(difference: Difference) -> Facts:
    total, facts = difference.total, []
    for which, name, quantised in zip("AB", difference.names, difference.quantised, strict=True):
        facts.append((which, f"{name} ({quantised}, decoded)" if quantised else name))
    facts += [
        ("matrices", f"{total.tensors:,}, {total.elements:,} elements"),
        ("elements that differ", f"{total.changed:,}, {written(total.changed_share, 'share')}"),
        ("‖B - A‖ / ‖A‖", f"{written(finite_or_mark(total.share), 'number')}{_of_measured(total)}"),
        ("cosine", f"{written(total.cosine, 'cosine')}{_of_measured(total)}"),
    ]
    for name, counts in zip("AB", total.nonfinite, strict=True):
        if counts:
            facts.append((f"not finite in {name}", str(counts)))
    if difference.merged_of is not None:
        facts.append(("merge of", ", ".join(difference.merged_of) or "models that its card does not name"))
    return Facts("Models", tuple(facts))


def _of_measured(group: GroupDifference) -> str:
    return "" if group.measured == group.tensors else f" (of {group.measured:,} finite ones)"


def _by_layer(layers: Sequence[GroupDifference]) -> list[Curves]:
    """How far each layer moved, a line for each stack."""
    stacks = grouped((layer.name.rstrip("0123456789"), layer.share) for layer in layers if layer.name != OUTSIDE)
    if not stacks:
        return []
    return [Curves("By layer", tuple((n, tuple(v)) for n, v in stacks.items()), "layer", "‖B - A‖ / ‖A‖", "share", first=0)]


def _spectra(tensors: Sequence[TensorDifference]) -> list[Curves]:
    """The singular values of the delta that moved most in each part."""
    most: dict[str, TensorDifference] = {}
    for tensor in tensors:
        if tensor.leading is not None and tensor.leading.largest > 0:
            if tensor.place.part not in most or _by_share(tensor) > _by_share(most[tensor.place.part]):
                most[tensor.place.part] = tensor
    chosen = sorted(most.values(), key=lambda tensor: -_by_share(tensor))[:SPECTRA]
    if not chosen:
        return []
    lines = tuple((t.name, tuple(t.leading.values)) for t in chosen if t.leading is not None)
    about = "Of the delta that moved most in each part. A step down to the rounding noise shows the rank of a LoRA."
    return [Curves("Leading singular values", lines, "number", "singular value", about=about, log=True)]


def _by_share(tensor: TensorDifference) -> float:
    return -1.0 if math.isnan(tensor.share) else tensor.share


_Field = tuple[Column, Callable[[Any], Value]]
"""A column, and its value for what a row is about."""


def _table(title: str, fields: Sequence[_Field], items: Sequence[Any], about: str = "", name: str = "") -> Table:
    """A row for each item. name: as for `Table`; the items then have places."""
    rows = tuple(tuple(value(item) for _, value in fields) for item in items)
    places = tuple(_place(item.place) for item in items) if name else ()
    return Table(title, tuple(column for column, _ in fields), rows, about, name, places)


def _groups(title: str, first: str, groups: Sequence[GroupDifference]) -> Table:
    about = _LEFT_OUT if any(g.measured < g.tensors for g in groups) else ""
    return _table(title, ((Column(first), attrgetter("name")), *_GROUP), groups, about)


def _moved(group: GroupDifference | TensorDifference) -> float | Mark:
    return (_mark(group) or finite_or_mark(group.share)) if group.changed else Mark.SAME


def _place(place: LayerPlace) -> tuple[str, str]:
    return place.group, place.part


def _files(files: FileDifference) -> list[Table | Facts | Code]:
    blocks: list[Table | Facts | Code] = []
    for title, changed in (("config.json", files.config), ("generation_config.json", files.generation)):
        if changed:
            rows = tuple((change.key, _setting(change.old), _setting(change.new)) for change in changed)
            blocks.append(Table(title, (Column("key"), Column("A"), Column("B")), rows))
    tokenizer = files.tokenizer
    if tokenizer is not None and not tokenizer.same:
        facts: tuple[tuple[str, Value], ...] = (
            ("tokens", " and ".join(f"{n:,}" for n in tokenizer.sizes)),
            ("with other ids", f"{tokenizer.moved:,}"),
            ("only in A", some([*map(_quoted, tokenizer.removed)], 20) or "none"),
            ("only in B", some([*map(_quoted, tokenizer.added)], 20) or "none"),
        )
        blocks.append(Facts("Tokenizer", facts))
    if files.templates is not None:
        for which, template in zip("AB", files.templates, strict=True):
            blocks.append(Code(f"Chat template of {which}", template or "none"))
    return blocks


def _setting(value: Any) -> str:
    """A value of a config as the file has it, a text without quotes."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quoted(token: str) -> str:
    """A token in quotes, as JSON has it: spaces at its ends count."""
    return json.dumps(token, ensure_ascii=False)


def _facts(inspection: Inspection) -> Facts:
    kind = f" ({inspection.model_type})" if inspection.model_type else ""
    names, nbytes = [name for name, _ in inspection.files], size(sum(nbytes for _, nbytes in inspection.files))
    facts: list[tuple[str, Value]] = [
        ("model", f"{inspection.architecture}{kind}" or "no config.json"),
        ("revision", inspection.revision),
        ("weights", f"{inspection.elements:,} parameters in {count(len(inspection.tensors), 'tensor')}"),
        ("files", f"{nbytes} in {count(len(names), 'file')}: {some(names, 4) or 'none'}"),
        ("quantised", inspection.quantised),
        *(
            ("layers", f"{count(s.layers, 'layer')}: {s.prefix}0{f' to {s.layers - 1}' if s.layers > 1 else ''}")
            for s in inspection.stacks
        ),
        (
            "experts",
            f"{inspection.experts[0]:,}, of which each token uses {inspection.experts[1]:,}" if inspection.experts[0] else "",
        ),
    ]
    if inspection.tokenizer is not None:
        tokens, template = inspection.tokenizer, "with" if inspection.tokenizer.chat_template else "without"
        rows = f"; the embedding has {tokens.rows:,} rows" if tokens.rows else ""
        text = f"{tokens.tokens:,} ({tokens.family}, {tokens.added:,} added), {template} a chat template{rows}"
        facts.append(("tokens", text))
    if inspection.tied is not None:
        facts.append(("head", "the embedding (tied)" if inspection.tied else "a separate matrix"))
    if inspection.adapter is not None:
        ranks = ", ".join(f"rank {rank} in {count(n, 'module')}" for rank, n in inspection.adapter.ranks.items())
        what = f"{inspection.adapter.title} for {inspection.adapter.base or 'an unnamed model'}"
        facts.append(("adapter", f"{what}: {ranks}" if ranks else what))
        facts.append(("modules", ", ".join(inspection.adapter.modules)))
        facts.append(("saved whole", ", ".join(inspection.adapter.replaced)))
    facts.append(("context", f"{inspection.context:,} positions" if inspection.context else ""))
    facts += [("licence", inspection.licence), ("from", ", ".join(inspection.lineage))]
    return Facts("Model", tuple((name, value) for name, value in facts if value))


def _amounts(title: str, amounts: Sequence[Amount], *, decoded: bool = False) -> Table:
    elements = max(1, sum(a.elements for a in amounts))
    last = "decoded size" if decoded else "size"
    units: tuple[tuple[str, Unit], ...] = (("tensors", "count"), ("elements", "count"), ("share", "share"), (last, "bytes"))
    columns = Column(title.lower()[:-1]), *(Column(name, unit) for name, unit in units)
    return Table(title, columns, tuple((a.name, a.tensors, a.elements, a.elements / elements, a.nbytes) for a in amounts))


def _layers(statistics: Sequence[TensorStatistics]) -> Table:
    """The statistics of each layer: norm and extremes are of its finite elements."""
    names = "norm", "lowest", "highest", "zeros", "NaN", "infinite", "outlier rows"
    units: tuple[Unit, ...] = ("number", "number", "number", "share", "count", "count", "count")
    rows = []
    for name, members in by_layer_and_part(statistics)[0].items():
        known = [s for s in members if s.nans + s.infinities < s.elements]
        norm = math.hypot(*(s.norm for s in known)) if known else math.nan
        low, high = min((s.low for s in known), default=math.nan), max((s.high for s in known), default=math.nan)
        zeros = sum(s.zeros for s in members) / sum(s.elements for s in members)
        nans, infinities = sum(s.nans for s in members), sum(s.infinities for s in members)
        rows.append((name, norm, low, high, zeros, nans, infinities, sum(len(s.outliers) for s in members)))
    columns = Column("layer"), *(Column(name, unit) for name, unit in zip(names, units, strict=True))
    about = "Norms and extremes are of the finite elements." if any(s.nonfinite for s in statistics) else ""
    return Table("Layers", columns, tuple(rows), about)


# ---- columns


def _shape(tensor: TensorSpec | TensorDifference | TensorStatistics) -> str:
    return " x ".join(map(str, tensor.shape))


_NAME: _Field = (Column("tensor"), attrgetter("name"))
_MOVED: tuple[_Field, ...] = (
    (Column("changed", "share", "share of elements that differ"), lambda group: finite_or_mark(group.changed_share)),
    (Column("delta / A", "share", "Frobenius norm of B - A over that of A"), _moved),
    (Column("cosine", "cosine", "between A and B as vectors"), lambda group: _mark(group) or group.cosine),
)
_NONFINITE: tuple[_Field, ...] = (
    (Column("NaN", "count", "elements of A and B"), lambda group: sum(counts.nans for counts in group.nonfinite)),
    (Column("infinite", "count", "elements of A and B"), lambda group: sum(counts.infinities for counts in group.nonfinite)),
)
_GROUP: tuple[_Field, ...] = (
    *_MOVED,
    (
        Column("rank", "count", "the middle one of the deltas whose rank is known and not full"),
        lambda group: group.ranks[1] if group.ranks else None,
    ),
    (Column("full rank", "count", "deltas of full rank"), attrgetter("full")),
    (Column("high rank", "count", f"deltas {Mark.HIGH.meaning}"), attrgetter("high")),
    (Column("matrices", "count"), attrgetter("tensors")),
    (Column("elements", "count"), attrgetter("elements")),
    *_NONFINITE,
)
_DIFFERENCE: tuple[_Field, ...] = (
    _NAME,
    *_MOVED,
    (Column("rank", "count", "of the delta, above the rounding noise"), attrgetter("rank")),
    (Column("largest", "number", "the largest magnitude of the delta"), lambda group: _mark(group) or group.largest),
    (Column("shape"), _shape),
    *_NONFINITE,
    (
        Column("stable rank", "number", "‖delta‖² over the square of its largest singular value"),
        lambda tensor: tensor.stable_rank if tensor.leading is not None else None,
    ),
)
_STATISTICS: tuple[_Field, ...] = (
    _NAME,
    (Column("norm", "number", "Frobenius norm"), attrgetter("norm")),
    (Column("mean", "number"), attrgetter("mean")),
    (Column("deviation", "number", "standard deviation"), attrgetter("deviation")),
    (Column("smallest", "number"), attrgetter("low")),
    (Column("largest", "number"), attrgetter("high")),
    (Column("zeros", "count"), attrgetter("zeros")),
    (Column("NaN", "count"), attrgetter("nans")),
    (Column("infinite", "count"), attrgetter("infinities")),
    (Column("outlier rows", "count", "rows whose norm is far above the others'"), lambda tensor: len(tensor.outliers)),
    (Column("dtype"), attrgetter("dtype")),
    (Column("shape"), _shape),
)
