"""The `measured_layer` product: how much each candidate setting of each weight changes the model's predictions.

With Δ the error of a weight, x the inputs of its layer and g the gradients of the predictions at its outputs (`gradients.py`),
the predictions change by ½ E[(g · Δx)²] nats for each token. The errors of different output features are taken to be
independent, and the square of a gradient to be a token's part times a feature's part. Then that is

    ½ Σ_i s_i Δ_i H Δ_iᵀ / tokens,    H = Σ_t |g_t|² x_t x_tᵀ,    s_i = Σ_t g_ti² / Σ_t |g_t|²

and needs no forward pass of a quantised layer. The sum over i is estimated by the mean of `FEATURES` output features, drawn
with probabilities s_i at equal steps; only these are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.gradients import LAST_FIRST
from weightsmith._base.tensors import TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration import common
from weightsmith._models.formats import find_encoding
from weightsmith.abc.product import Arrays, Floats

if TYPE_CHECKING:
    from weightsmith._activations.sums import Inputs

FEATURES = 128


@dataclass(frozen=True, slots=True)
class MeasureWork(common.CalibratedWork):
    """Settings of the product.

    gradients   the product of the layer's gradients, for the same weights in the same order
    candidates  the encodings to try for each weight, by name
    """

    gradients: str
    candidates: Mapping[str, tuple[str, ...]]

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.gradients}

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and the encodings to try."""
        return ((name, each) for name, tried in self.candidates.items() for each in tried)

    def shapes(self, specs: Mapping[str, TensorSpec]) -> common.Shapes:
        """The losses: nats for each token, [weights, candidates]."""
        return [("F64", (len(self.candidates), max(map(len, self.candidates.values()), default=0)))]


def _compute(bench: ProductContext) -> Arrays:
    from weightsmith._activations.running import budget, layer_rows
    from weightsmith._activations.sums import Forward, use_sums

    work = MeasureWork.of(bench.product)
    _, norms, squares = bench.arrays(work.gradients)
    losses = np.zeros(bench.product.outs[0].shape)
    factors = common.Factors(budget(bench))
    places = {name: i for i, name in enumerate(work.candidates)}
    scales = {name: norms[i] for name, i in places.items()}
    with layer_rows(bench, work, 0.3, 1, back=True) as rows:
        tokens = rows.states.shape[0] * rows.states.shape[1]

        def measure(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
            names = inputs.sites[site]
            tried = [find_encoding(encoding) for name in names for encoding in work.candidates[name]]
            with factors.hessian(inputs, site, finish, tried) as hessian:
                for name in names:
                    weighted = finish(name)
                    if weighted is not None:  # else no token reached it, and nothing depends on it
                        weight = rows.layer.linear(name).weight.detach().cpu().numpy()
                        of_features = squares[places[name]][: len(weight)]
                        with common.located(f"{name}, {work.base.label}"):
                            quantised = partial(_quantised, hessian=hessian)
                            changes = _losses(weight, quantised, weighted, of_features, work.candidates[name])
                        losses[places[name], : len(changes)] = np.divide(changes, tokens)

        use_sums(rows, list(work.candidates), measure, forward=Forward(scales=scales))
    return [losses]


def _quantised(part: Floats, encoding: str, *, hessian: common.Hessian) -> Floats:
    """Rows of a weight as loaders compute them. hessian: of its inputs."""
    value = find_encoding(encoding)
    return value.dequantise(value.quantise(part, hessian, 1), part.shape)


def _losses(
    weight: Floats,
    quantised: Callable[[Floats, str], Floats],
    weighted: Floats,
    squares: npt.NDArray[np.float64],
    encodings: tuple[str, ...],
) -> list[float]:
    """The change of all predictions together that each encoding causes, in nats.

    quantised  (rows, encoding) → rows as loaders compute them
    weighted   the Hessian of its inputs, each token weighted by the square of its gradient
    squares    of the gradients of each output feature
    """
    some, shares = drawn(squares)
    part = np.ascontiguousarray(weight[some])
    return [0.5 * float(shares @ _energies(part - quantised(part, encoding), weighted)) for encoding in encodings]


def drawn(squares: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Some features in ascending order, and the share of all that each stands for: those with large squares, more than others.

    >>> drawn(np.array([0, 1, 0, 3.0]))
    (array([1, 3]), array([0.25, 0.75]))
    """
    below = squares.cumsum()
    if not below[-1]:
        return np.zeros(1, np.int64), np.zeros(1)
    places = np.searchsorted(below, (np.arange(FEATURES) + 0.5) / FEATURES * below[-1])
    some, counts = np.unique(places, return_counts=True)
    return some, counts / FEATURES


def _energies(weight: Floats, hessian: Floats) -> npt.NDArray[np.float64]:
    """The diagonal of W H Wᵀ. The product in float32, on one thread; the sums in float64."""
    import torch

    with torch.no_grad():
        product = (torch.from_numpy(weight) @ torch.from_numpy(hessian)).numpy()
    found: npt.NDArray[np.float64] = (product.astype(np.float64) * weight).sum(1)
    return found


KIND = ProductKind(LAST_FIRST, compute=_compute, check=MeasureWork.check, device=True)
