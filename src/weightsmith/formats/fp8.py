"""FP8 weights in a checkpoint: which tensors are codes, which are their scales, and which block each scale is for.

Two spellings in config.json mean the same thing, a matrix of float8_e4m3fn codes to be multiplied by scales:

    quant_method          scales                                     what a scale is for
    fp8                   X.weight_scale_inv (multiplied, whatever    a block of weight_block_size, or the matrix where
                          its name says), X.weight_scale              there is none
    compressed-tensors    X.weight_scale                              strategy: tensor, channel (a row), block

Everything is decided from config.json and the tensors' headers. The dtypes say which tensors are quantised, so the lists of
modules that were left alone (`ignore`, `modules_to_not_convert`) are not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith.errors import Finding, FormatError, Unsupported
from weightsmith.formats.files import show
from weightsmith.formats.quantised import config_entries, without_entries
from weightsmith.tensors import BY_TORCH_NAME, DTYPES, DType, TensorSpec

Structure = tuple[int | None, int | None]
"""Rows and columns of a block; None stands for all of the matrix."""

_TENSOR: Structure = (None, None)
_CHANNEL: Structure = (1, None)
_UNUSED = frozenset("input_scale output_scale activation_scale k_scale v_scale q_scale kv_scale".split())
_FOREIGN = tuple(f".weight_{part}" for part in ("zero_point", "packed", "shape", "g_idx", "global_scale"))
_SCALE_DTYPES = ("F32", "BF16", "F16")
_WEIGHT_DTYPES = ("BF16", "F16", "F32")
_FORMATS = ("float-quantized", "naive-quantized")
_FIX = "name an unquantised checkpoint of the same model"
_DAMAGED = "The checkpoint is damaged or incomplete: download it again."


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix of codes and its scales.

    name   F8_E4M3 [rows, cols]
    scale  F32, BF16 or F16, one for each block: ceil(rows / block[0]) · ceil(cols / block[1]) in row-major order
    block  (rows, cols) of a block; the last of a row or column may be smaller
    """

    name: str
    scale: str
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """How to read a checkpoint with FP8 weights as one with plain weights.

    weights  every FP8 weight, in the order of the specs
    dropped  tensors that are no part of the plain model: scales of activations and of the KV cache
    dtype    what a dequantised weight is written as where no dtype is asked for
    config   config.json of the plain model
    notes    what the user should know
    """

    weights: tuple[Fp8Weight, ...]
    dropped: tuple[str, ...]
    dtype: DType
    config: dict[str, Any]
    notes: tuple[Finding, ...]


def names_fp8(config: Mapping[str, Any]) -> bool:
    """config.json names a library whose FP8 weights are read; its weights may still be something else.

    >>> [names_fp8({"quantization_config": {"quant_method": method}}) for method in ("fp8", "gptq")]
    [True, False]
    """
    return any(entry.get("quant_method") in ("fp8", "compressed-tensors") for _, entry in config_entries(config))


def fp8_layout(config: Mapping[str, Any] | None, specs: Mapping[str, TensorSpec], where: str) -> Fp8Layout | None:
    """The FP8 weights of a checkpoint; None when config.json names no quantisation.

    config  config.json
    specs   all tensors by name
    where   the model or its config.json, for messages

    Raises Unsupported for any other quantisation, with what is not read; FormatError when tensors and config.json contradict
    each other: no scale, a scale of another shape, a scale without its weight.

    >>> config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    >>> w, s = TensorSpec("w.weight", DTYPES["F8_E4M3"], (300, 256)), TensorSpec("w.weight_scale_inv", DTYPES["F32"], (3, 2))
    >>> fp8_layout(config, {w.name: w, s.name: s}, "m").weights
    (Fp8Weight(name='w.weight', scale='w.weight_scale_inv', block=(128, 128)),)
    """
    entries = config_entries(config or {})
    if config is None or not entries:
        return None
    place, entry = entries[0]
    for other, content in entries[1:]:
        if content != entry:
            raise _unsupported(f"{place} and {other} in config.json say different things", where)
    suffixes, structures, notes = _read_entry(entry, f"{place} in config.json", where)
    weights = tuple(
        _weight(spec, specs, suffixes, structures, where) for spec in specs.values() if spec.dtype.name.startswith("F8_")
    )
    if not weights:
        what = f"{place} in config.json says that the weights are FP8, and no tensor is F8_E4M3"
        raise FormatError(what, where=where, fix=f"Remove {place} from config.json, if the weights are plain numbers.")
    scales = {weight.scale for weight in weights}
    _check_others(specs, scales, where)
    dropped = tuple(name for name in specs if name.rpartition(".")[2] in _UNUSED)
    if dropped:
        what = f"{len(dropped)} scale(s) of activations or of the KV cache are dropped: plain weights have none"
        notes = [*notes, Finding(what, where, (f"the first is {show(dropped[0])}",))]
    return Fp8Layout(weights, dropped, _plain_dtype(config), without_entries(config), tuple(notes))


def _read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[Sequence[str], Sequence[Structure], list[Finding]]:
    """Suffixes of scales, structures that scales may have, notes."""
    method = entry.get("quant_method")
    if method == "fp8":
        return ("_scale_inv", "_scale"), _read_fp8(entry, where), []
    if method == "compressed-tensors":
        notes = []
        if entry.get("kv_cache_scheme"):
            notes.append(Finding("the KV cache's quantisation is dropped: plain weights have none", f"{where}: {place}"))
        return ("_scale",), _read_compressed_tensors(entry, where), notes
    raise _unsupported(f"weights quantised with {show(method or 'an unnamed method')} ({place}) are not read", where)


