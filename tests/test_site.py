"""The site's search: what it looks in, and what it finds. The site itself is built by `make site`."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weightsmith
from tests.browser_help import browser
from tests.script_help import load

pytestmark = pytest.mark.repository

__all__ = ["browser"]

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"


def script(name: str = "search_index") -> ModuleType:
    return load(SITE / f"{name}.py")


def pages() -> list[str]:
    return ["README", *sorted(page.relative_to(ROOT).with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md"))]


def test_a_page_is_cut_into_sections_with_their_addresses() -> None:
    text = "# Page\n\nFirst `words`.\n\n## Part one\n\n```bash\n# no heading\n```\n\n### Deep: *b*\n\ntext\n\n"
    text += "## Part one\n\nagain\n"
    assert list(script().sections(text, "docs/page")) == [
        ("Page", "Page", "docs/page.html", "First words ."),
        ("Part one", "Page", "docs/page.html#part-one", "# no heading"),
        ("Deep: *b*", "Page", "docs/page.html#deep-b", "text"),
        ("Part one", "Page", "docs/page.html#part-one-1", "again"),
    ]


ANSWERS = {
    "how do I resume a merge": "docs/troubleshooting.html#how-do-i-resume-a-merge",
    "which method": "docs/which-method.html",
    "IAM policy": "docs/operations.html#iam-policy-for-s3",
    "merge_state_dicts": "docs/api.html#merge_state_dicts",
    "ollama": "docs/quickstart.html#4-use-it",
    "intruder dimensions": "docs/lora.html#modules",
    "kubernetes": "docs/operations.html#kubernetes",
    "environment variables": "docs/operations.html#environment-variables",
    "how do I uninstall it": "docs/installation.html#upgrade-and-uninstall",
    "install with docker": "docs/installation.html#docker",
}
WITHOUT_ANSWER = ("zzzzqqq", "how do I")


@cache
def search_results() -> dict[str, list[str]]:
    """The addresses of the first three sections that the search finds, for each query."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    code = (
        f"global.window = {{}}; {script().index(ROOT, pages())}\n"
        f"const site = require({json.dumps(str(SITE / 'site.js'))});\n"
        f"const queries = {json.dumps([*ANSWERS, *WITHOUT_ANSWER])};\n"
        "const found = (query) => site.rank(window.SEARCH_INDEX, query, 3).map((each) => each[2]);\n"
        "console.log(JSON.stringify(Object.fromEntries(queries.map((query) => [query, found(query)]))));\n"
    )
    done = subprocess.run([node, "-"], input=code, capture_output=True, text=True, check=True)
    addresses: dict[str, list[str]] = json.loads(done.stdout)
    return addresses


@pytest.mark.slow
@pytest.mark.parametrize("query", ANSWERS)
def test_the_search_finds_the_section_that_answers(query: str) -> None:
    assert ANSWERS[query] in search_results()[query]


@pytest.mark.parametrize("query", WITHOUT_ANSWER)
def test_the_search_finds_nothing_for_nothing(query: str) -> None:
    assert search_results()[query] == []


def test_the_site_loads_nothing_from_other_places() -> None:
    for file in ("site.js", "style.css", "conf.py"):
        assert not re.findall(r"https?://|//cdn|@import", (SITE / file).read_text(encoding="utf-8")), file


# ---- versions, code and the first screen


def version_of(site: Path, name: str, *pages: str) -> None:
    """A build of a version, with these pages."""
    for page in ("index.html", *pages):
        (site / name / page).parent.mkdir(parents=True, exist_ok=True)
        code = '<div class="highlight"><pre><span class="s">"""one\ntwo"""</span>\n\n' + "x = y + " * 60 + "z\n</pre></div>"
        root = "../" * page.count("/") or "./"
        head = f'<link rel="stylesheet" href="{SITE}/style.css"><script src="{SITE}/site.js"></script>'
        (site / name / page).write_text(
            f'<html data-content_root="{root}">{head}<body><a class="sidebar-brand">weightsmith</a>{code}'
        )


def test_versions_are_side_by_side_and_the_first_page_leads_to_the_newest(tmp_path: Path) -> None:
    for name in ("0.2.0", "0.10.0", "0.10.0rc1"):
        version_of(tmp_path, name, "docs/a.html")
    (tmp_path / "search").mkdir()
    assert script("versions").write(tmp_path) == ["0.10.0", "0.10.0rc1", "0.2.0"]
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()
    assert '"0.2.0":["docs/a.html","index.html"]' in (tmp_path / "versions.js").read_text()


def test_a_site_without_a_version_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no version"):
        script("versions").write(tmp_path)


def test_the_site_and_the_makefile_know_this_version() -> None:
    done = subprocess.run(["make", "-n", "site"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"-c docs/site . build/site/{weightsmith.__version__}\n" in done.stdout
    text = (SITE / "conf.py").read_text(encoding="utf-8")
    assert 'runpy.run_path(str(ROOT / "src" / "weightsmith" / "_version.py"))["__version__"]' in text
    assert runpy.run_path(str(ROOT / "src/weightsmith/_version.py"))["__version__"] == weightsmith.__version__
    assert 'html_title = f"weightsmith {version}"' in text


@pytest.mark.slow
def test_no_line_of_code_is_cut_off_and_its_text_stays_as_it_is(browser: Any, tmp_path: Path) -> None:
    version_of(tmp_path, "0.1.0")
    for width in (390, 1920):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto((tmp_path / "0.1.0/index.html").as_uri())
        block = page.locator("pre")
        assert block.evaluate("pre => [pre.scrollWidth - pre.clientWidth, pre.querySelectorAll('.line').length]") == [0, 4]
        assert block.evaluate("pre => pre.textContent") == '"""one\ntwo"""\n\n' + "x = y + " * 60 + "z\n"
        page.close()


@pytest.mark.slow
def test_the_version_menu_leads_to_the_same_page_or_the_first(browser: Any, tmp_path: Path) -> None:
    version_of(tmp_path, "0.1.0", "docs/a.html", "docs/b.html")
    version_of(tmp_path, "0.2.0", "docs/a.html")
    script("versions").write(tmp_path)
    page = browser.new_page()
    for start, end in (("docs/a.html", "docs/a.html"), ("docs/b.html", "index.html"), ("index.html", "index.html")):
        page.goto((tmp_path / "0.1.0" / start).as_uri())
        assert page.locator("select.versions").input_value() == "0.1.0"
        page.select_option("select.versions", "0.2.0")
        page.wait_for_url((tmp_path / "0.2.0" / end).as_uri())
    page.close()


def test_the_picture_on_the_first_screen_shows_the_numbers_of_the_table() -> None:
    picture = (ROOT / "docs/images/front.svg").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| ties, base \+ 2 \|(.*)\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    theirs, ours, _, copied = (cell.strip() for cell in row.split("|"))
    assert re.findall(r">([\d.]+ s)<", picture) == [copied, ours, theirs]
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', picture)]
    seconds = [float(text.split()[0]) for text in (copied, ours, theirs)]
    assert widths == pytest.approx([520 * duration / seconds[2] for duration in seconds], abs=0.1)
