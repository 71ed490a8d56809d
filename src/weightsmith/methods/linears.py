"""What the methods that work on whole matrices share: which tensors they are for, their parameters, and their job.

They are for the weights of linear layers. All else (embeddings, heads, norms, biases, convolutions, routers) takes the mean of
the weighted deltas, as in the methods' own code. The names say which is which; what no name gives away counts as linear when it
is a matrix. Experts are matrices of their own. Fused matrices (qkv, gate and up) are decomposed as one: `row_blocks` is where
they would be taken apart.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weightsmith.methods.base import Parameter, Parameters

if TYPE_CHECKING:
    from weightsmith.methods.job import Job, Matrix

WEIGHT = Parameter("weight", "float", "Factor on this model's delta.", scope="model", default=1.0)

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


def row_blocks(rows: int) -> tuple[slice, ...]:
    """The logical matrices of one matrix, as runs of its rows. All of it for now: fused qkv is not taken apart."""
    return (slice(0, rows),)


def needs_torch(shared: Parameters, models: Sequence[Parameters]) -> str:
    """What to say where torch is not installed; "" where it is."""
    try:
        found = importlib.util.find_spec("torch") is not None
    except ImportError:
        found = False
    return "" if found else "this method computes with torch, which is not installed: pip install 'weightsmith[torch]'"


def number(matrix: Matrix, name: str) -> float:
    """A parameter of the tensor."""
    return float(matrix.shared[name])  # type: ignore[arg-type]  # checked when the recipe was read


def linears_job(
    matrix: Matrix,
    merge: Callable[[Sequence[Any]], Any],
    *,
    calibrates: bool = False,
    copies: int = 8,
    side: int | None = None,
) -> Job:
    """base + λ · merge(weighted deltas) for a linear layer, base + λ · their mean for all else.

    merge       maps deltas (torch float64 [rows, cols] each, times their weights) to the merged delta
    calibrates  merge gets the deltas without their weights, and what is not a linear layer takes their weighted sum
    copies      matrices of float64 that it holds at most, beside square ones
    side        of the largest square matrix it makes; None: the shorter side of the matrix
    """
    import numpy as np

    factor, weights = number(matrix, "lambda"), matrix.weights()
    if not is_linear(matrix.name, matrix.shape):
        from weightsmith.methods.combination import CombinationJob

        share = factor * weights if calibrates else factor * weights / len(weights)
        return CombinationJob(matrix, np.concatenate([[1.0 - share.sum()], share]))
    from weightsmith.methods.matrix import MatrixJob

    taken = np.ones(len(weights)) if calibrates else weights
    base = np.array([1.0] + [0.0] * len(weights))
    return MatrixJob(matrix, merge, base, taken, factor, copies=copies, side=side)
