"""The experts and routers of a mixture, and the neurons of an expert, by the names and shapes of tensors.

There is no list of architectures; only how a fused tensor interleaves the neurons depends on the model type.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NonFinite, Unsupported, WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure.configs import text_sections
from weightsmith._plans import COPY, Block, Gather, Product, ProductSettings, Read, Step
from weightsmith.abc.product import Arrays, Floats, ProductContext, ProductKind

_SEPARATE = re.compile(r"(?P<block>(?:.*\.)?)experts\.(?P<expert>0|[1-9][0-9]{0,5})\.(?P<part>.+)")
_FUSED = re.compile(r"(?P<block>(?:.*\.)?)(?:experts\..+|(?:input|output)_linear\.weight)")
_ROUTER = re.compile(
    r"(gate|router|router\.(layer|gate|proj)|gate\.wg)\.weight"  # [E, H]
    r"|(gate|router)\.bias|((gate|router|moe_statics|experts)\.)?(e_score_correction_bias|expert_bias)"  # [E] or [1, E]
    r"|router\.per_expert_scale"
)
_ROWS = re.compile(r"(gate|router|router\.(layer|gate|proj)|gate\.wg)\.weight")
_OTHERS = re.compile(r"(shared_\w+|fc[12]_latent_proj)\..+|router\.scale")
_PART_OF_BLOCK = re.compile(r"(experts|gate|router|moe\w*|(shared_)?experts?\w*)\b")


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A tensor with an equal, contiguous run of elements for each expert.

    spec  [E, ...] or [1, E]
    axis  the dimension that counts the experts
    """

    spec: TensorSpec
    axis: int

    def run(self, experts: int) -> int:
        """Number of elements of one expert."""
        return self.spec.size // experts

    def shape(self, experts: int) -> tuple[int, ...]:
        """The shape with a new number of experts."""
        return (*self.spec.shape[: self.axis], experts, *self.spec.shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer and their router.

    prefix   of their names: `model.layers.3.mlp.`
    layer    as recipes name it: `3`; outside the main stack, `mtp.layers.0`
    experts  number of experts
    separate  for each expert, its separate tensors by their part of the name (`w1.weight`)
    fused    tensors that hold all experts
    router   router tensors with a row or number for each expert
    """

    prefix: str
    layer: str
    experts: int
    separate: tuple[Mapping[str, TensorSpec], ...]
    fused: tuple[StackedTensor, ...]
    router: tuple[StackedTensor, ...]

    def name(self, expert: int, part: str) -> str:
        """The name of a tensor of one expert."""
        return f"{self.prefix}experts.{expert}.{part}"

    @property
    def scaled(self) -> str:
        """The name of a tensor of factors on the experts' outputs, which rules out averaging; "" if there is none."""
        return next((stacked.spec.name for stacked in self.router if stacked.spec.name.endswith("per_expert_scale")), "")


def find_blocks(specs: Iterable[TensorSpec], label: str) -> tuple[list[ExpertLayer], list[WeightsmithError]]:
    """The blocks of a model in the order of their layers, and problems. label: for messages.

    >>> from weightsmith._base.tensors import DTYPES
    >>> names = {"gate.weight": (2, 4), "experts.0.w1.weight": (8, 4), "experts.1.w1.weight": (8, 4)}
    >>> specs = [TensorSpec(f"model.layers.5.mlp.{name}", DTYPES["BF16"], shape) for name, shape in names.items()]
    >>> (block,), problems = find_blocks(specs, "./moe")
    >>> block.layer, block.experts, block.router[0].spec.name, problems
    ('5', 2, 'model.layers.5.mlp.gate.weight', [])
    """
    specs = tuple(specs)
    separate: dict[str, dict[int, dict[str, TensorSpec]]] = defaultdict(lambda: defaultdict(dict))
    fused: dict[str, list[TensorSpec]] = defaultdict(list)
    for spec in specs:
        if match := _SEPARATE.fullmatch(spec.name):
            separate[match["block"]][int(match["expert"])][match["part"]] = spec
        elif (match := _FUSED.fullmatch(spec.name)) and len(spec.shape) >= 1:
            fused[match["block"]].append(spec)
    prefixes = [*separate, *(prefix for prefix, blocks in fused.items() if any(len(s.shape) == 3 for s in blocks))]
    finder = _Finder(dict.fromkeys(prefixes), label)
    others = finder.others(specs)
    candidates = [
        finder.block(prefix, separate.get(prefix, {}), fused.get(prefix, ()), others[prefix]) for prefix in finder.layers
    ]
    blocks = [block for block in candidates if block is not None]
    if not finder.problems and not blocks:
        fix = "name a mixture of experts; to build one from dense models, write a recipe with base_model and experts"
        finder.problem(f"no experts were found in {label}", fix=fix)
    if len(counts := Counter(block.experts for block in blocks)) > 1 and not finder.problems:
        examples = [f"{next(b.prefix for b in blocks if b.experts == n)}: {n} experts" for n in counts]
        finder.problem("layers have different numbers of experts", details=examples)
    return blocks, finder.problems


class _Finder:
    def __init__(self, prefixes: Iterable[str], label: str) -> None:
        self.label = label
        self.problems: list[WeightsmithError] = []
        self.n_problems = 0  # all problems, including repetitions in other layers
        self.layers = self._layers(list(prefixes))

    def problem(self, what: str, where: str = "", fix: str = "", details: Sequence[str] = ()) -> None:
        self.n_problems += 1
        if all(what != other.finding.what for other in self.problems):  # report once, not for each layer
            self.problems.append(Unsupported(what, where=where, fix=fix, details=details))

    def _layers(self, prefixes: Sequence[str]) -> dict[str, str]:
        """Prefix of each block → its layer as recipes name it, in order."""
        stacks: dict[str, dict[str, int]] = defaultdict(dict)
        for prefix in prefixes:
            parts = prefix.split(".")
            numbers = [k for k, part in enumerate(parts) if part.isdecimal()]
            if len(numbers) != 1:
                self.problem(
                    "experts outside numbered layers, or in numbered parts of a layer, are not supported", f"{prefix}experts"
                )
                continue
            stacks[".".join(parts[: numbers[0]])][prefix] = int(parts[numbers[0]])
        main = max(stacks, key=lambda stack: len(stacks[stack]), default="")
        layers: dict[str, str] = {}
        for stack, numbers_of_stack in stacks.items():
            for prefix, number in sorted(numbers_of_stack.items(), key=lambda item: item[1]):
                layers[prefix] = str(number) if stack == main else f"{stack}.{number}"
        return layers

    def others(self, specs: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
        """The tensors of each block that are not under a numbered `experts.`. A block may be the whole layer."""
        others: dict[str, list[TensorSpec]] = {prefix: [] for prefix in self.layers}
        for spec in specs:
            parts = spec.name.split(".")
            for k in range(len(parts)):
                prefix = ".".join([*parts[:k], ""])
                inner = ".".join(parts[k:])
                if prefix not in others or _SEPARATE.fullmatch(spec.name):
                    continue
                if not parts[k - 1].isdecimal() or _PART_OF_BLOCK.match(inner):
                    others[prefix].append(spec)
        return others

    def block(
        self,
        prefix: str,
        separate: Mapping[int, Mapping[str, TensorSpec]],
        fused: Sequence[TensorSpec],
        others: Sequence[TensorSpec],
    ) -> ExpertLayer | None:
        before = self.n_problems
        n = len(separate) or next(spec.shape[0] for spec in fused if len(spec.shape) == 3)
        experts = tuple(separate[e] for e in sorted(separate))
        self._check_separate(prefix, separate)
        if self.n_problems > before:
            return None
        stacks: list[StackedTensor] = []
        router: list[StackedTensor] = []
        for spec in others:
            inner = spec.name.removeprefix(prefix)
            axis = next((k for k, size in enumerate(spec.shape[:2]) if size == n and set(spec.shape[:k]) <= {1}), None)
            if _OTHERS.fullmatch(inner):
                continue
            if not (_ROUTER.fullmatch(inner) or spec in fused):
                what = f"unknown tensor {inner} next to the experts: not an expert's, a router's or a shared expert's"
                self.problem(what, spec.name, details=[f"{self.label}: {spec}"])
            elif axis is None:
                self.problem(f"there are {n} experts, but this tensor is {list(spec.shape)}", spec.name)
            elif _ROUTER.fullmatch(inner):
                router.append(StackedTensor(spec, axis))
            else:
                stacks.append(StackedTensor(spec, axis))
        rows = [stacked for stacked in router if _ROWS.fullmatch(stacked.spec.name.removeprefix(prefix))]
        if self.n_problems == before and len(rows) != 1:
            self.problem(f"the experts need one router, but {len(rows)} were found", f"{prefix}experts")
        if self.n_problems > before:
            return None
        return ExpertLayer(prefix, self.layers[prefix], n, experts, tuple(stacks), tuple(router))

    def _check_separate(self, prefix: str, separate: Mapping[int, Mapping[str, TensorSpec]]) -> None:
        """Check that experts are numbered from 0 without gaps and have the same tensors."""
        if separate and sorted(separate) != list(range(len(separate))):
            missing = next(e for e in range(len(separate)) if e not in separate)
            self.problem(f"expert {missing} is missing", f"{prefix}experts")
            return
        for e, parts in separate.items():
            for part in dict.fromkeys([*separate[0], *parts]):
                first, other = separate[0].get(part), parts.get(part)
                if first is None or other is None or (first.shape, first.dtype) != (other.shape, other.dtype):
                    said = [f"expert {k}: {spec or 'missing'}" for k, spec in ((0, first), (e, other))]
                    self.problem("experts have different tensors", f"{prefix}experts.{e}.{part}", details=said)
                    return


# ---- The neurons of an expert: the rows of gate and up, and the columns of down
#
# Permuting the neurons in all tensors of an MLP does not change what it computes. Axes follow from a tensor's name and are
# checked against its shape. Whether a fused tensor interleaves gate and up depends on the model type, which must be known.


Pattern = Literal["plain", "halves", "pairs"]

_NEURON_ROWS = re.compile(r"(w1|w3|gate_proj|up_proj)\.(weight|bias)")
_NEURON_COLUMNS = re.compile(r"(w2|down_proj)\.weight")
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
        if not (len(spec.shape) in (1, 2) and (_NEURON_ROWS.fullmatch(part) or _NEURON_COLUMNS.fullmatch(part))):
            raise _unknown(spec)
        shape = (1, spec.shape[0]) if len(spec.shape) == 1 else (spec.shape[0], spec.shape[1])
        axis: Literal[0, 1] = 0 if len(spec.shape) == 2 and _NEURON_ROWS.fullmatch(part) else 1
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
