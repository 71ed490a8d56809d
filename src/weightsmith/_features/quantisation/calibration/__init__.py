"""Calibrated quantisation, as products of a plan: what a text says of a model, and what is quantised for it.

    states 0 ──▶ layer 0 ──▶ states 1 ──▶ layer 1 ──▶ …          states i: what enters layer i [rows, tokens, hidden]
        └────────────────────────▲                               layer i:  its quantised weights

`layer.py` quantises a layer for the Gram matrices of what enters its weights; `activations.py` makes scales for activations
and the cache, and looks at the range of the states; `costs.py` measures what settings cost; `plan.py` puts the products into a
plan. What a format is, they ask its encodings.
"""
