"""Finds the experts and routers of a mixture by the names and shapes of its tensors, without a list of architectures.

A *block* is one layer's experts and their router. Experts are stored as separate tensors (`experts.3.w1.weight`) or as runs
of tensors that hold all of them (`experts.gate_up_proj` [E, 2I, H]); a router has a row, or one number, for each. A model
with any other, unknown tensor in a block is rejected: a copied table of the wrong length would load and route wrongly.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsmith._base.errors import Unsupported, WeightsmithError
from weightsmith._base.tensors import TensorSpec

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
class Stacked:
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
    fused: tuple[Stacked, ...]
    router: tuple[Stacked, ...]

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
        stacks: list[Stacked] = []
        router: list[Stacked] = []
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
                router.append(Stacked(spec, axis))
            else:
                stacks.append(Stacked(spec, axis))
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
