"""The model that transformers builds of a checkpoint, as PEFT sees it: adapters name its modules, not the tensors on disk.

transformers renames tensors while it loads them (Mixtral's `block_sparse_moe.gate` becomes `mlp.gate`) and makes one parameter
of all experts. PEFT wraps modules of the result, and ignores what has another name. So transformers is asked, in a process of
its own, as for stacks (`_planning/planner/loading.py`). If it is not installed, or does not know the model, names on disk
are taken for the model's (`guessed`), and nothing is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import MAX_STACKED, TensorSpec
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.projections import GATED, role_of
from weightsmith._models.structure.vocabulary import TIED_HEAD, is_embedding, is_head, ties
from weightsmith._planning.planner.loading import Began, describe
from weightsmith._plans import Block

WEIGHT = ".weight"

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
FUSES = ["MergeModulelist"], ["MergeModulelist", "Concatenate"]
"""What transformers does with matrices of experts: the experts' are stacked, of each expert gate above up."""


@dataclass(frozen=True)
class BuiltModel:
    """A model's modules and tensors. See `_planning/planner/transformers_script.py` for the fields.

    names     tensor of the checkpoint → tensor of the model
    operations  tensor of the model that is made of several → what transformers does with them
    unknown   why nothing is checked; ""
    """

    modules: Mapping[str, str]
    tensors: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]
    operations: Mapping[str, list[str]]
    tied: tuple[tuple[str, ...], ...]
    redirected: frozenset[str]
    refused: frozenset[str]
    rows: frozenset[str]
    unknown: str = ""
    experts: frozenset[str] = frozenset()

    @classmethod
    def of_names(cls, kinds: Mapping[str, str], tensors: Mapping[str, tuple[int, ...]]) -> BuiltModel:
        """The part of a model that adapters name. kinds: of modules, see `modules`; the others hold these, or tensors"""
        modules = dict.fromkeys((parent for name in (*kinds, *tensors) for parent in _parents(name)), "other")
        nothing = frozenset[str]()
        return cls({**modules, **kinds}, tensors, {name: name for name in tensors}, {}, (), nothing, nothing, nothing)

    @cached_property
    def parents(self) -> frozenset[str]:
        """Modules that have others inside."""
        return frozenset(name.rpartition(".")[0] for name in self.modules if name)

    @cached_property
    def sources(self) -> Mapping[str, tuple[str, ...]]:
        """Tensor of the model → those of the checkpoint that it is made of; of experts, in their order."""
        names_of_key = grouped((key, name) for name, key in self.names.items())
        return {key: tuple(sorted(names, key=_expert_order)) for key, names in names_of_key.items()}

    @cached_property
    def inside(self) -> Mapping[str, tuple[str, ...]]:
        """Module → its tensors, and those of the modules inside."""
        keys_of_module: dict[str, list[str]] = {}
        for key in self.tensors:
            module = key.rpartition(".")[0]
            while module:
                keys_of_module.setdefault(module, []).append(key)
                module = module.rpartition(".")[0]
        return {module: tuple(keys) for module, keys in keys_of_module.items()}

    @cached_property
    def embedding(self) -> str:
        """The tensor of the checkpoint that is embedding and head; "" without one."""
        groups = [group for group in self.tied if any(key.endswith(WEIGHT) for key in group)]
        return next((name for group in groups for name, key in self.names.items() if key in group), "")

    def group(self, key: str) -> tuple[str, ...]:
        """The tensors that are one with a tensor; itself without others."""
        return next((tied_group for tied_group in self.tied if key in tied_group), (key,))

    def key(self, name: str) -> str:
        """The model's tensor for one of the checkpoint; "" if it has none. `TIED_HEAD` stands for a head of any name."""
        if name in self.names or name in self.tensors:
            return self.names.get(name, name)
        group = self.group(self.names.get(self.embedding, "")) if name == TIED_HEAD else ()
        return next(key for key in group if key != self.names[self.embedding]) if len(group) == 2 else ""

    def fused(self, key: str) -> bool:
        """Whether a tensor is made of the matrices of experts."""
        return self.operations.get(key) in FUSES


def _expert_order(name: str) -> tuple[int, str]:
    """Gate comes before up in every way to name them: `w1`, `w3`; `gate_proj`, `up_proj`.

    >>> sorted(["m.experts.10.w1.weight", "m.experts.2.w3.weight", "m.experts.2.w1.weight"], key=_expert_order)
    ['m.experts.2.w1.weight', 'm.experts.2.w3.weight', 'm.experts.10.w1.weight']
    """
    number = _EXPERT.search(name)
    return (int(number[1]) if number else 0, name)


def needs_asking(base: Checkpoint) -> bool:
    """Whether names and shapes do not tell which tensors become factors: experts, convolutions, unusual names."""
    specs = base.specs.values()
    unusual = any(len(spec.shape) > 2 or ".experts." in spec.name for spec in specs)
    return unusual or not any(role_of(spec) == "linear" for spec in specs)


def built_of(base: Checkpoint, began: Began = lambda _process: None) -> BuiltModel:
    """What transformers builds of a checkpoint; what names on disk suggest where it cannot be asked.

    Cost: 2 to 10 seconds, unless the same was asked before.
    """
    answer = describe(base, began)
    if "unknown" in answer:
        return guessed(base, answer["unknown"])
    if not answer["peft"]:
        return guessed(base, "PEFT is not installed")
    return BuiltModel(
        answer["modules"],
        {key: tuple(shape) for key, shape in answer["tensors"].items()},
        {name: key for name, (key, _) in answer["names"].items()},
        {key: operations for key, operations in answer["names"].values() if operations},
        tuple(map(tuple, answer["tied"])),
        frozenset(answer["redirected"]),
        frozenset(answer["refused"]),
        frozenset(answer["rows"]),
        experts=frozenset(answer["experts"]),
    )


