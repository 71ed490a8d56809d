"""Programs that cannot run an output are named before it is made, and with `--for` are an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli, cli
from tests.mini import write_checkpoint
from tests.zoo import ZOO
from weightsmith._base.errors import PlanError
from weightsmith._features.quantisation.formats import FORMATS
from weightsmith._models.formats.config import older_config
from weightsmith._models.formats.engines import ENGINE_NAMES, ENGINES, SUPPORT, engines_of, find_support

pytestmark = pytest.mark.reader

__all__ = ["cli"]

Shapes = dict[str, tuple[int, int]]


def dense(hidden: int, inner: int, kv: int) -> Shapes:
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def mixture(hidden: int, inner: int) -> Shapes:
    experts = {
        f"mlp.experts.{e}.{name}": shape
        for e in range(2)
        for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner)))
    }
    return {"self_attn.o_proj": (hidden, hidden), "mlp.gate": (2, hidden), **experts}


def save(folder: Path, shapes: Shapes, **config: Any) -> str:
    tensors = {"model.embed_tokens.weight": np.ones((8, 64), ml_dtypes.bfloat16)}
    tensors |= {f"model.layers.0.{name}.weight": np.ones(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    whole = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "dtype": "bfloat16", **config}
    return str(write_checkpoint(folder, tensors, whole))


def plan(model: str, format: str, **options: Any) -> Any:
    recipe = {"merge_method": "passthrough", "models": [{"model": model}]}
    return weightsmith.plan(recipe, quantize=format, **options)


def warned(model: str, format: str, **options: Any) -> list[str]:
    return [str(warning) for warning in plan(model, format, **options).warnings]


def refused(model: str, format: str, engine: str, **options: Any) -> str:
    with pytest.raises(PlanError) as problem:
        plan(model, format, engine=engine, **options)
    return str(problem.value)


# ---- matrices


def test_sglang_has_no_kernel_for_widths_of_smollm2(tmp_path: Path) -> None:
    """vLLM pads them; SGLang's Marlin takes tiles of 64 by 128 or 128 by 64, of joined matrices."""
    model = save(tmp_path / "m", dense(576, 1536, 192))
    what = "SGLang 0.5.23 needs matrices that are a multiple of 64 by 128 or 128 by 64 (outputs by inputs): 4 weights"
    (warning,) = [warning for warning in warned(model, "w4a16", group_size=64) if "SGLang" in warning]
    assert warning == (
        f"model.layers.0.self_attn.q_proj.weight: {what}\n"
        "  -> Choose fp8-dynamic, fp8-static, int8, nvfp4a16, nvfp4, awq-4bit --group-size 64 for SGLang; "
        "or use transformers or vLLM."
    )
    assert what in refused(model, "w4a16", "sglang")
    assert not [warning for warning in warned(model, "w4a16", group_size=64, engine="vllm") if "SGLang" in warning]


def test_a_matrix_that_fits_after_joining_is_run(tmp_path: Path) -> None:
    model = save(tmp_path / "m", {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)})
    assert not warned(model, "w4a16", group_size=32, engine="sglang")


def test_blocks_must_not_span_the_parts_of_a_joined_matrix(tmp_path: Path) -> None:
    model = save(tmp_path / "m", dense(256, 384, 192))
    what = "joins weights, and needs parts with a multiple of 128 outputs, not 256, 192, 192: 3 weights"
    (warning,) = warned(model, "fp8-block")
    assert f"vLLM 0.33.0 and SGLang 0.5.23 {what}" in warning
    for engine in ("vllm", "sglang"):
        assert what in refused(model, "fp8-block", engine)
    assert not warned(model, "fp8-block", engine="transformers")


