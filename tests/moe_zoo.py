"""Tiny mixtures of experts: transformers models of many architectures, and bare checkpoints in every way of storing experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests import zoo
from tests.mini import write_checkpoint
from weightsmith._models.checkpoint import open_checkpoint

E = 4
BF16 = np.dtype(ml_dtypes.bfloat16)
SIZES = {**zoo.SIZES, "num_experts_per_tok": 2}
HEADS = {**SIZES, "head_dim": 8, "moe_intermediate_size": 16}
GROUPED = {**HEADS, "n_routed_experts": E, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}

# name: model class, config class, arguments
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_local_experts": E}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**HEADS, "num_experts": E, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**HEADS, "num_experts": E, "norm_topk_prob": True}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**SIZES, "num_experts": E}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**GROUPED, **LATENT, "num_key_value_heads": 4}),
    "glm4-moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", GROUPED),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**SIZES, "num_local_experts": E}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**HEADS, "num_local_experts": E, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 1},
    ),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**HEADS, "num_local_experts": E}),
    "jamba": ("JambaForCausalLM", "JambaConfig", {**zoo.ZOO["jamba"][2], "num_experts": E, "num_experts_per_tok": 2}),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {**HEADS, "num_experts": E, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {**HEADS, "moe_num_experts": E, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
}
CORRECTED = ("deepseek-v3", "glm4-moe", "ernie4.5-moe")
"""Models whose routers have `e_score_correction_bias`, float32 beside bfloat16 weights."""


def save(name: str, folder: Path, seed: int, **changes: Any) -> Path:
    """A model with random weights in bfloat16, and router corrections in float32, as they are published."""
    model_class, config_class, arguments = MODELS[name]
    path = zoo.save_as(model_class, config_class, {**arguments, **changes}, folder, seed)
    tensors = read(path)
    random = np.random.default_rng(seed)
    for key, value in tensors.items():
        if "e_score_correction_bias" in key:
            tensors[key] = (random.standard_normal(value.shape) * 0.1).astype(np.float32)
    return write_checkpoint(path, tensors)


class Saved(dict[str, Path]):
    """Models of the zoo, each saved when a test first asks for it."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self.folder, self.seed = folder, seed

    def __missing__(self, name: str) -> Path:
        return self.setdefault(name, save(name, self.folder / f"{name}-{self.seed}", self.seed))


def load(name: str, folder: Path) -> Any:
    """The model in float32; it must miss and ignore no key."""
    import transformers

    model_class = getattr(transformers, MODELS[name][0])
    model, info = model_class.from_pretrained(folder, output_loading_info=True, dtype="float32")
    assert {k: v for k, v in info.items() if v} == {}
    return model.eval()


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint."""
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


# ---- bare checkpoints of one layer of experts

HIDDEN, NEURONS = 6, 7
STORED = {"own": "qwen3_moe", "fused": "granitemoe", "transposed": "llama4_text", "paired": "gpt_oss"}
"""How experts are stored, and a model type that stores them so."""
BLOCK = "model.layers.0.mlp."
Expert = dict[str, np.ndarray]


def experts(n: int = E, seed: int = 0, dtype: Any = BF16) -> list[Expert]:
    """gate and up [I, H], down [H, I], biases of gate and up [I] and of down [H]."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"gate": (NEURONS, HIDDEN), "up": (NEURONS, HIDDEN), "down": (HIDDEN, NEURONS)}
    shapes |= {"gate_bias": (NEURONS,), "up_bias": (NEURONS,), "down_bias": (HIDDEN,)}
    return [{part: random.standard_normal(shape).astype(dtype) for part, shape in shapes.items()} for _ in range(n)]


def shuffled(expert: Expert, seed: int) -> Expert:
    """The same expert with its neurons in another order."""
    order = np.random.default_rng(seed).permutation(NEURONS)
    columns = {"down": expert["down"][:, order], "down_bias": expert["down_bias"]}
    return {**{part: value[order] for part, value in expert.items() if part not in columns}, **columns}


def store(folder: Path, how: str, listed: list[Expert], **keys: np.ndarray) -> Path:
    """A checkpoint of one layer with these experts; without biases, but for `paired`."""
    random = np.random.default_rng(99)
    tensors = {f"{BLOCK}gate.weight": random.standard_normal((len(listed), HIDDEN)).astype(BF16), **keys}
    if how == "own":
        for e, expert in enumerate(listed):
            tensors |= {f"{BLOCK}experts.{e}.{part}_proj.weight": expert[part] for part in ("gate", "up", "down")}
    elif how == "fused":
        both = [np.concatenate([expert["gate"], expert["up"]]) for expert in listed]
        tensors[f"{BLOCK}experts.gate_up_proj"] = np.stack(both)
        tensors[f"{BLOCK}experts.down_proj"] = np.stack([expert["down"] for expert in listed])
    else:
        stack = np.concatenate if how == "transposed" else _in_turns
        tensors[f"{BLOCK}experts.gate_up_proj"] = np.stack([stack([x["gate"], x["up"]]).T for x in listed])
        tensors[f"{BLOCK}experts.down_proj"] = np.stack([expert["down"].T for expert in listed])
        if how == "paired":
            biases = [_in_turns([x["gate_bias"], x["up_bias"]]) for x in listed]
            tensors[f"{BLOCK}experts.gate_up_proj_bias"] = np.stack(biases)
            tensors[f"{BLOCK}experts.down_proj_bias"] = np.stack([expert["down_bias"] for expert in listed])
    return write_checkpoint(folder, tensors, config(len(listed), model_type=STORED[how]))


def config(n: int = E, **keys: Any) -> dict[str, Any]:
    """config.json of such a checkpoint."""
    return {"num_hidden_layers": 1, "hidden_size": HIDDEN, "num_experts": n, "num_experts_per_tok": 1, **keys}


def stored(folder: Path, how: str) -> list[Expert]:
    """The experts in a checkpoint that was stored so."""
    tensors = {name.removeprefix(BLOCK).removeprefix("experts."): value for name, value in read(folder).items()}
    if how == "own":
        n = len({name.split(".")[0] for name in tensors if name[0].isdecimal()})
        return [{part: tensors[f"{e}.{part}_proj.weight"] for part in ("gate", "up", "down")} for e in range(n)]
    matrices = []
    for e, (both, down) in enumerate(zip(tensors["gate_up_proj"], tensors["down_proj"], strict=True)):
        rows = both if how == "fused" else both.T
        gate, up = (rows[::2], rows[1::2]) if how == "paired" else (rows[:NEURONS], rows[NEURONS:])
        matrices.append({"gate": gate, "up": up, "down": down if how == "fused" else down.T})
        if how == "paired":
            biases = tensors["gate_up_proj_bias"][e]
            matrices[-1] |= {"gate_bias": biases[::2], "up_bias": biases[1::2], "down_bias": tensors["down_proj_bias"][e]}
    return matrices


def _in_turns(pair: list[np.ndarray]) -> np.ndarray:
    gate, up = pair
    return np.stack([gate, up], 1).reshape(-1, *gate.shape[1:])


def same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """Equal in every part that both ways of storing have."""
    return all(np.array_equal(a[part], b[part]) for part in a.keys() & b.keys())
