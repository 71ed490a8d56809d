"""States and gradients of a text that runs through a model are those of transformers' own model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests import zoo
from tests.calibration_help import CONFIGS, captured, changed, rows_for, save_model, settings, text_run
from tests.plan_help import prepare
from weightsmith._activations.running import PhaseProgress
from weightsmith._models.formats.exl2.model import prepare_model
from weightsmith._models.structure.projections import site_of


def test_the_progress_of_the_products_of_a_phase_is_one() -> None:
    told: list[tuple[int, int]] = []

    class ProductContext:
        def progress(self, done: int, total: int) -> None:
            told.append((done, total))

    class Base:
        layers = 4

    for number, first, last in ((0, 0, 0.25), (0, 0.25, 1), (3, 0.5, 1)):
        progress = PhaseProgress(ProductContext(), Base(), number, first, last)  # type: ignore[arg-type]
        for share in (0, 0.5, 1):
            progress(share)
    assert told == [(done, 4000) for done in (0, 125, 250, 250, 625, 1000, 3500, 3750, 4000)]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "narrow"])  # a width that EXL2 does not store
def test_states_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Also where it fuses experts, or q, k and v, which the plan stores one by one."""
    folder, quantize_settings = save_model(tmp_path / "m", name), settings(tmp_path)
    with prepare({"merge_method": "passthrough", "models": [{"model": str(folder)}]}) as prepared:
        prepared = prepared.with_plan(replace(prepared.plan, steps=tuple(prepare_model(prepared.plan).steps)))
        run = text_run(prepared, quantize_settings)
        states = [run.embedding(run.text_rows)]
        for i in range(run.layers):
            states.append(run.states(i, states[-1]))
        kept = [replace(product, transient=False) for product in (run.text_rows, *states)]
        prepared = prepared.with_plan(replace(prepared.plan, products=tuple(kept)))
        arrays = captured(prepared, kept).arrays
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    entering: list[torch.Tensor] = []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _module, args: entering.append(args[0]))
    with torch.inference_mode():
        model(rows_for(quantize_settings, folder))
    for i in range(3):
        torch.testing.assert_close(torch.from_numpy(arrays[f"states {i}"][0]), entering[i], rtol=1e-4, atol=2e-5)


@pytest.mark.matrix("mimo2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shared_experts"),
    [("mimo2", ""), ("laguna", "shared_expert"), ("hy-v3", "shared_mlp"), ("phimoe", ""), ("glm-dsa", "shared_experts")],
)
def test_hessians_of_models_whose_files_have_other_names_are_those_of_transformers(
    name: str, shared_experts: str, tmp_path: Path
) -> None:
    """Each linear layer outside the experts, which have no module of their own in transformers, gets its own inputs."""
    sizes = {"index_topk": 16} if name == "glm-dsa" else {}
    folder, quantize_settings = zoo.save(name, tmp_path / "m", 1, vocab_size=256, **sizes), settings(tmp_path)
    shutil.copy(save_model(tmp_path / "other") / "tokenizer.json", folder)
    with prepare({"merge_method": "passthrough", "models": [{"model": str(folder)}]}) as prepared:
        run = text_run(prepared, quantize_settings)
        kept = run.forward(lambda layer, states: [run.statistic("gram", layer, states, run.linear(layer))])
        prepared = prepared.with_plan(replace(prepared.plan, products=kept))
        arrays = captured(prepared, kept).arrays
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not module_name.endswith(("lm_head", "router")):
            module.register_forward_pre_hook(partial(_add_gram, expected, module_name))
    with torch.inference_mode():
        model(rows_for(quantize_settings, folder))
    grams = {
        out.name: array for product in kept for out, array in zip(product.outs, arrays.get(product.name, ()), strict=False)
    }
    assert not shared_experts or any("shared_experts" in module_name for module_name in expected)
    for module_name, gram in expected.items():
        array = grams[f"gram of {site_of(module_name.replace('shared_experts', shared_experts) + '.weight')}"]
        torch.testing.assert_close(torch.from_numpy(array), gram, rtol=1e-4, atol=1e-4 * float(gram.abs().max()))


def _add_gram(sums: dict[str, torch.Tensor], name: str, _module: object, args: tuple[torch.Tensor, ...]) -> None:
    x = args[0].flatten(0, -2)
    sums[name] = sums.get(name, 0) + x.T @ x


@pytest.mark.matrix("llama")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "mixtral", "qwen3 moe"])
def test_gradients_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """For labels drawn from its own predictions."""
    folder, quantize_settings = save_model(tmp_path / "m", name), settings(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("final_logit_softcapping", None)  # Gemma 2 caps its logits all the same
    (folder / "config.json").write_text(json.dumps(config))
    changed(folder, o_proj=20, down_proj=20, w2=20, down=20, lm_head=20, embed_tokens=20)
    with prepare({"merge_method": "passthrough", "models": [{"model": str(folder)}]}) as prepared:
        prepared = prepared.with_plan(replace(prepared.plan, steps=tuple(prepare_model(prepared.plan).steps)))
        run = text_run(prepared, quantize_settings)
        kept = [replace(product, transient=False) for product in run.backward(lambda *_: (), lambda layer: run.linear(layer))]
        kept.append(replace(run.gradients(0, kept[1], kept[-1]), transient=False))
        prepared = prepared.with_plan(replace(prepared.plan, products=tuple(kept)))
        arrays = captured(prepared, kept).arrays
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    states: list[torch.Tensor] = []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _module, args: states.append(args[0]))
    for number, ids in enumerate(rows_for(quantize_settings, folder)):
        states.clear()
        logs = model(inputs_embeds=model.get_input_embeddings()(ids[None]).requires_grad_()).logits[0].log_softmax(1)
        below = logs.detach().exp().double().cumsum(1)
        draws = torch.from_numpy(np.random.default_rng([0, number]).random(len(ids), np.float32))
        labels = (below < draws[:, None] * below[:, -1:]).sum(1)
        for layer, expected in enumerate(torch.autograd.grad(logs.gather(1, labels[:, None]).sum(), states)):
            gradient = torch.from_numpy(arrays[f"gradients {layer}"][0][number])
            assert gradient.abs().max() > 1e-4
            torch.testing.assert_close(gradient, expected[0], rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
