"""Runs any plan, tile by tile. Imports everything above it in docs/architecture.md, and none of the features.

`local.py` is the runner: threads, graph, progress, errors. `resources.py` says what a run may use, and what it is to do, and
cuts tensors; `schedule.py` holds the state of passes and picks the next tile. `reader.py` reads, and `tile_work.py` does the
work on one tile. `results.py` keeps what products have made and what jobs remember. `product_graph.py` computes products, whose
kinds `products/` lists; `computed.py` is a merge that is read, and not written.
"""
