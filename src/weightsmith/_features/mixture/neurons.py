"""Finds the neurons of an expert in its tensors: the rows of gate and up, and the columns of down.

Permuting the neurons in all tensors of an MLP does not change what it computes. Axes follow from a tensor's name and are
checked against its shape. Whether a fused tensor interleaves gate and up depends on the model type, which must be known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NonFinite, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.mixture.selection import ExpertLayer
from weightsmith._models.structure.configs import text_sections
from weightsmith._plans import COPY, Block, Gather, Product, ProductSettings, Read, Step
from weightsmith.abc.product import Arrays, Floats

Pattern = Literal["plain", "halves", "pairs"]

_ROWS = re.compile(r"(w1|w3|gate_proj|up_proj)\.(weight|bias)")
_COLUMNS = re.compile(r"(w2|down_proj)\.weight")
_FIXED = re.compile(r"(w2|down_proj)\.bias|down_proj_bias")  # added to the output, not per neuron

HALVED = ("aria", "aria_text", "llama4", "llama4_text", "openai_privacy_filter", "qwen3_vl_moe", "qwen3_vl_moe_text")
ARRANGED: dict[str, Pattern] = {"gpt_oss": "pairs", **dict.fromkeys(HALVED, "halves")}
"""Model types whose `gate_up_proj` is [E, H, 2I] → whether gate and up columns alternate, or all gate columns come first."""


@dataclass(frozen=True, slots=True)
class NeuronTensor:
    """A tensor, or an expert's run of one, with elements of each neuron.

    spec     of the stored tensor
    offset   first element of the expert
    shape    [rows, cols] of the expert; a vector is one row
    axis     0 when neurons are rows, 1 when they are columns
    pattern  `halves`: neuron i is at i and I + i; `pairs`: at 2i and 2i + 1
    neurons  I
    """

    spec: TensorSpec
    offset: int
    shape: tuple[int, int]
    axis: Literal[0, 1]
    pattern: Pattern
    neurons: int

    @property
    def block(self) -> Block:
        """The expert's block of the tensor."""
        rows, cols = self.shape
        return Block(self.offset, rows, cols, cols)


Neurons = Mapping[str, NeuronTensor]
"""Neuron tensors of an expert, by a key that is the same for every expert: a part or a tensor's name."""


