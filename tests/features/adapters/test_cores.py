"""The spaces that adapters are merged in: against the authors' formulas in numpy, and in any order of the adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.features.adapters.test_merge import SHAPES, delta, merge
from tests.kernels.reference import random_mask
from tests.mini import write_checkpoint
from tests.models.lora.test_lora import DOWN, INNER, H, Q, adapter, factors, normal
from tests.sampling import sampled
from weightsmith._features.adapters import combinations
from weightsmith._methods import NAMES, get
from weightsmith._methods.jobs.task_vectors import random_key

torch = pytest.importorskip("torch")

Array = np.ndarray[Any, np.dtype[np.float64]]
WEIGHTS = (1.0, 0.7, -0.4)
RANKS, ALPHAS = (4, 2, 3), (8.0, 3.0, 1.0)


def three(folder: Path) -> tuple[Path, ...]:
    """Adapters of different ranks and scalings; the last has no factors of the second module."""
    adapters = []
    for i, (rank, alpha) in enumerate(zip(RANKS, ALPHAS, strict=True)):
        tensors = factors(Q, H, H, rank, seed=10 * i) | (factors(DOWN, H, INNER, rank, seed=10 * i + 3) if i < 2 else {})
        adapters.append(adapter(folder / f"adapter {i}", tensors, r=rank, lora_alpha=alpha))
    return tuple(adapters)


# ---- Core Space, from the paper: Panariello et al. 2025, section 3


def paper(folders: Sequence[int]) -> tuple[Array, Array, list[Array]]:
    """U_B^ref, V_A^ref and the core matrices of Q, from SVDs of the stacked factors; lora_alpha / r is part of B."""
    a = [normal(RANKS[i], H, seed=10 * i).astype(np.float64) for i in folders]
    b = [normal(H, RANKS[i], seed=10 * i + 1).astype(np.float64) * ALPHAS[i] / RANKS[i] for i in folders]
    u, v = np.linalg.svd(np.hstack(b), full_matrices=False)[0], np.linalg.svd(np.vstack(a), full_matrices=False)[2].T
    return u, v, [u.T @ y @ x @ v for x, y in zip(a, b, strict=True)]


def ties(cores: Sequence[Array]) -> Array:
    """Yadav et al. 2023: trim to half, elect signs, mean of those that agree."""
    kept = [np.where(np.abs(m) >= np.sort(np.abs(m).ravel())[-(m.size // 2)], m, 0) for m in cores]
    sign = np.sign(sum(kept))
    agree = [np.where(np.sign(m) == sign, m, 0) for m in kept]
    count = sum((m != 0).astype(float) for m in agree)
    core: Array = sum(agree) / np.maximum(count, 1)
    return core


def dare(cores: Sequence[Array]) -> Array:
    """Yu et al. 2023: a random half, divided by the density, summed. The masks are this program's."""
    masks = [random_mask(random_key(0, i, Q), m.size, 0.5).reshape(m.shape) for i, m in enumerate(cores)]
    core: Array = sum(np.where(mask, m, 0) / 0.5 for mask, m in zip(masks, cores, strict=True))
    return core


def dare_ties(cores: Sequence[Array]) -> Array:
    """The same masks, then TIES' election."""
    masks = [random_mask(random_key(0, i, Q), m.size, 0.5).reshape(m.shape) for i, m in enumerate(cores)]
    kept = [np.where(mask, m, 0) / 0.5 for mask, m in zip(masks, cores, strict=True)]
    sign = np.sign(sum(kept))
    core: Array = sum(np.where(np.sign(m) == sign, m, 0) for m in kept)
    return core


