"""The checkpoints that golden cases read: tiny, made from integers of PCG64 alone, written by a writer of their own.

Nothing here imports weightsmith: these bytes must not change when it does. `normal` uses the raw integers of the bit generator,
whose stream numpy keeps for ever, and not the distributions of `Generator`, whose streams it may change.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BF16, F16, F32, F64 = np.dtype(ml_dtypes.bfloat16), np.dtype("float16"), np.dtype("float32"), np.dtype("float64")
CODES = {BF16: "BF16", F16: "F16", F32: "F32", F64: "F64", np.dtype("int64"): "I64"}
Tensors = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


def normal(shape: tuple[int, ...], *seed: int | str) -> np.ndarray:
    """float64 of about N(0, 1): each the sum of four 16-bit integers, scaled. Exact arithmetic, so the same everywhere."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in seed]
    raw = np.random.PCG64(words).random_raw(int(np.prod(shape, dtype=np.int64)))
    quarters = np.asarray(raw, "<u8").view("<u2").reshape(-1, 4).astype(np.int64)
    return ((quarters.sum(1) - 131070) / 37837.0).reshape(shape)


def round_to(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Rounded to float32 first, then to a 16-bit dtype."""
    return array.astype(F32).astype(dtype) if dtype != F64 else array


def write(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None, per_shard: int | None = None
) -> None:
    """A checkpoint folder, in one file or with `per_shard` tensors in each."""
    folder.mkdir(parents=True)
    names = list(tensors)
    size = per_shard or len(names)
    runs = [names[i : i + size] for i in range(0, len(names), size)]
    placed = {}
    for k, run in enumerate(runs):
        file = "model.safetensors" if len(runs) == 1 else f"model-{k + 1:05}-of-{len(runs):05}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in run})
        placed |= dict.fromkeys(run, file)
    if len(runs) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file: length of the header, header, tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


# ---- dense models


def llama_shapes(
    hidden: int, inner: int, vocab: int, layers: int = 2, heads: int = 4, kv: int = 2, *, tied: bool = False
) -> Shapes:
    """Names and shapes of a Llama."""
    wide = hidden * kv // heads
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        layer: Shapes = {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.k_proj.weight": (wide, hidden),
            "self_attn.v_proj.weight": (wide, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if tied else shapes | {"lm_head.weight": (vocab, hidden)}


def config(kind: str, hidden: int, inner: int, vocab: int, layers: int = 2, **keys: Any) -> dict[str, Any]:
    """config.json of a dense model; kind: `llama`, `Llama` in the class."""
    known = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2", "phi3": "Phi3", "granite": "Granite"}
    known |= {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
    return {
        "architectures": [f"{known.get(kind, 'Golden')}ForCausalLM"],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **keys,
    }


def values(shapes: Shapes, tuned: int, dtype: np.dtype[Any], *, scale: float = 0.02, sparse: bool = False) -> Tensors:
    """A base (tuned 0) or a fine-tune of it: base + N(0, scale/10). sparse: half of the elements do not move.

    Norms are about 1.
    """
    arrays = {}
    for name, shape in shapes.items():
        array = normal(shape, name) * scale + ("norm" in name)
        if tuned:
            delta = normal(shape, name, tuned) * (scale / 10)
            array = array + (delta * (normal(shape, name, tuned, 99) > 0) if sparse else delta)
        arrays[name] = round_to(array, dtype)
    return arrays


# Larger than one grain (65,536 elements) are the embedding, the head and all matrices of the MLPs.
LLAMA = (64, 1056, 1100)
SMALL = (48, 80, 96)


def _llama(tuned: int, dtype: np.dtype[Any] = BF16, size: tuple[int, int, int] = LLAMA, **keys: Any) -> Callable[[Path], None]:
    per_shard = keys.pop("per_shard", None)
    tensors = lambda: values(llama_shapes(*size), tuned, dtype, **keys)  # noqa: E731
    return lambda folder: write(folder, tensors(), config("llama", *size), per_shard)


def _tied(tuned: int) -> Callable[[Path], None]:
    shapes = llama_shapes(*SMALL, tied=True)
    return lambda folder: write(folder, values(shapes, tuned, BF16), config("llama", *SMALL, tie_word_embeddings=True))


def _tall(tuned: int) -> Callable[[Path], None]:
    """One matrix of several tiles (a tile is 1 MiB) and a vector of several grains."""
    shapes = {"tall.weight": (26_000, 48), "long.bias": (200_001,), "one": ()}
    return lambda folder: write(folder, values(shapes, tuned, BF16))


def _odd(tuned: int) -> Callable[[Path], None]:
    """What is not a 16-bit matrix: integers, float32 beside bf16, scalars, convolutions, empty tensors."""

    def make(folder: Path) -> None:
        shapes = llama_shapes(*SMALL)
        shapes |= {"model.layers.0.conv.weight": (24, 1, 4), "model.layers.1.scale": (), "model.layers.1.none": (0, 8)}
        tensors = values(shapes, tuned, BF16)
        tensors["model.layers.0.decay"] = values({"model.layers.0.decay": (48,)}, tuned, F32)["model.layers.0.decay"]
        tensors["model.steps"] = np.arange(5)
        write(folder, tensors, config("llama", *SMALL))

    return make


def _infinite(tuned: int) -> Callable[[Path], None]:
    """A fine-tune with an infinity in one of its smallest tensors, which come late."""

    def make(folder: Path) -> None:
        tensors = values(llama_shapes(*LLAMA), tuned, BF16)
        tensors["model.norm.weight"][-1] = np.inf
        write(folder, tensors, config("llama", *LLAMA))

    return make


def _phi3(tuned: int) -> Callable[[Path], None]:
    """Fused matrices: qkv_proj and gate_up_proj."""

    def make(folder: Path) -> None:
        tensors = values(llama_shapes(*SMALL), tuned, BF16)
        for i in range(2):
            layer = f"model.layers.{i}."
            for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
                module = fused.split(".")[0]
                taken = [tensors.pop(f"{layer}{module}.{part}_proj.weight") for part in parts]
                tensors[f"{layer}{fused}.weight"] = np.concatenate(taken)
        write(folder, tensors, config("phi3", *SMALL))

    return make


def _vision(tuned: int) -> Callable[[Path], None]:
    """A vision-language model: two stacks and a projector."""

    def make(folder: Path) -> None:
        text = {f"language_model.{name}": shape for name, shape in llama_shapes(32, 48, 64).items()}
        shapes: Shapes = {"vision_tower.embeddings.patch_embedding.weight": (24, 3, 4, 4)}
        for i in range(2):
            shapes |= {f"vision_tower.encoder.layers.{i}.mlp.{name}.weight": (24, 24) for name in ("fc1", "fc2")}
        shapes["multi_modal_projector.linear_1.weight"] = (32, 24)
        towers = {"text_config": config("llama", 32, 48, 64), "vision_config": {"num_hidden_layers": 2, "hidden_size": 24}}
        write(folder, values(shapes | text, tuned, BF16), {"model_type": "llava", **towers})

    return make


# ---- dense models that mixtures are made of

DENSE = (32, 48, 64)
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}


def _dense(kind: str, tuned: int, *, infinite: bool = False) -> Callable[[Path], None]:
    """A decoder of this type with the tensors that transformers gives it. infinite: one element of its final norm is."""

    def make(folder: Path) -> None:
        hidden, inner, vocab = DENSE
        shapes: Shapes = {}
        settings: dict[str, Any] = {}
        if kind in ("qwen3", "olmo2"):
            settings["head_dim"] = 8
        for name, shape in llama_shapes(hidden, inner, vocab, kv=4 if kind.startswith("deepseek") else 2).items():
            before, _, part = name.rpartition("self_attn.")
            if kind == "olmo2" and name.endswith("input_layernorm.weight"):
                name = name.replace("input_layernorm", "post_feedforward_layernorm")
            if kind.startswith("deepseek") and part and before:
                continue
            shapes[name] = shape
            if kind == "qwen2" and part.startswith(("q_", "k_", "v_")):
                shapes[name.replace("weight", "bias")] = shape[:1]
            if kind in ("qwen3", "olmo2", "olmoe") and part.startswith(("q_", "k_")):
                shapes[name.replace("_proj", "_norm")] = (8,) if kind == "qwen3" else shape[:1]
        if kind.startswith("deepseek"):
            settings |= {**LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 2}
            for i in range(2):
                latent: Shapes = {
                    "q_a_proj": (16, hidden),
                    "q_a_layernorm": (16,),
                    "q_b_proj": (48, 16),
                    "kv_a_proj_with_mqa": (12, hidden),
                    "kv_a_layernorm": (8,),
                    "kv_b_proj": (64, 8),
                    "o_proj": (hidden, 32),
                }
                shapes |= {f"model.layers.{i}.self_attn.{name}.weight": shape for name, shape in latent.items()}
        if kind == "granite":
            settings |= {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
            settings["attention_multiplier"] = 0.2
        if kind == "olmoe":  # a dense model of no known type, with OLMoE's norms
            settings |= {"model_type": "golden", "head_dim": 8, "clip_qkv": 0.5}
        tensors = values(shapes, tuned, BF16, scale=0.2)
        if infinite:
            tensors["model.norm.weight"][-1] = np.inf
        write(folder, tensors, config(kind, hidden, inner, vocab, **settings))
        if kind == "llama" and not tuned:
            tokenizer(folder, vocab)

    return make


def tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of whole words, `w3` … , split at white space."""
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocab))])}
    special = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for word, i in list(words.items())[:3]
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# ---- mixtures

