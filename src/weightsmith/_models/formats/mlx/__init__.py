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

reading.py  weights as numbers
writing.py  the encodings
"""

from __future__ import annotations

from weightsmith._models.formats.mlx.reading import is_quantised, read, recognises
from weightsmith._models.formats.mlx.writing import affine
from weightsmith.abc.stored import Specs, StoredFormat, Writing

_READERS = "MLX, mlx-lm, LM Studio"


def _marked(name: str, specs: Specs) -> str:
    return "MLX" if is_quantised(name, specs) else ""


FORMAT = StoredFormat(
    "mlx",
    "MLX",
    recognises,
    read,
    {".scales": _marked},
    writes=(
        Writing("mlx-8bit", "8-bit integers with a scale and a bias for each group", _READERS, affine(8)),
        Writing("mlx-4bit", "4-bit integers with a scale and a bias for each group", _READERS, affine(4)),
    ),
)
