"""Small checkpoints, plans by hand, and runs of them: what several test files need."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from weightsmith import _methods as methods
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.resources import TILE_BYTES, Resources, Workload
from weightsmith._files.containers import make_layout
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.structure.projections import SubMatrix
from weightsmith._planning.planner.steps import split_fused, with_needs
from weightsmith._plans import ModelInput, Plan, Provenance, Read, Settings, Step
from weightsmith.abc.output import Finished

NUMPY = {d.numpy: d for d in DTYPES.values()}


def as_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def write_checkpoint(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None, max_shard_bytes: int = 10**9
) -> Path:
    """A checkpoint folder with these tensors (bf16 and fp8 through ml_dtypes)."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = [TensorSpec(name, NUMPY[a.dtype], a.shape) for name, a in tensors.items()]
    layout = make_layout(specs, max_shard_bytes)
    for shard in layout.shards:
        body = b"".join(as_bytes(tensors[spec.name]) for spec in shard.tensors)
        (folder / shard.name).write_bytes(shard.header + body)
    for name, index in layout.indexes.items():
        (folder / name).write_bytes(index)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


class Memory(DiscardedOutput):
    """An engine output that keeps tensors in memory."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.specs = {s.out.name: s.out for s in plan.steps}
        self.file = (folder / "out.bin").open("w+b")
        self.offsets, at = {}, 0
        for spec in self.specs.values():
            self.offsets[spec.name] = at
            at += spec.nbytes
        self.checksums: dict[str, str] = {}

    def location(self, name: str) -> tuple[int, int]:
        return self.file.fileno(), self.offsets[name]

    def write(self, name: str, start_byte: int, buffer: Any) -> None:
        assert start_byte + memoryview(buffer).nbytes <= self.specs[name].nbytes
        os.pwrite(self.file.fileno(), buffer, self.offsets[name] + start_byte)

    def finish(self, name: str, done: Finished) -> None:
        assert name not in self.checksums
        self.checksums[name] = done.checksum

    def tensor(self, name: str) -> np.ndarray:
        spec = self.specs[name]
        data = os.pread(self.file.fileno(), spec.nbytes, self.offsets[name])
        return np.frombuffer(data, spec.dtype.numpy).reshape(spec.shape)


def run_method(
    folder: Path,
    method: str,
    inputs: Sequence[np.ndarray],
    *,
    shared: Mapping[str, Any],
    models: Sequence[Mapping[str, Any]],
    base: bool = False,
    out: DType = DTYPES["F32"],
    matrices: int = 1,
    seed: int = 0,
    threads: int = 2,
    tile_bytes: int = TILE_BYTES,
    name: str = "w",
    allow_nonfinite: bool = False,
) -> np.ndarray:
    """Merge one tensor through the engine; `shared` and `models` are fully resolved parameters."""
    for i, array in enumerate(inputs):
        write_checkpoint(folder / f"m{i}", {name: array})
    spec = TensorSpec(name, out, inputs[0].shape)
    step = Step(spec, method, tuple(Read(i, name) for i in range(len(inputs))), base)
    if matrices > 1:
        shape, size = spec.shape[1:], spec.size // matrices
        step = split_fused(step, [SubMatrix(f"{name}[{k}]", k * size, shape) for k in range(matrices)])
    refs = tuple(ModelInput(f"m{i}", "", "") for i in range(len(inputs)))
    settings = (Settings(dict(shared), tuple(models)),)
    steps, products = with_needs((step,), settings, methods.get(method)) if step.leaves[0].merges else ((step,), ())
    plan = Plan(Provenance(method), refs, tuple(steps), settings, products, seed=seed)
    with ExitStack() as stack:
        memory = Memory(plan, folder)
        stack.callback(memory.file.close)
        checkpoints = [stack.enter_context(open_checkpoint(folder / f"m{i}")) for i in range(len(inputs))]
        run(plan, checkpoints, memory, Resources(threads, tile_bytes), Workload(allow_nonfinite=allow_nonfinite))
        return memory.tensor(name)
