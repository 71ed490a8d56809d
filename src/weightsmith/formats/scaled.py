"""Weights of codes and scales in a checkpoint: which tensors are codes, which are their scales, and what each scale is for.

Two spellings in config.json, of matrices whose elements are the value of a code · a scale:

    quant_method, format              codes                  scales
    fp8                               X.weight, F8_E4M3      X.weight_scale_inv (multiplied, whatever its name says) or
                                                             X.weight_scale: of a block of weight_block_size, or of the matrix
    compressed-tensors
        float-, naive-quantized       X.weight, F8_E4M3      X.weight_scale: of the matrix, a row, a group of a row, a block
        int-, naive-quantized         X.weight, I8           the same
        pack-quantized, 4 or 8 bits   X.weight_packed, I32   the same; and X.weight_shape. If not symmetric, also
                                                             X.weight_zero_point, I32, which is subtracted from the codes
        nvfp4-pack-quantized          X.weight_packed, U8    X.weight_scale, F8_E4M3: of 16 elements, divided by
                                                             X.weight_global_scale
        mxfp4-pack-quantized          X.weight_packed, U8    X.weight_scale, U8: exponents, of 32 elements

Everything is decided from config.json and the tensors' headers. Names and dtypes say which tensors are quantised, so the lists
of modules that were left alone (`ignore`, `modules_to_not_convert`) are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weightsmith.errors import Finding, FormatError, Unsupported
from weightsmith.formats.files import show
from weightsmith.formats.quantised import (
    DAMAGED_CHECKPOINT,
    PLAIN_FIX,
    config_entries,
    plain_dtype,
    quantisation_entry,
    without_entries,
)
from weightsmith.tensors import DType, TensorSpec

Structure = tuple[int | None, int | None]
"""Rows and columns of a block; None stands for all of the matrix."""

_TENSOR: Structure = (None, None)
_CHANNEL: Structure = (1, None)
_METHODS = ("fp8", "compressed-tensors")
_UNUSED = frozenset(
    "input_scale output_scale activation_scale k_scale v_scale q_scale kv_scale input_global_scale input_zero_point".split()
)
_PACKED = ".weight_packed"
_PARTS = tuple(f".weight_{part}" for part in ("packed", "shape", "global_scale"))
_FOREIGN = tuple(f".weight_{part}" for part in ("zero_point", "g_idx"))
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store weights.

    kind      of the codes, as `kernels.blocks.TABLES` names them: float8, int8, offset8, offset4, float4
    codes     dtype of their tensor; it is packed if it is not the dtype of a single code
    packed    the tensor of codes is X.weight_packed, not X.weight
    block     what a scale is for
    scales    dtypes that scales may have; U8 is an exponent
    suffixes  of the tensor of scales, after X.weight
    shaped    there is a tensor X.weight_shape
    divided   scales are divided by X.weight_global_scale
    zeroed    X.weight_zero_point is subtracted from the codes
    """

    kind: str
    codes: str
    block: Structure
    packed: bool = False
    scales: tuple[str, ...] = _FLOATS
    suffixes: tuple[str, ...] = ("_scale",)
    shaped: bool = False
    divided: bool = False
    zeroed: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return int(self.kind[-1])


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A matrix of codes and its scales.

    name    of the plain tensor: X.weight
    codes   name of the tensor of codes
    kind    of the codes, as `kernels.blocks.TABLES` names them
    shape   of the matrix: rows, cols
    scale   name of the scales, one for each block: ceil(rows / block[0]) · ceil(cols / block[1]) in row-major order
    block   (rows, cols) of a block; the last of a row or column may be smaller
    extent  name of the tensor that holds the shape once more, I64 [2]; "" for none
    divisor name of the tensor, F32 of one element, by which scales are divided; "" for none
    zeros   name of the tensor of the code of zero of each block, I32 [ceil(rows · bits / 32), blocks of a row]: the lowest bits
            of a word are the first row's; "" where the code of zero is 2^(bits - 1). Blocks then have one row
    """

    name: str
    codes: str
    kind: str
    shape: tuple[int, int]
    scale: str
    block: tuple[int, int]
    extent: str = ""
    divisor: str = ""
    zeros: str = ""

    @property
    def bits(self) -> int:
        """Of a code."""
        return int(self.kind[-1])

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all stored tensors."""
        return tuple(filter(None, (self.codes, self.scale, self.extent, self.divisor, self.zeros)))


@dataclass(frozen=True, slots=True)
class ScaledLayout:
    """How to read a checkpoint with codes and scales as one with plain weights.

    weights  every quantised weight, in the order of the specs
    dropped  tensors that are no part of the plain model: scales of activations and of the KV cache
    dtype    what a dequantised weight is written as where no dtype is asked for
    config   config.json of the plain model
    notes    what the user should know
    """

    weights: tuple[ScaledWeight, ...]
    dropped: tuple[str, ...]
    dtype: DType
    config: dict[str, Any]
    notes: tuple[Finding, ...]


