"""Runs any plan, tile by tile. Imports everything above it in docs/architecture.md, and none of the features.

`local.py` is the runner: threads, graph, progress, errors. `tiles.py` cuts tensors, `schedule.py` picks the next tile, and
`active.py` holds the state of a pass. The work on one tile is in `copier.py`, `merger.py`, `encoder.py` and `measurer.py`;
`reader.py` reads. `product_graph.py` computes products, whose kinds `products/` lists; `computed.py` is a merge that is read,
and not written.
"""
