"""FP8 as transformers and DeepSeek store it: quant_method fp8 or fbgemm_fp8. Read; `compressed_tensors` writes 8-bit floats.

X.weight            F8_E4M3 [rows, cols]
X.weight_scale_inv  by which codes are multiplied, whatever the name says: of a block of weight_block_size, or of the matrix
                    (an embedding's, whatever that size).
                    Its other names are X.weight_scale, X.scale (DeepSeek V4) and X.qscale_weight (Mistral Large 4). Numbers,
                    or exponents of 2 (scale_fmt ue8m0): F8_E8M0 or U8
experts of expert_dtype fp4
X.weight            I8 [rows, cols / 2]: two float4 in a byte, the first in the low half
X.scale             an exponent for 32 elements of a row

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


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    if entry.get("quant_method") == ROWS_METHOD:
        return [Scheme("float8", "F8_E4M3", (1, None), scales=FLOATS, stacked=COLUMNS)], []
    for key, values in {"fmt": ("e4m3", None), "expert_dtype": ("fp8", "fp4", None)}.items():
        if entry.get(key) not in values:
            raise unsupported(f"fp8 weights with {key} {show(entry[key])} are not read, only {show(values[0])}", where)
    block = entry.get("weight_block_size")
    structures = [TENSOR] if block is None else [read_block(block, "weight_block_size", where), TENSOR]
    schemes = [Scheme("float8", "F8_E4M3", structure, scales=_SCALES, suffixes=_SUFFIXES) for structure in structures]
    if entry.get("expert_dtype") == "fp4":
        schemes.append(Scheme("float4", "I8", (1, MXFP4_GROUP), scales=_SCALES, suffixes=_SUFFIXES))
    return schemes, []


FORMAT = StoredFormat(
    "fp8",
    TITLE,
    recogniser(is_codes, METHOD, ROWS_METHOD),
    read_scaled(read_entry),
    {".weight_scale_inv": labelled("fp8 in blocks")},
)
