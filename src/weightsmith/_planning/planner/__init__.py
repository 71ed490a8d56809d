"""From a recipe and the headers of its models to a Plan, with every problem found before a byte of tensor data is read.

segments.py    `models`, `slices` and `modules` in one form: runs of output layers and their inputs
parameters.py  what each parameter is for each tensor and model, and where the recipe says so
audit.py       parameters that are unknown, misplaced, wrong or missing, whatever the models hold
patterns.py    the folders that a pattern such as `./run/checkpoint-*` matches
inputs.py      the models, opened
donor.py       which of them gives config and tokenizer
match.py       which tensor of each model feeds which output tensor, whatever the prefixes
placement.py   which segments make which module of the output
depth.py       which layer of the donor describes each output layer in config.json
dtypes.py      the dtype of each output tensor
mismatch.py    tensors that do not go together
account.py     used, or left out for a reason: no tensor is lost
decide.py      what a tensor is to the method, and which products it waits for
statistics.py  what the method knows of the models from a text: products, and what each step reads of them
logical.py     a tensor that holds several matrices, as pieces
outputs.py     the steps
config.py      config.json of the output
encode.py      which tensors are quantised, and what config.json lists as ignored
merges.py      puts these together: request, models opened, tensors matched, draft assembled
prepared.py    the draft and the plan with their models
build.py       the functions that plan a recipe, and the recipes whose results it reads
reopen.py      a plan from its JSON and its inputs
state_dicts.py the same for models in memory, without a recipe
"""

from weightsmith._planning.planner.build import assemble as assemble
from weightsmith._planning.planner.build import prepare as prepare
from weightsmith._planning.planner.prepared import Assembled as Assembled
from weightsmith._planning.planner.prepared import Prepared as Prepared
from weightsmith._plans import Plan as Plan
