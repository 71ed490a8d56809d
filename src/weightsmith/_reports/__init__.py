"""What models and merges look like, for people. Imports everything but `_app`.

`look/` has `inspect`, `diff` and `preview`: statistics as products of plans without output, and what they mean, in words and as
pages. `evaluate/` has `evaluate`: how well models predict texts. `tuning/` has `tune`: values of a recipe that a text chooses.
`auto/` has `auto`, which chooses a merge by measuring, and `write`: text that a model writes by itself.
`options.py` has the options of all but `look/`. `judge.py` loads a model with transformers: perplexity, greedy continuation.
`command.py` runs a command of the user's that measures a model.
"""
