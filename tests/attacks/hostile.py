"""Hostile and damaged safetensors files: bytes that must be refused, and the words the refusal must hold.

Each case is a whole file, built from literal JSON: a reader sees at once what is wrong with it. To get one on disk:
`python tests/attacks/hostile.py NAME > file.safetensors`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from weightsmith._base.errors import CheckpointError, FormatError, Unsupported


def build(header: str | bytes, data: bytes = b"") -> bytes:
    """A safetensors file of this header text and this tensor data."""
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]") -> str:
    """One header entry; each part is raw JSON."""
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


@dataclass(frozen=True)
class Case:
    """name, file, error, and words that the message must hold."""

    name: str
    file: bytes
    words: tuple[str, ...]
    error: type[CheckpointError] = FormatError


def _one(name: str, part: str, *words: str, error: type[CheckpointError] = FormatError, data: bytes = bytes(4)) -> Case:
    """A case with the single tensor 'w'."""
    return Case(name, build(f'{{"w":{part}}}', data), ("tensor 'w'", *words), error)


GOOD = build(f'{{"w":{entry()}}}', bytes(4))
F32 = entry()

CASES = (
    # The file as a whole.
    Case("empty", b"", ("0 bytes: too short", "interrupted")),
    Case("seven_bytes", bytes(7), ("7 bytes: too short",)),
    Case("header_length_over_bound", (100_000_001).to_bytes(8, "little") + bytes(50), ("100,000,001", "100,000,000")),
    Case("header_length_all_ones", b"\xff" * 64, ("header length 18,446,744,073,709,551,615",)),
    Case("header_length_beyond_file", GOOD[:30], ("header length 54", "ends after 30 bytes", "32 bytes", "interrupted")),
    Case("git_lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ("git lfs pull",)),
    Case("torch_zip", b"PK\x03\x04" + b"\x14\x00" * 40, ("PyTorch checkpoint", "rename it to .bin")),
    Case("pickle", b"\x80\x02}q\x00(X\x05\x00\x00\x00" * 4, ("pickle",)),
    Case("gguf", b"GGUF\x03\x00\x00\x00" * 4, ("GGUF file",)),
    Case("web_page", b"<!DOCTYPE html><html>Not found</html>", ("web page",)),
    # The header's text.
    Case("header_empty", build(""), ("the header is not JSON",)),
    Case("header_of_nuls", build(bytes(40)), ("the header is not JSON",)),
    Case("header_not_utf8", build(b'{"\xff":1}'), ("not UTF-8", "0xff at byte 2")),
    Case("header_with_bom", build(b"\xef\xbb\xbf{}"), ("the header is not JSON",)),
    Case("header_cut_json", build('{"w":'), ("the header is not JSON",)),
    Case("header_two_objects", build("{}{}"), ("the header is not JSON", "Extra data")),
    Case("header_is_list", build("[]"), ("not a JSON object but []",)),
    Case("header_is_number", build("7"), ("not a JSON object but 7",)),
    Case("header_is_nan", build("NaN"), ("not a JSON object but nan",)),
    Case("deep_lists", build("[" * 200_000), ("nested too deeply",)),
    Case("lists_in_65_levels", build('{"w":' + "[" * 64 + "]" * 64 + "}"), ("nested too deeply: more than 64",)),
    Case("a_list_of_6_million_lists", build("[" + "[]," * 6_000_000 + "[]]"), ("of memory: at most 400",)),
    Case("deep_objects", build('{"a":' * 200_000), ("nested too deeply",)),
    Case("deep_dimension", build(f'{{"w":{entry(shape="[" * 9_000 + "]" * 9_000)}}}', bytes(4)), ("nested too deeply",)),
    Case(
        "integer_of_5000_digits",
        build(f'{{"w":{entry(shape="[" + "9" * 5_000 + "]")}}}', bytes(4)),
        ("an integer of 5,000 digits",),
    ),
    Case("duplicate_tensor", build(f'{{"w":{F32},"w":{entry(offsets="[4,8]")}}}', bytes(8)), ("the name 'w' twice",)),
    Case(
        "duplicate_tensor_other_spelling",
        build(f'{{"w":{F32},"\\u0077":{entry(offsets="[4,8]")}}}', bytes(8)),
        ("the name 'w' twice",),
    ),
    Case("duplicate_key", build(f'{{"w":{F32[:-1]},"shape":[1]}}}}', bytes(4)), ("the name 'shape' twice",)),
    Case("duplicate_metadata", build('{"__metadata__":{"a":"1","a":"2"}}'), ("the name 'a' twice",)),
    Case("lone_surrogate", build(f'{{"w\\ud800":{F32}}}', bytes(4)), ("lone surrogate",)),
    # Metadata.
    Case("metadata_list", build('{"__metadata__":["pt"]}'), ("__metadata__ is not a JSON object but ['pt']",)),
    Case("metadata_number", build('{"__metadata__":{"a":1}}'), ("__metadata__", "'a' is not a string but 1")),
    Case("metadata_nested", build('{"__metadata__":{"a":{}}}'), ("'a' is not a string but {}",)),
    # One entry.
    _one("entry_is_list", '["F32",[1],[0,4]]', "not a JSON object but ['F32', [1], [0, 4]]"),
    _one("entry_is_null", "null", "not a JSON object but None"),
    _one("missing_dtype", '{"shape":[1],"data_offsets":[0,4]}', "misses dtype"),
    _one("missing_two", '{"dtype":"F32"}', "misses data_offsets, shape"),
    _one("extra_key", F32[:-1] + ',"stride":[1]}', "unknown key 'stride'"),
    _one("dtype_number", entry(dtype="5"), "dtype is not a string but 5"),
    _one("dtype_list", entry(dtype='["F32"]'), "dtype is not a string but ['F32']"),
    _one("dtype_unknown", entry(dtype='"F4"'), "dtype 'F4'", "F64, F32, F16, BF16", "BOOL", error=Unsupported),
    _one("dtype_lower_case", entry(dtype='"f32"'), "dtype 'f32'", error=Unsupported),
    _one("shape_string", entry(shape='"1"'), "shape is not a list but '1'"),
    _one("shape_object", entry(shape="{}"), "shape is not a list but {}"),
    _one("dimension_bool", entry(shape="[true]"), "holds True, which is not an integer"),
    _one("dimension_float", entry(shape="[1.0]"), "holds 1.0, which is not an integer"),
    _one("dimension_string", entry(shape='["1"]'), "holds '1', which is not an integer"),
    _one("dimension_infinite", entry(shape="[Infinity]"), "holds inf, which is not an integer"),
    _one("dimension_negative", entry(shape="[-1]"), "negative dimension -1"),
    _one("dimensions_negative_twice", entry(shape="[-1,-1]"), "negative dimension -1"),
    _one("dimension_huge", entry(shape="[9223372036854775808]"), "overflows"),
    _one("product_wraps_to_4_bytes", entry(shape="[4611686018427387905]"), "overflows"),
    _one("product_huge_times_zero", entry(shape="[4294967296,4294967296,0]", offsets="[0,0]"), "overflows", data=b""),
    _one("too_many_dimensions", entry(shape=f"[{'1,' * 64}1]"), "65 dimensions", "at most 64"),
    _one("a_million_dimensions", entry(shape=f"[{'9,' * 999_999}9]"), "1,000,000 dimensions"),
    _one("offsets_string", entry(offsets='"0,4"'), "data_offsets is not a list of two integers but '0,4'"),
    _one("offsets_one", entry(offsets="[0]"), "not a list of two integers but [0]"),
    _one("offsets_three", entry(offsets="[0,2,4]"), "not a list of two integers"),
    _one("offsets_bool", entry(offsets="[false,4]"), "not a list of two integers but [False, 4]"),
    _one("offsets_float", entry(offsets="[0,4.0]"), "not a list of two integers but [0, 4.0]"),
    _one("offsets_negative", entry(offsets="[-4,0]"), "data_offsets [-4, 0] are negative"),
    _one("offsets_reversed", entry(offsets="[4,0]"), "data_offsets [4, 0] are reversed"),
    _one("offsets_huge", entry(offsets="[9223372036854775804,9223372036854775808]"), "out of range: beyond 2^63"),
    _one("offsets_of_300_digits", entry(offsets=f"[0,{'9' * 300}]"), "out of range: beyond 2^63"),
    Case(
        "offsets_of_301_digits",
        build(f'{{"w":{entry(offsets="[0," + "9" * 301 + "]")}}}', bytes(4)),
        ("the header has an integer of 301 digits: at most 300",),
    ),
    _one("bytes_too_few", entry(shape="[2]"), "shape [2] of F32 takes 8 bytes", "[0, 4] hold 4"),
    _one("bytes_too_many", entry(dtype='"F16"'), "shape [1] of F16 takes 2 bytes", "[0, 4] hold 4"),
    _one("scalar_without_bytes", entry(shape="[]", offsets="[0,0]"), "takes 4 bytes", "hold 0", data=b""),
    # The entries together, and the data.
    _one("hole_at_the_start", entry(offsets="[4,8]"), "starts at 4", "a hole of 4 bytes", data=bytes(8)),
    Case(
        "hole_between",
        build(f'{{"a":{F32},"b":{entry(offsets="[8,12]")}}}', bytes(12)),
        ("tensor 'b' starts at 8", "tensor 'a' ends at 4", "a hole of 4 bytes"),
    ),
    Case(
        "overlap",
        build(f'{{"a":{F32},"b":{entry(offsets="[2,6]")}}}', bytes(6)),
        ("tensor 'b' starts at 2", "tensor 'a' ends at 4", "overlap"),
    ),
    Case("same_bytes_twice", build(f'{{"a":{F32},"b":{F32}}}', bytes(4)), ("'b'", "'a'", "overlap")),
    Case(
        "empty_tensor_inside_another",
        build(f'{{"a":{F32},"b":{entry(shape="[0]", offsets="[2,2]")}}}', bytes(4)),
        ("tensor 'b' starts at 2", "overlap"),
    ),
    _one("out_of_range", entry(offsets="[1000000,1000004]"), "starts at 1,000,000, out of range", "4 bytes of data"),
    Case("truncated_by_one_byte", GOOD[:-1], ("truncated: 1 of 4 bytes", "interrupted")),
    Case("truncated_before_the_data", GOOD[:-4], ("truncated: 4 of 4 bytes",)),
    Case("trailing_byte", GOOD + b"\0", ("1 trailing bytes", "end at 4", "the data at 5")),
    Case("data_without_tensors", build("{}", bytes(3)), ("3 trailing bytes",)),
)


if __name__ == "__main__":
    sys.stdout.buffer.write(next(case.file for case in CASES if case.name == sys.argv[1]))
