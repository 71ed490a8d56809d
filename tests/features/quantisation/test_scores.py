"""Scores of GGUF's types: how each token's prediction changes, and the choice of types whose errors are together the least."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.calibration_help import captured, prepared_for, rows_for, save_model, settings
from weightsmith._features.quantisation.calibration import costs
from weightsmith._features.quantisation.optimise import Candidate, solve, solve_together
from weightsmith._models.formats import find_encoding
from weightsmith._plans.codec import has_type


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_scores_are_those_of_transformers_own_gradients(name: str, tmp_path: Path) -> None:
    """Summed over all tokens, g · Δx is ⟨∇ log p(labels), Δ⟩: for the embedding and for the head, tied (qwen2) or not."""
    folder = save_model(tmp_path / "m", name)
    if name == "gemma2":  # what llama.cpp takes for granted
        config = json.loads((folder / "config.json").read_text()) | {"query_pre_attn_scalar": 16}
        (folder / "config.json").write_text(json.dumps(config))
    quantize_settings = settings(tmp_path, bits=None, uniform=False, size_bytes=10**9)
    with prepared_for(folder, quantize_settings, name="gguf-q4_k_m") as prepared:
        arrays = captured(prepared, prepared.plan.products).arrays
        products = [product for product in prepared.plan.products if product.op.startswith("scored_")]
    ids = rows_for(quantize_settings, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = model(ids).logits
    for row, row_logits in enumerate(logits):
        draws = torch.from_numpy(np.random.default_rng([0, row]).random(len(row_logits), np.float32))
        p = row_logits.detach().softmax(-1)
        below = p.cumsum(1)
        labels = torch.searchsorted(below, (draws * below[:, -1])[:, None], right=True)
        row_logits.log_softmax(-1).gather(1, labels).sum().backward(retain_graph=True)
    gradients = {key: value.grad for key, value in model.named_parameters()}
    seen = 0
    for product in products:
        [scores] = arrays[product.name]
        assert scores.shape[2] == ids.numel()
        for number, (weight, tried) in enumerate(product.settings["candidates"].items()):
            plain = model.get_parameter(weight).detach().numpy()
            if "layers" in weight:
                continue  # their importances are those of their inputs
            for i, encoding in enumerate(tried):
                error = costs._error(plain, find_encoding(encoding), costs.NO_IMPORTANCES)
                expected = float((gradients[weight].numpy() * error).sum(dtype=np.float64))
                assert float(scores[number, i].sum(dtype=np.float64)) == pytest.approx(expected, rel=2e-2, abs=2e-3)
                seen += 1
    assert seen == (1 if name != "llama" else 2) * 5


@pytest.mark.long
def test_scores_of_layers_are_those_of_their_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error that does not depend on importances."""
    monkeypatch.setattr(costs, "_error", lambda part, encoding, importances: np.float32(0.01) * part[:, ::-1].copy())
    folder = save_model(tmp_path / "m")
    quantize_settings = settings(tmp_path, bits=None, uniform=False, size_bytes=10**9)
    with prepared_for(folder, quantize_settings, name="gguf-q4_k_m") as prepared:
        arrays = captured(prepared, prepared.plan.products).arrays
        products = [product for product in prepared.plan.products if product.op == "scored_layer"]
    ids = rows_for(quantize_settings, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row, row_logits in enumerate(model(ids).logits):
        draws = torch.from_numpy(np.random.default_rng([0, row]).random(len(row_logits), np.float32))
        below = row_logits.detach().softmax(-1).cumsum(1)
        labels = torch.searchsorted(below, (draws * below[:, -1])[:, None], right=True)
        row_logits.log_softmax(-1).gather(1, labels).sum().backward(retain_graph=True)
    weights = 0
    for product in products:
        for number, weight in enumerate(product.settings["candidates"]):
            plain, grad = model.get_parameter(weight).detach().numpy(), model.get_parameter(weight).grad
            assert grad is not None
            expected = float((grad.numpy() * 0.01 * plain[:, ::-1]).sum(dtype=np.float64))
            total = float(arrays[product.name][0][number, 0].sum(dtype=np.float64))
            assert total == pytest.approx(expected, rel=1e-3, abs=1e-4)
            weights += 1
    assert weights == 2 * 7


@pytest.mark.matrix
@pytest.mark.slow
def test_scores_do_not_depend_on_threads_and_are_of_some_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "TOKENS", 40)
    folder = save_model(tmp_path / "m", "mixtral")
    quantize_settings = settings(tmp_path, bits=None, uniform=False, size_bytes=10**9)
    with prepared_for(folder, quantize_settings, name="gguf-q4_k_m") as prepared:
        one, two = (captured(prepared, prepared.plan.products, threads=n).arrays for n in (1, 2))
        names = [product.name for product in prepared.plan.products if product.op.startswith("scored_")]
    assert len(names) == 3
    for name in names:
        assert one[name][0].shape[2] == 6 * 6  # every third of 16 tokens
        np.testing.assert_array_equal(one[name][0], two[name][0])
        assert one[name][0].any()


