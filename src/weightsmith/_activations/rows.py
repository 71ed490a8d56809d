"""Rows of calibration tokens: a text, tokenised with the model's own tokenizer, cut into rows of equal length.

Half of the rows begin with the model's BOS token, as a prompt does; the others begin in the middle of a text. A text is read
until it has `SPARE` times the tokens that the rows take; the rows are drawn from these with the seed. It is read in pieces, so
that it takes little memory however large it is; a parquet file is decoded in a process of its own (`parquet_script.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import struct
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.bounded import BoundedScript
from weightsmith._activations.parquet_script import text_of
from weightsmith._base.errors import CheckpointError, FormatError, NotFound, ParameterError, Unsupported, first_line, nearest
from weightsmith._base.files import expand_user, open_bounded, show
from weightsmith._base.installation import absent_packages, install_package
from weightsmith._base.options import option_error
from weightsmith._base.strict_json import MAX_MEMORY, JsonError, parse
from weightsmith._base.text import status
from weightsmith._files.remote.retries import no_panic
from weightsmith._plans import TextSource

TOKENIZER = "tokenizer.json"
"""The file that cuts a text into tokens."""

BUILT_IN = "built-in"
"""The text that comes with the package: `texts/`, one document per file."""

OWN = "own"
"""The text that a model writes by itself: `own_text.py`."""
OWN_ROWS = 20
"""Rows that a model writes if their number is not given."""
OWN_TOKENS = 128
"""Default number of tokens in such a row, including its start."""

MAX_ROWS = 128
"""Rows taken from a text if their number is not given."""
TOKENS = 512
"""Tokens per row if not given."""
MAX_TEXT_BYTES = 256 << 20
"""The largest text file, and the largest parquet file after decompression."""
MAX_DECODING_BYTES = 512 << 20
"""Memory that decoding a parquet file takes, besides pyarrow's code."""
DECODING_SECONDS = 10
"""CPU time that it takes, and a second more for each 4 MiB of the file."""
PIECE_CHARACTERS = 1 << 20
"""The most characters of a document to encode at once."""
SUFFIXES = (".txt", ".jsonl", ".parquet")
"""Endings of the files that texts are read from."""
SPARE = 8
"""A text is read until it has so many times the tokens that the rows take."""


def text_source(path: str | None, rows: int | None, tokens: int | None, seed: int, option: str = "calibration") -> TextSource:
    """A text file, not yet cut by a tokenizer; None or `built-in`: the built-in text. rows: 0 until they are counted.

    option  that names the file, for messages; "" for none

    Raises WeightsmithError for an unusable file.
    """
    if seed < 0:
        raise option_error("seed", f"must be at least 0 for a calibration, not {seed}")
    if path is None or path == BUILT_IN:
        digest = hashlib.sha256(b"\0".join(text.encode() for text in _built_in())).hexdigest()
        return TextSource(BUILT_IN, digest, rows or 0, tokens or TOKENS, seed)
    if path == OWN:
        what = f"a model writes a text by itself for statistics and calibrations alone, and {show(path)} is no file"
        fix = "write it first: weightsmith write MODEL own.jsonl; then name own.jsonl"
        raise option_error(option, what, fix) if option else ParameterError(what, fix=fix)
    if is_text(path):
        # A plan names its texts, so that it can be run again, on another day.
        what = f"it is a text itself, and the name of a file is needed: {show(path)}"
        fix = (
            "save the text in a .txt file, and name that; only weightsmith.evaluate and weightsmith.tune take texts themselves"
        )
        raise option_error(option, what, fix) if option else ParameterError(what, fix=fix)
    file = expand_user(path).absolute()
    if file.suffix not in _READERS:
        what = f"the text {show(path)} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file"
        itself = "; in Python, a text itself has a space or line break" if option == "text" else ""
        fix = f"name such a file, or {BUILT_IN}{itself}"
        raise option_error(option, what, fix) if option else ParameterError(what, fix=fix)
    if not os.path.lexists(file):
        raise _no_text(path, file)
    if file.suffix == ".parquet" and find_spec("pyarrow") is None:
        what = "a parquet file needs pyarrow, which is not installed"
        raise Unsupported(what, where=path, fix=f"run {install_package('pyarrow')}, or convert the text to .jsonl")
    return TextSource(str(file), _sha256(file), rows or 0, tokens or TOKENS, seed)


