"""What is kept of a golden case, and how a result is compared with it.

A record is JSON:

    files     name → sha256, of every weight file, the index and config.json; tensors that stay in memory are one file, `memory`
    tensors   8 hex digits of the sha256 of each tensor's bytes, in the order of the names: to say which ones differ

and, where the bytes depend on the machine (`Golden.portable` is false):

    platform  what they were made on
    summary   tensor → sum, sum of squares and four elements, in float64

On the platform of the record the files must have the same bytes; on another the summaries must agree within 2 ulp of the
tensor's dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, nullcontext, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.cases import Golden
from tests.golden.inputs import CODES

TABLE = Path(__file__).with_name("digests.json")
DTYPES = {code: dtype for dtype, code in CODES.items()}
FRACTION_BITS = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52}
MEMORY = "memory"

Record = dict[str, Any]
Table = dict[str, Any]


def load() -> Table:
    """The table: `inputs`, name → sha256, and `cases`, name → record."""
    table: Table = json.loads(TABLE.read_text())
    return table


def dump(table: Table) -> None:
    """Write the table, a record a line."""
    blocks = []
    for key in ("inputs", "cases"):
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(table[key].items())]
        blocks.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
    TABLE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


# ---- what a case makes


def record(case: Golden, inputs: Path, **options: Any) -> Record:
    """Run a case in the folder of inputs.

    options  threads, max_memory_bytes
    """
    threads = nullcontext() if case.portable else _one_torch_thread()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder, chdir(inputs), threads:
        out = Path(folder) / "out"
        returned = case.run(out, **options)
        tensors = read_checkpoint(out) if returned is None else returned
        files = folder_digests(out) if returned is None else {MEMORY: _arrays_digest(tensors)}
        short = " ".join(hashlib.sha256(_bytes(tensors[name])).hexdigest()[:8] for name in sorted(tensors))
        entry: Record = {"files": files, "tensors": short}
        if not case.portable:
            entry |= {"platform": fingerprint(), "summary": {name: _summary(array) for name, array in sorted(tensors.items())}}
        entry["names"] = sorted(tensors)
    return entry


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """How many threads torch has changes its sums, and other tests set it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def folder_digests(folder: Path) -> dict[str, str]:
    """sha256 of each file whose bytes are pinned."""
    pinned = [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json", folder / "config.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(pinned) if path.exists()}


def tree_digest(path: Path) -> str:
    """sha256 of a file, or of all files of a folder with their names."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def read_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by a reader of the golden tests' own."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                body = data[8 + size + start : 8 + size + end]
                tensors[name] = np.frombuffer(body, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def _arrays_digest(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in tensors.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + _bytes(array))
    return digest.hexdigest()


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _probes(size: int) -> list[int]:
    return [0, size // 3, 2 * size // 3, size - 1] if size else []


def _summary(array: np.ndarray) -> list[Any]:
    """dtype, elements, sum, sum of squares, four elements."""
    flat = array.reshape(-1).astype(np.float64)
    probes = [float(flat[i]) for i in _probes(flat.size)]
    return [CODES[array.dtype], flat.size, math.fsum(flat), math.fsum(flat * flat), *probes]


# ---- comparing


def differences(old: Record, new: Record) -> list[str]:
    """What differs between a record of the table and what a run made; [] where the result is accepted."""
    if "platform" in old and old["platform"] != new.get("platform"):
        return _beyond_tolerance(old["summary"], new.get("summary", {}))
    lines = [
        f"{name}: {old['files'].get(name, 'no such file')} -> {new['files'].get(name, 'no such file')}"
        for name in sorted(old["files"].keys() | new["files"].keys())
        if old["files"].get(name) != new["files"].get(name)
    ]
    if ("platform" in old) != ("platform" in new):
        lines.append("portable in one and not in the other")
    return [*lines, _tensors(old, new)] if lines else []


def _tensors(old: Record, new: Record) -> str:
    """One line: which tensors differ."""
    before, after = old["tensors"].split(), new["tensors"].split()
    if len(before) != len(after):
        return f"{len(before)} tensors -> {len(after)} tensors"
    changed = [name for name, x, y in zip(new["names"], before, after, strict=True) if x != y]
    return f"tensors that differ, {len(changed)} of {len(after)}: {', '.join(changed[:12]) or 'none, only names or layout'}"


def _beyond_tolerance(old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> list[str]:
    """Tensors whose summaries differ by more than rounding does.

    Of n elements each off by 2 ulp (of a value as large as the tensor's root mean square), at random, a sum is off by about
    2 ulp · √n, and a sum of squares by twice the root mean square times that.
    """
    lines = [f"{name}: only in one of the two" for name in sorted(old.keys() ^ new.keys())]
    for name in sorted(old.keys() & new.keys()):
        (code, size, total, squares, *probes), after = old[name], new[name]
        if [code, size] != after[:2]:
            lines.append(f"{name}: {code} of {size} elements -> {after[0]} of {after[1]}")
            continue
        rms = math.sqrt(squares / size) if size else 0.0
        spread = 2 * _ulp(rms, code) * math.sqrt(size)
        if not abs(total - after[2]) <= spread:
            lines.append(f"{name}: sum {total} -> {after[2]}, tolerance {spread:.3g}")
        if not abs(squares - after[3]) <= 2 * rms * spread:
            lines.append(f"{name}: sum of squares {squares} -> {after[3]}, tolerance {2 * rms * spread:.3g}")
        for i, x, y in zip(_probes(size), probes, after[4:], strict=True):
            if not abs(x - y) <= 2 * _ulp(max(abs(x), rms), code):
                lines.append(f"{name}: element {i} is {x} -> {y}")
    return lines


def _ulp(value: float, code: str) -> float:
    """Distance from a value to the next of its dtype, subnormals left out."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1 - FRACTION_BITS[code]) if value else 0.0


@cache
def fingerprint() -> str:
    """What results of linear algebra depend on: processor and versions."""
    parts = [platform.system(), platform.machine(), *_processor()]
    for package in ("numpy", "torch", "transformers"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    with suppress(ImportError):
        import torch

        parts.append(str(torch.backends.cpu.get_cpu_capability()))
    return ", ".join(parts)


def _processor() -> list[str]:
    """Model, family and features, which say more than the name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return [platform.processor()]
    keys = ("model name", "cpu family", "model", "stepping")
    first = {key: match[1].strip() for key in keys if (match := re.search(rf"^{key}\s*:(.*)$", text, re.M))}
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    return [*first.values(), "features " + hashlib.sha256((flags[1] if flags else "").encode()).hexdigest()[:8]]
