"""Matches the neurons of one expert to those of another: the weight matching of Git Re-Basin, for two MLPs.

Ainsworth et al. 2022, https://arxiv.org/abs/2209.04836, section 3.2; for experts, M-SMoE (Li et al. 2023,
https://arxiv.org/abs/2310.01334, section 3.1). For a single MLP it is one linear assignment, without iteration.

The orders of one layer's experts are a `neuron_order` product; `read_matched` reads a tensor in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith.errors import NonFinite
from weightsmith.mixture.surgery.neurons import NeuronTensor, Pattern, neurons_of, places_of
from weightsmith.plans import COPY, Gather, Product, Read, Step
from weightsmith.plans.codec import has_type
from weightsmith.products import Bench, ProductKind
from weightsmith.products.base import Arrays, Floats
from weightsmith.tensors import DTYPES, TensorSpec


@dataclass(frozen=True, slots=True)
class MatchedPair:
    """An expert whose neurons are matched to another's: its name, and the neuron tensors of both."""

    owner: str
    first: Mapping[str, NeuronTensor]
    other: Mapping[str, NeuronTensor]


def read_matched(owner: str, tensor: NeuronTensor) -> Read:
    """Read an expert's tensor, or its run of one, with the neurons in the product's order."""
    return Read(0, tensor.spec.name, Gather(_table(owner, tensor.pattern), tensor.block, tensor.axis))


def matching(layer: str, pairs: Sequence[MatchedPair], label: str) -> Product:
    """The product that orders the neurons of the experts of one layer. label: of the model, for messages."""
    steps: dict[str, Step] = {}
    outs, described = [], []
    for pair in pairs:
        keys = []
        for key, tensor in pair.first.items():
            both = [_step(tensor), _step(pair.other[key])]
            steps |= {step.out.name: step for step in both}
            keys.append([*(step.out.name for step in both), tensor.axis, tensor.pattern])
        neurons = next(iter(pair.other.values())).neurons
        patterns: dict[Pattern, None] = dict.fromkeys(tensor.pattern for tensor in pair.other.values())
        for pattern in patterns:
            size = neurons if pattern == "plain" else 2 * neurons
            outs.append(TensorSpec(_table(pair.owner, pattern), DTYPES["I32"], (size,)))
        described.append({"owner": pair.owner, "neurons": neurons, "matrices": keys, "patterns": list(patterns)})
    settings = {"label": label, "pairs": described}
    return Product(f"neuron order of layer {layer}", "neuron_order", tuple(outs), settings, tuple(steps.values()))


def _table(owner: str, pattern: Pattern) -> str:
    return f"{owner}: order" if pattern == "plain" else f"{owner}: order of {pattern}"


def _step(tensor: NeuronTensor) -> Step:
    """The step for a neuron tensor as a separate matrix."""
    name = f"{tensor.spec.name}[{tensor.offset}]"
    return Step(TensorSpec(name, tensor.spec.dtype, tensor.shape), COPY, (Read(0, tensor.spec.name, tensor.block),))


def _compute(bench: Bench) -> Arrays:
    """The order of each pair's neurons, as one table for each pattern."""
    shapes = {step.out.name: step.out for step in bench.product.steps}
    total = sum(shapes[second].nbytes for pair in bench.product.settings["pairs"] for _, second, *_ in pair["matrices"])
    arrays, done = [], 0
    for pair in bench.product.settings["pairs"]:
        bench.progress(done, total)
        gain = np.zeros((pair["neurons"], pair["neurons"]), np.float32)
        for first, second, axis, pattern in pair["matrices"]:
            ours, theirs = (_matrix(bench, shapes[name], axis) for name in (first, second))
            for places in neurons_of(pattern, pair["neurons"]):
                gain += ours[places] @ theirs[places].T
            done += shapes[second].nbytes
        order = best_order(gain, f"{bench.product.settings['label']}, {pair['owner']}")
        arrays += [places_of(pattern, order).astype(np.int32) for pattern in pair["patterns"]]
    return arrays


def best_order(gain: Floats, where: str) -> npt.NDArray[np.int64]:
    """The order of the other expert's neurons with the largest sum of `gain`: order[i] matches neuron i of the first.

    gain  float32 [I, I]: inner products of the first's neurons with the other's, over gate, up, down and neuron biases

    Minimises Σ (first - reordered other)². If two orders are equal up to float32 rounding, the choice depends on the
    machine's BLAS. Raises NonFinite.
    """
    from scipy.optimize import linear_sum_assignment

    if not np.isfinite(gain).all():
        what = "experts cannot be matched: their weights contain NaN or infinity"
        raise NonFinite(what, where=where, fix="repair the model, or write match: false")
    _, order = linear_sum_assignment(gain, maximize=True)
    return np.asarray(order, np.int64)


def _matrix(bench: Bench, spec: TensorSpec, axis: int) -> Floats:
    """float32 [places along the axis, elements of each]."""
    values = np.empty(spec.shape, np.float32)
    bench.fill({spec.name: values})
    return values if axis == 0 else np.ascontiguousarray(values.T)


@dataclass(frozen=True, slots=True)
class _Settings:
    """`Product.settings`; a matrix is [name of the first, name of the other, axis, pattern]."""

    label: str
    pairs: tuple[_Pair, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    owner: str
    neurons: int
    matrices: tuple[tuple[str, str, int, Pattern], ...]
    patterns: tuple[Pattern, ...]


def _check(product: Product) -> str:
    if not has_type(product.settings, _Settings):
        return "its settings are not those of a neuron_order product"
    shapes = {step.out.name: step.out.shape for step in product.steps}
    sizes = []
    for pair in product.settings["pairs"]:
        neurons = pair["neurons"]
        for first, second, axis, pattern in pair["matrices"]:
            shape = shapes.get(first, ())
            places = neurons if pattern == "plain" else 2 * neurons
            if len(shape) != 2 or shapes.get(second) != shape or axis not in (0, 1) or shape[axis] != places:
                return f"{first!r} and {second!r} are not matrices of {neurons:,} neurons"
        if not pair["matrices"]:
            return "a pair has no matrices"
        sizes += [(neurons if pattern == "plain" else 2 * neurons,) for pattern in pair["patterns"]]
    return "" if [out.shape for out in product.outs] == sizes else "its arrays are not the orders of its pairs"


KIND = ProductKind("matching neurons", compute=_compute, check=_check)
