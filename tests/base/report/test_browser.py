"""What a reader can do with a page, in Chromium: pointer, tap, keyboard, ten thousand rows, paper."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.base.report.test_pages import HOSTILE, LAYERS, PARTS, a_page
from tests.browser_help import browser
from weightsmith._base.errors import printable
from weightsmith._base.report.blocks import Column, Curves, Fold, HeatMap, Mark, Report, Table, Unit, written
from weightsmith._base.report.charts import STEPS

__all__ = ["browser"]

pytestmark = [pytest.mark.reader, pytest.mark.slow]


@contextmanager
def opened(browser: Any, path: Path, **how: Any) -> Iterator[Any]:
    """A page, which then has said nothing to the console and asked for nothing but itself."""
    context = browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 800}, **how})
    page, said, requests = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    yield page
    assert said == []
    assert [url for url in requests if not url.startswith("blob:")] == [path.as_uri()]
    context.close()


def cell(page: Any, row: int, column: int) -> Any:
    return page.locator("figure.heat tbody tr").nth(row).locator("td").nth(column)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return a_page().write(tmp_path / "r.html")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_value_at_the_pointer_and_what_a_cell_is_made_of(browser: Any, report: Path, width: int, scheme: str) -> None:
    with opened(browser, report, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        cell(page, 1, 4).hover()
        assert page.locator(".tip").inner_text() == "layer 4, mlp.up_proj: 0.100%"
        cell(page, 1, 4).click()
        drawer = page.locator(".drawer")
        assert drawer.locator("h2").inner_text() == "layer 4, mlp.up_proj"
        assert drawer.locator("summary").all_inner_texts() == ["4.mlp.up_proj"]
        assert drawer.locator("svg").first.get_attribute("aria-label") == "elements by magnitude, from 2⁻⁹ to 2⁻⁷"
        assert drawer.locator("svg").nth(1).get_attribute("aria-label") == "3 singular values, from 2.000 to 0.5000"
        page.keyboard.press("Escape")
        assert drawer.is_hidden()
        assert page.evaluate("document.activeElement.tagName") == "TD"
        cell(page, 1, 4).click()
        drawer.get_by_text("Show in the table").click()
        page.locator("#tensors-4 tbody tr").wait_for()
        assert page.locator("#tensors-4 tbody tr > *").all_inner_texts() == ["4.mlp.up_proj", "0.100%", "-"]


def test_the_drawer_and_names_of_a_hostile_model_stay_text(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        cell(page, 2, 3).click()
        assert page.locator(".drawer h2").inner_text() == f"layer 3, {printable(HOSTILE)}"
        assert page.locator(".drawer summary").inner_text() == f"3.{printable(HOSTILE)}"
        assert page.locator("img").count() == 0


def test_a_first_tap_says_the_value_and_a_second_opens_the_tensors(browser: Any, report: Path) -> None:
    with opened(browser, report, viewport={"width": 390, "height": 800}, has_touch=True) as page:
        cell(page, 0, 2).tap()
        assert page.locator("figure.heat .said").inner_text() == "layer 2, self_attn.q_proj: 0.0300%"
        assert page.locator(".drawer").is_hidden()
        cell(page, 0, 2).tap()
        assert page.locator(".drawer h2").inner_text() == "layer 2, self_attn.q_proj"


def test_the_keyboard_reaches_every_cell(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        page.keyboard.press("Tab")
        for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
        said = page.locator("figure.heat .said")
        assert said.inner_text() == "layer 1, mlp.up_proj: 0.0400%"
        assert said.get_attribute("aria-live") == "polite"
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1, mlp.up_proj: 0.0400%"
        assert page.locator("figure.heat td[tabindex='0']").count() == 1
        page.keyboard.press("End")
        assert said.inner_text() == f"layer {LAYERS[-1]}, mlp.up_proj: 0.600%"
        page.keyboard.press("Enter")
        assert page.locator(".drawer h2").inner_text() == f"layer {LAYERS[-1]}, mlp.up_proj"


def test_tables_are_searched_sorted_and_saved(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        page.locator("#tensors-4 summary").click()
        rows = "#tensors-4 tbody tr"
        assert page.locator(rows).count() == len(LAYERS) * len(PARTS)
        page.fill("#tensors-4 input", "2")
        matching = [f"{i}.{part}" for i in LAYERS for part in PARTS if "2" in f"{i}.{part}"]
        assert page.locator("#tensors-4 .status").inner_text() == f"{len(matching)} of 90 rows"
        page.locator("#tensors-4 thead button").nth(1).click()
        assert page.locator(rows).first.inner_text().startswith("29.")
        with page.expect_download() as saved:
            page.click("#tensors-4 button.csv")
        lines = Path(saved.value.path()).read_text().splitlines()
        assert lines[0] == "tensor,moved,rank"
        assert re.match(r'"?29\.', lines[1])
        assert lines[1].endswith(",0.009,")
        with page.expect_download() as saved:
            page.click("button.json")
        data = json.loads(Path(saved.value.path()).read_text())
        assert data["models"]["A"] == printable(HOSTILE)
        assert len(data["tables"][0]["rows"]) == 90
        assert data["tables"][0]["rows"][4] == ["1.mlp.up_proj", 0.0004, None]
        assert data["charts"][0]["values"][1][1] == 0.0004


def test_ten_thousand_rows_scroll_and_few_are_in_the_document(browser: Any, tmp_path: Path) -> None:
    rows = tuple((f"model.layers.{i}.weight", i / 10_000) for i in range(10_000))
    columns = Column("tensor"), Column("moved", "share")
    with opened(browser, Report("t", ("v",), (Table("All", columns, rows),)).write(tmp_path / "r.html")) as page:
        page.locator("summary").click()
        shown = "section.table tbody tr:not(.gap)"
        assert page.locator(shown).count() < 100
        page.evaluate("document.querySelector('.rows').scrollTop = 5000 * 28")
        page.locator("tbody", has_text="layers.5000.").first.wait_for()  # a function would be evaluated, which the page forbids
        assert page.locator(shown).count() < 100
        page.evaluate("document.querySelector('.rows').scrollTop = 1e9")
        page.locator("tbody", has_text="layers.9999.").first.wait_for()  # a function would be evaluated, which the page forbids
        page.locator("thead button").nth(1).click()
        assert page.locator(shown).first.inner_text() == "model.layers.9999.weight\t100%"
        page.fill("input", ".777.")
        assert page.locator(shown).all_inner_texts() == ["model.layers.777.weight\t7.77%"]
        height = page.evaluate("document.querySelector('tbody tr').getBoundingClientRect().height")
        assert height == 28  # ROW of page.js


def test_experts_unfold_and_their_cells_have_values(browser: Any, tmp_path: Path) -> None:
    fold = Fold("mlp.experts.up", ("expert 0", "expert 7"), ((0.1, Mark.NAN), (0.3, 0.4)))
    chart = HeatMap(
        "M", ("mlp.experts.up", "mlp.gate"), ("0", "1"), ((0.2, 0.4), (0.1, 0.2)), "share", detail="tensors", folds=(fold,)
    )
    rows = tuple((f"{i}.mlp.experts.{e}.up.weight",) for i in range(2) for e in (0, 7))
    places = tuple((str(i), "mlp.experts.up") for i in range(2) for _ in range(2))
    table = Table("Tensors", (Column("tensor"),), rows, name="tensors", places=places)
    with opened(browser, Report("t", ("v",), (chart, table)).write(tmp_path / "r.html")) as page:
        page.locator("button.fold").click()
        assert page.locator("tr.inner th").all_inner_texts() == ["expert 0", "expert 7"]
        assert page.locator("tr.inner td").nth(1).get_attribute("class") == "m-nan"
        page.locator("tr.inner td").nth(3).click()
        assert page.locator("figure.heat .said").inner_text() == "layer 1, expert 7 of mlp.experts.up: 40.0%"
        assert page.locator(".drawer summary").all_inner_texts() == ["1.mlp.experts.7.up.weight"]
        page.keyboard.press("Escape")
        page.locator("button.fold").click()
        assert page.locator("tr.inner").count() == 0


def test_numbers_look_the_same_in_python_and_in_the_script(browser: Any, report: Path) -> None:
    numbers = [s * m * 10.0**e for e in range(-9, 9) for m in (1, 1.2345678, 9.99996, 5) for s in (1, -1)] + [0.0, 100.0, 0.25]
    units: tuple[Unit, ...] = ("number", "share", "count", "cosine")
    cases: list[tuple[float, Unit]] = [(n, unit) for n in numbers for unit in units if unit != "cosine" or abs(n) <= 1]
    cases = [(n, unit) for n, unit in cases if unit != "count" or n == round(n)]
    cases += [(1 - 10.0**-k, "cosine") for k in range(1, 16)] + [(10 * k + 7, "bytes") for k in (0, 99, 12345, 10**9, 10**13)]
    with opened(browser, report) as page:
        theirs = page.evaluate("cases => cases.map(([value, unit]) => weightsmithCharts.written(value, unit))", cases)
    assert [(case, text) for case, text in zip(cases, theirs, strict=True)] == [(case, written(*case)) for case in cases]


def test_paper_is_light_and_has_colours_but_no_controls(browser: Any, report: Path) -> None:
    with opened(browser, report, color_scheme="dark") as page:
        style = "getComputedStyle(document.querySelector('figure.heat td.s0')).backgroundColor"
        dark = page.evaluate(style)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate(style) != dark
        assert page.locator(".tools").first.is_hidden()
        assert page.evaluate("getComputedStyle(document.querySelector('figure.heat td')).printColorAdjust") == "exact"


def test_without_its_script_a_page_has_its_maps_and_tables(browser: Any, report: Path) -> None:
    with opened(browser, report, java_script_enabled=False) as page:
        assert page.locator("figure.heat td[class^=s]").count() == len(LAYERS) * len(PARTS)
        page.locator("#tensors-4 summary").click()
        assert page.locator("#tensors-4 tbody tr").count() == 50


@pytest.mark.parametrize("width", [1280, 390])
def test_lines_say_their_values_at_the_pointer_a_tap_and_by_keys(browser: Any, tmp_path: Path, width: int) -> None:
    lines = Curves("Moved", (("A", (0.5, None, 0.25)), ("<b>B", (0.1, 0.2, 0.3))), "layer", "share", "share", first=4)
    report = Report("lines", ("One.",), (lines,)).write(tmp_path / "r.html")
    with opened(browser, report, viewport={"width": width, "height": 800}, has_touch=width < 500) as page:
        svg, said = page.locator("section.curves svg"), page.locator("section.curves .said")
        box = svg.bounding_box()
        at = (box["x"] + box["width"] * 0.98, box["y"] + box["height"] * 0.3)
        page.touchscreen.tap(*at) if width < 500 else page.mouse.move(*at)
        assert said.inner_text() == "layer 6: A 25.0%, <b>B 30.0%"
        svg.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        assert said.inner_text() == "layer 5: A -, <b>B 20.0%"
        assert (svg.get_attribute("role"), svg.get_attribute("aria-valuetext")) == ("slider", said.inner_text())
        assert (svg.get_attribute("aria-valuemin"), svg.get_attribute("aria-valuemax")) == ("4", "6")
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.parametrize("width", [390, 280])
def test_the_scale_of_a_map_fits_its_box_and_its_colours_are_seen(browser: Any, tmp_path: Path, width: int) -> None:
    heat = HeatMap("Moved", ("up", "gate"), ("0", "1"), ((1.2345e-7, 0.00123), (Mark.NAN, 0.4567)), scale="log")
    report = Report("scale", ("One.",), (heat,)).write(tmp_path / "r.html")
    with opened(browser, report, viewport={"width": width, "height": 800}) as page:
        scale = page.locator(".legend .scale")
        assert "(logarithmic)" in scale.inner_text()
        box, around = scale.bounding_box(), page.locator(".legend").bounding_box()
        assert box["x"] + box["width"] <= around["x"] + around["width"]
        assert scale.evaluate("scale => scale.scrollWidth <= scale.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        widths = scale.locator("i").evaluate_all("steps => steps.map(step => step.getBoundingClientRect().width)")
        assert len(widths) == STEPS
        assert min(widths) >= 1
