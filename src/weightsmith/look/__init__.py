"""Looks at models, and at what a recipe would make of them. Writes nothing.

models.py       the models: opened, their tensors paired and placed
files.py        config.json, tokenizer, chat template, card
inspect.py      `Inspection`: what one model is
statistics.py   product: what its tensors hold
diff.py         `Difference`: what a model differs in from another; reading.py says it in words
differences.py  product: sums and spectra of the differences
sketch.py       singular values from sketches
pages.py        what was found as pages, for --report
"""
