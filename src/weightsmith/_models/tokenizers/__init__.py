"""Tokenizers as values: which token has which id, which rows of an embedding a merge takes for it, and the files to write.

Pure functions over JSON and bytes; the package `tokenizers` is not used. `vocabulary.py` reads the files, `matching.py`
adds tokens to tokenizer.json and makes tables of rows, `files.py` writes the other files, chat templates among them.
"""

from weightsmith._models.tokenizers.matching import RowAlignment as RowAlignment
from weightsmith._models.tokenizers.matching import RowRule as RowRule
from weightsmith._models.tokenizers.matching import United as United
from weightsmith._models.tokenizers.matching import align as align
from weightsmith._models.tokenizers.matching import extend as extend
from weightsmith._models.tokenizers.matching import missing_tokens as missing_tokens
from weightsmith._models.tokenizers.vocabulary import Vocabulary as Vocabulary
from weightsmith._models.tokenizers.vocabulary import read_vocabulary as read_vocabulary
