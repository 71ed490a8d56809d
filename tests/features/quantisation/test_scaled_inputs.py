"""AWQ's scales of input features: what is divided and multiplied computes the same, and nothing else is scaled."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import weightsmith
from tests import zoo
from tests.calibration_help import (
    CONFIGS,
    TINY,
    captured,
    interrupted,
    noisy_copy,
    prepared_for,
    quantise,
    rows_for,
    save_model,
    settings,
)
from tests.fork_help import Forked
from weightsmith._activations.decoder import Base, forward, spread
from weightsmith._activations.decoder.channels import scalable
from weightsmith._activations.decoder.forward import Decoder, Layer, build
from weightsmith._activations.running import LayerRows
from weightsmith._base.errors import PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.products import find_kind
from weightsmith._execution.options import RunOptions
from weightsmith._execution.summary import summarise
from weightsmith._features.quantisation.calibration.scaling import (
    Entering,
    Scaling,
    chosen_features,
    scaled_weights,
    stored_quotient,
)
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats import find_encoding
from weightsmith._models.structure.projections import role_of

OTHERS: dict[str, Any] = {
    "cohere": lambda: transformers.CohereConfig(**TINY),
    "phi": lambda: transformers.PhiConfig(**TINY),
    "olmo2": lambda: transformers.Olmo2Config(**TINY),
    "glm4": lambda: transformers.Glm4Config(**TINY, head_dim=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**TINY),
    "nemotron": lambda: transformers.NemotronConfig(**TINY),
    "granite": lambda: transformers.GraniteConfig(**TINY, attention_multiplier=0.3, residual_multiplier=0.5),
    "smollm3": lambda: transformers.SmolLM3Config(**TINY, no_rope_layers=[1, 0]),
    "stablelm": lambda: transformers.StableLmConfig(**TINY),
    "deepseek v3": lambda: transformers.DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 4},
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "qwen2 moe": lambda: transformers.Qwen2MoeConfig(
        **TINY, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts_per_tok=2
    ),
    "kimi linear": lambda: transformers.KimiLinearConfig(
        **{**TINY, "num_key_value_heads": 4},
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
    ),
}
UNSCALED = {
    "phi3": {"self_attn.o_proj", "mlp.down_proj"},
    "phi": {"mlp.fc2"},
    "starcoder2": {"mlp.c_proj"},
    "nemotron": {"mlp.down_proj"},
    "olmo2": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"},
    "glm4": {"mlp.down_proj"},
    "deepseek v3": {"self_attn.o_proj"},
    "kimi linear": {"self_attn.o_proj"},
}
"""Weights whose input features cannot be scaled: behind an activation function, a fused matrix or the residual stream, or a
norm with a gate of its own."""


class Model:
    """A random model, with one tensor for each matrix."""

    def __init__(self, name: str) -> None:
        self.config = {**CONFIGS, **OTHERS}[name]()
        torch.manual_seed(0)
        self.module = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in self.module.parameters():  # norms too: ones would hide what they do
                parameter.copy_((parameter + 0.2 * torch.randn(parameter.shape)).bfloat16())
        self.tensors: dict[str, torch.Tensor] = {}
        for stored, parameter in self.module.named_parameters():
            head, experts, leaf = stored.rpartition("experts.")
            if not experts or parameter.dim() != 3:
                self.tensors[stored] = parameter.data
                continue
            for e, matrix in enumerate(parameter.data):
                parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
                for part, rows in parts if leaf == "gate_up_proj" else [("down_proj", matrix)]:
                    self.tensors[f"{head}experts.{e}.{part}.weight"] = rows

    @property
    def decoder(self) -> Decoder:
        base = Base("model", 0, self.config.to_dict(), "model.layers.", TINY["num_hidden_layers"], self.config.hidden_size)
        decoder = build(base, {})
        assert isinstance(decoder, Decoder)
        return decoder

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.module(torch.arange(24)[None] * 7 % 256).logits
        return logits

    def specs(self, layer: int) -> dict[str, TensorSpec]:
        names = [name for name in self.tensors if name.startswith(f"model.layers.{layer}.")]
        return {name: TensorSpec(name, DTYPES["BF16"], tuple(self.tensors[name].shape)) for name in names}

    def scale(self, layer: int, seed: int = 1) -> set[str]:
        """Scale all features that can be scaled by numbers between 1/4 and 4; the weights whose inputs are not scaled."""
        specs, generator = self.specs(layer), np.random.default_rng(seed)
        weights = {name: "awq-4bit-g32" for name, spec in specs.items() if role_of(spec) == "linear"}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        features, plain = chosen_features(self.decoder.scalable(layer, shapes), weights, specs)
        scaling = Scaling()
        for made in features:
            tensors = {n: self.tensors[n].numpy() for n in (made.weight, made.bias, *made.readers) if n in plain}
            scales = np.exp2(generator.uniform(-2, 2, specs[made.weight].shape[0])).astype(np.float32)
            if len(tensors) > (made.maker != "linear"):
                scales = np.exp2(np.rint(np.log2(scales)))
            scaling.add(made, scales, tensors, specs)
        assert set(scaling.plain) == set(plain)
        for name in weights:
            self.tensors[name].copy_(torch.from_numpy(scaling.weight(name, self.tensors[name].numpy().copy())))
        for name, (array,) in scaling.plain.items():
            assert np.mean(array.astype(np.float32) != self.tensors[name].numpy()) > 0.5
            self.tensors[name].copy_(torch.from_numpy(array.astype(np.float32)))
        return {name.removeprefix(f"model.layers.{layer}.") for name in weights.keys() - scaled_weights(features)}


@pytest.mark.matrix("llama", "deepseek v3")
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_scaled_features_leave_the_logits_as_they_are(name: str) -> None:
    model = Model(name)
    plain = model.logits()
    unscaled = {weight.removesuffix(".weight") for layer in range(2) for weight in model.scale(layer)}
    assert unscaled == UNSCALED.get(name, set())
    difference = float((model.logits() - plain).abs().max() / plain.abs().max())
    assert difference < 1e-5, difference


# ---- in a calibration


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model some of whose features are much larger than others, as in trained ones."""
    folder = save_model(tmp_path_factory.mktemp("models") / "uneven", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name or "v_proj.bias" in name:
            tensor += (torch.arange(len(tensor)) % 16 == 3) * 12
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def options_of(folder: Path) -> QuantizeSettings:
    return settings(folder, bits=None, uniform=False, group_size=32)


def error_of(model: Path, out: Path) -> float:
    """Relative error of the logits."""
    weightsmith.dequantize(out, out.with_name(f"{out.name}-plain"), progress=False)
    folders = [model, out.with_name(f"{out.name}-plain")]
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    with torch.inference_mode():
        expected, actual = (model(rows_for(options_of(out.parent), folders[0])).logits for model in models)
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.long
@pytest.mark.parametrize("name", ["awq-4bit", "w4a16"])
def test_scales_make_the_error_smaller_and_change_norms_and_biases(name: str, uneven: Path, tmp_path: Path) -> None:
    scaled = quantise(uneven, tmp_path / "scaled", options_of(tmp_path), name=name)
    assert not [finding for finding in scaled.plan.warnings if "no AWQ scales" in finding.what]
    plain, stored = (load_file(folder / "model.safetensors") for folder in (uneven, tmp_path / "scaled"))
    same = {tensor for tensor in plain if tensor in stored and torch.equal(plain[tensor], stored[tensor])}
    assert same == {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in range(2) for part in "qk"
    }
    unscaled = quantise(uneven, tmp_path / "unscaled", replace(options_of(tmp_path), awq_scales=False), name=name)
    assert not [finding for finding in unscaled.plan.warnings if "no AWQ scales" in finding.what]
    stored = load_file(tmp_path / "unscaled" / "model.safetensors")
    assert all(torch.equal(plain[tensor], stored[tensor]) for tensor in plain if tensor in stored)
    errors = [error_of(uneven, tmp_path / folder) for folder in ("scaled", "unscaled")]
    assert errors[0] < 0.8 * errors[1], errors


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["awq-4bit", "w4a16"])
def test_the_bytes_depend_on_nothing_but_the_work(
    name: str, uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on threads, nor on an interruption, nor on the memory for sums.

    No golden case has them: torch multiplies in another order on processors with other instructions, and codes differ then.
    """
    whole = quantise(uneven, tmp_path / "a", options_of(tmp_path), threads=1, name=name).out
    with interrupted(monkeypatch, "layer 1"):
        quantise(uneven, tmp_path / "b", options_of(tmp_path), name=name)
    resumed = quantise(uneven, tmp_path / "b", options_of(tmp_path), threads=3, name=name).out
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    with prepared_for(uneven, options_of(tmp_path), name) as prepared:
        runs = []
        for memory in (None, 40_000):
            output = captured(prepared, prepared.plan.products, memory)
            runs.append({name: [array.tobytes() for array in arrays] for name, arrays in output.arrays.items()})
        assert runs[0] == runs[1]


@pytest.mark.process
@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.sweep)])
def test_killed_at_random_moments_it_gives_the_same_bytes(kills: int, uneven: Path, tmp_path: Path) -> None:
    """Each run resumes the previous one, and is killed as well."""

    def start(name: str) -> Forked:
        return Forked(lambda: quantise(uneven, tmp_path / name, options_of(tmp_path), name="awq-4bit"))

    began, moments, codes = time.monotonic(), random.Random(kills), list[int]()
    ran = start("whole").wait()
    assert ran.code == 0, ran.err
    seconds, whole = time.monotonic() - began, (tmp_path / "whole" / "model.safetensors").read_bytes()
    out = tmp_path / "out" / "model.safetensors"
    for _ in range(kills):
        run = start("out")
        time.sleep(moments.uniform(0, seconds))
        run.kill()
        ran = run.wait()
        assert ran.code in (0, -signal.SIGKILL), ran.err
        codes.append(ran.code)
        if out.exists():  # it was too late; the next one begins again
            assert out.read_bytes() == whole
            shutil.rmtree(out.parent)
    ran = start("out").wait()
    assert ran.code == 0, ran.err
    assert out.read_bytes() == whole
    assert -signal.SIGKILL in codes


def test_the_plan_counts_weights_without_scales_and_tensors_that_change(tmp_path: Path) -> None:
    phi3 = save_model(tmp_path / "phi3", "phi3")  # value and up are parts of fused matrices
    with prepared_for(phi3, options_of(tmp_path), "awq-4bit") as prepared:
        warnings = [str(finding) for finding in prepared.plan.warnings]
        stored = {facts.why: facts.tensors for facts in summarise(prepared, RunOptions()).stored}
    assert any("4 of 8 weights get no AWQ scales" in warning for warning in warnings), warnings
    assert stored["calibrated: quantised for what enters the layer"] == 8
    assert stored["it changes with the scales of calibrated weights"] == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "types", "says"),
    [
        ("qwen2", ("q_proj=fp8-dynamic",), ["4 of 12 weights get no AWQ scales: weights in other formats"]),
        ("qwen2", ("v_proj=plain",), ["2 of 12 weights get no AWQ scales: weights in other formats"]),
        ("qwen2", ("self_attn=fp8-dynamic",), []),
        ("phi3", ("qkv_proj=fp8-dynamic",), ["4 of 6 weights get no AWQ scales: no way to scale"]),
    ],
)
def test_weights_without_scales_in_a_mixture_have_its_reason(
    model: str, types: tuple[str, ...], says: list[str], tmp_path: Path
) -> None:
    source = save_model(tmp_path / model, model)
    with prepared_for(source, replace(options_of(tmp_path), tensor_types=types), "w4a16") as prepared:
        warnings = [finding.what for finding in prepared.plan.warnings if "no AWQ scales" in finding.what]
    assert len(warnings) == len(says)
    assert all(warning.startswith(start) for warning, start in zip(warnings, says, strict=True)), warnings


@pytest.mark.long
def test_plans_that_are_made_at_once_are_the_same(uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other plan begins to look at a layer while the first one does."""
    options, looking, both = options_of(tmp_path), forward.record, threading.Barrier(2)

    def slowly(body: Any, layers: Any, **inputs: Any) -> Any:
        def wait(*_args: Any) -> None:
            both.wait(60)

        hook = body.register_forward_pre_hook(wait)
        try:
            return looking(body, layers, **inputs)
        finally:
            hook.remove()

    def plan(_number: int) -> object:
        with prepared_for(uneven, options, "awq-4bit") as prepared:
            return prepared.plan.to_json()

    alone = plan(0)
    monkeypatch.setattr(forward, "record", slowly)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(plan, range(2))) == [alone, alone]


