"""EXL2, ExLlamaV2's format.

layout.py   the tensors of a linear layer, and its settings
reading.py  weights as numbers
writing.py  the encoding
"""

from __future__ import annotations

from weightsmith.stored.base import StoredFormat, labelled
from weightsmith.stored.exl2.reading import read, recognises
from weightsmith.stored.exl2.writing import find

FORMAT = StoredFormat("exl2", "EXL2", recognises, read, {".q_weight": labelled("EXL2")}, parse=find)
