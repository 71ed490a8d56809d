"""What the engine runs: a job merges one logical matrix, tile by tile, with the parameters it is given.

`job.py` is the form. `combination.py` (weighted sums, and sums by inner products: `sphere.py`), `vectors.py` (the same by row
or column), `task_vectors.py` (with `axes.py` and `selection.py`), `elementwise.py`, `selective.py` and `matrix.py` (with
`decompose.py`) are jobs that methods are made of; `scaled.py` and `spectrum.py` wrap any of them. What must be known of the
whole model first is a product.
"""
