"""Blocks and gathers of inputs, and tensors made of pieces: bytes, checksums, distances, and a piece as a tensor of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.mini import Memory, as_bytes, write_checkpoint
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.local import Outcome, run
from weightsmith._engine.reader import Reader
from weightsmith._engine.resources import Buffers, Resources, Workload
from weightsmith._engine.results import JobMemory, Results
from weightsmith._files.arrays import view_of
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.sources.composed import StateDict
from weightsmith._outputs.checksum import combine, grain_bytes, hash_grains
from weightsmith._plans import Block, Gather, ModelInput, Plan, Provenance, Read, Settings, Step, Table, plan_from_json

BF16 = np.dtype(ml_dtypes.bfloat16)
NONE = Settings({}, ({},))


def spec(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name, DTYPES[dtype], shape)


def run_step(
    folder: Path,
    models: Sequence[Mapping[str, np.ndarray]],
    step: Step,
    settings: Settings = NONE,
    tables: tuple[Table, ...] = (),
    **options: Any,
) -> tuple[np.ndarray, str, Outcome]:
    """The one tensor that a step makes, its checksum, and the outcome."""
    paths = [write_checkpoint(folder / f"m{i}", tensors) for i, tensors in enumerate(models)]
    plan = Plan(Provenance("test"), tuple(ModelInput(p.name, "", "") for p in paths), (step,), (settings,), tables=tables)
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with ExitStack() as stack:
        memory = Memory(plan, folder)
        stack.callback(memory.file.close)
        inputs = [stack.enter_context(open_checkpoint(p)) for p in paths]
        outcome = run(plan, inputs, memory, Resources(2, **options))
        return memory.tensor(step.out.name).copy(), memory.checksums[step.out.name], outcome


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


@pytest.mark.parametrize("tile_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("rows", "cols"), [(slice(0, 700), slice(0, 96)), (slice(333, 700), slice(17, 81)), (slice(5, 6), slice(90, 96))]
)
def test_a_block_is_the_block_it_names(tmp_path: Path, tile_bytes: int, rows: slice, cols: slice) -> None:
    tensor = np.tile(normal((700, 96)), (3, 1))  # several grains, and rows that do not divide them
    block = tensor[rows, cols]
    block_of = Block(rows.start * 96 + cols.start, *block.shape, 96)
    step = Step(spec("out", block.shape), "copy", (Read(0, "w", block_of),))
    array, _, outcome = run_step(tmp_path, [{"w": tensor}], step, tile_bytes=tile_bytes)
    assert as_bytes(array) == as_bytes(block)
    assert outcome.read_bytes == outcome.written_bytes == block.nbytes


def test_a_strided_block_of_many_tiles(tmp_path: Path) -> None:
    tensor = normal((300, 4000))
    step = Step(spec("out", (300, 1000)), "cast", (Read(0, "w", Block(3000, 300, 1000, 4000)),))
    array, _, _ = run_step(tmp_path, [{"w": tensor}], step, tile_bytes=1)
    assert as_bytes(array) == as_bytes(tensor[:, 3000:])


@pytest.mark.parametrize("tile_bytes", [1, 1 << 20])
def test_pieces_of_any_length_make_one_tensor_with_its_checksum(tmp_path: Path, tile_bytes: int) -> None:
    """Pieces end in the middle of grains, and of each other's grains; one is cast, one is a block_of, one empty."""
    a, b, c = normal((1111, 72), 1), normal((1, 72), 2), normal((2000, 72), 3).astype(np.float32)
    pieces = (
        Step(spec("out[0]", (1111, 72)), "copy", (Read(0, "a"),)),
        Step(spec("out[1]", (0, 72)), "copy", (Read(0, "a"),)),
        Step(spec("out[2]", (1, 72)), "copy", (Read(0, "b"),)),
        Step(spec("out[3]", (1500, 72)), "cast", (Read(0, "c", Block(500 * 72, 1500, 72, 72)),)),
    )
    out = spec("out", (2612, 72))
    expected = np.concatenate([a, b, c[500:].astype(BF16)])
    array, checksum, _ = run_step(
        tmp_path, [{"a": a, "b": b, "c": c}], Step(out, "join", (), pieces=pieces), tile_bytes=tile_bytes
    )
    assert as_bytes(array) == as_bytes(expected)
    assert checksum == combine(hash_grains(as_bytes(expected), grain_bytes(out)))


def test_a_grain_of_many_small_pieces(tmp_path: Path) -> None:
    tensor = normal((300, 16))
    order = np.random.default_rng(0).permutation(300)
    pieces = tuple(
        Step(spec(f"out[{i}]", (1, 16)), "copy", (Read(0, "w", Block(int(row) * 16, 1, 16, 16)),))
        for i, row in enumerate(order)
    )
    out = spec("out", (300, 16))
    array, checksum, _ = run_step(tmp_path, [{"w": tensor}], Step(out, "join", (), pieces=pieces))
    assert as_bytes(array) == as_bytes(tensor[order])
    assert checksum == combine(hash_grains(as_bytes(array), grain_bytes(out)))