def names_scaled(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> bool:
    """config.json names a library whose weights are read here, and some tensors may be codes; they may still be something else.

    >>> from weightsmith.tensors import DTYPES
    >>> spec = TensorSpec("w.weight", DTYPES["F8_E4M3"], (4, 4))
    >>> [names_scaled({"quantization_config": {"quant_method": method}}, {spec.name: spec}) for method in ("fp8", "gptq")]
    [True, False]
    """
    if not any(entry.get("quant_method") in _METHODS for _, entry in config_entries(config)):
        return False
    return any(_is_codes(spec) for spec in specs.values())


def scaled_layout(config: Mapping[str, Any] | None, specs: Mapping[str, TensorSpec], where: str) -> ScaledLayout | None:
    """The quantised weights of a checkpoint; None when config.json names no quantisation.

    config  config.json
    specs   all tensors by name
    where   the model or its config.json, for messages

    Raises Unsupported for any other quantisation, with what is not read; FormatError when tensors and config.json contradict
    each other: no scale, a scale of another shape, a scale without its weight.

    >>> from weightsmith.tensors import DTYPES
    >>> config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    >>> w, s = TensorSpec("w.weight", DTYPES["F8_E4M3"], (300, 256)), TensorSpec("w.weight_scale_inv", DTYPES["F32"], (3, 2))
    >>> weight, = scaled_layout(config, {w.name: w, s.name: s}, "m").weights
    >>> weight.scale, weight.block
    ('w.weight_scale_inv', (128, 128))
    """
    if config is None or not config_entries(config):
        return None
    place, entry = quantisation_entry(config, where)
    schemes, notes = _read_entry(entry, f"{place} in config.json", where)
    weights = tuple(_weight(spec, specs, schemes, where) for spec in specs.values() if _is_codes(spec))
    if not weights:
        wanted = " or ".join(dict.fromkeys(scheme.codes for scheme in schemes))
        what = f"{place} in config.json says that the weights are quantised, and no tensor is {wanted}"
        raise FormatError(what, where=where, fix=f"Remove {place} from config.json, if the weights are plain numbers.")
    _check_others(specs, weights, where)
    dropped = tuple(name for name in specs if name.rpartition(".")[2] in _UNUSED)
    if dropped:
        what = f"{len(dropped)} scale(s) of activations or of the KV cache are dropped: plain weights have none"
        notes = [*notes, Finding(what, where, (f"the first is {show(dropped[0])}",))]
    return ScaledLayout(weights, dropped, plain_dtype(config), without_entries(config), tuple(notes))


def _is_codes(spec: TensorSpec) -> bool:
    """The tensor may be the codes of a weight."""
    if spec.dtype.name.startswith("F8_"):
        return not spec.name.endswith((".weight_scale", ".weight_scale_inv"))
    return spec.name.endswith(_PACKED) or (spec.dtype.name == "I8" and spec.name.endswith(".weight"))


# ---- config.json


def _read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    method = entry.get("quant_method")
    if method == "fp8":
        return [_read_fp8(entry, where)], []
    if method == "compressed-tensors":
        notes = []
        if entry.get("kv_cache_scheme"):
            notes.append(Finding("the KV cache's quantisation is dropped: plain weights have none", f"{where}: {place}"))
        return _read_compressed_tensors(entry, where), notes
    raise _unsupported(f"weights quantised with {show(method or 'an unnamed method')} ({place}) are not read", where)


def _read_fp8(entry: Mapping[str, Any], where: str) -> Scheme:
    for key, values in {"fmt": ("e4m3", None), "expert_dtype": ("fp8", None)}.items():
        if entry.get(key) not in values:
            raise _unsupported(f"fp8 weights with {key} {show(entry[key])} are not read, only {show(values[0])}", where)
    block = entry.get("weight_block_size")
    structure = _TENSOR if block is None else _block(block, "weight_block_size", where)
    return Scheme("float8", "F8_E4M3", structure, suffixes=("_scale_inv", "_scale"))


def _read_compressed_tensors(entry: Mapping[str, Any], where: str) -> list[Scheme]:
    status = entry.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):  # older releases say frozen of codes too
        raise _unsupported(f"compressed-tensors weights with quantization_status {show(status)} are not read", where)
    if rotation := entry.get("transform_config"):
        raise _unsupported(f"compressed-tensors weights with a transform_config are not read: {show(rotation)}", where)
    sparsity = entry.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise _unsupported(f"compressed-tensors weights with a sparsity_config are not read: {show(sparsity)}", where)
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported(f"compressed-tensors without config_groups is not read: {show(groups)}", where)
    schemes = []
    for name, group in groups.items():
        label = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise _unsupported(f"{show(label)} is not read: it is {show(group)}, not an object", where)
        if (weights := group.get("weights")) is None:  # activations alone
            continue
        schemes.append(_scheme(group.get("format") or entry.get("format"), weights, label, where))
    return schemes


