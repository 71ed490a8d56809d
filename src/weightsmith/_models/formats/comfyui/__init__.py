"""ComfyUI's scaled weights: small floats and integers, in single files and folders.

reading.py  names of tensors; scales in the order of a GPU's tiles, and ConvRot's rotation; what a file says of its weights, and
            weights as numbers
writing.py  the encodings

X.weight        F8_E4M3, F8_E5M2 or I8, of any shape; floats also as U8; U8 of two 4-bit floats (nvfp4)
X.weight_scale  factors of the codes: [] or [1] for the weight, [rows] or [rows, 1] for rows, [rows, groups, 1] for groups of a
                row, [rows / n, cols / n] for blocks; in tiles, for groups of a row (nvfp4, mxfp8)
X.weight_scale_2  F32 []: factor of the scales of nvfp4
X.comfy_quant   U8: JSON with the format, and n as group_size. A file's metadata may have it in place of the tensors:
                _quantization_metadata → layers → X

Older files, and musubi-tuner's, have X.scale_weight and X.scale_input in place of X.weight_scale and X.input_scale, a tensor
`scaled_fp8` whose numbers mean nothing, and no JSON. 8-bit floats without a scale are numbers. Scales of inputs are dropped.

nvfp4 and mxfp8 have rows and columns in multiples of 16 and 32: ComfyUI fills others up with zeros, and finds their shape in
its own code, so these are refused where the file shows it. The first of two 4-bit floats in a byte is the high half.

int8_tensorwise with `convrot` has its columns rotated (ConvRot). They are rotated back.

What is read follows ComfyUI 0.38 (`_load_quantized_module` in its ops.py) and comfy-kitchen. Other formats are refused by name.

comfyui-fp8: 8-bit floats with one scale, in single files.

    X.weight        F8_E4M3 [rows, cols]   codes, to be multiplied by the scale
    X.weight_scale  F32 []                 largest magnitude / 448
    X.comfy_quant   U8 [27]                {"format": "float8_e4m3fn"}

comfyui-fp8-old: the same, with names that programs read before there was X.comfy_quant.

    X.scale_weight  F32 []                 in place of X.weight_scale
    scaled_fp8      F8_E4M3 [2]            once, behind the prefix of the diffusion model. Two elements: programs compute with
                                           decoded weights; another number: they round the inputs of layers to 8 bits, too

**Prefix of the marker.** ComfyUI finds the prefix of a diffusion model by counting names (`unet_prefix_from_state_dict` in its
model_detection.py), drops tensors without it, and then looks for the marker. Text encoders have no prefix.

**Scales have values of bfloat16.** ComfyUI rounds them to the dtype that it computes in, when it decodes a weight.

**Error.** For every finite x of a weight with the scale s, |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s: half a unit in the last
place of a 4-bit significand, or half the spacing of e4m3's subnormals.

comfyui-int8: 8-bit integers with a scale for each row.

    X.weight        I8 [rows, cols]        codes -128 … 127, to be multiplied by their row's scale
    X.weight_scale  F32 [rows, 1]          largest magnitude of the row / 127
    X.comfy_quant   U8                     {"format": "int8_tensorwise"}

**Error.** For every finite x of a row with scale s, |code · s - x| ≤ 0.501 · s: half a step.

comfyui-mxfp8: 8-bit floats with a power of two for each 32 elements of a row.

    X.weight        F8_E4M3 [rows, cols]   codes, to be multiplied by their group's scale
    X.weight_scale  U8 tiles               exponents e: the scale is 2^(e - 127); [rows, cols / 32], filled up to 128 and 4
    X.comfy_quant   U8                     {"format": "mxfp8"}

The scale is the smallest power of two with which the largest magnitude is at most 448 scales, and at least 2^-126.

**Error.** As comfyui-fp8, with s the scale of the group.

comfyui-nvfp4: 4-bit floats with a scale for each 16 elements of a row.

    X.weight          U8 [rows, cols / 2]  E2M1 codes, two in a byte, the first in the high half
    X.weight_scale    F8_E4M3 tiles        local scales: e4m3(largest magnitude of the group / 6 / factor)
    X.weight_scale_2  F32 []               factor: largest magnitude of the weight / (448 · 6)
    X.comfy_quant     U8                   {"format": "nvfp4"}

An element is code · local · factor. Groups whose local scale is rounded to 0 become zeros.

**Error.** As compressed-tensors' nvfp4a16, with s = local · factor: |value - x| ≤ max(s / 4, |x| / 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsmith._models.formats.comfyui.reading import METHOD, OLD_SCALE, SETTINGS, TITLE, is_old_scale, read, recognises
from weightsmith._models.formats.comfyui.writing import WRITES, find
from weightsmith.abc.stored import Config, StoredFormat, labelled


def _mixed(configs: Sequence[Config], modules: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Each weight says its format: there is no config.json."""
    return {}


FORMAT = StoredFormat(
    METHOD,
    TITLE,
    recognises,
    read,
    {
        OLD_SCALE: lambda name, specs: "ComfyUI's scaled FP8" if is_old_scale(name, specs) else "",
        SETTINGS: labelled(TITLE),
    },
    writes=WRITES,
    mixed=_mixed,
    parse=find,
)
