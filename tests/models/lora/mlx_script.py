"""What mlx-lm trains and fuses. Run by the Python that has it, with the cases of `test_mlx` on standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Make an adapter for each case with settings, as a training of mlx-lm leaves it, and fuse that of each case."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
    from mlx_lm.utils import dequantize_model, load_model, save_config

    def make(folder: Path, out: Path, case: dict[str, Any]) -> None:
        model, _ = load_model(folder)
        model.freeze()
        config: dict[str, Any] = {key: case[key] for key in ("num_layers", "lora_parameters", "fine_tune_type")}
        linear_to_lora_layers(model, case["num_layers"], case["lora_parameters"], use_dora=case["fine_tune_type"] == "dora")
        mx.random.seed(7)
        trained = []
        for name, value in tree_flatten(model.trainable_parameters()):
            norms = value * mx.random.uniform(0.9, 1.1, value.shape) if name.endswith(".m") else None
            trained.append((name, mx.random.normal(value.shape) / 8 if norms is None else norms))
        model.load_weights(trained, strict=False)
        out.mkdir(parents=True)
        mx.save_safetensors(str(out / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
        save_config({**config, "model": str(folder), "iters": 10}, out / "adapter_config.json")

    for case in json.load(sys.stdin):
        folder, out = Path(case["base"]), Path(case["out"])
        if "lora_parameters" in case:
            make(folder, out, case)
        model, _ = load_model(folder)
        load_adapters(model, str(out))
        fused = [(name, module.fuse(dequantize=True)) for name, module in model.named_modules() if hasattr(module, "fuse")]
        model.update_modules(tree_unflatten(fused))
        model = dequantize_model(model)
        weights = {name: value.astype(mx.float32) for name, value in tree_flatten(model.parameters())}
        mx.save_safetensors(str(out / "fused.safetensors"), weights)


if __name__ == "__main__":
    main()
