"""The site's search: what it looks in, and what it finds. The site itself is built by `make site`."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search_index", SITE / "search_index.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
}
WITHOUT_ANSWER = ("zzzzqqq", "how do I")


@cache
def found() -> dict[str, list[str]]:
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


@pytest.mark.parametrize("query", ANSWERS)
def test_the_search_finds_the_section_that_answers(query: str) -> None:
    assert ANSWERS[query] in found()[query]


@pytest.mark.parametrize("query", WITHOUT_ANSWER)
def test_the_search_finds_nothing_for_nothing(query: str) -> None:
    assert found()[query] == []


def test_the_site_loads_nothing_from_other_places() -> None:
    for file in ("site.js", "style.css", "conf.py"):
        assert not re.findall(r"https?://|//cdn|@import", (SITE / file).read_text(encoding="utf-8")), file
