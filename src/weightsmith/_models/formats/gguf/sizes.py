"""Shapes of tensors that follow from the keys of a GGUF file: llama.cpp does not load a file with others.

A dimension is a sum of products of keys. A key may have a number for each layer, and heads of layers with a window may have
widths of their own (`…_swa`); keys that the file lacks have llama.cpp's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.text import count

WINDOWS = "attention.sliding_window_pattern"
"""The key that says which layers have a window."""

_SWA = "_swa"
_UNSTATED_HEADS = "(hidden_size / num_attention_heads)"
"""The width of a head in a file that does not state it."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A sum of products.

    terms  the factors of each product: keys without the architecture, and numbers
    """

    terms: tuple[tuple[str | int, ...], ...]


TensorShape = tuple[Dimension, ...]
"""The shape of a tensor in numpy's order: [rows, columns], after the experts of a stack."""


def product_of(*factors: str | int) -> Dimension:
    """A dimension that is one product."""
    return Dimension((factors,))


# ---- what most architectures have

WIDTH = product_of("embedding_length")
_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_KEY, _VALUE = "attention.key_length", "attention.value_length"
_QUERIES, _KEYS, _VALUES = (_HEADS, _KEY), (_KV_HEADS, _KEY), (_KV_HEADS, _VALUE)
_MLP, _EXPERT, _SHARED = "feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length"
_EXPERTS = product_of("expert_count")
EMBEDDINGS = ("token_embd", "output")
"""Tensors outside of the layers, whose columns are checked."""

LAYER_SHAPES: Mapping[str, TensorShape] = {
    "attn_q": (Dimension((_QUERIES,)), WIDTH),
    "attn_k": (Dimension((_KEYS,)), WIDTH),
    "attn_v": (Dimension((_VALUES,)), WIDTH),
    "attn_qkv": (Dimension((_QUERIES, _KEYS, _VALUES)), WIDTH),
    "attn_output": (WIDTH, product_of(_HEADS, _VALUE)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (product_of(_MLP), WIDTH)),
    "ffn_down": (WIDTH, product_of(_MLP)),
    "ffn_gate_inp": (_EXPERTS, WIDTH),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (_EXPERTS, product_of(_EXPERT), WIDTH)),
    "ffn_gate_up_exps": (_EXPERTS, product_of(2, _EXPERT), WIDTH),
    "ffn_down_exps": (_EXPERTS, WIDTH, product_of(_EXPERT)),
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (product_of(_SHARED), WIDTH)),
    "ffn_down_shexp": (WIDTH, product_of(_SHARED)),
}
"""Weights of a layer."""
GATE_IN_UP: Mapping[str, TensorShape] = {"ffn_up": (product_of(2, _MLP), WIDTH)}
"""Where the gate of an MLP is stored with its other rows."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Numbers of one layer, by keys.

    keys      of the file, without the architecture
    layer     its number
    settings  the key → what config.json calls it
    """

    keys: Mapping[str, Any]
    layer: int
    settings: Callable[[str], str]

    def of(self, dimension: Dimension) -> tuple[int, str] | None:
        """The number that a dimension is, and what says so; None if the keys do not say it."""
        terms, texts = list[int](), list[str]()
        for term in dimension.terms:
            factors = [factor for key in term for factor in self._factors(key)]
            numbers = [number for number, _ in factors if number is not None]
            if len(numbers) < len(factors):
                return None
            terms.append(math.prod(numbers))
            texts.append(" * ".join(name for _, name in factors))
        return sum(terms), " + ".join(texts)

    def _factors(self, key: str | int) -> list[tuple[int | None, str]]:
        """A key's number and name; two if it is a product itself."""
        if isinstance(key, int):
            return [(key, str(key))]
        if key == _SHARED and key not in self.keys:
            return [*self._factors("expert_shared_count"), *self._factors(_EXPERT)]
        if key == _EXPERT and key not in self.keys:
            return self._factors(_MLP)
        if key == _KV_HEADS and key not in self.keys:
            return self._factors(_HEADS)
        if key in (_KEY, _VALUE):
            if f"{key}{_SWA}" in self.keys and self._at(WINDOWS):
                key += _SWA
            elif key not in self.keys:
                width, heads = self._at("embedding_length"), self._at(_HEADS)
                return [(width // heads if width and heads else None, _UNSTATED_HEADS)]
        return [(self._at(key), self.settings(key))]

    def _at(self, key: str) -> int | None:
        """A key's number in this layer; None if it has none."""
        value = self.keys.get(key)
        if isinstance(value, list):
            value = value[self.layer] if self.layer < len(value) else None
        return int(value) if isinstance(value, int) else None


def check_shape(
    shape: tuple[int, ...], dimensions: Iterable[Dimension | None], sizes: LayerSizes, where: str, program_name: str
) -> None:
    """Raise FormatError if a tensor has another shape than the keys say.

    shape         as numpy has it; a stack of one may lack its dimension
    dimensions    None for one that is not checked
    where         the tensor's name in the Hub's layout
    program_name  its name in the GGUF file
    """
    expected = list(dimensions)
    stored = (1,) * (len(expected) - len(shape)) + shape
    if len(stored) > len(expected):
        what = f"its shape is {list(shape)}, and llama.cpp has {count(len(expected), 'dimension')} for {program_name}"
        raise FormatError(what, where=where, fix="download the model again")
    kinds = ("matrices", "rows", "columns")[-len(expected) :]
    for size, dimension, kind in zip(stored, expected, kinds, strict=True):
        stated = None if dimension is None else sizes.of(dimension)
        if stated is not None and stated[0] != size:
            number, name = stated
            what = f"{name} is {number:,} in config.json, and {program_name} would have {size:,} {kind}"
            other = "add head_dim, if the heads have another width" if _UNSTATED_HEADS in name else "download the model again"
            raise FormatError(what, where=where, fix=f"repair this in config.json, or {other}")
