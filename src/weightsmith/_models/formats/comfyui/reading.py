"""What a file says of its weights, and weights as numbers.

Scales of some formats are in the order of a GPU's tiles, those of cuBLAS for scales of blocks (its documentation: "1D block
scaling factors layout"): 512 bytes for 128 rows by 4 groups, tiles of a band of 128 rows one after the other. In a tile, the
scale of row r and group g is byte

    16 · (r mod 32) + 4 · (r div 32) + g

Rows and groups are filled up to whole tiles, with zeros.

ConvRot (`_build_hadamard` in comfy-kitchen) multiplies runs of n = 4^k columns by the regular Hadamard matrix over √n: the
Kronecker power of the one of 4, in which a row is the sum of its elements less twice one of them. It is its own inverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from weightsmith._base.files import show
from weightsmith._base.tensors import BY_TORCH_NAME, DType, TensorSpec
from weightsmith._models.formats.config import config_entries, dropped_scales, method_of, plain_dtype, without_entries
from weightsmith._models.formats.decoded import F32, DecodedTensors, QuantisedModel, bands, read_all, read_json
from weightsmith._models.formats.matrices import MXFP4_GROUP, NVFP4_GROUP, powers_of_two
from weightsmith._models.formats.scaled import FLOATS, POWERS, ScaledWeight
from weightsmith.abc.stored import Bytes, Config, Rows, Specs, Wrapped
from weightsmith.abc.tensors import Tensors

# ---- Names and layout


METHOD, TITLE = "comfyui", "ComfyUI"
WEIGHT, SETTINGS = ".weight", ".comfy_quant"
SCALE, OLD_SCALE, FACTOR = ".weight_scale", ".scale_weight", ".weight_scale_2"
INPUT_SCALES = (".input_scale", ".scale_input")
MARKER = "scaled_fp8"

TILE_ROWS, TILE_GROUPS = 128, 4
_COLUMN = 32
"""Rows of a tile that follow each other."""


def tiled_shape(rows: int, groups: int) -> tuple[int, int]:
    """The shape of the stored scales.

    >>> tiled_shape(200, 6)
    (256, 8)
    """
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-groups // TILE_GROUPS) * TILE_GROUPS


def to_tiles(scales: Bytes) -> Bytes:
    """uint8 [rows, groups] → the bytes of their tiles, flat.

    >>> tiles = to_tiles(np.arange(33, dtype=np.uint8)[:, None])
    >>> tiles.size, tiles[[16, 4, 1]].tolist()
    (512, [1, 32, 0])
    """
    high, wide = tiled_shape(*scales.shape)
    filled = np.zeros((high, wide), np.uint8)
    filled[: scales.shape[0], : scales.shape[1]] = scales
    tiles = filled.reshape(-1, TILE_ROWS // _COLUMN, _COLUMN, wide // TILE_GROUPS, TILE_GROUPS)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def from_tiles(tiles: Bytes, groups: int) -> Bytes:
    """The bytes of bands of tiles → uint8 [rows, groups], with the rows that fill up the last tiles.

    >>> from_tiles(to_tiles(np.arange(33, dtype=np.uint8)[:, None]), 1)[:34, 0].tolist() == [*range(33), 0]
    True
    """
    _, wide = tiled_shape(TILE_ROWS, groups)
    bands = tiles.reshape(-1, wide // TILE_GROUPS, _COLUMN, TILE_ROWS // _COLUMN, TILE_GROUPS)
    return np.ascontiguousarray(bands.transpose(0, 3, 2, 1, 4)).reshape(-1, wide)[:, :groups]


def swapped(codes: Bytes) -> Bytes:
    """Bytes with their halves swapped.

    >>> swapped(np.uint8([0x12])).tobytes().hex()
    '21'
    """
    halves: Bytes = codes >> np.uint8(4) | codes << np.uint8(4)
    return halves


def is_rotation(size: int) -> bool:
    """Whether so many columns can be rotated: a power of 4.

    >>> [size for size in range(300) if is_rotation(size)]
    [4, 16, 64, 256]
    """
    return size >= 4 and size & (size - 1) == 0 and size.bit_length() % 2 == 1


def rotate(rows: Rows, size: int) -> None:
    """Multiply each run of `size` columns by the regular Hadamard matrix, in place: √size times the rotation.

    rows  float32 [n, cols]; sums of whole numbers are exact up to 2^24

    >>> rows = np.float32([[1, 0, 0, 0], [1, 2, 3, 4]])
    >>> rotate(rows, 4)
    >>> rows
    array([[ 1.,  1.,  1., -1.],
           [ 2.,  4.,  6.,  8.]], dtype=float32)
    """
    step = 1
    while step < size:
        parts: npt.NDArray[np.float32] = rows.reshape(-1, 4, step)
        total = parts[:, 0] + parts[:, 1] + parts[:, 2] + parts[:, 3]
        rotated = total[:, None] - 2 * parts[:, ::-1]
        parts[:] = rotated
        step *= 4


# ---- Reading


_FOREIGN = (FACTOR, ".pre_quant_scale", ".weight_zeros", ".weight_s_rel", ".weight_s_channel", ".weight_codebook")
_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Prefixes that names of tensors may have where the names in a file's metadata have none."""

