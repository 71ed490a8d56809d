"""zip: where the bytes of each member of an archive are.

    members      a local header of 30 bytes, the name, extra fields, then the data; nothing else may overlap them
    directory    one entry a member: name, sizes, place of its local header
    end          the directory's place and size; before it, for large archives, the zip64 end and its locator

Stricter than a general reader: no comment, no bytes before or behind the archive, no encryption, no second disk.
Anything that two readers could interpret differently is an error. No member's data is read. Python's zipfile is no help
here: it takes comments, bytes before the archive, a wrong number of members and two equal names, guesses the encoding of
names, cuts them at NUL, and reads a directory of any size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED, INTERRUPTED, RandomAccess, show

MAX_DIRECTORY_BYTES = 64 << 20  # 250,000 entries of torch take about 20 MB
MAX_RECORDS = 250_000

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # the value is in a zip64 field
_ENCRYPTED, _SIZES_BEHIND = 1, 8  # bits of the flags


@dataclass(frozen=True, slots=True)
class Record:
    """Place of one member's data.

    offset      of its first byte, from the start of the file
    nbytes      its size in the file
    compressed  these bytes are not the member's own
    """

    offset: int
    nbytes: int
    compressed: bool


def _invalid(problem: str, fix: str = DAMAGED) -> FormatError:
    return FormatError(f"the zip archive {problem}", fix=fix)


def read_at(file: RandomAccess, offset: int, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes at `offset`. Raises FormatError when the file ends before, CheckpointError on an I/O error."""
    data = file.read_at(offset, nbytes)
    if len(data) < nbytes:
        raise FormatError(f"ends at byte {offset + len(data):,}, {nbytes - len(data):,} bytes early", fix=DAMAGED)
    return data


def read_records(file: RandomAccess, nbytes: int) -> tuple[dict[str, Record], bytes]:
    """The members of a zip archive by name, in the directory's order, and the directory's bytes (for a checksum).

    nbytes  size of the file

    Directory entries of folders are left out. Raises FormatError: not a zip archive, cut off, too large a directory,
    members that are encrypted, overlap or lie outside the file, names that are absolute, climb with `..`,
    are not UTF-8 or appear twice, local headers that contradict the directory. The errors do not name the file. Cost: one
    small read a member.
    """
    start, size, count = _find_directory(file, nbytes)
    if size > MAX_DIRECTORY_BYTES or count > MAX_RECORDS:
        raise _invalid(
            f"has a directory of {size:,} bytes and {count:,} members; at most {MAX_DIRECTORY_BYTES:,} bytes and "
            f"{MAX_RECORDS:,} members are read"
        )
    directory = read_at(file, start, size)
    records: dict[str, Record] = {}
    spans: list[tuple[int, int, str]] = []
    position = 0
    for _ in range(count):
        if position + _ENTRY.size > size:
            raise _invalid(f"has {len(spans):,} members in its directory, and says {count:,}")
        name, header, record, position = _read_entry(file, directory, start, position)
        if name in records:
            raise _invalid(f"has the member {show(name)} twice")
        spans.append((header, record.offset + record.nbytes, name))
        records[name] = record
    if position != size:
        raise _invalid(f"has {size - position:,} unknown bytes in its directory, behind the {count:,} members that it lists")
    _check_overlaps(spans)
    return {name: record for name, record in records.items() if not name.endswith("/")}, directory


def _read_entry(file: RandomAccess, directory: bytes, start: int, position: int) -> tuple[str, int, Record, int]:
    """The member that the directory, at byte `start` of the file, lists at a position.

    Its name, the place of its local header, its data, and where the next entry begins.
    """
    fields = _ENTRY.unpack_from(directory, position)
    magic, _, _, flags, method, _, _, _, packed, unpacked, name_len, extra_len, comment_len, disk, _, _, header = fields
    name_end = position + _ENTRY.size + name_len
    end = name_end + extra_len + comment_len
    if magic != b"PK\x01\x02" or end > len(directory):
        raise _invalid(f"has a damaged directory: no entry at byte {start + position:,}")
    raw = directory[name_end - name_len : name_end]
    name = _check_name(raw)
    if flags & _ENCRYPTED:
        raise _invalid(f"has the encrypted member {show(name)}", fix="Decrypt it first.")
    unpacked, packed, header, disk = _sizes((unpacked, packed, header, disk), directory[name_end : name_end + extra_len], name)
    if disk != 0:
        raise _invalid(f"is one of several disks: member {show(name)} is on disk {disk}")
    if method == 0 and packed != unpacked:
        raise _invalid(f"has two sizes for the stored member {show(name)}: {packed:,} and {unpacked:,} bytes")
    if header + _LOCAL.size + name_len > start:
        raise _invalid(f"has the member {show(name)} at byte {header:,}, behind the last possible place for it")
    data = _data_offset(file, header, raw, method, (packed, unpacked))
    if data + packed > start:
        raise _invalid(f"has the member {show(name)} of {packed:,} bytes at byte {data:,}; the data ends at byte {start:,}")
    return name, header, Record(data, packed, method != 0), end


