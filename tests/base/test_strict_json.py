"""The reader of JSON: what it refuses, and that its bounds of memory are bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsmith._base import strict_json
from weightsmith._base.errors import FormatError
from weightsmith._base.strict_json import MAX_DEPTH, MAX_DIGITS, JsonError, parse, read_object, texts


@pytest.mark.parametrize("value", [None, 1, -1.5, "é", [], {}, {"a": [{"b": [1, None, True]}]}, "😀", "\x1b", float("inf")])
def test_what_python_writes_is_read(value: Any) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize("unit", ["[]", '{{"a":{}}}'])
def test_levels_are_counted(unit: str) -> None:
    def nested(depth: int) -> bytes:
        text = "[" * depth + "]" * depth if unit == "[]" else '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)
        return f'{{"x": [1, 2], "y": {text}, "z": 3}}'.encode()

    parse(nested(MAX_DEPTH - 1))
    with pytest.raises(JsonError, match="nested too deeply: more than 64 levels"):
        parse(nested(MAX_DEPTH))
    with pytest.raises(JsonError, match="nested too deeply"):
        parse(nested(200_000))


def test_an_integer_that_float_does_not_take_is_refused() -> None:
    assert float(parse(b"-" + b"9" * (MAX_DIGITS - 1))) < 0
    assert parse(b"9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    for digits in (MAX_DIGITS + 1, 4300, 5000, 1_000_000):
        with pytest.raises(JsonError, match=f"an integer of {digits:,} digits: at most 300"):
            parse(b"[" + b"9" * digits + b"]")
    assert parse(b'"' + b"9" * 1000 + b'"') == "9" * 1000
    assert parse(b"0." + b"9" * 1000) == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1, "a": 2}', "the name 'a' twice"),
        (b'"\\ud800"', "lone surrogate"),
        (b'{"\\uDFFFx": 1}', "lone surrogate"),
        (b"\xff", "not UTF-8: byte 0xff at byte 0"),
        (b"", "is not JSON"),
        (b"[1,]", "is not JSON"),
    ],
)
def test_what_is_no_json_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(JsonError, match=words):
        parse(text)


def test_a_pair_of_surrogates_is_text() -> None:
    assert parse(b'"\\ud83d\\ude00"') == "😀"
    assert parse(b'{"a": 1, "a": 2}', unique=False) == {"a": 2}


def test_texts_are_keys_and_values_at_any_depth() -> None:
    assert sorted(texts({"a": ["b", {"c": 1}], "d": None})) == ["a", "b", "c", "d"]


def test_a_file_that_is_no_object_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1]")
    with pytest.raises(FormatError, match=rf"{path}: it is not a JSON object but \[1\]\n  -> Mend it"):
        read_object(path, 100, "it", "mend it")
    path.write_text(" " * 101)
    with pytest.raises(FormatError, match="101 bytes, and at most 100 are read"):
        read_object(path, 100, "it", "mend it")


MEASURE = """
import re, sys
from pathlib import Path
from weightsmith._base import strict_json

def status(key):
    return int(re.search(rf"^{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10

unit, times, names = eval(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "names"
if sys.argv[3] == "long":
    unit = unit.replace(b"x" * 99, b"x" * 20_000_000)
items = (unit.replace(b"#", b"%d" % i) for i in range(times))
data = b"{" + b",".join(items) + b"}" if names else b"[" + b",".join(items) + b"]"
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
value = strict_json.parse(data)
print(strict_json._memory(data), status("VmHWM") - before + len(data))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
@pytest.mark.parametrize(
    ("unit", "times", "names"),
    [
        (b"[]", 300_000, ""),
        pytest.param(b"{}", 300_000, "", marks=pytest.mark.sweep),
        pytest.param(b"[[[[]]]]", 100_000, "", marks=pytest.mark.sweep),
        pytest.param(b'{"a":1}', 150_000, "", marks=pytest.mark.sweep),
        (b'{"a#":1}', 150_000, ""),
        pytest.param(b"#.5", 300_000, "", marks=pytest.mark.sweep),
        pytest.param(b'"#"', 300_000, "", marks=pytest.mark.sweep),
        pytest.param(b'"#":#', 300_000, "names", marks=pytest.mark.sweep),
        pytest.param(b'"k#":"v#"', 200_000, "names", marks=pytest.mark.sweep),
        (b'"#":{"dtype":"F32","shape":[#],"data_offsets":[#,#]}', 150_000, "names"),
        pytest.param(b'"' + b"x" * 99 + b'"', 1, "long", marks=pytest.mark.sweep),
        (b'"' + b"x" * 99 + "😀".encode() + b'"', 1, "long"),
        pytest.param(b'"' + b"x" * 99 + rb'\ud83d\ude00"', 1, "long", marks=pytest.mark.sweep),
    ],
)
def test_the_bound_of_memory_is_one(unit: bytes, times: int, names: str) -> None:
    """Against what a process has taken at most; and it is not so high that files in use are refused."""
    command = [sys.executable, "-c", MEASURE, repr(unit), str(times), names]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    bound, taken = map(int, ran.stdout.split())
    assert taken < 1.1 * bound
    assert bound < max(8 * taken, 100 << 20)


@pytest.mark.process
@pytest.mark.slow
def test_what_would_take_too_much_memory_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    for text in (b"[" + b"[]," * 6_000_000 + b"[]]", b"x" * 150_000_000, "é".encode() * 30_000_000):
        with pytest.raises(JsonError, match=r"would take up to \d,?\d* MiB of memory: at most 400 are allowed"):
            parse(text)


def test_the_bound_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = strict_json._memory(b"[[],[]]")
    parse(b"[[],[]]", max_memory=needed)
    with pytest.raises(JsonError, match="of memory"):
        parse(b"[[],[]]", max_memory=needed - 1)


@pytest.mark.process
@pytest.mark.slow
def test_a_header_and_an_index_of_100_000_tensors_fit() -> None:
    names = [f"model.layers.{i // 700}.mlp.experts.{i % 700}.gate_proj.weight" for i in range(100_000)]
    entry = {"dtype": "BF16", "shape": [4096, 14336], "data_offsets": [10**12, 10**12]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    index = json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00100.safetensors")}, indent=2).encode()
    assert strict_json._memory(header) < 0.6 * strict_json.MAX_MEMORY
    assert strict_json._memory(index) < 0.2 * strict_json.MAX_MEMORY
