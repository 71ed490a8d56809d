"""How far a merge has moved from its base, by layer; and the page of a run, which shows it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.report.blocks import (
    Block,
    Code,
    Column,
    Curves,
    Facts,
    HeatMap,
    Mark,
    Report,
    Table,
    Value,
    finite_or_mark,
    heat_maps,
    written,
)
from weightsmith._base.text import markdown_table, size
from weightsmith._models.structure import analyse
from weightsmith._models.structure.model import OUTSIDE, LayerPlace, place_of
from weightsmith._plans import PLAIN, Plan
from weightsmith.abc.product import ProductReport

PAGE_NAME = "report.html"
"""The page of a run, in its output."""


def share_of(delta: float, base: float) -> float:
    """The norm of a delta over that of what it is from.

    >>> share_of(1, 2), share_of(0, 0), share_of(0, math.nan), share_of(1, 0), share_of(1, math.inf)
    (0.5, 0.0, 0.0, inf, nan)
    """
    if delta == 0:
        return 0.0
    if base == 0:
        return math.inf if math.isfinite(delta) else math.nan
    return delta / base if math.isfinite(delta) and math.isfinite(base) else math.nan


@dataclass(frozen=True, slots=True)
class Moved:
    """Frobenius norms of merged - base and of the base, over one layer or all tensors. Infinite constants count as zeros."""

    name: str
    delta: float
    base: float

    @property
    def share(self) -> float:
        """The norm of the delta over that of the base."""
        return share_of(self.delta, self.base)

    def percent(self, digits: int = 2) -> str:
        """The share as text: "?" if it is not a number.

        >>> Moved("all", 1.0, 8.0).percent(), Moved("all", 1.0, 0.0).percent()
        ('12.50%', '?')
        """
        return f"{self.share:.{digits}%}" if math.isfinite(self.share) else "?"


def distance_by_layer(plan: Plan, squares: Mapping[str, tuple[float, float]]) -> tuple[Moved, ...]:
    """The distance in total, then of every layer in order, then outside the layers; () without a base.

    squares  tensor → squared norms of its delta and of its base, from the engine
    """
    if not squares:
        return ()
    structure = analyse([step.out for step in plan.steps], plan.config)
    rows: dict[str, list[tuple[float, float]]] = {}
    outside: list[tuple[float, float]] = []
    for step in plan.steps:
        pair = squares.get(step.out.name)
        if pair is not None:
            place = structure.locate(step.out.name)
            group = outside if place is None else rows.setdefault(f"{place[0].prefix}{place[1]}", [])
            group.append(pair)
    everything = [pair for group in [*rows.values(), outside] for pair in group]
    moved = [_sum("all", everything), *(_sum(name, group) for name, group in rows.items())]
    return (*moved, _sum("outside the layers", outside)) if outside else tuple(moved)


def _sum(name: str, pairs: list[tuple[float, float]]) -> Moved:
    return Moved(name, math.sqrt(sum(d for d, _ in pairs)), math.sqrt(sum(b for _, b in pairs)))


def to_json(moved: tuple[Moved, ...]) -> list[dict[str, Any]]:
    """For the manifest; None for a norm that is not finite."""
    return [{"name": m.name, "delta_norm": _finite(m.delta), "base_norm": _finite(m.base)} for m in moved]


def _finite(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None


def to_markdown(moved: tuple[Moved, ...]) -> str:
    """A table for the card.

    >>> print(to_markdown((Moved("all", 1.0, 4.0),)))
    |  | delta | share of the base |
    | --- | ---: | ---: |
    | all | 1 | 25.000% |
    """
    rows = [(m.name, f"{m.delta:.4g}", m.percent(3)) for m in moved]
    return markdown_table(("", "delta", "share of the base"), rows, right={1, 2})


_TENSORS = "tensors"
_MOVED, _BY_LAYER = "Distance from the base", "Distance by layer"

MOVED_NAME, BY_LAYER_NAME = "distance.svg", "distance_by_layer.svg"
PICTURES = f"""
## Distance from the base

![Distance from the base by layer and part]({MOVED_NAME})

![Distance from the base by layer]({BY_LAYER_NAME})

More in [{PAGE_NAME}]({PAGE_NAME}).

