"""The layer stacks of a model, from its tensor names, shapes and config.json alone: no list of architectures.

    configs.py  walks over config.json
    names.py    words of a name, and where its layer number is
    counts.py   which keys of config.json hold a number of layers, and whose
    stacks.py   which prefixes are stacks of layers
    modules.py  which part of the model a tensor belongs to: text decoder, vision tower, projector, encoder ...
    model.py    `analyse` -> `Structure`: locate, rename, module_of, experts
    vocabulary.py  embeddings and heads: names, which one stands for the other
    roles.py    what a tensor is to a method
    fused.py    tensors that hold several matrices
    perlayer.py lists and maps of config.json with one entry per layer
    rules.py    numbers of config.json that say which layer is of which kind (`first_k_dense_replace`)
    resize.py   `resize_config`: config.json after layers were dropped, repeated or reordered

What is known here is the vocabulary of config.json (a few dozen key names), not models. Pure functions of names and
config: no I/O, no numpy. 100,000 names take about a third of a second.
"""

from __future__ import annotations

from weightsmith.structure.model import Structure, analyse
from weightsmith.structure.resize import resize_config
from weightsmith.structure.stacks import Stack

__all__ = ["Stack", "Structure", "analyse", "resize_config"]