_KINDS = {"F8_E4M3": "float8", "F8_E5M2": "wide8", "I8": "int8"}
"""dtype of codes → their kind, as `kernels.codes.TABLES` names it."""
_NVFP4, _MXFP8, _ROTATED = "nvfp4", "mxfp8", "int8_tensorwise"
_FORMATS = {
    "float8_e4m3fn": ("float8", ("F8_E4M3", "U8")),
    "float8_e4m3fn_rowwise": ("float8", ("F8_E4M3", "U8")),
    "float8_e4m3fn_blockwise": ("float8", ("F8_E4M3", "U8")),
    "float8_e4m3fn_block3d": ("float8", ("F8_E4M3", "U8")),
    "float8_e5m2": ("wide8", ("F8_E5M2", "U8")),
    _ROTATED: ("int8", ("I8",)),
    "int8_blockwise": ("int8", ("I8",)),
    _NVFP4: ("float4", ("U8",)),
    _MXFP8: ("float8", ("F8_E4M3", "U8")),
}
"""Format → kind of its codes, and the dtypes that they are stored as."""
_TILED = {_NVFP4: (NVFP4_GROUP, ("F8_E4M3", "U8"), NVFP4_GROUP), _MXFP8: (MXFP4_GROUP, POWERS, MXFP4_GROUP)}
"""Format → elements of a group, dtypes of its scales, and the multiple to which rows and columns are filled up."""
_READ_KEYS = ("format", "orig_dtype", "orig_shape", "group_size", "params", "num_experts", "convrot", "convrot_groupsize")
_HARMLESS_KEYS = ("full_precision_matrix_mult", "per_row")
_MAX_GROUP = 1 << 24
_ROTATION = 256
"""Columns that ConvRot rotates together, unless the file says otherwise."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the file says about one weight.

    format      "" in older files: the dtype of the codes tells
    group_size  rows and columns of a block; 0 if nothing is said
    dtype       before it was quantised; None if nothing is said
    shape       before it was filled up to whole groups; None if nothing is said
    rotation    columns that are rotated together; 0 if none are
    experts     matrices that are stacked; None if nothing is said
    """

    format: str = ""
    group_size: int = 0
    dtype: DType | None = None
    shape: object = None
    rotation: int = 0
    experts: object = None


def recognises(config: Config, specs: Specs) -> bool:
    if config_entries(config):
        return method_of(config) == METHOD and any(map(_may_be_codes, specs.values()))
    return any(name.endswith(SETTINGS) or is_old_scale(name, specs) for name in specs)


def _may_be_codes(spec: TensorSpec) -> bool:
    return spec.name.endswith(WEIGHT) and spec.dtype.name in (*_KINDS, "U8")


def is_old_scale(name: str, specs: Specs) -> bool:
    weight = specs.get(name.removesuffix(OLD_SCALE) + WEIGHT)
    return name.endswith(OLD_SCALE) and weight is not None and weight.dtype.name in _KINDS


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    model = QuantisedModel(stored, config, where)
    weights = [_weight(model, module, settings) for module, settings in _modules(model).items()]
    hidden = [name for name in model.specs if name.endswith(SETTINGS) or name.rpartition(".")[2] == MARKER]
    scales = [name for name in model.specs if name.endswith(INPUT_SCALES)]
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
        if name.endswith(SETTINGS):
            settings = read_json(model.stored, name, model.where, "the formats of ComfyUI's weights")
            by_module[name.removesuffix(SETTINGS)] = _settings(model, name, settings)
        elif name.endswith(OLD_SCALE):
            by_module.setdefault(name.removesuffix(OLD_SCALE), _Settings())
    return by_module


