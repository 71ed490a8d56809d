"""Megatron's checkpoints beside a config.json of the Hub: the tensors of the model that was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import weightsmith
from tests.models.formats.training.test_megatron import write
from tests.models.sources.test_pytorch import as_array
from weightsmith._base.errors import CheckpointError, FormatError, Unsupported
from weightsmith._models.checkpoint import open_checkpoint

State = dict[str, torch.Tensor]
HIDDEN, HEADS, GROUPS, DIM, INNER, TOKENS, PADDED, LAYERS, EXPERTS = 16, 4, 2, 6, 20, 30, 32, 2, 3
CONFIG: dict[str, Any] = {
    **{"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM},
    **{"intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": TOKENS},
}
QWEN_MOE = {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER, "num_experts": EXPERTS}


def hub(model_type: str) -> tuple[State, dict[str, Any]]:
    """A model of the Hub, and its config.json."""
    torch.manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(TOKENS, HIDDEN), "lm_head.weight": torch.randn(TOKENS, HIDDEN)}
    state["model.norm.weight"] = torch.randn(HIDDEN)
    mixture = model_type in ("mixtral", "qwen2_moe")
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            state[f"{layer}.self_attn.{part}_proj.weight"] = torch.randn(heads * DIM, HIDDEN)
            if model_type in ("qwen2", "qwen2_moe"):
                state[f"{layer}.self_attn.{part}_proj.bias"] = torch.randn(heads * DIM)
        state[f"{layer}.self_attn.o_proj.weight"] = torch.randn(HIDDEN, HEADS * DIM)
        state |= {f"{layer}.{name}_layernorm.weight": torch.randn(HIDDEN) for name in ("input", "post_attention")}
        modules = {"mlp": ("gate_proj", "up_proj", "down_proj")}
        if model_type == "qwen3":
            state |= {f"{layer}.self_attn.{name}_norm.weight": torch.randn(DIM) for name in "qk"}
        if model_type == "mixtral":
            modules = {f"block_sparse_moe.experts.{e}": ("w1", "w3", "w2") for e in range(EXPERTS)}
        if model_type == "qwen2_moe":
            modules = {f"mlp.experts.{e}": modules["mlp"] for e in range(EXPERTS)} | {"mlp.shared_expert": modules["mlp"]}
            state[f"{layer}.mlp.shared_expert_gate.weight"] = torch.randn(1, HIDDEN)
        if mixture:
            home = "block_sparse_moe" if model_type == "mixtral" else "mlp"
            state[f"{layer}.{home}.gate.weight"] = torch.randn(EXPERTS, HIDDEN)
        for module, (gate, up, down) in modules.items():
            state |= {f"{layer}.{module}.{name}.weight": torch.randn(INNER, HIDDEN) for name in (gate, up)}
            state[f"{layer}.{module}.{down}.weight"] = torch.randn(HIDDEN, INNER)
    return state, {**CONFIG, "model_type": model_type, **(QWEN_MOE if model_type == "qwen2_moe" else {})}


def megatron(state: State, model_type: str) -> State:
    """The same model as Megatron has it in one process."""

    def grouped(parts: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = (part.reshape(GROUPS, -1, *part.shape[1:]) for part in parts)
        return torch.cat([q, k, v], 1).flatten(0, 1)

    padding = torch.zeros(PADDED - TOKENS, HIDDEN)
    trained = {"embedding.word_embeddings.weight": torch.cat([state["model.embed_tokens.weight"], padding])}
    trained["output_layer.weight"] = torch.cat([state["lm_head.weight"], padding])
    trained["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    for i in range(LAYERS):
        there, here = f"model.layers.{i}", f"decoder.layers.{i}"
        for leaf in ("weight", "bias"):
            names = [f"{there}.self_attn.{part}_proj.{leaf}" for part in "qkv"]
            if names[0] in state:
                trained[f"{here}.self_attention.linear_qkv.{leaf}"] = grouped([state[name] for name in names])
        trained[f"{here}.self_attention.linear_qkv.layer_norm_weight"] = state[f"{there}.input_layernorm.weight"]
        trained[f"{here}.self_attention.linear_proj.weight"] = state[f"{there}.self_attn.o_proj.weight"]
        for part in "qk" if model_type == "qwen3" else "":
            trained[f"{here}.self_attention.{part}_layernorm.weight"] = state[f"{there}.self_attn.{part}_norm.weight"]
        norm = state[f"{there}.post_attention_layernorm.weight"]
        pairs = {f"{there}.mlp": (f"{here}.mlp.linear_fc1.weight", f"{here}.mlp.linear_fc2.weight")}
        if model_type in ("mixtral", "qwen2_moe"):
            home = f"{there}.{'block_sparse_moe' if model_type == 'mixtral' else 'mlp'}"
            trained[f"{here}.pre_mlp_layernorm.weight"] = norm
            trained[f"{here}.mlp.router.weight"] = state[f"{home}.gate.weight"]
            experts = f"{here}.mlp.experts"
            pairs = {
                f"{home}.experts.{e}": (f"{experts}.linear_fc1.weight{e}", f"{experts}.linear_fc2.weight{e}")
                for e in range(EXPERTS)
            }
        else:
            trained[f"{here}.mlp.linear_fc1.layer_norm_weight"] = norm
        if model_type == "qwen2_moe":
            shared = f"{here}.mlp.shared_experts"
            trained[f"{shared}.gate_weight"] = state[f"{there}.mlp.shared_expert_gate.weight"]
            pairs[f"{there}.mlp.shared_expert"] = (f"{shared}.linear_fc1.weight", f"{shared}.linear_fc2.weight")
        gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for module, (first, second) in pairs.items():
            trained[first] = torch.cat([state[f"{module}.{gate}.weight"], state[f"{module}.{up}.weight"]])
            trained[second] = state[f"{module}.{down}.weight"]
    return trained


def ranks(folder: Path, state: State) -> Path:
    return write(folder, state, 1, 2)


def distributed(folder: Path, state: State) -> Path:
    """torch_dist: one tensor of all layers, and of all experts."""
    from torch.distributed import checkpoint as dcp

    stacked: dict[str, list[torch.Tensor]] = {}
    for name, tensor in state.items():
        parts = name.split(".")
        key = ".".join([*parts[:2], *parts[3:]]) if name.startswith("decoder.layers.") else name
        stacked.setdefault(key, []).append(tensor)
    whole: State = {
        key: torch.stack(parts) if key.startswith("decoder.layers.") else parts[0] for key, parts in stacked.items()
    }
    for linear in ("linear_fc1", "linear_fc2"):
        experts = [whole.pop(key) for e in range(EXPERTS) if (key := f"decoder.layers.mlp.experts.{linear}.weight{e}") in whole]
        if experts:
            whole[f"decoder.layers.mlp.experts.experts.{linear}.weight"] = torch.stack(experts, 1)
    dcp.save(whole, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [ranks, distributed])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe"])
def test_config_json_tells_the_names_of_the_hub(model_type: str, save: Callable[[Path, State], Path], tmp_path: Path) -> None:
    state, config = hub(model_type)
    folder = save(tmp_path / "run", megatron(state, model_type))
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as opened:
        assert set(opened) == set(state)
        assert opened.decoded == ""
        assert any("read under the Hub's names" in note.what for note in opened.notes)
        for name, tensor in state.items():
            np.testing.assert_array_equal(opened[name], as_array(tensor), name)
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": str(folder)}]}, tmp_path / "out", fsync=False)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


def test_without_config_json_the_names_stay(tmp_path: Path) -> None:
    trained = megatron(hub("llama")[0], "llama")
    with open_checkpoint(ranks(tmp_path / "run", trained)) as opened:
        assert set(opened) == set(trained)
    (tmp_path / "run" / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    with open_checkpoint(tmp_path / "run") as opened:
        assert set(opened) == set(trained)
        assert any("how a model of the type 'mamba' is named on the Hub is not known" in note.what for note in opened.notes)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, type[CheckpointError]]] = {
    "heads": ({"num_key_value_heads": 4}, {}, "config.json says 4 groups of 18 rows", FormatError),
    "layers": ({"num_hidden_layers": 3}, {}, "tensors of 2 layers, and num_hidden_layers is 3", FormatError),
    "width": ({"intermediate_size": 24}, {}, "not a gate and an up of 24 rows each", FormatError),
    "tokens": ({"vocab_size": 40}, {}, "vocab_size is 40", FormatError),
    "divided heads": (
        {"num_attention_heads": 6, "num_key_value_heads": 4},
        {},
        "num_attention_heads is 6, and num",
        FormatError,
    ),
    "many heads": (
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
        {},
        "num_key_value_heads 1,000,000,000",
        FormatError,
    ),
    "no rows of heads": ({}, {"shape": ("self_attention.linear_qkv.weight", ())}, "is [] in each layer, and", FormatError),
    "no rows of gates": ({}, {"shape": ("mlp.linear_fc1.weight", ())}, "is [] in each layer, not a gate and", FormatError),
    "many experts": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 9999},
        {"shape": ("mlp.experts.experts.linear_fc2.weight", (30, 0, 0))},
        "is [30, 0, 0] in each layer, not matrices of experts",
        FormatError,
    ),
    "no heads": ({"num_attention_heads": None}, {}, "num_attention_heads is None, not a positive integer", FormatError),
    "norms": ({}, {"apply_layernorm_1p": True}, "the run had apply_layernorm_1p", Unsupported),
    "rotary": ({}, {"rotary_interleaved": True}, "the run had rotary_interleaved", Unsupported),
    "experts": ({"model_type": "qwen3_moe"}, {"extra": "decoder.layers.0.mlp.experts.weight1"}, "experts.weight1", Unsupported),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_config_json_is_refused(name: str, tmp_path: Path) -> None:
    change, args, words, kind = REFUSED[name]
    trained = megatron(hub("llama")[0], "llama")
    if extra := args.get("extra"):
        trained[extra] = torch.ones(3, 4)
    if shaped := args.get("shape"):
        trained[f"decoder.layers.0.{shaped[0]}"] = torch.zeros(shaped[1])
    of_run = {key: value for key, value in args.items() if key not in ("extra", "shape")}
    folder = write(tmp_path / "run", trained, 1, 1, **of_run)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama", **change}))
    with pytest.raises(kind) as caught:
        open_checkpoint(folder)
    assert words in str(caught.value)
