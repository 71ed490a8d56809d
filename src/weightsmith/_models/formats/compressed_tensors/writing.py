"""Encodings from what config.json says of their weights: the same function that reads it decides what is stored.

fp8-dynamic: 8-bit weights with a scale for each output channel, like compressed-tensors' FP8_DYNAMIC.

    X.weight        F8_E4M3 [rows, cols]   codes, to be multiplied by their row's scale
    X.weight_scale  BF16 [rows, 1]         largest magnitude of the row / 448

Activations are quantised at run time: vLLM and SGLang scale and round them per token.

**The scale is always bfloat16.** transformers casts scales to the dtype in which the model is loaded, so a float32 scale would
be rounded after the codes were computed from it (an error of 0.3% on every weight of a bfloat16 model). A bfloat16 scale is
exact in all readers, and rows are divided by the scale as stored.

**Error.** For every finite x of a row with scale s, |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s: half a unit in the last place of a
4-bit significand, or half the spacing of e4m3's subnormals (relative to the row's largest magnitude, 2^-10 / 448 = 2.2e-6).

**Special rows.** A row of zeros has the scale 2^-7, as in compressed-tensors. Scales are at least 2^-126, the smallest normal
bfloat16: smaller ones could be flushed to zero.

fp8-block: 8-bit weights with a scale for each block of 128 by 128, like compressed-tensors' FP8_BLOCK.

    X.weight        F8_E4M3 [rows, cols]                 codes, to be multiplied by their block's scale
    X.weight_scale  BF16 [ceil(rows / 128), cols / 128]  largest magnitude of the block / 448

Activations are quantised at run time, in groups of 128, so no loader can run a matrix of another width. The last block of
rows may be smaller: compressed-tensors and transformers read it. vLLM does not where it joins or splits such matrices.

**Error.** As fp8-dynamic, with s the scale of the block: |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s. Scales are bfloat16 for
the same reason, and special blocks are the same.

fp8-static: 8-bit weights with one scale, like compressed-tensors' FP8.

    X.weight        F8_E4M3 [rows, cols]   codes, to be multiplied by the scale
    X.weight_scale  BF16 [1]               largest magnitude / 448
    X.input_scale   BF16 [1]               of what enters the layer: see below

The largest magnitude is that of the weights that engines join (query, key and value; gate and up): engines have one scale for a
joined matrix, and would round other parts once more. The product `magnitudes` finds it.

**Error.** As fp8-dynamic, with s the scale of the weight.

int8: 8-bit integers with a scale for each output channel, like compressed-tensors' W8A8.

    X.weight        I8 [rows, cols]   codes -128 … 127, to be multiplied by their row's scale
    X.weight_scale  BF16 [rows, 1]    largest magnitude of the row / 127.5

Activations are quantised at run time, per token. Scales are bfloat16, as for fp8-dynamic, and rows are divided by the scale
as stored, in float32: division in bfloat16 changes one code in eleven.

**Error.** For every finite x of a row with scale s, |code · s - x| ≤ s. Half a step, except for the largest positive elements:
127.5 steps, or 128 if the scale was rounded down, become 127.

w4a16 and w8a16: integers of 4 or 8 bits with a scale for each group of a row, like compressed-tensors' W4A16 and W8A16.

    X.weight_packed  I32 [rows, cols · bits / 32]  codes + 2^(bits - 1), from the lowest bits of each word
    X.weight_scale   BF16 [rows, cols / group]     largest magnitude of the group / (2^(bits - 1) - 1/2)
    X.weight_shape   I64 [2]                       rows, cols

Activations stay as they are. Weights are rounded to nearest, in float32, over the scale as stored in bfloat16 (see
fp8-dynamic). The width of a weight must be a multiple of the group, as engines require. A calibration scales the input
features of weights first, as for AWQ (`scaled`), narrows ranges where this makes the output's error smaller, and chooses codes
as GPTQ does.

w4a16-channel and w8a16-channel: the same, with a scale for each row, [rows, 1]. They are for widths that no group divides.
vLLM fills such matrices up to whole tiles of its Marlin kernel. It needs rows that fill their words: the width is a multiple
of 32 / bits.

**Error.** For every finite x of a group with scale s, |code · s - x| ≤ 0.53 · s with 4 bits, and ≤ s with 8: half a step,
except for the largest positive elements, which are up to a quarter of a step beyond the largest code.

nvfp4a16: 4-bit floats with a scale for each 16 elements of a row, like compressed-tensors' NVFP4A16.

    X.weight_packed        U8 [rows, cols / 2]        E2M1 codes, two in a byte, the first in the low half
    X.weight_scale         F8_E4M3 [rows, cols / 16]  local scales: e4m3(global · largest magnitude of the group / 6)
    X.weight_global_scale  F32 [1]                    448 · 6 / largest magnitude of the weight

An element is code · local / global. The global scale needs the largest magnitude of the whole weight before its first row is
encoded: the product `magnitudes` finds it. Weights that engines join into one (query, key and value; gate and up) have the
largest magnitude of all.

**Error.** With s = local / global, |value - x| ≤ max(s / 4, |x| / 3) for every finite x: the spacing of E2M1 is s / 2 up to 2
s and a third of the value above, and a local scale that was rounded down leaves the largest elements beyond 6 s, most where it
is subnormal.

nvfp4: the same weights, and activations of 4 bits, like compressed-tensors' NVFP4. Beside the weight there is

    X.input_global_scale   F32 [1]   448 · 6 / largest magnitude of what enters the layer: see below

mxfp4: 4-bit floats with a power of two for each 32 elements of a row, like compressed-tensors' MXFP4A16.

    X.weight_packed  U8 [rows, cols / 2]   E2M1 codes, two in a byte, the first in the low half
    X.weight_scale   U8 [rows, cols / 32]  exponents e: the scale is 2^(e - 127)

The scale is a quarter of the largest magnitude of the group, rounded down to a power of two, or up if the magnitude's
significand is at least 1.75. So the largest element is 3.5 … 7 scales.

**Error.** With scale s, |value - x| ≤ max(s / 4, |x| / 5) for every finite x: the spacing of E2M1 is s / 2 up to 2 s, and what
lies between 6 s and 7 s becomes 6 s. (Groups below 2^-124 have the scale 2^-126.)

mxfp8: 8-bit floats with a power of two for each 32 elements of a row, like compressed-tensors' MXFP8 (OCP's MX formats).

    X.weight        F8_E4M3 [rows, cols]    codes, to be multiplied by their group's scale
    X.weight_scale  U8 [rows, cols / 32]    exponents e: the scale is 2^(e - 127)

The exponent is that of mxfp4's rule, six lower: the largest element is 224 … 448 scales. Activations are quantised at run time,
in groups of 32.

**Error.** As fp8-dynamic, with s the scale of the group: |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s.

# Static scales of activations

    X.input_scale            BF16 [1]   fp8-static: largest magnitude / 448. x is stored as e4m3(x / scale)
    X.input_global_scale     F32 [1]    nvfp4: 448 · 6 / largest magnitude. Engines compute a scale for each 16 elements of x
                                        as e4m3(global · largest of the group / 6), when they run
    self_attn.k_scale,       BF16 [1]   the FP8 cache: largest magnitude of the keys (after norms and rotation) or values / 448
    self_attn.v_scale

The definitions are those of compressed-tensors (`calculate_qparams`, `generate_gparam`), with the observer `static_minmax`.
bf16 scales are rounded to nearest, so 448 scales may be less than the largest magnitude, by 2^-9 of it: readers make it 448.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.compressed_tensors.config import quantization_config, scheme_of
from weightsmith._models.formats.hessians import CodesOf, quantise_groups
from weightsmith._models.formats.matrices import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    MatrixEncoding,
    bf16_scales,
    encoding_of,
    matrix_refusal,
    maxima_of,
    mx_scales,
)
from weightsmith._models.formats.scaled import TENSOR, ScaledWeight
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import ActivationScale, Bytes, CacheEncoding, FactoredHessian, HessianForm, Rows, Unread

Fill = Callable[[TensorSpec, Rows, Sequence[Bytes], Rows], None]


def compressed(
    family: str,
    format: str,
    weights: Mapping[str, Any],
    fill: Fill,
    *,
    activations: Mapping[str, Any] | None = None,
    scale: DType = DTYPES["BF16"],
    of: Callable[..., MatrixEncoding] = MatrixEncoding,
    **fields: Any,
) -> MatrixEncoding:
    """An encoding of one of compressed-tensors' formats.

    weights, activations  arguments of their quantisation, as in config.json
    fill                  see `MatrixEncoding`
    scale                 dtype of the scales
    of                    its class
    fields                more of its fields
    """
    scheme = scheme_of(format, weights, family, family)
    high, wide = scheme.block
    return of(
        family,
        partial(scheme.tensors, scale=scale.name),
        fill,
        partial(quantization_config, format, weights, activations),
        kind="integer" if weights["type"] == "int" else "float",
        bits=weights["num_bits"],
        group=wide,
        scale=scale,
        align_rows=high or 1,
        whole=scheme.shaped + scheme.divided + (scheme.block == TENSOR),
        **fields,
    )


# ---- 8-bit floats

SIDE = 128
_FORMAT = "float-quantized"
_FLOAT8 = {"num_bits": 8, "type": "float"}


def _fill_floats(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows, *, side: int = 0) -> None:
    """Encode rows, or blocks of side by side elements. NaN stays NaN; a block with an infinity becomes zeros and NaN."""
    from weightsmith._kernels.codes import quantise_float8

    cols = rows.shape[1]
    high, wide = (side, side) if side else (1, cols)
    scales = bf16_scales(maxima_of(rows, high, wide), 448, outs[1])
    quantise_float8(rows.reshape(-1), cols, high, wide, scales, outs[0])


DYNAMIC = compressed(
    "fp8-dynamic", _FORMAT, {**_FLOAT8, "strategy": "channel"}, _fill_floats, activations={**_FLOAT8, "strategy": "token"}
)
BLOCK = compressed(
    "fp8-block",
    _FORMAT,
    {**_FLOAT8, "strategy": "block", "block_structure": [SIDE, SIDE]},
    partial(_fill_floats, side=SIDE),
    activations={**_FLOAT8, "strategy": "group", "group_size": SIDE},
)


def _fill_static(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN stays NaN.

    numbers  float32 [1]: the largest magnitude of the weight, and of those it is joined with
    """
    from weightsmith._kernels.codes import quantise_float8

    high, wide = rows.shape
    quantise_float8(rows.reshape(-1), wide, high, wide, bf16_scales(numbers, 448, outs[1]), outs[0])