def test_a_piece_is_merged_as_a_tensor_of_its_own(tmp_path: Path) -> None:
    """TIES of the halves of a fused matrix is the TIES of two matrices, and the distance from the base is theirs."""
    models = [normal((900, 128), seed) for seed in range(3)]
    settings = Settings({"normalize": True, "lambda": 1.0}, ({}, *({"weight": 1.0, "density": 0.3},) * 2))

    def ties(name: str, rows: slice, fused: bool) -> Step:
        n = rows.stop - rows.start
        block_of = Block(rows.start * 128, n, 128, 128) if fused else None
        sources = tuple(Read(i, "fused" if fused else name, block_of) for i in range(3))
        return Step(spec(name, (n, 128)), "ties", sources, base=True)

    halves = {"gate": slice(0, 500), "up": slice(500, 900)}
    fused = Step(spec("fused", (900, 128)), "join", (), pieces=tuple(ties(n, r, True) for n, r in halves.items()))
    array, _, outcome = run_step(tmp_path / "fused", [{"fused": m} for m in models], fused, settings)
    apart = {}
    squares = []
    for name, rows in halves.items():
        inputs = [{name: m[rows]} for m in models]
        apart[name], _, one = run_step(tmp_path / name, inputs, ties(name, rows, False), settings)
        squares.append(one.distances[name])
    assert as_bytes(array) == as_bytes(np.concatenate([apart["gate"], apart["up"]]))
    assert outcome.distances["fused"] == pytest.approx(np.sum(squares, axis=0))
    whole = Step(spec("fused", (900, 128)), "ties", tuple(Read(i, "fused") for i in range(3)), base=True)
    together, _, _ = run_step(tmp_path / "whole", [{"fused": m} for m in models], whole, settings)
    assert as_bytes(together) != as_bytes(array), "one threshold for both halves would have given the same"


GATHERED = [
    (Gather(0, Block(0, 700, 96, 96)), [5, 6, 7, 3, 3, 699, 0], 0),
    (Gather(0, Block(0, 700, 96, 96)), [-1, 0, 1, -1, -1, 2], 0),
    (Gather(0, Block(96 * 100, 50, 96, 96)), [49, 0, -1, 48], 0),
    (Gather(0, Block(0, 700, 96, 96), 1), [95, 0, 1, -1], 1),
    (Gather(0, Block(96 * 10, 30, 96, 96), 1), [3, 3, 4], 1),
]


@pytest.mark.parametrize(("gather", "table", "axis"), GATHERED)
def test_a_gather_is_the_rows_or_columns_of_its_table(tmp_path: Path, gather: Gather, table: list[int], axis: int) -> None:
    tensor = normal((700, 96))
    rows = tensor.reshape(-1)[gather.block.offset :][: gather.block.rows * 96].reshape(-1, 96)
    expected = np.take(rows, np.maximum(table, 0), axis)
    zeros = [k for k, n in enumerate(table) if n < 0]
    expected[(slice(None), zeros) if axis else zeros] = 0
    step = Step(spec("out", expected.shape), "copy", (Read(0, "w", gather),))
    array, _, _ = run_step(tmp_path, [{"w": tensor}], step, tables=(Table.of(table),))
    assert as_bytes(array) == as_bytes(expected)


def test_a_gather_of_many_tiles(tmp_path: Path) -> None:
    tensor = normal((3000, 64))
    table = np.random.default_rng(0).integers(-1, 3000, 4000)
    step = Step(spec("out", (4000, 64)), "cast", (Read(0, "w", Gather(0, Block(0, 3000, 64, 64))),))
    array, _, _ = run_step(tmp_path, [{"w": tensor}], step, tables=(Table.of(table),), tile_bytes=1)
    expected = np.where(table[:, None] < 0, BF16.type(0), tensor[table])
    assert as_bytes(array) == as_bytes(expected)


def test_rows_of_a_tensor_in_memory_are_gathered() -> None:
    tensor = normal((40, 16))
    step = Step(spec("out", (3, 16)), "copy", (Read(0, "w", Gather(0, Block(0, 40, 16, 16))),))
    plan = Plan(Provenance("test"), (ModelInput("m", "", ""),), (step,), (NONE,), tables=(Table.of([7, -1, 9]),))
    reader = Reader(plan, [StateDict({"w": view_of("w", tensor)}, "m")], Results(plan))
    rows, _ = reader.read(reader.inputs_of(step.inputs), 0, 48, Buffers())
    assert rows[0, : 48 * 2].tobytes() == np.stack([tensor[7], np.zeros(16, BF16), tensor[9]]).tobytes()


def test_a_table_that_points_outside_is_an_error(tmp_path: Path) -> None:
    step = Step(spec("out", (1, 8)), "copy", (Read(0, "w", Gather(0, Block(0, 4, 8, 8))),))
    with pytest.raises(IndexError, match="points outside 4 rows"):
        run_step(tmp_path, [{"w": normal((4, 8))}], step, tables=(Table.of([4]),))


