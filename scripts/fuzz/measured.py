"""What was measured of a model: importances, errors of encodings, statistics."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import Kind, Rng
from scripts.fuzz.mutators import mutate_checksummed, mutate_gguf, mutate_json


def _make_imatrix() -> None:
    """`m`, a model, and the importances of its columns in both forms of a file."""
    import numpy as np

    from tests.calibration_help import save_model
    from weightsmith._base.tensors import DTYPES, TensorSpec
    from weightsmith._models.formats.gguf.imatrix import imatrix_bytes
    from weightsmith._models.formats.gguf.layout import encode_metadata, make_layout

    save_model(Path("m"))
    widths = {f"blk.{i}.{name}.weight": 64 for i in range(2) for name in ("attn_q", "attn_output", "ffn_up")}
    widths |= {"blk.0.ffn_down.weight": 96}
    Path("imatrix.dat").write_bytes(imatrix_bytes({name: np.ones(n, np.float32) for name, n in widths.items()}))
    listed = [(f"{name}.{end}", size) for name, n in widths.items() for end, size in (("in_sum2", n), ("counts", 1))]
    layout = make_layout([TensorSpec(name, DTYPES["F32"], (1, n)) for name, n in listed], 10**9, encode_metadata({}))
    (shard,) = layout.shards
    body = shard.nbytes - len(shard.header)
    Path("imatrix.gguf").write_bytes(shard.header + np.ones(1, "<f4").tobytes() * (body // 4))


def _use_imatrix(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    kind = rng.choice(("gguf-q4_0", "gguf-iq4_nl", "gguf-q5_1"))
    yield lambda: weightsmith.plan(recipe, quantize=kind, imatrix=file)
    if rng.random() < 0.2:
        plan = {"quantize": kind, "imatrix": file}
        yield lambda: weightsmith.merge(recipe, "out.gguf", threads=1, fsync=False, **plan)


def mutate_imatrix(rng: Rng, data: bytes) -> bytes:
    """Numbers of the header, names and lengths; or values that are no importances."""
    if rng.random() < 0.7:
        return mutate_gguf(rng, data)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 100))):
        at = rng.randrange(len(changed) // 2, len(changed) - 3) & ~3
        changed[at : at + 4] = struct.pack("<f", rng.choice((0.0, -0.0, -1.0, 1e-45, 3e38, math.inf, math.nan)))
    return bytes(changed)


def _make_measurement() -> None:
    """`m`, a model, and the measurement of its blocks."""
    import weightsmith
    from tests.features.quantisation.test_exl2_format import write
    from weightsmith._features.quantisation.exl2 import prepare_model
    from weightsmith._models.formats.exl2.model import Measured, measurement_json

    write(Path("m"))
    blocks = prepare_model(weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "m"}]})).blocks
    measured = [(block, [Measured(option, 0.5 / (i + 1)) for i, option in enumerate(block.options)]) for block in blocks]
    Path("measurement.json").write_text(json.dumps(measurement_json(measured)))


def _use_measurement(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    yield lambda: weightsmith.plan(recipe, quantize="exl2", bits=4.5, measurement=file, calibration="none")


def make_statistics() -> None:
    """`m-stats`, statistics of the model `m` on the text of `settings`; `m2`, its copy."""
    import weightsmith
    from tests.calibration_help import save_model, settings

    if not Path("m").is_dir():
        save_model(Path("m"))
        settings(Path())
    shutil.copytree("m", "m2")
    weightsmith.statistics("m", "text.txt", "m-stats", kind=["second_moments"], rows=2, tokens=8, progress=False)


def _use_statistics(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith
    from weightsmith._activations.stored import read_stored

    if file.endswith("statistics.json"):
        _fit_manifest(Path("m-stats"))
    text = {"model": "m", "text": "m-stats"}
    yield lambda: read_stored("m-stats")
    yield lambda: weightsmith.plan({"merge_method": "regmean", "base_model": "m2", "models": [text]})


def _fit_manifest(folder: Path) -> None:
    """Give a manifest the checksum of a record that was mutated, and its own."""
    from weightsmith._activations.stored import RECORD
    from weightsmith._outputs.checksum import hash_bytes

    path, data = folder / "weightsmith.json", (folder / RECORD).read_bytes()
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    fields["files"][RECORD] = {"bytes": len(data), "xxh3_128": hash_bytes(data)}
    body = json.dumps(fields).encode()[1:]
    path.write_bytes(b'{\n  "checksum": "' + hash_bytes(body).encode() + b'",\n' + body)


def mutate_statistics(rng: Rng, data: bytes) -> bytes:
    """A record with other values, which the manifest fits; or a manifest with others."""
    if b'"checksum"' in data[:20]:
        return mutate_checksummed(rng, data)
    return mutate_json(rng, data, ("model", "text", "kinds", "rows", "tokens", "source", "sha256", "weights", "seed"))


KINDS = {
    "imatrix": Kind(_make_imatrix, ("imatrix.dat", "imatrix.gguf"), mutate_imatrix, _use_imatrix),
    "measurement": Kind(
        _make_measurement,
        ("measurement.json",),
        lambda rng, data: mutate_json(rng, data, ("accuracy", "total_bits", "bits", "bits_prop", "group_size", "scale_bits")),
        _use_measurement,
    ),
    "statistics": Kind(
        make_statistics, ("m-stats/statistics.json", "m-stats/weightsmith.json"), mutate_statistics, _use_statistics
    ),
}
