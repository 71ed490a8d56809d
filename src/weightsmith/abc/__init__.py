"""The interfaces of everything that can be added. Public: plug-ins import them from here.

    tensors.py   Tensors: what tensors are read from; RandomSource and others are built on it
    files.py     FileKind: a format of weight files
    stored.py    StoredFormat and Encoding: a stored format, and how its rows become bytes
    job.py       Job: what a merge method does with one matrix, tile by tile
    product.py   ProductKind: a value that steps depend on; what it is computed from
    output.py    Place and OutputBackend: somewhere to write to

Methods, expert layouts and statistics are records of one function each: see their pages in docs/. `weightsmith.testing` has a
suite of tests for each kind. Imports `_base`, `_files`, `_kernels` and `_plans`.
"""
