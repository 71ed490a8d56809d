"""EXL2 models end to end: names, sizes, config.json, what is rejected, resumption, and the way back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.calibration_help import save_model
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError, NonFinite, PlanError, UnknownName
from weightsmith._models.formats.exl2.layout import SUFFIXES, groups_of, loader_config
from weightsmith._models.formats.exl2.model import Measured, measurement_json, prepare_model
from weightsmith._models.formats.exl2.writing import by_norm, dequantise_matrix, parse, store
from weightsmith._models.formats.hessians import round_plainly

__all__ = ["cli"]

H, I, VOCAB = 64, 96, 72  # noqa: E741

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": H,
    "intermediate_size": I,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
NONE = {"calibration": "none", "progress": False}


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a small model with this config."""
    layers = {
        **{"self_attn.q_proj": (H, H), "self_attn.k_proj": (H // 2, H), "self_attn.v_proj": (H // 2, H)},
        **{"self_attn.o_proj": (H, H), "mlp.gate_proj": (I, H), "mlp.up_proj": (I, H), "mlp.down_proj": (H, I)},
        **{"input_layernorm": (H,), "post_attention_layernorm": (H,)},
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, H), "model.norm.weight": (H,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layers.items()}
    return shapes


def with_mlps_of(width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of `LLAMA` with another intermediate size."""
    return {name: tuple(width if n == I else n for n in shape) for name, shape in shapes_of(LLAMA).items()}


def write(folder: Path, config: Mapping[str, Any] = LLAMA, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Path:
    """A bfloat16 model."""
    rng = np.random.default_rng(0)
    shapes = shapes or shapes_of(config)
    tensors = {name: (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    write_checkpoint(folder, tensors, config)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tied Llama model with three layers, in the current folder as `m`."""
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "m")


def tensors_of(folder: str | Path, *, raw: bool = False) -> dict[str, np.ndarray]:
    with weightsmith.open_checkpoint(folder, raw=raw) as opened:
        return {name: opened.read(name) for name in opened.specs}


def config_of(folder: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


@pytest.mark.long
def test_a_model_is_quantised_and_dequantised(model: Path, cli: Cli) -> None:
    ran = cli("quantize", "m", "q", "--format", "exl2", "--bits", "4.5", "--calibration", "none", "--quiet")
    assert ran.code == 0
    assert "ExLlamaV2 0.3.2, which is archived" in ran.err
    assert "Choose a gguf format" in ran.err
    stored, plain = tensors_of("q", raw=True), tensors_of(model)
    linears = [name.removesuffix(".weight") for name in plain if "_proj" in name] + ["lm_head"]
    others = [name for name in plain if "_proj" not in name]
    assert set(stored) == {f"{name}.{suffix}" for name in linears for suffix in SUFFIXES} | set(others)
    assert all(stored[name].dtype == np.float16 for name in others)
    assert stored["lm_head.q_weight"].shape[1] == 96  # 72 tokens, padded

    config = config_of("q")
    assert config["rope_theta"] == 50000.0
    assert config["tie_word_embeddings"] is True
    entry = config["quantization_config"]
    assert (entry["quant_method"], entry["version"], entry["head_bits"]) == ("exl2", "0.3.2", 6)
    assert entry["calibration"] == {"rows": 0, "length": 0, "dataset": "none"}
    assert json.loads(Path("q/weightsmith.json").read_text())["quantised"] == "exl2"

    assert cli("dequantize", "q", "d", "--quiet").code == 0
    decoded = tensors_of("d")
    assert set(decoded) == {*plain, "lm_head.weight"}
    assert decoded["lm_head.weight"].shape == (VOCAB, H)
    assert all(array.dtype == np.float16 for array in decoded.values())
    assert config_of("d")["tie_word_embeddings"] is False
    assert "quantization_config" not in config_of("d")
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": "m"}]}, quantize="exl2", bits=4.5, **PLAN)
    for step in plan.steps:
        source = plain.get(step.out.name, plain["model.embed_tokens.weight"]).astype(np.float32)
        if step.family == "exl2":
            groups, order = groups_of(parse(step.encoding).params, source.shape[1]), by_norm(source)
            matrix = store(
                source.shape, groups, order, lambda s, w=source, o=order, g=groups: round_plainly(w, o, g, s, half=True)
            )
            expected = dequantise_matrix(matrix)
        else:
            expected = source.astype(np.float16)
        np.testing.assert_array_equal(decoded[step.out.name], expected, step.out.name)


PLAN = {"calibration": "none"}


def test_features_with_large_weights_come_first() -> None:
    weight = np.ones((3000, 64), np.float32) * np.random.default_rng(0).permutation(64).astype(np.float32)
    np.testing.assert_array_equal(weight[0, by_norm(weight)], np.arange(64)[::-1])
    assert by_norm(np.ones((5, 32), np.float32)).tolist() == list(range(32))


@pytest.mark.long
def test_a_matrix_of_several_tiles_is_encoded_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "m", {**LLAMA, "vocab_size": 20_000}, {**shapes_of(LLAMA), "model.embed_tokens.weight": (20_000, H)})
    embedding = tensors_of(tmp_path / "m")["model.embed_tokens.weight"].astype(np.float32)
    for threads in (1, 3):
        weightsmith.quantize(tmp_path / "m", tmp_path / f"q{threads}", "exl2", bits=4.5, threads=threads, **NONE)
        decoded = tensors_of(tmp_path / f"q{threads}")["lm_head.weight"]
        assert np.linalg.norm(decoded - embedding) < 0.05 * np.linalg.norm(embedding)
    files = [(tmp_path / f"q{threads}" / "model.safetensors").read_bytes() for threads in (1, 3)]
    assert files[0] == files[1]


def test_the_actual_bits_are_those_of_the_files(model: Path) -> None:
    weightsmith.quantize("m", "q", "exl2", bits=4.5, **NONE)
    stored, plain = tensors_of("q", raw=True), tensors_of("m")
    weights = sum(array.size for name, array in plain.items() if "_proj" in name)
    size = sum(array.nbytes for name, array in stored.items() if "_proj" in name)
    assert config_of("q")["quantization_config"]["bits"] == pytest.approx(8 * size / weights, abs=1e-4)


@pytest.mark.reader
@pytest.mark.slow
def test_it_loads_in_transformers(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    weightsmith.quantize("m", "q", "exl2", bits=5, head_bits=8, **NONE)
    weightsmith.dequantize("q", "d", progress=False)
    loaded, report = AutoModelForCausalLM.from_pretrained("d", output_loading_info=True)
    assert not any(report.values())
    expected = tensors_of("d")
    for name, array in loaded.state_dict().items():
        np.testing.assert_array_equal(array.numpy(), expected[name])


@pytest.mark.matrix
@pytest.mark.slow
def test_a_merge_gives_the_same_bytes_as_merging_first(model: Path, tmp_path: Path) -> None:
    other = {name: (-array.astype(np.float32)).astype(array.dtype) * 2 for name, array in tensors_of("m").items()}
    write_checkpoint(tmp_path / "n", other, LLAMA)
    ties = {
        "merge_method": "ties",
        "base_model": "m",
        "models": [{"model": "n"}, {"model": "m"}],
        "parameters": {"density": 0.5, "weight": 1},
    }
    weightsmith.merge(ties, "direct", quantize="exl2", bits=4.5, threads=3, **NONE)
    weightsmith.merge(ties, "merged", progress=False)
    weightsmith.quantize("merged", "q", "exl2", bits=4.5, threads=1, **NONE)
    assert Path("direct/model.safetensors").read_bytes() == Path("q/model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.slow
def test_interrupted_and_resumed_it_has_the_same_bytes(model: Path) -> None:
    def stop(progress: weightsmith.Progress) -> None:
        if progress.tensors >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.quantize("m", "q", "exl2", bits=4.5, calibration="none", progress=stop, threads=1)
    assert not Path("q").exists()
    resumed = weightsmith.quantize("m", "q", "exl2", bits=4.5, **NONE)
    assert resumed.resumed >= 10
    weightsmith.quantize("m", "fresh", "exl2", bits=4.5, **NONE)
    assert Path("q/model.safetensors").read_bytes() == Path("fresh/model.safetensors").read_bytes()


def test_a_number_that_float16_cannot_hold_is_an_error(model: Path, tmp_path: Path) -> None:
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors = tensors_of("m")
        tensors[name].reshape(-1)[5] = 1e5
        write_checkpoint(tmp_path / "big", tensors, LLAMA)
        with pytest.raises(NonFinite, match="float16") as refused:
            weightsmith.quantize("big", f"q {name}", "exl2", bits=4.5, **NONE)
        assert name in str(refused.value)
        assert not Path(f"q {name}").exists()


# ---- options


def test_uniform_gives_all_blocks_of_a_kind_the_same(model: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    plan = weightsmith.plan(recipe, quantize="exl2", bits=5, uniform=True, **PLAN)
    by_module: dict[str, set[str]] = {}
    for step in plan.steps:
        if "_proj" in step.out.name:
            by_module.setdefault(step.out.name.split(".", 3)[3], set()).add(step.encoding)
    assert {len(widths) for widths in by_module.values()} == {1}


@pytest.mark.parametrize("head_bits", [2, 3, 4, 5, 6, 8])
def test_head_bits(head_bits: int, model: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    plan = weightsmith.plan(recipe, quantize="exl2", bits=5, head_bits=head_bits, **PLAN)
    head = next(step for step in plan.steps if step.out.name == "lm_head.weight")
    assert parse(head.encoding).params.bits[-1] == (head_bits if head_bits > 2 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_16_bits_is_float16_and_stored_once(tied: bool, tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": tied}
    write(tmp_path / "m", config, shapes_of(config) | ({} if tied else {"lm_head.weight": (VOCAB, H)}))
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=5, head_bits=16, **NONE)
    weightsmith.dequantize(tmp_path / "q", tmp_path / "d", progress=False)
    plain, stored, decoded = (tensors_of(tmp_path / name, raw=True) for name in "mqd")
    heads = [] if tied else ["lm_head.weight"]
    assert [name for name in stored if name.startswith("lm_head")] == heads
    assert set(decoded) == set(plain)
    for name in ["model.embed_tokens.weight", *heads]:
        np.testing.assert_array_equal(decoded[name], plain[name].astype(np.float16))
    assert config_of(tmp_path / "q")["quantization_config"]["head_bits"] == 16
    assert config_of(tmp_path / "d")["tie_word_embeddings"] is tied


@pytest.mark.parametrize("head_bits", [6, 16])
def test_a_head_that_is_stored_and_tied_is_not_lost(head_bits: int, tmp_path: Path) -> None:
    """transformers uses it if it differs from the embedding."""
    write(tmp_path / "m", LLAMA, shapes_of(LLAMA) | {"lm_head.weight": (VOCAB, H)})
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=5, head_bits=head_bits, **NONE)
    head, decoded = (tensors_of(tmp_path / name)["lm_head.weight"].astype(np.float32) for name in "mq")
    assert np.linalg.norm(decoded - head) < 0.05 * np.linalg.norm(head)


def test_a_head_that_is_left_out_is_tied_in_the_config(tmp_path: Path) -> None:
    """ExLlamaV2 takes a model without the flag for untied."""
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    write(tmp_path / "m", config, shapes_of(LLAMA))
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=5, head_bits=16, **NONE)
    assert config_of(tmp_path / "q")["tie_word_embeddings"] is True


@pytest.mark.parametrize(("bits", "warned"), [(3.9, True), (4, False)])
def test_few_bits_without_data_are_warned_of(bits: float, warned: bool, model: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    plan = weightsmith.plan(recipe, quantize="exl2", bits=bits, **PLAN)
    assert any("fewer than 4 bits" in warning.what for warning in plan.warnings) is warned


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "ExLlamaV2 0.3.2 subtracts the mean in the norms of queries and keys"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            "computes YaRN for 256 positions (max_position_embeddings), and transformers for 64",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            "does not scale positions, because max_position_embeddings (256) is not above 256",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            "uses LongRoPE's long factors for texts of all lengths, transformers the short ones up to 64 tokens",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
            "ignores the sliding window of 128 tokens, and transformers applies it",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, ""),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ""),
        ({"sliding_window": 128}, ""),
        ({}, ""),
    ],
)
def test_what_exllamav2_computes_in_another_way_is_a_warning(changes: Mapping[str, Any], text: str, tmp_path: Path) -> None:
    """With the plan, so before a measurement, and once."""
    write(tmp_path / "m", {**LLAMA, "max_position_embeddings": 256, **changes}, with_mlps_of(128))
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "m")}]}
    messages = [str(warning) for warning in weightsmith.plan(recipe, quantize="exl2", bits=5, **PLAN).warnings]
    assert [message for message in messages if "ExLlamaV2 0.3.2, which is archived" in message]
    others = [message for message in messages if "archived" not in message]
    assert len(others) == (text != "")
    assert all(text in message and "in config.json" in message for message in others)


