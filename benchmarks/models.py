"""Synthetic Llama checkpoints: a base and fine-tunes of it, seeded, in bf16. They load; they say nothing.

    python -m benchmarks.models --scale 1b        # 4 x 2.2 GB under build/bench/models/1b

Weights are N(0, 0.02) (norms: N(1, 0.02)); a fine-tune adds N(0, 2.8e-4) to the base *as stored* and is rounded to bf16
again, like a real one: 12 % of its deltas are then exactly zero, and the others sit on a few thousand distinct values,
so that magnitudes tie in their thousands. Each block of 1 Mi elements has its own generator, keyed by (seed, tensor,
block): the bytes do not depend on the number of threads, and memory stays at a few blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks.checkpoint import Place, reserve
from benchmarks.jobs import stack

NAMES = ("base", "a", "b", "c")
ROOT = Path("build/bench/models")

WEIGHT_STD = 0.02
DELTA_STD = 2.8e-4  # what supervised fine-tuning of a few thousand steps leaves
BLOCK_ELEMENTS = 1 << 20
RECIPE_VERSION = 1  # raise it when the numbers would change, so that old files are not taken for new ones


@dataclass(frozen=True, slots=True)
class Scale:
    """The shape of a Llama model, how its files are cut, and the models of this shape: the base first."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    max_shard_bytes: int
    seed: int = 0
    names: tuple[str, ...] = NAMES

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor, in model order."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{prefix}.self_attn.k_proj.weight", (kv, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (kv, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, in bf16."""
        return sum(2 * int(np.prod(shape)) for _, shape in self.shapes())

    def config(self) -> dict[str, Any]:
        """config.json, as transformers writes it for such a model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": WEIGHT_STD,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": self.vocab,
        }


SCALES = {
    # 7 MB a model in 3 files: for CI. Every code path, no speed.
    "toy": Scale(256, 6, 512, 8, 2, 2000, max_shard_bytes=3_000_000),
    # 330 MB a model, its matrices as those of 1b: for merges in memory on a small machine.
    "300m": Scale(2048, 3, 5632, 32, 4, 8000, max_shard_bytes=1_200_000_000),
    # TinyLlama-1.1B: 2.2 GB a model in 2 files.
    "1b": Scale(2048, 22, 5632, 32, 4, 32_000, max_shard_bytes=1_200_000_000),
    # Twice the bytes, in larger tensors: peak memory must not follow.
    "2b": Scale(3072, 20, 8192, 32, 8, 32_000, max_shard_bytes=2_400_000_000),
    # Llama-2-7B: 13.5 GB a model in 3 files, without the third fine-tune, which the five merges of bench.py do not read.
    "7b": Scale(4096, 32, 11_008, 32, 32, 32_000, max_shard_bytes=4_900_000_000, names=NAMES[:3]),
}


def build(scale_name: str, root: Path = ROOT, threads: int | None = None) -> Path:
    """The folder with the models of this scale; built if it is not there yet."""
    scale = SCALES[scale_name]
    folder = root / scale_name
    made_as = json.dumps({"version": RECIPE_VERSION, **asdict(scale)}, indent=1)
    marker = folder / "made_as.json"
    if marker.exists() and marker.read_text(encoding="utf-8") == made_as:
        return folder

    unfinished = root / f"{scale_name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    places = []
    for name in scale.names:
        (unfinished / name).mkdir(parents=True)
        (unfinished / name / "config.json").write_text(json.dumps(scale.config(), indent=2), encoding="utf-8")
        places.append(reserve(unfinished / name, scale.shapes(), scale.max_shard_bytes))

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        jobs = [
            pool.submit(_write_block, [model[tensor] for model in places], (scale.seed, i, block))
            for i, (tensor, shape) in enumerate(scale.shapes())
            for block in range(-(-int(np.prod(shape)) // BLOCK_ELEMENTS))
        ]
        for job in jobs:
            job.result()
    (unfinished / "made_as.json").write_text(made_as, encoding="utf-8")
    unfinished.rename(folder)
    return folder


def _write_block(models: list[Place], key: tuple[int, int, int]) -> None:
    """Write one block of one tensor into all models, the base first."""
    start = key[2] * BLOCK_ELEMENTS
    count = min(BLOCK_ELEMENTS, int(np.prod(models[0].shape)) - start)
    mean = 1.0 if len(models[0].shape) == 1 else 0.0
    random = np.random.Generator(np.random.SFC64(list(key)))

    values = random.standard_normal(count, np.float32) * np.float32(WEIGHT_STD) + np.float32(mean)
    base = values.astype(ml_dtypes.bfloat16)
    _write(models[0], start, base)
    stored = base.astype(np.float32)
    for model in models[1:]:
        delta = random.standard_normal(count, np.float32) * np.float32(DELTA_STD)
        _write(model, start, (stored + delta).astype(ml_dtypes.bfloat16))


def _write(place: Place, start: int, values: npt.NDArray[Any]) -> None:
    with place.file.open("r+b", buffering=0) as stream:
        stream.seek(place.offset + 2 * start)
        stream.write(values.tobytes())


def main() -> None:
    """Build one scale from the command line; prints where it is and how large, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="1b")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    scale = SCALES[args.scale]
    stacked = replace(scale, layers=sum(end - start for _, start, end in stack(scale.layers)))
    summary = {
        "folder": str(build(args.scale, args.root)),
        "layers": scale.layers,
        "model_bytes": scale.nbytes,
        "stack_bytes": stacked.nbytes,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
