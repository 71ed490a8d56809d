"""Where output bytes go, and how they get there and stay right.

Reading order: `layout` (where), `checksum`, `journal`, `manifest`, `target` (what may be overwritten), `disk` (system
calls), `staging` (build and publish), `reread`, `verify`, `views` and `save` (tensors in memory).
"""

from __future__ import annotations

from weightsmith.store.checksum import combine, grain_bytes, hash_grains
from weightsmith.store.layout import Layout, ShardLayout, TensorPlace, make_layout
from weightsmith.store.save import Saved, save_file, save_model
from weightsmith.store.staging import Staging, staging_folder
from weightsmith.store.verify import Report, verify

__all__ = [
    "Layout",
    "Report",
    "Saved",
    "ShardLayout",
    "Staging",
    "TensorPlace",
    "combine",
    "grain_bytes",
    "hash_grains",
    "make_layout",
    "save_file",
    "save_model",
    "staging_folder",
    "verify",
]
