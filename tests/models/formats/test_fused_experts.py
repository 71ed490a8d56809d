"""Mixtures saved as transformers holds them: read as it would have saved them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

import weightsmith
from tests.architectures import classes_of, small_configs
from weightsmith._base.errors import FormatError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.fused_experts import FAMILIES, with_single_experts
from weightsmith.abc.tensors import Tensors

pytestmark = pytest.mark.filterwarnings("ignore")

Shapes = dict[str, tuple[int, ...]]
ZERO: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 16}
SMALL: dict[str, dict[str, Any]] = {
    "dots1": {**HEADS, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {**HEADS, "num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "lfm2_moe": {
        **HEADS,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
}
"""Of those that cannot be built on the meta device, or not with fewer layers alone."""


def source_of(shapes: Shapes, dtype: str = "F32") -> Tensors:
    """Names and shapes alone."""
    specs = {name: TensorSpec(name, DTYPES[dtype], shape) for name, shape in shapes.items()}
    return cast(Tensors, SimpleNamespace(specs=specs, identity="", paths=()))


def read(shapes: Shapes, model_type: str) -> Shapes:
    return {
        name: spec.shape for name, spec in with_single_experts(source_of(shapes), {"model_type": model_type}, "m").specs.items()
    }


def built(model_type: str) -> tuple[Shapes, Shapes]:
    """Names and shapes in memory, and as transformers saves them."""
    model = model_of(model_type)
    state = model.state_dict()
    in_memory, saved = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (state, revert_weight_conversion(model, dict(state)))
    )
    if model_type == "kimi_linear":  # transformers renames the module of layers without experts, too; published files do not
        dense = ".0.block_sparse_moe."
        assert not any(name.startswith(f"model.layers{dense}experts") for name in saved)
        saved = {name.replace(dense, ".0.mlp."): shape for name, shape in saved.items()}
    return in_memory, saved


def model_of(model_type: str) -> Any:
    """A model with joined experts."""
    given = [transformers.CONFIG_MAPPING[model_type](**ZERO, **SMALL[model_type])] if model_type in SMALL else []
    classes: list[Any] = [*classes_of(model_type)]
    if model_type == "qwen3_omni_moe":  # no auto class names it, and the default config lacks what it reads
        classes, given = [transformers.Qwen3OmniMoeForConditionalGeneration], []
    for config, model_class in itertools.product((*given, *small_configs(model_type)), classes):
        if model_type == "qwen3_omni_moe":
            config.talker_config.spatial_merge_size = 2
            config.talker_config.text_config.shared_expert_intermediate_size = 16
        try:
            with torch.device("cpu" if given else "meta"):
                model = model_class._from_config(config)
            revert_weight_conversion(model, dict(model.state_dict()))
        except Exception:  # whatever these sizes break on
            continue
        if any(name.endswith("gate_up_proj") for name in model.state_dict()):
            return model
    pytest.fail(f"transformers builds no {model_type}")


@pytest.mark.matrix("qwen3_moe", "mixtral", "exaone_moe", "lfm2_moe", "kimi_linear")
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"deepseek_v4"}))
def test_names_and_shapes_are_those_that_transformers_saves(model_type: str) -> None:
    in_memory, saved = built(model_type)
    assert read(in_memory, model_type) == saved
    assert read(saved, model_type) == saved


@pytest.mark.matrix
def test_transformers_loads_the_names_of_deepseek_v4_as_those_in_memory() -> None:
    """It does not save them as they are published: it keeps `model.`, and its names of two norms are one when it loads."""
    model = model_of("deepseek_v4")
    in_memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = read(in_memory, "deepseek_v4")
    assert not any(name.startswith("model.") or ".mlp." in name or ".self_attn." in name for name in names)
    loaded = set[str]()
    for name in names:
        for conversion in get_model_conversion_mapping(model):
            if isinstance(conversion, WeightRenaming):
                name, _ = conversion.rename_source_key(name)
        name = re.sub(r"experts\.\d+\.w[13]\.weight", "experts.gate_up_proj", name)
        name = re.sub(r"experts\.\d+\.w2\.weight", "experts.down_proj", name)
        loaded.add(name if name.startswith("lm_head.") else f"model.{name}")
    assert loaded == in_memory.keys()


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("Qwen3MoeConfig", {"moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}),
        ("MixtralConfig", {"intermediate_size": 24, "num_local_experts": 3, "num_key_value_heads": 2}),
    ],
)
def test_a_saved_state_dict_merges_with_the_model_on_the_hub(config: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**ZERO, **sizes))
        model.save_pretrained(tmp_path / name)
    shutil.copytree(tmp_path / "b", tmp_path / "trained")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / "trained" / "model.safetensors")

    def merged(other: str) -> bytes:
        weighted = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in ("a", other)]
        weightsmith.merge({"merge_method": "linear", "models": weighted}, tmp_path / f"with-{other}", progress=False)
        return (tmp_path / f"with-{other}" / "model.safetensors").read_bytes()

    assert merged("trained") == merged("b")
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": str(tmp_path / "trained")}]})
    assert any("its experts are read as a matrix for each" in warning.what for warning in plan.warnings)


def test_experts_in_another_layout_are_left_as_they_are() -> None:
    gate_up, down = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
    right: Shapes = {gate_up: (2, 12, 8), down: (2, 8, 6)}
    assert len(read(right, "qwen3_moe")) == 6
    assert read(right, "qwen3_vl_moe") == right  # its files have them so
    for wrong in ({gate_up: (2, 8, 12), down: (2, 6, 8)}, {gate_up: (2, 12, 8)}, {gate_up: (12, 8), down: (8, 6)}):
        assert read(wrong, "qwen3_moe") == wrong
    assert read({gate_up: (2, 0, 8), down: (2, 8, 0)}, "qwen3_moe") == {gate_up: (2, 0, 8), down: (2, 8, 0)}
    for beside in (gate_up + "_scale_inv", down + ".lora_A.weight"):
        assert read({**right, beside: (1,)}, "qwen3_moe") == {**right, beside: (1,)}
    lost = {**right, down.replace(".0.", ".1."): (2, 8, 6)}  # layer 1 has no gate_up_proj: the layers stay comparable
    assert read(lost, "qwen3_moe") == lost
    many = {gate_up: (5000, 2, 1), down: (5000, 1, 1)}
    assert read(many, "qwen3_moe") == many
    codes = source_of(right, "F8_E4M3")
    assert with_single_experts(codes, {"model_type": "qwen3_moe"}, "m") is codes


def test_a_tensor_without_as_many_rows_as_parts_stays_whole() -> None:
    shapes: Shapes = {
        f"model.layers.1.mlp.experts.{name}": shape for name, shape in (("gate_up_proj", (2, 12, 8)), ("down_proj", (2, 8, 6)))
    }
    conv = "model.layers.0.self_attn.{}conv1d.weight"
    parts = {conv.format(f"{part}_"): (4, 1, 4) for part in "qkv"}
    assert read({**shapes, conv.format(""): (12, 1, 4)}, "kimi_linear").items() >= parts.items()
    for shape in ((13, 1, 4), (0, 1, 4), ()):
        assert read({**shapes, conv.format(""): shape}, "kimi_linear")[conv.format("")] == shape


def test_two_names_of_one_tensor_are_an_error() -> None:
    prefix = "model.layers.0."
    joined: Shapes = {f"{prefix}mlp.experts.gate_up_proj": (2, 12, 8), f"{prefix}mlp.experts.down_proj": (2, 8, 6)}
    for other in ("block_sparse_moe.gate.weight", "block_sparse_moe.experts.1.w2.weight"):
        shapes = {**joined, f"{prefix}mlp.gate.weight": (2, 8), prefix + other: (8, 6)}
        with pytest.raises(FormatError, match="are the same tensor for a loader"):
            read(shapes, "mixtral")


def test_fp8_of_joined_experts_is_read_by_its_format(tmp_path: Path) -> None:
    """A scale for each block of each expert is joined as its codes are."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**ZERO, moe_intermediate_size=16, num_experts=2, num_experts_per_tok=1, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    codes = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in state.items() if ".experts." in name}
    scales = {f"{name}_scale_inv": torch.full((2, t.shape[1] // 8, t.shape[2] // 8), 0.5) for name, t in codes.items()}
    save_file({**state, **codes, **scales}, tmp_path / "model.safetensors")
    weightsmith.dequantize(tmp_path, tmp_path / "plain", progress=False)
    plain = {**load_file(tmp_path / "plain" / "model.safetensors")}
    for name, tensor in codes.items():
        torch.testing.assert_close(plain[name].float(), tensor.float() * 0.5)
