"""Calibrated quantisation, as products of a plan.

    states 0 ──▶ layer 0 ──▶ states 1 ──▶ layer 1 ──▶ …          states i: what enters layer i [rows, tokens, hidden]
        └────────────────────────▲                               layer i:  its quantised weights

`rows.py` makes tokens of a text, `sums.py` Hessians of rows; `sites.py` knows which weights share an input. The other files are
the kinds of products, and `plan.py` puts them into a plan. States are transient: one or two files of them exist at a time.
"""