def tsv(cores: Sequence[Array]) -> Array:
    """Gargiulo et al. 2024: the k / n leading singular triples of each, as many as it has, made orthogonal together."""
    parts = []
    for left, values, right in map(np.linalg.svd, cores):
        keep = min(len(values) // len(cores), int((values > 1e-9 * values[0]).sum()))
        parts.append((left[:, :keep], values[:keep], right[:keep].T))
    u, s, v = (np.concatenate(matrices, -1) for matrices in zip(*parts, strict=True))
    (p, _, q), (x, _, y) = np.linalg.svd(u, full_matrices=False), np.linalg.svd(v, full_matrices=False)
    merged: Array = p @ q @ np.diag(s) @ (x @ y).T
    return merged


def iso(cores: Sequence[Array]) -> Array:
    """Marczak et al. 2025: the sum with its singular values all equal to their mean."""
    u, s, vt = np.linalg.svd(sum(cores))
    core: Array = s.mean() * u @ vt
    return core


def mean(cores: Sequence[Array]) -> Array:
    """The weighted average."""
    core: Array = (cores[0] + 0.7 * cores[1] - 0.4 * cores[2]) / 1.3
    return core


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "per_model", "shared", "formula"),
    [
        ("linear", {}, {}, mean),
        ("ties", {"weight": 1.0, "density": 0.5}, {"normalize": True}, ties),
        ("dare_linear", {"weight": 1.0, "density": 0.5}, {"rescale": "inv_density"}, dare),
        ("dare_ties", {"weight": 1.0, "density": 0.5}, {"rescale": "inv_density"}, dare_ties),
        ("tsv_m", {"weight": 1.0}, {}, tsv),
        ("iso_c", {"weight": 1.0}, {}, iso),
    ],
)
def test_core_space_is_the_paper_s(
    method: str, per_model: dict[str, Any], shared: dict[str, Any], formula: Any, tmp_path: Path
) -> None:
    adapters, order = three(tmp_path), (2, 0, 1)
    u, v, cores = paper(order)
    for i, core in zip(order, cores, strict=True):
        np.testing.assert_allclose(u @ core @ v.T, delta(adapters[i], Q), atol=1e-12 * np.abs(core).max())
    models = [{"model": str(adapters[i]), "parameters": {"weight": WEIGHTS[i], **per_model}} for i in order]
    what = {"merge_method": method, "models": models, "parameters": shared}
    want = u @ formula([cores[order.index(i)] for i in (0, 1, 2)] if method == "linear" else cores) @ v.T
    np.testing.assert_allclose(delta(merge(what, tmp_path / "out"), Q), want, atol=3e-6 * np.abs(want).max())


@pytest.mark.long
@pytest.mark.parametrize("method", ["slerp", "karcher"])
def test_methods_on_the_sphere_give_what_they_give_of_models(method: str, tmp_path: Path) -> None:
    """They see lengths and angles alone, which are those of the models."""
    adapters = three(tmp_path)[:2]
    name = f"{Q}.weight"
    models = [write_checkpoint(tmp_path / f"model {i}", {name: delta(a, Q)}) for i, a in enumerate(adapters)]
    shared = {"t": 0.3} if method == "slerp" else {}
    as_adapters, as_models = (
        {"merge_method": method, "models": [{"model": str(f)} for f in folders], "parameters": shared}
        | ({"base_model": str(folders[0])} if method == "slerp" else {})
        for folders in (adapters, models)
    )
    with weightsmith.open_checkpoint(merge(as_models, tmp_path / "model")) as checkpoint:
        want = checkpoint.read(name)
    np.testing.assert_allclose(delta(merge(as_adapters, tmp_path / "out"), Q), want, atol=3e-6 * np.abs(want).max())


