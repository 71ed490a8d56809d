"""GPTQ's weights: codes of 2, 3, 4 or 8 bits, transposed and packed along the inputs.

X.qweight I32 [inputs · bits / 32, outputs]   codes; each column is a stream of bits, the lowest bit of a word first
X.qzeros  I32 [groups, outputs · bits / 32]   zeros, packed along the outputs
X.scales      [groups, outputs]
X.g_idx   I32 [inputs]                        the group of each input; missing: groups of group_size inputs in order

A weight is (code - zero) · scale. Format `gptq` stores zero - 1, `gptq_v2` the zero itself. The older one is undone as
GPTQModel does it: 1 is added to whole words, so that a carry undoes the borrow of a zero of 0 (of 3 bits: to each zero).
The groups of a model with `desc_act` are not in order, so it must have g_idx.

gptq-8bit and gptq-4bit are symmetric codes with groups in order, and checkpoint_format `gptq`, which all readers load: every
zero is 2^(bits - 1). Scales are the largest magnitude of the group / (2^(bits - 1) - 1/2), as `transposed.half_scales` rounds
them. Codes are rounded to nearest, in float32, over the scale as stored. g_idx is stored although readers could do without it:
mlx-lm would take GPTQ's codes for AWQ's if it were not there. A calibration narrows the ranges of groups where this makes the
output's error smaller.

**Error,** without a calibration. For every finite x of a group with scale s, |(code - zero) · s - x| ≤ 0.53 · s with 4 bits,
and ≤ s with 8: half a step, and more only for the largest positive elements, which lie beyond the largest code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.formats.config import DAMAGED_CHECKPOINT, ending, older_config, plain_dtype, recogniser
from weightsmith._models.formats.decoded import F32, Band, QuantisedModel, TransposedWeight, read_all, read_columns, reader
from weightsmith._models.formats.hessians import CodesOf
from weightsmith._models.formats.matrices import (
    GROUPS,
    SUFFIX,
    TransposedEncoding,
    encoding_of,
    half_scales,
    maxima_of,
    parts_of,
    transposed_codes,
    with_joined,
)
from weightsmith._models.structure.projections import in_both_orders
from weightsmith._models.structure.vocabulary import is_model_head
from weightsmith._plans import PlanDraft
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import Config, Encoding, Modules, Rows, StoredFormat, Writing, grouped_name, labelled
from weightsmith.abc.tensors import Tensors

METHOD = "gptq"
_HEAD = "lm_head"
"""The usual name of a head. The entry's `lm_head` says whether the head is quantised, whatever its name."""
PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_BITS = (2, 3, 4, 8)
_WRITTEN = frozenset((bits, group) for bits in (4, 8) for group in GROUPS)
"""Bits and group sizes of what is written."""
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


# ---- reading

is_codes = ending(".qweight")


