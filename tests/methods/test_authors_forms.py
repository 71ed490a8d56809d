"""Our output beside each method as its authors' code has it: a whole model at a time, in float64, written from the maths.

Where a form differs on purpose, the test says by how much. The methods of mergekit that no paper has (nearswap, arcee_fusion,
nuslerp, multislerp) and the Gram methods have theirs in `tests/cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from weightsmith._execution.state_dicts import merge_state_dicts

Model = dict[str, np.ndarray]
Deltas = list[Model]
SHAPES = {
    "model.embed_tokens.weight": (30, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (48, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 48),
    "model.norm.weight": (32,),
}
LINEAR = [name for name in SHAPES if "proj" in name]


def models(count: int, *, shared: float = 0.5, sparse: float = 1.0) -> tuple[Model, list[Model]]:
    """A base and fine-tunes. shared: what of their change is the same; sparse: how much of the weights changes at all."""
    rng = np.random.default_rng(count)
    base = {name: rng.normal(0, 0.02, shape) for name, shape in SHAPES.items()}
    common = {name: rng.normal(0, 1e-3 * shared, shape) for name, shape in SHAPES.items()}
    tuned = []
    for _ in range(count):
        change = {n: (common[n] + rng.normal(0, 1e-3, s)) * (rng.random(s) < sparse) for n, s in SHAPES.items()}
        tuned.append({name: base[name] + change[name] for name in SHAPES})
    return base, tuned


def merged(method: str, base: Model, tuned: Sequence[Model], **parameters: Any) -> Model:
    """What is added to the base by ours."""
    out = merge_state_dicts(method, tuned, base=base, **parameters)
    return {name: out[name] - base[name] for name in base}


def task_vectors(base: Model, tuned: Sequence[Model]) -> Deltas:
    return [{name: model[name] - base[name] for name in base} for model in tuned]


def flat(model: Model, names: Sequence[str] = tuple(SHAPES)) -> np.ndarray:
    return np.concatenate([model[name].ravel() for name in names])


def near(got: np.ndarray, expected: np.ndarray, rtol: float = 1e-6) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * np.abs(expected).max())


def differing(got: np.ndarray, expected: np.ndarray) -> int:
    return int((np.abs(got - expected) > 1e-9).sum())


# ---- of one vector as long as the model


@pytest.mark.long
def test_ties() -> None:
    """The authors keep all that is as large as the (d - ⌊K d⌋)-th smallest: one element of each model more than ⌊K d⌋."""
    base, tuned = models(3)
    vectors = np.stack([flat(d) for d in task_vectors(base, tuned)])
    size = vectors.shape[1]
    least = np.sort(np.abs(vectors), axis=1)[:, size - int(0.2 * size) - 1]
    trimmed = np.where(np.abs(vectors) >= least[:, None], vectors, 0.0)
    sign = np.sign(trimmed.sum(0))
    sign[sign == 0] = np.sign(sign.sum())
    chosen = np.where(np.sign(trimmed) == sign, trimmed, 0.0)
    expected = 0.7 * chosen.sum(0) / np.maximum((chosen != 0).sum(0), 1)
    got = flat(merged("ties", base, tuned, weight=1.0, density=0.2, scope="model", lambda_=0.7))
    assert 0 < differing(got, expected) <= 3


@pytest.mark.long
def test_localize_and_stitch() -> None:
    """The authors keep what is larger than the smallest of the top k: one element less of each model; embeddings stay."""
    base, tuned = models(3)
    names = [name for name in SHAPES if "embed" not in name]
    vectors = np.stack([flat(d, names) for d in task_vectors(base, tuned)])
    threshold = np.sort(np.abs(vectors), axis=1)[:, -int(0.1 * vectors.shape[1])]
    mask = np.abs(vectors) > threshold[:, None]
    expected = (mask * vectors / np.maximum(mask.sum(0), 1)).sum(0)
    got = merged("localize_and_stitch", base, tuned)
    assert not got["model.embed_tokens.weight"].any()
    assert 0 < differing(flat(got, names), expected) <= 3


@pytest.mark.long
def test_ram_and_ramplus() -> None:
    base, tuned = models(3, sparse=0.3)
    vectors = np.stack([flat(d) for d in task_vectors(base, tuned)])
    active = np.abs(vectors) > 1e-5
    count = active.sum(0)
    mean = (vectors * active).sum(0) / np.maximum(count, 1)
    near(flat(merged("ram", base, tuned)), np.where(count == 1, (vectors * active).sum(0), mean))
    ratio = (active & (count > 1)).sum(1) / (active & (count == 1)).sum(1)
    factor = 1 + 0.2 * np.minimum(1, ratio)
    alone = (factor[:, None] * vectors * active).sum(0)
    near(flat(merged("ramplus", base, tuned, rescale=1.2)), np.where(count == 1, alone, mean))


def test_consensus_ta() -> None:
    base, tuned = models(4)
    vectors = np.stack([flat(d) for d in task_vectors(base, tuned)])
    total = vectors.sum(0)
    agreed = (np.abs(vectors) > 0.4 * np.abs(total - vectors)).sum(0)
    near(flat(merged("consensus_ta", base, tuned, threshold=0.4, k=2, lambda_=0.3)), 0.3 * total * (agreed >= 2))


def test_magmax() -> None:
    base, tuned = models(3)
    largest = np.zeros(sum(v.size for v in base.values()))
    for vector in (flat(d) for d in task_vectors(base, tuned)):  # one model at a time, as the authors go
        largest = np.where(np.abs(vector) >= np.abs(largest), vector, largest)
    near(flat(merged("magmax", base, tuned, lambda_=0.5)), 0.5 * largest)


# ---- of each tensor, whatever its shape


def test_task_arithmetic_and_soup() -> None:
    base, tuned = models(3)
    for name, delta in merged("task_arithmetic", base, tuned, weight=0.4).items():
        near(delta, 0.4 * sum(model[name] - base[name] for model in tuned))
    soup = merge_state_dicts("linear", tuned, weight=1.0)
    for name in SHAPES:
        near(soup[name], np.mean([model[name] for model in tuned], axis=0))


@pytest.mark.long
@pytest.mark.parametrize("density", [0.1, 0.7])
def test_dare(density: float) -> None:
    """What is not dropped is divided by the probability of staying."""
    base, (tuned,) = models(1)
    got = flat(merged("dare_linear", base, [tuned], weight=1.0, density=density, rescale="inv_density"))
    delta = flat(task_vectors(base, [tuned])[0])
    kept = got != 0
    near(got, np.where(kept, delta / density, 0.0))
    assert kept.mean() == pytest.approx(density, abs=5 * np.sqrt(density * (1 - density) / kept.size))


@pytest.mark.long
def test_della() -> None:
    """Ranks of magnitude in each row become probabilities, and each element is divided by its own."""
    base, (tuned,) = models(1)
    density, epsilon = 0.6, 0.15
    parameters = {"weight": 1.0, "density": density, "epsilon": epsilon, "rescale": "inv_probability"}
    got = merged("della_linear", base, [tuned], **parameters)
    for name, delta in task_vectors(base, [tuned])[0].items():
        rows = delta.reshape(-1, delta.shape[-1])
        rank = np.abs(rows).argsort(1).argsort(1)
        probability = density - epsilon + 2 * epsilon * rank / (rows.shape[1] - 1)
        thinned = got[name].reshape(rows.shape)
        near(thinned, np.where(thinned != 0, rows / probability, 0.0))


@pytest.mark.long
def test_breadcrumbs() -> None:
    """Of each row the largest are removed, then the next largest kept."""
    base, tuned = models(2)
    drop, keep = 2, 8  # of 32 and 48 columns
    deltas = task_vectors(base, tuned)
    names = [name for name, shape in SHAPES.items() if shape[-1] == 32]
    got = merged("breadcrumbs", base, tuned, weight=1.0, density=keep / 32, gamma=drop / 32, scope="row", lambda_=0.2)
    for name in names:
        expected = np.zeros(SHAPES[name])
        for delta in deltas:
            for row, out in zip(np.atleast_2d(delta[name]), np.atleast_2d(expected), strict=True):
                order = np.argsort(-np.abs(row))[drop : drop + keep]
                out[order] += 0.2 * row[order]
        near(got[name], expected)


@pytest.mark.long
def test_sce() -> None:
    """The selection makes the models' shares; what is merged are the whole deltas."""
    base, tuned = models(3)
    got = merged("sce", base, tuned, select_topk=0.1, select_applies_to="weights")
    for name in SHAPES:
        deltas = np.stack([model[name] - base[name] for model in tuned]).reshape(3, -1)
        variance = np.stack([model[name] for model in tuned]).reshape(3, -1).var(0)
        selected = variance >= np.sort(variance)[-int(0.1 * variance.size)]
        share = ((deltas * selected) ** 2).mean(1)
        share /= share.sum()
        sign = np.where(deltas.sum(0) >= 0, 1, -1)
        weight = share[:, None] * (np.sign(deltas) == sign)
        near(got[name].ravel(), (weight * deltas).sum(0) / np.maximum(weight.sum(0), 1e-300))


