"""Values of a recipe that a text chooses: `weightsmith tune`.

candidates.py  a recipe with values to tune: the plan of each candidate, from models that are opened once
evaluator.py   the losses of a candidate, which is not written, on rows of text
texts.py       rows to tune on, and rows for the report
search.py      which candidate is next: CMA-ES, random, grid
journal.py     one line for each trial; a search that is resumed reads them again
tune.py        `tune`: the search
result.py      what was found, in sentences; report.py as a page
evolve.py      configs of mergekit-evolve
"""
