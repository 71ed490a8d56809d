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

from weightsmith._models.formats.bitsandbytes.reading import is_state, read
from weightsmith._models.formats.config import recogniser
from weightsmith.abc.stored import StoredFormat, labelled

FORMAT = StoredFormat(
    "bitsandbytes",
    "bitsandbytes",
    recogniser(is_state, "bitsandbytes"),
    read,
    {".absmax": labelled("bitsandbytes 4-bit"), ".SCB": labelled("bitsandbytes int8")},
)
