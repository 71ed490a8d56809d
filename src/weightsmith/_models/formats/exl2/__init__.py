"""EXL2, ExLlamaV2's format.

layout.py   the tensors of a linear layer, and its settings; config.json and the architectures of ExLlamaV2
reading.py  weights as numbers
writing.py  the encoding
model.py    a whole model under ExLlamaV2's names; its blocks, their candidate settings and sizes; measurement.json
"""

from __future__ import annotations

from weightsmith._models.formats.exl2.reading import read, recognises
from weightsmith._models.formats.exl2.writing import find
from weightsmith.abc.stored import StoredFormat, labelled

FORMAT = StoredFormat("exl2", "EXL2", recognises, read, {".q_weight": labelled("EXL2")}, parse=find)
