"""MLX's weights: rows of codes packed along the inputs, in groups with a scale.

X.weight U32 [outputs, inputs · bits / 32]   each row is a stream of bits, the lowest bit of a word first
X.scales     [outputs, inputs / group_size]
X.biases     [outputs, inputs / group_size]  of mode affine

mode    bits           group_size   a weight is
affine  2 3 4 5 6 8    any          code · scale + bias
mxfp4   4              32           float4 · 2 ^ (scale - 127)
mxfp8   8              32           float8 (E4M3) · 2 ^ (scale - 127)
nvfp4   4              16           float4 · scale, a float8 (E4M3)

config.json has the settings of the model, and under the names of modules those that differ. Embeddings are quantised too.

mlx-4bit and mlx-8bit are affine codes with scales and biases of the weight's dtype. The bias is the end of the group's range
that has the larger magnitude, which is exact, and the scale is adjusted so that 0 is a multiple of it; the scale is negative if
that end is the positive one. Codes are computed from scale and bias as stored. As mlx-lm does, embeddings and heads are
quantised too.

**Error.** |code · scale + bias - x| ≤ (1 + 2^(bits - 8)) · |scale| for weights of bfloat16: half a step; up to one at the far
end of the range, because the adjusted scale may be smaller by 1/16; and the rounding of the scale, which grows with the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import config_entries, plain_dtype
from weightsmith._models.formats.decoded import F32, QuantisedModel, Weight, bands, read_all, reader
from weightsmith._models.formats.matrices import MXFP4_GROUP, NVFP4_GROUP, SUFFIX, MatrixEncoding, powers_of_two
from weightsmith._models.formats.mlx_settings import Width, check_widths, own_settings
from weightsmith._models.structure.configs import EXPERT_COUNTS
from weightsmith.abc.stored import Bytes, Config, Rows, Specs, StoredFormat, Writing, grouped_name
from weightsmith.abc.tensors import Tensors

_BITS = (2, 3, 4, 5, 6, 8)
_FIXED = {"mxfp4": (4, MXFP4_GROUP), "mxfp8": (8, MXFP4_GROUP), "nvfp4": (4, NVFP4_GROUP)}
"""Bits and group size of the modes that have only one."""
_MODES = ("affine", *_FIXED)

GROUPS = (64, 32, 128)
"""Group sizes, the default first."""

STACK = "switch_mlp"
"""The module of experts whose matrices are one tensor [experts, outputs, inputs]."""

JOINED = frozenset(
    """
    afmoe bailing_hybrid bailing_moe bailing_moe_linear deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 exaone_moe glm4_moe
    glm4_moe_lite hunyuan jamba kimi_k2 kimi_vl longcat_flash mimo_v2_flash mistral4 mixtral olmoe phimoe phixtral qwen2_moe
    """.split()
)
"""Values of `model_type` of which mlx-lm 0.32.2 joins codes, scales and biases of experts while it loads them (`sanitize`)."""

STACKED = frozenset({"ernie4_5_moe", "qwen3_moe"})
"""Values of `model_type` of which it joins plain experts only, so quantised ones must be stacked. Qwen3-Next and LFM2-MoE are
not among them: if their experts are stacked, mlx-lm does not convert other tensors either.
"""

_READ: Mapping[str, Mapping[str, str]] = {
    **{model_type: {} for model_type in ("glm4_moe", "olmoe", "qwen2_moe", *STACKED)},
    "mixtral": {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
}
"""Values of `model_type` whose stacked experts are read, with projections that have other names. Nothing else in their files
from mlx-lm differs from those of transformers.
"""

_SMALLEST_SCALE = np.float32(1e-7)
"""MLX's."""


# ---- reading


