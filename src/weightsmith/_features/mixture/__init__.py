"""Plans mixture-of-experts checkpoints: built from dense models, or with fewer experts. Engine and store are shared.

assembly.py   one Plan from the tensors of several models and merges; the parts of a dense model; the steps of every output
              tensor; experts that are noised, partly reinitialised, split or scaled
layouts/      how each architecture stores experts: one file each
checks.py     validates the recipe and the models; which layout is used, and why others do not fit
build.py      recipe + headers → Plan; reports every problem before tensor data is read
routing/      router weights, and where they send the prompts
surgery/      prunes and merges the experts of existing mixtures
"""
