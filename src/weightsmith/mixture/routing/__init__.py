"""Router weights of a mixture, from prompts, and where they send them.

gates/            one file for each way to make router weights
prompts.py        texts, files of texts, tokens
hidden_states.py  what each layer is given and gives, layer by layer
materialise.py    a base's tensors in memory, few at a time, also of a merge
route.py          one pass over the hidden states: weights and report
report.py         shares of tokens; heat_map.py its picture, report_files.py the files of the output
kept.py           what an interrupted run has computed
"""
