"""Pages: one file that loads nothing, whatever names the models bring; what a reader can do with one, in a browser."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from weightsmith._base.errors import OutputExists, StoreError
from weightsmith._base.pages import Code, Column, Curves, Facts, HeatMap, Mark, Page, Table, to_html, write_page
from weightsmith._base.pages.html import MAX_ROWS
from weightsmith._base.pages.svg import colour, heat_map, heat_maps, scaled
from weightsmith._models.structure.model import Place

HOSTILE = "</script><img src=http://evil/x onerror=alert(1)>\x1b[2J\"'"
LAYERS = tuple(f"layer {i}" for i in range(30))
PARTS = ("self_attn.q_proj", "mlp.up_proj", HOSTILE)


def a_page(layers: tuple[str, ...] = LAYERS, parts: tuple[str, ...] = PARTS) -> Page:
    values = tuple(tuple(1e-4 * (1 + i) * (1 + j) for j in range(len(parts))) for i in range(len(layers)))
    rows = tuple((f"{r}.{c}", values[i][j], None) for i, r in enumerate(layers) for j, c in enumerate(parts))
    return Page(
        f"a and {HOSTILE}",
        (f"It is {HOSTILE}.",),
        (
            Facts("Models", (("A", HOSTILE), ("B", 3))),
            HeatMap("Moved", layers, parts, values, "share", "about", log=True, detail="tensors"),
            Curves("By layer", ((HOSTILE, tuple(row[0] for row in values)),), "layer", "share", "share", first=0),
            Table(
                "Tensors",
                (Column("tensor"), Column("moved", "share", HOSTILE), Column("rank", "count")),
                rows,
                "All of them.",
                "tensors",
                tuple((r, c) for r in layers for c in parts),
            ),
            Code("Recipe", f"merge_method: {HOSTILE}"),
        ),
        {"name": HOSTILE, "values": values},
    )


class Elements(HTMLParser):
    """Every element with its attributes, the text of each, and whether each that was opened was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_hostile_names_stay_text_and_nothing_is_loaded() -> None:
    text = to_html(a_page())
    elements = Elements(text)
    assert elements.open == []
    assert {tag for tag, _ in elements.found}.isdisjoint({"img", "link", "iframe", "object", "base", "form"})
    assert all(not key.startswith("on") and key != "src" for _, attributes in elements.found for key in attributes)
    assert all((a.get("href") or "#").startswith("#") for _, a in elements.found)
    assert "\x1b" not in text
    data = next(text for tag, text in elements.texts if tag == "script")
    assert json.loads(data)["name"] == HOSTILE
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_a_page_is_the_same_for_the_same_values() -> None:
    assert to_html(a_page()) == to_html(a_page())


@pytest.mark.slow
def test_a_large_model_fits_into_a_megabyte() -> None:
    layers, parts = tuple(f"model.layers.{i}" for i in range(126)), tuple(f"block_sparse_moe.part_{j}" for j in range(14))
    page = a_page(layers, parts)
    names = tuple((f"model.layers.{i}.mlp.experts.{i}.gate_proj.weight", 0.1, 3) for i in range(100_000))
    table = Table("All", page.blocks[3].columns, names, name="all")  # type: ignore[union-attr]
    text = to_html(Page(page.title, page.summary, (*page.blocks, table), {"names": [name for name, _, _ in names]}))
    assert len(text.encode()) < 1_000_000
    assert f"The first {MAX_ROWS:,} of 100,000 rows." in text
    assert "--json prints them" in text


def test_each_cell_leads_to_the_rows_of_its_tensors() -> None:
    elements = Elements(to_html(a_page()))
    cells = [a for tag, a in elements.found if tag == "a"]
    rows = [a for tag, a in elements.found if tag == "tr" and "data-p" in a]
    assert [a["data-p"] for a in cells] == [a["data-p"] for a in rows]
    assert len({a["data-p"] for a in cells}) == len(LAYERS) * len(PARTS)
    assert {a["href"] for a in cells} == {"#tensors"}
    assert "tensors" in {a.get("id") for tag, a in elements.found if tag == "section"}


def test_a_heat_map_says_its_extremes_and_has_no_cell_where_nothing_is() -> None:
    found = HeatMap("Moved", ("layer 0", "layer 1"), ("q", "up"), ((0.5, None), (0.001, 0.25)), "share")
    text = heat_map(found)
    assert 'aria-label="Moved: from 0.1 % (layer 1, q) to 50 % (layer 0, q)"' in text
    assert text.count("<title>") == 3
    assert "<a " not in text


@pytest.mark.parametrize("log", [False, True])
def test_colours_are_defined_for_every_number(log: bool) -> None:
    values = [None, *Mark, math.nan, math.inf, -math.inf, 0.0, 1e-300, 1e300, -1.0]
    for some in ([], values, [0.0], [1.0], [math.nan], [math.inf], [Mark.SAME]):
        shares = scaled(some, log=log)
        assert [share is None for share in shares] == [not isinstance(v, float) or not math.isfinite(v) for v in some]
        assert all(share is None or 0 <= share <= 1 for share in shares)
        numbers = tuple(None if isinstance(value, Mark) else value for value in some)
        cells = HeatMap("", ("r",), tuple(f"c{i}" for i in range(len(some))), (tuple(some),), log=log)
        to_html(Page("", (), (cells, Curves("", (("all", numbers),), "x", "y", log=log))))


