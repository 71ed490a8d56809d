"""Tensors that some files of a model hold although the model never uses them.

The last layers of Gemma 3n and of Gemma 4's E models attend with the keys and values of an earlier layer
(`num_kv_shared_layers`). Google's files hold projections of their own for these layers; files that transformers has saved do
not. Where not all models store one, nothing is merged: the output has the donor's, if it stores one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._models.structure.configs import whole_number
from weightsmith._planning.planner.match import ModelNames, Models

NEVER_USED = "its layer uses the keys and values of an earlier one"

_OWN_KEYS = re.compile(r"^self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
_PARTS = {"self_attn.q_proj.weight", "per_layer_input_gate.weight"}


def shares_keys(names: ModelNames, config: Mapping[str, Any] | None, prefix: str, layer: int) -> bool | None:
    """Whether a layer uses the keys and values of an earlier one; None if the model has no config.json.

    prefix  the donor's, of the layer's stack
    """
    if config is None:
        return None
    stack = next((s for s in names.structure.stacks if names.paired[s.prefix] == prefix), None)
    section = config if stack is None else stack.section(config)
    sharing = whole_number(section.get("num_kv_shared_layers")) or 0
    return layer >= names.depth.get(prefix, 0) - sharing


def is_unused(models: Models, prefix: str, suffix: str, layers: Sequence[tuple[int, int]]) -> bool:
    """True for a tensor that no model with it uses. Not all models store it.

    prefix, suffix  of its name: the donor's stack, and what follows the number of the layer
    layers          each model that feeds it, and the layer in it

    A file without config.json is taken to share as another model visibly does.
    """
    if not _OWN_KEYS.match(suffix):
        return False
    stored = [(m, layer) for m, layer in layers if suffix in models.names[m].layers.get(prefix, {}).get(layer, {})]
    said = [shares_keys(models.names[model], models.configs[model], prefix, layer) for model, layer in stored]
    if None in said and not any(_lacks_keys(models.names[model], prefix, layer) for model, layer in layers):
        return False
    return False not in said


def _lacks_keys(names: ModelNames, prefix: str, layer: int) -> bool:
    """True if a Gemma with inputs for each layer has queries and no keys from a layer on."""
    tables = [names.layers.get(prefix, {}).get(i, {}) for i in range(layer, names.depth.get(prefix, 0))]
    return layer > 0 and all(_PARTS <= table.keys() and not any(map(_OWN_KEYS.match, table)) for table in tables)


def used_in(models: Models, model: int, prefix: str, layer: int) -> dict[str, str]:
    """The tensors of a layer that its model uses: name inside the layer → the model's own name."""
    names = models.names[model]
    table = names.layers.get(prefix, {}).get(layer, {})
    if not shares_keys(names, models.configs[model], prefix, layer):
        return table
    return {suffix: own for suffix, own in table.items() if not _OWN_KEYS.match(suffix)}
