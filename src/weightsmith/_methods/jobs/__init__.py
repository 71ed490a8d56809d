"""Jobs: each merges one logical matrix, tile by tile, with given parameters.

`abc/job.py` defines the interface. Methods use `combination.py` (weighted sums, with coefficients for the whole, a row or a
column, some from inner products, or of each element), `task_vectors.py` (with `selection.py`), `elementwise.py` and
`matrix.py` (with `decompose.py`). Those in `_methods/steps.py` wrap any of them. `operations.py` has the jobs of steps that are
no merges.
"""
