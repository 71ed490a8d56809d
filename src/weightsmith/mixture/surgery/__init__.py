"""Mixtures of experts that are there, with fewer experts.

experts.py    experts and routers, by the names and shapes of tensors
selection.py  which experts stay, or become one
counts.py     config.json with another number of experts
neurons.py, matching.py   experts whose neurons are put in the order of another's
build.py      recipe + headers → Plan
"""
