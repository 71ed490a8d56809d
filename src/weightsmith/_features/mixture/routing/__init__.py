"""Router weights of a mixture, computed from prompts, and where they route those prompts.

gates/            one file for each way to compute router weights
prompts.py        texts, files of texts, tokens
route.py          one pass over the hidden states: weights and report
report.py         shares of tokens, as text and as a heat map
gating.py         the settings of the router weights, as records and as JSON
product.py        the `router` product of a plan
"""