@pytest.mark.parametrize("measured", [False, True])
def test_an_mlp_that_exllamav2_does_not_activate_is_named(measured: bool, tmp_path: Path) -> None:
    """Once; with `--for`, it is an error."""
    recipe = {"merge_method": "passthrough", "models": [{"model": str(save_model(tmp_path / "m"))}]}
    (tmp_path / "text.txt").write_text("The cat has two cats, and four more. " * 20)
    text = {"calibration": str(tmp_path / "text.txt"), "calibration_rows": 2, "calibration_tokens": 16} if measured else PLAN
    options: dict[str, Any] = {"quantize": "exl2", "bits": 5, **text}
    what = "leaves the last features of MLPs without activation: their intermediate size must be a multiple of 64, not 96"
    (warning,) = [str(warning) for warning in weightsmith.plan(recipe, **options).warnings if "MLPs" in str(warning)]
    assert f"model.layers.0.mlp.down_proj.weight: ExLlamaV2 0.3.2 {what}: 2 weights" in warning
    assert "Choose a gguf format" in warning
    with pytest.raises(PlanError, match="a multiple of 64, not 96"):
        weightsmith.plan(recipe, engine="exllamav2", **options)
    write(tmp_path / "fine", shapes=with_mlps_of(128))
    weightsmith.plan(
        {**recipe, "models": [{"model": str(tmp_path / "fine")}]}, quantize="exl2", bits=5, engine="exllamav2", **PLAN
    )


