"""`analyse` finds the stacks and modules of a model. The result, a `Structure`, locates every tensor.

Cost: one regular expression per name; 100,000 names take about a third of a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from weightsmith.errors import LayerError, UnknownName, nearest
from weightsmith.structure.configs import sections, whole_numbers
from weightsmith.structure.modules import Modules, find_modules
from weightsmith.structure.names import INDEX
from weightsmith.structure.stacks import Stack, find_stacks, main_stack
from weightsmith.tensors import TensorSpec

Part = tuple[str, tuple[int, ...]]
"""A tensor of a layer: name after the layer number, shape."""
Signature = frozenset[Part]
"""The tensors of a layer."""

_NORM = re.compile(r"norm|(^|[._])(ln|bn)")
_EXPERT_COUNT = re.compile(r"experts?$")
_NOT_EXPERT_COUNT = re.compile(r"per_tok|shared|topk|top_k")


@dataclass(frozen=True)
class Structure:
    """The stacks and modules of one model.

    stacks      in model order
    main        the stack that top-level `slices` refers to; None if ambiguous (encoder-decoder)
    modules     module name -> its tensors, in model order; every tensor is in exactly one
    aliases     mergekit's module names -> ours
    signatures  stack prefix -> one small int per layer; equal ints = same tensor suffixes and shapes
    tapered     prefixes of stacks whose layers have different widths (the stages of Swin) and cannot be moved
    """

    stacks: tuple[Stack, ...]
    main: Stack | None
    modules: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str]
    signatures: Mapping[str, tuple[int, ...]]
    tapered: frozenset[str]
    _partition: Modules
    _expert_counts: frozenset[int]
    _by_prefix: Mapping[str, Stack] = field(repr=False)

    def _find(self, name: str) -> tuple[Stack, int, int, int] | None:
        """Stack, index, and start and end of the index in the name."""
        match = INDEX.search(name)
        while match is not None:
            start, end = match.span(1)
            stack = self._by_prefix.get(name[:start])
            if stack is not None:
                return stack, int(match[1]), start, end
            match = INDEX.search(name, end)
        return None

    def locate(self, name: str) -> tuple[Stack, int] | None:
        """Stack and layer index of a tensor; None outside the stacks and for extra layers (see `extra`)."""
        found = self._find(name)
        return (found[0], found[1]) if found is not None and found[1] < found[0].n_layers else None

    def extra(self, name: str) -> tuple[Stack, int] | None:
        """Stack and 0-based rank of an extra (multi-token-prediction) layer, beyond config.json's count.

        In a model resized to n layers its name is `rename(name, n + rank)`.
        """
        found = self._find(name)
        if found is None or found[1] < found[0].n_layers:
            return None
        return found[0], found[1] - found[0].n_layers

    def rename(self, name: str, layer: int) -> str:
        """The tensor's name with another layer number. Other numbers in the name stay.

        Raises LayerError for a tensor outside the stacks.
        """
        found = self._find(name)
        if found is None:
            raise LayerError("the tensor is not in a layer, so it has no layer number to change", where=name)
        return f"{name[: found[2]]}{layer}{name[found[3] :]}"

    def suffix(self, name: str) -> str | None:
        """The name inside its layer: `mlp.up_proj.weight`; None outside the stacks."""
        found = self._find(name)
        return None if found is None else name[found[3] + 1 :]

    def module_of(self, name: str) -> str:
        """The module of a tensor."""
        found = self._find(name)
        return self._partition.of_path(name) if found is None else found[0].module

    def find_module(self, name: str) -> str:
        """The name of a module, given that or mergekit's name. Raises UnknownName."""
        if name in self.modules:
            return name
        if name in self.aliases:
            return self.aliases[name]
        known = [*self.modules, *self.aliases]
        raise UnknownName(
            f"the model has no module {name!r}{nearest(name, known)}",
            details=[f"modules: {', '.join(self.modules)}", f"aliases: {', '.join(self.aliases) or 'none'}"],
        )

    def stacks_of(self, module: str) -> tuple[Stack, ...]:
        """The stacks of a module (none for a projector, two for a two-stage vision tower)."""
        return tuple(stack for stack in self.stacks if stack.module == module)

    def experts(self, spec: TensorSpec) -> int:
        """The number of experts E of a fused expert tensor [E, rows, cols], else 1.

        A tensor is fused if it has three dimensions, is not a convolution, and either has a component `experts` in its
        name or, inside a layer, a first dimension equal to an expert count of config.json.
        """
        if len(spec.shape) != 3 or spec.shape[0] < 2 or "conv" in spec.name:
            return 1
        if "experts" in spec.name.split("."):
            return spec.shape[0]
        return spec.shape[0] if spec.shape[0] in self._expert_counts and self._find(spec.name) is not None else 1


