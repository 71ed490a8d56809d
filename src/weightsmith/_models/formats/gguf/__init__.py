"""GGUF, the format of llama.cpp: files that hold all of a model, in ggml's types of blocks.

layout.py     the bytes of a file, and the layout of new ones
header.py     the header of a file, parsed and checked
families.py   names of tensors and keys of each family, there and in the Hub's layout
config.py     config.json from the keys, and the keys from config.json
tokenizer.py  the tokenizer's files from the keys, and the keys from the tokenizer's files
projectors.py names of tensors and keys of vision halves
values.py     values of config.json and of the keys, checked
imatrix.py    llama.cpp's importance matrices
reading.py    the tensors of files
cuts.py       tensors that llama.cpp stores in parts
writing.py    the encodings: ggml's blocks of numbers, and llama.cpp's order of rows
"""

from __future__ import annotations

from weightsmith._models.formats.gguf.cuts import find_cut
from weightsmith._models.formats.gguf.reading import KIND
from weightsmith._models.formats.gguf.writing import find
from weightsmith.abc.stored import StoredFormat

FORMAT = StoredFormat("gguf", "GGUF", files=(KIND,), parse=lambda name: find(name) or find_cut(name))
