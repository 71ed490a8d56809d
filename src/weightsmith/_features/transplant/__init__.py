"""`weightsmith transplant-tokenizer`: a model with the tokenizer of another.

options.py          the options of the command
plan.py             the plan
rows.py             the product with the rows of missing tokens: their lengths, the filter of poorly trained tokens, its report
approximations/     how such rows are made: one file for each way
pursuit.py          what several of them use

Which row of the model serves for which token is decided in `_models/tokenizers/matching.py`.
"""
