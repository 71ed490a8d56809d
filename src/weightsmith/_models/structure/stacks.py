"""Finds the prefixes of tensor names that are stacks of layers.

Candidates are the prefixes before the outermost number of a name. A candidate is a stack if config.json holds its number of
layers, or if it looks like one: indices 0..n-1 without gaps, repeated sub-modules, a common name (`layers`, `h`, `blocks`).
`visual.merger.mlp.0` and `classifier.2` are indices of an nn.Sequential, not stacks. If the outermost number is not a layer
(`vision_tower.0.blocks.3`), the next one is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, Literal

from weightsmith._models.structure.configs import Path, section_at
from weightsmith._models.structure.counts import INDEX, Count, find_counts, is_container, is_count_key, match_counts, words

StackKind = Literal["decoder", "encoder", "vision", "audio", "tower", "other"]
TOWERS = frozenset({"vision", "audio", "tower"})
"""Kinds of encoders that feed a text model, unlike the encoder of an encoder-decoder."""

_MAX_COUNTS = 1000  # keys of numbers of layers; models have up to ten

_AUXILIARY = frozenset(
    "mtp nextn qformer resampler perceiver merger projector connector adapter conv convs adaptor mask memory prompt "
    "fpn head heads postnet prenet vq vqmodel code2wav predictor altup".split()
)


@dataclass(frozen=True, slots=True)
class Stack:
    """One list of layers.

    prefix        text before the layer number: `model.layers.`
    n_layers      number of layers by config.json; layers beyond it are extra (multi-token-prediction) layers
    module        its module, as shown to users
    kind          `decoder`, `encoder`, `vision`, `audio`, `tower` (another encoder that feeds the text model) or
                  `other` (projector, prediction or convolution layers)
    config_paths  every key of config.json that holds n_layers, the authoritative one first; () if none
    n_extra       layers found beyond n_layers
    """

    prefix: str
    n_layers: int
    module: str
    kind: StackKind
    config_paths: tuple[Path, ...] = ()
    n_extra: int = 0

    @property
    def config_path(self) -> Path | None:
        """The authoritative key of config.json, e.g. ("text_config", "num_hidden_layers")."""
        return self.config_paths[0] if self.config_paths else None

    def section(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The section of config.json that describes the stack: the one with its number of layers, else all of it."""
        return section_at(config, (self.config_path or ())[:-1])


def kind_of(prefix: str) -> StackKind:
    """The kind of the layers under a prefix, from its words.

    >>> kind_of("model.visual.blocks."), kind_of("encoder.block."), kind_of("model.layers."), kind_of("mtp.layers.")
    ('vision', 'encoder', 'decoder', 'other')
    """
    has = words(prefix)
    if has & _AUXILIARY:
        return "other"
    if "vision" in has:
        return "vision"
    if "audio" in has:
        return "audio"
    return "encoder" if "encoder" in has and "decoder" not in has else "decoder"


@dataclass(slots=True)
class _Candidate:
    """The tensors under one prefix."""

    indices: set[int] = field(default_factory=set)
    suffixes: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)

    @property
    def n_layers(self) -> int:
        """The number of layers, if they are 0..n-1."""
        return max(self.indices) + 1

    @property
    def whole(self) -> bool:
        return len(self.indices) == self.n_layers

    @property
    def nested(self) -> bool:
        """Whether layers contain sub-modules (`mlp.0.weight` does not)."""
        return any("." in suffix for suffix in self.suffixes)

    @property
    def repeats(self) -> bool:
        return len(self.names) > len(self.suffixes)


def find_stacks(names: Sequence[str], config: Mapping[str, Any] | None) -> tuple[tuple[Stack, ...], tuple[str, ...]]:
    """The stacks of a model in the order of its names (with empty `module`), and the names outside the stacks."""
    counts = tuple(islice(find_counts(config), _MAX_COUNTS)) if config is not None else ()
    accepted: dict[str, Stack] = {}
    loose: list[str] = []
    remaining, depth = list(names), 0
    while remaining:
        candidates, unnumbered = _collect(remaining, depth)
        loose += unnumbered
        remaining = []
        for prefix, candidate in candidates.items():
            stack = _accept(prefix, candidate, counts)
            if stack is None:
                remaining += candidate.names
            else:
                accepted[prefix] = stack
        depth += 1
    return _settle_kinds(_settle_mirrors(tuple(accepted.values()), config or {})), tuple(loose)


