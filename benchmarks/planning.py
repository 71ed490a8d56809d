"""Planning of a checkpoint of 1 TB: processor time and memory of `weightsmith plan`, for recipes of several kinds.

    python -m benchmarks.planning [--layers 60] [--experts 384] [--recipes linear ties stack]

The models are synthetic mixtures of experts: true headers, and sparse files that hold nothing else, so they take a few MB of
disk. 60 layers of 384 experts are 116,000 tensors and 1.02 TB in 204 files. A plan is made from headers alone, so it is the
same as for real weights. Each plan is a process of its own; its imports count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench import WORK
from benchmarks.process import Measured, run
from weightsmith.containers.safetensors import INDEX_NAME, make_layout
from weightsmith.tensors import DTYPES, TensorSpec

HIDDEN, EXPERT, VOCAB = 7168, 1024, 163_840
SHARD_BYTES = 5_000_000_000

RECIPES = {
    "linear": "merge_method: linear\nmodels:\n"
    "  - {model: ./a, parameters: {weight: 0.6}}\n  - {model: ./b, parameters: {weight: 0.4}}\n",
    "ties": "merge_method: ties\nbase_model: ./base\nmodels:\n"
    "  - {model: ./a, parameters: {weight: 1, density: 0.4}}\n  - {model: ./b, parameters: {weight: 0.5, density: 0.2}}\n",
    "stack": "merge_method: passthrough\nslices:\n  - sources: [{model: ./a, layer_range: [0, 40]}]\n"
    "  - sources: [{model: ./b, layer_range: [20, 60]}]\n",
}


def shapes(layers: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a mixture, in model order."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        for name, rows in (("q_proj", 8192), ("k_proj", 1024), ("v_proj", 1024)):
            yield f"{prefix}.self_attn.{name}.weight", (rows, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, 8192)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate.weight", (experts, HIDDEN)
        for expert in range(experts):
            own = f"{prefix}.mlp.experts.{expert}"
            yield f"{own}.gate_proj.weight", (EXPERT, HIDDEN)
            yield f"{own}.up_proj.weight", (EXPERT, HIDDEN)
            yield f"{own}.up_proj.bias", (EXPERT,)
            yield f"{own}.down_proj.weight", (HIDDEN, EXPERT)
            yield f"{own}.down_proj.bias", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def build(folder: Path, layers: int, experts: int) -> int:
    """One model: headers in sparse files, index and config. Returns the bytes that its tensors would take."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    specs = [TensorSpec(name, DTYPES["BF16"], shape) for name, shape in shapes(layers, experts)]
    layout = make_layout(specs, SHARD_BYTES)
    for shard in layout.shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.nbytes)
    if layout.index is not None:
        (folder / INDEX_NAME).write_bytes(layout.index)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "head_dim": 128,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": EXPERT,
        "num_attention_heads": 64,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(spec.nbytes for spec in specs)


def plan(folder: Path, recipe: str) -> Measured:
    """`weightsmith plan` of a recipe of these models."""
    file = folder / "recipe.yml"
    file.write_text(recipe)
    command = [sys.executable, "-m", "weightsmith", "plan", str(file), "--no-check-loading"]
    return run(["env", "-C", str(folder), *command], folder / "log.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--work", type=Path, default=WORK / "planning")
    given = parser.parse_args()
    sizes = [build(given.work / name, given.layers, given.experts) for name in ("base", "a", "b")]
    count = sum(1 for _ in shapes(given.layers, given.experts))
    print(f"{count:,} tensors, {sizes[0] / 1e12:.2f} TB a model")
    print(f"{'recipe':8}  {'processor s':>11}  {'wall s':>7}  {'peak RSS MB':>11}")
    for name in given.recipes:
        text = RECIPES[name].replace("60", str(given.layers)) if given.layers >= 40 else RECIPES[name]
        found = plan(given.work, text)
        print(f"{name:8}  {found.cpu_seconds:11.1f}  {found.wall_seconds:7.1f}  {found.peak_rss_bytes / 1e6:11.0f}")


if __name__ == "__main__":
    main()
