"""What is said of NaN, infinities, zeros, equal, tiny and huge numbers: each as a plain oracle has it, or undefined."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from weightsmith._base.report.blocks import HeatMap, Mark
from weightsmith._base.report.charts import heat_map
from weightsmith._base.report.html import to_html
from weightsmith._reports.look.difference import TensorDifference
from weightsmith._reports.look.reports import comparison_report, difference_report, inspection_report, preview_report
from weightsmith._reports.look.surveys import NonFiniteCounts

__all__ = ["cli"]

Pair = tuple[np.ndarray, np.ndarray]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def product(rows: int, cols: int, rank: int, seed: int = 0) -> np.ndarray:
    return normal(rows, rank, seed=seed) @ normal(rank, cols, seed=seed + 1)


def put(tensor: np.ndarray, *values: float) -> np.ndarray:
    copied = tensor.copy()
    copied.reshape(-1)[: len(values)] = values
    return copied


ONE = normal(24, 24, seed=1)
DOUBLE, OTHER = ONE.astype(np.float64), normal(24, 24, seed=4).astype(np.float64)
NAN, INF = math.nan, math.inf

CASES: dict[str, Pair] = {
    "unrelated": (ONE, normal(24, 24, seed=2)),
    "equal": (ONE, ONE),
    "scaled": (ONE, -2 * ONE),
    "from zero": (0 * ONE, ONE),
    "to zero": (ONE, 0 * ONE),
    "both zero": (0 * ONE, 0 * ONE),
    "signs of zero": (0 * ONE, -0.0 * np.abs(ONE)),
    "NaN in B": (ONE, put(ONE, NAN)),
    "NaN in A": (put(ONE, NAN, NAN), ONE),
    "the same NaN": (put(ONE, NAN), put(ONE, NAN)),
    "the same NaN, and a change": (put(ONE, NAN), put(ONE, NAN, 7)),
    "infinite in B": (ONE, put(ONE, INF, -INF)),
    "the same infinity": (put(ONE, INF), put(ONE, INF)),
    "the opposite infinity": (put(ONE, INF), put(ONE, -INF)),
    "NaN and infinities": (put(ONE, NAN, 1, INF), put(ONE, 1, INF, NAN)),
    "nothing but NaN": (ONE, np.full_like(ONE, NAN)),
    "subnormal": (np.float32(1e-44) * np.round(9 * ONE), np.float32(1e-44) * np.round(9 * normal(24, 24, seed=3))),
    "large": (1e37 * ONE, 1e37 * normal(24, 24, seed=3)),
    "a delta beyond float32": (put(ONE, -3e38), put(ONE, 3e38)),
    "doubles": (1e100 * DOUBLE, 1e100 * OTHER),
    "squares beyond float64": (1e200 * DOUBLE, 1e200 * OTHER),
    "squares below float64": (1e-200 * DOUBLE, 1e-200 * OTHER),
    "B far smaller": (ONE, 1e-9 * normal(24, 24, seed=5)),
    "nearly equal": (ONE, put(ONE, float(ONE[0, 0]) * (1 + 1e-6))),
    "one element": (normal(1, 1), normal(1, 1, seed=9)),
    "one row": (normal(1, 40), normal(1, 40, seed=9)),
    "one column": (normal(40, 1), normal(40, 1, seed=9)),
    "rank 3 of 24": (ONE, ONE + 0.1 * product(24, 24, 3)),
    "rank 18 of 24": (ONE, ONE + 0.1 * product(24, 24, 18)),
    "rank 5 of 300": (normal(300, 400), normal(300, 400) + 0.1 * product(300, 400, 5)),
    "rank 16 of a flat 16": (normal(16, 400), normal(16, 400) + 0.1 * product(16, 400, 16)),
    "rank 100 of 300": (normal(300, 400), normal(300, 400) + 0.1 * product(300, 400, 100)),
    "rank 300 of 300": (normal(300, 400), normal(300, 400, seed=1)),
}
NAMES = {case: f"model.layers.{i}.mlp.up_proj.weight" for i, case in enumerate(CASES)}
VECTORS: dict[str, Pair] = {
    "model.norm.weight": (normal(24), normal(24, seed=1)),
    "model.other.weight": (normal(24), put(normal(24), INF)),
    "model.empty.weight": (normal(0, 24), normal(0, 24)),
}
RANKS = {
    "unrelated": Mark.FULL,
    "scaled": Mark.FULL,
    "from zero": Mark.FULL,
    "to zero": Mark.FULL,
    "one element": Mark.NOTHING,
    "one row": Mark.NOTHING,
    "one column": Mark.NOTHING,
    "nearly equal": 1,
    "rank 3 of 24": 3,
    "rank 18 of 24": 18,
    "rank 5 of 300": 5,
    "rank 16 of a flat 16": Mark.FULL,
    "rank 100 of 300": 100,
    "rank 300 of 300": Mark.HIGH,
    "equal": Mark.SAME,
    "both zero": Mark.SAME,
    "signs of zero": Mark.SAME,
    "the same NaN": Mark.SAME,
    "the same infinity": Mark.SAME,
    "NaN in A": Mark.NAN,
    "NaN in B": Mark.NAN,
    "nothing but NaN": Mark.NAN,
    "the same NaN, and a change": Mark.NAN,
    "infinite in B": Mark.INFINITE,
    "the opposite infinity": Mark.INFINITE,
    "NaN and infinities": Mark.BOTH,
    "a delta beyond float32": Mark.UNDEFINED,
    "squares beyond float64": Mark.UNDEFINED,
    "squares below float64": Mark.UNDEFINED,
}
UNDEFINED = {"a delta beyond float32", "squares beyond float64", "squares below float64"}


def save(folder: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    config = {"model_type": "llama", "num_hidden_layers": len(CASES), "hidden_size": 24}
    return write_checkpoint(folder, {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("edges")
    pairs = {NAMES[case]: pair for case, pair in CASES.items()} | VECTORS
    return tuple(  # type: ignore[return-value]
        save(folder / which, {name: pair[i] for name, pair in pairs.items()}) for i, which in enumerate("ab")
    )


@pytest.fixture(scope="module")
def difference(folders: tuple[Path, Path]) -> weightsmith.Difference:
    return weightsmith.diff(*folders, progress=False)


def tensor_of(difference: weightsmith.Difference, case: str) -> TensorDifference:
    (tensor,) = (tensor for tensor in difference.tensors if tensor.name == NAMES.get(case, case))
    return tensor


def norm(x: np.ndarray) -> float:
    """With a scale, so that squares neither overflow nor vanish."""
    scale = float(np.abs(x).max(initial=0)) or 1.0
    return scale * float(np.sqrt(np.square((x / scale).astype(np.longdouble)).sum()))


def same(mine: float, true: float, **tolerance: float) -> bool:
    return math.isnan(mine) if math.isnan(true) else mine == pytest.approx(true, **tolerance)


# ---- diff


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_tensor_as_the_oracle_has_it(difference: weightsmith.Difference, case: str) -> None:
    mine, (a, b) = tensor_of(difference, case), (x.astype(np.float64) for x in CASES[case])
    counts = tuple(NonFiniteCounts.of(int(np.isnan(x).sum()), int(np.isinf(x).sum())) for x in (a, b))
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    assert mine.nonfinite == counts
    assert mine.changed == int(differs.sum())
    undefined = any(counts) or case in UNDEFINED
    assert mine.measured is not undefined
    with np.errstate(all="ignore"):
        delta = 0.0 if not differs.any() else NAN if undefined else norm(b - a)
        norms = [NAN if count or case == "squares beyond float64" else norm(x) for x, count in zip((a, b), counts, strict=True)]
        cosine = NAN
        if not undefined and all(norms):
            cosine = float((a / norms[0]).reshape(-1).astype(np.longdouble) @ (b / norms[1]).reshape(-1).astype(np.longdouble))
    assert same(mine.delta, delta, rel=1e-6, abs=0)
    assert same(mine.cosine, cosine, abs=1e-7)
    if case != "squares below float64":
        assert same(mine.a, norms[0], rel=1e-9, abs=0)
        assert same(mine.b, norms[1], rel=1e-6, abs=0)
    share = 0.0 if delta == 0 else NAN if undefined else delta / norms[0] if norms[0] else INF
    assert same(mine.share, share, rel=1e-6)
    if case in RANKS:
        assert mine.rank == RANKS[case]
    if isinstance(mine.rank, int):
        assert mine.low_rank is (2 * mine.rank <= min(a.shape))


@pytest.mark.long
def test_vectors_have_no_rank_and_empty_tensors_are_left_out(difference: weightsmith.Difference) -> None:
    assert tensor_of(difference, "model.norm.weight").rank is Mark.NOTHING
    assert tensor_of(difference, "model.other.weight").rank is Mark.NOTHING
    assert "model.empty.weight" not in {tensor.name for tensor in difference.tensors}


@pytest.mark.long
def test_totals_are_of_the_finite_tensors_and_say_so(difference: weightsmith.Difference) -> None:
    measured = [tensor for tensor in difference.tensors if tensor.measured]
    total = difference.total
    assert (total.tensors, total.measured) == (len(difference.tensors), len(measured))
    assert total.measured < total.tensors
    assert total.delta == pytest.approx(math.hypot(*(t.delta for t in measured)))
    assert total.a == pytest.approx(math.hypot(*(t.a for t in measured)))
    in_a, in_b = total.nonfinite
    pairs = [*CASES.values(), *VECTORS.values()]
    for mine, k in ((in_a, 0), (in_b, 1)):
        assert mine.nans == sum(int(np.isnan(pair[k]).sum()) for pair in pairs)
        assert mine.nan_tensors == sum(bool(np.isnan(pair[k]).any()) for pair in pairs)
        assert mine.infinities == sum(int(np.isinf(pair[k]).sum()) for pair in pairs)
        assert mine.infinite_tensors == sum(bool(np.isinf(pair[k]).any()) for pair in pairs)
    assert f"A has {in_a}, the first {NAMES['NaN in A']}." in difference.reading
    assert f"B has {in_b}, the first {NAMES['NaN in B']}." in difference.reading
    beyond = f"Too large or too small to be measured: {len(UNDEFINED)} tensors, the first {NAMES['a delta beyond float32']}."
    assert beyond in difference.reading
    assert "Norms and cosines of several tensors leave them out." in difference.reading


def test_the_cosine_of_finite_tensors_is_theirs_whatever_the_others_hold(tmp_path: Path) -> None:
    """Neither 1, nor 0."""
    a, b = (
        {f"model.layers.{i}.mlp.up_proj.weight": normal(24, 24, seed=k + s * i) for i in range(4)} for k, s in ((1, 1), (9, 2))
    )
    b = {name: 0.5 * a[name] + 0.25 * x for name, x in b.items()}
    bad = b | {
        "model.layers.0.mlp.up_proj.weight": put(b["model.layers.0.mlp.up_proj.weight"], NAN),
        "model.layers.1.mlp.up_proj.weight": put(b["model.layers.1.mlp.up_proj.weight"], INF, INF),
    }
    mine = weightsmith.diff(save(tmp_path / "a", a), save(tmp_path / "b", bad), progress=False)
    x, y = (np.concatenate([t[f"model.layers.{i}.mlp.up_proj.weight"].reshape(-1) for i in (2, 3)]) for t in (a, b))
    assert mine.total.cosine == pytest.approx(float(x @ y) / norm(x) / norm(y), abs=1e-6)
    counts = "NaN in 1 element of 1 tensor and infinities in 2 elements of 1 tensor"
    assert mine.reading[0] == f"B has {counts}, the first model.layers.0.mlp.up_proj.weight."
    only = weightsmith.diff(tmp_path / "a", tmp_path / "b", tensors=["*layers.0*", "*layers.1*"], progress=False)
    assert math.isnan(only.total.cosine)
    assert math.isnan(only.total.delta)
    assert math.isnan(only.total.share)
    assert "No norm and no cosine is defined." in only.reading
    total = json.loads(json.dumps(only.to_json(), allow_nan=False))["total"]
    assert (total["cosine"], total["delta"], total["a"], total["share"]) == (None, None, None, None)


# ---- words

FULL = "A change of full rank"
LOW = "A change of low rank, as LoRA makes it, or a merge of such models: rank"

Change = Callable[[dict[str, np.ndarray]], None]
BOTH = (1, 2)
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


def every(change: Callable[[np.ndarray], np.ndarray], *, dims: tuple[int, ...] = (2,)) -> Change:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name: change(x) for name, x in tensors.items() if x.ndim in dims}

    return edit


def assign(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = change(tensors[name])

    return edit


def added(delta: Callable[..., np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x + 0.01 * delta(*x.shape)


def other(*shape: int) -> np.ndarray:
    return normal(*shape, seed=7)


def ranked(rank: int) -> Callable[[int, int], np.ndarray]:
    return lambda rows, cols: product(rows, cols, rank)


WORDS: dict[str, tuple[int, Change, str]] = {
    "unrelated, 16 x 16": (16, every(lambda x: other(*x.shape), dims=BOTH), f"{FULL}, as between models that were not made"),
    "trained, 16 x 16": (16, every(added(other), dims=BOTH), f"{FULL}, as full fine-tuning"),
    "trained, 200 x 200": (200, every(added(other), dims=BOTH), f"{FULL}, or of a rank above 64, as full"),
    "white noise, 200 x 200": (200, every(added(other)), "White noise, as rounding makes it: about 1% in all linear layers"),
    "rank 12 of 16": (16, every(added(ranked(12))), "A change of mixed ranks (4 weights of a higher rank), as full"),
    "rank 2 of 16": (16, every(added(ranked(2))), f"{LOW} 2 in all linear layers of all layers."),
    "rank 70 of 200": (200, every(added(ranked(70))), f"{LOW} 70 in all linear layers"),
    "rank 110 of 200": (200, every(added(ranked(110))), "A change of mixed ranks (4 weights of a higher rank), as full"),
    "rank 150 of 200": (200, every(added(ranked(150)), dims=(2,)), "White noise, as rounding makes it"),
    "one matrix of low rank": (16, assign(UP, added(ranked(2))), f"{LOW} 2 in mlp.up_proj of layer 0."),
    "vectors alone": (16, every(lambda x: x + 1, dims=(1,)), "No linear layer differs, only input_layernorm."),
    "nothing": (16, lambda tensors: None, "The same weights: every tensor that both have is equal in every element."),
    "another dtype": (16, every(lambda x: x.astype(ml_dtypes.bfloat16)), "Rounding, not training: nothing but what storing"),
    "NaN in every matrix": (16, every(lambda x: put(x, NAN)), "B has NaN in 4 elements of 4 tensors, the first"),
    "to zero": (16, every(lambda x: 0 * x, dims=BOTH), f"{FULL}: all tensors of all layers; 100% of the elements"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", WORDS)
def test_the_first_sentence_is_true(tmp_path: Path, case: str) -> None:
    side, change, expected = WORDS[case]
    shapes = {f"model.layers.{i}.{part}.weight": (side, side) for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")}
    shapes |= {f"model.layers.{i}.input_layernorm.weight": (side,) for i in range(2)}
    tensors = {name: normal(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    a = save(tmp_path / "a", tensors)
    change(tensors)
    mine = weightsmith.diff(a, save(tmp_path / "b", tensors), progress=False)
    assert mine.reading[0].startswith(expected)
    assert not re.search(r"\b(nan|inf)\b(?! in)", " ".join(mine.reading))


def test_what_was_not_compared_is_not_said_to_be_equal(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": normal(30, 8), UP: normal(8, 8), NORM: normal(8)}
    a = save(tmp_path / "a", tensors)
    longer = save(tmp_path / "b", tensors | {"model.embed_tokens.weight": np.vstack([normal(30, 8), normal(4, 8)])})
    reading = weightsmith.diff(a, longer, progress=False).reading
    assert reading == (
        "The same weights: every tensor that was compared is equal in every element.",
        "Compared in the rows that both have, the first 30: embed_tokens.",
    )
    reading = weightsmith.diff(
        a, save(tmp_path / "c", tensors | {NORM: normal(8, seed=1)}), tensors=["*up*"], progress=False
    ).reading
    assert reading == (
        "The same weights: every tensor that was compared is equal in every element.",
        "Only tensors that match '*up*' were compared.",
    )
    strange = save(tmp_path / "d", {"something": normal(8)})
    assert (
        weightsmith.diff(a, strange, progress=False).reading[0] == "The models have no tensor in common that can be compared."
    )
    assert weightsmith.diff(strange, strange, base=a, progress=False).reading == (
        "The models have no tensor in common that can be compared.",
        "Not compared: 3 tensors that some models lack or have in another shape, such as model.embed_tokens.weight.",
    )


def test_a_row_from_zero_moved_most(tmp_path: Path) -> None:
    old, new = normal(30, 8), normal(30, 8)
    old[5], new[5], new[6], new[7, 0] = 0, 1, 2 * old[6], NAN
    a, b = (save(tmp_path / which, {"model.embed_tokens.weight": x, UP: ONE}) for which, x in (("a", old), ("b", new)))
    mine = weightsmith.diff(a, b, progress=False)
    assert [(row.row, row.share) for row in mine.moved] == [(5, INF), (6, pytest.approx(1))]


# ---- task vectors, inspection, preview


@pytest.mark.long
def test_task_vectors_are_compared_in_the_finite_tensors(folders: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = folders
    third = save(tmp_path / "c", {NAMES[case]: normal(*pair[0].shape, seed=77) for case, pair in CASES.items()})
    mine = weightsmith.diff(b, third, base=a, progress=False)
    assert {tensor.name for tensor in mine.tensors} == set(NAMES.values())
    grams = np.zeros((2, 2))
    for case, (x, y) in CASES.items():
        (tensor,) = (tensor for tensor in mine.tensors if tensor.name == NAMES[case])
        counts = tuple(NonFiniteCounts.of(int(np.isnan(t).sum()), int(np.isinf(t).sum())) for t in (x, y))
        assert tensor.nonfinite == (*counts, NonFiniteCounts())
        undefined = any(counts) or case in ("a delta beyond float32", "squares beyond float64")
        assert tensor.measured == (not undefined)
        if undefined:
            assert np.isnan([*tensor.norms, *tensor.cosines]).all()
            assert math.isnan(tensor.conflict_share)
            continue
        z = normal(*x.shape, seed=77)
        d = np.stack([(t.astype(np.float64) - x).reshape(-1) for t in (y, z)])
        grams += d @ d.T
        norms = np.sqrt(np.square(d).sum(1))
        assert tensor.norms == pytest.approx(norms, rel=1e-6, abs=0)
        if all(norms):
            assert tensor.cosines[0] == pytest.approx(float(d[0] @ d[1]) / norms[0] / norms[1], abs=1e-6)
        else:
            assert math.isnan(tensor.cosines[0])
    total = mine.total
    assert total.norms == pytest.approx(np.sqrt(np.diag(grams)), rel=1e-6)
    assert total.cosines[0] == pytest.approx(grams[0, 1] / math.sqrt(grams[0, 0]) / math.sqrt(grams[1, 1]), abs=1e-6)
    assert mine.reading[0].startswith("The base has NaN in")
    assert any(f"leave {total.tensors - total.measured} tensors out" in text for text in mine.reading)
    json.dumps(mine.to_json(), allow_nan=False)
    text = to_html(comparison_report(mine))
    assert "contains NaN and infinities" in text


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_statistics_are_of_the_finite_elements(folders: tuple[Path, Path], which: int) -> None:
    mine = weightsmith.inspect(folders[which], stats=True, progress=False)
    assert mine.statistics is not None
    by_name = {tensor.name: tensor for tensor in mine.statistics}
    assert "model.empty.weight" not in by_name
    for case, pair in CASES.items():
        x, statistics = pair[which].astype(np.float64).reshape(-1), by_name[NAMES[case]]
        finite = x[np.isfinite(x)]
        assert (statistics.nans, statistics.infinities, statistics.zeros) == (
            np.isnan(x).sum(),
            np.isinf(x).sum(),
            (x == 0).sum(),
        )
        if not finite.size or case == "squares beyond float64":
            assert np.isnan([statistics.norm, statistics.mean, statistics.deviation]).all()
            continue
        assert (statistics.low, statistics.high) == (finite.min(), finite.max())
        assert statistics.mean == pytest.approx(finite.mean(), rel=1e-6)
        if case != "squares below float64":
            assert statistics.norm == pytest.approx(norm(finite), rel=1e-9, abs=0)
            assert statistics.deviation == pytest.approx(finite.std(), rel=1e-6, abs=0)
    json.dumps(mine.to_json(), allow_nan=False)
    to_html(inspection_report(mine))


def test_a_constant_has_no_deviation(tmp_path: Path) -> None:
    mine = weightsmith.inspect(save(tmp_path / "m", {UP: np.full((300, 70), 0.1, np.float32)}), stats=True, progress=False)
    assert mine.statistics is not None
    assert mine.statistics[0].deviation == 0
    page = inspection_report(mine)
    (peak,) = (block for block in page.blocks if isinstance(block, HeatMap) and block.title == "Largest element")
    assert peak.values == ((Mark.UNDEFINED,),)


def test_a_preview_says_where_the_merge_stops_and_measures_the_rest(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(5)]
    base = {name: normal(24, 24, seed=i) for i, name in enumerate(names)}
    a = {name: x + normal(24, 24, seed=50) for name, x in base.items()}
    b = {name: x - normal(24, 24, seed=51) for name, x in base.items()}
    a[names[0]], b[names[1]], b[names[2]] = put(a[names[0]], NAN), put(b[names[1]], INF), base[names[2]]
    for tensors in (base, a, b):
        tensors[names[4]] = put(tensors[names[4]], INF)  # a constant of the model: the merge copies it
    models = [{"model": str(save(tmp_path / n, x)), "parameters": {"weight": 0.5}} for n, x in (("a", a), ("b", b))]
    recipe: dict[str, Any] = {
        "merge_method": "task_arithmetic",
        "base_model": str(save(tmp_path / "base", base)),
        "models": models,
    }
    mine = weightsmith.preview(recipe, progress=False)
    assert mine.stops == (names[0], names[1])
    warned = " ".join(finding.what for finding in mine.warnings)
    assert f"the merge will stop with an error at {names[0]}; the numbers leave such tensors out" in warned
    assert f"{tmp_path / 'a'} has NaN in 1 element of 1 tensor and infinities in 1 element of 1 tensor" in warned
    deltas = {n: [x[n].astype(np.float64) - base[n] for x in (a, b)] for n in names[2:4]}
    merged = {n: 0.5 * sum(per_model) for n, per_model in deltas.items()}
    total = mine.total
    assert (total.tensors, total.measured) == (5, 2)
    assert total.delta == pytest.approx(norm(np.stack([*merged.values()])), rel=1e-5)
    for k, kept in enumerate(total.models):
        assert kept is not None
        d, m = (np.stack(list(x)) for x in ((per_model[k] for per_model in deltas.values()), merged.values()))
        least = np.where(d * m > 0, np.minimum(np.abs(d), np.abs(m)), 0)
        assert kept.norm == pytest.approx(norm(d), rel=1e-5)
        assert kept.survives == pytest.approx(float(np.square(least).sum() / np.square(d).sum()), rel=1e-4)
        assert kept.apart == pytest.approx(norm(m - d) / norm(d), rel=1e-4)
        assert kept.against == pytest.approx((d * m < 0).sum() / (d != 0).sum(), abs=1e-3)
    page = preview_report(mine)
    x, y = (block for block in page.blocks if isinstance(block, HeatMap) and block.title.startswith("What survives"))
    assert x.span == y.span == (0.0, 1.0)
    assert y.values[0][:3] == (Mark.NAN, Mark.INFINITE, Mark.SAME)
    assert y.values[0][4] is Mark.INFINITE
    assert "the merge will stop" in " ".join(page.summary[:-1])
    json.dumps(mine.to_json(), allow_nan=False)


# ---- what is shown


def test_a_page_has_one_mark_for_each_reason_and_no_number_that_is_none(difference: weightsmith.Difference) -> None:
    page = difference_report(difference)
    moved, ranks = (block for block in page.blocks if isinstance(block, HeatMap))
    for case, i in zip(CASES, range(len(CASES)), strict=True):
        tensor, cell, rank = tensor_of(difference, case), moved.values[0][i], ranks.values[0][i]
        assert rank == tensor.rank
        if not tensor.changed:
            assert cell is Mark.SAME
        elif any(tensor.nonfinite):
            assert cell is tensor.rank
        elif case in UNDEFINED:
            assert cell is Mark.UNDEFINED
        else:
            assert cell is Mark.NEW if case == "from zero" else cell == pytest.approx(tensor.share)
    text = to_html(page)
    for mark in {rank for rank in RANKS.values() if isinstance(rank, Mark)}:
        assert f">{mark.meaning}</text>" in heat_map(ranks)  # type: ignore[union-attr]
    assert not re.search(r">(nan|inf|-inf)( ?%)?<", text.replace(f">{Mark.INFINITE.word}<", "><"))
    json.dumps(page.to_json(), allow_nan=False)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("diff", "A", "B"), ("diff", "A", "B", "--tensors", "*"), ("diff", "B", "B", "--base", "A"), ("inspect", "B", "--stats")],
)
def test_the_terminal_has_marks_and_the_json_is_strict(cli: Cli, folders: tuple[Path, Path], words: tuple[str, ...]) -> None:
    args = [{"A": str(folders[0]), "B": str(folders[1])}.get(word, word) for word in words]
    out = cli(*args).out
    assert not re.search(r"nan|inf%", out.replace("finite", ""))
    json.loads(cli(*args, "--json").out, parse_constant=refuse)
    if "--tensors" in words:
        rows = (re.split(r"  +", line.strip()) for line in out.splitlines() if line.startswith("model.layers."))
        cells = {name: values for name, *values in rows}
        assert cells[NAMES["NaN in B"]][1:4] == ["NaN", "NaN", "NaN"]
        assert cells[NAMES["infinite in B"]][1:4] == ["inf", "inf", "inf"]
        assert cells[NAMES["NaN and infinities"]][1:4] == ["NaN+inf", "NaN+inf", "NaN+inf"]
        assert cells[NAMES["equal"]][:4] == ["0%", "same", "1", "same"]
        assert cells[NAMES["from zero"]][:4] == ["100%", "new", "?", "full"]
        assert cells[NAMES["unrelated"]][3] == "full"
        assert cells[NAMES["rank 300 of 300"]][3] == "high"
