"""GGUF: the checked header of a file, and what its keys mean for the families of models that can be read and written.

header.py     the bytes of a header
families.py   names of tensors and keys of each family, there and in the Hub's layout
config.py     config.json from the keys, and the keys from config.json
tokenizer.py  the tokenizer's files from the keys, and the keys from the tokenizer's files
imatrix.py    llama.cpp's importance matrices
"""
