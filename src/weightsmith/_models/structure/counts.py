"""Which keys of config.json hold a number of layers, and which stack each belongs to.

A count key ends in `layer(s)`, `block(s)`, `stage(s)` or `depth` and holds an int: `num_hidden_layers`, `n_layer`,
`encoder_layers`, `vision_config.depth`. A key belongs to a stack if its path or name shares words with the stack's prefix:
`vision_config` belongs to `visual.blocks.`, `num_decoder_layers` to `decoder.block.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._models.structure.configs import Path, sections, whole_number

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
    """The words of a stack's prefix. Of `encoder` and `decoder`, only the inner one counts.

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