def _collect(names: Iterable[str], depth: int) -> tuple[dict[str, _Candidate], list[str]]:
    """Candidates by the prefix before the number at this depth (0 = outermost), and the names without one."""
    candidates: dict[str, _Candidate] = {}
    unnumbered = []
    for name in names:
        match = INDEX.search(name)
        for _ in range(depth):
            match = INDEX.search(name, match.end()) if match else None
        if match is None:
            unnumbered.append(name)
            continue
        prefix = name[: match.start() + 1]
        candidate = candidates.get(prefix)
        if candidate is None:
            candidate = candidates[prefix] = _Candidate()
        candidate.indices.add(int(match[1]))
        candidate.suffixes.add(name[match.end() + 1 :])
        candidate.names.append(name)
    return candidates, unnumbered


def _accept(prefix: str, candidate: _Candidate, counts: Sequence[Count]) -> Stack | None:
    named, kind, n_indices = is_container(prefix), kind_of(prefix), candidate.n_layers
    paths = match_counts(prefix, n_indices, counts, extras=named and candidate.whole and kind != "other")
    # Gaps are allowed: a pruned layer may have no tensors. But a hostile index must not determine the size of lists.
    if paths and (named or candidate.nested) and 2 * len(candidate.indices) >= n_indices:
        n_layers = next(c.value for c in counts if c.path == paths[0])
        return Stack(prefix, n_layers, "", kind, paths, n_indices - n_layers)
    if not (candidate.whole and candidate.nested):
        return None
    if named and (candidate.repeats or n_indices == 1):
        return Stack(prefix, n_indices, "", kind)
    if not counts and n_indices > 1 and candidate.repeats and len(candidate.suffixes) > 1:
        return Stack(prefix, n_indices, "", kind)
    return None


def _settle_mirrors(stacks: tuple[Stack, ...], config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """Remove from each stack the count keys that belong to another one.

    If a dict has both `encoder_layers` and `decoder_layers`, a plain `num_hidden_layers` mirrors the encoder's.
    A plain key that fits both sides of an encoder-decoder (Pix2Struct's `text_config.num_layers`) is the decoder's. Next to
    T5's `num_layers` and `num_decoder_layers`, it mirrors the plain one, the encoder's.
    """
    owner = {stack.config_paths[0]: stack.kind for stack in stacks if stack.config_paths}

    @cache
    def sides_of(section: tuple[str, ...]) -> set[str]:
        keys = [key for key in section_at(config, section) if is_count_key(key)]
        return {word for key in keys for word in words(key) & {"encoder", "decoder"}}

    plain_homes = {(path[:-1], kind) for path, kind in owner.items() if not words(path[-1]) & {"encoder", "decoder"}}
    settled = []
    for stack in stacks:
        kept = []
        for i, path in enumerate(stack.config_paths):
            sides = sides_of(path[:-1])
            theirs = path in owner and owner[path] != stack.kind
            plain = not words(path[-1]) & sides
            if i == 0 and theirs and stack.kind == "encoder":
                continue
            if plain and words(stack.config_paths[0][-1]) & sides:
                theirs = theirs or any(home == path[:-1] and kind != stack.kind for home, kind in plain_homes)
            if i == 0 or not (theirs or (plain and "encoder" in sides and stack.kind != "encoder")):
                kept.append(path)
        settled.append(replace(stack, config_paths=tuple(kept)))
    return tuple(settled)


def _settle_kinds(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """An encoder with its own sub-config, next to a decoder counted by the text config, is a tower."""
    homes = {stack: words(*stack.config_paths[0][:-1]) for stack in stacks if stack.config_paths}
    if not any(stack.kind == "decoder" and home <= {"text"} for stack, home in homes.items()):
        return stacks
    return tuple(
        replace(stack, kind="tower")
        if stack.kind == "encoder" and (stack not in homes or (homes[stack] and "text" not in homes[stack]))
        else stack
        for stack in stacks
    )


def main_stack(stacks: Sequence[Stack]) -> Stack | None:
    """The stack that top-level `slices` refers to; None if ambiguous.

    A single stack, or the only text decoder of a model with towers; never one side of an encoder-decoder.
    """
    if len(primary := [s for s in stacks if s.kind != "other"]) == 1:
        return primary[0]
    if not primary and len(stacks) == 1:
        return stacks[0]
    text = [s for s in primary if s.kind in ("decoder", "encoder")]
    if len(text) != 1:
        counted = [s for s in text if s.config_paths]
        text = counted if len(counted) == 1 else []
    towers = any(s.kind in TOWERS for s in primary)
    if text and text[0].kind == "encoder" and towers:
        return None
    return text[0] if text else None