def _module_of(model: QuantisedModel, layer: str) -> str:
    """The module that the metadata names, under the name that the tensors have."""
    names = [layer, *(prefix + layer for prefix in _PREFIXES), *(layer.removeprefix(prefix) for prefix in _PREFIXES)]
    module = next((name for name in names if name + WEIGHT in model.specs), None)
    if module is None:
        raise model.damaged(f"_quantization_metadata names {show(layer)}, and there is no tensor {show(layer + WEIGHT)}")
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
    rotated = bool(values.get("convrot"))
    rotation = values.get("convrot_groupsize", _ROTATION) if rotated else 0
    if rotated and not (format_ == _ROTATED and type(rotation) is int and is_rotation(rotation)):
        what = f"ComfyUI's weights in the format {show(format_)} that are rotated by {show(rotation)} columns are not read"
        raise model.unsupported(f"{what}, only {_ROTATED} by a power of 4 ({show(name)})")
    dtype = values.get("orig_dtype")
    known = BY_TORCH_NAME.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
    return _Settings(
        format_,
        group,
        known if known is not None and known.name in FLOATS else None,
        values.get("orig_shape"),
        rotation,
        values.get("num_experts"),
    )


def _weight(model: QuantisedModel, module: str, settings: _Settings) -> ScaledWeight:
    specs = model.specs
    codes = specs.get(module + WEIGHT)
    scales = [specs[module + end] for end in (SCALE, OLD_SCALE) if module + end in specs]
    if codes is None or len(scales) != 1:
        what = f"it has {len(scales)} scales, and a quantised weight needs a tensor of codes and one scale"
        raise model.damaged(f"tensor {show(module + WEIGHT)} is missing" if codes is None else f"{show(codes.name)}: {what}")
    kind, dtypes = _FORMATS.get(settings.format, (_KINDS.get(codes.dtype.name, ""), tuple(_KINDS)))
    if codes.dtype.name not in dtypes or not codes.shape:
        what = f"tensor {show(codes.name)} is {list(codes.shape)} {codes.dtype}, and has the scale {show(scales[0].name)}"
        raise model.unsupported(f"{what}: only codes of {', '.join(dtypes)} are read")
    if settings.experts is not None and not (len(codes.shape) == 3 and codes.shape[0] == settings.experts):
        what = f"tensor {show(codes.name)} is {list(codes.shape)}, and its settings have {show(settings.experts)} experts"
        raise model.damaged(what)
    if settings.format in _TILED:
        return _tiled(model, codes, scales[0], settings)
    if scales[0].dtype.name not in FLOATS:
        raise model.unsupported(f"scale {show(scales[0].name)} is {scales[0].dtype}, and only {', '.join(FLOATS)} are read")
    default = scales[0].dtype if scales[0].dtype.itemsize == 2 else plain_dtype(model.config)
    block = _block(model, codes, scales[0], settings.group_size)
    spec, stored, dtype = TensorSpec(codes.name, F32, codes.shape), (codes.name, scales[0].name), settings.dtype or default
    if not settings.rotation:
        return ScaledWeight(spec, stored, dtype, kind, block)
    if block[1] != codes.shape[-1] or codes.shape[-1] % settings.rotation:
        what = f"tensor {show(codes.name)} {list(codes.shape)} is rotated by {settings.rotation} columns"
        raise model.unsupported(f"{what}: its width must be a multiple, and a scale that of whole rows")
    return RotatedWeight(spec, stored, dtype, kind, block, rotation=settings.rotation)


