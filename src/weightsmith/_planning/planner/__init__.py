"""From a recipe and the headers of its models to a Plan, with every problem found before a byte of tensor data is read.

segments.py    `models`, `slices` and `modules` in one form: runs of output layers, their inputs, and the modules that they make
parameters.py  what each parameter is for each tensor and model, where the recipe says so, and which are wrong
inputs.py      the models, opened, also those that a pattern such as `./run/checkpoint-*` matches; which gives config, tokenizer
match.py       which tensor of each model feeds which output tensor, whatever the prefixes
vocabulary.py  the tokenizer of the output, and the rows of its embeddings; companions.py has the other files beside the weights
account.py     used, or left out for a reason: no tensor is lost
decide.py      what a tensor is to the method, which products it waits for, and its pieces if it holds several matrices
statistics.py  what the method knows of the models from a text: products, and what each step reads of them
outputs.py     the steps
config.py      config.json of the output, which layer of the donor describes each of its layers, and the dtypes of tensors
agreement.py   what models disagree on though their tensors have equal shapes, and tensors that do not go together
encode.py      which tensors are quantised, and what config.json lists as ignored
loading.py     whether transformers could load the output; answers.py keeps what it said
merges.py      puts these together: request, models opened, tensors matched, draft assembled
prepared.py    the draft and the plan with their models, and the recipes whose results they read
build.py       the functions that plan a recipe, and the recipes whose results it reads
reopen.py      a plan from its JSON and its inputs
state_dicts.py the same for models in memory, without a recipe
"""

from weightsmith._planning.planner.build import assemble as assemble
from weightsmith._planning.planner.build import prepare as prepare
from weightsmith._planning.planner.prepared import Prepared as Prepared
from weightsmith._plans import Plan as Plan
