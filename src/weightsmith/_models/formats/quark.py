"""AMD Quark's weights: quant_method quark. They are read: FP8, MXFP4, and integers of 4 and 8 bits.

X.weight             F8_E4M3 or I8 [rows, cols], with a scale for the matrix or for each row
                     U8 [rows, cols / 2]: two float4 in a byte, the first in the low half, with a scale for 32 elements
                     integers of the matrix or of rows: I32 [rows, cols / 8] of 4 bits, I8 or U8 [rows, cols] of 8
                     integers of groups: I32 [cols, rows / 8] of 4 bits, I8 or U8 [cols, rows] of 8
X.weight_scale       by which codes are multiplied; of float4: U8, an exponent of 2 with 127 added; of groups of integers
                     [groups of a row, rows]
X.weight_zero_point  of integers: codes in the same layout, which are subtracted; missing if all are 0

int4 and int8 are two's complement, uint4 and uint8 are not. Eight codes of 4 bits are in a word of 32: pack_method `reorder`
puts codes 0, 2, 4, 6, 1, 3, 5 and 7 into its half bytes, from the lowest, as AWQ does; `order` puts them in order.

Modules may have settings of their own (layer_quant_config, layer_type_quant_config).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.config import dropped_scales, plain_dtype, quantisation_entry, recogniser, setting, unsupported
from weightsmith._models.formats.decoded import (
    F32,
    Band,
    DecodedTensors,
    QuantisedModel,
    TransposedWeight,
    Weight,
    bands,
    read_all,
    read_columns,
)
from weightsmith._models.formats.matrices import MXFP4_GROUP
from weightsmith._models.formats.scaled import FLOATS, TENSOR, ZEROS, Scheme, is_unused, read_scaled
from weightsmith.abc.stored import Config, Rows, StoredFormat, Wrapped
from weightsmith.abc.tensors import Tensors

_SCHEMES = {
    ("fp8_e4m3", "per_tensor"): Scheme("float8", "F8_E4M3", TENSOR),
    ("fp8_e4m3", "per_channel"): Scheme("float8", "F8_E4M3", (1, None)),
    ("int8", "per_tensor"): Scheme("int8", "I8", TENSOR),
    ("int8", "per_channel"): Scheme("int8", "I8", (1, None)),
    ("fp4", "per_group"): Scheme("float4", "U8", (1, MXFP4_GROUP), scales=("U8",)),
}

_ROTATIONS = ("r4", "online_r1_rotation")
"""Keys of algo_config: the inputs of a layer are rotated while it runs, and so is its weight."""
_ROTATED = (".input_rotation", ".input_prescale")


def is_codes(spec: TensorSpec) -> bool:
    return spec.dtype.name in ("F8_E4M3", "I8", "U8", "I32") and spec.name.endswith(".weight")


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How floats and symmetric bytes are stored, from the entry in config.json; see `scaled.read_scaled`."""
    return [scheme for scheme in _schemes(entry, where) if isinstance(scheme, Scheme)], []


def _schemes(entry: Mapping[str, Any], where: str) -> list[Scheme | IntegerScheme]:
    """All that weights may be."""
    export = entry.get("export")
    if isinstance(export, Mapping):
        setting(export, "weight_format", "real_quantized", ("real_quantized",), where)
    algorithms = entry.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(algorithm, Mapping) and (rotation := next((key for key in _ROTATIONS if algorithm.get(key)), "")):
            raise unsupported(f"Quark's weights with algo_config.{rotation} are not read: their inputs are rotated", where)
    return list(dict.fromkeys(_scheme(label, weights, where) for label, weights in _weights(entry, where)))


def _weights(entry: Mapping[str, Any], where: str) -> Iterator[tuple[str, object]]:
    """The settings of weights, each with its place in the entry."""
    settings: dict[str, object] = {"global_quant_config": entry.get("global_quant_config")}
    for key in ("layer_quant_config", "layer_type_quant_config"):
        if isinstance(section := entry.get(key), Mapping):
            settings |= {f"{key}.{name}": value for name, value in section.items()}
    for label, value in settings.items():
        if isinstance(value, Mapping) and value.get("bias") is not None:
            raise unsupported(f"Quark's quantised biases are not read ({show(label)})", where)
        if isinstance(value, Mapping) and value.get("weight") is not None:
            yield label, value["weight"]


def _scheme(label: str, weights: object, where: str) -> Scheme | IntegerScheme:
    if not isinstance(weights, Mapping):
        raise unsupported(f"Quark's weights in several stages are not read ({show(label)})", where)
    dtype, structure = str(weights.get("dtype")), str(weights.get("qscheme"))
    scheme = _SCHEMES.get((dtype, structure))
    if dtype in _INTEGERS and structure in _STRUCTURES and (scheme is None or weights.get("symmetric") is not True):
        return _integers(label, weights, where)
    if scheme is None:
        kinds = ", ".join(f"{dtype} {kind}" for dtype, kind in _SCHEMES)
        what = f"Quark's weights with dtype {show(weights.get('dtype'))} {show(weights.get('qscheme'))} are not read"
        raise unsupported(f"{what}, only {kinds}, and {', '.join(_INTEGERS)} {', '.join(_STRUCTURES)} ({show(label)})", where)
    if dtype == "fp4":
        for key, value in (("group_size", MXFP4_GROUP), ("scale_format", "e8m0")):
            setting(weights, key, None, (value,), where)
    if structure == "per_channel":
        setting(weights, "ch_axis", 0, (0,), where)
    return scheme


