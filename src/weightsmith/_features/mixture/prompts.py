"""The prompts of each expert, from the recipe and text files, as text and as rows of tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsmith._activations.model import own_file_problem
from weightsmith._activations.rows import OWN
from weightsmith._base.errors import CheckpointError, NotFound, ParameterError, SyntaxProblem, WeightsmithError
from weightsmith._base.files import expand_user, read_bounded
from weightsmith._planning.recipe import Expert, ModelRef
from weightsmith._plans.codec import OMITTED

MAX_BYTES = 4 << 20
"""Size limit of a text file: about a million tokens, which take a 7B model hours on a CPU."""


@dataclass(frozen=True, slots=True)
class ExpertTexts:
    """The texts of one expert.

    whole    text files to be split into rows, by kind
    written  the product of rows that its model writes by itself, more positive prompts; "": it writes none
    """

    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    whole: Mapping[str, str] | None = None
    written: str = field(default="", metadata=OMITTED)

    @property
    def has_prompts(self) -> bool:
        """Whether there are positive prompts."""
        return bool(self.positive or (self.whole or {}).get("positive") or self.written)

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out texts."""
        return bool(self.held_out or (self.whole or {}).get("held_out"))

    @property
    def said(self) -> tuple[object, ...]:
        """What router weights are computed from: equal values give equal weights."""
        return self.positive, self.negative, (self.whole or {}).get("positive"), self.written


def read_texts(expert: Expert, folder: Path, prompt_tokens: int | None) -> tuple[ExpertTexts, list[WeightsmithError]]:
    """The texts of an expert, and the problems with its files.

    folder         base for relative paths
    prompt_tokens  None: each paragraph of a file is a prompt

    >>> read_texts(expert, Path("recipes"), None)[1]                                                     # doctest: +SKIP
    [NotFound('the text file recipes/fr.txt cannot be read: No such file or directory')]
    """
    problems: list[WeightsmithError] = []
    read: dict[str, str] = {}
    written = ""
    if expert.prompts_file == OWN:
        model = expert.model if isinstance(expert.model, ModelRef) else expert.section.where
        written = f"{own_prefix(str(model))}rows"
        if os.path.lexists(folder / OWN):
            problems.append(own_file_problem(expert.section.at("prompts_file")))
    for key, what in (("prompts_file", "positive"), ("held_out_file", "held_out")):
        if (name := getattr(expert, key)) and not (written and what == "positive"):
            text = _read(folder / expand_user(name), expert.section.at(key))
            if isinstance(text, WeightsmithError):
                problems.append(text)
            else:
                read[what] = text
    if prompt_tokens is not None:
        return ExpertTexts(expert.positive_prompts, expert.negative_prompts, whole=read, written=written), problems
    cut = {what: tuple(paragraphs(text)) for what, text in read.items()}
    positive = expert.positive_prompts + cut.get("positive", ())
    return ExpertTexts(positive, expert.negative_prompts, cut.get("held_out", ()), written=written), problems


def own_prefix(model: str) -> str:
    """Prefix of the names of the product and the array of what a model writes by itself."""
    return f"written by {model}: "


def paragraphs(text: str) -> list[str]:
    r"""The runs of lines between blank lines.

    >>> paragraphs("a\nb\n \n\nc\n")
    ['a\nb', 'c']
    """
    return [part.strip("\n") for part in re.split(r"\n(?:[^\S\n]*\n)+", text) if part.strip()]


def _read(path: Path, where: str) -> str | WeightsmithError:
    try:
        data = read_bounded(path, MAX_BYTES)
    except NotFound as error:
        fix = "check the path: relative ones start at the recipe's folder"
        return NotFound(f"the text file {path} cannot be read: {error.finding.what}", where=where, fix=fix)
    except CheckpointError as error:
        fix = "use a part of it: about ten thousand tokens are plenty"
        return ParameterError(f"the text file {path} cannot be read: {error.finding.what}", where=where, fix=fix)
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        what = f"the text file {path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}"
        return SyntaxProblem(what, where=where, fix="save it as UTF-8")
    if not text.strip():
        return ParameterError(f"the text file {path} is empty", where=where, fix="write typical inputs of the expert")
    return text


Row = tuple[int, ...]
"""One prompt as tokens, with the prefix that the tokenizer adds."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The prompts of one expert as tokens."""

    positive: tuple[Row, ...]
    negative: tuple[Row, ...]
    held_out: tuple[Row, ...]


class Tokens:
    """Tokenises texts into rows.

    plain  as mergekit does: the text of the bos token and the prompt, without the tokenizer's own prefix. Otherwise each
           row starts with the tokenizer's prefix
    start  the length of the prefix of each row, which no statistic includes
    """

    def __init__(self, tokenizer: Any, *, plain: bool) -> None:
        self._tokenizer = tokenizer
        self._plain = plain
        bos = tokenizer.bos_token_id
        self._bos_text = (tokenizer.bos_token or "") if plain else ""
        self._prefix: list[int] = [bos] if bos is not None else []
        if not plain:
            ids, bare = list(tokenizer("a")["input_ids"]), self._ids("a")
            self._prefix = ids[: next((k for k in range(len(ids)) if ids[k : k + len(bare)] == bare), 0)]
        self.start = 1 if self._bos_text else len(self._prefix)

    def rows(self, texts: ExpertTexts, prompt_tokens: int | None) -> TokenRows:
        """The rows of all texts of an expert. Texts without tokens have none."""
        whole = texts.whole or {}
        positive = [*map(self._row, texts.positive), *self._cut(whole.get("positive", ""), prompt_tokens)]
        held_out = [*map(self._row, texts.held_out), *self._cut(whole.get("held_out", ""), prompt_tokens)]
        return TokenRows(self._full(positive), self._full(map(self._row, texts.negative)), self._full(held_out))

    def _full(self, rows: Iterable[Row]) -> tuple[Row, ...]:
        """The rows with tokens. With `plain`, the bos token alone counts as one, for empty prompts, as in mergekit."""
        return tuple(row for row in rows if len(row) > (0 if self._plain else self.start))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _row(self, text: str) -> Row:
        return tuple(self._ids(self._bos_text + text)) if self._bos_text else (*self._prefix, *self._ids(text))

    def _cut(self, text: str, size: int | None) -> list[Row]:
        ids = self._ids(text) if text and size else []
        step = size or 1
        return [(*self._prefix, *ids[k : k + step]) for k in range(0, len(ids), step)]
