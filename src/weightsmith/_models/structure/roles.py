"""How methods treat a tensor: the weight of a linear layer inside a block, one row per token, or anything else.

Names decide; a matrix with an unknown name counts as linear. Experts and the parts of fused matrices are passed one at a
time, as the pieces of a plan (`_planning/planner/decide.py`).
"""

from __future__ import annotations

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure.vocabulary import is_vocabulary
from weightsmith._plans import Role

PARTS = ("embed", "norm", "conv", "bias", "router", "lm_head")
"""A tensor with one of these anywhere in its name is not a linear layer of a block."""

COMPONENTS = frozenset({"wpe", "gate", "shared_expert_gate", "score", "classifier", "A_log"})
"""The same for these as a whole component: `mlp.gate.weight` is a router, `mlp.gate_proj.weight` is not."""


def role_of(spec: TensorSpec) -> Role:
    """The role of a tensor: `linear` for a weight matrix of a linear layer inside a block.

    >>> from weightsmith._base.tensors import DTYPES
    >>> names = ("lm_head.weight", "layers.0.mlp.gate_proj.weight", "layers.0.mlp.gate.weight")
    >>> [role_of(TensorSpec(name, DTYPES["BF16"], (64, 8))) for name in names]
    ['vocabulary', 'linear', 'other']
    """
    name = spec.name
    other = len(spec.shape) != 2 or min(spec.shape) < 2 or any(part in name for part in PARTS)
    if not other and COMPONENTS.isdisjoint(name.split(".")) and not is_vocabulary(spec):
        return "linear"
    return "vocabulary" if is_vocabulary(spec) else "other"
