"""EXL3's weights as numbers. How many of the padded inputs and outputs are part of the model follows from config.json.

Names are those of the Hugging Face model, but for Phi-3, whose projections are joined again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import plain_dtype
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, join_projections, read_all, read_columns, reader
from weightsmith._models.formats.exl3.layout import BLOCK, CODEBOOKS, Rate, padded_size, values_of
from weightsmith._models.structure.projections import projection_role
from weightsmith.abc.tensors import Tensors

READ_INPUTS = 4096
"""Inputs to read at a time, of 128 outputs: 512 KiB of codes of 8 bits."""

_PARTS = (".trellis", ".suh", ".svh", ".su", ".sv", *(f".{name}" for name in CODEBOOKS))
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size")
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Exl3Weight(Weight):
    """One weight.

    spec      the plain weight, without padding
    stored    trellis, scales or signs of inputs and of outputs, the codebook's marker
    rate      bits
    codebook  `3inst`, `mcg` or `mul1`
    padded    outputs and inputs as stored, multiples of 128
    """

    rate: Rate
    codebook: str
    padded: tuple[int, int]

    @property
    def preferred_rows(self) -> int:
        return min(BLOCK, self.spec.shape[0])

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.jit import writable
        from weightsmith._kernels.trellis import dequantise_trellis

        outputs, inputs = self.spec.shape
        width = self.rate.words  # 16-bit words of a tile
        input_scales, table = _scales(stored, self.stored[1], 0, self.padded[1]), values_of(self.codebook)
        for top in range(first // inputs // BLOCK * BLOCK, -(-(first + values.size) // inputs), BLOCK):
            scales = _scales(stored, self.stored[2], top, top + BLOCK)
            columns = slice(top // 16 * width, (top + BLOCK) // 16 * width)
            for first_input in range(0, self.padded[1], READ_INPUTS):
                end_input = min(first_input + READ_INPUTS, self.padded[1])
                tiles = slice(first_input // 16, end_input // 16)
                words = read_columns(stored, self.stored[0], self.padded[0] // 16 * width, tiles, columns).view(np.uint32)
                dequantise_trellis(
                    writable(words.reshape(-1)),
                    self.rate.steps,
                    table,
                    input_scales[first_input:end_input],
                    scales,
                    top,
                    first_input,
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


def weights(model: QuantisedModel) -> Sequence[Weight]:
    sizes = _plain_sizes(model.config)
    read_weights = [_weight(model, module, sizes) for module in model.modules(".trellis")]
    return join_projections(read_weights) if model.config.get("architectures") == ["Phi3ForCausalLM"] else read_weights


def _weight(model: QuantisedModel, module: str, sizes: set[int]) -> Exl3Weight:
    specs = model.specs
    trellis = model.part(f"{module}.trellis", ("I16",), (None, None, None))
    width = trellis.shape[2]
    padded = 16 * trellis.shape[1], 16 * trellis.shape[0]
    if width % 8 or not 16 <= width <= 128 or padded[0] % BLOCK or padded[1] % BLOCK:
        what = f"tensor {show(trellis.name)} is {list(trellis.shape)}, not [8 · n, 8 · m, 16 · K] for a K of 1 to 8 in halves"
        raise model.damaged(what)
    names = [trellis.name]
    for scale, sign, size in (("suh", "su", padded[1]), ("svh", "sv", padded[0])):
        if f"{module}.{sign}" in specs and f"{module}.{scale}" not in specs:
            names.append(model.part(f"{module}.{sign}", ("I16",), (size // 16,)).name)
        else:
            names.append(model.part(f"{module}.{scale}", ("F16",), (size,)).name)
    codebooks = [name for name in CODEBOOKS if f"{module}.{name}" in specs]
    if len(codebooks) > 1:
        raise model.damaged(f"tensors {show(f'{module}.mcg')} and {show(f'{module}.mul1')} name two codebooks for one weight")
    # Weights of several models may be in one file, so another marker than config.json's is legal, but not none.
    codebook = model.entry.get("codebook")
    if isinstance(codebook, str) and codebook in CODEBOOKS and not codebooks:
        model.part(f"{module}.{codebook}", (), ())
    named = _named_sizes(model.config, module)
    outputs, inputs = (_plain_size(model, n, sizes, known, trellis.name) for n, known in zip(padded, named, strict=True))
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
        Rate(width // 8),
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


def _named_sizes(config: Mapping[str, Any], module: str) -> tuple[int | None, int | None]:
    """Outputs and inputs that a module of this name has in most models, where config.json gives them."""
    parts = [part for part in (config, *config.values()) if isinstance(part, Mapping) and "hidden_size" in part]
    if not parts:
        return None, None
    part = parts[0]

    def size(key: str) -> int | None:
        value = part.get(key)
        return value if type(value) is int and value > 0 else None

    def heads(key: str) -> int | None:
        count, width, all_heads = size(key), size("head_dim"), size(_HEADS[0])
        hidden = size("hidden_size")
        if width is None and hidden is not None and all_heads is not None:
            width = hidden // all_heads
        return None if count is None or width is None else count * width

    hidden, inner = size("hidden_size"), size("intermediate_size")
    if "experts" in module.split("."):
        inner = size("moe_intermediate_size") or inner
    match projection_role(module):
        case "q":
            return heads(_HEADS[0]), hidden
        case "o":
            return hidden, heads(_HEADS[0])
        case "k" | "v":
            return heads(_HEADS[1]) or heads(_HEADS[0]), hidden
        case "gate" | "up":
            return inner, hidden
        case "down":
            return hidden, inner
    return (size("vocab_size"), hidden) if module.rpartition(".")[2] == "lm_head" else (None, None)


def _plain_size(model: QuantisedModel, padded: int, sizes: set[int], size: int | None, name: str) -> int:
    """The size that was padded to this multiple of 128: its own, else the only known one that fits, or itself if none does."""
    if size is not None and padded_size(size) == padded:
        return size
    fitting = sorted(n for n in sizes if padded_size(n) == padded)
    if len(fitting) > 1:
        what = f"tensor {show(name)} is padded to {padded:,}, and sizes in config.json leave open from what: {fitting}"
        raise model.unsupported(what)
    return fitting[0] if fitting else padded


read = reader("EXL3", _PARTS, weights)
