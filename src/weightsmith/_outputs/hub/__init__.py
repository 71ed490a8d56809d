"""Outputs on the Hub: `hf://org/name`, whose weight files are uploaded one by one, and `--push` of a finished folder.

Reading order: `address`, `repository` (requests, retries, errors), `contents` (what may be overwritten), `files` (weight files
between their first byte and their upload), `commit` (publication), `place`, `push`.
"""
