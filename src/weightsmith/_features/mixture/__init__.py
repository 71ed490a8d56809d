"""Plans mixture-of-experts checkpoints: built from dense models, or with fewer experts. Engine and store are shared.

build.py           recipe + headers → Plan of a mixture of dense models; reports every problem before tensor data is read; which
                   layout is used, and why others do not fit
layouts/           how each architecture stores experts: one file each
assembly.py        one Plan from the tensors of several models and merges; the parts of a dense model; the steps of every output
                   tensor; experts that are noised, partly reinitialised, split or scaled
router.py          the `router` product: its settings, one pass over the hidden states, its arrays; where it sends the tokens of
                   the prompts, as text and as a heat map
prompts.py         texts of experts, files of texts, tokens
gates.py           the ways to compute router weights; random ones
prompt_gates.py    those that see prompts
surgery.py         recipe + headers → Plan of a mixture whose experts are pruned or merged: which are, and its config.json
experts.py         finds experts and routers by the names and shapes of tensors; permutes an expert's neurons to match another's
"""