E, WIDE, NEURONS = 4, 32, 24


def _mixture(how: str, tuned: int = 0) -> Callable[[Path], None]:
    """Two layers of four experts stored `own` (one by one), `fused`, `transposed` or `paired` (gate and up in turns).

    Experts 2 and 3 are experts 0 and 1 with their neurons in another order, and noise.
    """

    def make(folder: Path) -> None:
        kind = {"own": "qwen3_moe", "fused": "granitemoe", "transposed": "llama4_text", "paired": "gpt_oss"}[how]
        tensors: Tensors = {}
        shapes: Shapes = {"model.embed_tokens.weight": (64, WIDE), "model.norm.weight": (WIDE,), "lm_head.weight": (64, WIDE)}
        for i in range(2):
            shapes |= {f"model.layers.{i}.self_attn.{p}_proj.weight": (WIDE, WIDE) for p in "qkvo"}
            layer = f"model.layers.{i}.mlp."
            shapes[f"{layer}gate.weight"] = (E, WIDE)
            tensors |= _stored(layer, how, [_expert(i, e, tuned) for e in range(E)])
        tensors |= {name: array.astype(BF16) for name, array in values(shapes, tuned, F32).items()}
        sizes = {"num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": NEURONS}
        write(folder, tensors, config(kind, WIDE, NEURONS, 64, **sizes))

    return make