def test_longrope_has_the_key_that_exllamav2_requires(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0}
    write(tmp_path / "m", {**LLAMA, "max_position_embeddings": 256, "rope_parameters": rope})
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=5, **NONE)
    assert config_of(tmp_path / "q")["original_max_position_embeddings"] == 64


def test_mlps_with_biases_leave_down_proj_in_order(tmp_path: Path) -> None:
    shapes = shapes_of(LLAMA)
    for i in range(3):
        shapes |= {
            f"model.layers.{i}.mlp.{name}.bias": (n,) for name, n in (("gate_proj", I), ("up_proj", I), ("down_proj", H))
        }
    write(tmp_path / "m", {**LLAMA, "mlp_bias": True}, shapes)
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=4.5, **NONE)
    stored = tensors_of(tmp_path / "q", raw=True)
    assert (stored["model.layers.1.mlp.down_proj.q_invperm"] == np.arange(I)).all()
    assert not (stored["model.layers.1.mlp.up_proj.q_invperm"] == np.arange(H)).all()
    assert stored["model.layers.1.mlp.up_proj.bias"].dtype == np.float16


def test_phi3_is_split_and_joined_again(tmp_path: Path) -> None:
    shapes = {
        name: shape for name, shape in shapes_of(LLAMA).items() if not any(p in name for p in ("q_", "k_", "v_", "gate", "up"))
    }
    for i in range(3):
        shapes[f"model.layers.{i}.self_attn.qkv_proj.weight"] = (2 * H, H)
        shapes[f"model.layers.{i}.mlp.gate_up_proj.weight"] = (2 * I, H)
    write(tmp_path / "m", {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, shapes)
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=7.5, **NONE)
    stored, plain = tensors_of(tmp_path / "q", raw=True), tensors_of(tmp_path / "m")
    assert "model.layers.0.self_attn.k_proj.q_weight" in stored
    assert not any("qkv_proj" in name or "gate_up" in name for name in stored)
    decoded = tensors_of(tmp_path / "q")
    assert set(decoded) == {*plain, "lm_head.weight"}
    for name, array in plain.items():
        actual, expected = decoded[name].astype(np.float32), array.astype(np.float32)
        assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected), name


