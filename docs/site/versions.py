"""Lists the versions of the documentation that a folder holds side by side: `python docs/site/versions.py build/site`.

SITE/0.1.0/, SITE/0.2.0/, … are builds of single releases. This writes SITE/versions.js, from which all pages make their version
menu, and SITE/index.html, which leads to the newest version. To publish a release, build it beside the earlier ones.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

REDIRECT = """<!DOCTYPE html><meta charset="utf-8"><title>weightsmith</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<a href="{0}/index.html">weightsmith {0}</a>
"""


def order(version: str) -> tuple[tuple[int, ...], bool, str]:
    """The key by which versions are sorted: numbers as numbers, and 0.2.0rc1 before 0.2.0.

    >>> sorted(["0.10.0", "0.2.0", "0.2.0rc1"], key=order)
    ['0.2.0rc1', '0.2.0', '0.10.0']
    """
    numbers, rest = re.fullmatch(r"([\d.]*)(.*)", version).groups()  # type: ignore[union-attr]
    return tuple(int(number) for number in numbers.split(".") if number), not rest, rest


def versions(site: Path) -> dict[str, list[str]]:
    """Version → its pages, the newest version first."""
    folders = [folder for folder in site.iterdir() if (folder / "index.html").is_file() and folder.name[0].isdigit()]
    return {
        folder.name: sorted(page.relative_to(folder).as_posix() for page in folder.rglob("*.html"))
        for folder in sorted(folders, key=lambda folder: order(folder.name), reverse=True)
    }


def write(site: Path) -> list[str]:
    """Write versions.js and index.html. Returns the versions."""
    listed = versions(site)
    if not listed:
        raise SystemExit(f"{site} holds no version: build one into {site}/VERSION first")
    newest = next(iter(listed))
    (site / "versions.js").write_text(
        f"window.SITE_VERSIONS = {json.dumps(listed, separators=(',', ':'))};\n", encoding="utf-8"
    )
    (site / "index.html").write_text(REDIRECT.format(newest), encoding="utf-8")
    return list(listed)


if __name__ == "__main__":
    print("written:", f"{sys.argv[1]}/index.html", "with versions", ", ".join(write(Path(sys.argv[1]))))