@pytest.mark.long
def test_norms_of_a_merge_are_scaled_as_the_merge_would_store_them(uneven: Path, tmp_path: Path) -> None:
    noisy_copy(uneven, tmp_path / "noisy", seed=1)
    models = [{"model": str(model), "parameters": {"weight": 0.5}} for model in (uneven, tmp_path / "noisy")]
    recipe = {"merge_method": "linear", "models": models, "dtype": "bfloat16"}
    weightsmith.merge(recipe, tmp_path / "merged", progress=False)
    outs = [
        quantise(source, tmp_path / name, options_of(tmp_path), name="awq-4bit").out
        for name, source in (("direct", recipe), ("after", tmp_path / "merged"))
    ]
    direct, after = ((out / "model.safetensors").read_bytes() for out in outs)
    assert direct == after


def test_states_are_those_of_the_scaled_and_quantised_layers(uneven: Path, tmp_path: Path) -> None:
    with prepared_for(uneven, options_of(tmp_path), "awq-4bit") as prepared:
        output = captured(prepared, prepared.plan.products)
    quantise(uneven, tmp_path / "out", options_of(tmp_path), name="awq-4bit")
    weightsmith.dequantize(tmp_path / "out", tmp_path / "plain", out_dtype="float32", progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.inference_mode():
        states = model(rows_for(options_of(tmp_path), uneven), output_hidden_states=True).hidden_states
    torch.testing.assert_close(torch.from_numpy(output.arrays["states 1"][0]), states[1], rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plain", "norm"),
    [("self_attn.k_proj", "input"), ("self_attn.v_proj", "input"), ("mlp.up_proj", "post_attention")],
    ids=["key", "value", "up"],
)
def test_a_weight_that_is_not_quantised_keeps_features_from_being_scaled_apart(
    plain: str, norm: str, uneven: Path, tmp_path: Path
) -> None:
    """It reads them too, and is stored with scales that are powers of two."""
    chosen = replace(options_of(tmp_path), tensor_types=(f"{plain}=plain",))
    quantise(uneven, tmp_path / "out", chosen, name="awq-4bit")
    before, stored = (load_file(folder / "model.safetensors") for folder in (uneven, tmp_path / "out"))
    name, norm = f"model.layers.0.{plain}.weight", f"model.layers.0.{norm}_layernorm.weight"
    ratios = (stored[name].float() / before[name].float()).nan_to_num(1).median(0).values
    exponents = ratios.log2()
    assert torch.equal(exponents, exponents.round())
    assert exponents.abs().max() > 0
    assert torch.equal(stored[norm].float() * ratios, before[norm].float())


@pytest.mark.long
def test_features_that_a_weight_in_another_format_reads_are_not_scaled(uneven: Path, tmp_path: Path) -> None:
    """Its codes are those of the plain weight."""
    chosen = replace(options_of(tmp_path), tensor_types=("(k_proj|up_proj)=fp8-dynamic", "down_proj=w8a16-g32"))
    out = quantise(uneven, tmp_path / "out", chosen, name="w4a16").out
    weightsmith.quantize(uneven, tmp_path / "rounded", "fp8-dynamic", progress=False)
    plain, stored, rounded = (load_file(folder / "model.safetensors") for folder in (uneven, out, tmp_path / "rounded"))
    for layer in range(2):
        parts = [f"model.layers.{layer}.{part}.weight" for part in ("self_attn.k_proj", "mlp.up_proj")]
        for name in [*parts, *(f"{part}_scale" for part in parts)]:
            assert torch.equal(stored[name].view(torch.uint8), rounded[name].view(torch.uint8)), name
        for norm in ("input", "post_attention"):
            name = f"model.layers.{layer}.{norm}_layernorm.weight"
            assert torch.equal(stored[name], plain[name])
        bias = f"model.layers.{layer}.self_attn.v_proj.bias"
        assert not torch.equal(stored[bias], plain[bias])  # o_proj reads the values alone
    assert error_of(uneven, out) < 0.3


@pytest.mark.parametrize(
    ("name", "options"), [("w4a16", {}), ("w8a16", {"kv_cache": "fp8"}), ("fp8-static", {}), ("fp8-dynamic", {})]
)
def test_an_option_for_scales_needs_weights_that_are_calibrated(
    name: str, options: dict[str, Any], uneven: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="no weights are calibrated in a format that scales their inputs"):
        weightsmith.quantize(uneven, tmp_path / "out", name, awq_scales=False, progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_a_type_that_fits_no_width_needs_no_text(tmp_path: Path) -> None:
    """Groups of 128 do not divide a width of 32: no weight becomes w4a16."""
    source = zoo.save("llama", tmp_path / "m", 1)
    types = ["mlp=w4a16"]
    with pytest.raises(PlanError, match="fp8-dynamic reads no text"):
        weightsmith.quantize(
            source, tmp_path / "out", "fp8-dynamic", tensor_types=types, calibration="built-in", progress=False
        )


def test_formats_without_scales_do_not_read_the_option(uneven: Path, tmp_path: Path) -> None:
    for name in ("gptq-4bit", "exl2", "exl3", "gguf-q4_k_m", "mlx-4bit"):
        with pytest.raises(PlanError, match=f"not a setting of {name}"):
            weightsmith.quantize(uneven, tmp_path / "out", name, awq_scales=False, progress=False)


@pytest.mark.long
def test_a_reader_that_is_never_quantised_may_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate of the shared expert."""
    monkeypatch.setitem(CONFIGS, "qwen2 moe", OTHERS["qwen2 moe"])
    model = save_model(tmp_path / "model", "qwen2 moe")
    quantise(model, tmp_path / "out", options_of(tmp_path), name="awq-4bit")
    assert error_of(model, tmp_path / "out") < 0.3


@pytest.mark.long
@pytest.mark.parametrize("name", ["awq-4bit", "w4a16"])
def test_routers_stay_exact_and_experts_that_no_token_reaches_are_rounded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the first two logits is positive for every token, and larger than the others."""
    config = OTHERS["qwen2 moe"]()
    config.num_experts_per_tok = 1
    monkeypatch.setitem(CONFIGS, "qwen2 moe", lambda: config)
    model = save_model(tmp_path / "model", "qwen2 moe")
    before = load_file(model / "model.safetensors")
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        gate = before[f"{mlp}.gate.weight"]
        gate[1], gate[2], gate[3] = -gate[0], gate[0] / 2, 0
        before[f"{mlp}.shared_expert_gate.weight"] *= 20
        before[f"model.layers.{layer}.post_attention_layernorm.weight"][3] = 12
    save_file(before, model / "model.safetensors", {"format": "pt"})
    out = quantise(model, tmp_path / "out", options_of(tmp_path), name=name).out
    weightsmith.dequantize(out, tmp_path / "plain", out_dtype="float32", progress=False)
    plain, kind = load_file(tmp_path / "plain" / "model.safetensors"), find_encoding(f"{name}-g32")
    for layer in range(2):
        mlp, norm = f"model.layers.{layer}.mlp", f"model.layers.{layer}.post_attention_layernorm.weight"
        scales = before[norm].float() / plain[norm]
        assert torch.equal(scales.log2(), scales.log2().round())
        assert scales.unique().numel() > 1
        for gate in ("gate", "shared_expert_gate"):
            assert torch.equal(plain[f"{mlp}.{gate}.weight"], before[f"{mlp}.{gate}.weight"].float() * scales)
        reached = []
        for expert in range(4):
            parts = {part: f"{mlp}.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")}
            wanted = {part: before[weight].float() for part, weight in parts.items()}
            wanted |= {part: wanted[part] * scales for part in ("gate", "up")}
            rounded = [kind.dequantise(kind.quantise(w.numpy(), None, 1), tuple(w.shape)) for w in wanted.values()]
            reached.append(not all(map(np.array_equal, rounded, (plain[weight].numpy() for weight in parts.values()))))
        assert reached == [True, True, False, False]


class Changed(torch.nn.Module):
    """A layer whose features something changes, or writes elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.RMSNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        if self.how == "written":
            x = torch.zeros_like(x)
            x[:] = normed
        up = self.up(normed)
        if self.how == "in place":
            torch.nn.functional.relu_(up)
        return x + self.down(up)


@pytest.mark.parametrize(
    ("how", "scaled"),
    [("", {"norm.weight", "up.weight"}), ("written", {"up.weight"}), ("in place", {"norm.weight"})],
    ids=["plain", "written", "in place"],
)
def test_features_that_are_changed_in_place_or_written_elsewhere_are_not_scaled(how: str, scaled: set[str]) -> None:
    layer = Changed(how).to("meta")
    names = {name: name for name, _ in layer.named_parameters()}
    assert {made.weight for made in scalable(layer, names, ((), {}), 8)} == scaled


class Heads(torch.nn.Module):
    """A norm for each head, whose features a gate multiplies before they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.out = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))
        self.o_norm = torch.nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.o_norm(self.value(x).unflatten(-1, (2, 4)))
        return x + self.out(heads.flatten(-2) * self.gate(x).sigmoid())


