"""The two texts of each fine-tune: one that statistics are measured on, and one that is held back to score candidates.

A text that is given is cut into rows, of which every fourth is held back. Without one, the fine-tune writes both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightsmith._activations.rows import text_source
from weightsmith._base.errors import ParameterError
from weightsmith._base.files import write_whole
from weightsmith._execution.identity import program_digest
from weightsmith._execution.options import RunOptions
from weightsmith._execution.progress import Meter
from weightsmith._reports.auto.write import writer
from weightsmith._reports.evaluate.opening import Opened, prepare_named
from weightsmith._reports.options import WriteSettings

TOKENS = 128
"""The most tokens of a row, also of those that a fine-tune writes."""

STATISTICS_ROWS = 36
"""Rows of a given text that statistics are measured on."""

HELD_ROWS = 12
"""Rows held back. With four, differences that were there could not be told from noise."""

TEXTS, HELD_BACK = "texts", "held-back"
"""Folders for the texts of all fine-tunes."""

OWN_ROWS = 20
"""Rows that a fine-tune writes for statistics."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """The texts of a fine-tune, as files of one row on each line. user_file: the user's file, "" for text of its own."""

    name: str
    user_file: str
    statistics: Path
    held: Path


def row_tokens(one: Opened) -> int:
    """Tokens of a row: fewer than `TOKENS` for a model that takes few."""
    return min(TOKENS, max(2, one.positions // 2))


@dataclass(frozen=True, slots=True)
class CutText:
    """A given text, cut in two: the rows that statistics are measured on, and those that are held back. file: the user's."""

    file: str
    statistics: tuple[str, ...]
    held: tuple[str, ...]

    def write(self, name: str, folder: Path) -> TextPair:
        """Write both parts, as the texts of a fine-tune."""
        return _write(name, self.file, folder, self.statistics, self.held)


def cut(one: Opened, file: str) -> CutText:
    """Cut a given text in two. Raises ParameterError for one that is too short, and as `Cutter.rows` does.

    Rows are taken evenly from the whole text, so that its end counts as its beginning does.
    """
    tokens = row_tokens(one)
    rows = one.cutter.rows(text_source(file, None, tokens, 0, "text"), _MOST_READ)
    count = len(rows.ids)
    if count < 8:
        what = f"the text has {count:,} rows of {tokens:,} tokens, and 8 are needed: 6 for statistics, 2 to score candidates"
        raise ParameterError(what, where=file, fix="give a longer text, or none at all: each fine-tune then writes its own")
    taken = np.unique(np.linspace(0, count - 1, min(count, STATISTICS_ROWS + HELD_ROWS)).round().astype(int))
    texts = [one.cutter.tokenizer.decode(rows.ids[k][rows.nbytes[k] >= 0].tolist(), skip_special_tokens=False) for k in taken]
    return CutText(file, tuple(text for i, text in enumerate(texts) if i % 4 != 3), tuple(texts[3::4]))


def write_own(name: str, model: str, tokens: int, folder: Path, seed: int, running: RunOptions, shown: Meter) -> TextPair:
    """Let a fine-tune write both texts; those of an earlier call of this program with the same seed are taken as they are."""
    settings = WriteSettings(rows=OWN_ROWS + HELD_ROWS, tokens=tokens, seed=seed)
    with prepare_named(model) as prepared:
        facts = [program_digest(), repr(settings), *(checkpoint.state for checkpoint in prepared.inputs)]
        identity = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        record = folder / TEXTS / f"{name}.written"
        pair = _pair(name, "", folder)
        if recorded(record) == identity and pair.statistics.is_file() and pair.held.is_file():
            return pair
        with writer(name, prepared, running) as model_writer:
            rows = model_writer(settings, shown)
    _write(name, "", folder, rows[:OWN_ROWS], rows[OWN_ROWS:])
    write_whole(record, identity.encode())
    return pair


def recorded(path: Path) -> str:
    """What a file beside a text says of the call that wrote it; "" without one."""
    return path.read_text("ascii", "replace")[:80] if path.is_file() else ""


def _pair(name: str, file: str, folder: Path) -> TextPair:
    return TextPair(name, file, folder / TEXTS / f"{name}.jsonl", folder / HELD_BACK / f"{name}.jsonl")


def _write(name: str, file: str, folder: Path, measured: Sequence[str], held: Sequence[str]) -> TextPair:
    pair = _pair(name, file, folder)
    for path, texts in ((pair.statistics, measured), (pair.held, held)):
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        write_whole(path, "".join(lines).encode(errors="surrogatepass"))
    return pair


_MOST_READ = 4096
