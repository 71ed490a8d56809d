"""Heat maps and curves: colours, marks, scales, and their JSON."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from weightsmith._base.report.blocks import Column, Curves, HeatMap, Mark, Report, Scale, Table, heat_maps, span_of
from weightsmith._base.report.charts import PATTERNS, STEPS, colour, grid, heat_map, legend, scaled, step_of
from weightsmith._base.report.html import to_html
from weightsmith._models.structure.model import LayerPlace

# ---- colours: sRGB to linear light; deuteranopia after Machado, Oliveira and Fernandes 2009, severity 1; CIELAB.

DEUTERANOPIA = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]])
PROTANOPIA = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
NORMAL = np.eye(3)
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
Floats = npt.NDArray[np.float64]


def lab(hexes: list[str], eyes: Floats) -> Floats:
    codes = np.array([[int(h[i : i + 2], 16) / 255 for i in (1, 3, 5)] for h in hexes])
    linear = np.where(codes <= 0.04045, codes / 12.92, ((codes + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(linear @ eyes.T, 0, 1) @ TO_XYZ.T / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def test_the_conversion_to_lightness_is_right() -> None:
    assert lab(["#ffffff", "#000000", "#777777"], NORMAL)[:, 0] == pytest.approx([100, 0, 50.0], abs=0.2)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("eyes", [NORMAL, DEUTERANOPIA, PROTANOPIA], ids=["normal", "deuteranopia", "protanopia"])
def test_lightness_runs_one_way_on_an_amount_s_scale_and_both_ways_from_zero(dark: bool, eyes: Floats) -> None:
    """So a scale reads in grey: steps differ by more than one unit of L*, and the ends by more than 60."""
    sign = 1 if dark else -1
    amount = lab([colour(i, "linear", dark=dark) for i in range(STEPS)], eyes)
    assert (sign * np.diff(amount[:, 0]) > 1).all()
    assert abs(amount[-1, 0] - amount[0, 0]) > 60
    around = lab([colour(i, "diverging", dark=dark) for i in range(STEPS)], eyes)
    middle = STEPS // 2
    assert (sign * np.diff(around[middle:, 0]) > 1).all()
    assert (sign * np.diff(around[: middle + 1, 0]) < -1).all()
    # The two signs are told apart by hue, at every size but the smallest.
    for i in range(3, middle + 1):
        assert np.linalg.norm(around[middle + i, 1:] - around[middle - i, 1:]) > 15


@pytest.mark.parametrize("scale", ["linear", "log", "diverging"])
def test_colours_are_defined_for_every_number(scale: Scale) -> None:
    values = [None, *Mark, math.nan, math.inf, -math.inf, 0.0, 1e-300, 1e300, -1.0]
    for some in ([], values, [0.0], [1.0], [math.nan], [math.inf], [Mark.SAME]):
        shares = scaled(some, scale, span_of(some, scale))
        assert [share is None for share in shares] == [not isinstance(v, float) or not math.isfinite(v) for v in some]
        assert all(share is None or 0 <= share <= 1 for share in shares)
        numbers = tuple(None if isinstance(value, Mark) else value for value in some)
        cells = HeatMap("", ("r",), tuple(f"c{i}" for i in range(len(some))), (tuple(some),), scale=scale)
        to_html(Report("", (), (cells, Curves("", (("all", numbers),), "x", "y", log=scale == "log"))))
        heat_map(cells)


def test_zero_is_neutral_and_equal_sizes_have_equal_steps_around_it() -> None:
    limits = span_of([-0.1, 0.4], "diverging")
    shares = scaled([-0.4, -0.1, 0.0, 0.1, 0.4], "diverging", limits)
    steps = [step_of(share) for share in shares if share is not None]
    assert steps == [0, 9, STEPS // 2, 15, STEPS - 1]


# ---- marks


def a_map(*cells: tuple[str, float | Mark | None], scale: Scale = "linear") -> HeatMap:
    return HeatMap("M", ("up",), tuple(n for n, _ in cells), (tuple(v for _, v in cells),), "share", scale=scale)


def test_marks_have_patterns_and_words_of_their_own_and_a_legend() -> None:
    """Each is told from the others, and from numbers: without colour, by a screen reader, in a table, in CSV."""
    chart = a_map(("number", 0.5), ("absent", None), *((mark.name, mark) for mark in Mark))
    text, table, scale = heat_map(chart), grid(chart, 0), legend([chart])
    for words in ([m.symbol for m in Mark], [m.word for m in Mark], [m.meaning for m in Mark], [m.key for m in Mark]):
        assert len(set(words)) == len(Mark)
    shapes = [re.sub(r'(stroke|fill)="#[0-9a-f]+"', "", PATTERNS[mark]) for mark in Mark]
    assert len(set(shapes)) == len(Mark)
    for mark in Mark:
        assert f"<title>layer {mark.name}, up: {mark.meaning}</title>" in text
        assert text.count(f'fill="url(#wm-{mark.key})"') == 2  # the cell, and the legend
        assert text.count(f">{mark.meaning}</text>") == 1
        assert f"{mark.meaning}: 1 cell" in text.partition("viewBox")[0]
        assert f"<td class=m-{mark.key}>" in table
        assert scale.count(f"</i>{mark.meaning}</span>") == 1
        assert f"{mark.meaning}: 1 cell" in table
    assert "layer absent" not in text
    rows = tuple((mark.name, mark) for mark in Mark)
    shown = to_html(Report("", (), (Table("T", (Column("name"), Column("rank", "count")), (("n", 3), *rows)),)))
    for mark in Mark:
        assert f"<td>{mark.name}</td><td class=n>{mark.word}</td>" in shown


def test_the_patterns_of_a_page_differ_without_their_colours() -> None:
    text = to_html(Report("", (), ()))
    rules = {mark: re.search(rf"\.m-{mark.key} {{ background: ([^}}]+)}}", text) for mark in Mark}
    shapes = {re.sub(r"var\(--(k|bad)\)", "", rule[1]) for rule in rules.values() if rule}
    assert len(shapes) == len(Mark)


def test_a_mark_is_no_end_of_the_scale() -> None:
    chart = a_map(("1", 0.2), ("2", Mark.INFINITE), ("3", Mark.SAME), ("4", 0.4), scale="log")
    text = heat_map(chart)
    assert "20.0% to 40.0% (logarithmic)" in text
    assert "from 20.0% (layer 1, up) to 40.0% (layer 4, up)" in text
    fills = re.findall(r'fill="(#[0-9a-f]{6})"><title>', text)
    assert fills == [colour(0, "log"), colour(STEPS - 1, "log")]
    assert re.findall(r"<td class=(\S+?)>", grid(chart, 0)) == ["s0", "m-inf", "m-unchanged", "s24"]


def test_no_cell_where_nothing_is() -> None:
    chart = HeatMap("Moved", ("q", "up"), ("0", "1"), ((0.5, 0.001), (None, 0.25)), "share")
    text = heat_map(chart)
    assert 'aria-label="Moved: from 0.100% (layer 1, q) to 50.0% (layer 0, q)"' in text
    assert text.count("<title>") == 3
    assert grid(chart, 0).count("<td></td>") == 1


# ---- several maps


def test_maps_of_several_stacks_have_one_scale_and_draw_it() -> None:
    places = [LayerPlace(stack, i, "up") for stack in ("text.", "vision.") for i in range(2)]
    values = dict(zip(places, (0.1, 0.2, 0.7, 0.9), strict=True))
    charts = heat_maps("Moved", [(p, values[p]) for p in places], lambda values: values[0], "share", "about")
    assert [one.span for one in charts] == [(0.1, 0.9)] * 2
    assert all("10.0% to 90.0%" in heat_map(one) for one in charts)
    nothing = heat_maps("Moved", [(p, Mark.SAME) for p in places], lambda values: values[0], "share", "about")
    assert nothing == []


def test_maps_that_are_compared_draw_their_scale_once() -> None:
    charts = [HeatMap(f"of {name}", ("up",), ("0",), ((0.5,),), "share", span=(0.0, 1.0), group="All") for name in "ABC"]
    text = to_html(Report("", (), tuple(charts)))
    assert text.count('class="bar"') == 1
    assert text.count("<h2>All</h2>") == 1
    assert [f"<figcaption>of {name}</figcaption>" in text for name in "ABC"] == [True] * 3


def test_experts_are_one_row_that_unfolds() -> None:
    class Tensor:
        def __init__(self, layer: int, expert: int) -> None:
            self.name, self.share = f"layers.{layer}.mlp.experts.{expert}.up.weight", float(10 * layer + expert)

    items = [(LayerPlace("layers.", layer, "mlp.experts.up"), Tensor(layer, e)) for layer in range(2) for e in (10, 2, 0)]
    router = [(LayerPlace("layers.", layer, "mlp.gate"), Tensor(layer, 0)) for layer in range(2)]
    (chart,) = heat_maps(
        "M", items + router, lambda tensors: max(t.share for t in tensors), "number", "", name=lambda t: t.name
    )
    assert (chart.rows, chart.columns, chart.prefix) == (("mlp.experts.up", "mlp.gate"), ("0", "1"), "layers.")
    assert chart.values[0] == (10.0, 20.0)
    (fold,) = chart.folds
    assert (fold.row, fold.rows) == ("mlp.experts.up", ("expert 0", "expert 2", "expert 10"))
    assert fold.values == ((0.0, 10.0), (2.0, 12.0), (10.0, 20.0))
    assert grid(chart, 0).count('class="fold"') == 1
    assert chart.to_json()["folds"][0]["values"][2] == [10, 20]


def test_the_json_of_charts_is_strict_and_has_words_for_marks() -> None:
    cells = ((0.123456789, math.nan, math.inf), (None, Mark.SAME, Mark.BOTH))
    chart = HeatMap("M", ("a", "b"), ("0", "1", "2"), cells, "share", scale="log", prefix="l.")
    data = json.loads(json.dumps(chart.to_json(), allow_nan=False))
    assert data["values"] == [[0.123457, "undefined", "inf"], [None, "unchanged", "nan-inf"]]
    assert data["scale"] == {"kind": "log", "low": 0.123456789, "high": 0.123456789}
    lines = Curves("C", (("x", (1.0, None, math.nan)),), "layer", "y", first=3)
    data = json.loads(json.dumps(lines.to_json(), allow_nan=False))
    assert (data["series"], data["first"]) == ([{"name": "x", "values": [1, None, None]}], 3)


def test_a_notebook_shows_the_page_in_a_frame_without_access_to_the_notebook() -> None:
    report = Report('t" onload="x', ("v",), (a_map(("0", 0.1), ("1", Mark.NAN)),), {}, (("moved", "1%"),))
    frames = list[dict[str, str | None]]()

    class Frames(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            frames.append({"tag": tag, **dict(attrs)})

    Frames().feed(report._repr_html_())
    (frame,) = frames
    assert frame["srcdoc"] == to_html(report)
    assert (frame["tag"], frame["sandbox"], frame["title"]) == ("iframe", "allow-scripts allow-downloads", report.title)
    assert "onload" not in frame


def test_the_labels_of_layers_do_not_run_into_each_other() -> None:
    for n in (1, 12, 30, 126):
        columns = tuple(map(str, range(n)))
        labels = re.findall(r'<text x="(\d+)"[^>]+middle">(\d+)</text>', heat_map(HeatMap("M", ("r",), columns, ((0.5,) * n,))))
        assert [int(b[0]) - int(a[0]) >= 18 for a, b in pairwise(labels)] == [True] * (len(labels) - 1)
