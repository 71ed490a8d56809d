"""Tokenizers as values: which token has which id, which rows of an embedding a merge takes for it, and the files to write.

Pure functions over JSON and bytes; the package `tokenizers` is not used. `vocabulary.py` reads the files, `matching.py`
adds tokens to tokenizer.json and makes tables of rows, `files.py` writes the other files, chat templates among them.
"""
