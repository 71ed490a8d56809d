"""config.json of the output: the donor's, made to say what the tensors are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._base.errors import ShapeError
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._models.structure import Structure, resize_config, vocabulary
from weightsmith._models.structure.configs import replace_value, sections
from weightsmith._planning.planner.dtypes import main_dtype

_DTYPE_KEYS = ("dtype", "torch_dtype")


def output_config(
    config: Mapping[str, Any],
    structure: Structure,
    layers: Mapping[str, Sequence[int]],
    outputs: Sequence[TensorSpec],
    *,
    stored: Mapping[str, TensorSpec],
    asked: DType | None,
    untie: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The donor's config with layer counts, dtype, tying, vocabulary and quantisation as the output tensors are.

    layers  for each stack prefix that changes: the donor's layer behind each output layer
    stored  the donor's own tensors
    asked   dtype that all tensors were to have
    untie   the output holds a head of its own

    Returns the config, and notes on what follows the layers. Raises LayerError when the config cannot express the stack,
    ShapeError when it cannot express the vocabulary.
    """
    notes: tuple[str, ...] = ()
    if layers:
        new, notes = resize_config(config, structure, layers)
    else:
        new = copy.deepcopy(dict(config))
    dtype = main_dtype(outputs)
    if dtype is not None:
        _set_dtype(new, dtype, everywhere=asked is not None)
    new.pop("quantization_config", None)
    if untie:
        vocabulary.untie(new)
    _set_vocabulary(new, outputs, stored)
    return new, notes


def _set_dtype(config: dict[str, Any], dtype: DType, *, everywhere: bool) -> None:
    """Sub-configs follow where they said what the whole said; a vision tower kept in float32 keeps saying so.

    everywhere  all tensors were cast, towers too
    """
    said = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), None)
    for _, part in sections(config):
        for key in _DTYPE_KEYS:
            if isinstance(part.get(key), str) and (everywhere or part is config or said is None or part[key] == said):
                part[key] = dtype.torch
    if said is None:
        config["dtype"] = dtype.torch


def _set_vocabulary(config: dict[str, Any], outputs: Sequence[TensorSpec], stored: Mapping[str, TensorSpec]) -> None:
    """vocab_size follows an embedding that has more or fewer rows than the donor's own (it came from another model)."""
    rows = vocabulary.count_rows(stored.values(), config)
    tokens = [(stored[s.name], s) for s in outputs if s.name in stored and _has_tokens(stored[s.name], rows)]
    changes = {s.name: (_rows(own), _rows(s)) for own, s in tokens if own.shape != s.shape}
    if not changes:
        return
    kept = {s.name: _rows(s) for own, s in tokens if own.shape == s.shape}
    old, new = next(iter(changes.values()))
    if len(set(changes.values())) > 1 or old in kept.values():
        counts = {**{name: n for name, (_, n) in changes.items()}, **kept}
        raise ShapeError(
            "embedding and head would have different numbers of rows, which config.json cannot express",
            where=next(iter(changes)),
            details=[f"{name}: {n} rows" for name, n in counts.items()],
            fix="give all models the same tokenizer and number of rows first",
        )
    for key in vocabulary.SIZE_KEYS:
        replace_value(config, key, old, new)


def _has_tokens(spec: TensorSpec, rows: int) -> bool:
    return vocabulary.is_vocabulary(spec) or vocabulary.has_tokens(spec, rows)


def _rows(spec: TensorSpec) -> int:
    """Tokens of a tensor that has some; the final_logits_bias of an encoder-decoder is [1, tokens]."""
    return spec.shape[-1] if spec.name.endswith("final_logits_bias") else spec.shape[0]
