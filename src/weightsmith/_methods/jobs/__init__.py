"""Jobs: each merges one logical matrix, tile by tile, with given parameters.

`abc/job.py` defines the interface. Methods use `combination.py` (weighted sums, and sums by inner products: `sphere.py`),
`vectors.py` (the same by row or column), `task_vectors.py` (with `axes.py` and `selection.py`), `elementwise.py`,
`selective.py` and `matrix.py` (with `decompose.py`); `scaled.py` and `spectrum.py` wrap any of them. Statistics of the whole
model are products.
"""
