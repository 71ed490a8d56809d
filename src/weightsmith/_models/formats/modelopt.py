"""NVIDIA ModelOpt's weights, FP8, MXFP8 and NVFP4, also mixed.

FP8    X.weight F8_E4M3 [outputs, inputs], X.weight_scale F32: one element; [outputs] of rows (FP8_PER_CHANNEL_PER_TOKEN); of
       blocks of 128 by 128, [blocks, blocks] or [blocks, 1, blocks, 1] (FP8_PB_WO)
MXFP8  X.weight F8_E4M3 [outputs, inputs], X.weight_scale U8 [outputs, inputs / 32]: an exponent of 2 with 127 added
NVFP4  X.weight U8 [outputs, inputs / 2]: two float4 in a byte, the first in the low half; X.weight_scale F8_E4M3
       [outputs, inputs / 16]; X.weight_scale_2 F32 of one element, by which each of these scales is multiplied

Scales of activations and of the KV cache are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import recogniser, setting, unsupported
from weightsmith._models.formats.decoded import refuse_transposed
from weightsmith._models.formats.matrices import MXFP4_GROUP, NVFP4_GROUP
from weightsmith._models.formats.scaled import TENSOR, Scheme, read_scaled
from weightsmith.abc.stored import Config, StoredFormat, Wrapped
from weightsmith.abc.tensors import Tensors

_SIDE = 128
_SCHEMES = [
    Scheme("float8", "F8_E4M3", TENSOR, scales=("F32",)),
    Scheme("float8", "F8_E4M3", (1, None), scales=("F32",)),
    Scheme("float8", "F8_E4M3", (_SIDE, _SIDE), scales=("F32",)),
    Scheme("float8", "F8_E4M3", (1, MXFP4_GROUP), scales=("U8",)),
    Scheme("float4", "U8", (1, NVFP4_GROUP), scales=("F8_E4M3",), multiplied=True),
]
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
"""Values of quant_algo. The shape and dtype of the scales of a weight tell which scheme it has."""


def is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name in ("F8_E4M3", "U8") and spec.name.endswith(".weight")


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    algorithm = entry.get("quant_algo")
    upper = algorithm.upper() if isinstance(algorithm, str) else algorithm  # some exports have fp8_pb_wo
    setting({**entry, "quant_algo": upper}, "quant_algo", None, _ALGORITHMS, where)
    return _SCHEMES, []


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    refuse_transposed(config, "ModelOpt", where)
    if smoothed := next((name for name in stored.specs if name.endswith(".pre_quant_scale")), ""):
        raise unsupported(f"tensor {show(smoothed)} scales activations before its layer: such weights are not read", where)
    return read_scaled(read_entry)(stored, config, where)


FORMAT = StoredFormat("modelopt", "ModelOpt", recogniser(is_codes, "modelopt", "modelopt_fp4"), read)
