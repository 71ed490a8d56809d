"""Merges that look at a text: their results are those of the closed forms, on what transformers computes in float64."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import weightsmith
from tests.activations.test_statistics import Whole
from tests.calibration_help import CONFIGS, TEXT, TINY, changed, save_model
from tests.plan_help import prepare
from weightsmith._engine import product_graph
from weightsmith._engine.product_graph import most_bytes
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.staging import Staging
from weightsmith._plans import Product
from weightsmith.abc.output import Finished
from weightsmith.abc.product import Arrays, ProductKind

Weights = dict[str, torch.Tensor]
ROWS, TOKENS = 6, 16
WEIGHTS = [
    f"model.layers.{i}.{name}.weight"
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models, and two texts."""
    models = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "a", "b")):
        save_model(models / name, seed=seed)
        changed(models / name, o_proj=8, down_proj=8, lm_head=20, embed_tokens=20)
    (models / "a.txt").write_text(TEXT)
    (models / "b.txt").write_text(TEXT.upper()[::-1])
    return models


def recipe(folder: Path, method: str, **parameters: Any) -> dict[str, Any]:
    return {
        "merge_method": method,
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / name), "text": text_of(folder, name)} for name in "ab"],
        "parameters": parameters,
        "dtype": "float32",
    }


def text_of(folder: Path, name: str) -> dict[str, Any]:
    return {"file": str(folder / f"{name}.txt"), "rows": ROWS, "tokens": TOKENS}


def merged(folder: Path, out: Path, method: str, **parameters: Any) -> Weights:
    weightsmith.merge(recipe(folder, method, **parameters), out, card=False, progress=False)
    return load_file(out / "model.safetensors")


def stored(folder: Path) -> Weights:
    return {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}


def whole(folder: Path, name: str, text: str = "") -> Whole:
    source = str(folder / f"{text or name}.txt")
    return Whole(folder / name, QuantizeSettings(calibration=source, calibration_rows=ROWS, calibration_tokens=TOKENS))


def assert_merged(weights: Weights, expected: Callable[[str], torch.Tensor], folder: Path) -> None:
    """The weights of linear layers are as expected; the others have the mean of the deltas."""
    base, a, b = (stored(folder / name) for name in ("base", "a", "b"))
    for name in WEIGHTS:
        torch.testing.assert_close(weights[name].double() - base[name], expected(name), rtol=1e-3, atol=1e-4)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"):
        torch.testing.assert_close(weights[name].double(), (a[name] + b[name]) / 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("parameters", "alpha", "mu"),
    [
        ({"ridge": 0.05}, 1.0, 0.0),
        ({"ridge": 0, "alpha": 0.9}, 0.9, 0.0),
        ({"ridge": 0.05, "prior": "tsv_m", "prior_parameters": {"directions": 8, "lambda": 0.7}, "mu": 0.5}, 1.0, 0.5),
        ({"ridge": 0.05, "prior": "task_arithmetic", "prior_parameters": {"lambda": 0.4}, "mu": 0.5}, 1.0, 0.5),
        ({"ridge": 0.05, "prior": "linear", "mu": 0.5}, 1.0, 0.5),
    ],
)
def test_regmean_is_the_closed_form(parameters: dict[str, Any], alpha: float, mu: float, folder: Path, tmp_path: Path) -> None:
    weights = merged(folder, tmp_path / "out", "regmean", **parameters)
    models = [whole(folder, name) for name in "ab"]
    base, a, b = (stored(folder / name) for name in ("base", "a", "b"))
    prior = {name: torch.zeros(()) for name in base}
    if mu:
        other = recipe(folder, parameters["prior"], **parameters.get("prior_parameters", {}))
        other["models"] = [{"model": str(folder / name), "parameters": {"weight": 1}} for name in "ab"]
        if parameters["prior"] == "linear":
            del other["base_model"]
        weightsmith.merge(other, tmp_path / "prior", card=False, progress=False)
        prior = {name: tensor - base[name] for name, tensor in stored(tmp_path / "prior").items()}

    def expected(name: str) -> torch.Tensor:
        grams = []
        for model in models:
            x = model.entering(name.removesuffix(".weight"))
            gram = x.T @ x / len(x)
            grams.append(alpha * gram + (1 - alpha) * torch.diag(gram.diagonal()))
        total = sum(grams)
        m, one = total.diagonal().mean(), torch.eye(len(total), dtype=torch.float64)
        if parameters["ridge"] == 0:  # the authors' form: of weights, without the base
            return (a[name] @ grams[0] + b[name] @ grams[1]) @ torch.linalg.inv(total) - base[name]
        deltas = (a[name] - base[name]) @ grams[0] + (b[name] - base[name]) @ grams[1]
        return (deltas + mu * m * prior[name]) @ torch.linalg.inv(total + (mu + parameters["ridge"]) * m * one)

    assert_merged(weights, expected, folder)


