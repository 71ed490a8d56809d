"""Assigns tensors to modules, the parts of a model that `weightsmith plan` shows and `modules:` accepts.

A model with one kind of stack is one module, `model`. Otherwise each kind of stack has a module, named by its shortest
unique prefix (`model.language_model`, `model.visual`, `encoder`). Heads belong to the text decoder. The rest (projectors,
mergers, `image_newline`; `shared` of an encoder-decoder) is one more module. mergekit's names are aliases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weightsmith.structure.stacks import TOWERS, Stack, StackKind
from weightsmith.structure.vocabulary import in_head

WHOLE = "model"
"""Name of the module of a model with only one."""

_PROJECTOR = re.compile(
    r"merger|projector|connector|aligner|resampler|adapter|abstractor|multi_?modal|(^|_)mm(_|$)|perceiver|^mlp1$"
)
_TEXT_PROJECTOR = re.compile(r"projector|multi_?modal|^(mm|vision|visual|image|img|audio|speech)_|aligner|connector")


@dataclass(frozen=True, slots=True)
class Modules:
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


def _group(kind: StackKind) -> str:
    return "text" if kind in ("decoder", "encoder") else kind


def _root_of(stack: Stack, others: Sequence[Stack]) -> str:
    """The shortest dotted prefix of a stack that no stack of another kind shares."""
    own = stack.prefix[:-1].split(".")
    shared = 0
    for other in others:
        theirs = other.prefix[:-1].split(".")
        same = 0
        while same < min(len(own), len(theirs)) and own[same] == theirs[same]:
            same += 1
        shared = max(shared, same)
    # A stack directly in a shared container (`model.layers.` with `model.vision.blocks.`) owns the container.
    return ".".join(own[: min(shared + 1, len(own) - 1)])


def find_modules(stacks: Sequence[Stack], main: Stack | None, loose: Iterable[str]) -> Modules:
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
        return Modules((WHOLE,), {}, WHOLE, WHOLE, False, {"default": WHOLE})
    roots: dict[str, str] = {}
    kinds: dict[str, StackKind] = {}
    for stack in primary:
        root = _root_of(stack, [other for other in primary if other.kind != stack.kind])
        roots.setdefault(root, root or WHOLE)
        kinds.setdefault(roots[root], stack.kind)
    towers = any(stack.kind in TOWERS for stack in primary)
    text_modules = [name for name, kind in kinds.items() if _group(kind) == "text"]
    text = text_modules[0] if len(text_modules) == 1 else None
    if text is None and main is not None:
        text = roots[_root_of(main, [other for other in primary if other.kind != main.kind])]
    text_roots = frozenset(root for root, name in roots.items() if name in text_modules)
    role = "multi_modal_projector" if towers else "shared"
    draft = Modules((*kinds, role), roots, text, role, towers, {}, text_roots)
    # A module may consist of a stack only (a resampler), without loose tensors.
    rest = _containers(draft, (*loose, *(stack.prefix + "x" for stack in stacks)))
    rest_name = rest[0] if len(rest) == 1 and rest[0] not in kinds else role
    names = (*kinds, *([rest_name] if rest else []))
    return Modules(names, roots, text, rest_name, towers, _aliases(names, kinds, text, rest_name, role), text_roots)


def _containers(draft: Modules, loose: Iterable[str]) -> list[str]:
    """The sub-modules of the rest: `model.visual.merger`, `shared`."""
    found: dict[str, None] = {}
    for name in loose:
        if draft.of_path(name) == draft.rest:
            _, after = draft._root(name)
            before = name[: len(name) - len(after)]
            found[before + after.partition(".")[0]] = None
    return list(found)


def _aliases(names: Sequence[str], kinds: Mapping[str, StackKind], text: str | None, rest: str, role: str) -> dict[str, str]:
    """mergekit's names for the modules, where they are unambiguous."""
    wanted: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        by_kind = {"vision": ("vision_tower", "vision_model", "visual"), "audio": ("audio_tower",), "tower": ()}
        for alias in by_kind.get(kind, (kind,)):
            wanted.setdefault(alias, []).append(name)
    if text is not None and role != "shared":
        wanted["text_decoder"] = wanted["language_model"] = [text]
    if rest in names:
        wanted[role] = [rest]
    return {alias: owners[0] for alias, owners in wanted.items() if len(owners) == 1 and alias not in names}
