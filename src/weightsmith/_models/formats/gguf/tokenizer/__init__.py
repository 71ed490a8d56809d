"""Tokenizers in GGUF files.

files.py     the tokenizer's files from the keys, and the keys from the tokenizer's files; byte-level BPE, and SentencePiece's
kinds.py     the same of encoders, Unigram and WordPiece; Kimi's tokenizer, from the ranks of tiktoken
splits.py    how byte-level BPE splits a text, and llama.cpp's names for it
parts.py     what all have in common; what tokenizer.json says and a GGUF file cannot
chat.py      chat templates, tokens that end a generation
"""
