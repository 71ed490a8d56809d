"""EXL3's weights: trellis codes of 1 to 8 bits, rotated in blocks of 128 x 128.

X.trellis I16 [inputs / 16, outputs / 16, 16 · K]   a stream of 256 · K bits for each tile; K is a whole number here
X.suh     F16 [inputs]                              scale of each input; older: X.su I16 [inputs / 16], a sign for each
X.svh     F16 [outputs]                             scale of each output; older: X.sv
X.mcg, X.mul1                                       which codebook; neither: the first one, 3inst

`_kernels/trellis.py` has the decoding. Inputs and outputs are padded to multiples of 128 here; how many are part of the model
follows from the sizes in config.json.
"""

from __future__ import annotations

from weightsmith._models.formats.config import ending, recogniser
from weightsmith._models.formats.exl3.reading import read
from weightsmith.abc.stored import StoredFormat, labelled

FORMAT = StoredFormat("exl3", "EXL3", recogniser(ending(".trellis"), "exl3"), read, {".trellis": labelled("EXL3")})
