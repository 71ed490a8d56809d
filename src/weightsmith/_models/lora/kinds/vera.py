"""VeRA: factors on the rows of two random matrices that all modules share (Kopiczko et al. 2023, arXiv 2310.11454).

W + (b ∘ B) @ (d ∘ A): A [r, inputs] and B [outputs, r] are the first columns and rows of the shared ones.
"""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, ExactFactors, Rows, Shapes

_NOT_SAVED = (
    "{} is not in the file: save the adapter with save_projection: true, since other random numbers would change the result"
)


def of_shared(module: AdapterModule, name: str, least: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a shared tensor that is at least so large. Raises ValueError if it was not saved."""
    if not module.has(name):
        raise ValueError(_NOT_SAVED.format(name))
    shape = module.parts[name].shape
    return tuple(map(max, shape, least)) if len(shape) == len(least) else least


def shapes(module: AdapterModule) -> Shapes:
    """Both vectors, and shared matrices that are large enough."""
    rank = module.whole("r")
    shared_a, shared_b = of_shared(module, "vera_A", (rank, module.inputs)), of_shared(module, "vera_B", (module.outputs, rank))
    return {
        "vera_lambda_b": (module.outputs,),
        "vera_lambda_d": (rank,),
        "vera_A": (rank, shared_a[1]),
        "vera_B": (shared_b[0], rank),
    }


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """Left and right of the update."""
    left = arrays["vera_lambda_b"][:, None] * arrays["vera_B"][: module.outputs]
    right = arrays["vera_lambda_d"][:, None] * arrays["vera_A"][:, : module.inputs]
    return left, np.ascontiguousarray(right)


KIND = AdapterKind(
    title="VeRA",
    types=("VERA",),
    parts=("vera_lambda_b", "vera_lambda_d"),
    shared=("vera_A", "vera_B"),
    shapes=shapes,
    prepare=prepare,
    exact=ExactFactors(None, lambda module: module.whole("r"), prepare),
    used=frozenset({"r"}),
    unused=frozenset({"projection_prng_key", "save_projection", "vera_dropout", "d_initial"}),
)
