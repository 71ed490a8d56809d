"""EXL2, as ExLlamaV2's conversion makes it.

options.py   candidate settings of the linear layers of a block, and their sizes
optimise.py  which setting each block gets for a target bit rate
matrix.py    one matrix: quantised, packed, decoded
"""
