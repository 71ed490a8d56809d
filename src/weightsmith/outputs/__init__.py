"""Where results are written: reserved, checked by checksums, resumable, published at once.

Reading order: `checksum`, `journal`, `manifest`, `local/` (a folder), `bucket/` (an address in a bucket), `hub/` (a model on
the Hub), and `save` (tensors in memory).
"""