def test_a_norm_of_each_head_is_scaled_for_what_enters_its_readers() -> None:
    names = {name: name for name, _ in Heads().named_parameters()}
    (made,) = scalable(Heads().to("meta"), names, ((), {}), 8)
    assert (made.weight, made.readers, made.heads) == ("o_norm.weight", ("out.weight",), (2, 4))
    torch.manual_seed(0)
    module, seen = Heads(), list[torch.Tensor]()
    module.out.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    linears = {f"{name}.weight": linear for name, linear in module.named_children() if name != "o_norm"}
    layer = Layer(module, linears, dict(module.named_parameters()), (), {})
    states = np.random.default_rng(0).standard_normal((1, 5, 8), np.float32)
    rows = cast(LayerRows, SimpleNamespace(layer=layer, check_finite=lambda x, what, row: None))
    hidden = torch.from_numpy(states[0])
    plain = layer(hidden)
    entering = Entering(rows, [made])
    assert torch.equal(entering.of((0, hidden))[made.weight][0], seen[-1][0])
    entering.close()
    scales = np.float32([2, 0.5, 3, 1])
    columns = torch.from_numpy(spread(scales, made.heads))
    with torch.no_grad():
        module.o_norm.weight /= torch.from_numpy(scales)
        module.out.weight *= columns
    torch.testing.assert_close(layer(hidden), plain)