def _expert(layer: int, e: int, tuned: int) -> Tensors:
    shapes: Shapes = {"gate": (NEURONS, WIDE), "up": (NEURONS, WIDE), "down": (WIDE, NEURONS)}
    shapes |= {"gate_bias": (NEURONS,), "up_bias": (NEURONS,), "down_bias": (WIDE,)}
    twin = e % 2
    order = np.argsort(normal((NEURONS,), "order", layer, e)) if e >= 2 else np.arange(NEURONS)
    arrays = {}
    for part, shape in shapes.items():
        array = normal(shape, part, layer, twin) * 0.2
        if part != "down_bias":
            array = array[:, order] if part == "down" else array[order]
        array = array + normal(shape, part, layer, e, 7) * 0.02
        arrays[part] = round_to(array + normal(shape, part, layer, e, 8 + tuned) * 0.01 * (tuned > 0), BF16)
    return arrays


def _stored(layer: str, how: str, experts: list[Tensors]) -> Tensors:
    if how == "own":
        parts = ("gate", "up", "down")
        return {f"{layer}experts.{e}.{part}_proj.weight": x[part] for e, x in enumerate(experts) for part in parts}
    both, down = [np.concatenate([x["gate"], x["up"]]) for x in experts], [x["down"] for x in experts]
    tensors = {}
    if how == "paired":
        both = [np.stack([x["gate"], x["up"]], 1).reshape(-1, WIDE) for x in experts]
        biases = [np.stack([x["gate_bias"], x["up_bias"]], 1).reshape(-1) for x in experts]
        tensors[f"{layer}experts.gate_up_proj_bias"] = np.stack(biases)
        tensors[f"{layer}experts.down_proj_bias"] = np.stack([x["down_bias"] for x in experts])
    if how != "fused":
        both, down = [x.T for x in both], [x.T for x in down]
    return tensors | {f"{layer}experts.gate_up_proj": np.stack(both), f"{layer}experts.down_proj": np.stack(down)}


# ---- adapters, texts, methods


