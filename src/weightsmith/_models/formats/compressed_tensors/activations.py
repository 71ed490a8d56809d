"""Static scales of activations: what they are called, and how they follow from the largest magnitude on a text.

    X.input_scale            BF16 [1]   fp8-static: largest magnitude / 448. x is stored as e4m3(x / scale)
    X.input_global_scale     F32 [1]    nvfp4: 448 · 6 / largest magnitude. Engines compute a scale for each 16 elements of x
                                        as e4m3(global · largest of the group / 6), when they run
    self_attn.k_scale,       BF16 [1]   the FP8 cache: largest magnitude of the keys (after norms and rotation) or values / 448
    self_attn.v_scale

The definitions are those of compressed-tensors (`calculate_qparams`, `generate_gparam`), with the observer `static_minmax`.
bf16 scales are rounded to nearest, so 448 scales may be less than the largest magnitude, by 2^-9 of it: readers make it 448.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.compressed_tensors.writing import NVFP4, STATIC
from weightsmith._models.formats.matrices import SUFFIX, bf16_scales


@dataclass(frozen=True, slots=True)
class ActivationScale:
    """A scale of one element.

    name   of the tensor, after its module
    dtype  of the tensor
    of     (largest magnitude, finite) → the array [1]
    """

    name: str
    dtype: str
    of: Callable[[float], npt.NDArray[Any]]

    def out(self, module: str) -> TensorSpec:
        """The stored tensor of a module, or of the weight of one."""
        return TensorSpec(f"{module.removesuffix(SUFFIX)}.{self.name}", DTYPES[self.dtype], (1,))


def _float8(largest: float) -> npt.NDArray[Any]:
    found = np.empty(1, DTYPES["BF16"].numpy)
    bf16_scales(np.array([largest], np.float32), 448, found.view(np.uint8))
    return found


def _float4(largest: float) -> npt.NDArray[Any]:
    """1 where the quotient is not a number of float32, as in compressed-tensors."""
    with np.errstate(all="ignore"):
        found = np.float32(448 * 6) / np.array([largest], np.float32)
    return np.where(np.isfinite(found), found, np.float32(1)).astype(np.float32)


INPUTS: Mapping[str, ActivationScale] = {
    STATIC.name: ActivationScale("input_scale", "BF16", _float8),
    NVFP4.name: ActivationScale("input_global_scale", "F32", _float4),
}
"""The scale of what enters a linear layer, by the encoding of its weight."""

CACHED = (ActivationScale("k_scale", "BF16", _float8), ActivationScale("v_scale", "BF16", _float8))
"""The scales of keys and values of an attention module."""

CACHES: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}
"""`kv_cache_scheme` of config.json, by the name that users write."""


def with_cache_scheme(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the scheme of the cache. config: that of an encoding. name: one of `CACHES`."""
    entry = config["quantization_config"]
    return {**config, "quantization_config": {**entry, "kv_cache_scheme": dict(CACHES[name])}}