def _scale_of_floats(largest: float) -> npt.NDArray[Any]:
    scale = np.empty(1, DTYPES["BF16"].numpy)
    bf16_scales(np.array([largest], np.float32), 448, scale.view(np.uint8))
    return scale


STATIC = compressed(
    "fp8-static",
    _FORMAT,
    {**_FLOAT8, "strategy": "tensor"},
    _fill_static,
    activations={**_FLOAT8, "strategy": "tensor", "dynamic": False},
    maxima=True,
    inputs=ActivationScale("input_scale", "BF16", _scale_of_floats),
)


def _with_cache(config: Mapping[str, Any]) -> dict[str, Any]:
    scheme = {**_FLOAT8, "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {**config, "quantization_config": {**config["quantization_config"], "kv_cache_scheme": scheme}}


CACHE = CacheEncoding(
    "fp8",
    ActivationScale("k_scale", "BF16", _scale_of_floats),
    ActivationScale("v_scale", "BF16", _scale_of_floats),
    _with_cache,
)


# ---- integers

GROUPS = (128, 64, 32)
"""Group sizes of packed codes, the default first."""


def _integers(bits: int, **arguments: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", **arguments}


def _fill_integers(
    spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows, *, bits: int = 8, group: int = 0, packed: bool = False
) -> None:
    """Codes with scales of groups, or of rows if there is no group; packed, with an offset and the shape. NaN becomes 0."""
    from weightsmith._kernels.codes import quantise_integers

    wide, offset = group or rows.shape[1], 2 ** (bits - 1) if packed else 0
    scales = bf16_scales(maxima_of(rows, 1, wide), 2 ** (bits - 1) - 0.5, outs[1])
    quantise_integers(rows.reshape(-1), wide, scales, bits, offset, outs[0])
    if packed:
        outs[2][:] = np.array(spec.shape, "<i8").view(np.uint8)


INT8 = compressed(
    "int8", "int-quantized", _integers(8, strategy="channel"), _fill_integers, activations=_integers(8, strategy="token")
)


@dataclass(frozen=True, slots=True)
class _Packed(MatrixEncoding):
    """Packed codes, which may be chosen for the inputs of a weight. Without a group, a row has one scale."""

    hessian: ClassVar[HessianForm] = "sorted"
    scaled: ClassVar[bool] = True
    looked_up: ClassVar[bool] = True

    def refusal(self, spec: TensorSpec) -> str:
        return matrix_refusal(spec, self.group or 32 // int(self.bits))

    def quantise(self, weight: Rows | Unread, hessian: Rows | FactoredHessian | None, threads: int) -> Arrays:
        assert not isinstance(hessian, np.ndarray)
        return quantise_groups(weight, hessian, int(self.bits), self._arrays)

    def _arrays(self, weight: Rows, codes_of: CodesOf | None) -> Arrays:
        from weightsmith._kernels.codes import quantise_integers

        (rows, cols), bits, group = weight.shape, int(self.bits), self.group or weight.shape[1]
        words, maxima = np.empty((rows, cols * bits // 32), "<i4"), maxima_of(weight, 1, group)

        def scales_of(share: np.float32) -> Rows:
            return bf16_scales(maxima * share, 2 ** (bits - 1) - 0.5, np.empty(2 * maxima.size, np.uint8)).reshape(rows, -1)

        scales = scales_of(np.float32(1)) if codes_of is None else codes_of.narrowed_scales(weight, scales_of)
        stored = scales.astype(DTYPES["BF16"].numpy)
        if codes_of is not None:
            weight, scales = codes_of(weight, scales), np.ones_like(scales)
        quantise_integers(
            weight.reshape(-1), group, scales.reshape(-1), bits, 2 ** (bits - 1), words.reshape(-1).view(np.uint8)
        )
        return words, stored, np.array(weight.shape, np.int64)

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Rows:
        from weightsmith._kernels.codes import TABLES, dequantise

        (words, scales, _), group = arrays, self.group or shape[1]
        values, cols = np.empty(shape, np.float32), shape[1]
        codes, factors = np.array(words).reshape(-1).view(np.uint8), scales.astype(np.float32).reshape(-1)
        table = TABLES[f"offset{self.bits}"]
        dequantise(codes, table, 0, cols, factors, cols // group, 1, group, values.reshape(-1))
        return values


def packed(bits: int) -> dict[int, MatrixEncoding]:
    """w4a16 or w8a16, by group size."""

    def encoding(group: int) -> MatrixEncoding:
        weights = _integers(bits, strategy="group", group_size=group)
        fill = partial(_fill_integers, bits=bits, group=group, packed=True)
        return compressed(f"w{bits}a16", "pack-quantized", weights, fill, of=_Packed, groups=GROUPS)

    return {group: encoding(group) for group in GROUPS}


def packed_rows(bits: int) -> MatrixEncoding:
    """w4a16-channel or w8a16-channel."""
    fill = partial(_fill_integers, bits=bits, packed=True)
    return compressed(f"w{bits}a16-channel", "pack-quantized", _integers(bits, strategy="channel"), fill, of=_Packed)


# ---- 4-bit floats (E2M1)

_LARGEST = np.float32(448 * 6)
_SCALE_OF_ZEROS = np.float32(0.125)
"""compressed-tensors' scale where the quotient is rounded to zero: e4m3's epsilon."""


def _fill_nvfp4(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0.

    numbers  float32 [1]: the largest magnitude of the weight, and of those it is joined with
    """
    from weightsmith._kernels import codecs
    from weightsmith._kernels.codes import quantise_float4

    with np.errstate(all="ignore"):
        whole = np.float32(1) if numbers[0] == 0 else min(_LARGEST / numbers[0], np.finfo(np.float32).max)
        local = np.minimum(whole * maxima_of(rows, 1, NVFP4_GROUP) / np.float32(6), np.float32(448))
    e4m3 = DTYPES["F8_E4M3"].code
    codecs.encode(local, local.size, e4m3, 0, outs[1])
    codecs.decode(outs[1], e4m3, 0, local.size, local)
    local[local == 0] = _SCALE_OF_ZEROS
    codecs.encode(local, local.size, e4m3, 0, outs[1])
    with np.errstate(all="ignore"):
        quantise_float4(rows.reshape(-1), NVFP4_GROUP, local / whole, outs[0])
    outs[2][:] = np.array([whole], "<f4").view(np.uint8)


def _fill_mxfp4(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0."""
    from weightsmith._kernels.codes import quantise_float4

    quantise_float4(rows.reshape(-1), MXFP4_GROUP, mx_scales(rows, 2, outs[1]), outs[0])


def _fill_mxfp8(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN stays NaN."""
    from weightsmith._kernels.codes import quantise_float8

    quantise_float8(rows.reshape(-1), rows.shape[1], 1, MXFP4_GROUP, mx_scales(rows, 8, outs[1]), outs[0])


def _floats(bits: int, strategy: str, group: int, scale: str) -> dict[str, Any]:
    dtypes = {"scale_dtype": scale, "zp_dtype": scale}
    return {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group, **dtypes}


def _scale_of_float4s(largest: float) -> npt.NDArray[Any]:
    """1 where the quotient is not a number of float32, as in compressed-tensors."""
    with np.errstate(all="ignore"):
        scale = np.float32(448 * 6) / np.array([largest], np.float32)
    return np.where(np.isfinite(scale), scale, np.float32(1)).astype(np.float32)


def _nvfp4(family: str, **fields: Any) -> MatrixEncoding:
    scale = DTYPES["F8_E4M3"]
    return compressed(family, "nvfp4-pack-quantized", _NVFP4, _fill_nvfp4, scale=scale, maxima=True, **fields)


_NVFP4 = _floats(4, "tensor_group", NVFP4_GROUP, "torch.float8_e4m3fn")
NVFP4A16 = _nvfp4("nvfp4a16")
NVFP4 = _nvfp4(
    "nvfp4",
    activations={**_NVFP4, "dynamic": "local"},
    inputs=ActivationScale("input_global_scale", "F32", _scale_of_float4s),
)
_MXFP4 = _floats(4, "group", MXFP4_GROUP, "torch.uint8")
MXFP4 = compressed("mxfp4", "mxfp4-pack-quantized", _MXFP4, _fill_mxfp4, scale=DTYPES["U8"])
_MXFP8 = _floats(8, "group", MXFP4_GROUP, "torch.uint8")
MXFP8 = compressed("mxfp8", "mxfp8-quantized", _MXFP8, _fill_mxfp8, scale=DTYPES["U8"], activations=_MXFP8)


# ---- weights that an output may have as a file has them

_ALONE = (*packed(4).values(), *packed(8).values(), packed_rows(4), packed_rows(8), INT8, DYNAMIC, BLOCK, MXFP4, MXFP8)
"""The encodings of weights that share no scale with others."""


def stored_by(weight: ScaledWeight, stored: Sequence[TensorSpec]) -> str:
    """The encoding that stores a weight in these tensors, by its name; "" if none does."""
    if len(weight.spec.shape) != 2:
        return ""
    rows, cols = weight.spec.shape
    blocks = ((one, (min(one.align_rows, rows), min(one.group or cols, cols))) for one in _ALONE)
    return encoding_of(weight.spec, stored, (one for one, block in blocks if block == weight.block))