"""
"""A section of the model card."""

Squares = Mapping[str, tuple[float, float]]
"""Tensor → squared Frobenius norms of its delta and of its base."""


def merge_report(
    plan: Plan,
    name: str,
    squares: Squares,
    distance: tuple[Moved, ...],
    reports: Iterable[ProductReport],
    warnings: Sequence[Finding],
) -> Report:
    """The report of a plan that was run.

    name      name of the output
    distance  distance from the base: in total, then by layer; () without a base
    reports   of products
    """
    structure = analyse([step.out for step in plan.steps], plan.config)
    places = {step.out.name: place_of(structure, step.out.name) for step in plan.steps}
    blocks: list[Block] = [
        *_moved_maps(places, squares),
        *_moved_curves(distance),
        _facts(plan),
        _tensors(plan, places, squares),
    ]
    if plan.dropped:
        rows = tuple((plan.models[d.model].ref, d.tensor, d.reason) for d in plan.dropped)
        blocks.append(Table("Not in the output", (Column("model"), Column("tensor"), Column("reason")), rows))
    blocks += [block for report in reports for block in report.blocks()]
    if warnings:
        blocks.append(Table("Warnings", (Column("about"), Column("what")), tuple((f.where, f.what) for f in warnings)))
    if plan.recipe:
        blocks.append(Code("Recipe", plan.recipe))
    summary = [plan.provenance.title.replace("`", "")]
    known = bool(distance) and math.isfinite(distance[0].share)
    if known:
        share = written(distance[0].share, "share")
        weights = "the weights whose codes are not copied" if plan.copies_codes else "all weights"
        summary = [f"{name} is {share} away from its base, by the Frobenius norm of {weights}.", *summary]
    numbers = [("distance from the base", written(distance[0].share, "share"))] if known else []
    numbers += [("tensors", f"{len(plan.steps):,}"), ("size", size(plan.nbytes))]
    refs = tuple((f"{i + 1}", ref) for i, ref in enumerate(plan.refs))
    return Report(name, tuple(summary), tuple(blocks), {}, tuple(numbers), refs)


def report_files(report: Report) -> dict[str, bytes]:
    """The page of `merge_report`; and two of its pictures for the model card, if there is a base."""
    files = {PAGE_NAME: report.to_html().encode(errors="replace")}
    moved = next((block for block in report.blocks if isinstance(block, HeatMap) and block.title.startswith(_MOVED)), None)
    by_layer = next((block for block in report.blocks if isinstance(block, Curves) and block.title == _BY_LAYER), None)
    if moved is not None and by_layer is not None:
        from weightsmith._base.report.charts import curves, heat_map, picture

        files |= {MOVED_NAME: picture(heat_map(moved)), BY_LAYER_NAME: picture(curves(by_layer))}
    return files


def page_names(plan: Plan) -> set[str]:
    """The names of `report_files`, before the run: there are pictures if tensors of a layer are compared with a base."""
    structure = analyse([step.out for step in plan.steps], plan.config)
    compared = (step for step in plan.steps if any(leaf.base for leaf in step.leaves))
    pictures = {MOVED_NAME, BY_LAYER_NAME} if any(structure.locate(step.out.name) for step in compared) else set[str]()
    return {PAGE_NAME, *pictures}


def _moved_maps(places: Mapping[str, LayerPlace], squares: Squares) -> list[HeatMap]:
    """Distance of each part of each layer from the base: a heat map for each stack."""
    about = "Frobenius norm of merged - base over that of the base, of all tensors of a part in a layer together."
    placed = [(place, name) for name, place in places.items()]
    share = partial(_share, squares)
    return heat_maps(_MOVED, placed, share, "share", about, scale="log", detail=_TENSORS, name=str)


def _moved_curves(distance: tuple[Moved, ...]) -> list[Curves]:
    """Distance of each layer from the base: a line for each stack."""
    stacks: dict[str, list[float]] = {}
    for moved in distance[1:]:
        if moved.name != OUTSIDE:
            stacks.setdefault(moved.name.rstrip("0123456789"), []).append(moved.share)
    if not stacks:
        return []
    lines = tuple((stack, tuple(values)) for stack, values in stacks.items())
    return [Curves(_BY_LAYER, lines, "layer", "‖merged - base‖ / ‖base‖", "share", first=0)]


def _share(squares: Squares, names: Sequence[str]) -> float | Mark:
    """Distance of some tensors together; `Mark.NOTHING` where none has a base."""
    pairs = [squares[name] for name in names if name in squares]
    if not pairs:
        return Mark.NOTHING
    delta, base = (math.sqrt(sum(values)) for values in zip(*pairs, strict=True))
    return finite_or_mark(share_of(delta, base)) if delta else Mark.SAME


def _facts(plan: Plan) -> Facts:
    facts: list[tuple[str, Value]] = [("method", plan.provenance.name), ("source", plan.provenance.source)]
    facts += [(f"model {i + 1}", ref) for i, ref in enumerate(plan.refs)]
    facts += [("seed", f"{plan.seed}"), ("stored as", plan.provenance.format)]
    facts.append(("tensors", f"{len(plan.steps):,}, {size(plan.nbytes)}"))
    return Facts("What was made", tuple((name, value) for name, value in facts if value))


def _tensors(plan: Plan, places: Mapping[str, LayerPlace], squares: Squares) -> Table:
    columns = (
        Column("tensor"),
        Column("made by"),
        Column("shape"),
        Column("stored as"),
        Column("size", "bytes"),
        Column("moved", "share", "‖merged - base‖ / ‖base‖"),
    )
    rows = tuple(
        (
            step.out.name,
            step.op,
            " x ".join(map(str, step.out.shape)),
            step.out.dtype.name if step.encoding == PLAIN else step.encoding,
            step.nbytes,
            _share(squares, [step.out.name]),
        )
        for step in plan.steps
    )
    where = tuple((places[step.out.name].group, places[step.out.name].part) for step in plan.steps)
    return Table("Tensors", columns, rows, name=_TENSORS, places=where)
