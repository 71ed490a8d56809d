"""Where results are written: resumable, checked by checksums, published as a whole. Imports `_base`, `_files`, `_plans`, `abc`.

staging.py    an output that is being built, whatever its backend
places.py     the place that a path or an address names: written, verified, searched for unfinished work
local/        a folder, which a rename publishes
bucket/       a prefix in S3, Google Cloud Storage or Azure; a file for each store
hub/          a model on the Hub, which a commit publishes; `--push` of a finished folder
save.py       `save_file`, `save_model`: tensors in memory
"""
