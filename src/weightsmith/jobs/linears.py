"""Which tensors are the weights of linear layers inside blocks, for what works on whole matrices.

The names say which is which; what no name gives away counts as linear when it is a matrix. Experts, and the
parts of fused matrices, come one at a time: a plan makes pieces of them (`planner/logical.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from weightsmith.jobs.job import Parameters

PARTS = ("embed", "norm", "conv", "bias", "router", "lm_head")
"""A tensor with one of these anywhere in its name is no linear layer of a block."""

COMPONENTS = frozenset({"wte", "wpe", "gate", "shared_expert_gate", "score", "classifier", "A_log"})
"""Nor is one that has one of these as a component: `mlp.gate.weight` is a router, `mlp.gate_proj.weight` is not."""

NAMES = frozenset({"output.weight", "shared.weight"})
"""Nor one of these names: the head in Meta's own checkpoints, and T5's embedding."""


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """True for a weight matrix of a linear layer inside a block.

    >>> is_linear("model.layers.0.mlp.gate_proj.weight", (1536, 576)), is_linear("model.layers.0.mlp.gate.weight", (64, 576))
    (True, False)
    """
    if len(shape) != 2 or min(shape) < 2 or name in NAMES:
        return False
    return not any(part in name for part in PARTS) and COMPONENTS.isdisjoint(name.split("."))


def needs_torch(shared: Parameters, models: Sequence[Parameters]) -> str:
    """What to say where torch is not installed; "" where it is."""
    try:
        found = importlib.util.find_spec("torch") is not None
    except ImportError:
        found = False
    return "" if found else "this method computes with torch, which is not installed: pip install 'weightsmith[torch]'"
