"""AWQ's weights in the layout `gemm`: codes of 4 bits, transposed and packed along the outputs.

X.qweight I32 [inputs, outputs / 8]   the lowest nibble of a word is output 0 of 8, the next ones are 2, 4, 6, 1, 3, 5, 7
X.qzeros  I32 [groups, outputs / 8]   zeros, in the same order
X.scales      [groups, outputs]       groups of group_size inputs in order

A weight is (code - zero) · scale. The layouts of other kernels (gemv, gemv_fast, Marlin) are refused.

awq-4bit is this layout, with scales of the range of the group, 0 included, / 15, as `transposed.half_scales` rounds them. The
zero is the code of 0, rounded to nearest as the codes are, in float32, over the scale as stored. A calibration first scales
the input features of weights, and divides what makes them (`scaled`). Ranges of groups then become narrower where this makes
the output's error smaller (Lin et al. 2023, https://arxiv.org/abs/2306.00978), and codes are chosen as for GPTQ.

**Error,** without a calibration. For every finite x of a group with scale s, |(code - zero) · s - x| ≤ 0.57 · s: half a step,
and more at the upper end of the range if the scale was rounded down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import adapt_to_mlx_lm, ending, plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, Band, QuantisedModel, TransposedWeight, read_columns, reader
from weightsmith._models.formats.gptq import refuse_rotation
from weightsmith._models.formats.hessians import CodesOf
from weightsmith._models.formats.matrices import (
    GROUPS,
    SUFFIX,
    TransposedEncoding,
    encoding_of,
    half_scales,
    parts_of,
    transposed_codes,
    with_joined,
)
from weightsmith._plans import PlanDraft
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import Config, Encoding, Modules, Rows, StoredFormat, Writing, grouped_name, labelled
from weightsmith.abc.tensors import Tensors

METHOD = "awq"
BITS = 4
_PARTS = (".qweight", ".qzeros", ".scales")
_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
"""The nibble that holds output i of 8."""


# ---- reading


class AwqWeight(TransposedWeight):
    """One weight. stored: qweight, qzeros, scales."""

    def band(self, stored: Tensors, outputs: slice) -> Band:
        qweight, qzeros, scales = self.stored
        width, inputs = self.spec.shape
        codes, zeros = self._unpack(stored, qweight, inputs, outputs), self._unpack(stored, qzeros, self.groups, outputs)
        return codes, zeros, read_columns(stored, scales, width, slice(0, self.groups), outputs).astype(np.float32)

    def _unpack(self, stored: Tensors, name: str, rows: int, outputs: slice) -> npt.NDArray[np.uint8]:
        packed = slice(outputs.start // 8, outputs.stop // 8)
        return _unpacked(read_columns(stored, name, self.spec.shape[0] // 8, slice(0, rows), packed))


def _unpacked(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """[rows, words] → the codes [rows, 8 · words]."""
    from weightsmith._kernels.codes import unpack_nibbles

    codes = np.empty((len(words), 8 * words.shape[1]), np.uint8)
    unpack_nibbles(words.view(np.uint32).reshape(-1), _ORDER, codes.reshape(-1))
    return codes


def weights(model: QuantisedModel) -> list[AwqWeight]:
    refuse_rotation(model)
    for key in ("version", "checkpoint_format", "format"):
        model.setting(key, "gemm", ("gemm", "GEMM"))
    model.setting("bits" if "bits" in model.entry else "w_bit", 4, (4,))
    group_size, read_weights = model.group_size("group_size" if "group_size" in model.entry else "q_group_size"), []
    for module in model.modules(".qweight"):
        codes = model.part(f"{module}.qweight", ("I32",), (None, None))
        inputs, words = codes.shape
        groups = 1 if group_size < 0 else -(-inputs // group_size)
        scales = model.part(f"{module}.scales", ("F16", "BF16", "F32"), (groups, 8 * words))
        zeros = model.part(f"{module}.qzeros", ("I32",), (groups, words))
        spec = TensorSpec(f"{module}.weight", F32, (8 * words, inputs))
        alike = [Awq(BITS, group_size)] if group_size in GROUPS and model.entry.get("zero_point") is not False else []
        read_weights.append(
            AwqWeight(
                spec=spec,
                stored=(codes.name, zeros.name, scales.name),
                encoding=encoding_of(spec, (codes, zeros, scales), alike),
                natural_dtype=plain_dtype(model.config, scales.dtype),
                groups=groups,
                group_size=inputs if group_size < 0 else group_size,
            )
        )
    return read_weights


# ---- writing


def _packed(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """The inverse of `_unpacked`."""
    from weightsmith._kernels.codes import pack_nibbles

    words = np.empty((len(codes), codes.shape[1] // 8), np.uint32)
    pack_nibbles(codes.reshape(-1), _ORDER, words.reshape(-1))
    return words.view(np.int32)


@dataclass(frozen=True, slots=True)
class Awq(TransposedEncoding):
    """
    >>> for out in Awq(BITS, 128).outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 256))):
    ...     print(out)
    q_proj.qweight [256, 8] I32
    q_proj.qzeros [2, 8] I32
    q_proj.scales [2, 64] F16
    """

    symmetric: ClassVar[bool] = False
    scaled: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return grouped_name(f"awq-{self.bits}bit", self.group, GROUPS)

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = spec.shape
        qweight, qzeros, scales = (spec.name.removesuffix(SUFFIX) + part for part in _PARTS)
        return (
            TensorSpec(qweight, DTYPES["I32"], (inputs, outputs // 8)),
            TensorSpec(qzeros, DTYPES["I32"], (inputs // self.group, outputs // 8)),
            TensorSpec(scales, self.scale, (inputs // self.group, outputs)),
        )

    def _fill(self, weight: Rows, arrays: Sequence[npt.NDArray[Any]], codes_of: CodesOf | None) -> None:
        from weightsmith._kernels.codes import group_extremes

        group, (qweight, qzeros, scales) = self.group, arrays
        middle = 1 << (self.bits - 1)
        lows, highs = np.empty((2, len(weight), weight.shape[1] // group), np.float32)
        group_extremes(weight.reshape(-1), group, lows.reshape(-1), highs.reshape(-1))
        lows, highs = np.minimum(lows, 0), np.maximum(highs, 0)
        if codes_of is None:
            steps, zeros = self._grid(lows, highs)
        else:
            steps, zeros = codes_of.narrowed(weight, lambda share: self._grid(lows * share, highs * share))
        scales[:] = steps.T
        qzeros[:] = _packed(np.ascontiguousarray(zeros.T.astype(np.uint8)))
        if codes_of is not None:  # they are symmetric: those of a weight whose zeros are in the middle
            shifted = (weight.reshape(*steps.shape, group) + ((zeros - middle) * steps)[:, :, None]).reshape(weight.shape)
            weight, steps, zeros = codes_of(shifted, steps), np.ones_like(steps), np.full_like(zeros, middle)
        for outputs, codes in transposed_codes(weight, steps, zeros, self.bits):
            qweight[:, outputs.start // 8 : outputs.stop // 8] = _packed(codes)

    def _grid(self, lows: Rows, highs: Rows) -> tuple[Rows, Rows]:
        """The scales and the zeros of ranges, float32 [N, groups] each. Raises NonFinite."""
        top = (1 << self.bits) - 1
        with np.errstate(over="ignore"):  # an infinite range has no scale
            steps = half_scales((highs - lows).reshape(-1), top).reshape(lows.shape)
        return steps, np.clip(np.rint(-lows / steps), 0, top)

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Rows:
        from weightsmith._kernels.codes import dequantise_transposed

        words, packed, scales = map(np.array, arrays)
        codes, zeros = _unpacked(words).reshape(-1), _unpacked(packed).reshape(-1)
        groups, values = np.arange(len(words)) // self.group, np.empty((8 * words.shape[1], len(words)), np.float32)
        dequantise_transposed(codes, zeros, scales.astype(np.float32).reshape(-1), groups, 0, 0, values.reshape(-1))
        return values

    def config(self, modules: Modules) -> dict[str, Any]:
        """vLLM and SGLang leave plain what has an entry of the list in its name; transformers what ends with one. Raises
        Unsupported for a model in which no such entry exists."""
        encoded = with_joined(modules.encoded)
        parts = parts_of(with_joined(modules.plain), encoded)
        for part in parts:
            if taken := next((name for name in encoded if part in name), None):
                what = f"is not quantised, and readers of AWQ take what contains its name for plain too, such as {taken}"
                raise Unsupported(what, where=part, fix="choose another format")
        entry = {"quant_method": METHOD, "bits": self.bits, "group_size": self.group, "zero_point": not self.symmetric}
        return {"quantization_config": {**entry, "version": "gemm", "modules_to_not_convert": parts}}


def _adapt(draft: PlanDraft, encoding: Encoding) -> None:
    adapt_to_mlx_lm(draft)


_SUMMARY = "4-bit integers with a scale and a zero for each group, in AutoAWQ's layout"
_READERS = "transformers, vLLM, SGLang, mlx-lm"
_WRITES = (Writing("awq-4bit", _SUMMARY, _READERS, {group: Awq(BITS, group) for group in GROUPS}, _adapt),)


def _mixed(configs: Sequence[Config], modules: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Raises Unsupported: AWQ has one encoding in a model, and readers do not look for a quantised head."""
    what = "AWQ has one group size in a model, and no quantised head"
    raise Unsupported(what, where="quantize", fix="keep other weights plain, or choose another format")


_read = reader("AWQ", _PARTS, weights)
_MARKS = {".qweight": labelled("GPTQ or AWQ")}
FORMAT = StoredFormat("awq", "AWQ", recogniser(ending(".qweight"), METHOD), _read, _MARKS, writes=_WRITES, mixed=_mixed)
