"""Where results are written: resumable, checked by checksums, published as a whole. Imports `_base`, `_files`, `_plans`, `abc`.

staging.py       an output that is being built, whatever its target: `weight_files`, `journal`, and the folder of both, `area`
manifest.py      what was written, with the checksums of `checksum.py`
local.py         a folder as the target, which a rename publishes: with `disk` (system calls) and `locks`
bucket.py        a prefix in S3, Google Cloud Storage or Azure; with `bucket_store` (requests) and `bucket_parts`
hub.py           a model on the Hub, which a commit publishes, and `--push`; `hub_repository` sends its requests
places.py        the target that a path or an address names; unfinished work there, and who does it
save.py          `save_file`, `save_model`: tensors in memory
"""