def test_sce_takes_the_positive_where_deltas_cancel() -> None:
    deltas = np.array([[1.0, -2.0, 3.0], [-1.0, 2.0, 3.0]])
    base = {"w": np.zeros(3)}
    got = merged("sce", base, [{"w": delta} for delta in deltas], select_topk=1.0, select_applies_to="weights")
    near(got["w"], np.array([1.0, 2.0, 3.0]))


@pytest.mark.long
def test_cabs_groups_the_flattened_matrix() -> None:
    """Here groups end with their row: the same where the columns are a multiple of the group."""
    base, tuned = models(2)
    got = merged("cabs", base, tuned, weight=1.2, density=0.25, group=16)
    for name in SHAPES:
        free = np.ones(base[name].size, bool)
        expected = np.zeros(base[name].size)
        for model in tuned:
            delta = (model[name] - base[name]).ravel()
            mask = np.zeros(delta.size, bool)
            for start in range(0, delta.size, 16):
                part = np.abs(delta[start : start + 16]) * free[start : start + 16]
                mask[start + np.argsort(-part)[:4]] = True
            expected += 1.2 * delta * mask
            free &= ~mask
        near(got[name].ravel(), expected)


# ---- of the matrices of linear layers; the mean of the deltas elsewhere


def svd(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.linalg.svd(a, full_matrices=False)


def tsv_m(deltas: list[np.ndarray]) -> np.ndarray:
    """The leading k singular triples of each in one sum of bases, and each basis made orthogonal by an SVD."""
    rank = min(deltas[0].shape)
    k = rank // len(deltas)
    u, s, v = np.zeros((len(deltas[0]), rank)), np.zeros(rank), np.zeros((rank, deltas[0].shape[1]))
    for i, delta in enumerate(deltas):
        ui, si, vi = svd(delta)
        u[:, i * k : (i + 1) * k], s[i * k : (i + 1) * k], v[i * k : (i + 1) * k] = ui[:, :k], si[:k], vi[:k]
    (uu, _, uv), (vu, _, vv) = svd(u[:, : k * len(deltas)]), svd(v[: k * len(deltas)])
    return uu @ uv @ np.diag(s[: k * len(deltas)]) @ vu @ vv


def iso_c(deltas: list[np.ndarray]) -> np.ndarray:
    u, s, v = svd(np.sum(deltas, axis=0))
    return s.mean() * u @ v


def iso_cts(deltas: list[np.ndarray]) -> np.ndarray:
    rank = min(deltas[0].shape)
    separate = round((rank - int(0.8 * rank)) / len(deltas))
    common = rank - separate * len(deltas)
    u, s, v = svd(np.sum(deltas, axis=0))
    us, ss, vs = [u[:, :common]], [s[:common]], [v[:common]]
    for delta in deltas:
        ui, si, vi = svd(delta - us[0] @ us[0].T @ delta)
        us, ss, vs = [*us, ui[:, :separate]], [*ss, si[:separate]], [*vs, vi[:separate]]
    (a, _, b), (c, _, d) = svd(np.concatenate(us, 1)), svd(np.concatenate(vs))
    return np.concatenate(ss).mean() * a @ b @ c @ d


def star(deltas: list[np.ndarray], known_rank: int | None = None) -> np.ndarray:
    total = np.zeros(deltas[0].shape)
    for delta in deltas:
        u, s, v = svd(delta)
        s = s[:known_rank]
        keep = int(np.searchsorted(np.cumsum(s), 0.4 * s.sum())) + 1
        total += u[:, :keep] @ np.diag(s[:keep] * s.sum() / s[:keep].sum()) @ v[:keep]
    return total / len(deltas)


def svc(deltas: list[np.ndarray]) -> np.ndarray:
    """After task arithmetic; every model has a part in every direction, so K is the number of models for all."""
    u, s, v = svd(np.sum(deltas, axis=0))
    scores = np.zeros((len(deltas), s.size))
    for i, delta in enumerate(deltas):
        for r in range(s.size):
            response, whole = u[:, r] @ delta, s[r] * v[r]
            scores[i, r] = max(1 / len(deltas), whole @ response / (response @ response))
    return u @ np.diag(s * len(deltas) / scores.sum(0)) @ v


def resmerge(deltas: list[np.ndarray]) -> np.ndarray:
    heads = [s[0] * np.outer(u[:, 0], v[0]) for u, s, v in map(svd, deltas)]
    rests = [delta - head for delta, head in zip(deltas, heads, strict=True)]
    unit = [rest / np.linalg.norm(rest) for rest in rests]
    direction = np.sum(unit, axis=0) / np.linalg.norm(np.sum(unit, axis=0))
    coherence = np.mean([np.sum(x * direction) for x in unit])
    assert coherence > 1 / np.sqrt(len(deltas))
    pairs = [(i, j) for i in range(len(deltas)) for j in range(i + 1, len(deltas))]
    alike = np.mean([np.sum(unit[i] * unit[j]) for i, j in pairs])
    beta = 1.0 - 0.3 * 0.5 * ((alike + 1) / 2 + (coherence + 1) / 2)
    backbone = direction * np.mean([np.linalg.norm(rest) for rest in rests]) * coherence**beta
    cosines = [np.sum(heads[i] * heads[j]) / np.linalg.norm(heads[i]) / np.linalg.norm(heads[j]) for i, j in pairs]
    head = np.mean(heads, axis=0)
    share = 0.2 * np.mean(np.maximum(cosines, 0)) * np.linalg.norm(backbone)
    return backbone + share * head / np.linalg.norm(head)


@pytest.mark.parametrize(
    ("method", "parameters", "form"),
    [
        ("tsv_m", {}, tsv_m), ("iso_c", {}, iso_c), ("iso_cts", {}, iso_cts), ("star", {}, star),
        ("star", {"known_rank": 5}, lambda deltas: star(deltas, 5)), ("svc", {}, svc), ("resmerge", {}, resmerge),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("count", [2, 3])
def test_methods_of_whole_matrices(
    method: str, parameters: dict[str, Any], form: Callable[[list[np.ndarray]], np.ndarray], count: int
) -> None:
    base, tuned = models(count)
    got = merged(method, base, tuned, **parameters)
    for name in SHAPES:
        deltas = [model[name] - base[name] for model in tuned]
        if name in LINEAR:
            near(got[name], form(deltas), 1e-5)
        else:
            near(got[name], np.sum(deltas, axis=0) if method == "svc" else np.mean(deltas, axis=0))


def test_wudi_is_where_the_authors_loss_is_least() -> None:
    """Σ ‖(Δ - δᵢ) δᵢᵀ‖² / ‖δᵢ‖² has no slope there, but for the ridge's; the authors' steps only walk towards it."""
    base, tuned = models(3)
    got = merged("wudi", base, tuned, ridge=1e-6)
    for name in LINEAR:
        deltas = [model[name] - base[name] for model in tuned]

        def slope(at: np.ndarray, deltas: list[np.ndarray] = deltas) -> np.ndarray:
            return np.asarray(sum((at - d) @ d.T @ d / np.sum(d * d) for d in deltas))

        assert np.linalg.norm(slope(got[name])) < 1e-5 * np.linalg.norm(slope(np.sum(deltas, axis=0)))


def test_cart() -> None:
    _, tuned = models(3)
    got = merge_state_dicts("cart", tuned, rank=0.055, lambda_=0.7)
    for name in SHAPES:
        mean = np.mean([model[name] for model in tuned], axis=0)
        expected = mean.copy()
        for model in tuned if name in LINEAR else ():
            u, s, v = svd(model[name] - mean)
            keep = int(0.055 * s.size)
            expected += 0.7 * u[:, :keep] @ np.diag(s[:keep]) @ v[:keep]
        near(got[name], expected)
