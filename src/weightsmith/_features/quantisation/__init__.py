"""Formats of quantised checkpoints: each makes a draft of plain tensors one of stored codes.

base.py      `Format`: the interface; targets
formats.py   `FORMATS`: the list of all; those that need no data; those that plan whole models themselves, with importances and
             types from a measurement: GGUF; `weightsmith quantize` and `dequantize`
exl2.py      EXL2: settings for each block, from a measurement or without
exl3.py      EXL3: a rate for each weight
optimise.py  which candidate each block gets, for a size
calibration/ products that quantise layer by layer, for what a text makes of their inputs

What a stored format is, how its codes are chosen, and which models its programs load: `_models/formats`.
"""
