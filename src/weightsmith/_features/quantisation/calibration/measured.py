"""What settings cost: two products.

`measured_layer` has how much each candidate setting of each weight changes the model's predictions.

With Δ the error of a weight, x the inputs of its layer and g the gradients of the predictions at its outputs (`gradients.py`),
the predictions change by ½ E[(g · Δx)²] nats for each token. The errors of different output features are taken to be
independent, and the square of a gradient to be a token's part times a feature's part. Then that is

    ½ Σ_i s_i Δ_i H Δ_iᵀ / tokens,    H = Σ_t |g_t|² x_t x_tᵀ,    s_i = Σ_t g_ti² / Σ_t |g_t|²

and needs no forward pass of a quantised layer. The sum over i is estimated by the mean of `FEATURES` output features, drawn
with probabilities s_i at equal steps; only these are quantised.

`measured_blocks` has how much each option of a block changes what leaves the block: ExLlamaV2's measurement. For each option,
the weights of the block are quantised for what enters them in the plain model, and the rows run through the block. The error is
the mean over the rows of ‖y' - y‖ / ‖y‖, y with the residual stream that the block adds to. What leaves the plain block is held
in memory: as much as the states of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.gradients import LAST_FIRST
from weightsmith._activations.states import FORWARD
from weightsmith._base.errors import ParameterError
from weightsmith._base.tensors import TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration.layer import (
    CalibratedWork,
    FactoredHessians,
    Hessian,
    Shapes,
    located,
    set_weight,
)
from weightsmith._models.formats import find_encoding
from weightsmith._models.structure.projections import is_attention, site_of
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from torch import Tensor

    from weightsmith._activations.decoder.forward import Layer
    from weightsmith._activations.running import LayerRows, NumberedRow
    from weightsmith._activations.sums import Inputs

FEATURES = 128


@dataclass(frozen=True, slots=True)
class MeasureWork(CalibratedWork):
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
        return ((name, encoding) for name, tried in self.candidates.items() for encoding in tried)

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The losses: nats for each token, [weights, candidates]."""
        return [("F64", (len(self.candidates), max(map(len, self.candidates.values()), default=0)))]


