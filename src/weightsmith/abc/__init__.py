"""The interfaces of everything that can be added. Public: plug-ins import them from here.

    tensors.py        Tensors: what tensors are read from; FileKind: a format of weight files
    stored.py         StoredFormat and Encoding: a stored format, and how its rows become bytes
    job.py            Job: what a merge method does with one matrix, tile by tile
    product.py        ProductKind: a value that steps depend on; what it is computed from
                      Statistic: a sum over the tokens of a text for each linear layer
    adapter.py        AdapterKind: what the tensors of an adapter do to the rows of a weight
    layout.py         ExpertLayout: how an architecture stores a mixture of experts
    approximation.py  Approximation: how the rows of missing tokens are made
    output.py         OutputScheme and Target: somewhere to write to

A package brings one with an entry point: `weightsmith.methods`, `.formats`, `.products`, `.statistics`, `.adapters`,
`.layouts`, `.approximations` or `.outputs` (`_base/plugins.py`). The pages docs/adding-*.md have an example of each, and
`weightsmith.testing` a suite of tests. Imports `_base`, `_files`, `_kernels` and `_plans`.
"""
