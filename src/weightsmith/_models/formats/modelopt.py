"""NVIDIA ModelOpt's weights, FP8 and NVFP4.

FP8    X.weight F8_E4M3 [outputs, inputs], X.weight_scale F32 of one element
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
from weightsmith._models.formats.matrices import NVFP4_GROUP
from weightsmith._models.formats.scaled import TENSOR, Scheme, read_scaled
from weightsmith.abc.stored import Config, StoredFormat, Wrapped
from weightsmith.abc.tensors import Tensors

_SCHEMES = [
    Scheme("float8", "F8_E4M3", TENSOR, scales=("F32",)),
    Scheme("float4", "U8", (1, NVFP4_GROUP), scales=("F8_E4M3",), multiplied=True),
]


def is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name in ("F8_E4M3", "U8") and spec.name.endswith(".weight")


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    setting(entry, "quant_algo", None, ("FP8", "NVFP4", "MIXED_PRECISION"), where)
    return _SCHEMES, []


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    refuse_transposed(config, "ModelOpt", where)
    if smoothed := next((name for name in stored.specs if name.endswith(".pre_quant_scale")), ""):
        raise unsupported(f"tensor {show(smoothed)} scales activations before its layer: such weights are not read", where)
    return read_scaled(read_entry)(stored, config, where)


FORMAT = StoredFormat("modelopt", "ModelOpt", recogniser(is_codes, "modelopt", "modelopt_fp4"), read)
