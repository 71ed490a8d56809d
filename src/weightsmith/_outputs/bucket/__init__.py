"""Outputs in buckets: a checkpoint is uploaded while it is computed, without a copy on the local disk.

Reading order: `prefix`, `client` (what is asked of a store), `s3`, `lock`, `parts` (where weight files are cut),
`journal`, `uploads` (from tiles to parts), `contents` (what may be overwritten), `backend`, `place`, `unfinished`.
"""

from __future__ import annotations
