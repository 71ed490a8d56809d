"""FP8 as transformers and DeepSeek store it: quant_method fp8 or fbgemm_fp8. Read; `compressed_tensors` writes 8-bit floats.

X.weight            F8_E4M3 [rows, cols]
X.weight_scale_inv  by which codes are multiplied, whatever the name says: of a block of weight_block_size, or of the matrix
                    (an embedding's, whatever that size).
                    Its other names are X.weight_scale, X.scale (DeepSeek V4) and X.qscale_weight (Mistral Large 4). Numbers,
                    or exponents of 2 (scale_fmt ue8m0): F8_E8M0 or U8
experts of expert_dtype fp4
X.weight            I8 [rows, cols / 2]: two float4 in a byte, the first in the low half
X.scale             an exponent for 32 elements of a row

X.weight is F8_E5M2 if `fmt` says so. GPTQModel's FP8 (weight_scale_semantics) has the same names, and codes are divided by its
scales: of the matrix, a row or a block.

Experts may be stacked: [experts, rows, cols], X and X_scale_inv. fbgemm_fp8 has a scale for each row, and for each column of
stacked experts, whose rows are inputs: X_scale [experts, 1, cols] or [experts, cols, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._models.formats.config import recogniser, unsupported
from weightsmith._models.formats.matrices import MXFP4_GROUP
from weightsmith._models.formats.scaled import (
    COLUMNS,
    FLOATS,
    POWERS,
    TENSOR,
    TITLE,
    Scheme,
    is_codes,
    read_block,
    read_scaled,
)
from weightsmith.abc.stored import StoredFormat, labelled

METHOD, ROWS_METHOD = "fp8", "fbgemm_fp8"
_SUFFIXES = ("_scale_inv", "_scale", ".scale", ".qscale_weight")
_SCALES = (*FLOATS, *POWERS)
_KINDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "float8": ("F8_E4M3", (None, "e4m3", "float8_e4m3fn", "float8_e4m3")),
    "wide8": ("F8_E5M2", ("e5m2", "float8_e5m2")),
}
"""kind of codes → dtype of their tensors, and its names in config.json: MiniMax has those of torch."""


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    if entry.get("quant_method") == ROWS_METHOD:
        return [Scheme("float8", "F8_E4M3", (1, None), scales=FLOATS, stacked=COLUMNS)], []
    block = entry.get("weight_block_size")
    structures = [TENSOR] if block is None else [read_block(block, "weight_block_size", where), TENSOR]
    if (semantics := entry.get("weight_scale_semantics")) is not None:  # of GPTQModel
        if semantics != "inverse":
            raise unsupported(f"fp8 weights with weight_scale_semantics {show(semantics)} are not read, only 'inverse'", where)
        kind, codes = _kind(entry, "format", where)
        every = [(1, None), *structures]  # modules may have structures of their own (dynamic)
        return [Scheme(kind, codes, structure, suffixes=("_scale_inv",), inverse=True) for structure in every], []
    if entry.get("expert_dtype") not in ("fp8", "fp4", None):
        raise unsupported(f"fp8 weights with expert_dtype {show(entry['expert_dtype'])} are not read, only 'fp8'", where)
    kind, codes = _kind(entry, "fmt", where)
    schemes = [Scheme(kind, codes, structure, scales=_SCALES, suffixes=_SUFFIXES) for structure in structures]
    if entry.get("expert_dtype") == "fp4":
        schemes.append(Scheme("float4", "I8", (1, MXFP4_GROUP), scales=_SCALES, suffixes=_SUFFIXES))
    return schemes, []


def _kind(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, str]:
    """The kind of codes, and the dtype of their tensors, as this key of the entry says; else E4M3."""
    text = entry.get(key)
    for kind, (dtype, names) in _KINDS.items():
        if text in names:
            return kind, dtype
    raise unsupported(f"fp8 weights with {key} {show(text)} are not read, only 'e4m3' and 'e5m2'", where)


FORMAT = StoredFormat(
    "fp8",
    TITLE,
    recogniser(is_codes, METHOD, ROWS_METHOD),
    read_scaled(read_entry),
    {".weight_scale_inv": labelled("fp8 in blocks")},
)
