"""Mixture-of-experts checkpoints from dense ones. This room only plans: the engine and the store are everybody's.

assembly.py  one Plan from the tensors of several models and merges
dense.py     the parts of a dense model: gate, up and down of each layer, and the rest
layouts/     how each architecture stores experts: one file each
gates/       router weights: one file for each way to make them
computed.py  tensors that no checkpoint has: router weights, biases of zero
checks.py    what is wrong with the recipe and the models
steps.py     the steps of every output tensor
build.py     recipe + headers → Plan, with every problem found before tensor data is read

and of those that are there, with fewer experts:

experts.py   experts and routers, by the names and shapes of tensors
selection.py which experts stay, or become one
counts.py    config.json with another number of experts
neurons.py, matching.py, permuted.py   experts whose neurons are put in the order of another's
surgery.py   recipe + headers → Plan
"""

from weightsmith.mixture.build import PreparedMoe as PreparedMoe
from weightsmith.mixture.build import prepare_moe as prepare_moe
from weightsmith.mixture.prepared import PreparedMixture as PreparedMixture
from weightsmith.mixture.surgery import PreparedSurgery as PreparedSurgery