def unchecked(why: str) -> Finding:
    """The warning of an adapter for PEFT with guessed names. why: `BuiltModel.unknown`"""
    what = f"whether PEFT finds all that the adapter has was not checked: {why}"
    return Finding(what, fix="load it with PEFT, and look for warnings, before you publish it")


def guessed(base: Checkpoint, why: str) -> BuiltModel:
    """The model whose modules are named as its tensors on disk are."""
    specs, config = base.specs, base.config
    stacks = find_stacks(specs, analyse(specs.values(), config), config)
    # PEFT wraps parameters in the model's order, in which `gate_up_proj` comes first.
    names = {name: stack.parameter for name, stack in stacks.items()}
    names |= {name: name for name in specs if name not in stacks}
    modules = dict.fromkeys((parent for name in names.values() for parent in _parents(name)), "other")
    for name, spec in specs.items():
        if name.endswith(WEIGHT) and len(spec.shape) == 2:
            modules[name.removesuffix(WEIGHT)] = "embedding" if is_embedding(spec) else "linear"
    tensors = {key: specs[name].shape for name, key in names.items()}
    tied: list[tuple[str, ...]] = []
    embedding = next((name for name, spec in specs.items() if is_embedding(spec)), "")
    if embedding and not any(map(is_head, specs.values())) and ties(config, stores_head=False):
        listed = (config or {}).get("architectures")
        if not listed or any("CausalLM" in str(name) or "LMHead" in str(name) for name in listed):
            modules["lm_head"], tensors[TIED_HEAD] = "linear", tensors[embedding]
            tied.append((embedding, TIED_HEAD))
        else:
            tied.append((embedding, "", ""))  # which modules share it is not known
    swapped = frozenset(stack.parameter.rpartition(".")[0] for stack in stacks.values() if stack.swapped)
    return BuiltModel(modules, tensors, names, {}, tuple(tied), frozenset(), frozenset(), swapped, why)


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def matched(modules: Sequence[str], ends: Sequence[str]) -> set[str]:
    """The modules that PEFT finds for `target_modules`.

    >>> sorted(matched(["l.0.q", "l.1.q", "l.0.up"], ["q"]))
    ['l.0.q', 'l.1.q']
    """
    targets = set(ends)
    return {m for m in modules if m in targets or any(end in targets for end in _ends(m))}


def _ends(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


# ---- Matrices of experts: which become factors, and in which form.
#
# Where a model stores its experts one by one, each matrix is a module like any other. Where it stores them as parameters
# [experts, rows, cols], PEFT has factors of the whole parameter, and vLLM of each expert.

Specs = Mapping[str, TensorSpec]

GROUP = "experts"
"""Group of all experts of a model that are modules: they get one rank, as PEFT and vLLM need it."""

_UNMARKED = "llama4"
"""Models whose modules do not say that their experts are transposed: PEFT takes the rows for outputs."""

_ONE = re.compile(r"\.experts\.\d+\.[^.]+\.weight")


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A parameter [experts, rows, cols] of experts with a gated MLP.

    parameter   as PEFT names it: `….mlp.experts.gate_up_proj`
    transposed  rows are inputs, as in Llama 4 and gpt-oss
    swapped     PEFT's factors are those of the transposed matrices
    """

    parameter: str
    transposed: bool
    swapped: bool
    shape: tuple[int, int, int]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block of each expert's matrix."""
        experts, rows, cols = self.shape
        return tuple(Block(e * rows * cols, rows, cols, cols) for e in range(experts))


def group_of(parameter: str) -> str:
    """The group of a parameter of experts: one rank for those of all layers.

    >>> group_of("model.layers.3.mlp.experts.down_proj")
    'model.layers.N.mlp.experts.down_proj'
    """
    return re.sub(r"\.\d+\.", ".N.", parameter)


def is_expert(name: str) -> bool:
    """Whether a tensor is the matrix of one expert.

    >>> is_expert("model.layers.0.mlp.experts.3.up_proj.weight"), is_expert("model.layers.0.mlp.shared_expert.up_proj.weight")
    (True, False)
    """
    return _ONE.search(name) is not None


def find_stacks(specs: Specs, structure: Structure, config: Mapping[str, Any] | None) -> dict[str, ExpertStack]:
    """tensor → its stack, for those whose shapes say which of their dimensions are inputs: gate and up are twice as wide."""
    stacks: dict[str, ExpertStack] = {}
    marked = not str((config or {}).get("model_type")).startswith(_UNMARKED)
    for spec in specs.values():
        owner, _, leaf = spec.name.removesuffix(".weight").rpartition(".")
        if leaf not in GATED or not 1 < structure.experts(spec) <= MAX_STACKED:
            continue
        after = GATED[leaf][-1]
        following = specs.get(spec.name.replace(leaf, after)) if spec.name.count(leaf) == 1 else None
        if following is None or len(following.shape) != 3:
            continue
        (experts, rows, cols), (others, out, inner) = spec.shape, following.shape
        direct = (rows, cols) == (2 * inner, out)
        if experts != others or not (direct or (rows, cols) == (inner, 2 * out)):
            continue
        module = owner if owner.endswith("experts") else f"{owner}.experts"
        swapped = not direct and marked
        stacks[spec.name] = ExpertStack(f"{module}.gate_up_proj", not direct, swapped, (experts, rows, cols))
        stacks[following.name] = ExpertStack(f"{module}.down_proj", not direct, swapped, (others, out, inner))
    return stacks
