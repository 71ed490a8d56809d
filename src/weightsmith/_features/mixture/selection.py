"""A recipe's choice of experts, as groups for every block. Pruning is a merge with groups of one expert."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._base.errors import LayerError, NotFound, ParameterError, Unsupported, WeightsmithError
from weightsmith._base.files import expand_user, show
from weightsmith._base.strict_json import read_object
from weightsmith._base.tensors import TensorSpec
from weightsmith._planning.recipe import Surgery

# ---- Finds the experts and routers of a mixture by the names and shapes of its tensors, without a list of
# architectures


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


MAX_SALIENCY_BYTES = 64 << 20  # a million experts' numbers


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The experts averaged into one new expert, and their weights. A single expert is copied."""

    experts: tuple[int, ...]
    shares: tuple[float, ...] = (1.0,)


Groups = tuple[ExpertGroup, ...]


class ExpertSelection:
    """The groups of each block, and all problems.

    folder  base for a relative path of the saliency file
    """

    def __init__(self, recipe: Surgery, blocks: Sequence[ExpertLayer], folder: Path) -> None:
        self.blocks = blocks
        self.folder = folder
        self.problems: list[WeightsmithError] = []
        section = recipe.prune or recipe.merge
        assert section is not None
        self.section = section
        key = "keep" if recipe.prune is not None else "groups"
        self.where = section.at(self._key(key))  # the key that determines how many experts remain
        self.groups: dict[str, Groups] = self._pruned() if recipe.prune is not None else self._merged()
        self._check_counts()

    # --- prune_experts -----------------------------------------------------------------------------------------------

    def _pruned(self) -> dict[str, Groups]:
        values = self.section.values
        if "saliency" not in values and "experts" in values:
            self._problem("'experts' has no effect without 'saliency'", "experts", "Remove it.")
        kept = self._most_salient() if "saliency" in values else self._by_layer("keep")
        for _, experts, where in self._entries(kept, "keep"):
            self._check_numbers(experts, "keep", where, "is listed twice")
        return {layer: tuple(ExpertGroup((e,)) for e in experts) for layer, experts in kept.items()}

    def _most_salient(self) -> dict[str, tuple[int, ...]]:
        n_kept = self.section.values.get("experts")
        n = self.blocks[0].experts
        if n_kept is None:
            what = "'saliency' requires 'experts', the number of experts to keep in each layer"
            self._problem(what, "saliency", "Write experts: 32.")
            return {}
        if n_kept > n:
            self._problem(f"cannot keep {n_kept} experts in each layer: there are {n}", "experts", f"Write at most {n}.")
            return {}
        kept = {}
        for layer, numbers in self._saliency().items():
            ranked = sorted(range(n), key=lambda e: (-numbers[e], e))
            kept[layer] = tuple(sorted(ranked[:n_kept]))
        return kept

    @property
    def saliency_path(self) -> Path | None:
        """The recipe's saliency file, if it names one."""
        name = self.section.values.get("saliency")
        return None if name is None else self.folder / expand_user(name)

    def _saliency(self) -> dict[str, tuple[float, ...]]:
        """Layer → one number per expert, from the file; {} after problems."""
        path = self.saliency_path
        assert path is not None
        where = self.section.at("saliency")
        fix = 'write {"0": [one number for each expert of layer 0], "1": ...}'
        try:
            numbers_of_layer = read_object(path, MAX_SALIENCY_BYTES, "a saliency file", fix)
        except NotFound:
            self.problems.append(NotFound("no such saliency file", where=f"{where}: {path}"))
            return {}
        except WeightsmithError as error:
            self.problems.append(error)
            return {}
        n, before = self.blocks[0].experts, len(self.problems)
        for layer, numbers in numbers_of_layer.items():
            bad = [k for k, x in enumerate(numbers) if not _is_number(x)] if isinstance(numbers, list) else [0]
            if bad or len(numbers) != n:
                shown = f"{len(numbers)} values" if isinstance(numbers, list) else type(numbers).__name__
                if isinstance(numbers, list) and len(numbers) == n:
                    shown = f"{show(numbers[bad[0]])} for expert {bad[0]}"
                what = f"layer {layer} needs one finite number for each of its {n} experts, not {shown}"
                self.problems.append(ParameterError(what, where=str(path), fix=fix))
        known = self._known(numbers_of_layer, "saliency", str(path))
        return {layer: tuple(map(float, numbers)) for layer, numbers in known.items()} if len(self.problems) == before else {}

    # --- merge_experts -----------------------------------------------------------------------------------------------

    def _merged(self) -> dict[str, Groups]:
        groups = self._by_layer("groups")
        weights = self._weights(groups)
        n = self.blocks[0].experts
        for _, listed, where in self._entries(groups, "groups"):
            experts = [e for group in listed for e in group]
            valid = self._check_numbers(experts, "groups", where, "is in two groups, or twice in one")
            if valid and len(experts) < n:
                missing = next(e for e in range(n) if e not in experts)
                fix = f"Write [{missing}] to keep it unchanged; to remove experts, use prune_experts."
                self._problem(f"expert {missing} is in no group{where}", self._key("groups"), fix)
        shares = {layer: tuple((1.0,) * len(group) for group in listed) for layer, listed in groups.items()} | dict(weights)
        return {layer: tuple(map(ExpertGroup, listed, shares[layer])) for layer, listed in groups.items()}

    def _weights(self, groups: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights of each layer that has them, checked against its groups."""
        values = self.section.values
        keys = [key for key in ("weights", "weights_by_layer") if key in values]
        fits = "weights" if "groups" in values else "weights_by_layer"
        if not keys:
            return {}
        if keys != [fits]:
            wrong = next(key for key in keys if key != fits)
            self._problem(f"'{wrong}' cannot be combined with '{self._key('groups')}'", wrong, f"Write {fits}.")
            return {}
        weights = self._by_layer("weights")
        for layer, listed, where in self._entries(weights, "weights"):
            sizes = [len(group) for group in groups.get(layer, ())]
            if [len(weights_of_group) for weights_of_group in listed] != sizes and layer in groups:
                problem = f"groups of {sizes} experts have {[len(weights_of_group) for weights_of_group in listed]} weights"
                self._problem(f"{problem}{where}", fits, "Write one weight for each expert of each group.")
            for weights_of_group in listed:
                if min(weights_of_group) < 0 or sum(weights_of_group) <= 0:
                    what = f"invalid weights {list(weights_of_group)}{where}: they must be non-negative, and not all 0"
                    self._problem(what, fits)
        return weights

    # --- both --------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        """The key that the recipe uses: `keep` or `keep_by_layer`."""
        values = self.section.values
        return next((key for key in (name, f"{name}_by_layer", "saliency") if key in values), name)

    def _by_layer(self, name: str) -> dict[str, Any]:
        """The recipe's value for each layer."""
        values = self.section.values
        if name in values:
            return {block.layer: values[name] for block in self.blocks}
        return self._known(values[f"{name}_by_layer"], f"{name}_by_layer", "")

    def _known(self, entries: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
        """The entries of the layers with experts, in order. Unknown and missing layers are problems."""
        layers = [block.layer for block in self.blocks]
        where = file or self.section.at(key)
        strange = [layer for layer in entries if layer not in layers]
        missing = [layer for layer in layers if layer not in entries]
        if strange:
            what = f"layer {strange[0]} has no experts, or does not exist"
            self.problems.append(LayerError(what, where=where, fix=f"write layers that have experts: {_runs(layers)}"))
        if missing:
            one = len(missing) == 1
            what = f"layer{'' if one else 's'} {_runs(missing)} {'has' if one else 'have'} experts and {'is' if one else 'are'}"
            self.problems.append(
                LayerError(f"{what} not in '{key}'", where=where, fix="write an entry for every layer that has experts")
            )
        return {layer: entries[layer] for layer in layers if layer in entries}

    def _entries(self, by_layer: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any, str]]:
        """Layer, value and place, for messages, of the entries to check: a single one if all layers share it."""
        shared = name in self.section.values
        for layer, value in list(by_layer.items())[: 1 if shared else None]:
            yield layer, value, "" if shared else f" in layer {layer}"

    def _check_numbers(self, experts: Sequence[int], name: str, where: str, repeated: str) -> bool:
        """Whether the experts exist, each once. repeated: what an expert that is named twice does"""
        n, key = self.blocks[0].experts, self._key(name)
        if beyond := [e for e in experts if e >= n]:
            there = "there is 1 expert" if n == 1 else f"there are {n} experts, 0 to {n - 1}"
            self._problem(f"there is no expert {beyond[0]}{where}: {there}", key)
        twice = [e for k, e in enumerate(experts) if e in experts[:k]]
        if twice and (not beyond or name == "keep"):
            self._problem(f"expert {twice[0]} {repeated}{where}", key, "Write each expert once.")
        return not beyond and not twice

    def _check_counts(self) -> None:
        """config.json has one number of experts for all layers."""
        counts = {layer: len(groups) for layer, groups in self.groups.items()}
        if len(set(counts.values())) > 1:
            first, n = next(iter(counts.items()))
            other, m = next((layer, k) for layer, k in counts.items() if k != n)
            what = f"layer {first} would have {n} experts, but layer {other} {m}"
            fix = "keep the same number in each layer, because config.json has one for all"
            self.problems.append(LayerError(what, where=self.where, fix=fix))

    @property
    def experts(self) -> int:
        """Experts of each layer in the output; 0 if unknown."""
        return len(next(iter(self.groups.values()), ()))

    def _problem(self, what: str, key: str, fix: str = "") -> None:
        self.problems.append(ParameterError(what, where=self.section.at(key), fix=fix))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _runs(layers: Sequence[str]) -> str:
    """Names of layers, abbreviated if there are many."""
    return ", ".join(layers[:8]) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