@dataclass(frozen=True, slots=True)
class RotatedWeight(ScaledWeight):
    """ConvRot's integers. rotation: columns that are rotated together. A scale is that of whole rows.

    Integers are rotated exactly: the result is rounded once, with its scale.
    """

    rotation: int = 0

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        cols, high = self.spec.shape[-1], self.block[0]
        for row, end, skip, part in bands(first, values, cols):
            numbers = read_all(stored, self.stored[0], row * cols, end * cols).view(np.int8).astype(np.float32)
            numbers = numbers.reshape(-1, cols)
            rotate(numbers, self.rotation)
            top = row // high
            scales = self._scales(stored, top, (end - 1) // high + 1) / np.float32(math.isqrt(self.rotation))
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                numbers *= scales[np.arange(row, end) // high - top, None]
            part[:] = numbers.reshape(-1)[skip : skip + part.size]


@dataclass(frozen=True, slots=True)
class TiledWeight(ScaledWeight):
    """A matrix in groups of a row, with scales in the order of tiles. The first of two codes in a byte is the high half."""

    preferred_rows: ClassVar[int] = TILE_ROWS

    def _codes(self, stored: Tensors, begin: int, end: int) -> Bytes:
        codes = ScaledWeight._codes(self, stored, begin, end)
        return swapped(codes) if self.bits == 4 else codes

    def _scales(self, stored: Tensors, first: int, end: int) -> Rows:
        from weightsmith._kernels.codecs import E4M3_VALUES

        across = self.grid[1]
        row, bottom = first // across, end // across
        top, band = row // TILE_ROWS, TILE_ROWS * tiled_shape(1, across)[1]
        raw = read_all(stored, self.stored[1], top * band, -(-bottom // TILE_ROWS) * band).view(np.uint8)
        tiles = from_tiles(raw, across)[row - top * TILE_ROWS : bottom - top * TILE_ROWS].reshape(-1)
        if self.bits == 8:
            return powers_of_two(tiles)
        with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
            scales: Rows = E4M3_VALUES[tiles] * read_all(stored, self.factor).reshape(-1)[0]
        return scales


def _tiled(model: QuantisedModel, codes: TensorSpec, scale: TensorSpec, settings: _Settings) -> TiledWeight:
    kind, dtypes = _FORMATS[settings.format]
    group, scale_dtypes, multiple = _TILED[settings.format]
    module = codes.name.removesuffix(WEIGHT)
    model.part(codes.name, dtypes, (None, None))
    rows, cols = codes.shape[0], codes.shape[1] * (2 if kind == "float4" else 1)
    if not codes.size or rows % multiple or cols % multiple:
        what = f"tensor {show(codes.name)} is {list(codes.shape)}, and {settings.format} has multiples of {multiple}"
        raise model.damaged(what)
    high, wide = tiled_shape(rows, cols // group)
    if scale.dtype.name not in scale_dtypes:
        raise model.unsupported(f"scale {show(scale.name)} is {scale.dtype}, and only {', '.join(scale_dtypes)} are read")
    if scale.shape not in ((high, wide), (high // 4, 4 * wide), (high * wide,)):
        what = f"scale {show(scale.name)} of {show(codes.name)} {list(codes.shape)} is {list(scale.shape)}"
        raise model.unsupported(f"{what}, not tiles of {[high, wide]}")
    bias = model.specs.get(f"{module}.bias")
    shapes = [settings.shape] if settings.shape is not None else []
    shapes += [[bias.size, cols]] if bias is not None else []
    if others := [shape for shape in shapes if shape != [rows, cols]]:
        what = f"tensor {show(codes.name)} is stored as {[rows, cols]}, and the weight is {show(others[0])}"
        raise model.unsupported(f"{what}: weights that are filled up are not read")
    factor = module + FACTOR if kind == "float4" else ""
    if factor:
        model.part(factor, ("F32",), model.specs[factor].shape if factor in model.specs else ())
        if model.specs[factor].size != 1:
            raise model.damaged(f"tensor {show(factor)} is {list(model.specs[factor].shape)}, not one number")
    stored = codes.name, scale.name, *filter(None, [factor])
    dtype = settings.dtype or plain_dtype(model.config)
    return TiledWeight(TensorSpec(codes.name, F32, (rows, cols)), stored, dtype, kind, (1, group), factor=factor)


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
    if len(shape) == 3 and math.prod(shape) == rows:
        yield 1, cols, ((outputs, rows // outputs, 1),)
    if len(shape) == 2 and not group and all(shape) and rows % shape[0] == cols % shape[1] == 0:
        high, wide = rows // shape[0], cols // shape[1]
        # Only powers of two: blocks of 128 with a smaller last one may look like another size, but never like one of these.
        if high == wide and high & (high - 1) == 0:
            yield high, wide, (shape,)


def _check_others(model: QuantisedModel, weights: list[ScaledWeight]) -> None:
    """Nothing else may be part of a quantised weight: a scale without a format is one that ComfyUI ignores."""
    used = {name for weight in weights for name in weight.stored}
    for name in model.specs:
        if name.endswith((*_FOREIGN, SCALE, OLD_SCALE)) and name not in used:
            raise model.unsupported(f"tensor {show(name)} is part of a weight that is not read")