def _compute(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import budget, layer_rows
    from weightsmith._activations.sums import Forward, use_sums

    work = MeasureWork.of(context.product)
    _, norms, squares = context.arrays(work.gradients)
    losses = np.zeros(context.product.outs[0].shape)
    factors = FactoredHessians(budget(context))
    places = {name: i for i, name in enumerate(work.candidates)}
    scales = {name: norms[i] for name, i in places.items()}
    with layer_rows(context, work, 0.3, 1, back=True) as rows:
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
                        with located(f"{name}, {work.base.label}"):
                            quantised = partial(_quantised, hessian=hessian)
                            changes = _losses(weight, quantised, weighted, of_features, work.candidates[name])
                        losses[places[name], : len(changes)] = np.divide(changes, tokens)

        use_sums(rows, list(work.candidates), measure, forward=Forward(scales=scales))
    return [losses]


def _quantised(part: Floats, encoding: str, *, hessian: Hessian) -> Floats:
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
    return (product.astype(np.float64) * weight).sum(1)


KIND = ProductKind(LAST_FIRST, compute=_compute, check=MeasureWork.check, device=True)


# ---- ExLlamaV2's measurement


_QUANTISING = 0.3
"""The share of a block's progress that its Hessians take."""


@dataclass(frozen=True, slots=True)
class BlocksWork(CalibratedWork):
    """Settings of the product.

    blocks  the options of each block, by its key: the encoding of each of its weights, by name
    """

    blocks: Mapping[str, tuple[Mapping[str, str], ...]]

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and the encodings to try."""
        return (pair for options in self.blocks.values() for option in options for pair in option.items())

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The errors: [blocks, options]."""
        return [("F64", (len(self.blocks), max(map(len, self.blocks.values()), default=0)))]

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """All options of a block have the same weights."""
        every = self.blocks.values()
        same = all(options and all(one and set(one) == set(options[0]) for one in options) for options in every)
        return CalibratedWork.problem(self, product, shapes) if same else "the options of a block are for other weights"


def _compute_blocks(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows, workers

    work = BlocksWork.of(context.product)
    errors = np.zeros(context.product.outs[0].shape)
    with layer_rows(context, work, 0, 0.7) as rows:
        for number, options in enumerate(work.blocks.values()):
            first, share = number / len(work.blocks), 1 / len(work.blocks)
            measuring = first + share * _QUANTISING
            hessians = _hessians(rows, work.layer, options, (first, measuring))
            with workers(context.threads, rows.device) as pool, _block(rows.layer, options[0]) as plain:
                errors[number, : len(options)] = _errors(plain, options, hessians, rows, pool, (measuring, first + share))
    return [errors]


def _hessians(
    rows: LayerRows, layer: int, options: Sequence[Mapping[str, str]], span: tuple[float, float]
) -> dict[str, Hessian]:
    """The Hessian of each weight, ready for all its settings. Raises ParameterError if they take too much memory together."""
    from weightsmith._activations.running import budget
    from weightsmith._activations.sums import use_sums

    limit = budget(rows.context)
    weights = list(options[0])
    widths = {site_of(name): int(rows.layer.linear(name).in_features) for name in weights}
    nbytes = sum(4 * width**2 for width in widths.values())
    if nbytes > limit:
        what = f"the Hessians of layer {layer} take {nbytes:,} bytes, and the limit is {limit:,}"
        fix = "use --measure proxy, which needs one at a time, or a larger --max-memory"
        raise ParameterError(what, where=rows.base.label, fix=fix)
    factored: dict[str, Hessian] = {}
    factors = FactoredHessians(limit)

    def use(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        names = inputs.sites[site]
        tried = [find_encoding(option[name]) for name in names for option in options]
        with factors.hessian(inputs, site, finish, tried) as hessian:
            factored.update(dict.fromkeys(names, hessian))

    use_sums(rows, weights, use, span=span)
    return factored


class _LayerReached(Exception):
    """What leaves the attention is known; the rest of the layer need not run."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


def _leave(_module: object, args: tuple[Tensor, ...]) -> None:
    raise _LayerReached(args[0][0])


@contextmanager
def _block(layer: Layer, weights: Collection[str]) -> Iterator[dict[str, Floats]]:
    """The plain weights of attention or MLP, which the layer has again at the end. It ends with the block meanwhile."""
    hooks = [layer.before_mlp.register_forward_pre_hook(_leave)] if is_attention(next(iter(weights))) else []
    plain = {name: layer.linear(name).weight.detach().cpu().numpy().copy() for name in weights}
    try:
        yield plain
    finally:
        for hook in hooks:
            hook.remove()
        for name, weight in plain.items():
            set_weight(layer, name, weight)


def _run(layer: Layer, hidden: Tensor) -> Tensor:
    """The output of the block for one row of the layer's input."""
    import torch

    with torch.no_grad():
        try:
            return layer(hidden)
        except _LayerReached as reached:
            return reached.state


def _errors(
    weights: Mapping[str, Floats],
    options: tuple[Mapping[str, str], ...],
    hessians: Mapping[str, Hessian],
    rows: LayerRows,
    pool: ThreadPoolExecutor,
    span: tuple[float, float],
) -> list[float]:
    """The error of each option. weights: the plain ones. Settings that follow each other are quantised once."""

    def run(numbered: NumberedRow) -> Tensor:
        return _run(rows.layer, numbered[1])

    def error(pair: tuple[NumberedRow, Tensor]) -> float:
        numbered, plain = pair
        return float((run(numbered).clamp_(-65504, 65504) - plain).norm() / plain.norm())

    def give(item: tuple[str, str]) -> None:
        name, encoding = item
        value = find_encoding(encoding)
        arrays = value.quantise(weights[name], hessians[name], 1)
        set_weight(rows.layer, name, value.dequantise(arrays, weights[name].shape))

    share = (span[1] - span[0]) / (len(options) + 1)
    plain = [out for some in rows.batches((span[0], span[0] + share)) for out in pool.map(run, some)]
    errors, current = [], dict[str, str]()
    for number, option in enumerate(options, 1):
        list(pool.map(give, [item for item in option.items() if current.get(item[0]) != item[1]]))
        current = dict(option)
        batches = rows.batches((span[0] + number * share, span[0] + (number + 1) * share))
        errors.append([e for some in batches for e in pool.map(error, [(row, plain[row[0]]) for row in some])])
    return [float(np.mean(of_rows)) for of_rows in errors]


BLOCKS = ProductKind(FORWARD, compute=_compute_blocks, check=BlocksWork.check, device=True)
