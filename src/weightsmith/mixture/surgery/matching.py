"""Which neuron of one expert does what a neuron of another does: the weight matching of Git Re-Basin, for two MLPs.

Ainsworth et al. 2022, https://arxiv.org/abs/2209.04836, section 3.2; for experts, M-SMoE (Li et al. 2023,
https://arxiv.org/abs/2310.01334, section 3.1). With both layers of an MLP known it is one linear assignment and no iteration.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from weightsmith.checkpoint import Checkpoint
from weightsmith.errors import NonFinite
from weightsmith.mixture.surgery.neurons import Carrier


def match(
    checkpoint: Checkpoint, first: Mapping[str, Carrier], other: Mapping[str, Carrier], owner: str
) -> npt.NDArray[np.int64]:
    """The order of `other`'s neurons that comes nearest to `first`: order[i] does what neuron i of `first` does.

    It has the least Σ (first - reordered other)² over gate, up, down and the biases of neurons. owner: names `other` in
    messages.

    Inner products are float32; where two orders are equal within their rounding, which one is taken depends on the
    machine's BLAS. Memory: I² and 2 I H float32, for I neurons of H numbers. Raises NonFinite.
    """
    from scipy.optimize import linear_sum_assignment

    neurons = next(iter(first.values())).neurons
    gain = np.zeros((neurons, neurons), np.float32)
    for key, carrier in first.items():
        ours, theirs = _read(checkpoint, carrier), _read(checkpoint, other[key])
        for places in carrier.each():
            gain += ours[places] @ theirs[places].T
    if not np.isfinite(gain).all():
        what = "experts cannot be matched: there is a NaN or an infinity in their weights"
        raise NonFinite(what, where=f"{checkpoint.ref}, {owner}", fix="repair the model, or write match: false")
    _, order = linear_sum_assignment(gain, maximize=True)
    return np.asarray(order, np.int64)


def _read(checkpoint: Checkpoint, carrier: Carrier) -> npt.NDArray[np.float32]:
    """float32 [places along the axis, what belongs to each]."""
    width = carrier.spec.dtype.itemsize
    rows, cols = carrier.shape
    raw = np.empty(rows * cols * width, np.uint8)
    checkpoint.read_into(carrier.spec.name, carrier.offset * width, raw)
    values = raw.view(carrier.spec.dtype.numpy).reshape(rows, cols).astype(np.float32)
    return values if carrier.axis == 0 else np.ascontiguousarray(values.T)
