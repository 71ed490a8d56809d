"""EXL3: the search against another one, matrices, and models end to end."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.calibration_help import prepared_for, rows_for, save_model, settings
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from tests.models.formats.quantised import exl3_tiles
from weightsmith._base.errors import NonFinite, PlanError
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._kernels.trellis import PLACES
from weightsmith._models.formats.exl3.layout import RATES, Rate, values_of
from weightsmith._models.formats.exl3.writing import (
    SEARCH,
    Encoder,
    dequantise_matrix,
    encode_plainly,
    factorise,
    find_scales,
    parse,
    quantise_matrix,
    store,
)

__all__ = ["cli"]

H, I, VOCAB = 128, 200, 136  # noqa: E741

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": H,
    "intermediate_size": I,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
NONE: dict[str, Any] = {"calibration": "none", "progress": False}
QUICK: dict[str, Any] = {**NONE, "head_bits": 16}


def shapes_of(config: Mapping[str, Any], *, mixture: bool = False) -> dict[str, tuple[int, ...]]:
    layers: dict[str, tuple[int, ...]] = {
        **{"self_attn.q_proj": (H, H), "self_attn.k_proj": (H // 2, H), "self_attn.v_proj": (H // 2, H)},
        **{"self_attn.o_proj": (H, H), "input_layernorm": (H,), "post_attention_layernorm": (H,)},
    }
    if not mixture:
        layers |= {"mlp.gate_proj": (I, H), "mlp.up_proj": (I, H), "mlp.down_proj": (H, I)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, H), "model.norm.weight": (H,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layers.items()}
    return shapes


def write(folder: Path, config: Mapping[str, Any] = LLAMA, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Path:
    rng = np.random.default_rng(0)
    shapes = shapes_of(config) if shapes is None else shapes
    tensors = {name: (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    write_checkpoint(folder, tensors, config)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tied Llama model with one layer, in the current folder as `m`."""
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "m")


def tensors_of(folder: str | Path, *, raw: bool = False) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder, raw=raw) as opened:
        return {name: opened.read(name) for name in opened.specs}


