"""Router weights of a mixture, from prompts, and where they send them.

gates/            one file for each way to make router weights
prompts.py        texts, files of texts, tokens
hidden_states.py  what each layer is given and gives, layer by layer
route.py          one pass over the hidden states: weights and report
report.py         shares of tokens; heat_map.py its picture
gating.py         what router weights are made from: settings, as records and as JSON
product.py        the `router` product: these as one value of a plan
"""
