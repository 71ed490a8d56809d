"""Finds the prefixes of tensor names that are stacks of layers.

Candidates are the prefixes before the outermost number of a name. A candidate is a stack if config.json holds its number of
layers, or if it looks like one: indices 0..n-1 without gaps, repeated sub-modules, a common name (`layers`, `h`, `blocks`).
`visual.merger.mlp.0` and `classifier.2` are indices of an nn.Sequential, not stacks. If the outermost number is not a layer
(`vision_tower.0.blocks.3`), the next one is tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, Literal

from weightsmith._models.structure.configs import Path, section_at, sections, whole_number

# ---- Which keys of config.json hold a number of layers, and which stack each belongs to


# ---- The words and the layer number of a name.
#
# A name is dotted components; a plain decimal component is an index (`00012` is not, because it does not round-trip). Paths
# and config keys are compared by their words, with a few synonyms (`visual` is `vision`).

# Up to 9 digits: longer ones are not layer numbers, and int() of a million digits is slow.
# The leading dot doubles the speed of the search; a name that starts with a number has no stack name anyway.
INDEX = re.compile(r"\.(0|[1-9][0-9]{0,8})(?=\.)")
"""A numeric component between others; group 1 is the number."""

_SYNONYMS = {
    **dict.fromkeys(["vision", "visual", "vit", "vpm", "image", "img", "siglip", "video"], "vision"),
    **dict.fromkeys(["audio", "speech", "whisper", "apm", "code2wav", "wav", "codec", "acoustic"], "audio"),
    **dict.fromkeys(["text", "llm", "language", "lm"], "text"),
}
_NO_MEANING = frozenset({"config", "cfg", "model", "hf", "sub", "n", "num", "hidden"})
_CONTAINER = re.compile(r"^(h|layers?|blocks?|stages?|resblocks|encoders|\w*_(layers?|blocks?))$")


def words(*texts: str) -> frozenset[str]:
    """The meaningful words of dotted or underscored texts, with synonyms unified.

    >>> sorted(words("model.visual.blocks.")), sorted(words("vision_config"))
    (['blocks', 'vision'], ['vision'])
    """
    parts = (part for text in texts for part in re.split(r"[._]", text.lower()))
    return frozenset(_SYNONYMS.get(p, p) for p in parts if p and not p.isdigit()) - _NO_MEANING


def side_words(prefix: str) -> frozenset[str]:
    """The words of a stack's prefix. If it has `encoder` and `decoder`, only the inner one counts.

    >>> sorted(side_words("pixel.decoder.encoder.layers.")), sorted(side_words("decoder.block."))
    (['encoder', 'layers', 'pixel'], ['block', 'decoder'])
    """
    side = words(prefix)
    if {"encoder", "decoder"} <= side:
        side -= {"decoder" if prefix.rfind("encoder") > prefix.rfind("decoder") else "encoder"}
    return side


def overlap(a: Iterable[str], b: Iterable[str]) -> int:
    """How many words of `a` are in `b`. Words match if their first four letters do.

    >>> overlap(["feat", "extract"], ["feature", "extractor", "conv"])
    2
    """
    b = tuple(b)
    return sum(any(x == y or (min(len(x), len(y)) >= 4 and x[:4] == y[:4]) for y in b) for x in a)


def is_container(prefix: str) -> bool:
    """True if the last component of a prefix is a common name for a list of layers.

    >>> is_container("model.layers."), is_container("transformer.h."), is_container("visual.merger.mlp.")
    (True, True, False)
    """
    return _CONTAINER.match(prefix[:-1].rpartition(".")[2]) is not None


_COUNT = re.compile(r"^(nlayers?|depth|(\w+_)?(layers?|blocks?|stages?|depth))$")
# Keys about layers that are not a stack's number of layers.
_NOT_COUNT = re.compile(
    r"(^|_)(max|min|kv|shared|dense|nextn|mtp|predict|window|per|hash|first|last|skip|drop|freeze|feature|mem|of|"
    r"sparse|rescale|residual|pooler|attention|attn|proj|global_attention|iou|bits|group|cla|wavenet)(_|$)"
)
# Lists with one kind per layer; their length counts the layers of a config without a number (Nemotron-H, transformers 5).
_LISTS = ("layers_block_type", "layer_types", "block_configs", "hybrid_override_pattern")
_GENERIC_REST = frozenset({"layer", "layers", "block", "blocks", "stage", "stages", "depth", "nlayer", "nlayers"})
_OTHER_PARTS = frozenset({"vision", "audio"})
_MAX_EXTRA = 8  # prediction layers beyond the count: 1 in DeepSeek-V3 and GLM-4.5, a few in others


@dataclass(frozen=True, slots=True)
class Count:
    """One count key: its path, its value, and the words of its path and of its name."""

    path: Path
    value: int
    where: frozenset[str]
    what: frozenset[str]


def is_count_key(key: str) -> bool:
    """True if a key of this name holds a number of layers.

    >>> is_count_key("num_hidden_layers"), is_count_key("depth"), is_count_key("max_window_layers")
    (True, True, False)
    """
    return _COUNT.match(key) is not None and _NOT_COUNT.search(key) is None


def find_counts(config: Mapping[str, Any]) -> Iterator[Count]:
    """Every count key of a config and its sub-configs; outer before inner, in file order.

    If a section has no number, the length of its list of layer kinds is used.
    """
    for path, section in sections(config):
        values = {key: n for key, value in section.items() if (n := whole_number(value) or 0) > 0 and is_count_key(key)}
        yield from (Count((*path, key), n, words(*path), words(key) - _GENERIC_REST) for key, n in values.items())
        for key in _LISTS if not values else ():
            if isinstance(listed := section.get(key), list | str) and listed:
                yield Count((*path, key), len(listed), words(*path), frozenset())


def _affinity(stack: frozenset[str], count: Count) -> int:
    """How well a key's words match a stack's; 0 if it belongs to something else."""
    score = 1
    where = count.where - {"text"}
    if where:
        shared = overlap(where, stack)
        if not shared:
            return 0
        score += 4 * shared - (len(where) - shared)
    if "text" in count.where:
        if stack & _OTHER_PARTS:
            return 0
        score += 2 + ("text" in stack)
    if count.what & _OTHER_PARTS - stack or (stack & _OTHER_PARTS and "decoder" in count.what - stack):
        return 0
    if overlap(count.what, stack):
        score += 3
    elif count.what:
        # `encoder_layers` of an audio_config counts `audio_tower.layers.`, although they share no word.
        score -= 2
        if not where:
            return 0
    return max(score, 1)


def match_counts(prefix: str, n_indices: int, counts: Iterable[Count], extras: bool) -> tuple[Path, ...]:
    """The count keys of the stack `prefix` with indices 0..n_indices-1, best match first, then its mirrors; () if none.

    extras   accept a count below `n_indices`: layers beyond it are extra (prediction) layers

    >>> config = {"num_hidden_layers": 2, "vision_config": {"depth": 2}}
    >>> match_counts("visual.blocks.", 2, tuple(find_counts(config)), extras=False)
    (('vision_config', 'depth'),)
    """
    stack = side_words(prefix)
    scored = [(score, count) for count in counts if (score := _affinity(stack, count))]
    if not scored:
        return ()
    best = max(score for score, _ in scored)
    top = [count for score, count in scored if score == best]
    exact = [count for count in top if count.value == n_indices]
    below = [count for count in top if n_indices - _MAX_EXTRA <= count.value < n_indices]
    chosen = exact or (sorted(below, key=lambda c: -c.value) if extras else [])
    if not chosen:
        # No key of the stack itself has this value: accept a key with the exact value elsewhere.
        chosen = [count for score, count in scored if count.value == n_indices and score > 1]
    if not chosen:
        return ()
    first = chosen[0]
    home = first.path[:-1]
    mirrors = [
        count
        for _, count in scored
        if count is not first
        and count.value == first.value
        and (count.path[:-1] == home or (len(count.path) == 1 and "text" in first.where))
    ]
    return (first.path, *(count.path for count in mirrors))


def multiples(prefix: str, count_path: Path, counts: Iterable[Count]) -> tuple[Count, ...]:
    """Keys next to a count key that may count parts of the same layers: no other words, and a multiple of its value.

    LongCat's layers have two attentions each: `num_hidden_layers` is twice `num_layers`.

    >>> config = {"num_layers": 4, "num_hidden_layers": 8, "num_blocks": 2}
    >>> [count.path for count in multiples("model.layers.", ("num_layers",), find_counts(config))]
    [('num_hidden_layers',)]
    """
    stack, counts = side_words(prefix), tuple(counts)
    mine = next((count for count in counts if count.path == count_path), None)
    if mine is None:
        return ()
    near = [c for c in counts if c.path[:-1] == count_path[:-1] and _affinity(stack, c) == _affinity(stack, mine)]
    return tuple(c for c in near if c.value > mine.value and c.value % mine.value == 0)


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
    stacks = _settle_kinds(_settle_mirrors(tuple(accepted.values()), config or {}))
    return _settle_lone_towers(stacks, loose, config or {}), tuple(loose)


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

    two = {"encoder", "decoder"}
    plain_homes = {(path[:-1], kind) for path, kind in owner.items() if kind in two and not words(path[-1]) & two}
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


_TOKEN_TABLE = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings?|tok_embeddings|embed_in|shared|token_embedding|tokens_embed|text_\w+)\."
)
_PATCHES = re.compile(r"(^|[._])patch_embed")


def _settle_lone_towers(stacks: tuple[Stack, ...], loose: Iterable[str], config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """The layers of a tower saved alone are of its kind, although no prefix says so: `encoder.layers.` of CLIP's vision model.

    By `model_type`, else by embeddings of patches. A model with embeddings of tokens is no tower.
    """
    named = config.get("model_type")
    kinds = {stack.kind for stack in stacks}
    if not isinstance(named, str) or {"encoder", "decoder"} <= kinds or not kinds & {"encoder", "decoder"}:
        return stacks
    loose = tuple(loose)
    if any(map(_TOKEN_TABLE.search, loose)):
        return stacks
    senses = words(named.replace("-", "_")) & _OTHER_PARTS
    if len(senses) == 1:
        kind: StackKind = "audio" if "audio" in senses else "vision"
    elif any(map(_PATCHES.search, loose)):
        kind = "vision"
    else:
        return stacks
    alone = (stack.kind == "encoder" or (stack.kind == "decoder" and "decoder" not in words(stack.prefix)) for stack in stacks)
    return tuple(replace(stack, kind=kind) if changes else stack for stack, changes in zip(stacks, alone, strict=True))


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
