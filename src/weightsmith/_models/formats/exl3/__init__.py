"""EXL3, exllamav3's format.

layout.py   the tensors of a linear layer, rates and codebooks; the models that exllamav3 loads
reading.py  weights as numbers
writing.py  the encoding
"""

from __future__ import annotations

from weightsmith._models.formats.config import ending, recogniser
from weightsmith._models.formats.exl3.reading import read
from weightsmith._models.formats.exl3.writing import find
from weightsmith.abc.stored import StoredFormat, labelled

FORMAT = StoredFormat("exl3", "EXL3", recogniser(ending(".trellis"), "exl3"), read, {".trellis": labelled("EXL3")}, parse=find)
