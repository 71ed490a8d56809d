"""AWQ's weights in the layout `gemm`: codes of 4 bits, transposed and packed along the outputs.

X.qweight I32 [inputs, outputs / 8]   the lowest nibble of a word is output 0 of 8, the next ones are 2, 4, 6, 1, 3, 5, 7
X.qzeros  I32 [groups, outputs / 8]   zeros, in the same order
X.scales      [groups, outputs]       groups of group_size inputs in order

A weight is (code - zero) · scale. The layouts of other kernels (gemv, gemv_fast, Marlin) are refused.
"""

from __future__ import annotations

from weightsmith._models.formats.awq.reading import read
from weightsmith._models.formats.config import ending, recogniser
from weightsmith.abc.stored import StoredFormat

FORMAT = StoredFormat("awq", "AWQ", recogniser(ending(".qweight"), "awq"), read)
