"""The address of the repository, written into every place that names it.

    python scripts/address.py https://github.com/ORG/weightsmith     write it
    python scripts/address.py                                        take it out again

Until the repository has an address, no page has a button or link that leads nowhere. Each place is a pair of marks, which this
script fills. `pyproject.toml` is where the address is read from by the test that compares all places.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADDRESS = re.compile(r"https://[\w.-]+/([\w.-]+/[\w.-]+)")
_BEGIN = r"""(?P<begin>[^\n]*address: (?P<name>[\w ]+)(?: -->|\\n",)?\n)"""  # in Markdown, TOML, or a cell of a notebook
MARKS = re.compile(_BEGIN + r"(?P<text>.*?)(?P<end>[^\n]*address end)", re.DOTALL)
NOTEBOOK = "examples/notebooks/hub_to_gguf.ipynb"


def _urls(address: str) -> str:
    pages = {"Homepage": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
    return "\n".join(["[project.urls]", *(f'{name} = "{address}{page}"' for name, page in pages.items())])


def _colab(picture: str) -> Callable[[str], str]:
    def button(address: str) -> str:
        path = address.removeprefix("https://github.com/")
        return f"[![Open in Colab]({picture})](https://colab.research.google.com/github/{path}/blob/main/{NOTEBOOK})"

    return button


def _source(address: str) -> str:
    return f'    "SOURCE = \\"git+{address}\\"\\n",'


def _workflow(address: str) -> str:
    name = address.removeprefix("https://github.com/")
    return f"""In a GitHub workflow ([action.yml](action.yml) lists its inputs):

```text
- uses: {name}@main
  with: {{recipe: recipe.yml, push: org/name, token: "${{{{ secrets.HF_TOKEN }}}}"}}
```"""


PLACES: dict[str, dict[str, Callable[[str], str]]] = {
    "pyproject.toml": {"urls": _urls},
    "README.md": {"colab": _colab("docs/images/colab.svg"), "workflow": _workflow},
    NOTEBOOK: {"source": _source},
    "docs/notebooks.md": {"colab": _colab("images/colab.svg")},
}
"""File → name of a place → its text, from the address."""


def address_now() -> str:
    """The address in pyproject.toml; "" if there is none."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return str(urls.get("Homepage", ""))


def filled(file: str, address: str) -> str:
    """The text of a file with the address in its places. Raises SystemExit if a place is missing."""
    text = (ROOT / file).read_text()
    if names := {*PLACES[file]} - {match["name"] for match in MARKS.finditer(text)}:
        sys.exit(f"{file}: no mark 'address: NAME' for {', '.join(sorted(names))}")

    def place(match: re.Match[str]) -> str:
        inside = f"{PLACES[file][match['name']](address)}\n" if address else ""
        return f"{match['begin']}{inside}{match['end']}"

    return MARKS.sub(place, text)


def main() -> None:
    """Write the address into all places."""
    parser = argparse.ArgumentParser(description="Write the address of the repository into every place that names it.")
    parser.add_argument("address", nargs="?", default="", help="https://github.com/ORG/NAME; left out: no address")
    address = parser.parse_args().address.rstrip("/")
    if address and not ADDRESS.fullmatch(address):
        sys.exit(f"{address}: expected https://HOST/ORG/NAME")
    for file in PLACES:
        (ROOT / file).write_text(filled(file, address))


if __name__ == "__main__":
    main()