def of_models(adapters: Sequence[Path], method: str, shared: dict[str, Any], tmp_path: Path) -> tuple[Array, Array]:
    """What a merge of adapters adds to Q, and what the merge of the models does."""
    name, zero = f"{Q}.weight", np.zeros((H, H), np.float32)
    models = [write_checkpoint(tmp_path / f"model {i}", {name: delta(a, Q).astype(np.float32)}) for i, a in enumerate(adapters)]
    what: dict[str, Any] = {"merge_method": method, "models": [{"model": str(m)} for m in models], "parameters": shared}
    what["base_model"] = str(write_checkpoint(tmp_path / "zero", {name: zero}))
    with weightsmith.open_checkpoint(merge(what, tmp_path / "merged models")) as checkpoint:
        want = checkpoint.read(name).astype(np.float64)
    what = {"merge_method": method, "models": [{"model": str(a)} for a in adapters], "parameters": shared}
    return delta(merge(what, tmp_path / "merged adapters"), Q), want


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svc", "star", "resmerge", "tsv_m"])
def test_methods_on_whole_matrices_that_give_what_they_give_of_models(method: str, tmp_path: Path) -> None:
    actual, want = of_models(three(tmp_path), method, {"directions": 4} if method == "tsv_m" else {}, tmp_path)
    np.testing.assert_allclose(actual, want, atol=3e-6 * np.abs(want).max())


@pytest.mark.slow
def test_iso_c_has_the_mean_of_the_small_matrix_and_tsv_m_its_share_of_the_rank(tmp_path: Path) -> None:
    actual, want = of_models(three(tmp_path), "iso_c", {}, tmp_path / "iso")
    np.testing.assert_allclose(actual, want * H / sum(RANKS), atol=3e-6 * np.abs(actual).max())
    actual, want = of_models(three(tmp_path), "tsv_m", {}, tmp_path / "tsv")
    assert np.linalg.norm(actual - want) > 0.1 * np.linalg.norm(want)


def test_small_factors_are_not_lost_beside_large_ones(tmp_path: Path) -> None:
    """The size of B alone says nothing: A may make up for it."""
    tensors = {name: a * (1e-9 if "_B" in name else 1e9) for name, a in factors(Q, H, H, 2, seed=5).items()}
    pair = (adapter(tmp_path / "one", factors(Q, H, H, 4)), adapter(tmp_path / "two", tensors, r=2))
    models = [{"model": str(p), "parameters": {"weight": 1.0}} for p in pair]
    out = merge({"merge_method": "task_arithmetic", "models": models}, tmp_path / "out")
    want = delta(pair[0], Q) + delta(pair[1], Q)
    np.testing.assert_allclose(delta(out, Q), want, atol=3e-6 * np.abs(want).max())


# ---- any order

BY_POSITION = {
    "dare_linear": "its random masks are keyed by position",
    "dare_ties": "its random masks are keyed by position",
    "della": "its random masks are keyed by position",
    "della_linear": "its random masks are keyed by position",
    "cabs": "each model keeps what no earlier one has kept",
    "passthrough": "it takes one model",
    "train_difference": "the first model is changed",
    "smooth_add": "the first model is changed",
    "similarity_add": "the first model is changed",
    "splice": "rows are those of one of the two",
    "distribution_crossover": "the first model supplies the low frequencies",
    "rotate": "the first model is turned",
    "add_noise": "it takes one model",
    "peft_dare_linear": "its random masks are keyed by position",
    "peft_dare_ties": "its random masks are keyed by position",
    "peft_dare_linear_svd": "its random masks are keyed by position",
    "peft_dare_ties_svd": "its random masks are keyed by position",
}
"""Methods of which the order of the models is a parameter."""

REFUSED = {"ramplus"}
"""They look at the whole model before they merge."""

FROM_BASE = {"slerp", "nearswap", "arcee_fusion", "cosine", "splice", "crossover"}
PAIRS = {*FROM_BASE, "nuslerp", "train_difference", "extract_rows", "smooth_add", "similarity_add"}
PAIRS |= {"distribution_crossover", "rotate"}
"""Methods for two models. Six of them start from the base, which is one of the two."""

ALONE = {"passthrough", "add_noise"}

