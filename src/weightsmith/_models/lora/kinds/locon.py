"""LoCon: LoRA of a convolution whose A is a Tucker decomposition (LyCORIS's `use_tucker`; Yeh et al. 2023, arXiv 2309.14859).

W + scaling · up @ A, with A[r, :, y, x] = Σ mid[r, s, y, x] · down[s, :]. Down [rank, inputs] looks at single pixels, and the
core mid [rank, rank, height, width] at all of the kernel. Up is [outputs, rank].
"""

from __future__ import annotations

import numpy as np

from weightsmith._models.lora.kinds.lokr import scaling
from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, ExactFactors, Rows, Shapes

PARTS = ("lora_mid", "lora_down", "lora_up")


def _rank(module: AdapterModule) -> int:
    """Raises ValueError without all three tensors."""
    if missing := [part for part in PARTS if not module.has(part)]:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return (*module.parts["lora_mid"].shape, 0)[0]


def shapes(module: AdapterModule) -> Shapes:
    """Down and up of one pixel, and the core."""
    rank, kernel = _rank(module), module.shape[2:]
    if not kernel or not rank:
        raise ValueError(f"it has the core of a convolution, and the weight is {list(module.shape)}")
    scaling(module, rank)
    ones = (1,) * len(kernel)
    return {
        "lora_mid": (rank, rank, *kernel),
        "lora_down": (rank, module.shape[1], *ones),
        "lora_up": (module.outputs, rank, *ones),
    }


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """Up, times the scaling, and A as a matrix."""
    core, down, up = (arrays[part] for part in PARTS)
    rank = len(core)
    whole = np.einsum("rs...,si->ri...", core, down.reshape(rank, -1))
    return up.reshape(-1, rank) * scaling(module, rank), np.ascontiguousarray(whole.reshape(rank, -1))


def exact_shape(module: AdapterModule) -> tuple[int, ...]:
    """The shape of the kernel."""
    _rank(module)
    core, down, up = (module.parts[part].shape for part in PARTS)
    if len(core) < 3 or len(down) < 2 or not up:
        raise ValueError(f"lora_mid is {list(core)}, lora_down {list(down)} and lora_up {list(up)}")
    return up[0], down[1], *core[2:]


KIND = AdapterKind(
    title="LoCon with a core",
    types=(),
    parts=("lora_mid",),
    shapes=shapes,
    prepare=prepare,
    used=frozenset({"alpha"}),
    exact=ExactFactors(exact_shape, _rank, prepare),
)
