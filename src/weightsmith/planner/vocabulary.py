"""Embeddings and heads: the tensors with a row for each token, of which one may stand for several.

A model that ties its head to its embedding stores one tensor for both; an old file may store both all the same. What a
tensor is follows from the last module of its name: `model.embed_tokens.weight`, `lm_head.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weightsmith.tensors import TensorSpec

_EMBEDDINGS = frozenset(
    "embed_tokens wte word_embeddings word_embedding tok_embeddings embed_in embeddings embedding shared".split()
)
_HEADS = frozenset("lm_head embed_out output output_layer head proj_out decoder vocab_proj".split())


def _module(name: str) -> str:
    return name.split(".")[-2] if "." in name else ""


def is_embedding(spec: TensorSpec) -> bool:
    """True for a matrix that may be a token embedding, by its name."""
    return len(spec.shape) == 2 and _module(spec.name) in _EMBEDDINGS


def is_head(spec: TensorSpec) -> bool:
    """True for a matrix that may be an output head, by its name.

    >>> from weightsmith.tensors import DTYPES
    >>> [is_head(TensorSpec(n, DTYPES["BF16"], (8, 4))) for n in ("lm_head.weight", "model.decoder.embed_tokens.weight")]
    [True, False]
    """
    return len(spec.shape) == 2 and _module(spec.name) in _HEADS


def stand_in(spec: TensorSpec, own: Mapping[str, TensorSpec], config: Mapping[str, Any] | None) -> str | None:
    """Which tensor of a model serves as `spec`, which it does not store; None when it has none.

    spec    an embedding, head, or bias of a head in another model
    own     the model's tensors outside its layers, under the donor's names
    config  the model's: a head is no embedding where `tie_word_embeddings` is false

    Returns the donor's name.
    """
    if len(spec.shape) == 1:
        return next((n for n in _bias_twins(spec.name) if n in own and own[n].shape == spec.shape), None)
    if not (is_embedding(spec) or is_head(spec)) or (is_head(spec) and tie_flag(config) is False):
        return None
    fitting = [s for s in own.values() if s.shape == spec.shape]
    return next((s.name for test in (is_embedding, is_head) for s in fitting if test(s)), None)


def _bias_twins(name: str) -> Iterator[str]:
    """The other name under which the bias of a BERT head is stored.

    >>> list(_bias_twins("lm_head.decoder.bias")), list(_bias_twins("lm_head.bias"))
    (['lm_head.bias'], ['lm_head.decoder.bias'])
    """
    if name.endswith(".decoder.bias"):
        yield name.removesuffix(".decoder.bias") + ".bias"
    elif name.endswith(".bias"):
        yield name.removesuffix(".bias") + ".decoder.bias"


def primary(spec: TensorSpec, stored: Iterable[TensorSpec]) -> str:
    """The name under which tied copies of `spec` are written once, among all that some model stores.

    An embedding before a head, the one shared by encoder and decoder before their own, the shortest.
    """
    if len(spec.shape) == 1:
        return min([spec.name, *_bias_twins(spec.name)], key=len)
    names = [s for s in stored if s.shape == spec.shape and (is_embedding(s) or is_head(s))]
    return min(names, key=lambda s: (is_head(s), _module(s.name) != "shared", len(s.name), s.name)).name


def tie_flag(config: Mapping[str, Any] | None) -> bool | None:
    """`tie_word_embeddings` of a config, at its top or else in its text part; None when neither says."""
    for part in (config or {}, *(v for k, v in (config or {}).items() if isinstance(v, Mapping) and "text" in k)):
        flag = part.get("tie_word_embeddings")
        if isinstance(flag, bool):
            return flag
    return None


def ties(config: Mapping[str, Any] | None, *, stores_head: bool) -> bool:
    """Whether a model uses its embedding as head: what its config says, else whether the files hold no head."""
    flag = tie_flag(config)
    return flag if flag is not None else not stores_head
