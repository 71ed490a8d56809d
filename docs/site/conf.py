"""The documentation site: `make site`.

Pages are plain Markdown, as GitHub shows them. The sidebar is the list of docs/README.md: a heading is a group, an item a page.
A line `<!-- report: NAME -->` becomes a link to build/demo/gallery/NAME.html where `examples/gallery.py` has made that file.
search_index.py makes what the search looks in; site.js has the search, the copy buttons and the version menu; versions.py lists
the versions. Nothing is loaded from other sites.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
from search_index import index

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs" / "README.md"
REPORTS = ROOT / "build" / "demo" / "gallery"
BELOW = {"docs/methods/README": ("docs/methods/*",), "docs/benchmarks": ("benchmarks/LOG", "benchmarks/results/*")}
"""Pages that are under another page in the sidebar."""

project = "weightsmith"
version = release = runpy.run_path(str(ROOT / "src" / "weightsmith" / "_version.py"))["__version__"]
root_doc = "README"
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md", "examples/testbed/README.md"]
exclude_patterns = [".*", "build", "benchmarks/.venv-mergekit", "src", "tests"]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 6
pygments_style, pygments_dark_style = "friendly", "github-dark"

html_theme = "furo"
html_title = f"weightsmith {version}"
html_static_path = ["style.css", "site.js"]
html_js_files = ["site.js"]
html_css_files = ["style.css"]
html_show_sphinx = html_show_sourcelink = html_show_copyright = html_copy_source = False
html_show_search_summary = False  # it would take requests, which browsers refuse to pages opened from the disk


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
    app.connect("source-read", _link_reports)
    app.connect("doctree-read", _name_folders)
    app.connect("build-finished", _finish)


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """The sidebar: of the whole site on the first page, of pages below another on that one."""
    if page == root_doc:
        source[0] += "".join(_tree(caption, entries) for caption, entries in navigation())
    elif page == "docs/README":
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif page in BELOW:
        source[0] += _tree("", BELOW[page])


def navigation() -> list[tuple[str, list[str]]]:
    """The groups of docs/README.md, each with its entries of a table of contents: `title <page>`."""
    groups = []
    for section in re.split(r"^## ", LIST.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        caption, _, text = section.partition("\n")
        entries = []
        for title, target in re.findall(r"^\* \[(.+?)\]\((.+?)\.md\)$", text, flags=re.MULTILINE):
            page = (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()
            entries.append(f"{title} <{'self' if page == root_doc else '/' + page}>")
        groups.append((caption, entries))
    return groups


def _tree(caption: str, entries: list[str] | tuple[str, ...]) -> str:
    lines = [f":caption: {caption}"] if caption else [":glob:"]
    entries = [entry if caption else f"/{entry}" for entry in entries]
    return "\n\n```{toctree}\n" + "\n".join([":hidden:", *lines, "", *entries]) + "\n```\n"


def _link_reports(app: Sphinx, page: str, source: list[str]) -> None:
    def link(match: re.Match[str]) -> str:
        if not (REPORTS / f"{match[1]}.html").exists():
            return ""
        return f'<p><a class="report" href="{"../" * page.count("/")}reports/{match[1]}.html">Open the report</a></p>'

    source[0] = re.sub(r"^<!-- report: ([\w-]+) -->$", link, source[0], flags=re.MULTILINE)


def _name_folders(app: Sphinx, tree: nodes.document) -> None:
    """A link to a folder of the repository is its name: the site has no page for it."""
    here = (ROOT / app.env.docname).parent
    for link in list(tree.findall(addnodes.pending_xref)):
        folder = here / link.get("reftarget", "")
        if folder.is_dir() and folder.resolve().is_relative_to(ROOT):
            link.replace_self(link.children)


def _finish(app: Sphinx, error: Exception | None) -> None:
    """The first page as index.html too, what the search looks in, and the reports that pages link to."""
    if error is None:
        out = Path(app.outdir)
        (out / "_static" / "search_index.js").write_text(index(ROOT, sorted(app.env.found_docs)), encoding="utf-8")
        shutil.copy(out / "README.html", out / "index.html")
        (out / "reports").mkdir(exist_ok=True)
        for report in sorted(REPORTS.glob("*.html")):
            shutil.copy(report, out / "reports")
