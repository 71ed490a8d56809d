"""The k-th largest over many tiles: the same bytes in bounded memory, whether counts are held, added up, or too many."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.cases import SWEEP
from tests.cases.task_vectors import GTA
from tests.mini import run_method
from weightsmith._base.tensors import DTYPES
from weightsmith._methods.jobs import selection
from weightsmith._methods.jobs.selection import Counted, Counts, Selection
from weightsmith.abc.job import Tile

BF16 = np.dtype(ml_dtypes.bfloat16)


def data(kind: str) -> list[np.ndarray]:
    """A base and two models of 300,000 elements in rows of 500, with many different deltas, many equal ones, or both.

    The base is bf16: float32 models are merged by the kernels of `cases.case.mixed`.
    """
    rng = np.random.default_rng(3)
    shape = (600, 500)
    base = np.zeros(shape, BF16) if kind == "mixed" else rng.normal(0, 0.02, shape).astype(BF16)
    models = []
    for _ in range(2):
        delta = rng.normal(0, 1e-3, shape).astype(np.float32)
        if kind == "mixed":  # thresholds of many a density lie on a value that a third of all elements have
            delta = np.where(rng.random(shape) < 0.4, np.float32(7e-4) * np.sign(delta), delta)
        models.append(base.astype(np.float32) + delta)
    arrays = [base, *models]
    return [a.astype(BF16) for a in arrays] if kind == "bf16" else arrays


OUT = {"float32": DTYPES["F32"], "mixed": DTYPES["F32"], "bf16": DTYPES["BF16"]}
WEIGHTS = [{}, {"weight": 0.6, "density": 0.35, "gamma": 0.01}, {"weight": 0.6, "density": 0.5, "gamma": 0.02}]
METHODS = {
    "ties": (GTA, WEIGHTS),
    "breadcrumbs": (GTA, WEIGHTS),
    "sce": ({"select_topk": 0.3, "select_applies_to": "update", "int8_mask": False}, [{}] * 3),
    "arcee_fusion": ({}, [{}] * 2),
}


SAMPLE = (("ties", "float32"), ("ties", "bf16"), ("sce", "float32"), ("arcee_fusion", "bf16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=() if (method, kind) in SAMPLE else SWEEP)
        for method in METHODS
        for kind in ("float32", "mixed", "bf16")
    ],
)
def test_the_bytes_do_not_depend_on_how_counts_are_held(
    method: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, per_model = METHODS[method]
    most, passes = [0], set[str]()
    add, statistics = Counted.add, Selection.statistics

    def counted(self: Counted, counts: Counts) -> None:
        add(self, counts)
        most[0] = max(most[0], sum(len(t.patterns) for t in self.tiles))

    def watched(self: Selection, kind: str, tile: Tile) -> None:
        passes.add(kind)
        statistics(self, kind, tile)

    monkeypatch.setattr(Counted, "add", counted)
    monkeypatch.setattr(Selection, "statistics", watched)

    def merged_bytes(name: str, held: int, window: int) -> bytes:
        monkeypatch.setattr(selection, "MAX_HELD", held)
        monkeypatch.setattr(selection, "MAX_WINDOW", window)
        most[0] = 0
        passes.clear()
        arrays = data(kind)[: len(per_model)]
        how = {"shared": shared, "models": per_model, "base": True, "out": OUT[kind], "tile_bytes": 1}
        array = run_method(tmp_path / name, method, arrays, **how)
        assert most[0] <= held
        return array.tobytes()

    plain = merged_bytes("by tile", 1 << 20, 1 << 21)
    assert "ties" not in passes
    assert merged_bytes("added up", 10, 1 << 31) == plain
    if method == "ties" and kind != "float32":
        assert "ties" in passes, "the last of equal magnitudes was to be looked for"
    assert merged_bytes("too many", 10, 1 << 16) == plain
    if method == "ties" and kind == "float32":
        assert "sure" in passes, "the window was to be too wide"


@pytest.mark.long
@pytest.mark.parametrize(("kind", "density"), [("float32", 0.02), ("float32", 0.98), ("bf16", 0.5)])
def test_one_pass_finds_a_threshold_among_few_patterns(
    kind: str, density: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first tile says of the window is right: the matrix is not read again, and few patterns are counted."""
    passes, counted = list[str](), [0]
    add, finish_pass = Counted.add, Selection.finish_pass

    def added(self: Counted, counts: Counts) -> None:
        counted[0] += int(counts.numbers.sum())
        add(self, counts)

    def folded(self: Selection, kind: str) -> None:
        passes.append(kind)
        finish_pass(self, kind)

    monkeypatch.setattr(Counted, "add", added)
    monkeypatch.setattr(Selection, "finish_pass", folded)
    arrays = data(kind)[:2]
    weights = [{}, {"weight": 0.6, "density": density, "gamma": 0.0}]
    run_method(tmp_path, "ties", arrays, shared=GTA, models=weights, base=True, out=OUT[kind], tile_bytes=1)
    assert passes == ["window"]
    assert 0 < counted[0] < 0.25 * arrays[0].size