@dataclass(frozen=True, slots=True)
class GptqWeight(TransposedWeight):
    """One weight.

    stored      qweight, qzeros, scales, and g_idx if there is one, which then says what is in a group
    bits        of a code
    zero_minus  1 if zeros are stored less 1, else 0
    """

    bits: int
    zero_minus: int

    def groups_of_inputs(self, stored: Tensors) -> npt.NDArray[np.int64]:
        """[inputs]: the group of each. A g_idx of zeros counts as none, as in ExLlama: old tools wrote it without desc_act."""
        if len(self.stored) == 4:
            name = self.stored[3]
            index: npt.NDArray[np.int64] = read_all(stored, name).astype(np.int64)
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= self.groups:
                what = f"tensor {show(name)} holds groups {low:,} to {high:,}, and the weight has {self.groups:,}"
                raise FormatError(what, fix=DAMAGED_CHECKPOINT)
            if high > 0 or -(-index.size // self.group_size) != self.groups:
                return index
        return TransposedWeight.groups_of_inputs(self, stored)

    def band(self, stored: Tensors, outputs: slice) -> Band:
        from weightsmith._kernels.codes import unpack_down

        qweight, qzeros, scales = self.stored[:3]
        width, inputs = self.spec.shape
        count, bits = outputs.stop - outputs.start, self.bits
        words = read_columns(stored, qweight, width, slice(0, -(-inputs * bits // 32)), outputs)
        codes = np.empty((inputs, count), np.uint8)
        unpack_down(words.view(np.uint32).reshape(-1), count, bits, codes.reshape(-1))

        packed = slice(outputs.start * bits // 32, -(-outputs.stop * bits // 32))  # 32 codes are whole words
        words = read_columns(stored, qzeros, -(-width * bits // 32), slice(0, self.groups), packed).view(np.uint32)
        zeros = np.empty((count, self.groups), np.uint8)
        if self.zero_minus and bits in _ONES:
            words = words + np.uint32(_ONES[bits])
        unpack_down(np.ascontiguousarray(words.T).reshape(-1), self.groups, bits, zeros.reshape(-1))
        zeros = np.ascontiguousarray(zeros.T)
        if self.zero_minus and bits not in _ONES:
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
        return codes, zeros, read_columns(stored, scales, width, slice(0, self.groups), outputs).astype(np.float32)


def weights(model: QuantisedModel) -> list[GptqWeight]:
    entry = model.entry
    if entry.get("is_marlin_format"):
        raise model.unsupported("GPTQ weights in Marlin's layout (is_marlin_format) are not read")
    refuse_rotation(model)
    model.setting("pack_dtype", "int32", ("int32",))
    stated = [key for key in ("checkpoint_format", "format") if entry.get(key) is not None]
    version, *others = [model.setting(key, "gptq", ("gptq", "gptq_v2")) for key in stated or ["format"]]
    if others not in ([], [version]):
        raise model.unsupported(
            f"checkpoint_format {show(version)} and format {show(others[0])} in config.json contradict each other"
        )
    return packed_weights(model, 1 if version == "gptq" else 0, _BITS, mixed=bool(entry.get("dynamic")))


def refuse_rotation(model: QuantisedModel) -> None:
    """Raise Unsupported for a model that GPTQModel rotated: the inputs of down projections are rotated while it runs, too."""
    if rotation := model.entry.get("rotation"):
        raise model.unsupported(f"weights with rotation {show(rotation)} are not read: inputs of layers are rotated, too")


def packed_weights(model: QuantisedModel, zero_minus: int, allowed: Sequence[int], *, mixed: bool) -> list[GptqWeight]:
    """The weights of a model in this layout. allowed: bits of a code.

    mixed  modules may have other bits and group sizes than the entry of config.json says
    """
    read_weights, bits, group_size = [], model.setting("bits", None, allowed), model.group_size()
    symmetric = zero_minus == 1 and _is_symmetric(model.entry)
    for module in model.modules(".qweight"):
        shape = _shape(model, module, [bits, *allowed] if mixed else [bits], group_size)
        scales = model.part(f"{module}.scales", ("F16", "BF16", "F32"), (shape.groups, shape.outputs))
        if model.entry.get("desc_act") is True and shape.groups > 1:  # its groups are not in order
            model.part(f"{module}.g_idx", ("I32",), (shape.inputs,))
        zeros = model.part(f"{module}.qzeros", ("I32",), (shape.groups, -(-shape.outputs * shape.bits // 32)))
        index = [f"{module}.g_idx"] if f"{module}.g_idx" in model.specs else []
        spec = TensorSpec(f"{module}.weight", F32, (shape.outputs, shape.inputs))
        stored = (f"{module}.qweight", zeros.name, scales.name, *index)
        alike = [Gptq(shape.bits, shape.group_size)] if symmetric and (shape.bits, shape.group_size) in _WRITTEN else []
        read_weights.append(
            GptqWeight(
                spec=spec,
                stored=stored,
                encoding=encoding_of(spec, [model.specs[name] for name in stored], alike),
                natural_dtype=plain_dtype(model.config, scales.dtype),
                bits=shape.bits,
                zero_minus=zero_minus,
                groups=shape.groups,
                group_size=shape.group_size,
            )
        )
    return read_weights


def _is_symmetric(entry: Mapping[str, Any]) -> bool:
    """Whether the entry of config.json says that all modules have symmetric codes and groups in order."""
    tables = [entry[key] for key in ("dynamic", "extra_config") if isinstance(entry.get(key), Mapping)]
    modules = [settings for table in tables for settings in table.values() if isinstance(settings, Mapping)]
    asked = [entry, *({"sym": True, **settings} for settings in modules)]
    return all(settings.get("sym") is True and not settings.get("desc_act") for settings in asked)


class _Shape(NamedTuple):
    inputs: int
    outputs: int
    bits: int
    groups: int
    group_size: int


def _shape(model: QuantisedModel, module: str, bits: Sequence[int], group_size: int) -> _Shape:
    """What the shapes of a weight's tensors say. bits: the first are config.json's; if there are others, so may group sizes."""
    specs, mixed, width = model.specs, len(bits) > 1, bits[0]
    rows, outputs = model.part(f"{module}.qweight", ("I32",), (None, None)).shape
    indexed = f"{module}.g_idx" in specs
    if mixed and not indexed:
        words = model.part(f"{module}.qzeros", ("I32",), (None, None)).shape[1]
        fitting = dict.fromkeys(b for b in bits if -(-outputs * b // 32) == words)
        if len(fitting) > 1:
            possible = " or ".join(map(str, fitting))
            raise model.unsupported(f"the bits of {show(module)} cannot be told: with {outputs} outputs they may be {possible}")
        width = next(iter(fitting), width)
    inputs = model.part(f"{module}.g_idx", ("I32",), (None,)).shape[0] if indexed else rows * 32 // width
    if indexed:
        width = next((b for b in bits if -(-inputs * b // 32) == rows), width)
    model.part(f"{module}.qweight", ("I32",), (-(-inputs * width // 32), outputs))
    groups, group_size = (1, inputs) if group_size < 0 else (-(-inputs // group_size), group_size)
    if mixed and f"{module}.scales" in specs and (count := (*specs[f"{module}.scales"].shape, 0)[0]) not in (0, groups):
        if not indexed and inputs % count:
            raise model.damaged(f"{show(f'{module}.scales')} has {count:,} groups, which do not divide {inputs:,} inputs")
        groups, group_size = count, -(-inputs // count)
    return _Shape(inputs, outputs, width, groups, group_size)


# ---- writing


@dataclass(frozen=True, slots=True)
class Gptq(TransposedEncoding):
    """
    >>> for out in Gptq(4, 128).outs(TensorSpec("q_proj.weight", DTYPES["BF16"], (64, 256))):
    ...     print(out)
    q_proj.qweight [32, 64] I32
    q_proj.qzeros [2, 8] I32
    q_proj.scales [2, 64] F16
    q_proj.g_idx [256] I32
    """

    @property
    def name(self) -> str:
        return grouped_name(f"gptq-{self.bits}bit", self.group, GROUPS)

    def tensors(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = spec.shape
        groups, i32 = inputs // self.group, DTYPES["I32"]
        qweight, qzeros, scales, g_idx = (spec.name.removesuffix(SUFFIX) + part for part in PARTS)
        return (
            TensorSpec(qweight, i32, (inputs * self.bits // 32, outputs)),
            TensorSpec(qzeros, i32, (groups, outputs * self.bits // 32)),
            TensorSpec(scales, self.scale, (groups, outputs)),
            TensorSpec(g_idx, i32, (inputs,)),
        )

    def _fill(self, weight: Rows, arrays: Sequence[npt.NDArray[Any]], codes_of: CodesOf | None) -> None:
        from weightsmith._kernels.codes import pack_down

        bits, (qweight, qzeros, scales, g_idx) = self.bits, arrays
        zero = 1 << (bits - 1)
        maxima = maxima_of(weight, 1, self.group)

        def steps_of(share: np.float32) -> Rows:
            return half_scales(maxima * share, zero - 0.5).reshape(len(weight), -1)

        steps = steps_of(np.float32(1)) if codes_of is None else codes_of.narrowed_scales(weight, steps_of)
        scales[:] = steps.T
        g_idx[:] = np.arange(weight.shape[1]) // self.group
        words = np.empty((bits, 1), np.uint32)
        pack_down(np.full((32, 1), zero - 1, np.uint8), bits, words)
        qzeros[:] = np.resize(words, qzeros.shape[1]).view(np.int32)
        if codes_of is not None:
            weight, steps = codes_of(weight, steps), np.ones_like(steps)
        for outputs, codes in transposed_codes(weight, steps, np.full_like(steps, zero), bits):
            words = np.empty((len(qweight), codes.shape[1]), np.uint32)
            pack_down(codes, bits, words)
            qweight[:, outputs] = words.view(np.int32)

    def dequantise(self, arrays: Arrays, shape: tuple[int, ...]) -> Rows:
        from weightsmith._kernels.codes import dequantise_transposed, unpack_down

        words, _, scales, g_idx = map(np.array, arrays)
        values = np.empty((words.shape[1], g_idx.size), np.float32)
        codes, zeros = np.empty(values.size, np.uint8), np.full(scales.size, 1 << (self.bits - 1), np.uint8)
        unpack_down(words.view(np.uint32).reshape(-1), len(values), self.bits, codes)
        steps = scales.astype(np.float32).reshape(-1)
        dequantise_transposed(codes, zeros, steps, g_idx.astype(np.int64), 0, 0, values.reshape(-1))
        return values

    def config(self, modules: Modules) -> dict[str, Any]:
        """The entry `quantization_config`.

        Plain linear modules of the layers are named twice: SGLang and GPTQModel read `dynamic`, optimum reads
        `modules_in_block_to_quantize`, vLLM reads both. Raises Unsupported for a model whose experts have projections of
        both kinds: readers ask for an expert as a whole. vLLM, SGLang and GPTQModel read `lm_head`.
        """
        entry: dict[str, Any] = {"quant_method": METHOD, "bits": self.bits, "group_size": self.group, "desc_act": False}
        has_head = any(is_model_head(TensorSpec(name + SUFFIX, F32, (1, 1))) for name in modules.encoded)
        entry |= {"sym": self.symmetric, "lm_head": has_head, "checkpoint_format": "gptq", "pack_dtype": "int32"}
        if plain := [name for name in modules.plain if name.rpartition(".")[2] != _HEAD]:
            encoded = with_joined(modules.encoded)
            parts = parts_of(with_joined(plain), encoded)
            for part in parts:
                if taken := next((name for name in encoded if name.startswith(f"{part}.")), None):
                    what = "some of its weights are not quantised, and readers of GPTQ take all for plain then, such as"
                    fix = "choose another format, or a smaller group size"
                    raise Unsupported(f"{what} {taken}", where=part, fix=fix)
            entry["dynamic"] = {rf"-:(.*\.)?{in_both_orders(part)}(\..*)?$": {} for part in parts}
            entry["modules_in_block_to_quantize"] = [parts_of(modules.encoded, plain)]
        return {"quantization_config": entry}


def _adapt(draft: PlanDraft, encoding: Encoding) -> None:
    """ExLlamaV2 loads 4 bits, and config.json with older keys."""
    if encoding.bits == 4:
        draft.config = older_config(draft.config or {})


_READERS = {8: "transformers, vLLM, SGLang", 4: "transformers, vLLM, SGLang, ExLlamaV2"}
_WRITES = tuple(
    Writing(
        f"gptq-{bits}bit",
        f"{bits}-bit integers with a scale for each group, as GPTQModel stores them",
        programs,
        {group: Gptq(bits, group) for group in GROUPS},
        _adapt,
    )
    for bits, programs in _READERS.items()
)


def _mixed(configs: Sequence[Config], modules: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The entry of one encoding and of plain weights. Raises Unsupported for several: ExLlamaV2 and optimum read one entry."""
    if len(configs) > 1:
        what = "weights of GPTQ in several widths or group sizes are not written: optimum and ExLlamaV2 do not read them"
        raise Unsupported(what, where="quantize", fix="give all quantised weights one format")
    return dict(configs[0])


_read = reader("GPTQ", PARTS, weights)
_MARKS = {".qweight": labelled("GPTQ or AWQ")}
FORMAT = StoredFormat("gptq", "GPTQ", recogniser(is_codes, METHOD), _read, _MARKS, writes=_WRITES, mixed=_mixed)
