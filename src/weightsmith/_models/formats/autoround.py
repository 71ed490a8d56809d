"""AutoRound's weights: quant_method auto-round. They are read. packing_format says whose layout they have:

auto_round:auto_gptq, auto_round:gptq  GPTQ's, with zeros stored less 1
auto_round, auto_round:gptqmodel       GPTQ's, with zeros as they are
auto_round:auto_awq, auto_round:awq    AWQ's
auto_round:llm_compressor              compressed-tensors' MXFP4, MXFP8 or NVFP4
auto_round:fp8_static, or none         compressed-tensors' FP8, with a scale for each row or for the matrix; or DeepSeek's, with
                                       a scale for each block: group_size is its shape

Modules may have bits and group sizes of their own (extra_config). Those of GPTQ's layout show in the shapes of the tensors.
Integers and floats in one model are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats import awq, gptq, scaled
from weightsmith._models.formats.config import quantisation_entry, recogniser, unsupported
from weightsmith._models.formats.decoded import QuantisedModel, reader
from weightsmith._models.formats.matrices import MXFP4_GROUP, NVFP4_GROUP
from weightsmith._models.formats.scaled import FLOATS, TENSOR, Scheme, read_block, read_scaled
from weightsmith.abc.stored import Config, StoredFormat, Wrapped
from weightsmith.abc.tensors import Tensors

METHODS = ("auto-round", "intel/auto-round")
_ZERO_MINUS = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_SCHEMES = {
    "mx_fp": [
        Scheme("float4", "U8", (1, MXFP4_GROUP), packed=True, scales=("U8",)),
        Scheme("float8", "F8_E4M3", (1, MXFP4_GROUP), scales=("U8",)),
    ],
    "nv_fp": [Scheme("float4", "U8", (1, NVFP4_GROUP), packed=True, scales=("F8_E4M3",), divided=True)],
    "fp": [Scheme("float8", "F8_E4M3", structure, scales=FLOATS) for structure in (TENSOR, (1, None))],
}
_BITS = range(2, 9)
_SCALED = ("auto_round:llm_compressor", "auto_round:fp8_static")


def is_codes(spec: TensorSpec) -> bool:
    return gptq.is_codes(spec) or scaled.is_codes(spec)


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights in a layout of compressed-tensors are stored; see `scaled.read_scaled`."""
    kind = entry.get("data_type")
    kinds = next((schemes for name, schemes in _SCHEMES.items() if isinstance(kind, str) and kind.startswith(name)), None)
    if kinds is None:
        raise unsupported(f"AutoRound's weights with data_type {show(kind)} are not read, only {', '.join(_SCHEMES)}", where)
    if kind == "fp" and isinstance(block := entry.get("group_size"), Sequence):
        blocks = read_block(block, "group_size", where)
        return [Scheme("float8", "F8_E4M3", blocks, scales=FLOATS, suffixes=("_scale_inv", "_scale"))], []
    return kinds, []


def _weights(model: QuantisedModel) -> list[gptq.GptqWeight] | list[awq.AwqWeight]:
    model.setting("data_type", "int", ("int",))
    if model.entry["packing_format"] in _AWQ:
        return awq.weights(model)
    minus = _ZERO_MINUS[model.entry["packing_format"]]
    return gptq.packed_weights(model, minus, _BITS, mixed=bool(model.entry.get("extra_config")))


_READ_PACKED, _READ_SCALED = reader("AutoRound", gptq.PARTS, _weights), read_scaled(read_entry)


def read(stored: Tensors, config: Config, where: str) -> Wrapped:
    _, entry = quantisation_entry(config, where)
    packing = entry.get("packing_format", "auto_round:fp8_static" if entry.get("data_type") == "fp" else None)
    if packing not in (*_ZERO_MINUS, *_AWQ, *_SCALED):
        known = ", ".join((*_ZERO_MINUS, *_AWQ, *_SCALED))
        raise unsupported(f"AutoRound's weights with packing_format {show(packing)} are not read, only {known}", where)
    if rotation := entry.get("rotation_config"):
        raise unsupported(f"AutoRound's weights with a rotation_config are not read: {show(rotation)}", where)
    foreign = gptq.is_codes if packing in _SCALED else scaled.is_codes
    if other := next((spec for spec in stored.specs.values() if foreign(spec)), None):
        raise unsupported(f"tensor {show(other.name)} is not in the layout {show(packing)} of the other weights", where)
    return (_READ_SCALED if packing in _SCALED else _READ_PACKED)(stored, config, where)


FORMAT = StoredFormat("autoround", "AutoRound", recogniser(is_codes, *METHODS), read)