def _adapter(size: tuple[int, int, int], **settings: Any) -> Callable[[Path], None]:
    """A LoRA adapter of rank 4 for q_proj and down_proj of both layers, and the embedding."""

    def make(folder: Path) -> None:
        hidden, inner, vocab = size
        tensors: Tensors = {}
        for i in range(2):
            for module, rows, cols in (("self_attn.q_proj", hidden, hidden), ("mlp.down_proj", hidden, inner)):
                name = f"base_model.model.model.layers.{i}.{module}"
                tensors[f"{name}.lora_A.weight"] = round_to(normal((4, cols), name, "A") * 0.05, F32)
                tensors[f"{name}.lora_B.weight"] = round_to(normal((rows, 4), name, "B") * 0.05, F32)
        name = "base_model.model.model.embed_tokens"
        tensors[f"{name}.lora_embedding_A"] = round_to(normal((4, vocab), name, "A") * 0.05, BF16)
        tensors[f"{name}.lora_embedding_B"] = round_to(normal((hidden, 4), name, "B") * 0.05, BF16)
        folder.mkdir()
        write_file(folder / "adapter_model.safetensors", tensors)
        known = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}
        (folder / "adapter_config.json").write_text(json.dumps(known | settings))

    return make


METHODS = '''"""Merge methods of a user's own."""

import numpy as np

from weightsmith import PerModel, block_method, tensor_method


@block_method
def agree(models, base, out, weight: PerModel[float], power: float = 1.0):
    deltas = weight[:, None] * (models - base)
    total, length = np.zeros_like(base), np.zeros_like(base)
    for delta in deltas:
        total += delta
        length += np.abs(delta)
    out[:] = base + np.where(length > 0, np.abs(total) / np.maximum(length, 1e-30), 0) * power * total


@tensor_method(min_models=2)
def by_rows(models, weight: PerModel[float] = 1.0):
    """Each row comes whole from the model whose weighted largest element is larger."""
    tops = np.stack([w * np.abs(m).max(-1) for w, m in zip(weight, models, strict=True)])
    return np.choose(np.broadcast_to(tops.argmax(0)[..., None], models[0].shape), models)
'''


def _text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


def _words(first: int) -> str:
    """Four paragraphs of words from `first` on."""
    rows = [[first + (7 * k + j * j) % 20 for j in range(9 + k)] for k in range(4)]
    return "\n\n".join(" ".join(f"w{word}" for word in row) for row in rows) + "\n"


SALIENCY = {"0": [0.5, 0.1, 0.9, 0.3], "1": [0.2, 0.8, 0.2, 0.7]}

INPUTS: dict[str, Callable[[Path], None]] = {
    "base": _llama(0),
    "fr": _llama(1),
    "de": _llama(2),
    "py": _llama(3),
    "rl_a": _llama(4, sparse=True),
    "rl_b": _llama(5, sparse=True),
    "sharded": _llama(6, per_shard=9),
    "infinite": _infinite(7),
    "f16": _llama(1, F16),
    "f32": _llama(2, F32),
    "small": _llama(0, size=SMALL),
    "small_a": _llama(1, size=SMALL),
    "small_b": _llama(2, size=SMALL),
    "small_c": _llama(3, size=SMALL),
    "small_f64": _llama(2, F64, SMALL),
    "tied": _tied(0),
    "tied_a": _tied(1),
    "tall": _tall(0),
    "tall_a": _tall(1),
    "tall_b": _tall(2),
    "odd": _odd(0),
    "odd_a": _odd(1),
    "odd_b": _odd(2),
    "phi3": _phi3(0),
    "phi3_a": _phi3(1),
    "phi3_b": _phi3(2),
    "vision": _vision(0),
    "vision_a": _vision(1),
    "lora": _adapter(LLAMA),
    "lora_patterns": _adapter(DENSE, use_rslora=True, alpha_pattern={"q_proj": 3}),
    **{f"{how}": _mixture(how) for how in ("own", "fused", "transposed", "paired")},
    **{f"{how}_{k}": _mixture(how, k) for how in ("fused", "transposed") for k in (1, 2)},
    **{
        f"{kind}_{tuned}": _dense(kind, tuned)
        for kind in ("llama", "qwen2", "qwen3", "olmo2", "granite", "deepseek_v2", "deepseek_v3", "olmoe")
        for tuned in (0, 1)
    },
    "llama_2": _dense("llama", 2),
    "llama_infinite": _dense("llama", 3, infinite=True),
    "saliency.json": _text(json.dumps(SALIENCY)),
    "prompts_1.txt": _text(_words(3)),
    "prompts_2.txt": _text(_words(35)),
    "my_method.py": _text(METHODS),
}
"""Name in the folder of inputs → what makes it there."""


def make(folder: Path) -> None:
    """All inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, maker in INPUTS.items():
        maker(folder / name)
