"""Mixture-of-experts checkpoints from dense ones. This room only plans: the engine and the store are everybody's.

assembly.py   one Plan from the tensors of several models and merges
dense.py      the parts of a dense model: gate, up and down of each layer, and the rest
layouts/      how each architecture stores experts: one file each
choose.py, limits.py   which layout, and why not another
transforms.py experts with noise, partly drawn anew, cut, scaled
checks.py     what is wrong with the recipe and the models
steps.py      the steps of every output tensor
build.py      recipe + headers → Plan, with every problem found before tensor data is read
packages.py   what only some recipes need
routing/      router weights, and where they send the prompts
surgery/      mixtures that are there, with fewer experts
"""

from weightsmith.mixture.build import prepare_mixture as prepare_mixture
from weightsmith.mixture.build import prepare_moe as prepare_moe
