"""`analyse` finds the stacks and modules of a model. The result, a `Structure`, locates every tensor.

A model with one kind of stack is one module, `model`. Otherwise each kind of stack has a module, named by its shortest
unique prefix (`model.language_model`, `model.visual`, `encoder`). Heads belong to the text decoder. The rest (projectors,
mergers, `image_newline`; `shared` of an encoder-decoder) is one more module. mergekit's names are aliases.

Cost: one regular expression per name; 100,000 names take about a third of a second.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from weightsmith._base.errors import LayerError, UnknownName, nearest
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure.configs import sections, whole_numbers
from weightsmith._models.structure.parts import Parts, find_parts
from weightsmith._models.structure.stacks import INDEX, TOWERS, Stack, StackKind, find_stacks, main_stack
from weightsmith._models.structure.vocabulary import in_head

# ---- Modules

WHOLE = "model"
"""Name of the module of a model with only one."""

_PROJECTOR = re.compile(
    r"merger|projector|connector|aligner|resampler|adapter|abstractor|multi_?modal|(^|_)mm(_|$)|perceiver|^mlp1$"
)
_TEXT_PROJECTOR = re.compile(r"projector|multi_?modal|^(mm|vision|visual|image|img|audio|speech)_|aligner|connector")


@dataclass(frozen=True, slots=True)
class Partition:
    """The modules of a model: `roots` maps dotted prefixes to modules; other tensors are assigned by name.

    names    module names in model order
    text     the module that heads belong to; None without a text decoder
    rest     the module of tensors that belong to no stack
    towers   whether there are vision, audio or other towers
    aliases  mergekit's module names (and plain roles) -> ours
    """

    names: tuple[str, ...]
    roots: Mapping[str, str]
    text: str | None
    rest: str
    towers: bool
    aliases: Mapping[str, str]
    text_roots: frozenset[str] = field(default_factory=frozenset)

    def of_path(self, path: str) -> str:
        """The module of a tensor outside the layer stacks, from its dotted name."""
        if len(self.names) == 1:
            return self.names[0]
        root, rest = self._root(path)
        first = rest.partition(".")[0]
        if self.towers and (_TEXT_PROJECTOR if root is None or root in self.text_roots else _PROJECTOR).search(first):
            return self.rest
        if root is not None:
            return self.roots[root]
        if self.text is not None and in_head(path):
            return self.text
        return self.rest

    def _root(self, path: str) -> tuple[str | None, str]:
        """The longest root that contains `path`, and the rest of the path."""
        at = len(path)
        while at > 0:
            at = path.rfind(".", 0, at)
            if at > 0 and path[:at] in self.roots:
                return path[:at], path[at + 1 :]
        return ("", path) if "" in self.roots else (None, path.removeprefix("model."))


def _root_of(stack: Stack, others: Sequence[Stack]) -> str:
    """The shortest dotted prefix of a stack that no stack of another kind shares."""
    names = stack.prefix[:-1].split(".")
    shared = 0
    for other in others:
        theirs = other.prefix[:-1].split(".")
        same = 0
        while same < min(len(names), len(theirs)) and names[same] == theirs[same]:
            same += 1
        shared = max(shared, same)
    # A stack directly in a shared container (`model.layers.` with `model.vision.blocks.`) owns the container.
    return ".".join(names[: min(shared + 1, len(names) - 1)])


def find_modules(stacks: Sequence[Stack], main: Stack | None, loose: Iterable[str]) -> Partition:
    """The modules of a model, from its stacks and the names of the tensors outside them.

    >>> text = Stack("model.language_model.layers.", 2, "", "decoder")
    >>> tower = Stack("model.visual.blocks.", 2, "", "vision")
    >>> found = find_modules([text, tower], text, ["model.visual.merger.mlp.0.weight", "lm_head.weight"])
    >>> found.names
    ('model.language_model', 'model.visual', 'model.visual.merger')
    >>> found.of_path("lm_head.weight"), found.aliases["multi_modal_projector"]
    ('model.language_model', 'model.visual.merger')
    """
    primary = [stack for stack in stacks if stack.kind != "other"]
    if len({stack.kind for stack in primary}) < 2:
        return Partition((WHOLE,), {}, WHOLE, WHOLE, False, {"default": WHOLE})
    roots: dict[str, str] = {}
    kinds: dict[str, StackKind] = {}
    for stack in primary:
        root = _root_of(stack, [other for other in primary if other.kind != stack.kind])
        roots.setdefault(root, root or WHOLE)
        kinds.setdefault(roots[root], stack.kind)
    towers = any(stack.kind in TOWERS for stack in primary)
    text_modules = [name for name, kind in kinds.items() if kind in ("decoder", "encoder")]
    text = text_modules[0] if len(text_modules) == 1 else None
    if text is None and main is not None:
        text = roots[_root_of(main, [other for other in primary if other.kind != main.kind])]
    text_roots = frozenset(root for root, name in roots.items() if name in text_modules)
    role = "multi_modal_projector" if towers else "shared"
    draft = Partition((*kinds, role), roots, text, role, towers, {}, text_roots)
    # A module may consist of a stack only (a resampler), without loose tensors.
    rest = _containers(draft, (*loose, *(stack.prefix + "x" for stack in stacks)))
    rest_name = rest[0] if len(rest) == 1 and rest[0] not in kinds else role
    names = (*kinds, *([rest_name] if rest else []))
    return Partition(names, roots, text, rest_name, towers, _aliases(names, kinds, text, rest_name, role), text_roots)


def _containers(draft: Partition, loose: Iterable[str]) -> list[str]:
    """The sub-modules of the rest: `model.visual.merger`, `shared`."""
    containers: dict[str, None] = {}
    for name in loose:
        if draft.of_path(name) == draft.rest:
            _, after = draft._root(name)
            before = name[: len(name) - len(after)]
            containers[before + after.partition(".")[0]] = None
    return list(containers)


def _aliases(names: Sequence[str], kinds: Mapping[str, StackKind], text: str | None, rest: str, role: str) -> dict[str, str]:
    """mergekit's names for the modules, where they are unambiguous."""
    owners_of_alias: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        by_kind = {"vision": ("vision_tower", "vision_model", "visual"), "audio": ("audio_tower",), "tower": ()}
        for alias in by_kind.get(kind, (kind,)):
            owners_of_alias.setdefault(alias, []).append(name)
    if text is not None and role != "shared":
        owners_of_alias["text_decoder"] = owners_of_alias["language_model"] = [text]
    if rest in names:
        owners_of_alias[role] = [rest]
    return {alias: owners[0] for alias, owners in owners_of_alias.items() if len(owners) == 1 and alias not in names}


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
    _partition: Partition | Parts
    _expert_counts: frozenset[int]
    _by_prefix: Mapping[str, Stack] = field(repr=False)

    @property
    def parts(self) -> Parts | None:
        """The parts that the beginnings of names tell apart; None for a model of one."""
        return self._partition if isinstance(self._partition, Parts) else None

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
        position = self._find(name)
        return (position[0], position[1]) if position is not None and position[1] < position[0].n_layers else None

    def extra(self, name: str) -> tuple[Stack, int] | None:
        """Stack and 0-based rank of an extra (multi-token-prediction) layer, beyond config.json's count.

        In a model resized to n layers its name is `rename(name, n + rank)`.
        """
        position = self._find(name)
        if position is None or position[1] < position[0].n_layers:
            return None
        return position[0], position[1] - position[0].n_layers

    def rename(self, name: str, layer: int) -> str:
        """The tensor's name with another layer number. Other numbers in the name stay.

        Raises LayerError for a tensor outside the stacks.
        """
        position = self._find(name)
        if position is None:
            raise LayerError("the tensor is not in a layer, so it has no layer number to change", where=name)
        return f"{name[: position[2]]}{layer}{name[position[3] :]}"

    def suffix(self, name: str) -> str | None:
        """The name inside its layer: `mlp.up_proj.weight`; None outside the stacks."""
        position = self._find(name)
        return None if position is None else name[position[3] + 1 :]

    def module_of(self, name: str) -> str:
        """The module of a tensor."""
        position = self._find(name)
        return self._partition.of_path(name) if position is None else position[0].module

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

    A model whose parts are known by the beginnings of names (`parts.py`) has a module for each. Each is analysed alone.

    >>> from weightsmith._base.tensors import DTYPES
    >>> names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)] + ["lm_head.weight"]
    >>> found = analyse([TensorSpec(n, DTYPES["BF16"], (4, 4)) for n in names], {"num_hidden_layers": 3})
    >>> found.main.prefix, found.main.config_path
    ('model.layers.', ('num_hidden_layers',))
    >>> found.locate(names[2])[1], found.rename(names[2], 7), found.locate("lm_head.weight")
    (2, 'model.layers.7.mlp.up_proj.weight', None)
    """
    specs = tuple(specs)
    names = [spec.name for spec in specs]
    parts = find_parts(names)
    bare, loose = find_stacks(names, config) if parts is None else (parts.find_stacks(names), ())
    main = main_stack(bare) if parts is None else None
    partition = find_modules(bare, main, loose) if parts is None else parts
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
        name, position = spec.name, draft._find(spec.name)
        if position is None:
            members[partition.of_path(name)].append(name)
            continue
        stack, index, _, end = position
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
    norms = [
        vectors for layer in layers if (vectors := {part for part in layer if _NORM.search(part[0]) and len(part[1]) == 1})
    ]
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


# ---- Where a tensor is: its layer, and what it is there. For tables and heat maps by layer and part.

OUTSIDE = "outside the layers"

_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a tensor is.

    stack   prefix of its stack, `model.layers.`; "" outside the layers
    layer   its number; -1 outside
    part    what it is in its layer, without numbers: `self_attn.q_proj`, `mlp.experts.up_proj`, `self_attn.q_proj.bias`
    """

    stack: str
    layer: int
    part: str

    @property
    def group(self) -> str:
        """Its layer as a name: `model.layers.3`."""
        return f"{self.stack}{self.layer}" if self.stack else OUTSIDE


def place_of(structure: Structure, name: str) -> LayerPlace:
    """The place of a tensor.

    >>> from weightsmith._models.structure import analyse
    >>> from weightsmith._base.tensors import DTYPES, TensorSpec
    >>> names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in (0, 1) for e in (0, 1)]
    >>> specs = [TensorSpec(name, DTYPES["BF16"], (4, 4)) for name in names]
    >>> place_of(analyse(specs, {"num_hidden_layers": 2}), names[3])
    LayerPlace(stack='model.layers.', layer=1, part='mlp.experts.up_proj')
    """
    position = structure.locate(name) or structure.extra(name)
    if position is None:
        return LayerPlace("", -1, _NUMBER.sub("", name.removeprefix("model.").removesuffix(".weight")))
    stack, layer = position
    layer += stack.n_layers if structure.locate(name) is None else 0
    suffix = (structure.suffix(name) or "").removesuffix(".weight")
    part = _NUMBER.sub("", f".{suffix}").removeprefix(".")
    return LayerPlace(stack.prefix, layer, sys.intern(part))  # one string serves all layers and experts
