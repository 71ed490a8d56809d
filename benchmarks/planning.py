"""Planning of a checkpoint of 1 TB: processor time and memory of `weightsmith plan`, for recipes of several kinds.

    python -m benchmarks.planning [--layers 60] [--experts 384] [--recipes linear ties stack]

The models are synthetic mixtures of experts: true headers, and sparse files that hold nothing else, so they take 60 MB of disk
each. 60 layers of 384 experts are 115,623 tensors and 1.04 TB in 209 files. A plan is made from headers alone, so it is the
same as for real weights. Each plan is a process of its own; its imports count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import WORK
from benchmarks.process import Measured, run
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import make_layout

SHARD_BYTES = 5_000_000_000
NAMES = ("base", "a", "b")


@dataclass(frozen=True, slots=True)
class Mixture:
    """The shape of a mixture of experts. hidden: a multiple of 64."""

    layers: int = 60
    experts: int = 384
    hidden: int = 7168

    def specs(self) -> Iterator[TensorSpec]:
        """Every tensor, in model order, in bf16."""
        for name, shape in self._shapes():
            yield TensorSpec(name, DTYPES["BF16"], shape)

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden, self.hidden // 7
        yield "model.embed_tokens.weight", (20 * hidden, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{prefix}.self_attn.{name}.weight", (hidden, hidden)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
            yield f"{prefix}.mlp.gate.weight", (self.experts, hidden)
            for expert in range(self.experts):
                expert_prefix = f"{prefix}.mlp.experts.{expert}"
                yield f"{expert_prefix}.gate_proj.weight", (inner, hidden)
                yield f"{expert_prefix}.up_proj.weight", (inner, hidden)
                yield f"{expert_prefix}.up_proj.bias", (inner,)
                yield f"{expert_prefix}.down_proj.weight", (hidden, inner)
                yield f"{expert_prefix}.down_proj.bias", (hidden,)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (20 * hidden, hidden)

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "head_dim": 64,
            "intermediate_size": self.hidden,
            "moe_intermediate_size": self.hidden // 7,
            "num_attention_heads": self.hidden // 64,
            "num_experts": self.experts,
            "num_experts_per_tok": 8,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.hidden // 64,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 20 * self.hidden,
        }

    def build(self, folder: Path) -> int:
        """One model: headers in sparse files, index and config. Returns the bytes of its tensors."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        specs = list(self.specs())
        layout = make_layout(specs, SHARD_BYTES)
        for shard in layout.shards:
            with (folder / shard.name).open("wb") as file:
                file.write(shard.header)
                file.truncate(shard.nbytes)
        for name, index in layout.indexes.items():
            (folder / name).write_bytes(index)
        (folder / "config.json").write_text(json.dumps(self.config()))
        return sum(spec.nbytes for spec in specs)


def recipes(layers: int) -> dict[str, str]:
    """A recipe of each kind."""
    return {
        "linear": "merge_method: linear\nmodels:\n"
        "  - {model: ./a, parameters: {weight: 0.6}}\n  - {model: ./b, parameters: {weight: 0.4}}\n",
        "ties": "merge_method: ties\nbase_model: ./base\nmodels:\n"
        "  - {model: ./a, parameters: {weight: 1, density: 0.4}}\n  - {model: ./b, parameters: {weight: 0.5, density: 0.2}}\n",
        "stack": "merge_method: passthrough\nslices:\n"
        f"  - sources: [{{model: ./a, layer_range: [0, {2 * layers // 3}]}}]\n"
        f"  - sources: [{{model: ./b, layer_range: [{layers // 3}, {layers}]}}]\n",
    }


def plan(folder: Path, recipe: str) -> Measured:
    """`weightsmith plan` of a recipe of these models."""
    (folder / "recipe.yml").write_text(recipe)
    command = [sys.executable, "-m", "weightsmith", "plan", "recipe.yml", "--no-check-loading"]
    return run(["env", "-C", str(folder), *command], folder / "log.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning of a checkpoint of 1 TB: processor time and memory.")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--recipes", nargs="+", choices=recipes(60), default=list(recipes(60)))
    parser.add_argument("--work", type=Path, default=WORK / "planning")
    args = parser.parse_args()
    shape = Mixture(args.layers, args.experts)
    sizes = [shape.build(args.work / name) for name in NAMES]
    print(f"{sum(1 for _ in shape.specs()):,} tensors, {sizes[0] / 1e12:.2f} TB a model")
    print(f"{'recipe':8}  {'processor s':>11}  {'wall s':>7}  {'peak RSS MB':>11}")
    for name in args.recipes:
        measured = plan(args.work, recipes(args.layers)[name])
        print(f"{name:8}  {measured.cpu_seconds:11.1f}  {measured.wall_seconds:7.1f}  {measured.peak_rss_bytes / 1e6:11.0f}")


if __name__ == "__main__":
    main()
