"""Files, here and elsewhere: bytes of unknown origin in, checked and frozen values out. Imports `_base`.

`safetensors.py` and `pytorch.py` read headers, `hf_folder.py` folders in the Hub's layout; a pickle is data, never executed.
`containers.py` lays out files to be written. `remote/` reads byte ranges over http and from object stores, `hub.py` models on
the Hub; `arrays.py` maps arrays from files, and streams the bytes of a tensor in memory.
"""
