"""Formats of quantised checkpoints: each makes a plan of plain tensors into a plan of stored codes.

base.py     `Format`: the interface
formats.py  `FORMATS`: the list of all
copies.py   `weightsmith quantize` and `dequantize`: plans of a single model
streamed.py formats that need no data: each row is encoded as it leaves the merge
gguf.py     GGUF files
exl2/       EXL2: settings for each block, measurement, whole models
calibration/ products that quantise layer by layer, for what a text makes of their inputs
"""

from __future__ import annotations

from weightsmith.quantisation.copies import prepare_copy as prepare_copy
from weightsmith.quantisation.formats import quantised as quantised
