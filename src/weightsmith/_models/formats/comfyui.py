"""ComfyUI's scaled weights: 8-bit floats and integers, in single files and folders. They are read; two are written.

X.weight        F8_E4M3, F8_E5M2 or I8, of any shape; floats also as U8
X.weight_scale  by which codes are multiplied: [] or [1] of the weight, [rows] or [rows, 1] of rows, [rows, groups, 1] of groups
                of a row, [rows / n, cols / n] of blocks
X.comfy_quant   U8: JSON with the format, and n as group_size. A file's metadata may have these in place of the tensors:
                _quantization_metadata → layers → X

Older files, and musubi-tuner's, have X.scale_weight and X.scale_input in place of X.weight_scale and X.input_scale, a tensor
`scaled_fp8` of no meaning, and no JSON. 8-bit floats without a scale are numbers. Scales of inputs are dropped.

Weights that are rotated or whose scales are stored in the order of a GPU's tiles (nvfp4, mxfp8) are refused.

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

**The scale has a value of bfloat16.** ComfyUI rounds it to the dtype that it computes in, when it decodes a weight.

**Error.** For every finite x of a weight with the scale s, |code · s - x| ≤ 2^-4 · |x| + 2^-10 · s: half a unit in the last
place of a 4-bit significand, or half the spacing of e4m3's subnormals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPES, DType, TensorSpec
from weightsmith._models.formats.config import config_entries, dropped_scales, method_of, plain_dtype, without_entries
from weightsmith._models.formats.decoded import F32, DecodedTensors, QuantisedModel, read_json
from weightsmith._models.formats.matrices import bf16_scales, matrix_refusal
from weightsmith._models.formats.scaled import FLOATS, ScaledWeight
from weightsmith._models.structure.parts import DIFFUSION
from weightsmith._plans import PlanDraft
from weightsmith.abc.stored import Bytes, Config, Encoding, Kind, Rows, Specs, StoredFormat, Wrapped, Writing, labelled
from weightsmith.abc.tensors import Tensors

METHOD = "comfyui"
_TITLE = "ComfyUI"
_WEIGHT, _SETTINGS = ".weight", ".comfy_quant"
_SCALE, _OLD_SCALE = ".weight_scale", ".scale_weight"
_INPUT_SCALES = (".input_scale", ".scale_input")
_MARKER = "scaled_fp8"
_FOREIGN = (".weight_scale_2", ".pre_quant_scale", ".weight_zeros")
_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What names of tensors may begin with in a file, and names in its metadata may not."""

