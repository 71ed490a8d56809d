"""FP8 as transformers and DeepSeek store it: quant_method fp8. It is read; `compressed_tensors` writes 8-bit floats.

X.weight                               F8_E4M3 [rows, cols]
X.weight_scale_inv, or X.weight_scale  by which codes are multiplied, whatever the first name says: of a block of
                                       weight_block_size, or of the matrix
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._models.formats.config import recogniser, unsupported
from weightsmith._models.formats.scaled import TENSOR, TITLE, Scheme, is_codes, read_block, read_scaled
from weightsmith.abc.stored import StoredFormat, labelled

METHOD = "fp8"


def read_entry(entry: Mapping[str, Any], place: str, where: str) -> tuple[list[Scheme], list[Finding]]:
    """How weights are stored, from the entry in config.json; see `scaled.read_scaled`."""
    for key, values in {"fmt": ("e4m3", None), "expert_dtype": ("fp8", None)}.items():
        if entry.get(key) not in values:
            raise unsupported(f"fp8 weights with {key} {show(entry[key])} are not read, only {show(values[0])}", where)
    block = entry.get("weight_block_size")
    structure = TENSOR if block is None else read_block(block, "weight_block_size", where)
    return [Scheme("float8", "F8_E4M3", structure, suffixes=("_scale_inv", "_scale"))], []


FORMAT = StoredFormat(
    "fp8", TITLE, recogniser(is_codes, METHOD), read_scaled(read_entry), {".weight_scale_inv": labelled("fp8 in blocks")}
)