@pytest.mark.parametrize("style", ["mixtral", "qwen3"])
def test_mixtures_of_experts(style: str, tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in shapes_of(LLAMA).items() if "mlp" not in name}
    names = ("w1", "w3", "w2") if style == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    module = "block_sparse_moe" if style == "mixtral" else "mlp"
    for i in range(3):
        shapes[f"model.layers.{i}.{module}.gate.weight"] = (2, H)
        for e in range(2):
            for name, shape in zip(names, ((I, H), (I, H), (H, I)), strict=True):
                shapes[f"model.layers.{i}.{module}.experts.{e}.{name}.weight"] = shape
    architecture = "MixtralForCausalLM" if style == "mixtral" else "Qwen3MoeForCausalLM"
    write(tmp_path / "m", {**LLAMA, "architectures": [architecture]}, shapes)
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=4.5, **NONE)
    stored = tensors_of(tmp_path / "q", raw=True)
    assert stored[f"model.layers.2.{module}.gate.weight"].dtype == np.float16
    assert f"model.layers.2.{module}.experts.1.{names[2]}.q_weight" in stored
    assert len({stored[f"model.layers.1.{module}.experts.{e}.{names[0]}.q_groups"].tobytes() for e in range(2)}) == 1


@pytest.mark.long
def test_gemma3_gets_the_names_that_exllamav2_knows(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3}
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    write(tmp_path / "m", config)
    weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=4.5, **NONE)
    assert {name.partition(".")[0] for name in tensors_of(tmp_path / "q", raw=True)} == {"language_model"}
    stored_config = config_of(tmp_path / "q")
    assert stored_config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert stored_config["sliding_window_pattern"] == 2
    assert stored_config["text_config"]["rope_theta"] == 1e6
    assert stored_config["text_config"]["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    weightsmith.dequantize(tmp_path / "q", tmp_path / "d", progress=False)
    assert set(tensors_of(tmp_path / "d")) == {*tensors_of(tmp_path / "m"), "lm_head.weight"}
    plain = config_of(tmp_path / "d")
    assert plain["architectures"] == ["Gemma3ForCausalLM"]
    assert {key: plain[key] for key in ("model_type", "layer_types")} == {
        key: config[key] for key in ("model_type", "layer_types")
    }
    with pytest.raises(PlanError, match="every n-th"):
        loader_config({**config, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, gemma3=True)


def test_a_measurement_chooses(model: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    blocks = prepare_model(weightsmith.plan(recipe)).blocks
    measured = [
        (
            block,
            [Measured(option, 0.5 / (i + 1) / (10 if ".1." in block.key else 1)) for i, option in enumerate(block.options)],
        )
        for block in blocks
    ]
    Path("measurement.json").write_text(json.dumps(measurement_json(measured)))
    plan = weightsmith.plan(recipe, quantize="exl2", bits=4.5, measurement="measurement.json", **PLAN)
    sizes = {
        i: sum(out.nbytes for s in plan.steps if f"layers.{i}.self_attn" in s.out.name for out in s.outs) for i in range(3)
    }
    assert sizes[1] < min(sizes[0], sizes[2])


# ---- a target size


@pytest.mark.long
@pytest.mark.parametrize("head_bits", [4, 16])
@pytest.mark.parametrize("nbytes", [145_000, 190_000, 10**9])
def test_the_files_have_the_size_that_is_asked_for(nbytes: int, head_bits: int, tmp_path: Path) -> None:
    """As many bits as fit; 8 if all do."""
    write(tmp_path / "m", {**LLAMA, "num_hidden_layers": 6})
    quantised = weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", size_bytes=nbytes, head_bits=head_bits, **NONE)
    total = sum(path.stat().st_size for path in (tmp_path / "q").glob("*.safetensors"))
    assert total <= nbytes
    if nbytes < 10**9:
        assert total > 0.9 * nbytes
        assert quantised.warnings
    else:
        assert config_of(tmp_path / "q")["quantization_config"]["bits"] > 8


# ---- what is rejected


def test_other_architectures_are_rejected_by_name(tmp_path: Path) -> None:
    write(tmp_path / "m", {**LLAMA, "architectures": ["CohereForCausalLM"]})
    with pytest.raises(PlanError, match="'CohereForCausalLM' cannot be stored as EXL2, only LlamaForCausalLM, Mistral"):
        weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=4.5, **NONE)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model.layers.1.self_attn.q_proj.weight": None}, "model.layers.1.self_attn has no q projection"),
        ({"model.layers.1.mlp.shared.weight": (H, H)}, "ExLlamaV2 knows no matrix of this name"),
        ({"model.layers.1.mlp.up_proj.weight": (100, H)}, "it has 100 output features, which must be a multiple of 32"),
        ({"model.layers.1.mlp.down_proj.weight": (H, 100)}, "it has 100 input features, which must be a multiple of 32"),
        ({"lm_head.weight": (VOCAB, H), "lm_head.bias": (VOCAB,)}, "72 outputs with a bias cannot be padded"),
    ],
)
def test_what_exllamav2_could_not_load_is_rejected(
    changes: Mapping[str, tuple[int, ...] | None], text: str, tmp_path: Path
) -> None:
    shapes = {name: shape for name, shape in {**shapes_of(LLAMA), **changes}.items() if shape is not None}
    write(tmp_path / "m", {**LLAMA, "tie_word_embeddings": "lm_head.weight" not in changes}, shapes)
    with pytest.raises(PlanError, match=text):
        weightsmith.quantize(tmp_path / "m", tmp_path / "q", "exl2", bits=4.5, **NONE)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "exl2 needs the average bits per weight, a size or a target"),
        ({"bits": 4.5, "size_bytes": 10**6}, "the size follows from the bits"),
        ({"size_bytes": 1000}, r"the model has at least [\d,]+ bytes as EXL2, not 1,000"),
        ({"bits": 1.5}, r"1\.5 bits for each weight are out of reach: settings take \d"),
        ({"bits": 12}, "out of reach"),
        ({"bits": 4.5, "head_bits": 7}, r"--head-bits \(head_bits\): must be one of 2, 3, 4, 5, 6, 8, 16, not 7"),
        ({"bits": 4.5, "calibration_rows": 5}, "no calibration text is read"),
        ({"bits": 4.5, "calibration_dtype": "bfloat16"}, "no calibration text is read"),
        ({"bits": 4.5, "measure": "full"}, "nothing is measured with"),
        ({"bits": 4.5, "calibration": "built-in", "measure": "full", "uniform": True}, "nothing is measured with"),
        ({"bits": 4.5, "measurement": "m/config.json", "uniform": True}, "a measurement chooses different bits"),
        ({"bits": 4.5, "measurement": "~/m/config.json"}, "home/m/config.json"),
        ({"bits": 4.5, "calibration": "~/text.txt"}, "home/text.txt"),
        (
            {"bits": 4.5, "calibration": "built-in", "calibration_rows": -3},
            r"--calibration-rows \(calibration_rows\): must be at least 1, not -3",
        ),
        ({"bits": 4.5, "measurement": "m/config.json"}, "it has no object 'measurement'"),
        ({"bits": 4.5, "measurement": "missing.json"}, "missing.json"),
    ],
)
def test_options_out_of_range_are_rejected(
    options: Mapping[str, Any], text: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    with pytest.raises(PlanError, match=text):
        weightsmith.quantize("m", "q", "exl2", **NONE | options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entry: entry.pop("model.layers.1.mlp"), "it has None for this block"),
        (lambda entry: entry["model.layers.1.mlp"].clear(), "it has 0 for this block"),
        (lambda entry: entry["model.layers.1.mlp"].insert(0, 4), "a setting is 4"),
        (lambda entry: entry["model.layers.1.mlp"][3].update(accuracy="high"), "accuracy is 'high'"),
        (lambda entry: entry["model.layers.1.mlp"][3].update(accuracy=1.5), "accuracy is 1.5"),
        (lambda entry: entry["model.layers.1.mlp"][3].update(total_bits=17), "total_bits is 17, and the setting takes"),
        (lambda entry: entry["model.layers.1.mlp"][3].pop("up_proj"), "up_proj.*not an object"),
    ],
)
def test_a_damaged_measurement_is_rejected(change: Any, text: str, model: Path) -> None:
    recipe = {"merge_method": "passthrough", "models": [{"model": "m"}]}
    blocks = prepare_model(weightsmith.plan(recipe)).blocks
    data = measurement_json([(block, [Measured(option, 0.1) for option in block.options]) for block in blocks])
    change(data["measurement"])
    Path("measurement.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=f"(?s){text}"):
        weightsmith.plan(recipe, quantize="exl2", bits=4.5, measurement="measurement.json", **PLAN)


@pytest.mark.parametrize("name", ["exl2 7", "exl2 4/g", "exl2 4@0.5/g32 ", "exl2 04/g32", "plain F99", "plain I32", "exl2"])
def test_an_encoding_of_a_foreign_plan_is_checked(name: str) -> None:
    from weightsmith._models.formats import find_encoding

    with pytest.raises(UnknownName):
        find_encoding(name)


# ---- as a source


def test_any_range_of_bytes_is_decoded_alike(model: Path) -> None:
    weightsmith.quantize("m", "q", "exl2", bits=4.5, **NONE)
    with weightsmith.open_checkpoint("q") as opened:
        for name in ("model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
            whole = opened.read(name)
            flat = whole.reshape(-1).view(np.uint8)
            for first, count in ((0, 4), (4 * 95, 4 * 200), (13, 1001), (4 * 64 * 31, 4 * 64 * 9), (flat.size - 3, 3)):
                out = np.empty(count, np.uint8)
                opened.source.read_into(name, first, out)
                np.testing.assert_array_equal(out, flat[first : first + count])


def damage(folder: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    stored = {**tensors_of("q", raw=True), **changes}
    config = config_of("q")
    write_checkpoint(folder, {name: array for name, array in stored.items() if array is not None}, config)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("suffix", "change", "text"),
    [
        ("q_groups", None, "q_groups' is missing"),
        ("q_invperm", lambda a: a[:-1], "63 input features, which must be a multiple of 32"),
        ("q_weight", lambda a: np.concatenate([a] * 9), "cannot take"),
        ("q_weight", lambda a: a[:, :-1], "its weight require"),
        ("q_scale", lambda a: a[:, :1], "its weight require"),
        ("q_scale_max", lambda a: a.astype(np.float32), "only F16 are read"),
        ("q_groups", lambda a: a[:-1], "its weight require"),
        ("q_groups", lambda a: a[::-1].copy(), "not a matrix of EXL2"),
        ("q_invperm", lambda a: np.zeros_like(a), "not a permutation"),
    ],
)
def test_a_damaged_model_is_rejected(suffix: str, change: Any, text: str, model: Path) -> None:
    weightsmith.quantize("m", "q", "exl2", bits=4.5, **NONE)
    array = tensors_of("q", raw=True)[f"{Q}.{suffix}"]
    damage(Path("bad"), {f"{Q}.{suffix}": None if change is None else change(array)})
    with pytest.raises((FormatError, PlanError, weightsmith.Unsupported), match=text):
        weightsmith.dequantize("bad", "d", progress=False)
    assert not Path("d").exists()