VALUES: dict[str, Any] = {
    "t": 0.3,
    "density": 0.5,
    "scope": "tensor",
    "select_topk": 0.6,
    "group": 4,
    "epsilon": 0.1,
    "gamma": 0.1,
    "sparsify": "magnitude",
    "elect": "sum",
    "combine": "mean",
    "deviation": 0.01,
}


def parameters(method: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameters of each model, and of the recipe, with which the method changes something."""
    if method.startswith("peft_"):
        name = method.removeprefix("peft_")
        return [{"weight": w} for w in WEIGHTS], {"density": 0.5} if combinations.PeftCombination(name).prunes() else {}
    known = {p.name: p for p in get(method).parameters}
    per_model = [{"weight": weight} for weight in WEIGHTS] if "weight" in known else [{}, {}, {}]
    return per_model, {name: value for name, value in VALUES.items() if name in known}


def merged(adapters: Sequence[Path], order: Sequence[int], method: str, space: str, out: Path) -> dict[str, Array]:
    """What the merge adds to each module."""
    per_model, shared = parameters(method)
    models = [{"model": str(adapters[i]), "parameters": per_model[i]} for i in order]
    what: dict[str, Any] = {"merge_method": method, "models": models, "parameters": shared}
    if method in FROM_BASE:
        what["base_model"] = str(adapters[0])
    options = {"adapter_rank": 5} if space == "compressed" else {}
    folder = merge(what, out, adapter_space=space, **options)
    return {module: delta(folder, module) for module in SHAPES}


KINDS = ("linear", "slerp", "karcher", "nuslerp", "ties", "dare_ties", "sce", "cabs", "tsv_m", "iso_c", "passthrough")
"""A method of each kind: sums, angles, pairs, masks by size, by chance and by position, elections, whole matrices, copies."""

PLACES = [
    *(("core", name) for name in NAMES if name not in REFUSED),
    *(("core", f"peft_{name}") for name in combinations.NAMES),
    *((space, name) for space in ("knots", "compressed") for name in KINDS),
]
SAMPLE = [
    *(("core", name) for name in ("linear", "slerp", "ties", "dare_ties", "tsv_m", "passthrough")),
    *(("core", f"peft_{name}") for name in ("cat", "ties", "dare_linear_svd")),
    *((space, name) for space in ("knots", "compressed") for name in ("ties", "iso_c")),
]


@pytest.mark.matrix("core-linear", "core-ties", "knots-ties", "compressed-ties")
@pytest.mark.slow
@pytest.mark.parametrize("where", sampled(PLACES, SAMPLE, "-".join))
def test_the_order_of_the_adapters_does_not_matter(where: tuple[str, str], tmp_path: Path) -> None:
    """To the rounding of float32: 2e-6 of the largest element.

    Every method in one space: what it does with a small matrix is the same in the others.
    """
    (space, method), adapters = where, three(tmp_path)
    if method.removeprefix("peft_") in combinations.ON_FACTORS:
        adapters = tuple(adapter(tmp_path / f"equal {i}", factors(Q, H, H, 4, seed=9 * i), lora_alpha=i + 1) for i in range(3))
    orders = ((0, 1), (1, 0)) if method in PAIRS else ((0,), (1,)) if method in ALONE else ((0, 1, 2), (2, 0, 1))
    one, two = (merged(adapters, order, method, space, tmp_path / str(order)) for order in orders)
    off = max(np.abs(one[module] - two[module]).max() / max(np.abs(one[module]).max(), 1e-30) for module in SHAPES)
    assert (off > 0.01) if method in BY_POSITION else (off < 2e-6)


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_a_method_that_looks_at_the_whole_model_is_refused(method: str, tmp_path: Path) -> None:
    adapters = three(tmp_path)
    per_model, shared = parameters(method)
    models = [{"model": str(p), "parameters": o} for p, o in zip(adapters, per_model, strict=True)]
    with pytest.raises(weightsmith.PlanError, match="looks at the whole model"):
        weightsmith.plan({"merge_method": method, "models": models, "parameters": shared})