_FORMATS: Mapping[str, Mapping[tuple[str, int], Scheme]] = {
    "float-quantized": {("float", 8): Scheme("float8", "F8_E4M3", _TENSOR)},
    "int-quantized": {("int", 8): Scheme("int8", "I8", _TENSOR)},
    "naive-quantized": {("float", 8): Scheme("float8", "F8_E4M3", _TENSOR), ("int", 8): Scheme("int8", "I8", _TENSOR)},
    "pack-quantized": {
        ("int", 4): Scheme("offset4", "I32", _TENSOR, packed=True, shaped=True),
        ("int", 8): Scheme("offset8", "I32", _TENSOR, packed=True, shaped=True),
    },
    "nvfp4-pack-quantized": {("float", 4): Scheme("float4", "U8", _TENSOR, packed=True, scales=("F8_E4M3",), divided=True)},
    "mxfp4-pack-quantized": {("float", 4): Scheme("float4", "U8", _TENSOR, packed=True, scales=("U8",))},
}
"""compressed-tensors' formats: (type, bits) → how the weights are stored. The block comes from the strategy."""

_ZEROED = ("group", "channel")
"""Strategies with which packed codes may have zero points."""


def _scheme(format_: object, weights: object, label: str, where: str) -> Scheme:
    if not isinstance(format_, str) or format_ not in _FORMATS:
        raise _unsupported(f"compressed-tensors format {show(format_)} is not read, only {', '.join(_FORMATS)}", where)
    if not isinstance(weights, Mapping):
        raise _unsupported(f"{show(label)}.weights is not read: it is {show(weights)}, not an object", where)
    read = _FORMATS[format_]
    found = {key: weights.get(key, default) for key, default in (("type", "int"), ("num_bits", 8))}
    for key, wanted in (("type", {t for t, _ in read}), ("num_bits", {b for _, b in read})):
        if type(found[key]) not in (str, int) or found[key] not in wanted:
            names = " and ".join(sorted(map(str, wanted)))
            what = f"compressed-tensors {format_} weights with {key} {show(found[key])} are not read, only {key} {names}"
            raise _unsupported(f"{what} ({show(label)})", where)
    zeroed = format_ == "pack-quantized" and weights.get("symmetric") is False and weights.get("strategy") in _ZEROED
    for key, required, default in (("symmetric", not zeroed, True), ("dynamic", False, False)):
        if (value := weights.get(key, default)) is not required:
            what = f"compressed-tensors {format_} weights with {key} {show(value)} are not read, only {key} {required!r}"
            raise _unsupported(f"{what} ({show(label)})", where)
    block = _structure(weights, format_, label, where)
    return replace(read[found["type"], found["num_bits"]], block=block, zeroed=zeroed)


def _structure(weights: Mapping[str, Any], format_: str, label: str, where: str) -> Structure:
    strategy = weights.get("strategy")
    if strategy in ("group", "tensor_group"):
        group = weights.get("group_size")
        if type(group) is not int or group < 1:
            what = f"{show(label)}.weights.group_size is {show(group)}, not a positive integer"
            raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)
        return 1, group
    if strategy == "tensor" or strategy is None:
        return _TENSOR
    if strategy == "channel":
        return _CHANNEL
    if strategy == "block":
        return _block(weights.get("block_structure"), f"{label}.weights.block_structure", where)
    what = f"compressed-tensors strategy {show(strategy)} is not read for {format_} weights"
    raise _unsupported(f"{what}, only tensor, channel, group, tensor_group and block ({show(label)})", where)


def _block(value: object, key: str, where: str) -> Structure:
    if isinstance(value, Sequence) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise FormatError(f"{show(key)} is {show(value)}, not two positive integers", where=where, fix=DAMAGED_CHECKPOINT)


# ---- tensors