@pytest.mark.parametrize("gathered", [False, True])
def test_jobs_remember_their_statistics_unless_a_table_says_which_rows_they_see(tmp_path: Path, gathered: bool) -> None:
    """Another plan of the same inputs may have another table in the same place."""
    grows = np.arange(1, 601, dtype=np.float32)[:, None]
    models = [{"w": (normal((600, 96), seed) * grows).astype(BF16)} for seed in range(3)]
    paths = [write_checkpoint(tmp_path / f"m{i}", tensors) for i, tensors in enumerate(models)]
    settings = Settings({"normalize": True, "lambda": 1.0}, ({}, *({"weight": 1.0, "density": 0.3},) * 2))
    reads = tuple(Read(i, "w", Gather(0, Block(0, 600, 96, 96)) if gathered else None) for i in range(3))
    step = Step(spec("out", (300 if gathered else 600, 96)), "ties", reads, base=True)
    inputs = tuple(ModelInput(path.name, "", path.name) for path in paths)
    memory = JobMemory()

    def merged(first: int, remembered: JobMemory | None) -> tuple[bytes, int]:
        table = Table.of(range(first, first + 300))
        plan = Plan(Provenance("test"), inputs, (step,), (settings,), tables=(table,) if gathered else ())
        with ExitStack() as stack:
            output = Memory(plan, tmp_path)
            stack.callback(output.file.close)
            sources = [stack.enter_context(open_checkpoint(path)) for path in paths]
            outcome = run(plan, sources, output, Resources(1), Workload(memory=remembered))
            return as_bytes(output.tensor("out")), outcome.read_bytes

    merged(0, memory)
    alone, remembered = merged(300, None), merged(300, memory)
    assert remembered[0] == alone[0]
    assert (remembered[1] < alone[1]) == (not gathered)


def test_of_few_singular_directions_the_factors_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another λ takes them, and has the bytes of a merge that remembers nothing."""
    tsv_m = sys.modules["weightsmith._methods.tsv_m"]
    monkeypatch.setattr("weightsmith._engine.results.LARGE_BYTES", 1024)
    name, shape = "model.layers.0.mlp.up_proj.weight", (80, 200)
    paths = [write_checkpoint(tmp_path / f"m{i}", {name: normal(shape, i)}) for i in range(3)]
    reads = tuple(Read(i, name) for i in range(3))
    out = TensorSpec(name, DTYPES["F32"], shape)
    step = Step(out, "tsv_m", reads, base=True, role="linear")
    inputs = tuple(ModelInput(path.name, "", path.name) for path in paths)
    memory, computed, factors = JobMemory(tmp_path), [], tsv_m.factors

    def count(*arguments: Any) -> Any:
        computed.append(arguments)
        return factors(*arguments)

    monkeypatch.setattr(tsv_m, "factors", count)

    def merged(strength: float, remembered: JobMemory | None) -> bytes:
        settings = Settings({"directions": 4, "flatten": 0.4, "lambda": strength}, ({}, {"weight": 1.0}, {"weight": 0.7}))
        plan = Plan(Provenance("test"), inputs, (step,), (settings,))
        with ExitStack() as stack:
            output = Memory(plan, tmp_path)
            stack.callback(output.file.close)
            run(
                plan,
                [stack.enter_context(open_checkpoint(p)) for p in paths],
                output,
                Resources(1),
                Workload(memory=remembered),
            )
            return as_bytes(output.tensor(name))

    merged(0.4, memory)
    assert merged(0.8, memory) == merged(0.8, None)
    assert len(computed) == 2
    assert (memory._arrays._end, memory._arrays._free) == (8 * 8 * 280, {})


def test_distances_of_finished_tensors_are_not_measured_again(tmp_path: Path) -> None:
    """A finished tensor is not read again: its distance from the base is what the earlier run found."""
    names = ["a", "b"]
    models = [{name: normal((50, 8), seed + k) for k, name in enumerate(names)} for seed in (0, 5)]
    paths = [write_checkpoint(tmp_path / f"m{i}", tensors) for i, tensors in enumerate(models)]
    settings = Settings({"t": 0.5}, ({}, {}))
    steps = tuple(Step(spec(n, (50, 8)), "nearswap", (Read(0, n), Read(1, n)), base=True) for n in names)
    plan = Plan(Provenance("test"), tuple(ModelInput(p.name, "", "") for p in paths), steps, (settings,))
    with ExitStack() as stack:
        memory = Memory(plan, tmp_path)
        stack.callback(memory.file.close)
        inputs = [stack.enter_context(open_checkpoint(p)) for p in paths]
        first = run(plan, inputs, memory, Resources(2))
        again = run(plan, inputs, memory, Resources(2), Workload(skip=first.finished))
    assert again.distances == first.distances
    assert set(again.distances) == set(names)
    assert again.read_bytes == 0