# ---- integers

_INTEGERS = {"int4": (4, True), "uint4": (4, False), "int8": (8, True), "uint8": (8, False)}
"""dtype → bits of a code, and whether it has a sign."""
_STRUCTURES = ("per_tensor", "per_channel", "per_group")
_CODES_OF_A_WORD = 8
_ORDERS = {"reorder": (0, 4, 1, 5, 2, 6, 3, 7), "order": tuple(range(_CODES_OF_A_WORD))}
"""pack_method → the half byte that holds code i of 8."""


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """One way to store integers.

    bits    of a code
    signed  codes are two's complement
    group   columns that share a scale; 0: all of a row; None: all of the matrix
    """

    bits: int
    signed: bool
    group: int | None

    @property
    def dtype(self) -> str:
        """The dtype of codes and zeros."""
        return "I32" if self.bits == 4 else "I8" if self.signed else "U8"

    @property
    def per_word(self) -> int:
        return _CODES_OF_A_WORD if self.dtype == "I32" else 1

    @property
    def sign(self) -> int:
        """The bit that is flipped so that codes and zeros are whole numbers from 0; their difference stays the same."""
        return 1 << (self.bits - 1) if self.signed else 0


def _integers(label: str, weights: Mapping[str, Any], where: str) -> IntegerScheme:
    bits, signed = _INTEGERS[str(weights["dtype"])]
    setting(weights, "zero_point_type", "int32", ("int32",), where)
    structure = weights["qscheme"]
    if structure != "per_group":
        if structure == "per_channel":
            setting(weights, "ch_axis", 0, (0,), where)
        return IntegerScheme(bits, signed, None if structure == "per_tensor" else 0)
    setting(weights, "ch_axis", -1, (1, -1), where)
    group = weights.get("group_size")
    if type(group) is not int or group < 1:
        raise unsupported(f"Quark's weights with group_size {show(group)} are not read ({show(label)})", where)
    return IntegerScheme(bits, signed, group)


@dataclass(frozen=True, slots=True)
class _Codes:
    """Codes in tensors of one layout. order: of 4 bits, the half byte that holds code i of 8."""

    scheme: IntegerScheme
    order: tuple[int, ...]

    def whole_numbers(self, stored: npt.NDArray[Any], count: int) -> npt.NDArray[np.uint8]:
        """Rows of stored codes → [rows, count]: from 0, with the sign flipped."""
        from weightsmith._kernels.codes import unpack_nibbles

        scheme = self.scheme
        if scheme.per_word == 1:
            return np.ascontiguousarray(stored).view(np.uint8) ^ np.uint8(scheme.sign)
        codes = np.empty((len(stored), _CODES_OF_A_WORD * stored.shape[1]), np.uint8)
        words = np.ascontiguousarray(stored).view(np.uint32).reshape(-1)
        unpack_nibbles(words, np.array(self.order, np.uint32), codes.reshape(-1))
        return np.ascontiguousarray(codes[:, :count] ^ np.uint8(scheme.sign))


