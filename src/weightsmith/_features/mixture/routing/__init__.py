"""Router weights of a mixture, computed from prompts, and where they route those prompts.

gates/       the ways to compute router weights
prompts.py   texts, files of texts, tokens
report.py    shares of tokens, as text and as a heat map
product.py   the `router` product: its settings, one pass over the hidden states, its arrays
"""
