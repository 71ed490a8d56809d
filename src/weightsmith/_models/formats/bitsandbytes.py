"""bitsandbytes' weights: 4-bit codes of a table (NF4, FP4) with a scale for each block, and INT8 rows.

4 bits  X.weight, bytes [n / 2, 1]: two codes of the flattened weight in each, the first in the high half
        X.weight.quant_map F32 [16]: the value of each code
        X.weight.absmax: the scale of each block, F32; or U8 codes with their own table (nested_quant_map) and scales
        (nested_absmax), plus an offset
        X.weight.quant_state.bitsandbytes__nf4 U8: JSON with the shape, the block sizes and the dtype
INT8    X.weight I8 [outputs, inputs], X.SCB F32 [outputs]: the largest magnitude of each row, which is code 127

The JSON of 4-bit weights is tensor data, and the shapes are nowhere else, so it is read when the model is opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPES, DType, TensorSpec
from weightsmith._models.formats.config import PLAIN_FIX, plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, chunks, read_all, read_json, reader
from weightsmith.abc.stored import StoredFormat, labelled
from weightsmith.abc.tensors import Tensors

_MAX_BLOCK = 1 << 20
_STATE = ".quant_state.bitsandbytes__"
_PARTS = (f"{_STATE}nf4", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")  # after X.weight
_INT8_STEP = np.float32(1 / 127)
_BYTES = ("U8", "I8", "BF16", "F16", "F32")  # the dtypes under which codes are stored: `bnb_4bit_quant_storage`


@dataclass(frozen=True, slots=True)
class FourBit(Weight):
    """A weight of 4-bit codes.

    stored  codes, table, scales, and the tensors of nested scales
    block   elements that share a scale
    nested  (scales that share a scale of their own, the offset of scales), None for plain scales
    """

    block: int
    nested: tuple[int, float] | None

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.codes import dequantise_nibbles

        name = self.spec.name
        table = read_all(stored, f"{name}.quant_map")
        for begin, part in chunks(first, values):
            end = begin + part.size
            codes = np.empty((end + 1) // 2 - begin // 2, np.uint8)
            stored.read_into(name, begin // 2, codes)
            scales = self._scales(stored, begin // self.block, -(-end // self.block))
            dequantise_nibbles(codes, begin, table, self.block, scales, part)

    def _scales(self, stored: Tensors, start: int, end: int) -> npt.NDArray[np.float32]:
        """float32: the scales of blocks start … end."""
        name = self.spec.name
        maxima = read_all(stored, f"{name}.absmax", start, end)
        if self.nested is None:
            return maxima
        block, offset = self.nested
        scales = read_all(stored, f"{name}.nested_absmax", start // block, -(-end // block))
        values = read_all(stored, f"{name}.nested_quant_map")[maxima]
        with np.errstate(all="ignore"):  # NaN and infinities are the caller's to refuse
            result: npt.NDArray[np.float32] = values * scales[np.arange(start, end) // block - start // block]
            result += np.float32(offset)
        return result


class EightBit(Weight):
    """A weight of INT8 rows: code · SCB · (1 / 127)."""

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        module = self.spec.name.removesuffix(".weight")
        layout = f"{module}.weight_format"
        if layout in self.stored and int(read_all(stored, layout)[0]) != 0:
            what = f"tensor {show(layout)} names a layout of INT8 codes for one kind of GPU; only rows (0) are read"
            raise Unsupported(what, fix=PLAIN_FIX)
        cols = self.spec.shape[1]
        for begin, part in chunks(first, values):
            row, end = begin // cols, begin + part.size
            scales = read_all(stored, f"{module}.SCB", row, -(-end // cols))
            codes = read_all(stored, self.spec.name, begin, end)
            with np.errstate(all="ignore"):
                np.multiply(codes, scales[np.arange(begin, end) // cols - row], out=part)
            part *= _INT8_STEP


def is_state(spec: TensorSpec) -> bool:
    """Whether a tensor describes a weight."""
    return _STATE in spec.name or spec.name.endswith(".SCB")


def weights(model: QuantisedModel) -> list[Weight]:
    dtype = plain_dtype(model.config, DTYPES["F16"])
    read_weights: list[Weight] = []
    for name in model.specs:
        if _STATE in name:
            read_weights.append(_four_bit(model, name))
        elif name.endswith(".SCB"):
            read_weights.append(_eight_bit(model, name.removesuffix(".SCB"), dtype))
    return read_weights


def _eight_bit(model: QuantisedModel, module: str, dtype: DType) -> EightBit:
    weight = model.part(f"{module}.weight", ("I8",), (None, None))
    names = [weight.name, model.part(f"{module}.SCB", ("F32",), weight.shape[:1]).name]
    if f"{module}.weight_format" in model.specs:
        names.append(model.part(f"{module}.weight_format", ("U8",), ()).name)
    return EightBit(TensorSpec(weight.name, F32, weight.shape), tuple(names), dtype)


def _four_bit(model: QuantisedModel, name: str) -> FourBit:
    """The weight that a quant_state describes."""
    specs = model.specs
    weight_name, _, kind = name.partition(_STATE)
    state = read_json(model.stored, name, model.where, "the shapes of bitsandbytes weights")

    def bad(key: str, value: object, expected: str) -> FormatError:
        return model.damaged(f"{key} in {show(name)} is {show(value)}, not {expected}")

    def block_of(key: str) -> int:
        value = state.get(key)
        if type(value) is not int or not 1 <= value <= _MAX_BLOCK:
            raise bad(key, value, f"a whole number, 1 to {_MAX_BLOCK:,}")
        return value

    if kind not in ("nf4", "fp4") or state.get("quant_type") != kind:
        raise model.unsupported(f"quant_type {show(state.get('quant_type'))} of {show(name)} is not read, only nf4 and fp4")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int or n < 0 for n in shape):
        raise bad("shape", shape, "two whole numbers")
    block = block_of("blocksize")
    size = math.prod(shape)
    codes = specs.get(weight_name)
    if codes is None or codes.dtype.name not in _BYTES or codes.nbytes != -(-size // 2):
        stored_codes = "is missing" if codes is None else f"{list(codes.shape)} {codes.dtype} has {codes.nbytes:,} bytes"
        what = f"tensor {show(weight_name)} {stored_codes}, and a weight {shape} of 4-bit codes needs {-(-size // 2):,} bytes"
        raise model.damaged(what)
    table = model.part(f"{weight_name}.quant_map", ("F32",), (16,))
    blocks = -(-size // block)
    names, nested = [weight_name, name, table.name, f"{weight_name}.absmax"], None
    if any(f"{weight_name}.{part}" in specs for part in ("nested_absmax", "nested_quant_map")):
        model.part(f"{weight_name}.absmax", ("U8",), (blocks,))
        width = block_of("nested_blocksize")
        names.append(model.part(f"{weight_name}.nested_absmax", ("F32",), (-(-blocks // width),)).name)
        names.append(model.part(f"{weight_name}.nested_quant_map", ("F32",), (256,)).name)
        offset = state.get("nested_offset")
        if not isinstance(offset, int | float) or not abs(offset) <= float(np.finfo(np.float32).max):
            raise bad("nested_offset", offset, "a number that float32 holds")
        nested = width, float(offset)
    else:
        model.part(f"{weight_name}.absmax", ("F32",), (blocks,))
    dtype = BY_TORCH_NAME.get(value) if isinstance(value := state.get("dtype"), str) else None
    if dtype is None or dtype.name not in ("BF16", "F16", "F32"):
        raise bad("dtype", value, "bfloat16, float16 or float32")
    return FourBit(TensorSpec(weight_name, F32, (shape[0], shape[1])), tuple(names), dtype, block, nested)


_read = reader("bitsandbytes", _PARTS, weights)
FORMAT = StoredFormat(
    "bitsandbytes",
    "bitsandbytes",
    recogniser(is_state, "bitsandbytes"),
    _read,
    {".absmax": labelled("bitsandbytes 4-bit"), ".SCB": labelled("bitsandbytes int8")},
)
