"""What can be known of a model on a text: what enters its layers, and how much its predictions depend on what leaves them.

    text ──▶ rows ──▶ states 0 ──▶ layer 0 ──▶ states 1 ──▶ layer 1 ──▶ …    [rows, tokens, hidden]: what enters a layer
                      gradients 0 ◀── layer 0 ◀── gradients 1 ◀── layer 1 ◀── …

`model.py` makes the products of a plan: `TextRun` one by one, `statistic_products` those of a request. `rows.py` cuts a text
into rows of tokens; `states.py`, `gradients.py` and `statistic.py` have the kinds of products, with one layer in memory at a
time; `statistics.py` has the statistics themselves; `decoder/` is the forward pass. States and gradients are transient: few of
them exist at a time. `losses.py` makes the products of an evaluation: rows of a text or of conversations (`scored_rows.py`)
run to the losses of their tokens. The room knows nothing of who asks: quantisation, routers of mixtures, merge methods,
evaluations.
"""
