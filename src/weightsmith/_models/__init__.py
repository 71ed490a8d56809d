"""What a model is, before anything is planned. Imports `_base`, `_files`, `_kernels`, `_plans` and `abc`.

`checkpoint.py` opens one. `sources/` reads its tensors; `formats/` has a file or folder for each stored format: its bytes,
reading and writing. `structure/` derives layers and modules from names and config.json, `tokenizers/` ids from any tokenizer
file, `lora/` matches adapters with a base model.
"""
