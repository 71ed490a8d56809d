"""Runs prepared plans: what is needed first, the plan itself, and the files beside the weights. Imports all above `_reports`.

execute.py    a whole plan, after what must run before it; computations that write nothing
run.py        one plan
output.py     the output of a run: whether it can be written, and its files besides the weights
cluster.py    other processes do the parts of a plan: on this machine (processes.py), or in a Ray cluster (on_ray.py)
together.py   one part; products that these processes measure together, and tasks that they do for each other
local_copies.py  copies of input files in a folder on the machine's own disk, read in their place
identity.py   when work may be resumed: same plan, same inputs, same program
second_plans.py  plans that follow from the products of another plan, and the search for a size that meets a target
summary.py    what a run will cost
state_dicts.py  `weightsmith.merge_state_dicts`: the engine on tensors in memory
report.py     how far a merge has moved from its base, and the page that shows it; cards.py is the model card
options.py    the options of a run, and the threads and memory that follow from them
progress.py   the display of progress, and how long earlier runs took
"""
