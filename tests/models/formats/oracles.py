"""What other programs decode the checkpoints of `quantised.py` to: writes the sha256 of each weight into `oracles.json`.

Run it where the other programs are installed; the suite needs none of them, and compares with the file:

    pip install bitsandbytes==0.50.2 mlx[cpu]==0.32.4
    pip install auto-round==0.16.1 torchao==0.18.0
    pip install compressed-tensors==0.13.0 hqq==0.2.8.post1 amd-quark==0.13
    pip install "setuptools>=80" && BUILD_CUDA_EXT=0 pip install --no-build-isolation gptqmodel==7.6.0
    python -m tests.models.formats.oracles --write            # --only autoround: the others stay as they are
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.formats.quantised import BF16, CASES, E4M3, Case, exl3_codes

TOLERANCE = 5e-4
"""Of the largest weight: float16 values of EXL3's codebooks, which GPTQModel does not round."""

FILE = Path(__file__).with_suffix(".json")


def digest(array: np.ndarray) -> str:
    """sha256 of the values in C order, without their dtype; -0 counts as 0."""
    return hashlib.sha256((np.ascontiguousarray(array) + np.zeros((), array.dtype)).tobytes()).hexdigest()


def samples(array: np.ndarray) -> list[float]:
    """16 values spread over an array: of programs that add in another order, so that no digest can be equal."""
    return [round(float(v), 6) for v in array.reshape(-1)[:: array.size // 15]]


def _tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _numpy(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.int16).numpy().view(BF16))
    return np.asarray(tensor.contiguous().numpy())


def bitsandbytes(case: Case) -> np.ndarray:
    from bitsandbytes import functional

    name = next(iter(case.plain))
    if case.tensors[name].dtype == np.int8:
        scales = _tensor(case.tensors[name.replace("weight", "SCB")])
        return _numpy(functional.int8_vectorwise_dequant(_tensor(case.tensors[name]), scales))
    state = {key.removeprefix(f"{name}."): _tensor(a) for key, a in case.tensors.items() if key != name}
    return _numpy(functional.dequantize_4bit(_tensor(case.tensors[name]), functional.QuantState.from_dict(state, device="cpu")))


def gptq(case: Case) -> np.ndarray:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    (name,) = case.plain
    entry, (outputs, inputs) = case.config["quantization_config"], case.plain[name].shape
    layer = TorchLinear(
        bits=entry["bits"],
        group_size=entry["group_size"],
        sym=entry["sym"],
        desc_act=entry["desc_act"],
        in_features=inputs,
        out_features=outputs,
        format=FORMAT(entry["checkpoint_format"]),
    ).eval()
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        setattr(layer, part, _tensor(case.tensors[name.replace("weight", part)]))
    if entry["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, entry["bits"], layer.pack_dtype)
    layer.post_init()
    return np.ascontiguousarray(_numpy(layer.dequantize_weight()).T)


def awq(case: Case) -> np.ndarray:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    (name,) = case.plain
    parts = [_tensor(case.tensors[name.replace("weight", part)]) for part in ("qweight", "qzeros", "scales")]
    size = case.config["quantization_config"]["group_size"]
    return np.ascontiguousarray(_numpy(dequantize_gemm(*parts, 4, len(parts[0]) if size < 0 else size)).T)


def compressed(case: Case) -> np.ndarray:
    """Of a release that still has a `g_idx`."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    weights = case.config["quantization_config"]["config_groups"]["group_0"]["weights"]
    state = {key.rpartition(".")[2]: _tensor(a) for key, a in case.tensors.items()}
    return _numpy(PackedQuantizationCompressor.decompress_weight(None, state, QuantizationArgs(**weights)))


def hqq(case: Case) -> np.ndarray:
    from hqq.core.quantize import HQQLinear, torch

    (name,) = case.plain
    prefix = name.removesuffix("weight")
    layer = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu")
    state = {key.removeprefix(prefix): _tensor(a) for key, a in case.tensors.items()}
    offloaded = state.pop("zero_scale", None)  # else hqq asks for a GPU
    if offloaded is not None:
        state |= {"zero": offloaded[0], "scale": offloaded[1], "offload_meta": torch.tensor(0, dtype=torch.uint8)}
    others = {"optimize": False, "round_zero": False}
    layer.load_state_dict({**state, **{key: torch.tensor(int(value), dtype=torch.uint8) for key, value in others.items()}})
    return _numpy(layer.dequantize())


def quark(case: Case) -> np.ndarray:
    import torch
    from quark.torch.export.nn.modules.realquantizer import StaticScaledRealQuantizer
    from quark.torch.quantization.config.config import QTensorConfig

    entry, prefix = case.config["quantization_config"], next(iter(case.plain))
    settings = entry["global_quant_config"]["weight"]
    parts = {key.removeprefix(prefix): _tensor(a) for key, a in case.tensors.items()}
    reorder = entry["export"]["pack_method"] == "reorder"
    layer = StaticScaledRealQuantizer(
        QTensorConfig.from_dict(settings), None, reorder, True, torch.float32, torch.device("cpu")
    )
    layer.scale, layer.zero_point = parts["_scale"], parts["_zero_point"]
    return _numpy(layer(parts[""]))


def autoround(case: Case) -> np.ndarray:
    import torch
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    (name,) = case.plain
    entry, (outputs, inputs) = case.config["quantization_config"], case.plain[name].shape
    bits, size = entry["bits"], entry["group_size"]
    parts = {part: _tensor(case.tensors[name.replace("weight", part)]) for part in ("qweight", "qzeros", "scales")}
    if entry["packing_format"] == "auto_round:auto_awq":
        return np.ascontiguousarray(_numpy(dequantize_gemm(*parts.values(), bits, size)).T)
    module = qlinear_torch_zp if entry["packing_format"] == "auto_round:auto_gptq" else qlinear_torch
    layer = module.QuantLinear(bits, size, inputs, outputs, bias=False)
    for part, tensor in parts.items():
        setattr(layer, part, tensor)
    layer.post_init()
    return np.ascontiguousarray(_numpy(layer(torch.eye(inputs, dtype=torch.float16)).detach()).T)


def exl3(case: Case) -> np.ndarray:
    from gptqmodel.nn_modules.exllamav3_torch import ExllamaV3TorchLinear

    (name,) = case.plain
    parts = {key.rpartition(".")[2]: _tensor(a) for key, a in case.tensors.items()}
    parts = {key: parts.get(key) for key in ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")}
    outputs, inputs = case.plain[name].shape
    layer = ExllamaV3TorchLinear.from_tensors(in_features=inputs, out_features=outputs, name="x", tensors=parts)
    inner = _numpy(layer.get_inner_weight_tensor()).astype(np.float16)
    assert digest(inner) == digest(exl3_codes(case).astype(np.float16))  # before the rotation, all of them are equal
    return np.ascontiguousarray(_numpy(layer.get_weight_tensor()).T)


def mlx(case: Case) -> np.ndarray:
    import mlx.core as mx

    def array(key: str) -> Any:
        part = case.tensors.get(f"q_proj.{key}")
        if part is None:
            return None
        return mx.array(part if part.dtype in (np.uint32, np.uint8) else part.astype(np.float32))  # 16 bits round each step

    entry = case.config["quantization"]
    parts = [array(key) for key in ("weight", "scales", "biases")]
    decoded = mx.dequantize(*parts, group_size=entry["group_size"], bits=entry["bits"], mode=entry["mode"])
    return np.array(decoded.astype(mx.float32))


def torchao(case: Case) -> np.ndarray:
    import torch
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    (name,) = case.plain
    kind = case.config["quantization_config"]["quant_type"]["default"]["_type"]
    tensors = {key: _tensor(a.view(np.uint8)).view(torch.float8_e4m3fn) if a.dtype == E4M3 else _tensor(a)
               for key, a in case.tensors.items()}  # fmt: skip
    prefix = f"{name.rpartition('.')[0]}._weight_"
    grid, (rows, cols) = case.tensors[f"{prefix}scale"].shape, case.plain[name].shape
    data = {"block_size": [rows // grid[0], cols // grid[1]], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    others: dict[str, dict[str, Any]] = {
        "Int8Tensor": {"act_quant_kwargs": None, "reduce_range": False},
        "Float8Tensor": {"act_quant_kwargs": None, "mm_config": None},
        "IntxUnpackedToInt8Tensor": {
            "target_dtype": {"_type": "torch.dtype", "_data": "int4"},
            "activation_quantization": None,
        },
    }
    described = {
        "_type": kind,
        "_data": data | others[kind],
        "_tensor_data_names": [key.removeprefix(prefix) for key in tensors],
    }
    metadata = {name: json.dumps(described), "tensor_names": json.dumps([name])}
    return _numpy(unflatten_tensor_state_dict(tensors, metadata)[0][name].dequantize())


def bitnet(case: Case) -> np.ndarray:
    """The layer of transformers, on what enters it unrounded: one feature at a time."""
    import torch
    from transformers.integrations import bitnet as layers

    (name,) = case.plain
    (outputs, inputs), scale = case.plain[name].shape, _tensor(case.tensors[f"{name}_scale"]).float()
    codes, kind = _tensor(case.tensors[name]), case.config["quantization_config"]["linear_class"]
    if kind == "autobitlinear":
        layer = layers.AutoBitLinear(inputs, outputs, bias=False, dtype=torch.float32)
        layer.weight.data = layers.unpack_weights(codes, torch.float32)
    else:
        layer = layers.BitLinear(inputs, outputs, bias=False, dtype=torch.float32)
        layer.weight = codes
    layer.weight_scale = scale
    return np.ascontiguousarray(_numpy(layer(torch.eye(inputs)).detach()).T)


ORACLES: dict[str, Callable[[Case], np.ndarray]] = {
    "bnb": bitsandbytes,
    "gptq": gptq,
    "awq": awq,
    "autoround": autoround,
    "compressed": compressed,
    "hqq": hqq,
    "quark": quark,
    "exl3": exl3,
    "mlx": mlx,
    "torchao": torchao,
    "bitnet": bitnet,
}


def main() -> None:
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    table = json.loads(FILE.read_text()) if only else {}
    for name, make in CASES.items():
        if only and name.partition("-")[0] != only:
            continue
        case = make()
        theirs = ORACLES[name.partition("-")[0]](case)
        (ours,) = case.plain.values()
        assert theirs.shape == ours.shape, (name, theirs.shape, ours.shape)
        worst = np.abs(theirs.astype(np.float64) - ours).max() / np.abs(ours).max()
        same = digest(ours.astype(theirs.dtype)) == digest(theirs)
        print(
            f"{name:32} {theirs.dtype!s:9} largest difference {worst:.1e} of the largest weight, equal after rounding: {same}"
        )
        table[name] = {"dtype": str(theirs.dtype), "sha256": digest(theirs)} if same else {"samples": samples(theirs)}
        assert same or worst < TOLERANCE
    if "--write" in sys.argv:
        lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in table.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