@pytest.mark.long
def test_texts_run_through_the_merged_layers(deep: Path, tmp_path: Path) -> None:
    """Layer by layer: what comes out of the merged layers below enters each model's own layer, which is measured."""
    base, a, b = (stored(deep / name) for name in ("base", "a", "b"))
    states = [whole(deep, name) for name in "ab"]
    expected: Weights = {}
    ridge = 0.05

    def put(model: Whole, weights: Weights, prefix: str) -> None:
        model.model.load_state_dict({k: v for k, v in weights.items() if k.startswith(prefix)}, strict=False)

    means = {name: (a[name] + b[name]) / 2 for name in base}
    for state in states:
        put(state, means, "model.embed_tokens")
    for layer in range(5):
        prefix = f"model.layers.{layer}."
        names = [name for name in base if name.startswith(prefix) and name.endswith("proj.weight")]
        for state, tensors in zip(states, (a, b), strict=True):
            put(state, tensors, prefix)
        for name in names:
            grams = []
            for state in states:
                x = state.entering(name.removesuffix(".weight"))
                grams.append(x.T @ x / len(x))
            total = sum(grams)
            m, one = total.diagonal().mean(), torch.eye(len(total), dtype=torch.float64)
            deltas = (a[name] - base[name]) @ grams[0] + (b[name] - base[name]) @ grams[1]
            expected[name] = deltas @ torch.linalg.inv(total + ridge * m * one)
        done = {name: base[name] + expected[name] if name in expected else means[name] for name in base}
        for state in states:
            put(state, done, prefix)
    weights = merged(deep, tmp_path / "merge", "regmean", through="merge", ridge=ridge)
    plain = merged(deep, tmp_path / "model", "regmean", ridge=ridge)
    assert len(expected) == 5 * 7
    for name, delta in expected.items():
        torch.testing.assert_close(weights[name].double() - base[name], delta, rtol=1e-3, atol=2e-4)
    last = "model.layers.4.mlp.down_proj.weight"
    assert float((plain[last].double() - base[last] - expected[last]).abs().max()) > 2e-3


@pytest.mark.slow
def test_fisher_is_the_weighted_mean(folder: Path, tmp_path: Path) -> None:
    weights = merged(folder, tmp_path / "out", "fisher", floor=0.1)
    information = [whole(folder, name).fisher() for name in "ab"]
    base, a, b = (stored(folder / name) for name in ("base", "a", "b"))

    def expected(name: str) -> torch.Tensor:
        diagonals = torch.stack([diagonal[name] for diagonal in information])
        diagonals = diagonals.clamp(min=0.1 * diagonals.mean())
        return (diagonals[0] * (a[name] - base[name]) + diagonals[1] * (b[name] - base[name])) / diagonals.sum(0)

    assert_merged(weights, expected, folder)


