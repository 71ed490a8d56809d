"""The work on one tile, without threads: merging, copying, measuring, encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weightsmith._base.errors import NonFinite
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.local import DiscardedOutput
from weightsmith._engine.reader import Reader
from weightsmith._engine.resources import Buffers, Resources
from weightsmith._engine.results import Results
from weightsmith._engine.schedule import APPLY, ActiveStep, LeafPass
from weightsmith._engine.tile_work import Copier, Finite, Merger, TileEncoder
from weightsmith._files.arrays import view_of
from weightsmith._models.formats import find_encoding
from weightsmith._models.sources.composed import StateDict
from weightsmith._outputs.checksum import combine, grain_bytes, hash_grains
from weightsmith._plans import COPY, PLAIN, ModelInput, Plan, Provenance, Read, Settings, Step

SHAPE = (600, 300)
"""Three grains."""


class Recorded(DiscardedOutput):
    """Keeps the bytes of each tensor; each byte is written once."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.data = {spec.name: np.zeros(spec.nbytes, np.uint8) for spec in specs}
        self.times = {spec.name: np.zeros(spec.nbytes, np.uint8) for spec in specs}

    def write(self, name: str, start_byte: int, buffer: Any) -> None:
        data = np.frombuffer(buffer, np.uint8)
        self.data[name][start_byte : start_byte + data.size] = data
        self.times[name][start_byte : start_byte + data.size] += 1


class Work:
    """A step on tensors in memory, and everything that works on its tiles."""

    def __init__(
        self, op: str, arrays: Sequence[np.ndarray], *, encoding: str = PLAIN, allow: bool = False, base: bool = False
    ) -> None:
        out = TensorSpec("model.layers.0.mlp.up_proj.weight", DTYPES["BF16"], arrays[0].shape)
        stored = () if encoding == PLAIN else find_encoding(encoding).outs(out)
        reads = tuple(Read(i, "w") for i in range(len(arrays)))
        self.step = Step(out, op, reads, base, encoding=encoding, stored=stored)
        model_settings = tuple({"weight": 0.5} for _ in arrays)
        models = tuple(ModelInput(f"m{i}", "", "") for i in range(len(arrays)))
        plan = Plan(Provenance("test"), models, (self.step,), (Settings({"normalize": True, "t": 0.5}, model_settings),))
        sources = [StateDict({"w": view_of("w", array)}, f"m{i}") for i, array in enumerate(arrays)]
        self.reader = Reader(plan, sources, Results(plan), Resources(tile_bytes=1))
        self.output, self.buffers = Recorded(self.step.outs), Buffers()
        finite = Finite(self.reader, allow)
        self.encoder = TileEncoder(self.reader, self.output, allow_nonfinite=allow)
        self.merger = Merger(self.reader, finite, measures=True)
        self.copier = Copier(self.reader, finite, self.output, self.encoder)
        active = ActiveStep(self.step)
        align = self.encoder.begin(active)
        job = None if op == COPY else self.reader.job(self.step)
        self.leaf = self.encoder.reserve(LeafPass(active, self.step, job, 0, self.reader.cuts(self.step, align)))
        active.leaves.append(self.leaf)

    def write(self, order: Sequence[int] | None = None) -> list[int]:
        """Merge or copy all tiles. Returns the bytes that each has written."""
        leaf, results = self.leaf, []
        for k in range(len(leaf.cuts)) if order is None else order:
            place = leaf.cuts[k]
            if leaf.job is None:
                results.append(self.copier.copy(leaf, place, self.buffers)[1])
            else:
                out = self.encoder.memory(leaf, place, self.buffers)
                self.merger.apply(leaf, place, out, self.buffers)
                results.append(self.encoder.write(leaf, place, out, self.buffers))
        assert all((times == 1).all() for times in self.output.times.values())
        return results

    def result(self) -> np.ndarray:
        spec = self.step.out
        return self.output.data[spec.name].view(spec.dtype.numpy).reshape(spec.shape)


