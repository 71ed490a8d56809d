"""Writes the output: reserved, checked by checksums, resumable, published by one rename.

Reading order: `checksum`, `journal`, `manifest`, `target` (what may be overwritten), `disk` (system calls), `claim` (which
staging folders are ours), `locks`, `area` (the staging folder), `resume` (which work is resumed), `weights`, `other_files`,
`products`, `staging` (build and publish), `unfinished`, `reread`, `verify` and `save` (tensors in memory).
"""

from __future__ import annotations

from weightsmith.containers import Layout, ShardLayout, TensorPlace, make_layout
from weightsmith.store.area import staging_folder
from weightsmith.store.checksum import combine, grain_bytes, hash_grains
from weightsmith.store.save import Saved, save_file, save_model
from weightsmith.store.staging import Staging
from weightsmith.store.verify import Verified, verify

__all__ = [
    "Layout",
    "Saved",
    "ShardLayout",
    "Staging",
    "TensorPlace",
    "Verified",
    "combine",
    "grain_bytes",
    "hash_grains",
    "make_layout",
    "save_file",
    "save_model",
    "staging_folder",
    "verify",
]
