"""config.json of the output: the donor's, made to say what the tensors are."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weightsmith.planner.match import tie_flag
from weightsmith.structure import Structure, resize_config
from weightsmith.tensors import DType, TensorSpec


def main_dtype(specs: Iterable[TensorSpec]) -> DType | None:
    """The floating dtype that most bytes have."""
    nbytes: Counter[DType] = Counter()
    for spec in specs:
        if spec.dtype.floating:
            nbytes[spec.dtype] += spec.nbytes
    return max(nbytes, key=lambda d: nbytes[d]) if nbytes else None


def output_config(
    config: Mapping[str, Any],
    structure: Structure,
    layers: Mapping[str, Sequence[int]],
    outputs: Sequence[TensorSpec],
    *,
    untie: bool,
) -> dict[str, Any]:
    """The donor's config with layer counts, dtype, tying, vocabulary and quantisation as the output tensors are.

    layers  for each stack prefix that changes: the donor's layer behind each output layer
    untie   the output holds a head of its own

    Raises LayerError when the config cannot express the stack.
    """
    new: dict[str, Any] = resize_config(config, structure, layers)[0] if layers else copy.deepcopy(dict(config))
    dtype = main_dtype(outputs)
    if dtype is not None:
        _set_dtype(new, dtype.torch)
    new.pop("quantization_config", None)
    if untie:
        _untie(new)
    _set_vocabulary(new, outputs)
    return new


def _set_dtype(config: dict[str, Any], name: str) -> None:
    found = False
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                part[key] = name
                found = True
    if not found:
        config["dtype"] = name


def _untie(config: dict[str, Any]) -> None:
    if tie_flag(config) is False:
        return
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        if part.get("tie_word_embeddings"):
            part["tie_word_embeddings"] = False
    config["tie_word_embeddings"] = False


def _set_vocabulary(config: dict[str, Any], outputs: Sequence[TensorSpec]) -> None:
    """vocab_size follows the token embedding, where there is exactly one tensor that can be it."""
    rows = {
        spec.shape[0]
        for spec in outputs
        if len(spec.shape) == 2 and spec.name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
    }
    if len(rows) != 1:
        return
    size = rows.pop()
    for part in (config, *(v for k, v in config.items() if isinstance(v, dict) and "text" in k)):
        if isinstance(part.get("vocab_size"), int):
            part["vocab_size"] = size
