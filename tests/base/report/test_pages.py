"""Pages: one file that loads nothing, whatever names the models bring, and that has all its data."""

from __future__ import annotations

import json
import math
import os
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from weightsmith._base.errors import OutputExists, StoreError, printable
from weightsmith._base.report.blocks import Code, Column, Curves, Facts, Fold, HeatMap, Mark, Pictures, Report, Table, Unit
from weightsmith._base.report.html import STATIC_ROWS, _column, _logarithm, to_html

HOSTILE = "</script><img src=http://evil/x onerror=alert(1)>\x1b[2J\"'"
LAYERS = tuple(map(str, range(30)))
PARTS = ("self_attn.q_proj", "mlp.up_proj", HOSTILE)


def a_page(layers: tuple[str, ...] = LAYERS, parts: tuple[str, ...] = PARTS) -> Report:
    values = tuple(tuple(1e-4 * (1 + i) * (1 + j) for i in range(len(layers))) for j in range(len(parts)))
    places = tuple((f"layers.{r}", c) for r in layers for c in parts)
    rows = tuple((f"{r}.{c}", values[j][i], None) for i, r in enumerate(layers) for j, c in enumerate(parts))
    pictures = tuple(Pictures((2.0, 1.0, 0.5), (0.25, 0.75), -9, "difference") for _ in rows)
    return Report(
        f"a and {HOSTILE}",
        (f"It is {HOSTILE}.", "A second sentence."),
        (
            HeatMap("Moved", parts, layers, values, "share", "about", "log", detail="tensors", prefix="layers."),
            Facts("Models", (("A", HOSTILE), ("B", 3))),
            Curves("By layer", ((HOSTILE, values[0]),), "layer", "share", "share", first=0),
            Table(
                "Tensors",
                (Column("tensor"), Column("moved", "share", HOSTILE), Column("rank", "count")),
                rows,
                "All of them.",
                "tensors",
                places,
                pictures,
            ),
            Table("Few", (Column("name"),), (("a",), ("b",))),
            Code("Recipe", f"merge_method: {HOSTILE}"),
        ),
        {"name": HOSTILE, "values": values},
        (("moved", "1.00%"), ("changed", "2.00%"), ("cosine", "0.5")),
        (("A", HOSTILE),),
    )