@dataclass(frozen=True, slots=True)
class GroupedIntegers(TransposedWeight):
    """Codes of groups, stored as [inputs, outputs]. stored: codes, scales, and zeros if there are some."""

    codes: _Codes

    def band(self, stored: Tensors, outputs: slice) -> Band:
        name, scales, *zeros = self.stored
        width, inputs = self.spec.shape
        codes, count = self._part(stored, name, inputs, outputs), outputs.stop - outputs.start
        if zeros:
            zero = self._part(stored, zeros[0], self.groups, outputs)
        else:
            zero = np.full((self.groups, count), self.codes.scheme.sign, np.uint8)
        return codes, zero, read_columns(stored, scales, width, slice(0, self.groups), outputs).astype(np.float32)

    def _part(self, stored: Tensors, name: str, rows: int, outputs: slice) -> npt.NDArray[np.uint8]:
        n = self.codes.scheme.per_word
        width, packed = -(-self.spec.shape[0] // n), slice(outputs.start // n, -(-outputs.stop // n))
        return self.codes.whole_numbers(read_columns(stored, name, width, slice(0, rows), packed), outputs.stop - outputs.start)


@dataclass(frozen=True, slots=True)
class Integers(Weight):
    """Codes of rows, or of the whole matrix. stored: codes, scales, and zeros if there are some."""

    codes: _Codes

    def decode(self, stored: Tensors, first: int, values: Rows) -> None:
        scheme, cols = self.codes.scheme, self.spec.shape[1]
        name, scale, *zero = self.stored
        width = -(-cols // scheme.per_word)
        for row, end, skip, part in bands(first, values, cols):
            raw = read_all(stored, name, row * width, end * width).reshape(-1, width)
            numbers = self.codes.whole_numbers(raw, cols).astype(np.float32)
            numbers -= self._zeros(stored, zero[0])[row:end] if zero and scheme.group == 0 else self._zero(stored, *zero)
            of_rows = read_all(stored, scale, row, end)[:, None] if scheme.group == 0 else read_all(stored, scale)
            with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
                numbers *= of_rows.astype(np.float32)
            part[:] = numbers.reshape(-1)[skip : skip + part.size]

    def _zeros(self, stored: Tensors, name: str) -> npt.NDArray[np.float32]:
        """The zero of each row: [rows, 1]."""
        return self.codes.whole_numbers(read_all(stored, name)[None], self.spec.shape[0]).astype(np.float32).T

    def _zero(self, stored: Tensors, *name: str) -> np.float32:
        """The zero of the matrix, which is not packed."""
        scheme = self.codes.scheme
        value = int(read_all(stored, name[0])[0]) if name else 0
        return np.float32(value & ((1 << scheme.bits) - 1) ^ scheme.sign)


def _integer_weight(
    model: QuantisedModel, codes: TensorSpec, schemes: Sequence[IntegerScheme], order: tuple[int, ...]
) -> Weight | None:
    """A matrix of integers; None if it is none of these schemes. Raises Unsupported if it may be several."""
    scale, zero = (model.specs.get(codes.name + end) for end in ("_scale", ZEROS))
    if scale is None or scale.dtype.name not in FLOATS:
        return None
    fitting = [(scheme, shape) for scheme in schemes if (shape := _plain_shape(codes, scale, scheme)) is not None]
    if len(fitting) > 1:
        what = f"tensor {show(codes.name)} {list(codes.shape)} {codes.dtype} fits several settings of config.json"
        raise model.unsupported(f"{what}, and nothing tells which it has")
    if not fitting:
        return None
    ((scheme, shape),) = fitting
    names = [codes.name, scale.name]
    if zero is not None:
        n = scheme.per_word
        packed = {None: scale.shape, 0: (-(-shape[0] // n),)}.get(
            scheme.group, (shape[1] // (scheme.group or 1), -(-shape[0] // n))
        )
        names.append(model.part(zero.name, (scheme.dtype,), packed).name)
    spec, dtype, layout = TensorSpec(codes.name, F32, shape), plain_dtype(model.config, scale.dtype), _Codes(scheme, order)
    if scheme.group:
        return GroupedIntegers(spec, tuple(names), dtype, shape[1] // scheme.group, scheme.group, layout)
    return Integers(spec, tuple(names), dtype, layout)


def _plain_shape(codes: TensorSpec, scale: TensorSpec, scheme: IntegerScheme) -> tuple[int, int] | None:
    """Rows and columns of the weight, if codes and scales have shapes of a scheme."""
    if codes.dtype.name != scheme.dtype or len(codes.shape) != 2:
        return None
    n = scheme.per_word
    if not scheme.group:
        rows, cols = codes.shape[0], codes.shape[1] * n
        fits = scale.size == 1 if scheme.group is None else scale.shape == (rows,)
        return (rows, cols) if fits else None
    cols = codes.shape[0]
    if len(scale.shape) != 2 or scale.shape[0] * scheme.group != cols or -(-scale.shape[1] // n) != codes.shape[1]:
        return None
    return scale.shape[1], cols


def _read_integers(stored: Tensors, config: Config, where: str, schemes: Sequence[IntegerScheme]) -> Wrapped:
    """The model, if some of its weights are integers; others may be stored in another way."""
    model = QuantisedModel(stored, config, where)
    export = model.entry.get("export")
    method = model.setting("pack_method", "reorder", tuple(_ORDERS), export if isinstance(export, Mapping) else {})
    codes = [spec for spec in model.specs.values() if is_codes(spec) and spec.dtype.name in ("I32", "I8", "U8")]
    weights = [_integer_weight(model, spec, schemes, _ORDERS[method]) for spec in codes]
    read = [weight for weight in weights if weight is not None]
    names = {weight.spec.name for weight in read}
    dropped = [name for name in model.specs if is_unused(name)]
    if any(is_codes(spec) and spec.name not in names and spec.dtype.name != "I32" for spec in model.specs.values()):
        return _READ(DecodedTensors(stored, read, (), where), config, where)
    wrapped = model.decoded(read, "Quark", (".weight", ".weight_scale", ".weight_zero_point"), dropped)
    return replace(wrapped, notes=tuple(dropped_scales(dropped, where)))


_READ = read_scaled(read_entry, unused=(f"weight{ZEROS}",))


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    if rotation := next((n for n in stored.specs if n.endswith(_ROTATED) or ".shared_input_rotation_" in f".{n}"), ""):
        raise unsupported(f"tensor {show(rotation)} changes the inputs of its layer: such weights are not read", where)
    schemes = _schemes(quantisation_entry(config, where)[1], where)
    if integers := [scheme for scheme in schemes if isinstance(scheme, IntegerScheme)]:
        return _read_integers(stored, config, where, integers)
    return _READ(stored, config, where)


FORMAT = StoredFormat("quark", "Quark", recogniser(is_codes, "quark"), read)
