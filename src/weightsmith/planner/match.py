"""Which tensor of each model feeds which output tensor. Output names are the donor's names on disk.

Models whose names differ by a prefix only (a bare decoder and one inside a vision-language model) are matched by the prefix
of the stack that plays the same part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith.structure import Stack, Structure
from weightsmith.tensors import TensorSpec

BUFFERS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias", "position_ids", "num_batches_tracked")
"""Endings of buffers that models compute for themselves: old files store them, new ones do not."""

_EMBEDDING_WORDS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "shared", "embed_in", "embeddings")
_HEAD_WORDS = ("lm_head", "embed_out", "output", "output_layer", "decoder", "head", "embed_tokens", "predictions")
_FIRST_WORDS = ("embed", "wte", "wpe", "pos_emb", "patch", "conv", "stem", "rotary", "token_type", "class_token", "shared")


def is_buffer(name: str) -> bool:
    """True for a tensor that the model recomputes when it is loaded."""
    return name.endswith(BUFFERS)


def comes_first(name: str) -> bool:
    """True when a tensor outside the layers belongs before them (embeddings), False after (final norm, head)."""
    return any(word in name for word in _FIRST_WORDS) and "head" not in name


def _words(name: str) -> set[str]:
    return set(name.split("."))


def is_head(spec: TensorSpec) -> bool:
    """True when a tensor can be an output head: a matrix whose name says so."""
    return len(spec.shape) == 2 and bool(_words(spec.name).intersection(_HEAD_WORDS))


class ModelNames:
    """One model's tensors by place: layers of each of the donor's stacks, and the rest, all under the donor's names."""

    def __init__(self, structure: Structure, donor: Structure, specs: Mapping[str, TensorSpec]) -> None:
        self.structure = structure
        self.specs = specs
        self.layers: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        self.rest: dict[str, str] = {}
        roots: list[tuple[str, str]] = []
        self._renamed: dict[str, str] = {}
        for stack in structure.stacks:
            prefix = self._donor_prefix(stack, donor)
            self._renamed[stack.prefix] = prefix
            if prefix != stack.prefix:
                roots.append(_roots(stack.prefix, prefix))
        for name in specs:
            place = structure.locate(name)
            if place is not None:
                stack, layer = place
                suffix = name[len(stack.prefix) + len(str(layer)) + 1 :]
                self.layers[self._renamed[stack.prefix]][layer][suffix] = name
            else:
                self.rest[self._donor_name(name, roots)] = name

    @staticmethod
    def _donor_prefix(stack: Stack, donor: Structure) -> str:
        if any(s.prefix == stack.prefix for s in donor.stacks) or donor.main is None:
            return stack.prefix
        same = [s for s in donor.stacks if s.kind == stack.kind]
        return same[0].prefix if len(same) == 1 else stack.prefix

    @staticmethod
    def _donor_name(name: str, roots: Sequence[tuple[str, str]]) -> str:
        for mine, theirs in roots:
            if name.startswith(mine) and not name.startswith(theirs or "\0"):
                # lm_head stands outside the root in both
                return name if not mine and is_head_name(name) else theirs + name[len(mine) :]
        return name

    def has_stack(self, prefix: str) -> bool:
        """True when the model has layers that play the part of this stack of the donor."""
        return prefix in self.layers

    def parents(self) -> set[str]:
        """The modules outside the layers that the model has anything of."""
        return {name.rpartition(".")[0] for name in self.rest}

    def tied_source(self, spec: TensorSpec) -> str | None:
        """The tensor that serves as `spec` in a model that ties its head (or embeddings) and does not store it twice."""
        if not is_head(spec) and not _words(spec.name).intersection(_EMBEDDING_WORDS):
            return None
        found = [
            name
            for name in self.rest.values()
            if self.specs[name].shape == spec.shape and _words(name).intersection(_EMBEDDING_WORDS)
        ]
        return found[0] if found else None


def is_head_name(name: str) -> bool:
    """True for the usual names of a head that stands beside the decoder, not in it."""
    return name.split(".")[0] in ("lm_head", "embed_out", "score", "classifier")


def _roots(mine: str, theirs: str) -> tuple[str, str]:
    """What differs in front of two prefixes.

    >>> _roots("model.layers.", "model.language_model.layers.")
    ('model.', 'model.language_model.')
    """
    a, b = mine.rstrip(".").split("."), theirs.rstrip(".").split(".")
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return "".join(f"{x}." for x in a), "".join(f"{x}." for x in b)


def ties(config: Mapping[str, Any] | None, *, stores_head: bool) -> bool:
    """Whether a model uses its embedding as head: what its config says, else whether the files hold a head."""
    flag = tie_flag(config)
    return flag if flag is not None else not stores_head


def tie_flag(config: Mapping[str, Any] | None) -> bool | None:
    """`tie_word_embeddings` of a config, at its top or in the text part; None when neither says."""
    for part in (config or {}, *(v for k, v in (config or {}).items() if isinstance(v, Mapping) and "text" in k)):
        flag = part.get("tie_word_embeddings")
        if isinstance(flag, bool):
            return flag
    return None
