"""Trainable tokens: rows that replace some of an embedding's. A LoRA may have them, too (`trainable_token_indices`)."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.adapter import AdapterKind, AdapterModule, Arrays, Rows, Shapes


def tokens_of(module: AdapterModule) -> list[int]:
    """The rows: `token_indices`, or `trainable_token_indices`, which may be of each module. Raises ValueError."""
    stated = module.settings.get("token_indices", module.settings.get("trainable_token_indices"))
    if isinstance(stated, dict):
        stated = next((rows for name, rows in stated.items() if f".{module.name}".endswith(f".{name}")), None)
    if not isinstance(stated, list) or not all(isinstance(row, int) and not isinstance(row, bool) for row in stated):
        raise ValueError("the config has no list of token indices for it")
    if len(set(stated)) < len(stated) or not all(0 <= row < module.outputs for row in stated):
        raise ValueError(f"the config has a token twice, or one that is none of {module.outputs} rows")
    return stated


def shapes(module: AdapterModule) -> Shapes:
    """[tokens, hidden]."""
    return {"trainable_tokens_delta": (len(tokens_of(module)), module.inputs)}


def prepare(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
    """The rows, and their numbers."""
    return arrays["trainable_tokens_delta"], np.array(tokens_of(module), np.float64)


def change(module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
    """Put the rows in place."""
    trained, numbers = arrays
    here = (numbers >= first) & (numbers < first + len(rows))
    rows[numbers[here].astype(int) - first] = trained[here]


KIND = AdapterKind(
    title="trainable tokens",
    types=("TRAINABLE_TOKENS",),
    parts=("trainable_tokens_delta",),
    shapes=shapes,
    prepare=prepare,
    change=change,
    used=frozenset({"token_indices", "trainable_token_indices"}),
)
