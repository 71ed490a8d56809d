"""Shared by the tests of outputs: a tiny checkpoint, and building it through Staging."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import Layout, make_layout
from weightsmith._outputs.checksum import combine, grain_bytes, hash_grains
from weightsmith._outputs.places import place_of
from weightsmith._outputs.staging import Staging
from weightsmith.abc.output import Finished, OutputSpec

SPECS = [
    TensorSpec("embed", DTYPES["BF16"], (30, 8)),
    TensorSpec("norm", DTYPES["F32"], (8,)),
    TensorSpec("scale", DTYPES["F64"], ()),
    TensorSpec("empty", DTYPES["F16"], (0, 4)),
    TensorSpec("head", DTYPES["BF16"], (30, 8)),
]
BY_NAME = {spec.name: spec for spec in SPECS}
NAMES = tuple(BY_NAME)


def layout(max_shard_bytes: int = 600) -> Layout:
    return make_layout(SPECS, max_shard_bytes)


def data(name: str, seed: int = 0) -> np.ndarray:
    """The bytes of one tensor: random, fixed by name and seed."""
    rng = np.random.default_rng([seed, *name.encode()])
    return rng.integers(0, 256, BY_NAME[name].nbytes, dtype=np.uint8)


def open_staging(out: object, layout: Layout, plan: str, **options: Any) -> Staging:
    """An output that is being built at a path or an address. options: of `OutputSpec`."""
    return Staging.open(place_of(out), OutputSpec(layout, plan, **options))


def put(staging: Staging, names: Iterable[str] = NAMES, seed: int = 0) -> None:
    """Write and finish the tensors that are not finished."""
    for name in names:
        if name in staging.finished:
            continue
        raw = data(name, seed)
        half = raw.size // 2
        staging.write(name, half, raw[half:])
        staging.write(name, 0, raw[:half])
        staging.finish(name, Finished(combine(hash_grains(raw, grain_bytes(BY_NAME[name])))))


def build(out: Path, plan: str = "plan", seed: int = 0, *, overwrite: bool = False, fsync: bool = False) -> Path:
    """A whole checkpoint; not synced, for a busy disk makes that slow."""
    with open_staging(out, layout(), plan, overwrite=overwrite) as staging:
        put(staging, seed=seed)
        staging.add_file("config.json", b'{"model_type": "tiny"}')
        return staging.publish({"recipe": "none"}, fsync=fsync)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
