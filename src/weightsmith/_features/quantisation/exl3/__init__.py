"""EXL3, as exllamav3's conversion makes it.

format.py   the format: options, rates, a whole model
matrix.py   one matrix, encoded for its inputs
"""
