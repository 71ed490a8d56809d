"""The models of `weightsmith demo`: a tiny Llama with random weights and two fine-tunes of it, made without torch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weightsmith._models.tokenizers.convert import BYTE_LEVEL, FLAGS, bpe
from weightsmith._models.tokenizers.vocabulary import CHARACTERS
from weightsmith._outputs.save import save_file

WIDTH, HIDDEN, LAYERS, HEADS, KEY_HEADS = 128, 352, 6, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TUNED = {"french": range(0, 4), "german": range(2, 6)}
"""Fine-tune → its layers."""
RANK = 4
RECIPE = """# TIES keeps the largest changes of each fine-tune, and drops those whose signs disagree.
merge_method: ties
base_model: {base}
models:
  - model: {french}
    parameters: {{weight: 1, density: 0.5}}
  - model: {german}
    parameters: {{weight: 1, density: 0.5}}
dtype: bfloat16
"""


def demo_models(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write three tiny models with random weights into an existing folder: `base`, `french` and `german`; and `recipe.yml`.

    Returns their folders, the base first. Raises OSError.
    """
    folder = Path(folder)
    rng = np.random.default_rng(0)
    base = {name: _random(rng, shape) for name, shape in _shapes().items()}
    _write(folder / "base", base)
    for name, layers in TUNED.items():
        tuned = dict(base)
        for layer in layers:
            for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
                key = f"model.layers.{layer}.{part}.weight"
                rows, columns = base[key].shape
                change = rng.standard_normal((rows, RANK), np.float32) @ rng.standard_normal((RANK, columns), np.float32)
                tuned[key] = (base[key].astype(np.float32) + 0.002 * change).astype(ml_dtypes.bfloat16)
        _write(folder / name, tuned)
    places = {name: _quoted(folder / name) for name in ("base", *TUNED)}
    (folder / "recipe.yml").write_text(RECIPE.format(**places), encoding="utf-8")
    return tuple(folder / name for name in places)


def _quoted(path: Path) -> str:
    """A path in YAML, relative to the current folder if it was given so."""
    text = str(path) if path.is_absolute() else f"./{path}"
    return text if re.fullmatch(r"[\w./-]+", text, re.ASCII) else json.dumps(text)


def _shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers' Llama has them."""
    side, key_side = WIDTH, WIDTH * KEY_HEADS // HEADS
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (side,),
        "self_attn.q_proj": (side, side),
        "self_attn.k_proj": (key_side, side),
        "self_attn.v_proj": (key_side, side),
        "self_attn.o_proj": (side, side),
        "post_attention_layernorm": (side,),
        "mlp.gate_proj": (HIDDEN, side),
        "mlp.up_proj": (HIDDEN, side),
        "mlp.down_proj": (side, HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(_vocabulary()), side)}
    shapes |= {f"model.layers.{i}.{part}.weight": shape for i in range(LAYERS) for part, shape in layer.items()}
    return shapes | {"model.norm.weight": (side,)}


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Weights as a fresh model has them: ones in norms, small normal numbers elsewhere."""
    numbers = np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * rng.standard_normal(shape, np.float32)
    return numbers.astype(ml_dtypes.bfloat16)


def _vocabulary() -> dict[str, int]:
    """A token for each byte, after the special ones."""
    return {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS.values()))}


def _write(folder: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", fsync=False)
    vocabulary = _vocabulary()
    added = [{"id": number, "content": token, **FLAGS, "special": True} for number, token in enumerate(SPECIAL)]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**BYTE_LEVEL, "use_regex": True},  # as GPT-2: a pattern that GGUF has a name for
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": bpe(vocabulary, []),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(vocabulary),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT,
        "model_max_length": 512,
    }
    for name, value in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        text = json.dumps(value, indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