def _no_text(path: str, file: Path) -> NotFound:
    """The error for a text that is not there, with the texts that are."""
    siblings = list[str]()
    with contextlib.suppress(OSError):
        siblings = sorted(path.name for path in file.parent.iterdir() if path.suffix in _READERS)
    fix = f"name one of {', '.join(siblings[:5])}{', ...' if len(siblings) > 5 else ''}" if siblings else "check the path"
    return NotFound(f"no such file{nearest(file.name, siblings)}", where=show(str(expand_user(path))), fix=fix)


def rows_of(
    text: TextSource, folder: Path, vocabulary: int, bos: int | None, option: str = "calibration"
) -> npt.NDArray[np.int32]:
    """The rows: int32 [rows, tokens].

    folder      of the model, with tokenizer.json
    vocabulary  rows of the embedding
    bos         the token that begins half of the rows; None, or a number without a row: no such token
    option      as in `text_source`

    Raises ParameterError if the text is too short; CheckpointError if it has changed; NotFound without a tokenizer; FormatError
    for a text that cannot be read or encoded.
    """
    status("tokenizing the text")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    enough, ids = SPARE * (text.rows or MAX_ROWS) * text.tokens, []
    count = 0
    with contextlib.closing(read_pieces(text)) as texts:
        for piece in texts:
            ids.append(np.array(encoded(tokenizer, piece, str(folder / TOKENIZER)).ids, np.int32))
            count += len(ids[-1])
            if count >= enough:
                break
    stream = np.concatenate(ids) if ids else np.empty(0, np.int32)
    available = len(stream) // text.tokens
    rows = text.rows or min(available, MAX_ROWS)
    where = f"--{option} {text.source}" if option else ""
    if not 0 < rows <= available:
        need = max(rows, 1) * text.tokens
        wants = f"{max(rows, 1):,} rows of {text.tokens:,} take {need:,}"
        what = f"the text has {len(stream):,} tokens, but {wants}"
        raise ParameterError(what, where=where, fix="give a longer text, or fewer or shorter rows")
    if stream.max() >= vocabulary:
        what = f"the tokenizer produces token {stream.max()}, but the embedding has {vocabulary} rows"
        raise Unsupported(what, where=str(folder / TOKENIZER), fix="use the model's own tokenizer")
    chosen = np.sort(np.random.default_rng(text.seed).choice(available, rows, replace=False))
    cut = stream[: available * text.tokens].reshape(available, text.tokens)[chosen]
    if bos is not None and 0 <= bos < vocabulary:
        cut[1::2, 1:] = cut[1::2, :-1].copy()
        cut[1::2, 0] = bos
    return cut


def read_pieces(text: TextSource) -> Generator[str, None, None]:
    """The documents of a text, in pieces. Raises CheckpointError if it has changed since the plan was made.

    Reads no more of the file than the pieces that are asked for take.
    """
    if text.source == BUILT_IN:
        texts = _built_in()
        sha256 = hashlib.sha256(b"\0".join(text.encode() for text in texts)).hexdigest()
        _check(sha256, text)
        for document in texts:
            yield from pieces([document])
        return
    path = Path(text.source)
    if path.suffix not in _READERS:
        raise FormatError("a text of an unknown kind", where=str(path), fix="plan again")
    _check(_sha256(path), text)
    with open_bounded(path, MAX_TEXT_BYTES) as file:
        yield from _READERS[path.suffix](file, path)


