"""GPTQ's weights: codes of 2, 3, 4 or 8 bits, transposed and packed along the inputs.

X.qweight I32 [inputs · bits / 32, outputs]   codes; each column is a stream of bits, the lowest bit of a word first
X.qzeros  I32 [groups, outputs · bits / 32]   zeros, packed along the outputs
X.scales      [groups, outputs]
X.g_idx   I32 [inputs]                        the group of each input; missing: groups of group_size inputs in order

A weight is (code - zero) · scale. Format `gptq` stores zero - 1, `gptq_v2` the zero itself. The older one is undone as
GPTQModel does it: 1 is added to whole words, so that a carry undoes the borrow of a zero of 0 (of 3 bits: to each zero).
The groups of a model with `desc_act` are not in order, so it must have g_idx.
"""

from __future__ import annotations

from weightsmith._models.formats.config import ending, recogniser
from weightsmith._models.formats.gptq.reading import read
from weightsmith.abc.stored import StoredFormat, labelled

FORMAT = StoredFormat("gptq", "GPTQ", recogniser(ending(".qweight"), "gptq"), read, {".qweight": labelled("GPTQ or AWQ")})
