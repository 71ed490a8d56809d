"""Finds the layer stacks of a model from its tensor names, shapes and config.json, without a list of architectures.

    configs.py  traverses config.json; settings that it leaves out, by the class of the model in transformers
    stacks.py   which prefixes are stacks of layers; which keys of config.json hold a number of layers, and of which stack
    model.py    `analyse` -> `Structure`: locate, rename, module_of, experts; modules (text decoder, vision tower ...)
    parts.py    models of several parts that names tell apart: pipelines of diffusers, single files with a VAE
    diffusers_names.py  names of diffusion models in folders of diffusers, and in single files
    vocabulary.py  embeddings and heads: names and tying; heads of classifiers
    incomplete.py  what a model seems to lack: tensors of one layer, layers, its last norm
    projections.py  the roles of projections, by their names; how methods treat a tensor; tensors that hold several matrices
    perlayer.py lists and maps of config.json with one entry per layer; numbers that determine the kind of each layer
                (`first_k_dense_replace`)
    resize.py   `resize_config`: config.json after layers were dropped, repeated or reordered

The room knows the vocabulary of config.json (a few dozen key names), not models. Pure functions of names and config: no
I/O, no numpy. 100,000 names take about a third of a second.
"""

from __future__ import annotations

from weightsmith._models.structure.model import Structure, analyse
from weightsmith._models.structure.resize import resize_config
from weightsmith._models.structure.stacks import Stack

__all__ = ["Stack", "Structure", "analyse", "resize_config"]
