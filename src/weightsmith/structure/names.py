"""The words and the layer number of a name.

A name is dotted components; a plain decimal component is an index (`00012` is not, because it does not round-trip). Paths
and config keys are compared by their words, with a few synonyms (`visual` is `vision`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
    found = words(prefix)
    if {"encoder", "decoder"} <= found:
        found -= {"decoder" if prefix.rfind("encoder") > prefix.rfind("decoder") else "encoder"}
    return found


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
