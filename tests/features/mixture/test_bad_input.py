"""Models and recipes that cannot become a mixture of experts: one error each, before tensor data is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mini import write_checkpoint
from tests.plan_help import prepare_moe
from weightsmith._base.errors import PlanError
from weightsmith._planning.options import RecipeOptions

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "rope_theta": 10000.0,
}


def model(
    folder: Path,
    *,
    layers: int = 2,
    wide: int = 12,
    vocab: int = 16,
    extra: Mapping[str, tuple[int, ...]] | None = None,
    **keys: Any,
) -> str:
    """A model of zeros. extra: tensors inside every layer, or other shapes of those. keys: of config.json."""
    inside = {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (8, 8),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.v_proj.weight": (4, 8),
        "self_attn.o_proj.weight": (8, 8),
        "mlp.gate_proj.weight": (wide, 8),
        "mlp.up_proj.weight": (wide, 8),
        "mlp.down_proj.weight": (8, wide),
        **(extra or {}),
    }
    shapes = {"model.embed_tokens.weight": (vocab, 8), "model.norm.weight": (8,), "lm_head.weight": (vocab, 8)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in inside.items() if shape}
    config = {**CONFIG, "num_hidden_layers": layers, "intermediate_size": wide, **keys}
    write_checkpoint(folder, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, config)
    return str(folder)


def refused(base: str, *, experts: list[str] | None = None, shared: int = 0, **keys: Any) -> str:
    """The one error of a recipe, in one line."""
    source: dict[str, Any] = {
        "base_model": base,
        "experts": [{"source_model": e} for e in experts or [base] * 2],
        "gate_mode": "random",
        **keys,
    }
    if shared:
        source["shared_experts"] = [{"source_model": base}] * shared
    with pytest.raises(PlanError) as caught:
        prepare_moe(source).close()
    assert len(caught.value.problems) == 1, caught.value
    return " ".join(str(caught.value).split())


# ---- experts


def test_another_depth(tmp_path: Path) -> None:
    base, other = model(tmp_path / "a"), model(tmp_path / "b", layers=3)
    assert f"{other} has 3 layers, but {base} has 2" in refused(base, experts=[base, other])


def test_another_width(tmp_path: Path) -> None:
    base, other = model(tmp_path / "a"), model(tmp_path / "b", wide=16)
    message = refused(base, experts=[other, base, other])
    assert f"model.layers.0.mlp.gate_proj.weight of {other} is [16, 8], but layer 0 of {base} has [12, 8]" in message


def test_another_vocabulary(tmp_path: Path) -> None:
    base, other = model(tmp_path / "a"), model(tmp_path / "b", vocab=18)
    assert f"{other} has 18 tokens, but {base}, whose tokenizer the mixture uses, has 16" in refused(
        base, experts=[base, other]
    )


def test_another_vocabulary_is_a_warning_for_recipes_of_mergekit(tmp_path: Path) -> None:
    base, other = model(tmp_path / "a"), model(tmp_path / "b", vocab=18)
    source = {"base_model": base, "experts": [{"source_model": base}, {"source_model": other}], "gate_mode": "random"}
    with prepare_moe(source, RecipeOptions(lenient=True)) as prepared:
        assert [w.what for w in prepared.plan.warnings] == [
            f"{other} has 18 tokens, but {base}, whose tokenizer the mixture uses, has 16"
        ]


def test_an_expert_without_gate(tmp_path: Path) -> None:
    base, other = model(tmp_path / "a"), model(tmp_path / "b", extra={"mlp.gate_proj.weight": ()})
    message = refused(base, experts=[base, other])
    assert f"{other}: layer 0 has no mlp.gate_proj.weight" in message


def test_layers_of_several_widths(tmp_path: Path) -> None:
    base = model(tmp_path / "a", extra={"mlp.up_proj.weight": (10, 8)})
    assert "the up projection of layer 0, model.layers.0.mlp.up_proj.weight, is [10, 8], not [12, 8]" in refused(base)


def test_a_packed_matrix(tmp_path: Path) -> None:
    base = model(tmp_path / "a", extra={"mlp.gate_proj.weight": (96,)})
    assert "model.layers.0.mlp.gate_proj.weight is [96], not a matrix" in refused(base)


def test_a_mixture_as_an_expert(tmp_path: Path) -> None:
    gone = {f"mlp.{part}_proj.weight": () for part in ("gate", "up", "down")}
    there = {f"mlp.experts.0.{part}_proj.weight": (12, 8) for part in ("gate", "up", "down")}
    base = model(tmp_path / "a")
    other = model(tmp_path / "b", extra={**gone, **there})
    for message in (refused(base, experts=[base, other]), refused(other, experts=[base, base])):
        assert "layer 0 already has experts" in message
        assert "for mixtures use prune_experts, merge_experts" in message


def test_a_router_that_cannot_route(tmp_path: Path) -> None:
    assert "router_scale is 0" in refused(model(tmp_path / "a"), router_scale=0)


def test_an_expert_with_biases(tmp_path: Path) -> None:
    base, other = model(tmp_path / "a"), model(tmp_path / "b", extra={"mlp.down_proj.bias": (8,)})
    assert f"{other} has mlp.down_proj.bias in its layers, which an expert cannot hold" in refused(base, experts=[other, base])


def test_another_activation(tmp_path: Path) -> None:
    base, other = model(tmp_path / "a"), model(tmp_path / "b", hidden_act="gelu")
    assert f"{other} uses the activation gelu, but {base} uses silu" in refused(base, experts=[base, other])


# ---- counts


def test_more_per_token_than_there_are(tmp_path: Path) -> None:
    assert "experts_per_token is 3, but there are 2" in refused(model(tmp_path / "a"), experts_per_token=3)


def test_one_expert_of_a_group(tmp_path: Path) -> None:
    base = model(tmp_path / "a")
    message = refused(base, experts=[base], experts_per_token=1, architecture="glm4_moe")
    assert "glm4_moe: it requires at least 2 experts, not 1" in message
    assert "Write architecture: mixtral or granitemoe" in message


def test_a_shared_expert_where_there_is_none(tmp_path: Path) -> None:
    message = refused(model(tmp_path / "a"), shared=1, architecture="mixtral")
    assert "mixtral: it requires no shared expert, not 1" in message
    assert "Write architecture: qwen2_moe or glm4_moe or deepseek" in message


def test_no_shared_expert_where_there_must_be_one(tmp_path: Path) -> None:
    for name in ("qwen moe", "qwen mo"):  # one of its names, and how it begins
        assert "qwen2_moe: it requires 1 shared expert, not 0" in refused(model(tmp_path / "a"), architecture=name)


def test_too_many_shared_experts(tmp_path: Path) -> None:
    message = refused(model(tmp_path / "a"), shared=2)
    assert "no architecture can hold" in message
    assert "glm4_moe: it requires 0 to 1 shared experts, not 2" in message


# ---- architectures


def test_an_unknown_architecture(tmp_path: Path) -> None:
    message = refused(model(tmp_path / "a"), architecture="mixtrall")
    assert "there is no architecture 'mixtrall' (did you mean 'mixtral'?)" in message
    assert "deepseek_v3" in message


HEAD_NORMS = {"self_attn.q_norm.weight": (4,), "self_attn.k_norm.weight": (4,)}
MIXED = {"model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"]}
BIASES = {"self_attn.q_proj.bias": (8,), "self_attn.k_proj.bias": (4,), "self_attn.v_proj.bias": (4,)}


@pytest.mark.parametrize(
    ("architecture", "extra", "keys", "why"),
    [
        ("mixtral", BIASES, {"model_type": "qwen2"}, "it has no place for self_attn.k_proj.bias"),
        ("mixtral", {"mlp.gate_proj.bias": (12,)}, {}, "it has no place for mlp.gate_proj.bias"),
        ("mixtral", {"self_attn.k_proj.weight": (8, 8)}, {}, "its self_attn.k_proj.weight is [4, 8], but the base's is [8, 8]"),
        ("qwen3_moe", {}, {}, "it requires self_attn.k_norm.weight, which the base lacks"),
        ("qwen2_moe", {"self_attn.q_proj.bias": (8,)}, {}, "it requires self_attn.k_proj.bias with"),
        ("olmoe", HEAD_NORMS, {"model_type": "qwen3", "head_dim": 4}, "its self_attn.q_norm.weight is [8] (all heads normed)"),
        ("flex_olmo", {}, {}, "it requires post_feedforward_layernorm.weight"),
        ("deepseek_v3", {}, {}, "it has latent attention (low-rank keys and values), but the base does not"),
        ("deepseek_v2", {}, {}, "it has latent attention (low-rank keys and values), but the base does not"),
        ("glm4_moe", {}, {"model_type": "mistral", "sliding_window": 7}, "it has no sliding window, but the base has one of 7"),
        ("granitemoe", {}, {"model_type": "exotic", "sliding_window": 7}, "it has no sliding window"),
        ("mixtral", {}, MIXED, "only some layers of the base have one"),
        ("mixtral", {}, {"model_type": "phi3", "partial_rotary_factor": 0.5}, "the base's rotate 0.5 of it"),
        ("mixtral", {}, {"model_type": "granite", "residual_multiplier": 0.5}, "it has no residual_multiplier"),
        ("mixtral", {}, {"model_type": "granite"}, "it has no attention_multiplier, but the base's is 1"),
        ("mixtral", {}, {"model_type": "smollm3", "no_rope_layers": [1, 0]}, "not all of the base's do"),
        ("mixtral", {}, {"model_type": "exotic", "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "have their own"),
        ("deepseek", {}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "the base uses yarn"),
    ],
)  # fmt: skip
def test_what_an_architecture_cannot_hold(
    architecture: str, extra: dict[str, Any], keys: dict[str, Any], why: str, tmp_path: Path
) -> None:
    shared = int(architecture == "qwen2_moe")
    base = model(tmp_path / "a", extra=extra, **keys)
    message = refused(base, architecture=architecture, shared=shared)
    assert f"{architecture} cannot hold experts of" in message
    assert f"{architecture}: " in message
    assert why in message


def test_what_would_work_is_said(tmp_path: Path) -> None:
    assert "Write architecture: mixtral or granitemoe or glm4_moe" in refused(model(tmp_path / "a"), architecture="deepseek_v3")


def test_a_head_of_biases(tmp_path: Path) -> None:
    base = model(tmp_path / "a", extra={"self_attn.o_proj.bias": (8,), **BIASES, "mlp.down_proj.bias": (8,)})
    assert "no architecture can hold" in refused(base)


def test_a_model_type_that_is_not_known_is_only_held_by_name(tmp_path: Path) -> None:
    base = model(tmp_path / "a", model_type="exotic")
    assert "not known to be equivalent to exotic models" in refused(base)
    source = {"base_model": base, "experts": [{"source_model": base}] * 2, "gate_mode": "random", "architecture": "mixtral"}
    with prepare_moe(source) as prepared:
        assert "it is not known to be equivalent to exotic models" in prepared.plan.warnings[0].what


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    base = model(tmp_path / "a")
    deep, wide = model(tmp_path / "b", layers=3), model(tmp_path / "c", wide=16)
    source = {
        "base_model": base,
        "experts": [{"source_model": e} for e in (deep, wide)],
        "gate_mode": "random",
        "experts_per_token": 5,
        "architecture": "mixtrall",
    }
    with pytest.raises(PlanError) as caught:
        prepare_moe(source).close()
    assert len(caught.value.problems) == 4
