"""What the site's search looks in: the sections of all pages, each with its title, address and text. Needs no Sphinx."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_CHARACTERS = 3000
"""Text of a section that is searched."""


def sections(text: str, page: str) -> Iterator[tuple[str, str, str, str]]:
    """The sections of a Markdown page: title, title of the page, address, text.

    page  its name without the suffix: `docs/recipe`
    """
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    # A comment in a block of code may look like a heading.
    lines = [line for i, block in enumerate(blocks) for line in ([block] if i % 2 else block.splitlines())]
    title, first, anchor, body, seen = "", "", "", list[str](), dict[str, int]()

    def section() -> tuple[str, str, str, str]:
        return title, first, f"{page}.html" + (f"#{anchor}" if title != first else ""), plain(" ".join(body))[:MAX_CHARACTERS]

    for line in lines:
        match = re.match(r"#{1,6} +(.+)", line)
        if not match:
            body.append(line)
            continue
        if title:
            yield section()
        title, body = plain(match[1]), []
        first = first or title
        slug = re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        anchor = f"{slug}-{count}" if count else slug
    if title:
        yield section()


def plain(text: str) -> str:
    """Markdown as plain text.

    >>> plain("See [the **recipe**](recipe.md#stages), `--set` <!-- a --> | x |")
    'See the recipe, --set x'
    """
    text = re.sub(r"<!--.*?-->|```\w*|<[^>\s][^>]*>", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[`|]|\*\*|(?<= )\*(?= )|---+:?", " ", text).replace(" ,", ",").split())


def index(root: Path, pages: Iterable[str]) -> str:
    """The script that holds the sections of some pages, for search.js."""
    entries = [section for page in pages for section in sections((root / f"{page}.md").read_text(encoding="utf-8"), page)]
    return f"window.SEARCH_INDEX = {json.dumps(entries, ensure_ascii=False, separators=(',', ':'))};\n"
