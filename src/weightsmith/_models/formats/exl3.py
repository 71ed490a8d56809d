"""EXL3's weights: trellis codes of 1 to 8 bits, rotated in blocks of 128 x 128.

X.trellis I16 [inputs / 16, outputs / 16, 16 · K]   a stream of 256 · K bits for each tile; K is a whole number here
X.suh     F16 [inputs]                              scale of each input; older: X.su I16 [inputs / 16], a sign for each
X.svh     F16 [outputs]                             scale of each output; older: X.sv
X.mcg, X.mul1                                       which codebook; neither: the first one, 3inst

`_kernels/trellis.py` has the decoding. Inputs and outputs are padded to multiples of 128 here; how many are part of the model
follows from the sizes in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.dataclass import dataclass
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import ending, plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, read_all, read_columns, reader
from weightsmith.abc.stored import StoredFormat, labelled
from weightsmith.abc.tensors import Tensors

BLOCK = 128
READ_INPUTS = 4096
"""Inputs to read at a time, of 128 outputs: 512 KiB of codes of 8 bits."""

_CODEBOOKS = ("mcg", "mul1")
_PARTS = (".trellis", ".suh", ".svh", ".su", ".sv", *(f".{name}" for name in _CODEBOOKS))
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size")
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Exl3Weight(Weight):
    """One weight.

    spec      the plain weight, without padding
    stored    trellis, scales or signs of inputs and of outputs, the codebook's marker
    bits      K
    codebook  `3inst`, `mcg` or `mul1`
    padded    outputs and inputs as stored, multiples of 128
    """

    bits: int
    codebook: str
    padded: tuple[int, int]

    @property
    def preferred_rows(self) -> int:
        return min(BLOCK, self.spec.shape[0])

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.trellis import dequantise_trellis

        outputs, inputs = self.spec.shape
        width = 16 * self.bits  # 16-bit words of a tile
        input_scales, table = _scales(stored, self.stored[1], 0, self.padded[1]), _table(self.codebook)
        for top in range(first // inputs // BLOCK * BLOCK, -(-(first + values.size) // inputs), BLOCK):
            scales = _scales(stored, self.stored[2], top, top + BLOCK)
            columns = slice(top // 16 * width, (top + BLOCK) // 16 * width)
            for left in range(0, self.padded[1], READ_INPUTS):
                right = min(left + READ_INPUTS, self.padded[1])
                tiles = slice(left // 16, right // 16)
                words = read_columns(stored, self.stored[0], self.padded[0] // 16 * width, tiles, columns).view(np.uint32)
                dequantise_trellis(
                    words.reshape(-1),
                    self.bits,
                    table,
                    input_scales[left:right],
                    scales,
                    top,
                    left,
                    (outputs, inputs),
                    first,
                    values,
                )


def _scales(stored: Tensors, name: str, start: int, end: int) -> npt.NDArray[np.float32]:
    """float32: the scales of inputs or outputs start … end; of signs, bit i of a word is 1 for -1."""
    if stored.specs[name].dtype.name == "I16":
        words = read_all(stored, name, start // 16, end // 16).view(np.uint16)
        signs = words[:, None] >> np.arange(16, dtype=np.uint16) & 1
        return (1 - 2 * signs.reshape(-1).astype(np.float32)).astype(np.float32)
    return read_all(stored, name, start, end).astype(np.float32)


@cache
def _table(codebook: str) -> npt.NDArray[np.float32]:
    """float32 [65536]: the value of each state, a float16."""
    states = np.arange(1 << 16, dtype=np.uint32)
    if codebook == "mul1":
        x = states * np.uint32(0x83DCD12D)
        total = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24)
        half = (total + 0x6400).astype(np.uint16).view(np.float16).astype(np.float64)
        factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        table: npt.NDArray[np.float32] = (half * factor + offset).astype(np.float16).astype(np.float32)
        return table
    x = states * np.uint32(0xCBAC1FED) if codebook == "mcg" else states * np.uint32(89226354) + np.uint32(64248484)
    x = x & np.uint32(0x8FFF8FFF) ^ np.uint32(0x3B603B60)
    low, high = ((x >> shift & 0xFFFF).astype(np.uint16).view(np.float16) for shift in (0, 16))
    return (low + high).astype(np.float32)


def weights(model: QuantisedModel) -> list[Exl3Weight]:
    sizes = _plain_sizes(model.config)
    return [_weight(model, module, sizes) for module in model.modules(".trellis")]


def _weight(model: QuantisedModel, module: str, sizes: set[int]) -> Exl3Weight:
    specs = model.specs
    trellis = model.part(f"{module}.trellis", ("I16",), (None, None, None))
    width = trellis.shape[2]
    if width % 16 == 8:
        what = f"tensor {show(trellis.name)} has {width / 16} bits for each weight; only whole numbers of bits are read"
        raise model.unsupported(what)
    padded = 16 * trellis.shape[1], 16 * trellis.shape[0]
    if width % 16 or not 1 <= width // 16 <= 8 or padded[0] % BLOCK or padded[1] % BLOCK:
        what = f"tensor {show(trellis.name)} is {list(trellis.shape)}, not [8 · n, 8 · m, 16 · K] for a K of 1 to 8"
        raise model.damaged(what)
    names = [trellis.name]
    for scale, sign, size in (("suh", "su", padded[1]), ("svh", "sv", padded[0])):
        if f"{module}.{sign}" in specs and f"{module}.{scale}" not in specs:
            names.append(model.part(f"{module}.{sign}", ("I16",), (size // 16,)).name)
        else:
            names.append(model.part(f"{module}.{scale}", ("F16",), (size,)).name)
    codebooks = [name for name in _CODEBOOKS if f"{module}.{name}" in specs]
    if len(codebooks) > 1:
        raise model.damaged(f"tensors {show(f'{module}.mcg')} and {show(f'{module}.mul1')} name two codebooks for one weight")
    # Weights of several models may be in one file, so another marker than config.json's is legal, but not none.
    if (codebook := model.entry.get("codebook")) in _CODEBOOKS and not codebooks:
        model.part(f"{module}.{codebook}", (), ())
    outputs, inputs = (_plain_size(model, n, sizes, trellis.name) for n in padded)
    bias = specs.get(f"{module}.bias")
    if bias is not None and bias.shape != (outputs,):
        what = (
            f"tensor {show(bias.name)} is {list(bias.shape)}, and its layer has {outputs} outputs: padded biases are not read"
        )
        raise model.unsupported(what)
    return Exl3Weight(
        TensorSpec(f"{module}.weight", F32, (outputs, inputs)),
        (*names, *(f"{module}.{name}" for name in codebooks)),
        plain_dtype(model.config, DTYPES["F16"]),
        width // 16,
        codebooks[0] if codebooks else "3inst",
        padded,
    )


def _plain_sizes(config: Mapping[str, Any]) -> set[int]:
    """Numbers of inputs and outputs that layers of this model may have, as far as config.json says."""
    sizes: set[object] = set()
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        sizes |= {part[key] for key in _SIZES if type(part.get(key)) is int}
        width, heads = part.get("head_dim"), [part[key] for key in _HEADS if type(part.get(key)) is int and part[key] > 0]
        if width is None and heads and type(part.get("hidden_size")) is int:
            width = part["hidden_size"] // heads[0]
        if type(width) is int:
            sizes |= {width * n for n in heads}
    return {n for n in sizes if isinstance(n, int) and n > 0}


def _plain_size(model: QuantisedModel, padded: int, sizes: set[int], name: str) -> int:
    """The size that was padded to this multiple of 128: the only known one that fits, or itself where none does."""
    fitting = sorted(n for n in sizes if -(-n // BLOCK) * BLOCK == padded)
    if len(fitting) > 1:
        what = f"tensor {show(name)} is padded to {padded:,}, and sizes in config.json leave open from what: {fitting}"
        raise model.unsupported(what)
    return fitting[0] if fitting else padded


_read = reader("EXL3", _PARTS, weights)
FORMAT = StoredFormat("exl3", "EXL3", recogniser(ending(".trellis"), "exl3"), _read, {".trellis": labelled("EXL3")})
