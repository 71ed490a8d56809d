"""Rows of calibration tokens: a text, tokenised with the model's own tokenizer, cut into rows of equal length.

Half of the rows begin with the model's BOS token, as a prompt does; the others begin in the middle of a text. A text is read
until it has `SPARE` times the tokens that the rows take; the rows are drawn from these with the seed.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.errors import CheckpointError, FormatError, NotFound, ParameterError, Unsupported, WeightsmithError, first_line
from weightsmith.formats.files import expand_user, open_regular, read_bounded, show
from weightsmith.formats.strict_json import JsonError, parse
from weightsmith.remote.failures import no_panic
from weightsmith.text import status

BUILT_IN = "built-in"
"""The text that comes with the package: `texts/`, one document per file."""

MAX_ROWS = 128
"""Rows taken from a text if their number is not given."""
TOKENS = 512
"""Tokens per row if not given."""
MAX_TEXT_BYTES = 256 << 20
PIECE_CHARACTERS = 1 << 20
"""Of a document that are encoded at once, at most."""
SPARE = 8
"""A text is read until it has so many times the tokens that the rows take."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Where the rows come from.

    source  the absolute path of a file: .txt, .jsonl or .parquet; `built-in`
    sha256  of the text
    rows    number of rows; 0: as many as the text has, up to `MAX_ROWS`
    tokens  tokens per row
    seed    for choosing rows
    """

    source: str
    sha256: str
    rows: int
    tokens: int
    seed: int


def calibration_of(path: str | None, rows: int | None, tokens: int | None, seed: int) -> Calibration:
    """The settings for a text file; None or `built-in`: the built-in text. Raises WeightsmithError for an unusable file."""
    if seed < 0:
        raise ParameterError(f"a calibration takes no negative seed, but it is {seed}", where="--seed", fix="use 0 or more")
    for count, where in ((rows, "--calibration-rows"), (tokens, "--calibration-tokens")):
        if count is not None and count < 1:
            raise ParameterError(f"a calibration takes at least one, not {count}", where=where)
    if path is None or path == BUILT_IN:
        digest = hashlib.sha256(b"\0".join(text.encode() for text in _built_in())).hexdigest()
        return Calibration(BUILT_IN, digest, rows or 0, tokens or TOKENS, seed)
    file = expand_user(path).absolute()
    if file.suffix not in _READERS:
        what = f"the calibration text {show(path)} is of an unknown kind"
        raise ParameterError(what, where="--calibration", fix=f"use a file that ends in {', '.join(_READERS)}, or none")
    if file.suffix == ".parquet" and find_spec("pyarrow") is None:
        what = "a parquet file needs pyarrow, which is not installed"
        raise Unsupported(what, where=path, fix="run pip install pyarrow, or convert the text to .jsonl")
    return Calibration(str(file), _sha256(file), rows or 0, tokens or TOKENS, seed)


def rows_of(calibration: Calibration, folder: Path, vocabulary: int, bos: int | None) -> npt.NDArray[np.int32]:
    """The rows: int32 [rows, tokens].

    folder      of the model, with tokenizer.json
    vocabulary  rows of the embedding
    bos         the token that begins half of the rows; None, or a number without a row: no such token

    Raises ParameterError if the text is too short; CheckpointError if it has changed; NotFound without a tokenizer; FormatError
    for a text that cannot be read or encoded.
    """
    status("tokenizing the calibration text")
    tokenizer = _tokenizer(folder)
    enough, ids = SPARE * (calibration.rows or MAX_ROWS) * calibration.tokens, []
    count = 0
    for text in (piece for document in documents(calibration) for piece in pieces(document)):
        try:
            found = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # tokenizers raises anything: no token for unknown text, half of a surrogate pair
            what = f"the tokenizer cannot encode the calibration text: {first_line(error)}"
            raise FormatError(what, where=str(folder / "tokenizer.json"), fix="use another text") from error
        ids.append(found)
        count += len(found)
        if count >= enough:
            break
    stream = np.concatenate(ids) if ids else np.empty(0, np.int32)
    available = len(stream) // calibration.tokens
    rows = calibration.rows or min(available, MAX_ROWS)
    where = f"--calibration {calibration.source}"
    if not 0 < rows <= available:
        need = max(rows, 1) * calibration.tokens
        wants = f"{max(rows, 1):,} rows of {calibration.tokens:,} take {need:,}"
        what = f"the calibration text has {len(stream):,} tokens, but {wants}"
        raise ParameterError(what, where=where, fix="give a longer text, or fewer or shorter rows")
    if stream.max() >= vocabulary:
        what = f"the tokenizer produces token {stream.max()}, but the embedding has {vocabulary} rows"
        raise Unsupported(what, where=str(folder / "tokenizer.json"), fix="use the model's own tokenizer")
    chosen = np.sort(np.random.default_rng(calibration.seed).choice(available, rows, replace=False))
    cut = stream[: available * calibration.tokens].reshape(available, calibration.tokens)[chosen]
    if bos is not None and 0 <= bos < vocabulary:
        cut[1::2, 1:] = cut[1::2, :-1].copy()
        cut[1::2, 0] = bos
    return cut


def documents(calibration: Calibration) -> Iterator[str]:
    """The documents of a text. Raises CheckpointError if it has changed since the plan was made."""
    if calibration.source == BUILT_IN:
        texts = _built_in()
        found = hashlib.sha256(b"\0".join(text.encode() for text in texts)).hexdigest()
        _check(found, calibration)
        yield from texts
        return
    path = Path(calibration.source)
    _check(_sha256(path), calibration)
    try:
        yield from _READERS[path.suffix](path)
    except WeightsmithError:
        raise
    except Exception as error:  # pyarrow raises anything for a damaged file
        what = f"the calibration text cannot be read: {first_line(error)}"
        fix = "make the file again, or use another text"
        raise FormatError(what, where=str(path), fix=fix) from error


def pieces(text: str) -> Iterator[str]:
    """A document in pieces of at most `PIECE_CHARACTERS`, which end where a paragraph does; else a line, else a word."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        if end < len(text):
            places = ((text.rfind(mark, start, end), len(mark)) for mark in ("\n\n", "\n", " "))
            end = next((place + length for place, length in places if place >= 0), end)
        yield text[start:end]
        start = end


