"""EXL2, as ExLlamaV2's conversion makes it.

format.py       the format: options, targets, what follows from a measurement
blocks.py       the blocks of a model, their candidate settings and sizes
measurement.py  the error of each setting of each block, and measurement.json
optimise.py     which setting each block gets for a target bit rate
model.py        a whole model under ExLlamaV2's names
matrix.py       one matrix: quantised, packed, decoded
"""