def _find_directory(file: RandomAccess, nbytes: int) -> tuple[int, int, int]:
    """Offset and size of the directory in bytes, number of its entries."""
    tail_start = max(0, nbytes - _END.size - _LOCATOR.size)
    tail = read_at(file, tail_start, nbytes - tail_start)
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\x05\x06":
        raise _invalid(
            f"does not end with a directory: cut off after {nbytes:,} bytes, or followed by other bytes", INTERRUPTED
        )
    _, disk, first_disk, here, count, size, start, comment = _END.unpack(tail[-_END.size :])
    end = nbytes - _END.size
    if comment:
        raise _invalid(f"says that a comment of {comment:,} bytes follows its end, and the file ends there")
    if tail[: -_END.size][:4] == b"PK\x06\x07":
        _, locator_disk, end64, disks = _LOCATOR.unpack(tail[: _LOCATOR.size])
        if end64 + _END64.size != end - _LOCATOR.size or locator_disk != 0 or disks > 1:
            raise _invalid(
                f"has its zip64 end at byte {end64:,} according to its locator, which is not in front of the locator"
            )
        end = end64
        magic, length, _, _, disk64, first64, here64, count64, size64, start64 = _END64.unpack(
            read_at(file, end64, _END64.size)
        )
        if magic != b"PK\x06\x06" or length != _END64.size - 12:
            raise _invalid(f"has no zip64 end at byte {end64:,}, where its locator says that it is")
        for narrow, full, wide in (
            (disk, _FULL16, disk64),
            (first_disk, _FULL16, first64),
            (here, _FULL16, here64),
            (count, _FULL16, count64),
            (size, _FULL32, size64),
            (start, _FULL32, start64),
        ):
            if narrow not in (full, wide):
                raise _invalid(f"has two ends that contradict each other: {narrow:,} and {wide:,}")
        disk, first_disk, here, count, size, start = disk64, first64, here64, count64, size64, start64
    if disk or first_disk or here != count:
        raise _invalid("is one of several disks")
    if start + size != end:
        raise _invalid(
            f"has its directory at bytes {start:,} to {start + size:,} according to its end, which is at byte {end:,}: "
            "bytes were added or lost"
        )
    return start, size, count


def _check_name(raw: bytes) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise _invalid(f"has a member whose name is not UTF-8: {show(raw)}") from error
    parts = name.removesuffix("/").split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _invalid(
            f"has a member whose name is no plain relative path: {show(name)}",
            "Get the file from a source you trust, and do not unpack this one: no PyTorch file has such a name.",
        )
    return name


def _sizes(narrow: tuple[int, int, int, int], extra: bytes, name: str) -> tuple[int, ...]:
    """Both sizes, header and disk of a directory entry: what does not fit there is in its zip64 extra field."""
    *sizes, disk = narrow
    wide = [value == _FULL32 for value in sizes]
    if not any(wide) and disk != _FULL16:
        return narrow
    values = _wide_values(extra, sum(wide) + (disk == _FULL16))
    if values is None:
        raise _invalid(f"has no valid zip64 sizes for the member {show(name)}")
    sizes = [values.pop(0) if is_wide else size for is_wide, size in zip(wide, sizes, strict=True)]
    return (*sizes, 0 if disk == _FULL16 and values == [0] else disk)


def _wide_values(extra: bytes, n_values: int) -> list[int] | None:
    """The values of the one zip64 extra field of a directory entry, None when they are not there."""
    fields: list[bytes] = []
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if position + 4 + length > len(extra):
            return None
        if kind == 1:
            fields.append(extra[position + 4 : position + 4 + length])
        position += 4 + length
    if len(fields) != 1 or not 0 < n_values <= 4:
        return None
    field = fields[0]
    values = [int.from_bytes(field[i : i + 8], "little") for i in range(0, len(field) // 8 * 8, 8)]
    if len(field) % 8 == 4:  # the number of the disk, the last of the four
        values.append(int.from_bytes(field[-4:], "little"))
    return values if len(values) >= n_values else None


def _data_offset(file: RandomAccess, header: int, name: bytes, method: int, sizes: tuple[int, int]) -> int:
    """Offset of a member's data: behind its local header, which must say the same as the directory."""
    data = read_at(file, header, _LOCAL.size + len(name))
    magic, _, flags, local_method, _, _, _, *local_sizes, name_len, extra_len = _LOCAL.unpack_from(data)
    unknown = (_FULL32, 0) if flags & _SIZES_BEHIND else (_FULL32,)
    if (
        magic != b"PK\x03\x04"
        or data[_LOCAL.size :] != name
        or name_len != len(name)
        or flags & _ENCRYPTED
        or local_method != method
        or any(local not in (size, *unknown) for local, size in zip(local_sizes, sizes, strict=True))
    ):
        raise _invalid(
            f"has the member {show(name.decode())} at byte {header:,} according to its directory, and something else is there"
        )
    return header + _LOCAL.size + name_len + extra_len


def _check_overlaps(spans: list[tuple[int, int, str]]) -> None:
    covered, before = 0, ""
    for header, end, name in sorted(spans):
        if header < covered:
            raise _invalid(
                f"has overlapping members: {show(name)} starts at byte {header:,}, {show(before)} ends at {covered:,}"
            )
        covered, before = end, name