def _weight(spec: TensorSpec, specs: Mapping[str, TensorSpec], schemes: Sequence[Scheme], where: str) -> ScaledWeight:
    packed = spec.name.endswith(_PACKED)
    name = spec.name.removesuffix("_packed") if packed else spec.name
    fitting = [scheme for scheme in schemes if (scheme.packed, scheme.codes) == (packed, spec.dtype.name)]
    if not fitting or len(spec.shape) != 2:
        wanted = ", ".join(dict.fromkeys(scheme.codes for scheme in schemes if scheme.packed == packed))
        what = f"tensor {show(spec.name)} is {list(spec.shape)} {spec.dtype}; "
        what += f"only matrices of {wanted} are read as codes" if wanted else "config.json says nothing of such codes"
        raise _unsupported(what, where)
    suffixes = tuple(dict.fromkeys(suffix for scheme in fitting for suffix in scheme.suffixes))
    scale = next((specs[name + suffix] for suffix in suffixes if name + suffix in specs), None)
    if scale is None:
        names = " or ".join(show(name + suffix) for suffix in suffixes)
        what = f"tensor {show(spec.name)} is {spec.dtype}, and has no scale {names}"
        raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)
    dtypes = tuple(dict.fromkeys(dtype for scheme in fitting for dtype in scheme.scales))
    if scale.dtype.name not in dtypes:
        raise _unsupported(f"scale {show(scale.name)} is {scale.dtype}, and only {', '.join(dtypes)} are read", where)
    candidates: dict[ScaledWeight, tuple[int, int]] = {}
    for scheme in fitting:
        made = _described(name, spec, scale, scheme)
        candidates[made] = -(-made.shape[0] // made.block[0]), -(-made.shape[1] // made.block[1])
    found = [made for made, grid in candidates.items() if scale.shape in _spellings(grid)]
    if len(found) != 1:
        grids = " or ".join(str(list(grid)) for grid in dict.fromkeys(candidates.values()))
        problem = f"and its blocks need {grids or 'none'}"
        if found:
            problem = f"which fits blocks of {[made.block for made in found]}"
        what = f"scale {show(scale.name)} of {show(spec.name)} {list(spec.shape)} is {list(scale.shape)}, {problem}"
        raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)
    _check_part(found[0].extent, "I64", [(2,)], specs, spec, where)
    _check_part(found[0].divisor, "F32", [(1,), ()], specs, spec, where)
    words, across = -(-found[0].shape[0] * found[0].bits // 32), -(-found[0].shape[1] // found[0].block[1])
    _check_part(found[0].zeros, "I32", [(words, across)], specs, spec, where)
    return found[0]


def _check_part(
    name: str, dtype: str, shapes: Sequence[tuple[int, ...]], specs: Mapping[str, TensorSpec], codes: TensorSpec, where: str
) -> None:
    """Raise FormatError if a tensor that belongs to codes is missing, or is another kind of tensor. name: "" for none."""
    part = specs.get(name)
    if not name or (part is not None and part.dtype.name == dtype and part.shape in shapes):
        return
    found = "missing" if part is None else f"{list(part.shape)} {part.dtype}"
    what = f"{show(name)} is {found}, and the codes {show(codes.name)} need it to be {list(shapes[0])} {dtype}"
    raise FormatError(what, where=where, fix=DAMAGED_CHECKPOINT)


def _described(name: str, spec: TensorSpec, scale: TensorSpec, scheme: Scheme) -> ScaledWeight:
    """A weight as a scheme describes it; whether the scales fit is for the caller to check."""
    rows, cols = spec.shape
    if scheme.packed:
        cols = cols * spec.dtype.itemsize * 8 // scheme.bits
    block_rows, block_cols = scheme.block
    # A block larger than the matrix is the matrix; this also makes different names of the same block equal.
    block = min(block_rows or rows, max(rows, 1)) or 1, min(block_cols or cols, max(cols, 1)) or 1
    return ScaledWeight(
        name,
        spec.name,
        scheme.kind,
        (rows, cols),
        scale.name,
        block,
        f"{name}_shape" if scheme.shaped else "",
        f"{name}_global_scale" if scheme.divided else "",
        f"{name}_zero_point" if scheme.zeroed else "",
    )


def _spellings(grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes in which scales of a grid of blocks are stored: [rows, cols], [rows] of a column, [] of a single one."""
    return [grid, *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]


def _check_others(specs: Mapping[str, TensorSpec], weights: Sequence[ScaledWeight], where: str) -> None:
    """Nothing else in the checkpoint may be part of a quantised weight."""
    used = {name for weight in weights for name in weight.parts}
    for name in specs:
        if name in used:
            continue
        if name.endswith((*_FOREIGN, *_PARTS)):
            kinds = ", ".join(dict.fromkeys(weight.kind for weight in weights))
            raise _unsupported(f"tensor {show(name)} is part of a weight that is not read: the others are {kinds}", where)
        weight = next((name.removesuffix(s) for s in ("_scale_inv", "_scale") if name.endswith(f".weight{s}")), None)
        # A model may have learned scales of its own beside a plain weight, under the name `weight_scale`.
        if weight is not None and (weight not in specs or name.endswith("_inv")):
            raise FormatError(f"scale {show(name)} has no quantised weight {show(weight)}", where=where, fix=DAMAGED_CHECKPOINT)


def _unsupported(what: str, where: str) -> Unsupported:
    return Unsupported(what, where=where, fix=PLAIN_FIX)
