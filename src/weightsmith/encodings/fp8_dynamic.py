"""fp8-dynamic: 8-bit weights with a scale for each output channel, like compressed-tensors' FP8_DYNAMIC.

    X.weight        F8_E4M3 [rows, cols]   codes, to be multiplied by their row's scale
    X.weight_scale  BF16 [rows, 1]         largest magnitude of the row / 448

Activations are quantised at run time: vLLM and SGLang scale and round them per token.

**The scale is always bfloat16.** transformers casts scales to the dtype in which the model is loaded, so a float32 scale would
be rounded after the codes were computed from it (an error of 0.3 % on every weight of a bfloat16 model). A bfloat16 scale is
exact in all readers, and rows are divided by the scale as stored.

**Error.** For every finite x of a row with scale s, |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s: half a unit in the last place of a
4-bit significand, or half the spacing of e4m3's subnormals (relative to the row's largest magnitude, 2^-10 / 448 = 2.2e-6).

**Special rows.** A row of zeros has the scale 2^-7, as in compressed-tensors. Scales are at least 2^-126, the smallest normal
bfloat16: smaller ones could be flushed to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsmith.encodings.base import Bytes, Rows
from weightsmith.errors import Unsupported
from weightsmith.formats.files import show
from weightsmith.tensors import DTYPES, TensorSpec

_SUFFIX = ".weight"
_SCALE_OF_ZEROS = np.float32(2.0**-7)
_SMALLEST_SCALE = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True)
class Fp8Dynamic:
    """Matrices `X.weight` → codes and a scale for each row. See the module."""

    name: str = "fp8-dynamic"
    align_rows: int = 1

    def refusal(self, spec: TensorSpec) -> str:
        """Accepts non-empty floating-point matrices named `….weight`, because readers expect that name."""
        if not spec.name.endswith(_SUFFIX):
            return f"its name does not end in {_SUFFIX}, which readers need to find the scales"
        if len(spec.shape) != 2:
            return f"its shape is {list(spec.shape)}, not a matrix"
        if not spec.dtype.floating or spec.dtype.itemsize not in (2, 4):
            return f"it is {spec.dtype}, not 16-bit or 32-bit floating point"
        return "" if spec.size else f"its shape {list(spec.shape)} has no elements"

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Codes and scales.

        >>> for out in Fp8Dynamic().outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 32))):
        ...     print(out)
        q_proj.weight [64, 32] F8_E4M3
        q_proj.weight_scale [64, 1] BF16
        """
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        codes = TensorSpec(spec.name, DTYPES["F8_E4M3"], spec.shape)
        return codes, TensorSpec(spec.name + "_scale", DTYPES["BF16"], (spec.shape[0], 1))

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes]) -> None:
        """As `Encoding.encode`. NaN stays NaN; a row with an infinity becomes zeros and NaN."""
        from weightsmith.kernels import codecs, fp8

        codes, stored_scales = outs
        n, cols = rows.shape
        flat, scales = rows.reshape(-1), np.empty(n, np.float32)
        fp8.row_maxima(flat, cols, scales)
        zeros = scales == 0
        scales = np.maximum(scales / fp8.LARGEST, _SMALLEST_SCALE)
        scales[zeros] = _SCALE_OF_ZEROS
        bf16 = DTYPES["BF16"].code
        codecs.encode(scales, n, bf16, 0, stored_scales)
        codecs.decode(stored_scales, bf16, 0, n, scales)
        fp8.quantise(flat, cols, scales, codes)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of a model with all linear modules encoded except the ignored ones.

        >>> Fp8Dynamic().config(["lm_head"])["quantization_config"]["ignore"]
        ['lm_head']
        """
        eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
            "output_activations": None,
            "format": "float-quantized",
        }
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
                "ignore": list(ignored),
                "kv_cache_scheme": None,
                "global_compression_ratio": None,
            }
        }


ENCODING = Fp8Dynamic()