def analyse(specs: Iterable[TensorSpec], config: Mapping[str, Any] | None) -> Structure:
    """The structure of a model, from its tensors' names and shapes and its config.json (None if missing).

    >>> from weightsmith.tensors import DTYPES
    >>> names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)] + ["lm_head.weight"]
    >>> found = analyse([TensorSpec(n, DTYPES["BF16"], (4, 4)) for n in names], {"num_hidden_layers": 3})
    >>> found.main.prefix, found.main.config_path
    ('model.layers.', ('num_hidden_layers',))
    >>> found.locate(names[2])[1], found.rename(names[2], 7), found.locate("lm_head.weight")
    (2, 'model.layers.7.mlp.up_proj.weight', None)
    """
    specs = tuple(specs)
    bare, loose = find_stacks([spec.name for spec in specs], config)
    main = main_stack(bare)
    partition = find_modules(bare, main, loose)
    # `of_path` expects a tensor name: `model.layers.` -> `model.layers.x`
    stacks = tuple(replace(stack, module=partition.of_path(stack.prefix + "x")) for stack in bare)
    by_prefix = {stack.prefix: stack for stack in stacks}
    draft = Structure(
        stacks,
        by_prefix[main.prefix] if main is not None else None,
        {},
        partition.aliases,
        {},
        frozenset(),
        partition,
        frozenset(_expert_counts(config or {})),
        by_prefix,
    )
    members: dict[str, list[str]] = {name: [] for name in partition.names}
    layers = {stack.prefix: [set[Part]() for _ in range(stack.n_layers)] for stack in stacks}
    for spec in specs:
        name, found = spec.name, draft._find(spec.name)
        if found is None:
            members[partition.of_path(name)].append(name)
            continue
        stack, index, _, end = found
        members[stack.module].append(name)
        if index < stack.n_layers:
            layers[stack.prefix][index].add((name[end + 1 :], spec.shape))
    return replace(
        draft,
        modules={name: tuple(tensors) for name, tensors in members.items()},
        signatures={prefix: _numbered(map(frozenset, parts)) for prefix, parts in layers.items()},
        tapered=frozenset(prefix for prefix, parts in layers.items() if _is_tapered(parts)),
    )


def _numbered(layers: Iterable[Signature]) -> tuple[int, ...]:
    """Maps equal signatures to equal small ints."""
    seen: dict[Signature, int] = {}
    return tuple(seen.setdefault(layer, len(seen)) for layer in layers)


def _is_tapered(layers: Sequence[AbstractSet[Part]]) -> bool:
    """True if no norm has the same shape in all layers, and one has several: the residual stream changes its width."""
    norms = [found for layer in layers if (found := {part for part in layer if _NORM.search(part[0]) and len(part[1]) == 1})]
    if len(norms) < 2 or set.intersection(*norms):
        return False
    shapes = set[Part]().union(*norms)
    return len({suffix for suffix, _ in shapes}) < len(shapes)


def _expert_counts(config: Mapping[str, Any]) -> Iterator[int]:
    """Every number of experts in a config and its sub-configs."""
    for _, section in sections(config):
        for key, value in section.items():
            if _EXPERT_COUNT.search(key) and not _NOT_EXPERT_COUNT.search(key):
                yield from (n for n in whole_numbers(value) if n > 1)
