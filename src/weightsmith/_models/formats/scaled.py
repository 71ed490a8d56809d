"""Matrices whose elements are the value of a code · a scale: what fp8, compressed-tensors and ModelOpt have in common.

A `Scheme` says how weights are stored, and a format's config.json which schemes a model has. Names and dtypes of tensors say
which of them are quantised, so the lists of modules that were left alone (`ignore`, `modules_to_not_convert`) are not needed.
Each read multiplies the values of the codes that it needs by their scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import CheckpointError, Finding, FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._models.formats.config import (
    damaged,
    dropped_scales,
    plain_dtype,
    quantisation_entry,
    unsupported,
    without_entries,
)
from weightsmith._models.formats.decoded import F32, DecodedTensors, Weight, bands, chunks, read_all, read_if_here
from weightsmith._models.formats.matrices import WORD_BITS, is_loose, powers_of_two, rows_of_a_word, unpack_rows, words_of
from weightsmith.abc.stored import Bytes, Config, Specs, Wrapped
from weightsmith.abc.tensors import Tensors, read

Structure = tuple[int | None, int | None]
"""Rows and columns of a block; None stands for all of the matrix."""

TENSOR: Structure = (None, None)
COLUMNS: Structure = (None, 1)
TITLE = "codes with scales"

PACKED, SHAPE, DIVISOR, FACTOR, ZEROS, INDEX = "_packed", "_shape", "_global_scale", "_scale_2", "_zero_point", "_g_idx"
"""Ends of the names of a weight's other tensors: X.weight_packed, …"""
_PACKED = f".weight{PACKED}"
_PARTS = tuple(f".weight{part}" for part in (PACKED, SHAPE, DIVISOR, FACTOR))
_FOREIGN = (f".weight{ZEROS}", f".weight{INDEX}")
_UNUSED = frozenset(
    "input_scale input_scale_ub output_scale activation_scale qscale_act k_scale v_scale q_scale kv_scale "
    "input_global_scale input_zero_point output_zero_point".split()
)
_INTEGERS = ("I64", "I32", "I16", "U64", "U32", "U16")
"""Dtypes of the shape of a weight. Kimi-K2.5's are I32."""
FLOATS = ("F32", "BF16", "F16")
POWERS = ("U8", "F8_E8M0")
"""Dtypes of scales: numbers, and exponents of 2 with 127 added."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store weights.

    kind      of the codes, as `kernels.codes.TABLES` names them: float8, int8, float4; or offset1 … offset8
    codes     dtype of their tensor; it is packed if it is not the dtype of a single code
    packed    the tensor of codes is X.weight_packed, not X.weight
    block     what a scale is for
    scales    dtypes that scales may have
    suffixes  of the tensor of scales: after X.weight, or after X if they begin with a dot
    shaped    there is a tensor X.weight_shape
    divided   scales are divided by X.weight_global_scale
    multiplied  scales are multiplied by X.weight_scale_2
    zeroed    X.weight_zero_point is subtracted from the codes
    inverse   codes are divided by the scales
    stacked   what a scale is for in matrices that are stacked; None: the same
    group     of config.json that has it; "" if there are none
    """

    kind: str
    codes: str
    block: Structure
    packed: bool = False
    scales: tuple[str, ...] = FLOATS
    suffixes: tuple[str, ...] = ("_scale",)
    shaped: bool = False
    divided: bool = False
    multiplied: bool = False
    zeroed: bool = False
    inverse: bool = False
    stacked: Structure | None = None
    group: str = ""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(self.kind[-1])

    def block_of(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of a block of a matrix. A block larger than the matrix is the matrix."""
        high, wide = self.block
        return min(high or rows, max(rows, 1)) or 1, min(wide or cols, max(cols, 1)) or 1

    def tensors(self, spec: TensorSpec, scale: str) -> tuple[TensorSpec, ...]:
        """The stored tensors of a weight: codes and scales; then those of the whole weight. scale: dtype of the scales.

        >>> from weightsmith._base.tensors import DTYPES
        >>> scheme = Scheme("offset4", "I32", (1, 128), packed=True, shaped=True)
        >>> for each in scheme.tensors(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 256)), "BF16"):
        ...     print(each)
        q_proj.weight_packed [64, 32] I32
        q_proj.weight_scale [64, 2] BF16
        q_proj.weight_shape [2] I64
        """
        (rows, cols), name, codes = spec.shape, spec.name, DTYPES[self.codes]
        high, wide = self.block_of(rows, cols)
        grid = -(-rows // high), -(-cols // wide)
        specs = [
            TensorSpec(name + (PACKED if self.packed else ""), codes, (rows, cols * self.bits // (8 * codes.itemsize))),
            TensorSpec(name + self.suffixes[0], DTYPES[scale], (1,) if self.block == TENSOR else grid),
        ]
        if self.shaped:
            specs.append(TensorSpec(name + SHAPE, DTYPES["I64"], (2,)))
        if self.divided:
            specs.append(TensorSpec(name + DIVISOR, DTYPES["F32"], (1,)))
        return tuple(specs)


@dataclass(frozen=True, slots=True)
class ScaledWeight(Weight):
    """A matrix of codes and its scales, or several matrices of one shape, whose rows count as those of one.

    stored   the tensors of codes, and of scales, one for each block: ceil(rows / block[0]) · ceil(cols / block[1]) in row-major
             order; then those of the next five that there are
    kind     of the codes, as `Scheme.kind`
    block    (rows, cols) of a block; the last of a row or column may be smaller
    extent   name of the tensor that holds the shape once more, integers [2]; "" for none
    divisor  name of the tensor, F32 of one element, by which scales are divided; "" for none
    factor   the same, by which they are multiplied
    zeros    name of the tensor of the code of zero of each block, I32 [ceil(rows · bits / 32), blocks of a row]: the lowest
             bits of a word are the first row's; "" where the code of zero is 2^(bits - 1). Blocks then have one row
    index    name of the tensor of the group of each column, I32 [cols]; "" where groups are in order. If it holds a -1, too
    loose    no code is in two words: the rest of each word is empty; see `matrices.py`
    inverse  codes are divided by the scales
    """

    kind: str
    block: tuple[int, int]
    extent: str = ""
    divisor: str = ""
    factor: str = ""
    zeros: str = ""
    index: str = ""
    loose: bool = False
    inverse: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(self.kind[-1])

    @property
    def rows(self) -> int:
        """Rows of all matrices."""
        return math.prod(self.spec.shape[:-1])

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of a column and of a row."""
        high, wide = self.block
        return -(-self.rows // high), -(-self.spec.shape[-1] // wide)

    @property
    def preferred_rows(self) -> int:
        """The height of a block, so that no scale is read twice; 1 if one block is the whole matrix."""
        return self.block[0] if self.block[0] < self.rows else 1

    @property
    def by_rows(self) -> bool:
        """Whole rows are unpacked: codes of other widths than 4 and 8 bits, words that are not full, columns in any order."""
        whole = self.bits in (4, 8) and self.spec.shape[-1] * self.bits % WORD_BITS == 0
        return self.kind.startswith("offset") and (not whole or bool(self.index))

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.codes import TABLES, dequantise

        self._check_extent(stored)
        if self.by_rows:
            self._decode_rows(stored, first, values)
            return
        cols, (block_rows, block_cols), across = self.spec.shape[-1], self.block, self.grid[1]
        for at, part in chunks(first, values):
            band, last = at // cols // block_rows, (at + part.size - 1) // cols // block_rows
            scales = self._scales(stored, band * across, (last + 1) * across)
            begin, end = at * self.bits // 8, -(-(at + part.size) * self.bits // 8)
            codes = self._codes(stored, begin, end)
            if not (self.zeros or self.inverse):
                dequantise(codes, TABLES[self.kind], at, cols, scales, across, block_rows, block_cols, part)
                continue
            dequantise(codes, TABLES[self.kind], at, cols, np.ones_like(scales), across, block_rows, block_cols, part)
            row, col = np.divmod(np.arange(at, at + part.size), cols)
            block = (row // block_rows - band) * across + col // block_cols
            if self.zeros:
                part -= self._zeros(stored, band, last + 1)[block]
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                (np.divide if self.inverse else np.multiply)(part, scales[block], out=part)

    def _codes(self, stored: Tensors, begin: int, end: int) -> Bytes:
        """Bytes begin … end of the codes; of two codes in a byte, the first is the low half."""
        codes = np.empty(end - begin, np.uint8)
        stored.read_into(self.stored[0], begin, codes)
        return codes

    def _decode_rows(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        cols, high, across = self.spec.shape[1], self.block[0], self.grid[1]
        width, groups = words_of(cols, self.bits, loose=self.loose), self._groups_of_columns(stored)
        for row, end, skip, part in bands(first, values, cols):
            words = read_all(stored, self.stored[0], row * width, end * width).view(np.uint32).reshape(-1, width)
            numbers = unpack_rows(words, self.bits, cols, loose=self.loose).astype(np.float32)
            top = row // high
            block = np.arange(row, end) // high - top
            scales = self._scales(stored, top * across, ((end - 1) // high + 1) * across).reshape(-1, across)
            if self.zeros:
                numbers -= self._zero_codes(stored, row, end)[:, groups]
            else:
                numbers -= np.float32(1 << (self.bits - 1))
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                numbers *= scales[block][:, groups]
            part[:] = numbers.reshape(-1)[skip : skip + part.size]

    def _groups_of_columns(self, stored: Tensors) -> npt.NDArray[np.int64]:
        """[cols]: the block of each column."""
        in_order = np.arange(self.spec.shape[-1]) // self.block[1]
        if not self.index:
            return in_order
        index: npt.NDArray[np.int64] = read_all(stored, self.index).astype(np.int64)
        low, top = int(index.min()), int(index.max())
        if low == -1:  # compressed-tensors' mark of groups in order
            return in_order
        if low < 0 or top >= self.grid[1]:
            what = f"tensor {show(self.index)} holds groups {low:,} to {top:,}, and the weight has {self.grid[1]:,}"
            raise FormatError(what, fix=DAMAGED)
        return index

    def _zeros(self, stored: Tensors, first: int, end: int) -> npt.NDArray[np.float32]:
        """The values of the codes of zero in rows first … end: float32 [blocks], in row-major order."""
        return self._zero_codes(stored, first, end).reshape(-1) - np.float32(1 << (self.bits - 1))

    def _zero_codes(self, stored: Tensors, first: int, end: int) -> npt.NDArray[np.float32]:
        """The codes of zero in rows first … end: float32 [rows, blocks of a row]."""
        bits, across = self.bits, self.grid[1]
        run = rows_of_a_word(bits, loose=self.loose)
        start = first // run * run
        begin, stop = (words_of(row, bits, loose=self.loose) for row in (start, end))
        words = read_all(stored, self.zeros, begin * across, stop * across).view(np.uint32).reshape(-1, across)
        codes = unpack_rows(np.ascontiguousarray(words.T), bits, end - start, loose=self.loose)
        return codes.T[first - start :].astype(np.float32)

    def _scales(self, stored: Tensors, first: int, end: int) -> npt.NDArray[np.float32]:
        """Scales first … end, by which the values of the codes are multiplied."""
        from weightsmith._kernels.codecs import decode

        name = self.stored[1]
        dtype = stored.specs[name].dtype
        raw = np.empty((end - first) * dtype.itemsize, np.uint8)
        stored.read_into(name, first * dtype.itemsize, raw)
        if dtype.name in POWERS:
            return powers_of_two(raw)
        scales = np.empty(end - first, np.float32)
        decode(raw, dtype.code, 0, scales.size, scales)
        with np.errstate(all="ignore"):
            if self.divisor:
                scales /= read(stored, self.divisor).reshape(-1)[0]
            if self.factor:
                scales *= read(stored, self.factor).reshape(-1)[0]
        return scales

    def _check_extent(self, stored: Tensors) -> None:
        """Raise FormatError if the stored shape is not that of the codes."""
        if self.extent:
            shape = read(stored, self.extent).tolist()
            if shape != list(self.spec.shape):
                what = f"{self.extent} is {shape}, and the codes are for {list(self.spec.shape)}"
                raise FormatError(what, fix=DAMAGED)


ReadEntry = Callable[[Mapping[str, Any], str, str], tuple[Sequence[Scheme], Sequence[Finding]]]
ReadGroups = Callable[[Mapping[str, Any], str], Callable[[str], str]]
Named = Callable[["ScaledWeight", Sequence[TensorSpec]], str]
Candidates = Mapping["ScaledWeight", Sequence[str]]
"""What a weight may be, each with the groups of config.json that say so."""


def _no_groups(entry: Mapping[str, Any], where: str) -> Callable[[str], str]:
    return lambda module: ""


def read_scaled(
    read_entry: ReadEntry, unused: Sequence[str] = (), groups: ReadGroups = _no_groups, named: Named = lambda weight, stored: ""
) -> Callable[[Tensors, Config, str], Wrapped]:
    """`StoredFormat.read`.

    read_entry  (the entry in config.json, its place, the model) → how weights are stored, and what the user should know
    unused      ends of the names of tensors that the plain model does not have, beside scales of activations
    groups      (the entry, the model) → the `Scheme.group` of a module
    named       (a weight, its stored tensors) → its `Weight.encoding`

    Raises what `read_entry` raises; Unsupported for tensors that are not read; FormatError when tensors and config.json
    contradict each other: no scale, a scale of another shape, a scale without its weight.
    """

    def read_model(stored: Tensors, config: Config, where: str) -> Wrapped:
        place, entry = quantisation_entry(config, where)
        schemes, notes = read_entry(entry, f"{place} in config.json", where)
        specs, dtype = stored.specs, plain_dtype(config)
        unpacked = {scheme.codes for scheme in schemes if not scheme.packed}
        codes = [s for s in specs.values() if is_codes(s) or (s.dtype.name in unpacked and s.name.endswith(".weight"))]
        group_of = groups(entry, where)
        read_weights = (_weight(spec, stored, schemes, dtype, where, group_of) for spec in codes)
        weights = [replace(one, encoding=named(one, [specs[name] for name in one.stored])) for one in read_weights]
        if schemes and not weights:
            expected = " or ".join(dict.fromkeys(scheme.codes for scheme in schemes))
            what = f"{place} in config.json says that the weights are quantised, and no tensor is {expected}"
            raise FormatError(what, where=where, fix=f"Remove {place} from config.json, if the weights are plain numbers.")
        foreign = [name for name in specs if name.rpartition(".")[2] in unused]
        dropped = [name for name in specs if is_unused(name)]
        dropped += [name for name, spec in specs.items() if name.endswith((".k_bias", ".v_bias")) and spec.size == 1]
        hidden = {*foreign, *dropped}
        _check_others([name for name in specs if name not in hidden], specs, weights, where)
        source = DecodedTensors(stored, weights, [*foreign, *dropped], where)
        return Wrapped(source, without_entries(config), (*notes, *dropped_scales(dropped, where)))

    return read_model


def is_codes(spec: TensorSpec) -> bool:
    """The tensor may be the codes of a weight."""
    if spec.dtype.name in ("F8_E4M3", "F8_E5M2"):
        return not spec.name.endswith((".weight_scale", ".weight_scale_inv"))
    return spec.name.endswith(_PACKED) or (spec.dtype.name == "I8" and spec.name.endswith(".weight"))


def is_unused(name: str) -> bool:
    """The tensor is a scale of activations or of the KV cache, which plain weights have not."""
    return name.endswith("_proj_activation_scale") or name.rpartition(".")[2] in _UNUSED


def read_block(value: object, key: str, where: str) -> Structure:
    if isinstance(value, Sequence) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise damaged(f"{show(key)} is {show(value)}, not two positive integers", where)


def _weight(
    spec: TensorSpec,
    stored: Tensors,
    schemes: Sequence[Scheme],
    dtype: DType,
    where: str,
    group_of: Callable[[str], str],
) -> ScaledWeight:
    specs, packed = stored.specs, spec.name.endswith(_PACKED)
    name = spec.name.removesuffix(PACKED) if packed else spec.name
    fitting = [scheme for scheme in schemes if (scheme.packed, scheme.codes) == (packed, spec.dtype.name)]
    stacked = len(spec.shape) == 3 and not packed
    if not fitting or not (len(spec.shape) == 2 or stacked):
        expected = ", ".join(dict.fromkeys(scheme.codes for scheme in schemes if scheme.packed == packed))
        what = f"tensor {show(spec.name)} is {list(spec.shape)} {spec.dtype}; "
        what += f"only matrices of {expected} are read as codes" if expected else "config.json says nothing of such codes"
        raise unsupported(what, where)
    module = name.removesuffix(".weight")
    names = [(module if suffix[0] == "." else name) + suffix for scheme in fitting for suffix in scheme.suffixes]
    scale = next((specs[scale_name] for scale_name in names if scale_name in specs), None)
    if scale is None:
        expected = " or ".join(map(show, dict.fromkeys(names)))
        raise damaged(f"tensor {show(spec.name)} is {spec.dtype}, and has no scale {expected}", where)
    if not any(scale.dtype.name in scheme.scales for scheme in fitting):
        dtypes = dict.fromkeys(dtype for scheme in fitting for dtype in scheme.scales)
        raise unsupported(f"scale {show(scale.name)} is {scale.dtype}, and only {', '.join(dtypes)} are read", where)
    if stacked:
        return _stacked(spec, scale, fitting, dtype, where)
    candidates: dict[ScaledWeight, list[str]] = {}
    for scheme in fitting:
        row = _row_of(stored, spec, scale, name, scheme)
        if row is not None:
            index = name + INDEX if scheme.shaped and name + INDEX in specs else ""
            weight = _described(name, spec, row, scale.name, scheme, dtype, index)
            candidates.setdefault(weight, []).append(scheme.group)
    fitting_scales = {weight: groups for weight, groups in candidates.items() if scale.shape in _spellings(weight.grid)}
    choices = _chosen(stored, group_of, fitting_scales)
    if not candidates:
        raise _no_width(stored, spec, name, fitting, where)
    if len(choices) != 1:
        raise _no_choice(spec, scale, candidates, choices, where)
    (weight,) = choices
    _check_part(weight.extent, _INTEGERS, [(2,)], specs, spec, where)
    for factor in (weight.divisor, weight.factor):
        _check_part(factor, ("F32",), [(1,), ()], specs, spec, where)
    words = words_of(weight.spec.shape[0], weight.bits, loose=weight.loose)
    _check_part(weight.zeros, ("I32",), [(words, weight.grid[1])], specs, spec, where)
    _check_part(weight.index, ("I32",), [weight.spec.shape[1:]], specs, spec, where)
    return weight


def _row_of(stored: Tensors, codes: TensorSpec, scale: TensorSpec, name: str, scheme: Scheme) -> tuple[int, bool] | None:
    """The codes of a row, and whether its words are loose. None if nothing tells how many there are.

    Words need not be full, so the width follows from the groups; of rows with one scale, from the stored shape.
    """
    rows, words = codes.shape
    most = words * codes.dtype.itemsize * 8 // scheme.bits
    if not scheme.shaped:
        return most, False
    if scheme.block[1] is not None and len(scale.shape) == 2:
        loose = is_loose(cols := scale.shape[1] * scheme.block[1], scheme.bits, words)
        if loose is not None:
            return cols, loose
    shape = _stored_shape(stored, name + SHAPE)
    if shape is not None and shape[0] == rows and shape[1] > 0:
        loose = is_loose(shape[1], scheme.bits, words)
        if loose is not None:
            return shape[1], loose
    return (most, False) if WORD_BITS % scheme.bits == 0 else None


def _no_width(stored: Tensors, codes: TensorSpec, name: str, schemes: Sequence[Scheme], where: str) -> CheckpointError:
    """The error of codes whose number in a row is not known."""
    bits, shape = " or ".join(str(scheme.bits) for scheme in schemes), _stored_shape(stored, name + SHAPE)
    if shape is None and name + SHAPE in stored.specs:
        what = f"the widths of codes of {bits} bits are stored with them, and these are not downloaded yet"
        return Unsupported(what, where=where, fix="Download the model first, with `hf download`.")
    what = f"tensor {show(codes.name)} is {list(codes.shape)}, and {show(name + SHAPE)} is {shape or 'missing'}"
    if (
        shape
        and shape[0] == codes.shape[0]
        and any(shape[1] > 0 and words_of(shape[1], s.bits) == codes.shape[1] for s in schemes)
    ):
        return unsupported(
            f"{what}: rows of so few codes of {bits} bits may be stored in two ways, and nothing tells which", where
        )
    return damaged(f"{what}: codes of {bits} bits cannot have this shape", where)


def _no_choice(
    spec: TensorSpec, scale: TensorSpec, candidates: Candidates, choices: Sequence[ScaledWeight], where: str
) -> FormatError:
    """The error of scales that fit no scheme, or several. choices: what is left of the candidates."""
    grids = " or ".join(str(list(grid)) for grid in dict.fromkeys(weight.grid for weight in candidates))
    problem = f"and its blocks need {grids or 'none'}"
    if choices:
        fits = " and ".join(f"{weight.kind} in blocks of {list(weight.block)}" for weight in choices)
        problem = f"which fits {fits}, and nothing tells which it is"
    return damaged(f"scale {show(scale.name)} of {show(spec.name)} {list(spec.shape)} is {list(scale.shape)}, {problem}", where)


def _chosen(stored: Tensors, group_of: Callable[[str], str], candidates: Candidates) -> Sequence[ScaledWeight]:
    """What a weight is, if its scales leave a choice: by the other tensors that it needs, by its stored shape, and if that is
    not on this disk, by the group of its module."""
    weights = list(candidates)
    if len(weights) < 2:
        return weights
    complete = [weight for weight in weights if _is_complete(weight, stored.specs)]
    if len(complete) == 1:
        return complete
    fitting = complete or weights
    if (shape := _stored_shape(stored, fitting[0].extent)) is not None:
        return [weight for weight in fitting if list(weight.spec.shape) == shape] or fitting
    group = group_of(fitting[0].spec.name.removesuffix(".weight"))
    return [weight for weight in fitting if group and group in candidates[weight]] or fitting


def _is_complete(weight: ScaledWeight, specs: Specs) -> bool:
    """All tensors that the weight consists of are there, and no zero points beside them."""
    return all(name in specs for name in weight.stored) and (weight.spec.name + ZEROS in specs) == bool(weight.zeros)


def _stored_shape(stored: Tensors, name: str) -> list[int] | None:
    """The shape that a tensor holds; None if there is none, or if reading it would fetch it from another machine."""
    spec = stored.specs.get(name)
    if spec is None or spec.shape != (2,) or spec.dtype.name not in _INTEGERS or stored.extents(name, 0, spec.nbytes):
        return None
    shape = read_if_here(stored, name)
    return None if shape is None else [int(n) for n in shape]


def _stacked(spec: TensorSpec, scale: TensorSpec, schemes: Sequence[Scheme], dtype: DType, where: str) -> ScaledWeight:
    """The experts of a layer in one tensor, each with blocks of its own: as transformers stores them.

    A scheme with a scale for a matrix may have one for each part of it that was joined: gate and up. Scales of columns may be
    stored as a column.
    """
    count, rows, cols = spec.shape
    for scheme in (replace(scheme, block=scheme.stacked or scheme.block) for scheme in schemes):
        width = cols * spec.dtype.itemsize * 8 // scheme.bits
        high, wide = scheme.block_of(rows, width)
        if scheme.block == TENSOR and len(scale.shape) == 3 and scale.shape[1] and rows % scale.shape[1] == 0:
            high = rows // scale.shape[1]
        shapes = [(count, rows // high, -(-width // wide)), *([(count, width, 1)] if scheme.block == COLUMNS else [])]
        if scale.shape in shapes and rows % high == 0:
            shaped = TensorSpec(spec.name, F32, (count, rows, width))
            return ScaledWeight(shaped, (spec.name, scale.name), dtype, scheme.kind, (high, wide), inverse=scheme.inverse)
    what = f"scale {show(scale.name)} of {show(spec.name)} {list(spec.shape)} is {list(scale.shape)}"
    raise damaged(f"{what}: it has no block for whole rows of each of {count} matrices", where)


def _check_part(
    name: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], specs: Specs, codes: TensorSpec, where: str
) -> None:
    """Raise FormatError if a tensor that belongs to codes is missing, or is another kind of tensor. name: "" for none."""
    part = specs.get(name)
    if not name or (part is not None and part.dtype.name in dtypes and part.shape in shapes):
        return
    stored_part = "missing" if part is None else f"{list(part.shape)} {part.dtype}"
    needed = f"{list(shapes[0])} {dtypes[0]}"
    raise damaged(f"{show(name)} is {stored_part}, and the codes {show(codes.name)} need it to be {needed}", where)


def _described(
    name: str, spec: TensorSpec, row: tuple[int, bool], scale: str, scheme: Scheme, dtype: DType, index: str
) -> ScaledWeight:
    """A weight as a scheme describes it; whether the scales fit is for the caller to check. row: as `_row_of` returns it."""
    rows, (cols, loose) = spec.shape[0], row
    ends = (SHAPE, scheme.shaped), (DIVISOR, scheme.divided), (FACTOR, scheme.multiplied), (ZEROS, scheme.zeroed)
    extent, divisor, factor, zeros = others = [name + end if has else "" for end, has in ends]
    block = scheme.block_of(rows, cols)  # which makes different names of the same block equal
    stored = spec.name, scale, *filter(None, (*others, index))
    whole = TensorSpec(name, F32, (rows, cols))
    parts = extent, divisor, factor, zeros, index
    return ScaledWeight(whole, stored, dtype, scheme.kind, block, *parts, loose, scheme.inverse)


def _spellings(grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes in which scales of a grid of blocks are stored: [rows, cols], [rows] of a column, [] of a single one; and
    [rows, 1, cols, 1], as ModelOpt's."""
    return [grid, (grid[0], 1, grid[1], 1), *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]


def _check_others(others: Sequence[str], specs: Specs, weights: Sequence[ScaledWeight], where: str) -> None:
    """Nothing else in the checkpoint may be part of a quantised weight. others: the tensors that are kept."""
    used = {name for weight in weights for name in weight.stored}
    for name in others:
        if name in used:
            continue
        if name.endswith((*_FOREIGN, *_PARTS)) or specs[name].dtype.name == "F8_E8M0":
            kinds = ", ".join(dict.fromkeys(weight.kind for weight in weights))
            raise unsupported(f"tensor {show(name)} is part of a weight that is not read: the others are {kinds}", where)
        if name.endswith(".weight") and specs[name].dtype.name[0] in "IU":
            raise unsupported(f"tensor {show(name)} is {specs[name].dtype}: config.json says nothing of such codes", where)
        weight = next((name.removesuffix(s) for s in ("_scale_inv", "_scale") if name.endswith(f".weight{s}")), None)
        # A model may have learned scales of its own beside a plain weight, under the name `weight_scale`.
        if weight is not None and (weight not in specs or name.endswith("_inv")):
            raise damaged(f"scale {show(name)} has no quantised weight {show(weight)}", where)