def test_a_plan_with_other_features_is_refused(uneven: Path, tmp_path: Path) -> None:
    with prepared_for(uneven, options_of(tmp_path), "awq-4bit") as prepared:
        product = next(product for product in prepared.plan.products if product.name == "layer 0")
    kind = find_kind("quantised_layer")
    assert kind.check(product) == ""
    scaled = product.settings["scaled"]
    for change in (
        scaled[1:],
        [{**scaled[0], "heads": [2, 1]}, *scaled[1:]],
        [{**scaled[0], "weight": "model.norm.weight"}, *scaled[1:]],
        [{**scaled[0], "readers": ["model.layers.0.mlp.down_proj.weight"]}, *scaled[1:]],
    ):
        assert kind.check(replace(product, settings={**product.settings, "scaled": change})) != ""


def test_a_quotient_is_exact_for_the_scale_that_is_given_back() -> None:
    spec = TensorSpec("norm.weight", DTYPES["BF16"], (6,))
    values = np.float32([1.25, -0.5, 0, 3, 1e-30, -1])
    scales = np.float32([3, 0.7, 5, 1e30, 1e20, 2])
    stored, exact = stored_quotient(values, scales, spec)
    kept = [0, 1, 2, 5]
    np.testing.assert_allclose((stored.astype(np.float64) * exact)[kept], values[kept], rtol=1e-7)
    assert exact[2] == 1
    assert np.abs(exact[[0, 1]] / scales[[0, 1]] - 1).max() < 2**-8
    stored, exact = stored_quotient(values, scales, spec, offset=1)
    np.testing.assert_allclose((1 + stored.astype(np.float64)) * exact, 1 + values.astype(np.float64), rtol=1e-6)
    assert exact[5] == 1  # 1 + -1 is 0, whatever it is divided by