def pieces(document: Iterable[str]) -> Iterator[str]:
    """A document in pieces of at most `PIECE_CHARACTERS`, which end where a paragraph does; else a line, else a word.

    document  as it is read, in parts of any length
    """
    rest = ""
    for part in document:
        text, start = rest + part, 0
        while len(text) - start > PIECE_CHARACTERS:
            end = start + PIECE_CHARACTERS
            places = ((text.rfind(mark, start, end), len(mark)) for mark in ("\n\n", "\n", " "))
            end = next((place + length for place, length in places if place >= 0), end)
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _check(sha256: str, text: TextSource) -> None:
    if sha256 != text.sha256:
        raise CheckpointError("the text has changed", where=text.source, fix="plan again")


def _built_in() -> list[str]:
    folder = files("weightsmith._activations") / "texts"
    return [path.read_text("utf-8") for path in sorted(folder.iterdir(), key=lambda p: p.name) if path.name.endswith(".txt")]


def _sha256(path: Path) -> str:
    with open_bounded(path, MAX_TEXT_BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _decoded(file: io.FileIO, path: Path) -> Iterator[str]:
    decoder = getincrementaldecoder("utf-8")()
    at = file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
    data = b"?"
    while data:
        data, kept = file.read(_READ_BYTES), len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            what = f"the text is not UTF-8: byte 0x{error.object[error.start]:02x} at offset"
            raise FormatError(f"{what} {at - kept + error.start:,}", where=str(path), fix="save it as UTF-8") from error
        yield text
        at += len(data)


def read_lines(text: TextSource) -> Iterator[tuple[int, Any]]:
    """The number and the JSON value of each line of a .jsonl file. Raises as `read_pieces`."""
    path = Path(text.source)
    _check(_sha256(path), text)
    with open_bounded(path, MAX_TEXT_BYTES) as file:
        yield from _json_values(file, path)


def _json_lines(file: io.FileIO, path: Path) -> Iterator[str]:
    """The `text` of each line, or what is said in its conversation, or all of its strings."""
    for _, value in _json_values(file, path):
        yield from pieces([_text_of(value)])


def _json_values(file: io.FileIO, path: Path) -> Iterator[tuple[int, Any]]:
    with io.BufferedReader(file) as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_MEMORY)  # a longer one is more than `parse` takes
            if not line:
                return
            line = line.removeprefix(BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                value = parse(line, unique=False)
            except JsonError as error:
                raise FormatError(f"line {number} {error}", where=str(path), fix="correct the line, or delete it") from error
            yield number, value


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        return ""
    return text_of(value)


def _parquet(file: io.FileIO, path: Path) -> Iterator[str]:
    """The same of each row. Decoding is bounded in memory, and in time by the size of the file."""
    seconds = DECODING_SECONDS + (os.fstat(file.fileno()).st_size >> 22)
    pool = "system"  # others reserve memory that they never use
    with BoundedScript(
        "parquet_script", "decoding it", MAX_DECODING_BYTES, seconds, file, ARROW_DEFAULT_MEMORY_POOL=pool
    ) as script:
        try:
            yield from _documents(script.out, path)
            return
        except EOFError:
            why = script.failure()
    fix = "make the file again, with smaller rows, or use another text"
    raise FormatError(f"the text cannot be read: {why or 'it ends too early'}", where=str(path), fix=fix)


def _documents(stream: IO[bytes], path: Path) -> Iterator[str]:
    """The texts of `parquet_script.py`, in pieces. Raises EOFError if it ends without its last word."""
    nbytes = 0
    ended = False

    def parts() -> Iterator[str]:
        nonlocal nbytes, ended
        while length := struct.unpack("<i", _exactly(stream, 4))[0]:
            if length < 0:
                ended = True
                return
            nbytes += length
            if nbytes > MAX_TEXT_BYTES:
                what = f"the text has more than {MAX_TEXT_BYTES:,} bytes when it is decompressed"
                raise FormatError(what, where=str(path), fix="use a part of it")
            yield _exactly(stream, length).decode()

    while not ended:
        yield from pieces(parts())


def _exactly(stream: IO[bytes], nbytes: int) -> bytes:
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise EOFError
    return data


_READ_BYTES = 1 << 20
_READERS = {".txt": lambda file, path: pieces(_decoded(file, path)), ".jsonl": _json_lines, ".parquet": _parquet}


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a tokenizer.json. Raises NotFound, FormatError, and Unsupported without the package."""
    if problems := absent_packages(("tokenizers",), "texts", "calibration"):
        raise problems[0]
    from tokenizers import Tokenizer

    if not path.is_file():
        fix = "put the model's tokenizer.json next to its weights"
        raise NotFound("a text needs the model's tokenizer.json", where=show(str(path)), fix=fix)
    try:
        with no_panic():
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # bad files can raise anything
        what = f"the tokenizer cannot be loaded: {first_line(error)}"
        raise FormatError(what, where=str(path), fix="restore the file") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encoded(tokenizer: Any, piece: str, where: str) -> Any:
    """The tokens of a piece of text, as the package `tokenizers` has them. where: the tokenizer. Raises FormatError."""
    try:
        return tokenizer.encode(piece, add_special_tokens=False)
    except Exception as error:  # tokenizers raises anything: no token for unknown text, half of a surrogate pair
        what = f"the tokenizer cannot encode the text: {first_line(error)}"
        raise FormatError(what, where=where, fix="use another text") from error


GivenText = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a text, or several of them."""

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files of the texts of a call.

    paths  of each argument
    names  path → what results call it, for files that hold strings
    """

    paths: Mapping[str, list[str]]
    names: Mapping[str, str]

    def named(self, paths: Sequence[str]) -> tuple[str, ...]:
        """What results call these files."""
        return tuple(self.names.get(path, path) for path in paths)


def is_text(value: str | os.PathLike[str]) -> bool:
    r"""Whether it is a text itself, not the name of a file: it has a space or a line break, and no suffix of a text file.

    >>> [is_text(given) for given in ("Hello, world.", "line\n", "my notes.txt", "notes.text", "built-in")]
    [True, True, False, False, False]
    """
    if not isinstance(value, str) or value == BUILT_IN:
        return False
    if "\n" in value:
        return True
    return any(c.isspace() for c in value) and not value.endswith(SUFFIXES) and not os.path.lexists(value)


@contextmanager
def as_files(**arguments: GivenText) -> Iterator[TextFiles]:
    """Files of the texts of a call. The strings of one argument are the documents of one text, a .jsonl file that is deleted
    at the end."""
    paths, names = dict[str, list[str]](), dict[str, str]()
    with ExitStack() as stack:
        for argument, value in arguments.items():
            items = [value] if isinstance(value, str | os.PathLike) else list(value)
            texts = [item for item in items if is_text(item)]
            paths[argument] = [os.fspath(item) for item in items if not is_text(item)]
            if texts:
                folder = stack.enter_context(TemporaryDirectory(prefix="weightsmith-text-"))
                path = Path(folder, f"{argument}.jsonl")
                path.write_text("".join(f"{json.dumps(text)}\n" for text in texts), "utf-8")
                paths[argument].append(str(path))
                names[str(path)] = _name(str(texts[0]), len(texts))
        yield TextFiles(paths, names)


def _name(first: str, count: int) -> str:
    """What results call the texts of an argument.

    >>> _name("Hello,\\n world.", 3)
    "'Hello, world.' and 2 more"
    """
    start = " ".join(first.split())
    start = start if len(start) <= _SHOWN else f"{start[: _SHOWN - 3]}..."
    return f"'{start}'" + (f" and {count - 1} more" if count > 1 else "")
