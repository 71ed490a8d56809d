"""`weightsmith transplant-tokenizer`: a model with the tokenizer of another.

options.py          the options of the command
plan.py             the plan
rows.py             the product with the rows of missing tokens: their lengths, and the filter of poorly trained tokens
approximations/     how such rows are made: one file for each way
pursuit.py          what several of them use
report.py           how the tokens were found

Which row of the model serves for which token is decided in `_models/tokenizers/matching.py`.
"""
