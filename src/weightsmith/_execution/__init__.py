"""Runs prepared plans: what is needed first, the plan itself, and the files beside the weights. Imports all above `_reports`.

execute.py    a whole plan, or one part; computations that write nothing
stages.py     what is run before: results of other recipes, plans that the plan follows from
run.py        one plan
files.py      the files besides the weights
distributed/  the parts of a plan on a Ray cluster
identity.py   when work may be resumed: same plan, same inputs, same program
memory.py     `weightsmith.merge_state_dicts`: the engine on tensors in memory
cards.py      the model card; distance.py is how far a merge has moved from its base, progress.py the display of progress
"""