def normal(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def checksum(spec: TensorSpec, data: np.ndarray) -> str:
    return combine(hash_grains(data, grain_bytes(spec)))


def test_a_merge_writes_and_hashes_every_byte_once() -> None:
    a, b = normal(0), normal(1)
    work = Work("linear", [a, b])
    assert len(work.leaf.cuts) == 3
    assert sum(work.write([2, 0, 1])) == a.nbytes
    expected = (0.5 * a.astype(np.float64) + 0.5 * b.astype(np.float64)).astype(ml_dtypes.bfloat16)
    assert work.result().tobytes() == expected.tobytes()
    (hashed,) = work.leaf.active.hashes
    assert hashed.checksum() == checksum(work.step.out, expected.reshape(-1).view(np.uint8))


def test_a_tile_has_no_more_rows_than_an_input_prefers_where_grains_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grain has 218 rows: two of them hold 300 rows."""
    monkeypatch.setattr(StateDict, "preferred_rows", lambda self, name: 300)
    work = Work("linear", [normal(0), normal(1)])
    assert [place.size // 300 for place in work.leaf.cuts] == [436, 164]


def test_the_passes_of_a_job_follow_each_other_and_then_comes_apply() -> None:
    work = Work("slerp", [normal(0), normal(1)], base=True)
    leaf, phases = work.leaf, []
    while leaf.ready:
        task = leaf.take()
        phases.append(task.phase)
        if task.phase == APPLY:
            break
        result, read = work.merger.statistics(leaf, task.place, work.buffers)
        assert read == 2 * 2 * task.place.size
        if leaf.enter(task, result):
            leaf.finish_pass()
            assert leaf.advance()
    assert phases == [0, 0, 0, APPLY]


def test_constants_are_put_into_the_result_and_not_measured() -> None:
    a, b = normal(0), normal(1)
    plain = Work("nearswap", [a, b], base=True)
    plain.write()
    for array in (a, b):
        array[599, 299] = np.inf
    work = Work("nearswap", [a, b], base=True)
    work.write()
    assert np.isinf(work.result()[599, 299])
    assert work.leaf.active.nonfinite
    assert not plain.leaf.active.nonfinite
    assert work.leaf.active.distance is not None
    assert np.isfinite(work.leaf.active.distance).all()
    b[599, 299] = 1
    with pytest.raises(NonFinite, match=r"m0, tensor w: element \[599, 299\] is inf"):
        Work("nearswap", [a, b], base=True).write()
    allowed = Work("nearswap", [a, b], base=True, allow=True)
    allowed.write()
    assert not np.isfinite(allowed.result()[599, 299])


def test_a_distance_is_measured_by_grain_and_only_from_a_base() -> None:
    a, b = normal(0), normal(1)
    work = Work("nearswap", [a, b], base=True)
    work.write([1, 2, 0])
    moved = work.result().astype(np.float64) - a.astype(np.float64)
    distances = work.leaf.distances
    assert distances.shape == (3, 2)
    for k, place in enumerate(work.leaf.cuts):
        span = slice(place.start, place.start + place.size)
        squares = (moved.reshape(-1)[span] ** 2).sum(), (a.astype(np.float64).reshape(-1)[span] ** 2).sum()
        np.testing.assert_allclose(distances[k], squares, rtol=1e-12)
    assert work.leaf.active.distance == tuple(np.cumsum(distances, axis=0)[-1])
    without = Work("linear", [a, b])
    without.write()
    assert without.leaf.active.distance is None


def test_a_copy_is_the_first_input_and_says_where_others_differ() -> None:
    a = normal(0)
    same = Work(COPY, [a, a.copy()])
    same.write()
    assert (same.result().tobytes(), same.leaf.active.differing) == (a.tobytes(), False)
    other = a.copy()
    other[300, 0] += 1
    differs = Work(COPY, [a, other])
    differs.write()
    assert (differs.result().tobytes(), differs.leaf.active.differing) == (a.tobytes(), True)


def test_an_infinity_is_copied_but_not_encoded() -> None:
    a = normal(0, (256, 256))
    a[3, 5] = np.inf
    copied = Work(COPY, [a])
    copied.write()
    assert copied.result().tobytes() == a.tobytes()
    with pytest.raises(NonFinite, match=r"element \[3, 5\] is inf"):
        Work(COPY, [a], encoding="fp8-dynamic").write()


@pytest.mark.parametrize("encoding", ["fp8-dynamic", "fp8-block"])
def test_tiles_are_encoded_to_the_bytes_of_the_whole_tensor(encoding: str) -> None:
    a = normal(0, (1280, 256))
    work = Work(COPY, [a], encoding=encoding)
    assert len(work.leaf.cuts) > 1
    assert sum(work.write(range(len(work.leaf.cuts))[::-1])) == sum(out.nbytes for out in work.step.outs)
    outs = [np.empty(out.nbytes, np.uint8) for out in work.step.outs]
    find_encoding(encoding).encode(work.step.out, a.astype(np.float32), 0, outs, np.empty(0, np.float32))
    for spec, expected, hashed in zip(work.step.outs, outs, work.leaf.active.hashes, strict=True):
        assert work.output.data[spec.name].tobytes() == expected.tobytes(), spec.name
        assert hashed.checksum() == checksum(spec, expected)


def test_an_encoding_of_whole_matrices_writes_with_the_last_tile() -> None:
    a = normal(0, (512, 512))
    work = Work(COPY, [a], encoding="exl2 4/g128")
    assert work.leaf.resident_bytes == 6 * a.size
    *first, last = work.write([3, 1, 0, 2])
    assert first == [0, 0, 0]
    assert last == sum(out.nbytes for out in work.step.outs)