def test_the_last_part_of_a_joined_matrix_may_end_inside_a_block(tmp_path: Path) -> None:
    shapes = {"self_attn.v_proj": (192, 256), "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256)}
    assert not warned(save(tmp_path / "m", shapes), "fp8-block", engine="vllm")


# ---- experts


@pytest.mark.parametrize(
    ("format", "engine", "what"),
    [
        ("fp8-block", "transformers", "transformers 5.24.0 does not load experts stored as fp8-block: 6 weights"),
        ("int8", "transformers", "transformers 5.24.0 does not load experts stored as int8: 6 weights"),
        ("nvfp4a16", "transformers", "transformers 5.24.0 ignores the global scales of experts"),
        ("int8", "sglang", "SGLang 0.5.23 runs experts on NPUs only, not on GPUs, if they are stored as int8: 6 weights"),
    ],
)
def test_experts_that_a_program_does_not_run(format: str, engine: str, what: str, tmp_path: Path) -> None:
    model = save(tmp_path / "m", mixture(128, 128))
    assert any(what in warning for warning in warned(model, format))
    assert what in refused(model, format, engine)


def test_an_expert_stored_in_two_formats_is_refused_by_engines_that_join_them(tmp_path: Path) -> None:
    """The widths of gate and up fit groups of 128; that of down does not."""
    model = save(tmp_path / "m", mixture(128, 96))
    what = "needs all projections of an expert in one format, and some are not stored as w4a16: 2 weights"
    message = refused(model, "w4a16", "vllm", group_size=128)
    assert f"vLLM 0.33.0 {what}" in message
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in message
    assert "w4a16 --group-size 32" in message
    assert not [warning for warning in warned(model, "w4a16", engine="vllm") if "vLLM" in warning]


@pytest.mark.parametrize(("hidden", "inner", "size"), [(64, 64, "hidden"), (128, 96, "intermediate")])
def test_sizes_of_experts(hidden: int, inner: int, size: str, tmp_path: Path) -> None:
    model = save(tmp_path / "m", mixture(hidden, inner))
    assert f"SGLang 0.5.23 needs experts whose {size} size is a multiple of" in refused(model, "nvfp4a16", "sglang")


@pytest.mark.parametrize("experts", [False, True])
def test_exllamav2_activates_64_features_at_a_time(experts: bool, tmp_path: Path) -> None:
    """The intermediate size of 96 is meant, not the hidden size."""
    model = save(tmp_path / "m", mixture(96, 160) if experts else dense(96, 160, 96))
    what = "leaves the last features of MLPs without activation: their intermediate size must be a multiple of 64, not 160"
    (warning,) = [warning for warning in warned(model, "gptq-4bit", group_size=32) if "ExLlamaV2 0.3.2" in warning]
    assert what in warning
    assert what in refused(model, "gptq-4bit", "exllamav2", group_size=32)
    fine = save(tmp_path / "fine", mixture(96, 192) if experts else dense(96, 192, 96))
    assert not any("ExLlamaV2 0.3.2" in warning for warning in warned(fine, "gptq-4bit", group_size=32))


# ---- formats and families


def test_a_format_that_a_program_does_not_load(tmp_path: Path) -> None:
    model = save(tmp_path / "m", dense(128, 128, 128))
    message = refused(model, "mxfp4", "sglang")
    known = "fp8-dynamic, fp8-static, fp8-block, int8, w8a16, w4a16, gptq-8bit, gptq-4bit, awq-4bit, nvfp4a16, nvfp4, gguf"
    assert f"SGLang 0.5.23 does not load mxfp4, only {known}" in message
    assert "transformers, vllm" in message
    assert "does not load gguf-q4_k_m, only exl3" in refused(model, "gguf-q4_k_m", "exllamav3")


@pytest.mark.parametrize(
    ("format_", "key", "other"),
    [("gptq-4bit", "rope_type", "type"), *((name, "type", "rope_type") for name in ("awq-4bit", "mlx-4bit", "mlx-8bit"))],
)
def test_the_rope_is_where_exllamav2_and_mlx_lm_look(format_: str, key: str, other: str, tmp_path: Path) -> None:
    """ExLlamaV2 ends if both keys are there."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    model = save(tmp_path / "m", dense(256, 512, 256), rope_parameters=rope)
    config = plan(model, format_).config
    assert (config["rope_theta"], config["rope_scaling"][key], config["rope_scaling"]["factor"]) == (5e5, "llama3", 8.0)
    assert other not in config["rope_scaling"]
    assert config["rope_parameters"] == rope
    assert "rope_theta" not in plan(model, "w4a16").config


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", ["gemma3-text", "gemma4", "laguna", "mellum", "mimo2", "olmo3", "qwen3"])
def test_older_keys_change_no_rope_in_transformers(name: str, linear: bool) -> None:
    """Some of these have settings for each kind of layers."""
    import transformers

    _, config_class, arguments = ZOO[name]
    kind = getattr(transformers, config_class)
    config = json.loads(kind(**arguments).to_json_string(use_diff=False))
    rope = config["rope_parameters"]
    if linear:
        rope.get("full_attention", rope).update({"rope_type": "linear", "factor": 4.0})
    assert kind.from_dict(older_config(config)).rope_parameters == kind.from_dict(config).rope_parameters


@pytest.mark.parametrize("format_", ["gptq-4bit", "mlx-4bit"])
def test_the_rope_of_older_keys_is_the_one_that_takes_effect(format_: str, tmp_path: Path) -> None:
    newer = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    older = {"rope_type": "linear", "rope_theta": 2e5, "factor": 2.0}
    both = save(tmp_path / "both", dense(256, 512, 256), rope_theta=1e4, rope_parameters=newer, rope_scaling=older)
    config = plan(both, format_).config
    assert (config["rope_theta"], config["rope_scaling"]["factor"]) == (2e5, 2.0)
    other = save(tmp_path / "other", dense(256, 512, 256), rope_theta=1e4, rope_parameters=newer)
    assert plan(other, format_).config["rope_theta"] == 5e5
    lost = save(tmp_path / "lost", dense(256, 512, 256), rope_parameters=newer, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(PlanError, match="rope_theta of rope_parameters is 500000"):
        plan(lost, format_)


def test_gemma3_has_its_other_rope_and_its_pattern_where_mlx_lm_looks(tmp_path: Path) -> None:
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    kinds = ["sliding_attention", "full_attention"]
    keys = {"model_type": "gemma3_text", "rope_parameters": ropes}
    config = plan(save(tmp_path / "m", dense(128, 128, 128), layer_types=kinds * 2, **keys), "mlx-4bit").config
    assert (config["rope_theta"], config["rope_local_base_freq"], config["sliding_window_pattern"]) == (1e6, 1e4, 2)
    assert config["rope_scaling"]["type"] == "linear"
    assert not warned(save(tmp_path / "none", dense(128, 128, 128), model_type="gemma3_text", text_config=None), "mlx-4bit")
    stacked = save(tmp_path / "stacked", dense(128, 128, 128), layer_types=[*kinds, *kinds[:1], *kinds], **keys)
    assert [warning for warning in warned(stacked, "mlx-4bit") if "every n-th" in warning]


def test_keys_that_mlx_lm_requires_are_there_without_a_value(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 3e5, "partial_rotary_factor": 0.25}
    keys = {"num_local_experts": 8, "model_type": "qwen3_moe"}
    config = plan(save(tmp_path / "m", dense(128, 128, 128), rope_parameters=rope, **keys), "mlx-4bit").config
    assert (config["rope_scaling"], config["partial_rotary_factor"], config["num_experts"]) == (None, 0.25, 8)
    neox = save(tmp_path / "neox", dense(128, 128, 128), rope_parameters=rope, model_type="gpt_neox")
    config = plan(neox, "mlx-4bit").config
    assert (config["rotary_emb_base"], config["rotary_pct"]) == (3e5, 0.25)


def test_a_family_that_mlx_lm_does_not_have(tmp_path: Path) -> None:
    model = save(tmp_path / "m", dense(128, 128, 128), model_type="doge")
    what = "model_type in config.json: mlx-lm 0.32.2 has no models of the type doge"
    assert warned(model, "mlx-4bit") == [what]
    assert what in refused(model, "mlx-4bit", "mlx-lm")
    assert not warned(save(tmp_path / "known", dense(128, 128, 128), model_type="llama"), "mlx-4bit")


def test_mixtures_whose_experts_mlx_lm_does_not_join(tmp_path: Path) -> None:
    experts = {
        f"model.layers.0.mlp.experts.{e}.{name}_proj.weight": (128, 128) for e in (0, 1) for name in ("gate", "up", "down")
    }
    model = save(tmp_path / "m", {**dense(128, 128, 128), **experts}, model_type="minimax")
    what = "mlx-lm 0.32.2 does not load experts of minimax stored as mlx-4bit"
    assert [warning for warning in warned(model, "mlx-4bit") if what in warning]
    assert what in refused(model, "mlx-4bit", "mlx-lm")
    assert not warned(save(tmp_path / "known", {**dense(128, 128, 128), **experts}, model_type="qwen2_moe"), "mlx-4bit")


def test_a_program_without_a_format_is_an_error(tmp_path: Path) -> None:
    model = save(tmp_path / "m", dense(128, 128, 128))
    with pytest.raises(PlanError, match="--for"):
        weightsmith.plan({"merge_method": "passthrough", "models": [{"model": model}]}, engine="vllm")


@pytest.mark.parametrize("command", ["quantize", "merge", "plan"])
def test_the_flag_on_the_command_line(command: str, tmp_path: Path, cli: Cli) -> None:
    """Nothing is written."""
    model = save(tmp_path / "m", dense(576, 1536, 192))
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"merge_method: passthrough\nmodels: [{{model: {model}}}]\n")
    what = [model, str(tmp_path / "out"), "--format"] if command == "quantize" else [str(recipe), "--quantize"]
    if command == "merge":
        what.insert(1, str(tmp_path / "out"))
    ran = cli(command, *what, "w4a16", "--for", "sglang")
    assert ran.code != 0
    assert "SGLang 0.5.23 needs matrices" in ran.err
    assert not (tmp_path / "out").exists()


# ---- the table


def test_every_format_has_a_program_and_every_row_a_format() -> None:
    """ComfyUI runs no language models: its formats are no rows."""
    ours = [name for name, format in FORMATS.items() if format.readers != "ComfyUI"]
    names = {"gguf" if name.startswith("gguf-") else name for name in ours}
    assert {name for row in SUPPORT for name in row.formats} == names
    assert {row.engine for row in SUPPORT} == set(ENGINE_NAMES)
    assert all(row.source for row in SUPPORT)


def test_the_readers_of_a_format_are_in_the_table() -> None:
    """`--list` and the page name programs; each of ours has a row, and no other one has."""
    by_title: Mapping[str, str] = {engine.title: engine.name for engine in ENGINES}
    for name, format in FORMATS.items():
        for reader in format.readers.split(", "):
            if reader in by_title:
                assert find_support(by_title[reader], name) is not None, (name, reader)
        served = {engine.title for engine in engines_of(name)} - {"transformers", "SGLang"}
        assert all(any(title in reader for reader in format.readers.split(", ")) for title in served), name


def test_the_docs_say_of_each_format_what_was_run() -> None:
    page = (Path(__file__).parents[3] / "docs/quantize.md").read_text(encoding="utf-8")
    section = page.partition("### What was run\n")[2].partition("\n### ")[0]
    formats = {format for support in SUPPORT for format in support.formats}
    assert not {format for format in formats if f"`{'gguf-…' if format == 'gguf' else format}`" not in section}