class Elements(HTMLParser):
    """Every element with its attributes, the text of each, and whether each that was opened was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_hostile_names_stay_text_and_nothing_is_loaded() -> None:
    text = to_html(a_page())
    elements = Elements(text)
    assert elements.open == []
    assert {tag for tag, _ in elements.tags}.isdisjoint({"img", "link", "iframe", "object", "base", "form"})
    assert all(not key.startswith("on") and key != "src" for _, attributes in elements.tags for key in attributes)
    assert all((a.get("href") or "#").startswith("#") for _, a in elements.tags)
    assert "\x1b" not in text
    data = json.loads(next(text for tag, text in elements.texts if tag == "script"))
    assert data["models"]["A"] == printable(HOSTILE)
    assert data["charts"][0]["rows"][2] == printable(HOSTILE)
    policy = next(a["content"] for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_a_page_is_the_same_for_the_same_values() -> None:
    assert to_html(a_page()) == to_html(a_page())


@pytest.mark.long
def test_a_report_of_ten_thousand_tensors_has_all_of_them_in_two_megabytes() -> None:
    """Numbers of a diff of a mixture of experts: 40 experts, 83 layers, 3 parts; each with 16 singular values and 20 bars."""
    rng, names, rows, places, pictures = np.random.default_rng(1), ("gate_proj", "up_proj", "down_proj"), [], [], []
    for layer in range(83):
        for expert in range(40):
            for part in names:
                numbers = rng.random(5).tolist()
                rows.append((f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight", *numbers, 8, "1536 x 576", 0, 0))
                places.append((f"model.layers.{layer}", f"mlp.experts.{part}"))
                pictures.append(Pictures(tuple(np.sort(rng.random(16))[::-1].tolist()), tuple(rng.random(20).tolist()), -20))
    units: list[Unit] = ["text", "share", "share", "cosine", "number", "number", "count", "text", "count", "count"]
    columns = tuple(Column(f"column {i}", unit) for i, unit in enumerate(units))
    parts, values = tuple(f"mlp.experts.{part}" for part in names), rng.random((3, 83)).tolist()
    folds = tuple(
        Fold(part, tuple(f"expert {e}" for e in range(40)), tuple(map(tuple, rng.random((40, 83)).tolist()))) for part in parts
    )
    cells = tuple(map(tuple, values))
    maps = [
        HeatMap(title, parts, tuple(map(str, range(83))), cells, "share", prefix="model.layers.", folds=folds) for title in "ab"
    ]
    table = Table("Tensors", columns, tuple(rows), name="tensors", places=tuple(places), pictures=tuple(pictures))
    text = to_html(Report("Large", ("One.",), (*maps, table)))
    assert len(rows) == 9_960
    assert len(text.encode()) < 2_000_000
    assert "9,960 rows" in text
    assert text.count("<tr><td>") == STATIC_ROWS
    data = json.loads(next(text for tag, text in Elements(text).texts if tag == "script"))["tables"][0]
    assert data["rows"] == len(data["data"][1]) == len(data["pictures"]["values"]) == 9_960


def test_the_verdict_and_three_numbers_come_first_and_tables_are_folded() -> None:
    text = to_html(a_page())
    order = ['class="verdict"', 'class="numbers"', 'class="models"', 'class="heat', "<details>"]
    assert sorted(order, key=text.index) == order
    assert "<details open>" not in text
    assert text.count('type="search"') == 1  # not for a table of two rows
    without = Report("t", ("v",), (Table("Few", (Column("name"),), (("a",),)), Facts("F", (("a", 1),))))
    assert to_html(without).count("<details open>") == 2  # what has no chart is not folded


def test_columns_are_packed_and_come_back() -> None:
    names = [f"model.layers.{i}.mlp.{part}.weight" for i in range(30) for part in ("up", "down")]
    packed = _column(names, "text")
    unpacked, last = [], ""
    for kept, end in zip(packed["kept"], packed["ends"], strict=True):
        last = last[:kept] + end
        unpacked.append(last)
    assert unpacked == names
    few = _column(["x", "y"] * 50, "text")
    assert [few["of"][i] for i in few["at"]] == ["x", "y"] * 50
    numbers = [0.123456789, math.nan, math.inf, None, Mark.SAME, 3]
    assert _column(numbers, "share") == [0.123457, "undefined", "inf", None, "unchanged", 3]
    assert _column([0.999999123, 0.5], "cosine")[0] == 0.999999123


def test_singular_values_are_packed_to_four_digits() -> None:
    for ratio in (1.0, 0.9, 0.5, 1e-3, 1e-7):
        a, b, c = (ord(c) - 35 for c in _logarithm(ratio))
        assert math.exp(-(8100 * a + 90 * b + c) / 728999 * math.log(1e8)) == pytest.approx(ratio, rel=2e-5)


# ---- the file


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    path = a_page().write(tmp_path / "r.html")
    before = path.read_bytes()
    assert a_page(LAYERS[:2]).write(path).read_bytes() != before
    (tmp_path / "mine.html").write_text("<!doctype html><p>mine")
    with pytest.raises(OutputExists, match="no report of weightsmith"):
        a_page().write(tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<!doctype html><p>mine"
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "mine.html" / "r.html", tmp_path / "pipe"):
        with pytest.raises(StoreError, match="the report cannot be written"):
            a_page().write(wrong)
    assert a_page().write(tmp_path / "new" / "r.html").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.html", "new", "pipe", "r.html"]


def test_missing_folders_are_created(tmp_path: Path) -> None:
    assert a_page().write(tmp_path / "new/folder/r.html").is_file()


def test_what_fails_leaves_the_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = a_page().write(tmp_path / "r.html")
    before = path.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        a_page(LAYERS[:2]).write(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
