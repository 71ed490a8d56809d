"""Values of a recipe that a text chooses: `weightsmith tune`.

candidates.py  a recipe with values to tune: the plan of each candidate, from models that are opened once
evaluator.py   the tensors of a candidate, which is not written, and its losses on rows of text
measure.py     what a search minimises: the number of a command; the losses of texts, and their slopes
texts.py       rows to tune on, and rows for the report
search.py      which candidate is next: parabolas, gradients, CMA-ES, random, grid
journal.py     one line for each trial; a search that is resumed reads them again
tune.py        `tune`: the search
result.py      the result, in sentences and as a page
evolve.py      configs of mergekit-evolve
"""