def places_of(pattern: Pattern, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The source position for each position along the axis, when neuron order[i] moves to i."""
    if pattern == "halves":
        return np.concatenate([order, order + len(order)])
    return np.stack([2 * order, 2 * order + 1], 1).reshape(-1) if pattern == "pairs" else order


def neurons_of(pattern: Pattern, neurons: int) -> tuple[slice, ...]:
    """Slices of the neuron axis: gate's and up's in a fused tensor, else one for all."""
    if pattern == "halves":
        return slice(neurons), slice(neurons, None)
    return (slice(0, None, 2), slice(1, None, 2)) if pattern == "pairs" else (slice(None),)


def neuron_tensors(block: ExpertLayer, expert: int, config: Mapping[str, Any]) -> dict[str, NeuronTensor]:
    """The neuron tensors of one expert.

    config  config.json. Raises Unsupported if the arrangement of neurons is unknown.
    """
    tensors: dict[str, NeuronTensor] = {}
    for part, spec in block.separate[expert].items() if block.separate else ():
        if _FIXED.fullmatch(part):
            continue
        if not (len(spec.shape) in (1, 2) and (_ROWS.fullmatch(part) or _COLUMNS.fullmatch(part))):
            raise _unknown(spec)
        shape = (1, spec.shape[0]) if len(spec.shape) == 1 else (spec.shape[0], spec.shape[1])
        axis: Literal[0, 1] = 0 if len(spec.shape) == 2 and _ROWS.fullmatch(part) else 1
        tensors[part] = NeuronTensor(spec, 0, shape, axis, "plain", shape[axis])
    tensors |= _fused(block, expert, config)
    if len({tensor.neurons for tensor in tensors.values()}) != 1:
        said = [f"{c.spec}: {c.neurons}" for c in tensors.values()]
        raise Unsupported("an expert's tensors have different numbers of neurons", where=f"{block.prefix}experts", details=said)
    return tensors


def _fused(block: ExpertLayer, expert: int, config: Mapping[str, Any]) -> dict[str, NeuronTensor]:
    """The same for fused tensors: both matrices and their biases."""
    neurons: dict[str, NeuronTensor] = {}
    tensors = {stacked.spec.name.removeprefix(block.prefix).removeprefix("experts."): stacked for stacked in block.fused}
    named = {name.removesuffix(".weight"): stacked for name, stacked in tensors.items()}
    up = named.pop("gate_up_proj", None) or named.pop("input_linear", None)
    down = named.pop("down_proj", None) or named.pop("output_linear", None)
    if up is None or down is None or len(up.spec.shape) != 3 or len(down.spec.shape) != 3:
        if block.fused:
            raise _unknown(block.fused[0].spec)
        return {}
    a, b = up.spec.shape[1:]
    c, d = down.spec.shape[1:]
    if (a, b) == (2 * d, c):  # [2I, H] and [H, I]
        pattern: Pattern = "halves"
        neurons[up.spec.name] = NeuronTensor(up.spec, expert * a * b, (a, b), 0, pattern, d)
        neurons[down.spec.name] = NeuronTensor(down.spec, expert * c * d, (c, d), 1, "plain", d)
    elif (a, b) == (d, 2 * c):  # [H, 2I] and [I, H]
        pattern = _transposed_pattern(up.spec, config)
        neurons[up.spec.name] = NeuronTensor(up.spec, expert * a * b, (a, b), 1, pattern, c)
        neurons[down.spec.name] = NeuronTensor(down.spec, expert * c * d, (c, d), 0, "plain", c)
    else:
        raise Unsupported("gate_up and down shapes do not match", where=up.spec.name, details=[str(up.spec), str(down.spec)])
    for name, stacked in named.items():
        if name == "gate_up_proj_bias" and stacked.spec.shape[1:] == (2 * neurons[up.spec.name].neurons,):
            n = stacked.spec.shape[1]
            neurons[stacked.spec.name] = NeuronTensor(stacked.spec, expert * n, (1, n), 1, pattern, n // 2)
        elif not _FIXED.fullmatch(name):
            raise _unknown(stacked.spec)
    return neurons


def _transposed_pattern(spec: TensorSpec, config: Mapping[str, Any]) -> Pattern:
    types = [section.get("model_type") for section in text_sections(config)]
    known: list[Pattern] = [ARRANGED[t] for t in types if isinstance(t, str) and t in ARRANGED]
    if not known:
        model = next(filter(None, types), "these")
        what = f"whether this tensor interleaves gate and up is not known for {model} models"
        raise Unsupported(what, where=spec.name, fix="write match: false")
    return "pairs" if "pairs" in known else "halves"


def _unknown(spec: TensorSpec) -> Unsupported:
    return Unsupported("the arrangement of neurons in this tensor is unknown", where=spec.name, fix="write match: false")


# ---- Matches the neurons of one expert to those of another: the weight matching of Git Re-Basin, for two MLPs.
#
# Ainsworth et al. 2022, https://arxiv.org/abs/2209.04836, section 3.2; for experts, M-SMoE (Li et al. 2023,
# https://arxiv.org/abs/2310.01334, section 3.1). For a single MLP it is one linear assignment, without iteration.
#
# The orders of one layer's experts are a `neuron_order` product; `read_matched` reads a tensor in that order.


@dataclass(frozen=True, slots=True)
class MatchedPair:
    """An expert whose neurons are matched to another's.

    owner     its name
    neurons   I
    matrices  names of the steps of the other's tensor and of its own, axis and pattern
    patterns  of its tensors
    """

    owner: str
    neurons: int
    matrices: tuple[tuple[str, str, int, Pattern], ...]
    patterns: tuple[Pattern, ...]

    @property
    def orders(self) -> tuple[TensorSpec, ...]:
        """The arrays: its neurons in the other's order, for each pattern."""
        sizes = {"plain": self.neurons, "halves": 2 * self.neurons, "pairs": 2 * self.neurons}
        return tuple(TensorSpec(_table(self.owner, pattern), DTYPES["I32"], (sizes[pattern],)) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class NeuronOrders(ProductSettings):
    """The settings of a `neuron_order` product. label: of the model, for messages."""

    label: str
    pairs: tuple[MatchedPair, ...]

    @property
    def outs(self) -> tuple[TensorSpec, ...]:
        """The arrays."""
        return tuple(order for pair in self.pairs for order in pair.orders)

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        for pair in self.pairs:
            for first, second, axis, pattern in pair.matrices:
                shape, places = shapes.get(first, ()), pair.neurons * (1 if pattern == "plain" else 2)
                if len(shape) != 2 or shapes.get(second) != shape or axis not in (0, 1) or shape[axis] != places:
                    return f"{first!r} and {second!r} are not matrices of {pair.neurons:,} neurons"
            if not pair.matrices:
                return "a pair has no matrices"
        return "" if product.outs == self.outs else "its arrays are not the orders of its pairs"


def read_matched(owner: str, tensor: NeuronTensor) -> Read:
    """Read an expert's tensor, or its run of one, with the neurons in the product's order."""
    return Read(0, tensor.spec.name, Gather(_table(owner, tensor.pattern), tensor.block, tensor.axis))


def matching(layer: str, pairs: Sequence[tuple[str, Neurons, Neurons]], label: str) -> Product:
    """The product that orders the neurons of the experts of one layer.

    pairs  name of each matched expert, tensors of the expert that it is matched to, and its own
    label  of the model, for messages
    """
    steps: dict[str, Step] = {}
    matched = []
    for owner, first, other in pairs:
        matrices: list[tuple[str, str, int, Pattern]] = []
        for key, tensor in first.items():
            ours, theirs = _step(tensor), _step(other[key])
            steps |= {step.out.name: step for step in (ours, theirs)}
            matrices.append((ours.out.name, theirs.out.name, tensor.axis, tensor.pattern))
        patterns = tuple(dict.fromkeys(tensor.pattern for tensor in other.values()))
        matched.append(MatchedPair(owner, next(iter(other.values())).neurons, tuple(matrices), patterns))
    work = NeuronOrders(label, tuple(matched))
    return Product(f"neuron order of layer {layer}", "neuron_order", work.outs, work.to_json(), tuple(steps.values()))


def _table(owner: str, pattern: Pattern) -> str:
    return f"{owner}: order" if pattern == "plain" else f"{owner}: order of {pattern}"


def _step(tensor: NeuronTensor) -> Step:
    """The step for a neuron tensor as a separate matrix."""
    name = f"{tensor.spec.name}[{tensor.offset}]"
    return Step(TensorSpec(name, tensor.spec.dtype, tensor.shape), COPY, (Read(0, tensor.spec.name, tensor.block),))


def _compute(context: ProductContext) -> Arrays:
    """The order of each pair's neurons, as one table for each pattern."""
    work, sizes = NeuronOrders.of(context.product), {step.out.name: step.out.nbytes for step in context.product.steps}
    total = sum(sizes[second] for pair in work.pairs for _, second, *_ in pair.matrices)
    arrays, done = [], 0
    for pair in work.pairs:
        context.progress(done, total)
        gain = np.zeros((pair.neurons, pair.neurons), np.float32)
        for first, second, axis, pattern in pair.matrices:
            ours, theirs = (np.ascontiguousarray(np.moveaxis(context.load([name])[name], axis, 0)) for name in (first, second))
            for places in neurons_of(pattern, pair.neurons):
                gain += ours[places] @ theirs[places].T
            done += sizes[second]
        order = best_order(gain, f"{work.label}, {pair.owner}")
        arrays += [places_of(pattern, order).astype(np.int32) for pattern in pair.patterns]
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


KIND = ProductKind("matching neurons", compute=_compute, check=NeuronOrders.check)
