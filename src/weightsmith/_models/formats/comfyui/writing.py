"""The encodings, of the matrices in the blocks of single files."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.comfyui.layout import (
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
    bf16_scales,
    matrix_refusal,
    maxima_of,
    mx_scales,
)
from weightsmith._models.structure.parts import DIFFUSION
from weightsmith._plans import PLAIN, PlanDraft
from weightsmith.abc.stored import Bytes, Encoding, Kind, Rows, Writing

FP8, OLD_FP8 = "comfyui-fp8", "comfyui-fp8-old"
_LONG_PREFIXES = ("model.model.", "net.")
_MODEL = "model."
_LEAST_NAMES = 6
"""Names that a prefix of `_LONG_PREFIXES` needs: with fewer, ComfyUI takes `_MODEL`."""
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
class _OfBlocks(Encoding):
    """What the encodings have in common.

    family  its name
    """

    family: str

    @property
    def name(self) -> str:
        return self.family

    @property
    def scale(self) -> DType:
        return F32

    @property
    def of_blocks(self) -> bool:
        return True

    @abstractmethod
    def _parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors of a weight that is accepted."""

    def refusal(self, spec: TensorSpec) -> str:
        return matrix_refusal(spec)

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        return self._parts(spec)


def _part(spec: TensorSpec, end: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(spec.name.removesuffix(WEIGHT) + end, DTYPES[dtype], shape)


def _stated(format_: str) -> Bytes:
    """The bytes of X.comfy_quant, as ComfyUI writes it."""
    return np.frombuffer(json.dumps({"format": format_}).encode(), np.uint8)


@dataclass(frozen=True, slots=True)
class ScaledFloats(_OfBlocks):
    """8-bit floats with one scale.

    old     under the older names
    marker  the tensor that one weight of the file stores beside its own: it says that there are older names
    """

    old: bool = False
    marker: str = ""

    @property
    def name(self) -> str:
        return f"{self.family} {self.marker}".rstrip()

    @property
    def kind(self) -> Kind:
        return "float"

    @property
    def bits(self) -> float:
        return 8

    @property
    def whole(self) -> int:
        return 1 if self.old and not self.marker else 2

    @property
    def maxima(self) -> bool:
        return True

    def _parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        float8 = "F8_E4M3"
        codes, scale = _part(spec, WEIGHT, float8, spec.shape), _part(spec, OLD_SCALE if self.old else SCALE, "F32", ())
        if not self.old:
            return codes, scale, _part(spec, SETTINGS, "U8", _stated("float8_e4m3fn").shape)
        return (codes, scale, TensorSpec(self.marker, DTYPES[float8], (2,))) if self.marker else (codes, scale)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        from weightsmith._kernels.codes import quantise_float8

        high, wide = rows.shape
        scales = bf16_scales(numbers, _LARGEST_CODE, np.empty(2, np.uint8))
        quantise_float8(rows.reshape(-1), wide, high, wide, scales, outs[0])
        outs[1][:] = scales.astype("<f4").view(np.uint8)
        if not self.old:
            outs[2][:] = _stated("float8_e4m3fn")
        elif self.marker:
            outs[2][:] = 0


@dataclass(frozen=True, slots=True)
class RowIntegers(_OfBlocks):
    """8-bit integers with a scale for each row."""

    @property
    def kind(self) -> Kind:
        return "integer"

    @property
    def bits(self) -> float:
        return 8

    @property
    def whole(self) -> int:
        return 1

    def _parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        settings = _part(spec, SETTINGS, "U8", _stated("int8_tensorwise").shape)
        return _part(spec, WEIGHT, "I8", spec.shape), _part(spec, SCALE, "F32", (spec.shape[0], 1)), settings

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        from weightsmith._kernels.codes import quantise_integers

        scales = bf16_scales(maxima_of(rows, 1, rows.shape[1]), 127, np.empty(2 * len(rows), np.uint8))
        quantise_integers(rows.reshape(-1), rows.shape[1], scales, 8, 0, outs[0])
        outs[1][:] = scales.astype("<f4").view(np.uint8)
        outs[2][:] = _stated("int8_tensorwise")


@dataclass(frozen=True, slots=True)
class _Tiled(_OfBlocks):
    """Floats with a scale for each group of a row, in the order of tiles. Other rows would be filled up, and programs that do
    not know the shape of the model could not tell."""

    @property
    def kind(self) -> Kind:
        return "float"

    @property
    def align_rows(self) -> int:
        return TILE_ROWS

    def refusal(self, spec: TensorSpec) -> str:
        group = self.group or 1
        if why := matrix_refusal(spec, group):
            return why
        return f"its outputs are {spec.shape[0]:,}, not a multiple of {group}" if spec.shape[0] % group else ""


@dataclass(frozen=True, slots=True)
class TiledFloat4(_Tiled):
    """4-bit floats, a scale for 16 of a row, and one for the weight."""

    @property
    def bits(self) -> float:
        return 4

    def refusal(self, spec: TensorSpec) -> str:
        if _MEASURED.search(spec.name):
            return "ComfyUI finds the width of a model in the shape of this weight"
        return _Tiled.refusal(self, spec)

    @property
    def group(self) -> int:
        return NVFP4_GROUP

    @property
    def whole(self) -> int:
        return 2

    @property
    def maxima(self) -> bool:
        return True

    def _parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, cols = spec.shape
        return (
            _part(spec, WEIGHT, "U8", (rows, cols // 2)),
            _part(spec, SCALE, "F8_E4M3", tiled_shape(rows, cols // NVFP4_GROUP)),
            _part(spec, FACTOR, "F32", ()),
            _part(spec, SETTINGS, "U8", _stated("nvfp4").shape),
        )

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
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
        outs[3][:] = _stated("nvfp4")


@dataclass(frozen=True, slots=True)
class TiledFloat8(_Tiled):
    """8-bit floats, and a power of two for 32 of a row."""

    @property
    def bits(self) -> float:
        return 8

    @property
    def group(self) -> int:
        return MXFP4_GROUP

    @property
    def whole(self) -> int:
        return 1

    def _parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, cols = spec.shape
        return (
            _part(spec, WEIGHT, "F8_E4M3", (rows, cols)),
            _part(spec, SCALE, "U8", tiled_shape(rows, cols // MXFP4_GROUP)),
            _part(spec, SETTINGS, "U8", _stated("mxfp8").shape),
        )

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        """NaN stays NaN."""
        from weightsmith._kernels.codes import quantise_float8

        stored = np.empty(rows.size // MXFP4_GROUP, np.uint8)
        quantise_float8(rows.reshape(-1), rows.shape[1], 1, MXFP4_GROUP, mx_scales(rows, 8, stored, _ABOVE_448), outs[0])
        outs[1][:] = to_tiles(stored.reshape(len(rows), -1))
        outs[2][:] = _stated("mxfp8")


def find(name: str) -> Encoding | None:
    """The encoding of a name with a marker. Raises ValueError for one that ComfyUI does not look for."""
    family, _, marker = name.partition(" ")
    if family != OLD_FP8 or not marker:
        return None
    if not _MARKERS.fullmatch(marker):
        raise ValueError(marker)
    return ScaledFloats(OLD_FP8, old=True, marker=marker)


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
    marked = ScaledFloats(OLD_FP8, old=True, marker=f"{prefix}{MARKER}")
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


WRITES = (
    _writing(ScaledFloats(FP8), "8-bit floats with a scale for each weight of a single file's blocks"),
    _writing(ScaledFloats(OLD_FP8, old=True), f"{FP8} under the names of 2025: scale_weight"),
    _writing(RowIntegers("comfyui-int8"), f"8-bit integers with a scale for each row, of the weights of {FP8}"),
    _writing(TiledFloat8("comfyui-mxfp8"), f"8-bit floats with a power of two for 32 elements, of the weights of {FP8}"),
    _writing(TiledFloat4("comfyui-nvfp4"), f"4-bit floats with a scale for 16 elements, of the weights of {FP8}"),
)