@pytest.mark.matrix("2")
@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 2])
def test_core_steps_are_those_of_the_closed_form(folder: Path, tmp_path: Path, steps: int) -> None:
    """Several steps are recipes within each other: the text runs through what the step before made."""
    start: Any = {"merge_method": "task_arithmetic", "base_model": str(folder / "base"), "dtype": "float32"}
    start["models"] = [{"model": str(folder / "a"), "parameters": {"weight": 0.5}}]
    for _ in range(steps):
        start = {
            "merge_method": "core_step",
            "base_model": start,
            "text": text_of(folder, "a"),
            "models": [{"model": str(folder / name)} for name in ("base", "a", "b")],
            "parameters": {"directions": 2, "step": 0.5, "damping": 2},
            "dtype": "float32",
        }
    weightsmith.merge(start, tmp_path / "out", card=False, progress=False)
    base, a, b = (stored(folder / name) for name in ("base", "a", "b"))
    expected = {name: base[name] + 0.5 * (a[name] - base[name]) for name in base}
    for _ in range(steps):
        model = whole(folder, "base", "a")
        model.model.load_state_dict(expected)
        slopes = model.slopes()
        for name in (name for name in base if "_proj" in name):
            u, v = (
                torch.linalg.qr(torch.cat(both, 1))[0] for both in zip(*_leading([a[name], b[name]], base[name]), strict=True)
            )
            x = model.entering(name.removesuffix(".weight")) @ v
            core, outputs = u.T @ slopes[name] @ v, u.T @ model.slope_moments(name.removesuffix(".weight")) @ u
            damped = [m + 2 * m.diagonal().mean() * torch.eye(len(m)) for m in (outputs, x.T @ x / len(x))]
            expected[name] = expected[name] + 0.5 * u @ damped[0].inverse() @ core @ damped[1].inverse() @ v.T
    weights = stored(tmp_path / "out")
    for name in base:
        moved = float((expected[name] - base[name]).abs().max())
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=2e-3 * moved)
    assert float((weights[WEIGHTS[0]] - base[WEIGHTS[0]] - 0.5 * (a[WEIGHTS[0]] - base[WEIGHTS[0]])).abs().max()) > 1e-3


def _leading(models: list[torch.Tensor], base: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The two leading singular vectors of each model's delta, left and right."""
    directions = []
    for model in models:
        u, _, vt = torch.linalg.svd(model - base)
        directions.append((u[:, :2], vt[:2].T))
    return directions


@pytest.mark.long
def test_aim_scales_the_columns_of_any_merge_by_what_enters_the_base(folder: Path, tmp_path: Path) -> None:
    asked = recipe(folder, "task_arithmetic", weight=0.5, aim=0.4, delta_scale=0.5)
    asked["models"] = [{"model": str(folder / name)} for name in "ab"]
    asked["text"] = text_of(folder, "a")
    weightsmith.merge(asked, tmp_path / "out", card=False, progress=False)
    weights, model = stored(tmp_path / "out"), whole(folder, "base", "a")
    base, a, b = (stored(folder / name) for name in ("base", "a", "b"))
    for name in base:
        delta = (0.5 * (a[name] + b[name]) - base[name]) * 0.5
        if name in WEIGHTS:
            sizes = model.entering(name.removesuffix(".weight")).abs().mean(0)
            delta *= 1 - 0.6 * sizes / sizes.max()
        if name in WEIGHTS or "norm" in name or "embed" in name:
            torch.testing.assert_close(weights[name] - base[name], delta, rtol=1e-4, atol=1e-5)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("method", "parameters"), [("regmean", {}), ("regmean", {"through": "merge"}), ("fisher", {})])
