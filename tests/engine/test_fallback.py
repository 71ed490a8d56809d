"""Rows that a gather lacks: from one other tensor, as the mean of several, or zeros."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.mini import Memory, write_checkpoint
from weightsmith._base.errors import FormatError, NonFinite
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.local import run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._plans import COPY, Block, Gather, ModelInput, Plan, Provenance, Read, Settings, Step, Table, plan_from_json

BF16 = np.dtype(ml_dtypes.bfloat16)
OWN, FIRST, SECOND = [2, -1, -1, -1, 0, -1], [9, 1, 0, -1, 1, -1], [-1, -1, 3, 2, -1, -1]


def reads(cols: int, heights: tuple[int, int, int] = (3, 10, 4)) -> Read:
    views = [Gather(k, Block(0, rows, cols, cols)) for k, rows in enumerate(heights)]
    return Read(0, "w", Gather(0, views[0].block, 0, (Read(1, "w", views[1]), Read(2, "w", views[2]))))


def plan_of(read: Read, spec: TensorSpec, op: str = COPY) -> Plan:
    tables = tuple(map(Table.of, (OWN, FIRST, SECOND)))
    models = tuple(ModelInput(f"m{i}", "", "") for i in range(3))
    return Plan(
        Provenance("test"),
        models,
        (Step(spec, op, (read,)),),
        (Settings({"normalize": True}, ({"weight": 1.0},)),),
        tables=tables,
    )


def computed(
    folder: Path, arrays: list[np.ndarray], out: Any = "BF16", op: str = COPY, tile_bytes: int = 1 << 20, **options: Any
) -> np.ndarray:
    cols = arrays[0].shape[-1] if arrays[0].ndim > 1 else 1
    for i, array in enumerate(arrays):
        write_checkpoint(folder / f"m{i}", {"w": array})
    shape = (len(OWN), cols) if arrays[0].ndim > 1 else (len(OWN),)
    plan = plan_of(reads(cols), TensorSpec("w", DTYPES[out], shape), op)
    assert plan_from_json(plan.to_json()) == plan
    with ExitStack() as stack:
        memory = Memory(plan, folder)
        stack.callback(memory.file.close)
        checkpoints = [stack.enter_context(open_checkpoint(folder / f"m{i}")) for i in range(3)]
        run(plan, checkpoints, memory, Resources(2, tile_bytes), Workload(**options))
        return memory.tensor("w")


def expected(arrays: list[np.ndarray]) -> np.ndarray:
    a, b, c = (array.astype(np.float64) for array in arrays)
    zeros = np.zeros_like(a[0])
    rows = [a[2], b[1], (b[0] + c[3]) / 2, c[2], a[0], zeros]
    return np.stack(rows).astype(arrays[0].dtype)


@pytest.mark.parametrize("kinds", [(BF16, BF16, BF16), (np.float16, BF16, np.float32), (np.float32, BF16, np.float16)])
@pytest.mark.parametrize("cols", [1, 5, 70_000])
def test_missing_rows_come_from_the_fallback(tmp_path: Path, kinds: tuple[Any, ...], cols: int) -> None:
    rng = np.random.default_rng(0)
    shapes = (3, 10, 4)
    arrays = [rng.standard_normal((n, cols)).astype(kind) for n, kind in zip(shapes, kinds, strict=True)]
    names = {BF16: "BF16", np.float16: "F16", np.float32: "F32"}
    whole = computed(tmp_path / "a", arrays, names[kinds[0]])
    np.testing.assert_array_equal(whole, expected(arrays))
    tiles = computed(tmp_path / "b", arrays, names[kinds[0]], tile_bytes=1)
    assert tiles.tobytes() == whole.tobytes()


def test_a_vector_is_a_matrix_of_one_column(tmp_path: Path) -> None:
    arrays = [np.arange(n, dtype=np.float32) + 10 * n for n in (3, 10, 4)]
    np.testing.assert_array_equal(computed(tmp_path, arrays, "F32"), expected(arrays))


def test_a_file_that_shrinks_is_reported_by_rows_that_are_read_past_its_source(tmp_path: Path) -> None:
    for i, n in enumerate((3, 10, 4)):
        write_checkpoint(tmp_path / f"m{i}", {"w": np.ones((n, 4), np.float32)})
    plan = plan_of(reads(4), TensorSpec("w", DTYPES["F32"], (len(OWN), 4)))
    with ExitStack() as stack:
        memory = Memory(plan, tmp_path)
        stack.callback(memory.file.close)
        checkpoints = [stack.enter_context(open_checkpoint(tmp_path / f"m{i}")) for i in range(3)]
        for checkpoint in checkpoints:
            checkpoint.read("w")  # opens the file
        file = tmp_path / "m1/model.safetensors"
        with file.open("r+b") as shrinking:
            shrinking.truncate(file.stat().st_size - 9 * 16)  # row 0 is left, row 1 is not
        with pytest.raises(FormatError, match="the file shrank while reading tensor 'w'"):
            run(plan, checkpoints, memory, Resources(1))


def test_an_infinity_from_another_model_is_reported(tmp_path: Path) -> None:
    arrays = [np.ones((n, 4), np.float32) for n in (3, 10, 4)]
    arrays[1][1, 2] = np.inf
    with pytest.raises(NonFinite) as caught:
        computed(tmp_path, arrays, "BF16", "linear")
    assert "m0, tensor w: element [1, 2], taken from other models, is inf" in str(caught.value)
    array = computed(tmp_path / "again", arrays, "BF16", "linear", allow_nonfinite=True)
    assert array[1, 2] == np.inf


@pytest.mark.parametrize(
    "change",
    [
        lambda view: view | {"axis": 1},
        lambda view: view | {"table": "product"},
        lambda view: view | {"fallback": [[1, "w"]]},
        lambda view: view | {"fallback": [[1, "w", view]]},
        lambda view: view | {"fallback": [[-1, "w", {k: v for k, v in view.items() if k != "fallback"}]]},
        lambda view: view | {"fallback": [[7, "w", {k: v for k, v in view.items() if k != "fallback"}]]},
        lambda view: view | {"fallback": [[1, "w", {**{k: v for k, v in view.items() if k != "fallback"}, "table": 9}]]},
        lambda view: view | {"fallback": 3},
    ],
)
def test_a_fallback_from_json_is_checked(change: Any) -> None:
    data = plan_of(reads(4), TensorSpec("w", DTYPES["F32"], (6, 4))).to_json()
    view = data["steps"][0]["inputs"][0][2]
    data["steps"][0]["inputs"][0][2] = change(view)
    with pytest.raises(FormatError):
        plan_from_json(data)
