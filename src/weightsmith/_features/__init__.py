"""Plans of other kinds than a merge of models. Each fills a `PlanDraft`; the engine knows none of them.

`mixture/` makes mixtures of experts, `adapters/` extracts and merges LoRA adapters, `transplant/` gives a model another
tokenizer, `quantisation/` stores any plan in a quantised format. `any_recipe.py` plans a recipe whose kind is not known.
Imports everything above `_execution`.
"""
