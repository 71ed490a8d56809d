"""Where output bytes go, and how they get there and stay right.

Reading order: `checksum`, `journal`, `manifest`, `target` (what may be overwritten), `claim` (which unfinished work is ours),
`disk` (system calls), `staging` (build and publish), `products`, `reread`, `verify` and `save` (tensors in memory).
"""

from __future__ import annotations

from weightsmith.containers import Layout, ShardLayout, TensorPlace, make_layout
from weightsmith.store.checksum import combine, grain_bytes, hash_grains
from weightsmith.store.save import Saved, save_file, save_model
from weightsmith.store.staging import Staging, staging_folder
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
