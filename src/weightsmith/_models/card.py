"""The front matter of model cards: what README.md says about a model in a form that programs read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.files import read_bounded

CARD_NAME = "README.md"
MAX_CARD_BYTES = 4 << 20
MAX_FRONT_CHARACTERS = 64 << 10

_FRONT = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
_IN_HUB_CACHE = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+", re.ASCII)


def read_card(folder: Path) -> dict[str, Any]:
    """The front matter of a folder's README.md, every value as text; {} without one that can be read."""
    try:
        text = read_bounded(folder / CARD_NAME, MAX_CARD_BYTES).decode(errors="replace").removeprefix("\ufeff")
    except WeightsmithError:
        return {}
    match = _FRONT.match(text)
    if match is None or len(match[1]) > MAX_FRONT_CHARACTERS:
        return {}
    try:
        front_matter = yaml.load(
            match[1], Loader=yaml.BaseLoader
        )  # text, lists and mappings alone: no numbers, no dates, no objects
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):  # PyYAML's own for \UFFFFFFFF
        return {}
    return {key: value for key, value in front_matter.items() if isinstance(key, str)} if isinstance(front_matter, dict) else {}


def hub_id_of(path: str) -> str:
    """The name on the Hub of a folder in its cache; "" for any other path.

    >>> hub_id_of("/home/me/.cache/huggingface/hub/models--org--name/snapshots/0123abc")
    'org/name'
    """
    match = _IN_HUB_CACHE.fullmatch(path.rstrip("/"))
    return f"{match[1]}/{match[2]}" if match else ""
