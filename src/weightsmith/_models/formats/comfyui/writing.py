"""The encodings, of the matrices in the blocks of single files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.comfyui.reading import (
    FACTOR,
    MARKER,
    OLD_SCALE,
    SCALE,
    SETTINGS,
    TILE_ROWS,
    TITLE,
    WEIGHT,
    swapped,
    tiled_shape,
    to_tiles,
)
from weightsmith._models.formats.decoded import F32
from weightsmith._models.formats.matrices import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    MatrixEncoding,
    bf16_scales,
    matrix_refusal,
    maxima_of,
    mx_scales,
)
from weightsmith._models.structure.parts import DIFFUSION
from weightsmith._plans import PLAIN, PlanDraft
from weightsmith.abc.stored import Bytes, Encoding, Rows, Writing

FP8, OLD_FP8 = "comfyui-fp8", "comfyui-fp8-old"
_LONG_PREFIXES = ("model.model.", "net.")
_MODEL = "model."
_LEAST_NAMES = 6
"""Names that must have a prefix of `_LONG_PREFIXES`: with fewer, ComfyUI takes `_MODEL`."""
_MARKERS = re.compile(rf"({'|'.join(map(re.escape, (DIFFUSION, *_LONG_PREFIXES, _MODEL)))})?{MARKER}")
_LANGUAGE_MODEL = re.compile(r"model\.(?:language_model\.)?(?:embed_tokens\.|layers\.\d+\.(?:self_attn|mlp)\.)")
"""Names of language models that diffusion models have as text encoders."""
_MEASURED = re.compile(
    r"(^|\.)transformer(_blocks\.0\.attn2\.to_k|\.layers\.0\.(self_attn\.to_qkv|to_local_embed\.0))\.weight$"
)
"""Weights in blocks whose columns `detect_unet_config` of ComfyUI 0.38 counts: of UNets, LTX and Stable Audio. Packed codes
have half as many columns."""
_LARGEST_CODE = 448
_ABOVE_448 = 0x600001
"""Bits of the significand of a magnitude that needs the next power of two, as in ComfyUI: 448 times one needs none."""


@dataclass(frozen=True, slots=True)
class BlockEncoding(MatrixEncoding):
    """An encoding of the matrices in the blocks of single files."""

    of_blocks: ClassVar[bool] = True

    def refusal(self, spec: TensorSpec) -> str:
        """Outputs, too, are a multiple of the group: ComfyUI fills others up, and programs that do not know the shape of the
        model could not tell."""
        if self.bits == 4 and _MEASURED.search(spec.name):
            return "ComfyUI finds the width of a model in the shape of this weight"
        group = self.group or 1
        if why := matrix_refusal(spec, group):
            return why
        return f"its outputs are {spec.shape[0]:,}, not a multiple of {group}" if spec.shape[0] % group else ""


Parts = Callable[[TensorSpec], tuple[TensorSpec, ...]]
Fill = Callable[[TensorSpec, Rows, Sequence[Bytes], Rows], None]


def _encoding(family: str, parts: Parts, fill: Fill, **fields: Any) -> BlockEncoding:
    """An encoding without config.json. parts, fill, fields: see `MatrixEncoding`."""
    return BlockEncoding(family, parts, fill, lambda ignored: {}, scale=F32, **fields)


def _stating(family: str, format_: str, parts: Parts, fill: Fill, *, whole: int, **fields: Any) -> BlockEncoding:
    """An encoding that stores X.comfy_quant after other tensors, as ComfyUI writes it. parts, fill, whole: of the others."""
    statement = np.frombuffer(json.dumps({"format": format_}).encode(), np.uint8)
    stating = partial(_parts_stating, parts, statement.size), partial(_fill_stating, fill, statement)
    return _encoding(family, *stating, whole=whole + 1, **fields)


def _parts_stating(parts: Parts, size: int, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    return *parts(spec), _part(spec, SETTINGS, "U8", (size,))


def _fill_stating(fill: Fill, statement: Bytes, spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    fill(spec, rows, outs[:-1], numbers)
    outs[-1][:] = statement


def _part(spec: TensorSpec, end: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(spec.name.removesuffix(WEIGHT) + end, DTYPES[dtype], shape)


# ---- 8-bit floats with one scale


def _floats(spec: TensorSpec, *, scale: str = SCALE, marker: str = "") -> tuple[TensorSpec, ...]:
    """marker: the tensor that one weight of a file stores beside its own. It says that scales have the older names."""
    codes = _part(spec, WEIGHT, "F8_E4M3", spec.shape), _part(spec, scale, "F32", ())
    return (*codes, TensorSpec(marker, DTYPES["F8_E4M3"], (2,))) if marker else codes


def _fill_floats(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    from weightsmith._kernels.codes import quantise_float8

    high, wide = rows.shape
    scales = bf16_scales(numbers, _LARGEST_CODE, np.empty(2, np.uint8))
    quantise_float8(rows.reshape(-1), wide, high, wide, scales, outs[0])
    outs[1][:] = scales.astype("<f4").view(np.uint8)
    for marker in outs[2:]:
        marker[:] = 0


@cache
def _older(marker: str = "") -> BlockEncoding:
    """The encoding under the older names; the one that stores a marker has it in its name."""
    name, parts = f"{OLD_FP8} {marker}".rstrip(), partial(_floats, scale=OLD_SCALE, marker=marker)
    return _encoding(name, parts, _fill_floats, kind="float", bits=8, whole=2 if marker else 1, maxima=True)


# ---- 8-bit integers with a scale for each row


def _integers(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    return _part(spec, WEIGHT, "I8", spec.shape), _part(spec, SCALE, "F32", (spec.shape[0], 1))


def _fill_integers(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    from weightsmith._kernels.codes import quantise_integers

    scales = bf16_scales(maxima_of(rows, 1, rows.shape[1]), 127, np.empty(2 * len(rows), np.uint8))
    quantise_integers(rows.reshape(-1), rows.shape[1], scales, 8, 0, outs[0])
    outs[1][:] = scales.astype("<f4").view(np.uint8)


# ---- 4-bit floats, a scale for 16 of a row, and one for the weight


def _floats4(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    rows, cols = spec.shape
    return (
        _part(spec, WEIGHT, "U8", (rows, cols // 2)),
        _part(spec, SCALE, "F8_E4M3", tiled_shape(rows, cols // NVFP4_GROUP)),
        _part(spec, FACTOR, "F32", ()),
    )


def _fill_floats4(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN becomes 0."""
    from weightsmith._kernels import codecs
    from weightsmith._kernels.codes import quantise_float4

    factor = bf16_scales(numbers, _LARGEST_CODE * 6, np.empty(2, np.uint8))
    with np.errstate(all="ignore"):
        local = np.minimum(maxima_of(rows, 1, NVFP4_GROUP) / np.float32(6) / factor, np.float32(_LARGEST_CODE))
    stored, e4m3 = np.empty(local.size, np.uint8), DTYPES["F8_E4M3"].code
    codecs.encode(local, local.size, e4m3, 0, stored)
    codecs.decode(stored, e4m3, 0, local.size, local)
    scales = local * factor
    scales[local == 0] = np.inf  # the codes of such a group are 0
    quantise_float4(rows.reshape(-1), NVFP4_GROUP, scales, outs[0])
    outs[0][:] = swapped(outs[0])
    outs[1][:] = to_tiles(stored.reshape(len(rows), -1))
    outs[2][:] = factor.astype("<f4").view(np.uint8)


