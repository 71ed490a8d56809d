"""Tokenizers in GGUF files.

files.py     the tokenizer's files from the keys, and the keys from the tokenizer's files; byte-level BPE, and SentencePiece's
encoders.py  the same of encoders: Unigram and WordPiece
parts.py     what all have in common
chat.py      chat templates, tokens that end a generation
ranks.py     Kimi's tokenizer, from the ranks of tiktoken
unsaid.py    what tokenizer.json says and a GGUF file cannot
"""