def _check(found: str, calibration: Calibration) -> None:
    if found != calibration.sha256:
        raise CheckpointError("the calibration text has changed", where=calibration.source, fix="plan again")


def _built_in() -> list[str]:
    folder = files("weightsmith.quantisation.calibration") / "texts"
    return [path.read_text("utf-8") for path in sorted(folder.iterdir(), key=lambda p: p.name) if path.name.endswith(".txt")]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _plain(path: Path) -> Iterator[str]:
    yield _decoded(read_bounded(path, MAX_TEXT_BYTES), path)


def _json_lines(path: Path) -> Iterator[str]:
    """The `text` of each line, or all of its strings."""
    data = read_bounded(path, MAX_TEXT_BYTES).removeprefix(BOM_UTF8)
    for number, line in enumerate(BytesIO(data), 1):
        if not line.strip():
            continue
        try:
            value = parse(line, unique=False)
        except JsonError as error:
            raise FormatError(f"line {number} {error}", where=str(path), fix="correct the line, or delete it") from error
        if text := _text_of(value):
            yield text


def _parquet(path: Path) -> Iterator[str]:
    data = read_bounded(path, MAX_TEXT_BYTES)
    from pyarrow import BufferReader, parquet

    table = parquet.ParquetFile(BufferReader(data))
    for batch in table.iter_batches(256):
        for value in batch.to_pylist():
            if text := _text_of(value):
                yield text


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        return ""
    own = value.get("text")
    return own if isinstance(own, str) else " ".join(each for each in value.values() if isinstance(each, str))


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"the calibration text is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}"
        raise FormatError(what, where=str(path), fix="save it as UTF-8") from error


_READERS = {".txt": _plain, ".jsonl": _json_lines, ".parquet": _parquet}


def _tokenizer(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if find_spec("tokenizers") is None:
        fix = "run pip install 'weightsmith[calibration]', or use --calibration none"
        raise Unsupported("calibration needs tokenizers, which is not installed", fix=fix)
    from tokenizers import Tokenizer

    if not path.is_file():
        fix = "put the model's tokenizer.json next to its weights, or use --calibration none"
        raise NotFound("calibration needs the model's tokenizer", where=show(str(path)), fix=fix)
    try:
        with no_panic():
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # bad files can raise anything
        what = f"the tokenizer cannot be loaded: {first_line(error)}"
        raise FormatError(what, where=str(path), fix="restore the file, or use --calibration none") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
