"""From a recipe and the headers of its models to a Plan, with every problem found before a byte of tensor data is read.

merges.py      the steps of a merge in one view: request, models opened, tensors matched, draft assembled
build.py       the functions that plan a recipe, and the recipes whose results it reads
prepared.py    the draft and the plan with their models: what planning gives

segments.py    `models`, `slices` and `modules` in one form: runs of output layers, their inputs, the modules that they make,
               and the account of what they leave out
parameters.py  what each parameter is for each tensor and model, where the recipe says so, and which are wrong
inputs.py      the models, opened, also those that a pattern such as `./run/checkpoint-*` matches, and moving averages
               of weights (`model.ckpt+ema`); which gives config, tokenizer
match.py       which tensor of each model feeds which output tensor, whatever the prefixes
vocabulary.py  the tokenizer of the output, and the rows of its embeddings
outputs.py     the output tensors, one step each
steps.py       what a step is besides its reads: dtype, operation, role, pieces, and the products and statistics that it needs
files.py       the files beside the weights: config.json, and those that the donor lacks and another model has
pipelines.py   the parts of a pipeline of diffusers, and other subfolders with weights: whose they are, and their config.json
tensor_data.py  what is read besides headers: whether tensors that are left out as copies are copies, and single numbers
agreement.py   what models disagree on though their tensors have equal shapes, and tensors that do not go together
encode.py      which tensors are quantised, and what config.json lists as ignored
loading.py     whether transformers could load the output; asks transformers_script.py, in a process of its own
reopen.py      a plan from its JSON and its inputs
"""
