"""NVIDIA ModelOpt's weights, FP8 and NVFP4.

FP8    X.weight F8_E4M3 [outputs, inputs], X.weight_scale F32 of one element
NVFP4  X.weight U8 [outputs, inputs / 2]: two float4 in a byte, the first in the low half; X.weight_scale F8_E4M3
       [outputs, inputs / 16]; X.weight_scale_2 F32 of one element, by which each of these scales is multiplied

Scales of activations and of the KV cache are dropped. Releases that describe the quantisation in hf_quant_config.json alone are
not read.
"""

from __future__ import annotations

from weightsmith._models.formats.config import recogniser
from weightsmith._models.formats.modelopt.reading import is_codes, read
from weightsmith.abc.stored import StoredFormat

FORMAT = StoredFormat("modelopt", "ModelOpt", recogniser(is_codes, "modelopt", "modelopt_fp4"), read)
