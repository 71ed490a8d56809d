"""Rows of tokens of a text: which they are, and how much of a file is read for them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.calibration_help import save_model
from weightsmith._activations import rows
from weightsmith._activations.rows import rows_of, text_source
from weightsmith._base.errors import FormatError, WeightsmithError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama")


def test_rows_are_the_text_and_half_of_them_begin_with_bos(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "abcdefgh"}\n{"title": "ijkl", "n": 3, "body": "mnopqrs"}\n\n')
    calibration = text_source(str(tmp_path / "t.jsonl"), None, 5, 0)
    rows = rows_of(calibration, llama, 256, 1)
    tokens = {chr(b): i for i, b in enumerate(sorted(range(33, 127)))}
    assert rows.shape == (4, 5)
    assert rows[0].tolist() == [tokens[c] for c in "abcde"]
    assert rows[1].tolist() == [1, *(tokens[c] for c in "fghi")]
    assert rows[2, :3].tolist() == [tokens[c] for c in "kl"] + [rows[2, 2]]
    assert (rows[3] != 1).sum() == 4


def test_a_line_of_json_may_hold_other_breaks_of_lines(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "abc\u2028d\x85efgh"}\r\n', encoding="utf-8")
    assert rows_of(text_source(str(tmp_path / "t.jsonl"), 1, 8, 0), llama, 256, None).shape == (1, 8)


def test_a_text_that_cannot_be_encoded_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("b")
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(FormatError, match="the tokenizer cannot encode the text"):
        rows_of(text_source(str(tmp_path / "t.txt"), None, 5, 0), tmp_path, 256, None)


@pytest.mark.parametrize("bos", [-1, 256, 10**12])
def test_a_bos_token_without_a_row_begins_no_row(bos: int, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(map(chr, range(33, 123))))
    calibration = text_source(str(tmp_path / "t.txt"), None, 5, 0)
    assert rows_of(calibration, llama, 256, bos).tolist() == rows_of(calibration, llama, 256, None).tolist()


def test_the_seed_chooses_rows_of_a_long_text(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(map(chr, range(33, 123))))
    by_seed = [rows_of(text_source(str(tmp_path / "t.txt"), 3, 5, seed), llama, 256, None).tolist() for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1]
    assert by_seed[0] != by_seed[2]


class Recorded:
    """A tokenizer that notes the texts it encodes."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.texts: list[str] = []

    def encode(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_long_text_is_encoded_in_pieces_until_there_are_enough_tokens(
    kind: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows as at planning, when their number is not given."""
    text = "One line.\nAnother one.\n\n" * 100
    (tmp_path / "t.txt").write_text(text)
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": text}))
    monkeypatch.setattr(rows, "PIECE_CHARACTERS", 60)
    monkeypatch.setattr(rows, "MAX_ROWS", 4)
    tokenizer = Recorded(llama)
    monkeypatch.setattr(rows, "load_tokenizer", lambda path: tokenizer)
    calibration = text_source(str(tmp_path / f"t.{kind}"), None, 5, 0)
    planned = rows_of(calibration, llama, 256, None)
    assert tokenizer.texts == ["One line.\nAnother one.\n\n" * 2] * 4  # 48 tokens each; 8 · 4 · 5 are enough
    assert planned.shape == (4, 5)
    assert rows_of(replace(calibration, rows=4), llama, 256, None).tolist() == planned.tolist()
    assert len(tokenizer.texts) == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("ab cd ef", ["ab cd ef"]),
        ("abc defgh ijkl", ["abc defgh ", "ijkl"]),
        ("abcdefghijklmno", ["abcdefghij", "klmno"]),
        ("ab\n\nc\nd e f g", ["ab\n\n", "c\nd e f g"]),
        ("ab\nc d efghijk", ["ab\n", "c d ", "efghijk"]),
        ("\nabcdefghijkl", ["\n", "abcdefghij", "kl"]),
    ],
)
def test_pieces_end_where_paragraphs_lines_or_words_do(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PIECE_CHARACTERS", 10)
    assert list(rows.pieces([text])) == expected
    assert list(rows.pieces(text)) == expected, "in whatever parts it is read"
    assert list(rows.pieces([text[:7], "", text[7:]])) == expected


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_text_of_a_conversation_is_what_is_said_in_it(kind: str, tmp_path: Path) -> None:
    talks = [
        {"id": "a", "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]},
        {"id": "b", "messages": [{"role": "user", "content": "So?"}]},
    ]
    shared = [{"id": "c", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]}]
    for lines, said in ((talks, ["Hello\nHi.", "So?"]), (shared, ["Hello\nHi."])):
        path = tmp_path / f"t.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(lines), path)
        assert list(rows.read_pieces(text_source(str(path), None, 5, 0))) == said


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_no_text_may_be_larger_than_the_limit(kind: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"t.{kind}").write_text("a" * 21)
    monkeypatch.setattr(rows, "find_spec", lambda name: name)
    monkeypatch.setattr(rows, "MAX_TEXT_BYTES", 20)
    with pytest.raises(FormatError, match="21 bytes, and at most 20 are read"):
        rows_of(text_source(str(tmp_path / f"t.{kind}"), None, 5, 0), llama, 256, None)


@pytest.mark.slow
def test_a_parquet_file_is_read_and_a_damaged_one_is_one_error(llama: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2], "text": ["abcdefgh", "ijklmnopqrs"]}), path)
    assert rows_of(text_source(str(path), None, 5, 0), llama, 256, None).shape == (3, 5)
    data = path.read_bytes()
    for damaged in (data[:-20], data[:40] + bytes(80) + data[120:], b"PAR1", b""):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="the text cannot be read") as caught:
            rows_of(text_source(str(path), None, 5, 0), llama, 256, None)
        assert "Make the file again" in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 5, 1 << 20])
def test_a_text_is_the_same_in_whatever_parts_it_is_read(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_READ_BYTES", size)
    path = tmp_path / "t.txt"
    for text in ("", "a", "\ufeffab", "aé北😀" * 5, "ab\r\nc\x85"):
        path.write_bytes(text.encode())
        assert "".join(rows.read_pieces(text_source(str(path), None, 5, 0))) == text.removeprefix("\ufeff")
    for data, offset in ((b"abcdef\xff", 6), (b"abcd\xc3", 4), (b"\xef\xbb\xbfabc\xc3\xc3", 6), (b"\xe5\x8c", 0)):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=f"not UTF-8: byte 0x{data[offset]:02x} at offset {offset}"):
            list(rows.read_pieces(text_source(str(path), None, 5, 0)))


def test_a_file_is_read_no_further_than_its_tokens_are_needed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_READ_BYTES", 64)
    monkeypatch.setattr(rows, "PIECE_CHARACTERS", 60)
    (tmp_path / "t.txt").write_bytes(b"abcdefghi " * 60 + b"\xff")
    assert rows_of(text_source(str(tmp_path / "t.txt"), 4, 5, 0), llama, 256, None).shape == (4, 5)  # 160 tokens are enough
    (tmp_path / "t.jsonl").write_bytes(b'"abcdefghi"\n' * 60 + b"{")
    assert rows_of(text_source(str(tmp_path / "t.jsonl"), 4, 5, 0), llama, 256, None).shape == (4, 5)


def test_a_file_beyond_the_limit_is_not_even_hashed(tmp_path: Path) -> None:
    """Which takes many minutes: pytest ends it."""
    with (tmp_path / "t.txt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="at most 268,435,456 are read from a file of this kind"):
        text_source(str(tmp_path / "t.txt"), None, 5, 0)


@pytest.mark.long
@pytest.mark.parametrize("columns", [1, 2])
def test_a_row_of_parquet_is_its_text_or_all_that_is_text(columns: int, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    long = "é" * 2_100_000
    texts = pyarrow.array(["a", None, long, "", "b"]).dictionary_encode()
    table = {"n": [1, 2, 3, 4, 5], "other": ["v", "w", "x", "y", "z"], "l": [["q"]] * 5, "text": texts}
    parquet.write_table(pyarrow.table(dict(list(table.items())[: 2 * columns])), tmp_path / "t.parquet", row_group_size=2)
    pieces = list(rows.read_pieces(text_source(str(tmp_path / "t.parquet"), None, 5, 0)))
    size = rows.PIECE_CHARACTERS
    long_ones = [long[:size], long[size : 2 * size], long[2 * size :]]
    assert pieces == (["v", "w", "x", "y", "z"] if columns == 1 else ["a", "w", *long_ones, "b"])


def write_bomb(path: Path, rows_: int, characters: int) -> Path:
    """A small file of many rows, each the same long text."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows_, pyarrow.int32()), ["a " * (characters // 2)])
    parquet.write_table(pyarrow.table({"text": text}), path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    return path


@pytest.mark.long
def test_what_a_parquet_file_holds_is_bounded_when_it_is_decompressed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_TEXT_BYTES", 50_000)
    path = write_bomb(tmp_path / "t.parquet", 100, 1000)
    assert rows_of(text_source(str(path), 4, 5, 0), llama, 256, None).shape == (4, 5)
    with pytest.raises(FormatError, match="more than 50,000 bytes when it is decompressed"):
        rows_of(text_source(str(path), 1000, 50, 0), llama, 256, None)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MAX_DECODING_BYTES", 64 << 20, r"reading it (takes more than 64 MiB|was aborted, with a limit of 64 MiB) of memory"),
        ("DECODING_SECONDS", 1, "decoding it takes more than 1 seconds"),
    ],
)
def test_decoding_a_parquet_file_is_bounded_in_memory_and_time(
    limit: str, value: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bomb(tmp_path / "t.parquet", *((2_000_000, 0) if limit == "DECODING_SECONDS" else (8, 100_000_000)))
    monkeypatch.setattr(rows, limit, value)
    with pytest.raises(FormatError, match=said):
        list(rows.read_pieces(text_source(str(path), None, 5, 0)))


@pytest.mark.process
@pytest.mark.slow
def test_a_bomb_of_parquet_takes_no_memory(llama: Path, tmp_path: Path) -> None:
    """256 rows of 20 MB in a few kB took 5.6 GB and 100 seconds; here enough of them is read, and no more."""
    path = write_bomb(tmp_path / "t.parquet", 256, 20_000_000)
    code = f"""
import resource
from pathlib import Path
from weightsmith._activations.rows import rows_of, text_source
print(rows_of(text_source({str(path)!r}, None, 64, 0), Path({str(llama)!r}), 256, 1).shape)
[peak] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(int(peak) >> 10)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shape, *used = ran.stdout.splitlines()
    assert shape == "(128, 64)"
    assert max(map(int, used)) < 700


def test_a_parquet_file_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("weightsmith._activations.rows.find_spec", lambda name: None)
    with pytest.raises(WeightsmithError, match="a parquet file needs pyarrow"):
        text_source(str(tmp_path / "t.parquet"), None, None, 0)


def test_the_built_in_text_suffices_for_a_calibration(llama: Path) -> None:
    calibration = text_source(None, None, None, 0)
    assert rows_of(calibration, llama, 256, None).shape == (128, 512)
