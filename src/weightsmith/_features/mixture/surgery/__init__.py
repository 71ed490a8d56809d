"""Prunes and merges the experts of existing mixtures.

selection.py  finds experts and routers by the names and shapes of tensors; which experts are kept or merged
neurons.py    permute an expert's neurons to match another's
build.py      recipe + headers → Plan; config.json with a new number of experts
"""