# ---- 8-bit floats, and a power of two for 32 of a row


def _floats8(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    rows, cols = spec.shape
    return _part(spec, WEIGHT, "F8_E4M3", (rows, cols)), _part(spec, SCALE, "U8", tiled_shape(rows, cols // MXFP4_GROUP))


def _fill_floats8(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
    """NaN stays NaN."""
    from weightsmith._kernels.codes import quantise_float8

    stored = np.empty(rows.size // MXFP4_GROUP, np.uint8)
    quantise_float8(rows.reshape(-1), rows.shape[1], 1, MXFP4_GROUP, mx_scales(rows, 8, stored, _ABOVE_448), outs[0])
    outs[1][:] = to_tiles(stored.reshape(len(rows), -1))


# ---- names, and the marker of a file


def find(name: str) -> Encoding | None:
    """The encoding of a name with a marker. Raises ValueError for one that ComfyUI does not look for."""
    family, _, marker = name.partition(" ")
    if family != OLD_FP8 or not marker:
        return None
    if not _MARKERS.fullmatch(marker):
        raise ValueError(marker)
    return _older(marker)


def _mark(draft: PlanDraft) -> None:
    """Let the first encoded weight store the marker, too. Raises Unsupported where the prefix cannot be told."""
    encoded = [k for k, step in enumerate(draft.steps) if step.encoding == OLD_FP8]
    stored = [spec.name for step in draft.steps for spec in step.outs]
    prefix = _marker_prefix(stored)
    outside = [name for name in (draft.steps[k].out.name for k in encoded) if not name.startswith(prefix)]
    if outside:
        what = f"ComfyUI reads this model by the prefix {show(prefix)}, and {show(outside[0])} does not begin with it"
        raise Unsupported(what, where="quantize", fix=f"write {FP8}")
    step = draft.steps[encoded[0]]
    marked = _older(f"{prefix}{MARKER}")
    draft.steps[encoded[0]] = replace(step, encoding=marked.name, stored=marked.outs(step.out))


def _marker_prefix(names: Sequence[str]) -> str:
    """The prefix under which ComfyUI looks for the marker in a file with tensors of these names; "" for none.

    >>> _marker_prefix(["model.single_layers.0.attn.w1q.weight"]), _marker_prefix(["model.layers.0.mlp.up_proj.weight"])
    ('model.', '')
    """
    if any(name.startswith(DIFFUSION) for name in names):
        return DIFFUSION
    if any(map(_LANGUAGE_MODEL.match, names)):
        return ""
    counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in _LONG_PREFIXES}
    most = max(counts, key=lambda prefix: counts[prefix])
    if counts[most] >= _LEAST_NAMES:
        return most
    return _MODEL if any(name.startswith(_MODEL) for name in names) else ""


def _adapt(draft: PlanDraft, encoding: Encoding) -> None:
    """Refuse older names beside newer ones; let the first weight under the older ones store the marker."""
    names = {step.encoding for step in draft.steps} - {PLAIN}
    if OLD_FP8 not in names:
        return
    if len(names) > 1:
        what = f"{OLD_FP8} marks the whole file, and cannot be mixed with {', '.join(sorted(names - {OLD_FP8}))}"
        raise Unsupported(what, where="quantize", fix=f"write {FP8}")
    _mark(draft)


def _writing(encoding: Encoding, summary: str) -> Writing:
    return Writing(encoding.name, summary, TITLE, {0: encoding}, _adapt)


_FP8 = _stating(FP8, "float8_e4m3fn", _floats, _fill_floats, kind="float", bits=8, whole=1, maxima=True)
_INT8 = _stating("comfyui-int8", "int8_tensorwise", _integers, _fill_integers, kind="integer", bits=8, whole=0)
_TILED: Mapping[str, Any] = {"kind": "float", "align_rows": TILE_ROWS}
_MXFP8 = _stating("comfyui-mxfp8", "mxfp8", _floats8, _fill_floats8, bits=8, group=MXFP4_GROUP, whole=0, **_TILED)
_NVFP4 = _stating("comfyui-nvfp4", "nvfp4", _floats4, _fill_floats4, bits=4, group=NVFP4_GROUP, whole=1, maxima=True, **_TILED)

WRITES = (
    _writing(_FP8, "8-bit floats with a scale for each weight of a single file's blocks"),
    _writing(_older(), f"{FP8} under the names of 2025: scale_weight"),
    _writing(_INT8, f"8-bit integers with a scale for each row, in the weights of {FP8}"),
    _writing(_MXFP8, f"8-bit floats with a power of two for 32 elements, in the weights of {FP8}"),
    _writing(_NVFP4, f"4-bit floats with a scale for 16 elements, in the weights of {FP8}"),
)
