"""EXL2, ExLlamaV2's format.

layout.py   the tensors of a linear layer, and its settings
reading.py  weights as numbers
writing.py  the encoding
blocks.py   the blocks of a model, their candidate settings and sizes; measurement.json
loader.py   config.json and the architectures of ExLlamaV2
model.py    a whole model under ExLlamaV2's names
"""

from __future__ import annotations

from weightsmith._models.formats.exl2.reading import read, recognises
from weightsmith._models.formats.exl2.writing import find
from weightsmith.abc.stored import StoredFormat, labelled

FORMAT = StoredFormat("exl2", "EXL2", recognises, read, {".q_weight": labelled("EXL2")}, parse=find)