def test_marks_have_cells_and_words_of_their_own_and_a_legend() -> None:
    """Each is told from the others, and from numbers, by its text: without colour, by a screen reader, in a table, in CSV."""
    columns = ("number", "absent", *(mark.name for mark in Mark))
    text = heat_map(HeatMap("Moved", ("layer",), columns, ((0.5, None, *Mark),), "share"))
    assert (
        len({mark.symbol for mark in Mark}) == len({mark.word for mark in Mark}) == len({m.meaning for m in Mark}) == len(Mark)
    )
    for mark in Mark:
        assert f"<title>layer, {mark.name}: {mark.meaning}</title>" in text
        assert text.count(f">{mark.symbol}</text>") == 2  # the cell, and the legend
        assert text.count(f">{mark.meaning}</text>") == 1
        assert f"{mark.meaning}: 1 cell" in text.partition("viewBox")[0]
    assert "layer, absent" not in text
    rows = tuple((mark.name, mark) for mark in Mark)
    table = to_html(Page("", (), (Table("T", (Column("name"), Column("rank", "count")), (("n", 3), *rows)),)))
    assert table.count(' data-v="') == 1
    for mark in Mark:
        assert f"<td>{mark.name}</td><td class=n>{mark.word}</td>" in table


def test_a_mark_is_no_end_of_the_scale() -> None:
    rows = (("a", 0.2), ("b", Mark.INFINITE), ("c", Mark.SAME), ("d", 0.4))
    text = heat_map(HeatMap("M", ("layer",), tuple(n for n, _ in rows), (tuple(v for _, v in rows),), "share", log=True))
    assert "20 % to 40 % (logarithmic)" in text
    assert "from 20 % (layer, a) to 40 % (layer, d)" in text
    fills = re.findall(r'fill="(#[0-9a-f]{6})"><title>', text)
    assert fills == [colour(0.0), colour(1.0)]


def test_maps_of_several_stacks_have_one_scale_and_draw_it() -> None:
    places = [Place(stack, i, "up") for stack in ("text.", "vision.") for i in range(2)]
    values = dict(zip(places, (0.1, 0.2, 0.7, 0.9), strict=True))
    found = heat_maps("Moved", [(p, values[p]) for p in places], lambda own: own[0], "share", "about")
    assert [one.span for one in found] == [(0.1, 0.9)] * 2
    assert all("10 % to 90 %" in heat_map(one) for one in found)
    nothing = heat_maps("Moved", [(p, Mark.SAME) for p in places], lambda own: own[0], "share", "about")
    assert nothing == []


# ---- the file


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    path = write_page(tmp_path / "r.html", a_page())
    before = path.read_bytes()
    assert write_page(path, a_page(LAYERS[:2])).read_bytes() != before
    (tmp_path / "mine.html").write_text("<!doctype html><p>mine")
    with pytest.raises(OutputExists, match="no report of weightsmith"):
        write_page(tmp_path / "mine.html", a_page())
    assert (tmp_path / "mine.html").read_text() == "<!doctype html><p>mine"
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "mine.html" / "r.html", tmp_path / "pipe"):
        with pytest.raises(StoreError, match="the report cannot be written"):
            write_page(wrong, a_page())
    assert write_page(tmp_path / "new" / "r.html", a_page()).is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.html", "new", "pipe", "r.html"]


def test_missing_folders_are_created(tmp_path: Path) -> None:
    assert write_page(tmp_path / "new/folder/r.html", a_page()).is_file()


def test_what_fails_leaves_the_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_page(tmp_path / "r.html", a_page())
    before = path.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        write_page(path, a_page(LAYERS[:2]))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_shows_it_without_a_request_or_an_error(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    path = write_page(tmp_path / "r.html", a_page())
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page = context.new_page()
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    rows = "section.table tbody tr:not([hidden])"
    assert page.locator(rows).count() == len(LAYERS) * len(PARTS)
    page.locator("section.heat svg a").nth(4).click()
    assert page.locator(rows).all_inner_texts() == ["layer 1.mlp.up_proj\t0.04 %\t-"]
    page.fill("section.table input", "layer 2")
    assert page.locator("section.table .status").inner_text() == "33 of 90 rows"
    page.locator("section.table thead button").nth(1).click()
    assert page.locator(rows).first.inner_text().startswith("layer 29.")
    page.locator("section.heat svg a").first.focus()
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("section.heat .status").inner_text() == "layer 1, mlp.up_proj: 0.04 %"
    with page.expect_download() as saved:
        page.click("button.csv")
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "tensor,moved,rank"
    assert re.match(r"\"?layer 29\.", lines[1])
    with page.expect_download() as saved:
        page.click("button.json")
    assert json.loads(Path(saved.value.path()).read_text())["name"] == HOSTILE
    assert said == []
    assert requests == [path.as_uri()]
    context.close()