def _read_fp8(entry: Mapping[str, Any], where: str) -> list[Structure]:
    for key, values in {"fmt": ("e4m3", None), "expert_dtype": ("fp8", None)}.items():
        if entry.get(key) not in values:
            raise _unsupported(f"fp8 weights with {key} {show(entry[key])} are not read, only {show(values[0])}", where)
    block = entry.get("weight_block_size")
    return [_TENSOR if block is None else _block(block, "weight_block_size", where)]


def _read_compressed_tensors(entry: Mapping[str, Any], where: str) -> list[Structure]:
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
    structures = []
    for name, group in groups.items():
        label = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise _unsupported(f"{show(label)} is not read: it is {show(group)}, not an object", where)
        if (weights := group.get("weights")) is None:  # activations alone
            continue
        format_ = group.get("format") or entry.get("format")
        if format_ not in _FORMATS:
            raise _unsupported(f"compressed-tensors format {show(format_)} is not read, only {' and '.join(_FORMATS)}", where)
        structures.append(_structure(weights, label, where))
    return structures


def _structure(weights: object, label: str, where: str) -> Structure:
    if not isinstance(weights, Mapping):
        raise _unsupported(f"{show(label)}.weights is not read: it is {show(weights)}, not an object", where)
    for key, wanted, default in (
        ("type", "float", "int"),
        ("num_bits", 8, 8),
        ("symmetric", True, True),
        ("dynamic", False, False),
    ):
        found = weights.get(key, default)
        if found != wanted:
            what = f"compressed-tensors weights with {key} {show(found)} are not read as FP8, only {key} {wanted!r}"
            raise _unsupported(f"{what} ({show(label)})", where)
    strategy = weights.get("strategy")
    if strategy == "tensor" or strategy is None:
        return _TENSOR
    if strategy == "channel":
        return _CHANNEL
    if strategy == "block":
        return _block(weights.get("block_structure"), f"{label}.weights.block_structure", where)
    what = f"compressed-tensors strategy {show(strategy)} is not read for FP8 weights, only tensor, channel and block"
    raise _unsupported(f"{what} ({show(label)})", where)


def _block(value: object, key: str, where: str) -> Structure:
    if isinstance(value, Sequence) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise FormatError(f"{show(key)} is {show(value)}, not two positive integers", where=where, fix=_DAMAGED)


def _weight(
    spec: TensorSpec, specs: Mapping[str, TensorSpec], suffixes: Sequence[str], structures: Iterable[Structure], where: str
) -> Fp8Weight:
    if spec.dtype.name != "F8_E4M3" or len(spec.shape) != 2:
        what = f"tensor {show(spec.name)} is {list(spec.shape)} {spec.dtype}; only matrices of F8_E4M3 are read as FP8 weights"
        raise _unsupported(what, where)
    scale = next((specs[spec.name + suffix] for suffix in suffixes if spec.name + suffix in specs), None)
    if scale is None:
        names = " or ".join(show(spec.name + suffix) for suffix in suffixes)
        raise FormatError(f"tensor {show(spec.name)} is {spec.dtype}, and has no scale {names}", where=where, fix=_DAMAGED)
    if scale.dtype.name not in _SCALE_DTYPES:
        what = f"scale {show(scale.name)} is {scale.dtype}, and only {', '.join(_SCALE_DTYPES)} are read"
        raise _unsupported(what, where)
    rows, cols = spec.shape
    wanted = {}
    for block_rows, block_cols in structures:
        # A block larger than the matrix is the matrix; this also makes different names of the same block equal.
        block = min(block_rows or rows, max(rows, 1)) or 1, min(block_cols or cols, max(cols, 1)) or 1
        wanted[block] = -(-rows // block[0]), -(-cols // block[1])
    fitting = [block for block, grid in wanted.items() if scale.shape in _spellings(grid)]
    if len(fitting) != 1:
        grids = " or ".join(str(list(grid)) for grid in dict.fromkeys(wanted.values()))
        problem = f"which fits blocks of {fitting}" if fitting else f"and its blocks need {grids or 'none'}"
        what = f"scale {show(scale.name)} of {show(spec.name)} {list(spec.shape)} is {list(scale.shape)}, {problem}"
        raise FormatError(what, where=where, fix=_DAMAGED)
    return Fp8Weight(spec.name, scale.name, fitting[0])


def _spellings(grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes in which scales of a grid of blocks are stored: [rows, cols], [rows] of a column, [] of a single one."""
    return [grid, *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]


def _check_others(specs: Mapping[str, TensorSpec], scales: set[str], where: str) -> None:
    """Nothing else in the checkpoint may be part of a quantised weight."""
    for name in specs:
        if name.endswith(_FOREIGN):
            raise _unsupported(f"tensor {show(name)} is part of a weight that is not FP8", where)
        weight = next((name.removesuffix(s) for s in ("_scale_inv", "_scale") if name.endswith(f".weight{s}")), None)
        # A model may have learned scales of its own beside a plain weight, under the name `weight_scale`.
        if weight is not None and name not in scales and (weight not in specs or name.endswith("_inv")):
            raise FormatError(f"scale {show(name)} has no FP8 weight {show(weight)}", where=where, fix=_DAMAGED)


def _plain_dtype(config: Mapping[str, Any]) -> DType:
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            found = BY_TORCH_NAME.get(value) if isinstance(value := part.get(key), str) else None
            if found is not None and found.name in _WEIGHT_DTYPES:
                return found
    return DTYPES["BF16"]


def _unsupported(what: str, where: str) -> Unsupported:
    return Unsupported(what, where=where, fix=_FIX)