_KINDS = {"F8_E4M3": "float8", "F8_E5M2": "wide8", "I8": "int8"}
"""dtype of codes → their kind, as `kernels.codes.TABLES` names it."""
_FORMATS = {
    "float8_e4m3fn": ("float8", ("F8_E4M3", "U8")),
    "float8_e4m3fn_rowwise": ("float8", ("F8_E4M3", "U8")),
    "float8_e4m3fn_blockwise": ("float8", ("F8_E4M3", "U8")),
    "float8_e4m3fn_block3d": ("float8", ("F8_E4M3", "U8")),
    "float8_e5m2": ("wide8", ("F8_E5M2", "U8")),
    "int8_tensorwise": ("int8", ("I8",)),
    "int8_blockwise": ("int8", ("I8",)),
}
"""Format → kind of its codes, and the dtypes that they are stored as."""
_READ_KEYS = ("format", "orig_dtype", "group_size", "params")
_HARMLESS_KEYS = ("full_precision_matrix_mult", "orig_shape", "per_row")
_MAX_GROUP = 1 << 24


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the file says of one weight.

    format      "" in older files: the dtype of the codes tells
    group_size  rows and columns of a block; 0 if nothing is said
    dtype       before it was quantised; None if nothing is said
    """

    format: str = ""
    group_size: int = 0
    dtype: DType | None = None


def recognises(config: Config, specs: Specs) -> bool:
    if config_entries(config):
        return method_of(config) == METHOD and any(map(_may_be_codes, specs.values()))
    return any(name.endswith(_SETTINGS) or _is_old_scale(name, specs) for name in specs)


def _may_be_codes(spec: TensorSpec) -> bool:
    return spec.name.endswith(_WEIGHT) and spec.dtype.name in (*_KINDS, "U8")


def _is_old_scale(name: str, specs: Specs) -> bool:
    weight = specs.get(name.removesuffix(_OLD_SCALE) + _WEIGHT)
    return name.endswith(_OLD_SCALE) and weight is not None and weight.dtype.name in _KINDS


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    model = QuantisedModel(stored, config, where)
    weights = [_weight(model, module, settings) for module, settings in _modules(model).items()]
    hidden = [name for name in model.specs if name.endswith(_SETTINGS) or name.rpartition(".")[2] == _MARKER]
    scales = [name for name in model.specs if name.endswith(_INPUT_SCALES)]
    _check_others(model, weights)
    source = DecodedTensors(stored, weights, [*hidden, *scales], where)
    return Wrapped(source, without_entries(config), tuple(dropped_scales(scales, where)))


def _modules(model: QuantisedModel) -> dict[str, _Settings]:
    """The modules with codes, and what the file says of each."""
    by_module: dict[str, _Settings] = {}
    layers = model.entry.get("layers", {})
    if not isinstance(layers, Mapping):
        raise model.damaged(f"layers in _quantization_metadata is {show(layers)}, not an object")
    for name, settings in layers.items():
        by_module[_module_of(model, name)] = _settings(model, name, settings)
    for name in model.specs:
        if name.endswith(_SETTINGS):
            settings = read_json(model.stored, name, model.where, "the formats of ComfyUI's weights")
            by_module[name.removesuffix(_SETTINGS)] = _settings(model, name, settings)
        elif name.endswith(_OLD_SCALE):
            by_module.setdefault(name.removesuffix(_OLD_SCALE), _Settings())
    return by_module


def _module_of(model: QuantisedModel, layer: str) -> str:
    """The module that the metadata names, under the name that the tensors have."""
    names = [layer, *(prefix + layer for prefix in _PREFIXES), *(layer.removeprefix(prefix) for prefix in _PREFIXES)]
    module = next((name for name in names if name + _WEIGHT in model.specs), None)
    if module is None:
        raise model.damaged(f"_quantization_metadata names {show(layer)}, and there is no tensor {show(layer + _WEIGHT)}")
    return module


def _settings(model: QuantisedModel, name: str, stated: object) -> _Settings:
    """Settings of a weight from their JSON, each known. name: of their tensor, or of the layer in the metadata."""
    if not isinstance(stated, Mapping):
        raise model.damaged(f"the settings of {show(name)} are {show(stated)}, not an object")
    nested = stated.get("params")
    values = {**nested, **stated} if isinstance(nested, Mapping) else stated
    for key, value in values.items():
        if key not in (*_READ_KEYS, *_HARMLESS_KEYS) and value not in (None, False):
            what = f"ComfyUI's weights with {show(key)} {show(value)} are not read: it may change the numbers"
            raise model.unsupported(f"{what} ({show(name)})")
    format_ = values.get("format")
    if not isinstance(format_, str) or format_ not in _FORMATS:
        what = f"ComfyUI's weights in the format {show(format_)} are not read, only {', '.join(_FORMATS)} ({show(name)})"
        raise model.unsupported(what)
    group = values.get("group_size") or 0
    if type(group) is not int or not 0 <= group <= _MAX_GROUP:
        raise model.damaged(f"group_size of {show(name)} is {show(group)}, not a whole number from 1")
    dtype = values.get("orig_dtype")
    known = BY_TORCH_NAME.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
    return _Settings(format_, group, known if known is not None and known.name in FLOATS else None)


def _weight(model: QuantisedModel, module: str, settings: _Settings) -> ScaledWeight:
    specs = model.specs
    codes = specs.get(module + _WEIGHT)
    scales = [specs[module + end] for end in (_SCALE, _OLD_SCALE) if module + end in specs]
    if codes is None or len(scales) != 1:
        what = f"it has {len(scales)} scales, and a quantised weight needs a tensor of codes and one scale"
        raise model.damaged(f"tensor {show(module + _WEIGHT)} is missing" if codes is None else f"{show(codes.name)}: {what}")
    kind, dtypes = _FORMATS.get(settings.format, (_KINDS.get(codes.dtype.name, ""), tuple(_KINDS)))
    if codes.dtype.name not in dtypes or not codes.shape:
        what = f"tensor {show(codes.name)} is {list(codes.shape)} {codes.dtype}, and has the scale {show(scales[0].name)}"
        raise model.unsupported(f"{what}: only codes of {', '.join(dtypes)} are read")
    if scales[0].dtype.name not in FLOATS:
        raise model.unsupported(f"scale {show(scales[0].name)} is {scales[0].dtype}, and only {', '.join(FLOATS)} are read")
    default = scales[0].dtype if scales[0].dtype.itemsize == 2 else plain_dtype(model.config)
    block = _block(model, codes, scales[0], settings.group_size)
    spec = TensorSpec(codes.name, F32, codes.shape)
    return ScaledWeight(spec, (codes.name, scales[0].name), settings.dtype or default, kind, block)


def _block(model: QuantisedModel, codes: TensorSpec, scale: TensorSpec, group: int) -> tuple[int, int]:
    """Rows and columns that share a scale, from the shape of the scales. All dimensions but the last count as rows."""
    cols, outputs = codes.shape[-1], codes.shape[0]
    rows = math.prod(codes.shape[:-1])
    for high, wide, shapes in _structures(rows, cols, outputs, scale, group):
        if scale.shape in shapes and high and wide:
            return high, wide
    what = f"scale {show(scale.name)} of {show(codes.name)} {list(codes.shape)} is {list(scale.shape)}"
    raise model.unsupported(f"{what}: it is not one number for the weight, a row, a group of a row, or a square block")


def _structures(
    rows: int, cols: int, outputs: int, scale: TensorSpec, group: int
) -> Iterator[tuple[int, int, tuple[tuple[int, ...], ...]]]:
    """The possible blocks, each as rows, columns, and the shapes that its scales may have."""
    shape = scale.shape
    yield max(rows, 1), max(cols, 1), ((), (1,) * len(shape))
    if group:
        yield group, group, ((-(-rows // group), -(-cols // group)),)
    if outputs:
        yield rows // outputs, cols, ((outputs,), (outputs,) + (1,) * (len(shape) - 1))
    if len(shape) == 3 and shape[1] and cols % shape[1] == 0:
        yield 1, cols // shape[1], ((rows, shape[1], 1),)
    if len(shape) == 2 and not group and all(shape) and rows % shape[0] == cols % shape[1] == 0:
        high, wide = rows // shape[0], cols // shape[1]
        # Powers of two alone: blocks of 128 of which the last is smaller may look like another size, never like one of these.
        if high == wide and high & (high - 1) == 0:
            yield high, wide, (shape,)


def _check_others(model: QuantisedModel, weights: list[ScaledWeight]) -> None:
    """Nothing else may be part of a quantised weight: a scale without a format is one that ComfyUI ignores."""
    used = {name for weight in weights for name in weight.stored}
    for name in model.specs:
        if name.endswith(_FOREIGN) or (name.endswith((_SCALE, _OLD_SCALE)) and name not in used):
            raise model.unsupported(f"tensor {show(name)} is part of a weight that is not read")


# ---- writing

_NAME, _OLD_NAME = "comfyui-fp8", "comfyui-fp8-old"
_STATED = np.frombuffer(b'{"format": "float8_e4m3fn"}', np.uint8)
_LONG_PREFIXES = ("model.model.", "net.")
_MODEL = "model."
_LEAST_NAMES = 6
"""Names that a prefix of `_LONG_PREFIXES` needs: with fewer, ComfyUI takes `_MODEL`."""
_MARKERS = re.compile(rf"({'|'.join(map(re.escape, (DIFFUSION, *_LONG_PREFIXES, _MODEL)))})?{_MARKER}")
_LANGUAGE_MODEL = re.compile(r"model\.(?:language_model\.)?(?:embed_tokens\.|layers\.\d+\.(?:self_attn|mlp)\.)")
"""Names of language models that diffusion models have as text encoders."""
_LARGEST_CODE = 448


@dataclass(frozen=True, slots=True)
class ScaledFloats(Encoding):
    """8-bit floats with one scale.

    old     under the older names
    marker  the tensor that one weight of the file stores beside its own: it says that there are older names
    """

    old: bool = False
    marker: str = ""

    @property
    def name(self) -> str:
        return f"{_OLD_NAME if self.old else _NAME} {self.marker}".rstrip()

    @property
    def kind(self) -> Kind:
        return "float"

    @property
    def bits(self) -> float:
        return 8

    @property
    def scale(self) -> DType:
        return F32

    @property
    def whole(self) -> int:
        return 1 if self.old and not self.marker else 2

    @property
    def maxima(self) -> bool:
        return True

    @property
    def of_blocks(self) -> bool:
        return True

    def refusal(self, spec: TensorSpec) -> str:
        return matrix_refusal(spec)

    def outs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        if why := self.refusal(spec):
            raise Unsupported(f"tensor {show(spec.name)} cannot be stored as {self.name}: {why}")
        module, float8 = spec.name.removesuffix(_WEIGHT), DTYPES["F8_E4M3"]
        codes, scale = (
            TensorSpec(spec.name, float8, spec.shape),
            TensorSpec(module + (_OLD_SCALE if self.old else _SCALE), F32, ()),
        )
        if not self.old:
            return codes, scale, TensorSpec(module + _SETTINGS, DTYPES["U8"], _STATED.shape)
        return (codes, scale, TensorSpec(self.marker, float8, (2,))) if self.marker else (codes, scale)

    def encode(self, spec: TensorSpec, rows: Rows, first_row: int, outs: Sequence[Bytes], numbers: Rows) -> None:
        from weightsmith._kernels.codes import quantise_float8

        high, wide = rows.shape
        scales = bf16_scales(numbers, _LARGEST_CODE, np.empty(2, np.uint8))
        quantise_float8(rows.reshape(-1), wide, high, wide, scales, outs[0])
        outs[1][:] = scales.astype("<f4").view(np.uint8)
        if not self.old:
            outs[2][:] = _STATED
        elif self.marker:
            outs[2][:] = 0


def _encoding_of(name: str) -> Encoding | None:
    family, _, marker = name.partition(" ")
    if family != _OLD_NAME or not marker:
        return None
    if not _MARKERS.fullmatch(marker):
        raise ValueError(marker)
    return ScaledFloats(old=True, marker=marker)


def _mark(draft: PlanDraft, encoding: Encoding) -> None:
    """Let the first encoded weight store the marker, too. Raises Unsupported where the prefix cannot be told."""
    encoded = [k for k, step in enumerate(draft.steps) if step.encoding == encoding.name]
    stored = [spec.name for step in draft.steps for spec in step.outs]
    prefix = _marker_prefix(stored)
    outside = [name for name in (draft.steps[k].out.name for k in encoded) if not name.startswith(prefix)]
    if outside:
        what = f"ComfyUI reads this model by the prefix {show(prefix)}, and {show(outside[0])} does not begin with it"
        raise Unsupported(what, where="quantize", fix=f"write {_NAME}")
    step = draft.steps[encoded[0]]
    marked = ScaledFloats(old=True, marker=f"{prefix}{_MARKER}")
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


FORMAT = StoredFormat(
    "comfyui",
    _TITLE,
    recognises,
    read,
    {
        _OLD_SCALE: lambda name, specs: "ComfyUI's scaled FP8" if _is_old_scale(name, specs) else "",
        _SETTINGS: labelled(_TITLE),
    },
    writes=(
        Writing(_NAME, "8-bit floats with a scale for each weight of a single file's blocks", _TITLE, {0: ScaledFloats()}),
        Writing(_OLD_NAME, "comfyui-fp8 under the names of 2025: scale_weight", _TITLE, {0: ScaledFloats(old=True)}, _mark),
    ),
    parse=_encoding_of,
)