def test_errors_that_add_up_are_avoided() -> None:
    """Blocks whose cheap candidates push all predictions the same way: each loss is small, and their sum is not."""
    rng = np.random.default_rng(0)
    tokens, blocks = 4000, 20
    together = rng.standard_normal(tokens).astype(np.float32)
    scores = [
        np.stack(
            [together * np.float32(0.1), rng.standard_normal(tokens).astype(np.float32) * np.float32(0.12), np.zeros(tokens)]
        )
        for _ in range(blocks)
    ]
    bits = [[10, 10, 20] for _ in range(blocks)]
    alone = solve(
        [[Candidate(b, float((s**2).mean() / 2)) for b, s in zip(bits[0], block, strict=True)] for block in scores], 250
    )
    solution = solve_together(bits, scores, 250)

    def loss(choice: tuple[int, ...]) -> float:
        return float((sum(block[k] for block, k in zip(scores, choice, strict=True)) ** 2).mean() / 2)

    assert [alone.count(k) for k in range(3)] == [15, 0, 5]
    assert loss(solution) < loss(alone) / 4
    assert sum(sizes[k] for sizes, k in zip(bits, solution, strict=True)) <= 250


def test_a_choice_is_never_worse_than_one_that_it_begins_from() -> None:
    rng = np.random.default_rng(1)
    scores = [rng.standard_normal((n, 50)).astype(np.float32) for n in (3, 1, 4, 2, 3)]
    bits = [list(range(4, 4 + len(block))) for block in scores]
    for start in ([0, 0, 0, 0, 0], [2, 0, 0, 1, 0], [0, 0, 3, 0, 2]):
        solution = solve_together(bits, scores, 25, [start])
        losses = [float((sum(s[k] for s, k in zip(scores, picked, strict=True)) ** 2).mean()) for picked in (start, solution)]
        assert losses[1] <= losses[0] * (1 + 1e-6)
        assert sum(sizes[k] for sizes, k in zip(bits, solution, strict=True)) <= 25


def test_settings_of_scores_are_checked(tmp_path: Path) -> None:
    from dataclasses import replace

    from weightsmith._engine.products import find_kind

    folder = save_model(tmp_path / "m")
    quantize_settings = settings(tmp_path, bits=None, uniform=False, size_bytes=10**9)
    with prepared_for(folder, quantize_settings, name="gguf-q4_k_m") as prepared:
        by_op = {product.op: product for product in prepared.plan.products}
    for op in ("scored_layer", "scored_vocabulary"):
        product = by_op[op]
        kind, product_settings = find_kind(op), dict(product.settings)
        assert kind.check(product) == ""
        name = next(iter(product_settings["candidates"]))
        for changed in ({name: ("gguf-q4_k",)}, {name: ("gguf-iq2_xxs",)}, {"x": ("gguf-q8_0",)}, {}):
            assert kind.check(replace(product, settings=product_settings | {"candidates": changed})), changed
        assert kind.check(replace(product, settings=product_settings | {"states": "others"}))
    vocabulary = by_op["scored_vocabulary"]
    assert has_type(dict(vocabulary.settings), costs.VocabularyWork)
    assert find_kind("scored_vocabulary").check(replace(vocabulary, settings=dict(vocabulary.settings) | {"seed": -1}))
