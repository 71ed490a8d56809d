"""What GPTQModel's layers compute in transformers. Run by the Python that has both, with requests of `test_gptqmodel` on
standard input."""

from __future__ import annotations

import json
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    """Answer each request with a file: logits [tokens, vocabulary], or what went wrong.

    half     of GPTQModel's layers, in float16
    decoded  of the weights that GPTQModel decodes, multiplied in float32
    """
    import torch
    import transformers

    tokens, *folders = json.load(sys.stdin)
    ids = torch.tensor(tokens)[None]
    for folder in map(Path, folders):
        try:
            config = transformers.AwqConfig(backend="torch_awq")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float16, device_map="cpu", attn_implementation="eager", quantization_config=config
            )
            with torch.inference_mode():
                half = model(ids).logits[0].float().numpy()
                decode(model)
                torch.nn.Module.float(model)  # transformers' own refuses a quantised model
                np.savez(folder / "gptqmodel.npz", half=half, decoded=model(ids).logits[0].numpy())
        except Exception:
            (folder / "gptqmodel.txt").write_text(traceback.format_exc())


def decode(model: Any) -> None:
    """Let the layers of a model multiply with the weights that GPTQModel decodes, in float32."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from torch.nn.functional import linear

    layers = [layer for layer in model.modules() if isinstance(layer, AwqTorchLinear)]
    assert layers
    for layer in layers:
        weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), layer.bits, layer.group_size).T
        bias = None if layer.bias is None else layer.bias.float()
        layer.forward = partial(linear, weight=weight.contiguous(), bias=bias)


if __name__ == "__main__":
    main()