def config_of(folder: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


def plan(**options: Any) -> weightsmith.Plan:
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    return weightsmith.plan(recipe, quantize="exl3", **{"calibration": "none", **options})


def error_of(decoded: np.ndarray, expected: np.ndarray) -> float:
    """Squared error, relative to the expected numbers."""
    wide = expected.astype(np.float64)
    return float(np.square(decoded - wide).sum() / np.square(wide).sum())


# ---- the search


def encoded(rows: np.ndarray, rate: Rate) -> tuple[np.ndarray, np.ndarray]:
    """Words and values of rows [16, n]."""
    words = np.empty((rows.shape[1] // 16, rate.words // 2), np.uint32)
    return words, Encoder(rate).encode(rows.astype(np.float32), words)


@pytest.mark.long
@pytest.mark.parametrize("rate", RATES, ids=str)
def test_the_stream_has_the_values_that_were_chosen(rate: Rate) -> None:
    """Read bit by bit, by a decoder that shares no code."""
    rows = np.random.default_rng(3).standard_normal((16, 64)) * SEARCH[rate].gain
    words, values = encoded(rows, rate)
    np.testing.assert_array_equal(exl3_tiles(words.view(np.int16)[None], "mul1")[0], values)


@pytest.mark.long
@pytest.mark.parametrize(
    ("halves", "first", "digest"),
    [
        (4, [3656763090, 3641047023, 3353667543], "8481209d0336adb7"),
        (5, [1099995152, 760082465, 1643643897], "08e27cc479582bd2"),
        (8, [3972265639, 2485641153, 1028948621], "fcb2c8bbb248e62d"),
        (12, [2749298325, 525049978, 3028481900], "577947b10ab12ca2"),
    ],
)
def test_streams_stay_as_they_are(halves: int, first: list[int], digest: str) -> None:
    """The streams of two tiles. The search computes with integers, so they are the same on every machine."""
    rows = ((np.arange(512) * 2654435761 % 1000 - 500) / 200).astype(np.float32).reshape(16, 32)
    words, _ = encoded(rows, Rate(halves))
    assert words[0, :3].tolist() == first
    assert hashlib.sha256(words.astype("<u4").tobytes()).hexdigest()[:16] == digest


BOUND = {rate.halves: 2.0 ** (-2 * rate.bits) for rate in RATES}
"""Below this no code of so many bits can get, with normally distributed numbers."""


@pytest.mark.long
@pytest.mark.parametrize(("bits", "most"), [(1, 1.12), (2, 1.13), (2.5, 1.13), (3, 1.14), (4, 1.2), (5, 1.24), (6, 1.32)])
def test_the_error_is_close_to_the_least_that_is_possible(bits: float, most: float) -> None:
    """64 tiles; their errors have a standard deviation of 1%. The best scalar code has 1.5 to 2.5 times the bound."""
    rate = Rate(int(2 * bits))
    rows = np.random.default_rng(4).standard_normal((16, 1024)).astype(np.float32)
    gain = SEARCH[rate].gain
    _, values = encoded(rows * gain, rate)
    assert 1 < np.square(values / gain - rows).mean() / BOUND[rate.halves] < most


@pytest.mark.long
@pytest.mark.parametrize("bits", [7, 8])
def test_more_bits_are_nearly_exact(bits: int) -> None:
    rate = Rate(2 * bits)
    rows = np.random.default_rng(4).standard_normal((16, 512)).astype(np.float32)
    gain = SEARCH[rate].gain
    _, values = encoded(rows * gain, rate)
    assert 1 < np.square(values / gain - rows).mean() / BOUND[rate.halves] < 1.6


def best_path(weights: np.ndarray, rate: Rate, start: int) -> float:
    """The least cost of a circular stream whose first overlap is `start`, in float64, states one by one in numpy."""
    states, steps, table = np.arange(1 << 16), rate.steps, values_of("mul1").astype(np.float64)
    costs = np.full(1 << (16 - steps[0]), np.inf)
    costs[start] = 0
    for t, w in enumerate(weights):
        width, after = steps[t % 2], steps[(t + 1) % 2]
        path_costs = costs[states >> width] + np.square(table - w)
        costs = path_costs.reshape(1 << after, -1).min(0)
    return float(costs[start])


@pytest.mark.long
@pytest.mark.parametrize("bits", [2, 2.5, 4])
def test_the_path_is_the_best_with_its_overlap(bits: float) -> None:
    """Against another search, with exact costs. Only rounding to units separates them."""
    rate = Rate(int(2 * bits))
    rows = np.random.default_rng(5).standard_normal((16, 16)) * SEARCH[rate].gain
    words, values = encoded(rows, rate)
    order = PLACES // 128 * 16 + PLACES % 128
    weights, chosen = rows.reshape(-1)[order], values.reshape(-1)[order]
    overlap = int(words[0, -1] & 0xFFFF) & ((1 << (16 - rate.steps[0])) - 1)
    least = best_path(weights, rate, overlap)
    assert 1 - 1e-9 <= np.square(weights - chosen).sum() / least < 1.015


@pytest.mark.long
def test_a_number_beyond_all_values_gets_a_large_one() -> None:
    for rate in (Rate(4), Rate(8), Rate(16)):
        rows = np.random.default_rng(6).standard_normal((16, 64)) * SEARCH[rate].gain
        rows[5, 3::16] = 9
        _, values = encoded(rows, rate)
        assert (values[5, 3::16] > 2).all()


# ---- matrices


def weight_of(n: int, k: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (rng.standard_normal((n, k)) * 0.02 * np.exp(rng.standard_normal((n, 1)) / 2)).astype(np.float32)


def inputs_of(k: int) -> np.ndarray:
    """The Hessian of correlated inputs of different sizes."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((900, k)) @ (np.eye(k) + 0.2 * rng.standard_normal((k, k)) / np.sqrt(k) * 4)
    x *= np.exp(rng.standard_normal(k))
    return (x.T @ x).astype(np.float32)


def loss_of(decoded: np.ndarray, weight: np.ndarray, hessian: np.ndarray) -> float:
    error, wide = (decoded - weight).astype(np.float64), weight.astype(np.float64)
    return float(np.einsum("ij,jk,ik->", error, hessian, error) / np.einsum("ij,jk,ik->", wide, hessian, wide))


@pytest.mark.long
def test_rows_and_columns_of_zeros_stay_zeros() -> None:
    weight = weight_of(100, 140)
    weight[7], weight[:, 9] = 0, 0
    decoded = dequantise_matrix(quantise_matrix(weight, None, Rate(8)), weight.shape, Rate(8))
    assert not decoded[7].any()
    assert not decoded[:, 9].any()
    assert error_of(decoded, weight) < 0.006
    zeros = np.zeros((5, 6), np.float32)
    assert not dequantise_matrix(quantise_matrix(zeros, None, Rate(8)), zeros.shape, Rate(8)).any()


@pytest.mark.long
def test_the_inputs_of_a_layer_make_its_outputs_better() -> None:
    weight, hessian = weight_of(128, 256), inputs_of(256)
    plain, better = (
        loss_of(dequantise_matrix(quantise_matrix(weight, moments, Rate(6)), weight.shape, Rate(6)), weight, hessian)
        for moments in (None, hessian)
    )
    assert better < 0.6 * plain


@pytest.mark.long
def test_the_factor_is_that_of_the_rotated_hessian() -> None:
    """H = L D Lᵀ, with ones in L on the diagonal, and D in blocks of 16."""
    hessian, scales = inputs_of(128), find_scales(weight_of(128, 128), Rate(8)).inputs
    factor = factorise(hessian, scales).numpy().astype(np.float64)
    hadamard = np.array([[1]])
    for _ in range(7):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    s = np.diag(scales.astype(np.float64))
    rotated = hadamard @ s @ hessian @ s @ hadamard / 128
    rotated += 0.025 * np.trace(rotated) / 128 * np.eye(128)
    for i in range(0, 128, 16):
        np.testing.assert_allclose(factor[i : i + 16, i : i + 16], np.eye(16), atol=1e-5)
    whole = np.tril(factor)
    inner = np.linalg.solve(whole, np.linalg.solve(whole, rotated).T)
    blocks = np.kron(np.eye(8), np.ones((16, 16)))
    assert np.abs(inner * (1 - blocks)).max() < 1e-3 * np.abs(inner).max()


@pytest.mark.matrix
@pytest.mark.slow
def test_threads_do_not_change_a_matrix() -> None:
    weight, hessian = weight_of(1100, 128), inputs_of(128)
    one, three = (quantise_matrix(weight, hessian, Rate(16), threads).words for threads in (1, 3))
    np.testing.assert_array_equal(one, three)


@pytest.mark.slow
def test_a_hessian_with_inputs_that_are_always_zero() -> None:
    weight, hessian = weight_of(128, 128), inputs_of(128)
    hessian[5], hessian[:, 5] = 0, 0
    decoded = dequantise_matrix(quantise_matrix(weight, hessian, Rate(8)), weight.shape, Rate(8))
    assert loss_of(decoded, weight, hessian) < 0.005
    hessian[3, 3] = np.nan
    with pytest.raises(NonFinite, match="Hessian"):
        quantise_matrix(weight, hessian, Rate(8))


def test_a_weight_that_is_not_finite_is_an_error() -> None:
    weight = weight_of(128, 128)
    weight[3, 4] = np.nan
    with pytest.raises(NonFinite, match="NaN or infinite"):
        quantise_matrix(weight, None, Rate(8))


@pytest.mark.parametrize("largest", [1e7, 1e30])
def test_a_weight_whose_scale_float16_does_not_hold_is_an_error(largest: float) -> None:
    weight = np.full((128, 128), 0.02, np.float32)
    weight[5, 7] = largest
    with pytest.raises(NonFinite, match="too large for a scale in float16"):
        find_scales(weight, Rate(8))


def test_names_of_encodings() -> None:
    assert [parse(f"exl3 {rate}").rate for rate in RATES] == list(RATES)
    for name in ("exl3 4.5", "exl3 9", "exl3 0", "exl3 4.0", "exl3 "):
        with pytest.raises(ValueError, match="exl3"):
            parse(name)


# ---- models


@pytest.mark.long
def test_a_model_is_quantised_and_dequantised(model: Path, cli: Cli) -> None:
    ran = cli("quantize", "m", "q", "--format", "exl3", "--bits", "4", "--calibration", "none", "--quiet")
    assert ran.code == 0
    stored, plain = tensors_of("q", raw=True), tensors_of(model)
    linears = [name.removesuffix(".weight") for name in plain if "_proj" in name] + ["lm_head"]
    others = [name for name in plain if "_proj" not in name]
    assert set(stored) == {f"{name}.{part}" for name in linears for part in ("trellis", "suh", "svh", "mul1")} | set(others)
    assert all(stored[name].dtype == np.float16 for name in others)
    assert stored["lm_head.trellis"].shape == (8, 16, 96)  # 136 tokens, padded
    assert all(stored[f"{name}.mul1"].view(np.uint32) == 0x83DCD12D for name in linears)

    config = config_of("q")
    assert config["tie_word_embeddings"] is False
    entry = config["quantization_config"]
    assert entry == {
        **{"quant_method": "exl3", "version": "1.6.5", "bits": 4, "head_bits": 6},
        **{"out_scales": "always", "codebook": "mul1"},
    }
    assert json.loads(Path("q/weightsmith.json").read_text())["quantised"] == "exl3"

    assert cli("dequantize", "q", "d", "--quiet").code == 0
    decoded = tensors_of("d")
    assert set(decoded) == {*plain, "lm_head.weight"}
    assert "quantization_config" not in config_of("d")
    for step in plan(bits=4).steps:
        source = plain.get(step.out.name, plain["model.embed_tokens.weight"]).astype(np.float32)
        expected = source.astype(np.float16)
        if step.family == "exl3":
            rate = parse(step.encoding).rate
            expected = dequantise_matrix(store(source, rate, find_scales(source, rate), encode_plainly), source.shape, rate)
            assert error_of(expected, source) < (0.006 if rate == Rate(8) else 0.0004)
        np.testing.assert_array_equal(decoded[step.out.name], expected.astype(decoded[step.out.name].dtype), step.out.name)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_merge_gives_the_same_bytes_as_merging_first(model: Path, tmp_path: Path) -> None:
    other = {name: (-array.astype(np.float32)).astype(array.dtype) * 2 for name, array in tensors_of("m").items()}
    write_checkpoint(tmp_path / "n", other, LLAMA)
    linear = {"merge_method": "linear", "models": [{"model": "m"}, {"model": "n"}], "parameters": {"weight": 1}}
    weightsmith.merge(linear, "direct", quantize="exl3", bits=8, threads=3, **QUICK)
    weightsmith.merge(linear, "merged", progress=False)
    weightsmith.quantize("merged", "q", "exl3", bits=8, threads=1, **QUICK)
    assert Path("direct/model.safetensors").read_bytes() == Path("q/model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.slow
def test_interrupted_and_resumed_it_has_the_same_bytes(model: Path) -> None:
    def stop(progress: weightsmith.Progress) -> None:
        if progress.tensors >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.quantize("m", "q", "exl3", bits=8, **{**QUICK, "progress": stop}, threads=1)
    assert not Path("q").exists()
    assert weightsmith.quantize("m", "q", "exl3", bits=8, **QUICK).resumed >= 4
    weightsmith.quantize("m", "fresh", "exl3", bits=8, **QUICK)
    assert Path("q/model.safetensors").read_bytes() == Path("fresh/model.safetensors").read_bytes()


def rates_of(planned: weightsmith.Plan) -> dict[str, float]:
    return {step.out.name: parse(step.encoding).rate.bits for step in planned.steps if step.family == "exl3"}


@pytest.mark.parametrize(
    ("bits", "rates"), [(2, {2}), (2.5, {2.5}), (2.75, {2.5, 3}), (3.9, {3.5, 4}), (4.5, {4, 5}), (8, {8})]
)
def test_bits_are_those_of_all_weights_or_the_two_next_to_them(bits: float, rates: set[float], model: Path) -> None:
    write(model, {**LLAMA, "num_hidden_layers": 12})
    planned = plan(bits=bits, head_bits=16)
    bits_by_name, sizes = rates_of(planned), {step.out.name: step.out.size for step in planned.steps}
    assert set(bits_by_name.values()) == rates
    average = sum(rate * sizes[name] for name, rate in bits_by_name.items()) / sum(sizes[name] for name in bits_by_name)
    assert bits - 0.02 < average <= bits
    assert planned.config is not None
    assert planned.config["quantization_config"]["bits"] == pytest.approx(average, abs=1e-4)


def test_weights_that_matter_more_get_more_bits_first(model: Path) -> None:
    write(model, {**LLAMA, "num_hidden_layers": 8})
    rates = rates_of(plan(bits=4.25, head_bits=16))
    favoured = {name for name, rate in rates.items() if rate == 5}
    assert {name.split(".")[-2] for name in favoured} >= {"v_proj", "k_proj"}
    assert not any("gate_proj" in name or "up_proj" in name for name in favoured)
    some = sorted(int(name.split(".")[2]) for name in favoured if "o_proj" in name)
    assert 0 < len(some) < 8
    assert max(b - a for a, b in itertools.pairwise([*some, some[0] + 8])) <= 4  # spread over the layers


@pytest.mark.parametrize("head_bits", [2, 3, 4, 5, 6, 8])
def test_head_bits(head_bits: int, model: Path) -> None:
    assert rates_of(plan(bits=5, head_bits=head_bits))["lm_head.weight"] == head_bits


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_16_bits_is_float16_and_stored_once(tied: bool, model: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": tied}
    write(model, config, shapes_of(config) | ({} if tied else {"lm_head.weight": (VOCAB, H)}))
    planned = plan(bits=8, head_bits=16)
    assert ("lm_head.weight" in {step.out.name for step in planned.steps}) is not tied
    assert "lm_head.weight" not in rates_of(planned)
    assert planned.config is not None
    assert planned.config["tie_word_embeddings"] is tied


@pytest.mark.matrix
@pytest.mark.slow
def test_phi3_is_split_and_joined_again(model: Path) -> None:
    shapes = {
        name: shape for name, shape in shapes_of(LLAMA).items() if not any(p in name for p in ("q_", "k_", "v_", "gate", "up"))
    }
    shapes["model.layers.0.self_attn.qkv_proj.weight"] = (2 * H, H)
    shapes["model.layers.0.mlp.gate_up_proj.weight"] = (2 * I, H)
    write(model, {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, shapes)
    names = {name.removeprefix("model.layers.0.").removesuffix(".weight") for name in rates_of(plan(bits=4))}
    attention, mlp = {f"self_attn.{p}_proj" for p in "qkvo"}, {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    assert names == {*attention, *mlp, "lm_head"}
    weightsmith.quantize(model, "q", "exl3", bits=4, **QUICK)
    plain, decoded = tensors_of(model), tensors_of("q")
    assert {name: array.shape for name, array in decoded.items()} == {name: array.shape for name, array in plain.items()}
    for name, array in plain.items():
        assert error_of(decoded[name].astype(np.float32), array.astype(np.float32)) < 0.1, name


@pytest.mark.parametrize("style", ["mixtral", "qwen3"])
def test_mixtures_of_experts(style: str, model: Path) -> None:
    shapes = shapes_of(LLAMA, mixture=True)
    names = ("w1", "w3", "w2") if style == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    module = "block_sparse_moe" if style == "mixtral" else "mlp"
    shapes[f"model.layers.0.{module}.gate.weight"] = (2, H)
    for e in range(2):
        for name, shape in zip(names, ((I, H), (I, H), (H, I)), strict=True):
            shapes[f"model.layers.0.{module}.experts.{e}.{name}.weight"] = shape
    architecture = "MixtralForCausalLM" if style == "mixtral" else "Qwen3MoeForCausalLM"
    write(model, {**LLAMA, "architectures": [architecture]}, shapes)
    rates = rates_of(plan(bits=4))
    assert sum(".experts." in name for name in rates) == 6
    assert f"model.layers.0.{module}.gate.weight" not in rates


@pytest.mark.parametrize(
    ("config", "extra", "options", "what"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, {}, {"bits": 4}, "'GPT2LMHeadModel' cannot be stored as EXL3, only LlamaFor"),
        ({"architectures": ["Gemma3ForCausalLM"]}, {}, {"bits": 4}, "'Gemma3ForCausalLM' cannot be stored as EXL3"),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, {}, "'GPT2LMHeadModel' cannot be stored as EXL3"),
        ({"hidden_act": "gelu"}, {}, {"bits": 4}, "loads LlamaForCausalLM with hidden_act 'silu', not 'gelu'"),
        ({"architectures": None}, {}, {"bits": 4}, "None cannot be stored as EXL3"),
        ({"architectures": [["LlamaForCausalLM"]]}, {}, {"bits": 4}, "['LlamaForCausalLM'] cannot be stored as EXL3"),
        ({}, {"model.layers.0.mlp.up_proj.bias": (I,)}, {"bits": 4}, "exllamav3 cannot load the bias: its 200 numbers"),
        ({}, {}, {}, "exl3 needs the average bits per weight"),
        ({}, {}, {"bits": 0.9}, "exl3 has 1 to 8 bits per weight, not 0.9"),
        ({}, {}, {"bits": 9}, "exl3 has 1 to 8 bits per weight, not 9"),
        ({}, {}, {"bits": 4, "calibration_rows": 4}, "no calibration text is read"),
        ({}, {}, {"bits": 4, "engine": "vllm"}, "does not load exl3"),
        ({}, {}, {"bits": 4, "uniform": True}, "not a setting of exl3"),
    ],
)
def test_what_cannot_be_stored_is_an_error_before_anything_is_read(
    config: Mapping[str, Any], extra: Mapping[str, tuple[int, ...]], options: Mapping[str, Any], what: str, model: Path
) -> None:
    write(model, {**LLAMA, **config}, {**shapes_of(LLAMA), **extra})
    with pytest.raises(PlanError) as problem:
        plan(**options)
    assert what in str(problem.value)


def test_a_hidden_size_with_which_exllamav3_does_not_run_an_mlp_is_an_error(model: Path) -> None:
    """SmolLM2-135M's. A mixture of experts is not meant: its outputs are cut."""
    write(model, LLAMA, {name: tuple(576 if n == H else n for n in shape) for name, shape in shapes_of(LLAMA).items()})
    what = "does not run MLPs with padded outputs: their hidden size must be a multiple of 128, not 576: one weight"
    for options in ({}, {"engine": "exllamav3"}):
        with pytest.raises(PlanError) as problem:
            plan(bits=4, **options)
        assert f"model.layers.0.mlp.down_proj.weight: exllamav3 (TabbyAPI) 1.6.5 {what}" in str(problem.value)
        assert "Choose another format" in str(problem.value)
    shapes = {name: tuple(576 if n == H else n for n in shape) for name, shape in shapes_of(LLAMA, mixture=True).items()}
    shapes |= {f"model.layers.0.block_sparse_moe.experts.0.{name}.weight": (I, 576) for name in ("w1", "w3")}
    shapes |= {"model.layers.0.block_sparse_moe.experts.0.w2.weight": (576, I)}
    write(model, {**LLAMA, "architectures": ["MixtralForCausalLM"]}, shapes)
    assert plan(bits=4).steps


def test_a_window_that_exllamav3_ignores_is_named(model: Path) -> None:
    config = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 64, "max_position_embeddings": 128}
    write(model, config, shapes_of(LLAMA))
    what = "exllamav3 1.6.5 ignores the sliding window of 64 tokens, and transformers applies it"
    assert sum(what in str(warning) for warning in plan(bits=4).warnings) == 1


def test_a_bias_that_needs_no_padding_is_float16(model: Path) -> None:
    write(model, LLAMA, {**shapes_of(LLAMA), "model.layers.0.self_attn.q_proj.bias": (H,)})
    (step,) = (step for step in plan(bits=4).steps if step.out.name.endswith(".bias"))
    assert step.outs[0].dtype.name == "F16"


# ---- with a text


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", "llama-128")


def calibrated(source: Path, out: Path, folder: Path, threads: int) -> Path:
    quantize_settings = settings(folder, bits=3.0, uniform=False, head_bits=16)
    with prepared_for(source, quantize_settings, "exl3") as prepared:
        execute(prepared, out, RunOptions(threads=threads, card=False))
    return out


@pytest.mark.long
def test_a_calibrated_model_is_closer_and_does_not_depend_on_threads(llama: Path, tmp_path: Path) -> None:
    first = calibrated(llama, tmp_path / "a", tmp_path, 1)
    second = calibrated(llama, tmp_path / "b", tmp_path, 3)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert config_of(first)["quantization_config"]["calibration"] == {"rows": 6, "cols": 16}
    weightsmith.quantize(llama, tmp_path / "plain", "exl3", bits=3, **QUICK)
    quantize_settings = settings(tmp_path)
    with prepared_for(llama, quantize_settings) as prepared:
        rows = rows_for(quantize_settings, Path(prepared.plan.models[0].ref))
    base, plain, better = (logits_of(folder, rows) for folder in (llama, tmp_path / "plain", first))
    assert np.square(better - base).mean() < 0.8 * np.square(plain - base).mean()


def logits_of(folder: Path, rows: Any) -> np.ndarray:
    """Of a model whose weights are decoded first."""
    import torch
    import transformers

    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        state = {name: torch.from_numpy(array.astype(np.float32)) for name, array in tensors_of(folder).items()}
        model.load_state_dict(state, strict=False)
        logits: np.ndarray = model.float()(rows).logits.numpy()
    return logits
