"""RandLoRA: a sum of many low-rank products of shared random matrices, so that the update has full rank (Albert et al. 2025,
arXiv 2502.00987). The factors lambda and gamma of a module are on the matrix of its shorter side.
"""

from __future__ import annotations

import numpy as np

from weightsmith._models.lora.kinds.vera import of_shared
from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes, full_rank


def _sizes(module: AdapterModule) -> tuple[int, int, int, int]:
    """r, how many products, the shorter side, the longer one."""
    rank, short = module.whole("r"), min(module.outputs, module.inputs)
    return rank, -(-short // rank), short, max(module.outputs, module.inputs)


def shapes(module: AdapterModule) -> Shapes:
    """lambda [r, products], gamma [products, shorter side], and shared matrices that are large enough."""
    rank, products, short, long = _sizes(module)
    shared_a, shared_b = (
        of_shared(module, "randlora_A", (rank, 1, short)),
        of_shared(module, "randlora_B", (long, products, rank)),
    )
    return {
        "randlora_lambda": (rank, products),
        "randlora_gamma": (products, short),
        "randlora_A": (rank, *shared_a[1:]),
        "randlora_B": (*shared_b[:2], rank),
    }


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """Left and right of the update."""
    rank, products, short, long = _sizes(module)
    shared_a, shared_b = arrays["randlora_A"][:, :products, :short], arrays["randlora_B"][:long, :products]
    scaled = (arrays["randlora_lambda"][:, :, None] * shared_a * arrays["randlora_gamma"]).reshape(-1, short)
    scaled *= module.number("randlora_alpha", 640) / rank
    other = shared_b.reshape(long, -1)
    left, right = (other, scaled) if short == module.inputs else (scaled.T, other.T)
    return np.ascontiguousarray(left), np.ascontiguousarray(right)


KIND: AdapterKind = AdapterKind(
    title="RandLoRA",
    types=("RANDLORA",),
    parts=("randlora_lambda", "randlora_gamma"),
    shared=("randlora_A", "randlora_B"),
    shapes=shapes,
    prepare=prepare,
    exact=full_rank(lambda: KIND),
    used=frozenset({"r", "randlora_alpha"}),
    unused=frozenset({"projection_prng_key", "save_projection", "sparse", "very_sparse", "randlora_dropout"}),
)