@dataclass(frozen=True, slots=True)
class MlxWeight(Weight):
    """One weight.

    stored      weight, scales; biases of mode affine
    mode        `affine`, `mxfp4`, …
    bits        of a code
    group_size  inputs of a group
    top         of the stored rows, where those of an expert begin
    """

    mode: str
    bits: int
    group_size: int
    top: int = 0

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        from weightsmith._kernels.packed import dequantise_rows

        inputs, table = self.spec.shape[1], self._table()
        width, groups = inputs * self.bits // 32, inputs // self.group_size
        for row, bottom, skip, part in bands(first, values, inputs):
            row, bottom = row + self.top, bottom + self.top
            words = read_all(stored, self.stored[0], row * width, bottom * width)
            scales = self._scales(read_all(stored, self.stored[1], row * groups, bottom * groups))
            biases = np.zeros_like(scales)
            if self.mode == "affine":
                biases = read_all(stored, self.stored[2], row * groups, bottom * groups).astype(np.float32)
            dequantise_rows(words, width, self.bits, table, self.group_size, scales, biases, skip, part)

    def _table(self) -> npt.NDArray[np.float32]:
        """float32 [2 ** bits]: the number that each code is."""
        from weightsmith._kernels.codes import TABLES

        return np.arange(1 << self.bits, dtype=np.float32) if self.mode == "affine" else TABLES[f"float{self.bits}"]

    def _scales(self, found: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if self.mode.startswith("mx"):
            return powers_of_two(found)
        return (found.view(DTYPES["F8_E4M3"].numpy) if self.mode == "nvfp4" else found).astype(np.float32)


def recognises(config: Config, specs: Specs) -> bool:
    entries = config_entries(config)
    named = any(isinstance(entry.get("quant_method"), str) for _, entry in entries)
    return bool(entries) and not named and any(is_quantised(name, specs) for name in specs)


def is_quantised(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """The name is that of the scales of codes in 32-bit words."""
    weight = specs.get(name.removesuffix(".scales") + ".weight")
    return name.endswith(".scales") and weight is not None and weight.dtype.name == "U32"


def weights(model: QuantisedModel) -> list[MlxWeight]:
    modules = [name.removesuffix(".scales") for name in model.specs if is_quantised(name, model.specs)]
    own = own_settings(model)
    found = [weight for module in modules for weight in _weights(model, module, own.get(module, model.entry))]
    check_widths(model, map(_width, found))
    return found


def _width(weight: MlxWeight) -> Width:
    """The shape of a weight, and the inputs that its codes and scales would have with other bits and group sizes."""
    outputs, inputs = weight.spec.shape
    groups, stored_bits = inputs // weight.group_size, inputs * weight.bits
    others = (size * groups for bits in _BITS for size in GROUPS if size * groups * bits == stored_bits)
    return Width(weight.spec.name.removesuffix(".weight"), outputs, inputs, tuple(others) if weight.mode == "affine" else ())


def _weights(model: QuantisedModel, module: str, settings: Mapping[str, Any]) -> Iterator[MlxWeight]:
    """The weight of a module, or those of its experts."""
    mode = model.setting("mode", "affine", _MODES, settings)
    if mode == "affine":
        bits, group_size = model.setting("bits", None, _BITS, settings), model.group_size(entry=settings)
    else:
        bits, group_size = _FIXED[mode]
    codes = model.specs[f"{module}.weight"]
    prefix, stacked, projection = module.partition(f".{STACK}.")
    if len(codes.shape) != (3 if stacked else 2):
        raise model.unsupported(f"tensor {show(codes.name)} is {list(codes.shape)}, and only matrices and {STACK} are read")
    *experts, outputs, width = codes.shape
    inputs = 32 * width // bits
    if inputs * bits != 32 * width or group_size < 1 or inputs % group_size:
        what = f"tensor {show(codes.name)} is {list(codes.shape)}, which {bits} bits in groups of {group_size} do not fill"
        raise model.damaged(what)
    shape = (*experts, outputs, inputs // group_size)
    scales = model.part(f"{module}.scales", ("F32", "BF16", "F16") if mode == "affine" else ("U8",), shape)
    names, default = [codes.name, scales.name], DTYPES["BF16"]
    if mode == "affine":
        names.append(model.part(f"{module}.biases", (scales.dtype.name,), shape).name)
        default = scales.dtype
    if stacked:
        counts = [model.config[key] for key in EXPERT_COUNTS if key in model.config]
        if experts[0] not in counts:
            what = f"tensor {show(codes.name)} has {experts[0]:,} experts, and config.json says {show(counts)}"
            raise model.damaged(what)
        other_names = _READ.get(str(model.config.get("model_type")))
        if other_names is None:
            raise model.unsupported(f"experts that MLX has stacked ({STACK}) are not read for this model_type")
        projection = other_names.get(projection, projection)
    for expert in range(experts[0]) if experts else [0]:
        name = f"{prefix}.experts.{expert}.{projection}.weight" if stacked else codes.name
        if stacked and name in model.specs:
            raise model.damaged(f"tensor {show(name)} is stored twice: by itself, and in {show(codes.name)}")
        spec = TensorSpec(name, F32, (outputs, inputs))
        yield MlxWeight(spec, tuple(names), plain_dtype(model.config, default), mode, bits, group_size, expert * outputs)


_read = reader("MLX", (".weight", ".scales", ".biases"), weights)


# ---- writing


def _encoding(bits: int, group: int) -> MatrixEncoding:
    """Codes, scales and biases.

    >>> for out in _encoding(4, 64).outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 128))):
    ...     print(out)
    q_proj.weight [64, 16] U32
    q_proj.scales [64, 2] BF16
    q_proj.biases [64, 2] BF16
    """

    def parts(spec: TensorSpec) -> tuple[TensorSpec, ...]:
        *rows, cols = spec.shape
        module, groups = spec.name.removesuffix(SUFFIX), (*rows, cols // group)
        return (
            TensorSpec(spec.name, DTYPES["U32"], (*rows, cols * bits // 32)),
            TensorSpec(f"{module}.scales", spec.dtype, groups),
            TensorSpec(f"{module}.biases", spec.dtype, groups),
        )

    def fill(spec: TensorSpec, rows: Rows, outs: Sequence[Bytes], numbers: Rows) -> None:
        """NaN becomes some code."""
        from weightsmith._kernels import codecs
        from weightsmith._kernels.codes import group_extremes, quantise_affine

        flat = rows.reshape(-1)
        lows, highs = np.empty((2, flat.size // group), np.float32)
        group_extremes(flat, group, lows, highs)
        with np.errstate(all="ignore"):
            scales = np.maximum((highs - lows) / np.float32(2**bits - 1), _SMALLEST_SCALE)
            from_low = np.abs(lows) > np.abs(highs)
            scales = np.where(from_low, scales, -scales)
            edges = np.where(from_low, lows, highs)
            steps = np.rint(edges / scales)
            scales = np.where(steps != 0, edges / np.where(steps != 0, steps, 1), scales).astype(np.float32)
            biases = np.where(steps != 0, edges, 0).astype(np.float32)
        code = spec.dtype.code
        for values, out in ((scales, outs[1]), (biases, outs[2])):
            codecs.encode(values, values.size, code, 0, out)
            codecs.decode(out, code, 0, values.size, values)
        zero = scales == 0  # smaller than the dtype's smallest number: every code is the bias
        quantise_affine(flat, group, np.where(zero, np.float32(1), scales), biases, bits, outs[0])

    def config(ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization`, and the same as `quantization_config`, where transformers looks. mlx-lm quantises what has scales."""
        entry = {"group_size": group, "bits": bits, "mode": "affine"}
        return {"quantization": entry, "quantization_config": entry}

    name = grouped_name(f"mlx-{bits}bit", group, GROUPS)
    return MatrixEncoding(name, parts, fill, config, group=group, vocabulary=True, stacks=f".{STACK}.")


def affine(bits: int) -> dict[int, MatrixEncoding]:
    """mlx-4bit or mlx-8bit, by group size."""
    return {group: _encoding(bits, group) for group in GROUPS}


_READERS = "MLX, mlx-lm, LM Studio"
FORMAT = StoredFormat(
    "mlx",
    "MLX",
    recognises,
    _read,
    {".scales": lambda name, specs: "MLX" if is_quantised(name, specs) else ""},
    writes=(
        Writing("mlx-8bit", "8-bit integers with a scale and a bias for each group", _READERS, affine(8)),
        Writing("mlx-4bit", "4-bit integers with a scale and a bias for each group", _READERS, affine(4)),
    ),
)
