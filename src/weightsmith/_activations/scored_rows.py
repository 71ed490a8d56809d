"""Rows of tokens to be scored: a text from its beginning, or conversations of which only the assistant's answers are scored.

A text is cut into rows of equal length; what is left over at the end is not scored, unless it is all there is. Each row begins
with the token that the tokenizer puts before texts, if it does so; else the first token of a row is not scored. A conversation
is one row. Each scored token has the number of bytes of the text that it stands for, so that models with different tokenizers
can be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.bounded import BoundedScript
from weightsmith._activations.rows import TOKENIZER, encoded, load_tokenizer, read_lines, read_pieces
from weightsmith._base.errors import FormatError, ParameterError, Unsupported
from weightsmith._base.installation import absent_packages
from weightsmith._base.text import status
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.tokenizers.files import TEMPLATE_FILE, settings_in, settings_of, template_of
from weightsmith._plans import TextSource

MAX_ROWS = 512
"""The most rows that are scored unless the user gives a number."""

UNSCORED = -1
"""Marks a token that is not scored, in place of its number of bytes."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Rows of tokens.

    ids      int32 [rows, tokens]; zeros after the end of a short row
    nbytes   int32 [rows, tokens]: the bytes of the text that a scored token stands for; -1: not scored
    shortened  rows that are cut off: conversations longer than a row
    unplaced  answers that are not scored, because the chat template changes them when the conversation goes on
    """

    ids: Ints
    nbytes: Ints
    shortened: int = 0
    unplaced: int = 0

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return int((self.nbytes >= 0).sum())

    @property
    def sha256(self) -> str:
        """Hash of both arrays."""
        shape = repr(self.ids.shape).encode()
        return hashlib.sha256(shape + self.ids.tobytes() + self.nbytes.tobytes()).hexdigest()


def together(parts: Sequence[ScoredRows]) -> ScoredRows:
    """The rows of several texts, one after the other."""
    width = max(part.ids.shape[1] for part in parts)

    def padded(array: Ints, value: int) -> Ints:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=value)

    ids = np.concatenate([padded(part.ids, 0) for part in parts])
    nbytes = np.concatenate([padded(part.nbytes, UNSCORED) for part in parts])
    return ScoredRows(ids, nbytes, sum(part.shortened for part in parts), sum(part.unplaced for part in parts))


@dataclass(frozen=True, eq=False)
class Cutter:
    """Cuts texts into tokens.

    tokenizer   of the package `tokenizers`
    where       its file, for messages
    vocabulary  rows of the model's embedding
    template    the model's chat template; "" if it has none
    names       the special tokens that a template may use: `bos_token`, …
    """

    tokenizer: Any
    where: str
    vocabulary: int
    template: str = ""
    names: Mapping[str, str] | None = None

    def rows(self, text: TextSource, most_rows: int) -> ScoredRows:
        """The rows of a text. text: with the number of tokens in a row; rows: 0 for all, but at most `most_rows`.

        Raises ParameterError if it is too short; CheckpointError if it has changed; FormatError if it cannot be read, encoded
        or rendered; Unsupported for a tokenizer that is not the model's, and for conversations without a chat template.
        """
        status("tokenizing the text")
        talks = conversations(text)
        scored = (
            self._plain(text, text.rows or most_rows) if talks is None else self._answers(talks, text, text.rows or most_rows)
        )
        if text.rows > len(scored.ids):
            what = f"it has {len(scored.ids):,} rows of {text.tokens:,} tokens, not {text.rows:,}"
            raise ParameterError(what, where=text.source, fix="give a longer text, or fewer or shorter rows")
        if not scored.tokens:
            what = "it has no token to score" if talks is not None else "it has fewer than two tokens"
            raise ParameterError(what, where=text.source, fix="give a longer text")
        if scored.ids.max() >= self.vocabulary:
            what = f"the tokenizer produces token {scored.ids.max()}, but the embedding has {self.vocabulary} rows"
            raise Unsupported(what, where=self.where, fix="use the model's own tokenizer")
        return scored

    def _plain(self, text: TextSource, most_rows: int) -> ScoredRows:
        before = self.before
        width = max(1, text.tokens - len(before))
        ids, nbytes = list[Ints](), list[Ints]()
        with contextlib.closing(read_pieces(text)) as pieces:
            for piece in pieces:
                encoding = encoded(self.tokenizer, piece, self.where)
                ids.append(np.array(encoding.ids, np.int32))
                nbytes.append(_bytes_of(piece, encoding))
                if sum(map(len, ids)) >= most_rows * width:
                    break
        stream, counts = (np.concatenate(parts) if parts else np.empty(0, np.int32) for parts in (ids, nbytes))
        width = min(width, len(stream))
        count = min(len(stream) // width, most_rows) if width else 0
        shape = count, width
        cut, own_bytes = (array[: count * width].reshape(shape) for array in (stream, counts))
        first = np.tile(np.array(before, np.int32), (count, 1))
        scored = np.concatenate([np.full_like(first, UNSCORED), own_bytes], axis=1)
        if count and not before:
            scored[:, 0] = UNSCORED
        return ScoredRows(np.concatenate([first, cut], axis=1), scored)

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts before a text."""
        plain, whole = (self.tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        places = range(len(whole) - len(plain) + 1)
        at = next((i for i in places if plain and whole[i : i + len(plain)] == plain), 0)
        return tuple(whole[:at])

    def _answers(self, talks: Iterable[Conversation], text: TextSource, most_rows: int) -> ScoredRows:
        chosen = list(itertools.islice(talks, most_rows))
        if not self.template:
            fix = "use a model with one, or a text without `messages`"
            raise Unsupported("conversations need the model's chat template, and it has none", where=self.where, fix=fix)
        special = {number for number, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        rows, shortened, unplaced = list[tuple[Ints, Ints]](), 0, 0
        for number, (whole, answers, missing) in enumerate(rendered(chosen, self.template, self.names or {}, self.where)):
            encoding = encoded(self.tokenizer, whole, self.where)
            ids, nbytes = np.array(encoding.ids, np.int32), _bytes_of(whole, encoding)
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            scored = np.zeros(len(ids), bool)
            for first, last in answers:
                scored |= (starts >= first) & (ends <= last) & (ends > starts)
            scored[:1] = False
            nbytes[np.isin(ids, list(special))] = 0
            nbytes[~scored] = UNSCORED
            unplaced += missing
            shortened += len(ids) > text.tokens
            rows.append((ids[: text.tokens], nbytes[: text.tokens]))
            status(f"tokenizing the text: conversation {number + 1:,}")
        width = max((len(ids) for ids, _ in rows), default=0)
        padded = np.zeros((2, len(rows), width), np.int32)
        padded[1] = UNSCORED
        for row, arrays in enumerate(rows):
            for array, own_array in zip(padded, arrays, strict=True):
                array[row, : len(own_array)] = own_array
        return ScoredRows(padded[0], padded[1], shortened, unplaced)


_SETTINGS = "tokenizer_config.json"
_FILES = (TOKENIZER, _SETTINGS, TEMPLATE_FILE, "chat_template.json")


def cutter_of(donor: Checkpoint, files: Mapping[str, bytes], vocabulary: int, name: str) -> Cutter:
    """The tokenizer and chat template of a model.

    donor       the checkpoint whose files the model has
    files       those that a plan makes in place of the donor's
    vocabulary  rows of the embedding
    name        of the model, for messages

    Raises NotFound, FormatError. Downloads the files that are missing.
    """
    donor.fetch([file for file in _FILES if file in donor.files])
    if TOKENIZER in files:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / TOKENIZER
            path.write_bytes(files[TOKENIZER])
            tokenizer = load_tokenizer(path)
    else:
        tokenizer = load_tokenizer(donor.folder / TOKENIZER)
    settings = settings_in(files[_SETTINGS]) if _SETTINGS in files else settings_of(donor.folder, donor.files, _SETTINGS)
    template = files[TEMPLATE_FILE].decode(errors="replace") if TEMPLATE_FILE in files else ""
    if not template and _SETTINGS in files and isinstance(template_text := settings.get("chat_template"), str):
        template = template_text
    template = template or template_of(donor.folder, donor.files)
    tokens = {key: _text_of(value) for key, value in settings.items() if key.endswith("_token")}
    names = {key: text for key, text in tokens.items() if text is not None}
    return Cutter(tokenizer, name, vocabulary, template, names)


def _text_of(token: object) -> str | None:
    """A token of tokenizer_config.json: its text, or an object with it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _bytes_of(piece: str, encoding: Any) -> Ints:
    """The bytes that each token adds to those before it.

    Several tokens may share a character: the first of them has its bytes.
    """
    characters = np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32)
    widths = 1 + (characters >= 0x80).astype(np.int64) + (characters >= 0x800) + (characters >= 0x10000)
    upto = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate(np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1])
    return np.diff(upto[ends], prepend=0).astype(np.int32)


Conversation = Sequence[Mapping[str, Any]]
"""Messages: `role` and `content`, and whatever else a template reads."""

ROLES: Mapping[str, str] = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""What the names that ShareGPT has for the speakers are as roles of messages."""
RENDERING_BYTES = 512 << 20
"""Memory limit of rendering, on top of Jinja's own code."""
RENDERING_SECONDS = 20
"""Limit of its CPU time, plus a second for each 100 conversations."""


def conversations(text: TextSource) -> Iterator[Conversation] | None:
    """The conversations of a text; None if its first line has none. Raises FormatError for a line without one."""
    if Path(text.source).suffix != ".jsonl":
        return None
    lines = read_lines(text)
    first = next(lines, None)
    if first is None or not isinstance(first[1], dict) or not {"messages", "conversations"} & first[1].keys():
        return None
    return (_checked(value, number, text.source) for number, value in itertools.chain([first], lines))


def _checked(value: Any, number: int, where: str) -> Conversation:
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(value, dict) and messages is None and isinstance(turns := value.get("conversations"), list):
        messages = [_message(turn) for turn in turns]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        what = f"line {number} is no conversation, unlike the first"
        raise FormatError(what, where=where, fix='write {"messages": [{"role": "user", "content": "…"}, …]} on each line')
    return messages


def _message(turn: Any) -> Any:
    """A turn of the form of ShareGPT, `from` and `value`, as a message; anything else as it is."""
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        return turn
    return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def rendered(
    talks: Sequence[Conversation], template: str, names: Mapping[str, str], where: str
) -> Iterator[tuple[str, list[tuple[int, int]], int]]:
    """The text of each conversation, where its answers begin and end in it, and how many answers have no such place.

    names  the special tokens that the template may use
    where  the model, for messages

    The template runs in a process with bounded memory and time. Raises FormatError if it fails or takes more; Unsupported
    without Jinja.
    """
    if problems := absent_packages(("jinja2",), "chat templates", "calibration"):
        raise problems[0]
    seconds = RENDERING_SECONDS + len(talks) // 100
    asked = {"template": template, "names": dict(names), "talks": talks}
    with tempfile.TemporaryFile("w+") as stdin:
        json.dump(asked, stdin)
        stdin.seek(0)
        count = 0
        with BoundedScript("template_script", "it", RENDERING_BYTES, seconds, stdin) as script:
            for line in script.out:
                whole, answers, without = json.loads(line)
                yield whole, answers, without
                count += 1
            why = script.failure()
    if why or count < len(talks):
        what = f"the chat template failed: {why or 'it wrote too little'}"
        raise FormatError(what, where=where, fix="check the model's chat template, and the messages")
