"""BibTeX entries of the methods' sources, from `citations.bib`: found by the text in which a method names its sources."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_ENTRY = re.compile(r"(?:% named: ([^\n]+)\n)?(@\w+\{.+?\n\})", re.DOTALL)
_EPRINT = re.compile(r"eprint += \{(.+)\}")


def cite(source: str) -> list[str]:
    """The entries of the papers that a text names, in its order.

    >>> print(cite("Jang et al. 2024, Model Stock, https://arxiv.org/abs/2403.19522")[0])
    @misc{jang2024model,
      title         = {{Model Stock}: All We Need Is Just a Few Fine-Tuned Models},
      author        = {Dong-Hwan Jang and Sangdoo Yun and Dongyoon Han},
      year          = {2024},
      eprint        = {2403.19522},
      archivePrefix = {arXiv},
    }
    """
    entry_at = {source.index(words): entry for words, entry in entries().items() if words in source}
    return [entry_at[place] for place in sorted(entry_at)]


@cache
def entries() -> dict[str, str]:
    """Every entry, by the words with which sources name it."""
    text = Path(__file__).with_name("citations.bib").read_text("utf-8")
    return {words or f"arxiv.org/abs/{_EPRINT.findall(entry)[0]}": entry for words, entry in _ENTRY.findall(text)}
