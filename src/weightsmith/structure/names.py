"""The words of a name, and where its layer number is.

A name is dotted components; a component that is a plain decimal number is an index (`00012` is not: it could not be
written back). A path is compared with a config key by its words, under a few synonyms (`visual` is `vision`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Up to 9 digits: longer ones are not layer numbers, and hostile names must not reach int() with a million digits.
# The leading dot makes the search twice as fast; a name that begins with a number has no stack name before it anyway.
INDEX = re.compile(r"\.(0|[1-9][0-9]{0,8})(?=\.)")
"""A numeric component with something before and after it; group 1 is the number."""

_SYNONYMS = {
    **dict.fromkeys(["vision", "visual", "vit", "vpm", "image", "img", "siglip", "video"], "vision"),
    **dict.fromkeys(["audio", "speech", "whisper", "apm", "code2wav", "wav", "codec", "acoustic"], "audio"),
    **dict.fromkeys(["text", "llm", "language", "lm"], "text"),
}
_NO_MEANING = frozenset({"config", "cfg", "model", "hf", "sub", "n", "num", "hidden"})
_CONTAINER = re.compile(r"^(h|layers?|blocks?|stages?|resblocks|encoders|\w*_(layers?|blocks?))$")


def words(*texts: str) -> frozenset[str]:
    """The meaningful words of dotted or underscored texts, synonyms made equal.

    >>> sorted(words("model.visual.blocks.")), sorted(words("vision_config"))
    (['blocks', 'vision'], ['vision'])
    """
    parts = (part for text in texts for part in re.split(r"[._]", text.lower()))
    return frozenset(_SYNONYMS.get(p, p) for p in parts if p and not p.isdigit()) - _NO_MEANING


def side_words(prefix: str) -> frozenset[str]:
    """The words of a stack's prefix; of encoder and decoder only the inner one: the encoder of a pixel decoder is an encoder.

    >>> sorted(side_words("pixel.decoder.encoder.layers.")), sorted(side_words("decoder.block."))
    (['encoder', 'layers', 'pixel'], ['block', 'decoder'])
    """
    found = words(prefix)
    if {"encoder", "decoder"} <= found:
        found -= {"decoder" if prefix.rfind("encoder") > prefix.rfind("decoder") else "encoder"}
    return found


def overlap(a: Iterable[str], b: Iterable[str]) -> int:
    """How many words of `a` are in `b`, a shared beginning of four letters counting as the same word.

    >>> overlap(["feat", "extract"], ["feature", "extractor", "conv"])
    2
    """
    b = tuple(b)
    return sum(any(x == y or (min(len(x), len(y)) >= 4 and x[:4] == y[:4]) for y in b) for x in a)


def is_container(prefix: str) -> bool:
    """True when the last component of a prefix is a usual name for a list of layers.

    >>> is_container("model.layers."), is_container("transformer.h."), is_container("visual.merger.mlp.")
    (True, True, False)
    """
    return _CONTAINER.match(prefix[:-1].rpartition(".")[2]) is not None