def test_threads_kills_and_plans_from_json_change_no_byte(
    method: str, parameters: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, product_names = Staging.keep, list[str]()

    def stop(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        if len(product_names) == 6:
            raise KeyboardInterrupt
        product_names.append(product.name)
        return keep(staging, product, arrays)

    asked = recipe(folder, method, **parameters)
    weightsmith.merge(asked, tmp_path / "one", threads=1, card=False, progress=False)
    with prepare(asked) as prepared:
        (tmp_path / "plan.json").write_text(json.dumps(prepared.plan.to_json()))
        monkeypatch.setattr(Staging, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            execute(prepared, tmp_path / "two", RunOptions(threads=2, card=False))
        monkeypatch.undo()
    weightsmith.merge(asked, tmp_path / "two", threads=2, card=False, progress=False)
    weightsmith.run(tmp_path / "plan.json", tmp_path / "three", progress=False)
    one, two, three = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two == three


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of five layers, and two texts."""
    root = tmp_path_factory.mktemp("deep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "llama", lambda: transformers.LlamaConfig(**TINY | {"num_hidden_layers": 5}))
        for seed, name in enumerate(("base", "a", "b")):
            save_model(root / name, seed=seed)
    (root / "a.txt").write_text(TEXT)
    (root / "b.txt").write_text(TEXT.upper()[::-1])
    return root


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "parameters", "states"), [("regmean", {}, 3), ("regmean", {"through": "merge"}, 3), ("fisher", {}, 12)]
)
def test_statistics_are_released_layer_by_layer(
    method: str, parameters: dict[str, Any], states: int, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds the statistics of one layer of each model; a run that died goes on without those of finished layers."""
    keep, taken, product_names, known = Staging.keep, list[int](), list[str](), dict[str, int]()

    def watch(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        kept = keep(staging, product, arrays)
        product_names.append(product.name)
        known[product.name] = sum(array.nbytes for array in arrays)
        taken.append(sum(known[name] for name in staging.products))
        return kept

    def stop(staging: Staging, name: str, done: Finished) -> None:
        if name == "model.layers.2.self_attn.o_proj.weight":
            raise KeyboardInterrupt
        finish(staging, name, done)

    monkeypatch.setattr(Staging, "keep", watch)
    asked, finish = recipe(deep, method, **parameters), Staging.finish
    weightsmith.merge(asked, tmp_path / "one", threads=1, card=False, progress=False)
    with prepare(asked) as prepared:
        sizes = {p.name: sum(out.nbytes for out in p.outs) for p in prepared.plan.products if p.op == "statistic"}
        most = most_bytes(prepared.plan)
        assert max(taken) <= most == 2 * max(sizes.values()) + states * ROWS * TOKENS * TINY["hidden_size"] * 4
        product_names.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "finish", stop)
            with pytest.raises(KeyboardInterrupt):
                execute(prepared, tmp_path / "two", RunOptions(threads=2, card=False))
    kept_bytes = {path.name: path.stat().st_size for path in tmp_path.glob(".two*staging/products/*")}
    assert 0 < sum(kept_bytes.values()) <= most, kept_bytes
    first = {name for name in product_names if name in sizes}
    product_names.clear()
    weightsmith.merge(asked, tmp_path / "two", threads=2, card=False, progress=False)
    again = {name for name in product_names if name in sizes}
    assert 4 <= len(first) < 10
    assert len(first & again) <= 2
    assert first | again == set(sizes)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.long
def test_no_model_is_layers_ahead_where_products_are_begun_slowly(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk would hold the statistics of two layers. The main thread begins products; here it is slower than they are."""
    keep, find, kept, order = Staging.keep, product_graph.find_kind, threading.Event(), list[str]()

    def watch(staging: Staging, product: Product, arrays: Arrays) -> Arrays:
        if product.op == "statistic":
            order.append(product.name)
        kept.set()
        return keep(staging, product, arrays)

    def slow(op: str) -> ProductKind:
        computes = any(thread.name == "weightsmith-product" for thread in threading.enumerate())
        if computes and threading.current_thread() is threading.main_thread():
            kept.wait(10)
            time.sleep(0.5)
        return find(op)

    monkeypatch.setattr(Staging, "keep", watch)
    monkeypatch.setattr(product_graph, "find_kind", slow)
    weightsmith.merge(recipe(deep, "regmean"), tmp_path / "out", threads=2, card=False, progress=False)
    layers = [int(name.rpartition(" ")[2]) for name in order]
    assert layers == sorted(layers)
    assert len(layers) == 10


@pytest.mark.long
def test_statistics_are_removed_before_those_of_the_next_layer_are_begun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that finish the last matrices of a layer together, and a disk that removes files slowly."""
    create, forget, finish, stored_bytes = Staging.create, Staging.forget, Staging.finish, list[int]()

    def watch(staging: Staging, product: Product) -> Arrays | None:
        arrays = create(staging, product)
        stored_bytes.append(sum(path.stat().st_size for path in staging.folder.glob("products/*")))
        return arrays

    def slow_forget(staging: Staging, product: Product) -> None:
        time.sleep(0.2 if threading.current_thread().name.endswith(("1", "3")) else 0.02)
        forget(staging, product)

    def slow_finish(staging: Staging, name: str, done: Finished) -> None:
        time.sleep(0.05 * ("_proj" in name))
        finish(staging, name, done)

    for name, replacement in (("create", watch), ("forget", slow_forget), ("finish", slow_finish)):
        monkeypatch.setattr(Staging, name, replacement)
    asked = recipe(folder, "regmean")
    weightsmith.merge(asked, tmp_path / "out", threads=4, card=False, progress=False)
    with prepare(asked) as prepared:
        assert 0 < max(stored_bytes) <= most_bytes(prepared.plan)


@pytest.mark.long
def test_a_full_preview_has_the_distance_of_the_merge(folder: Path, tmp_path: Path) -> None:
    source = recipe(folder, "regmean", prior="tsv_m")
    previewed = weightsmith.preview(source, full=True, progress=False)
    result = weightsmith.merge(source, tmp_path / "out", card=False, progress=False)
    assert previewed.total.share == pytest.approx(result.distance[0].share, rel=1e-6)


@pytest.mark.long
def test_experts_that_no_token_reaches_and_fused_weights_are_merged_too(tmp_path: Path) -> None:
    """phi-3 stores q, k and v as one matrix; a short text leaves experts of mixtral without a token."""
    for family in ("phi3", "mixtral"):
        models_folder = tmp_path / family
        for seed, name in enumerate(("base", "a", "b")):
            save_model(models_folder / name, family, seed=seed)
        for name in "ab":
            (models_folder / f"{name}.txt").write_text(TEXT)
        for method in ("regmean", "fisher"):
            asked = recipe(models_folder, method)
            for entry in asked["models"]:
                entry["text"]["rows"] = 1
            with prepare(asked) as prepared:
                leaves = [leaf for step in prepared.plan.steps for leaf in step.leaves if leaf.role == "linear"]
                assert all(len(leaf.statistics) == 2 for leaf in leaves)
            weightsmith.merge(asked, models_folder / method, card=False, progress=False)
            assert all(
                bool(tensor.isfinite().all()) for tensor in load_file(models_folder / method / "model.safetensors").values()
            )


@pytest.mark.long
def test_a_regression_mean_of_adapters_is_an_adapter_of_the_sum_of_their_ranks(folder: Path, tmp_path: Path) -> None:
    asked = recipe(folder, "regmean")
    options: Any = {"embed_lora": False, "progress": False}
    for model, name, rank in zip(asked["models"], "ab", (2, 3), strict=True):
        weightsmith.extract_lora(folder / name, folder / "base", tmp_path / name, max_rank=rank, **options)
        model["model"] = f"{folder / 'base'}+{tmp_path / name}"
    weightsmith.merge(asked, tmp_path / "out", card=False, progress=False)
    weights, base = load_file(tmp_path / "out/model.safetensors"), stored(folder / "base")
    for rank, error in ((5, 1e-4), (4, 1e-2)):
        lora = tmp_path / f"lora-{rank}"
        weightsmith.extract_lora(tmp_path / "out", folder / "base", lora, max_rank=rank, **options)
        again = {"merge_method": "passthrough", "models": [{"model": f"{folder / 'base'}+{lora}"}], "dtype": "float32"}
        weightsmith.merge(again, tmp_path / f"again-{rank}", card=False, progress=False)
        restored = load_file(tmp_path / f"again-{rank}/model.safetensors")
        moved = [(weights[name] - base[name]).norm() for name in WEIGHTS]
        off = [(restored[name] - weights[name]).norm() for name in WEIGHTS]
        worst = max(float(a / b) for a, b in zip(off, moved, strict=True))
        assert worst < error if rank == 5 else worst > error
