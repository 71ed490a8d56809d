"""config.json with a new number of experts."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from weightsmith.errors import LayerError, Unsupported, WeightsmithError
from weightsmith.formats.strict_json import texts
from weightsmith.structure.configs import EXPERT_COUNTS, sections, whole_numbers

PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Keys for the number of experts per token, or a list of one for each layer."""

DIVISORS = ("n_group", "ep_size", "moe_ep_size", "expert_parallel_size")
"""Keys whose value must divide the number of experts."""

_EXPERT_NAME = re.compile(r"experts\.\d")


def with_experts(config: Mapping[str, Any], old: int, new: int, where: str) -> tuple[dict[str, Any], list[WeightsmithError]]:
    """The config with `new` experts instead of `old`, and problems. where: position in the recipe.

    >>> with_experts({"num_experts": 8, "num_experts_per_tok": 2}, 8, 3, "r.yml:2:1")
    ({'num_experts': 3, 'num_experts_per_tok': 2}, [])
    """
    changed = copy.deepcopy(dict(config))
    problems: list[WeightsmithError] = []
    counted = [part for _, part in sections(changed) if any(_is(part.get(key), old) for key in EXPERT_COUNTS)]
    if not counted:
        said = [f"{key}: {part[key]}" for _, part in sections(changed) for key in EXPERT_COUNTS if key in part]
        fix = f"write {old} as one of {', '.join(EXPERT_COUNTS)}"
        what = f"the tensors have {old} experts, but config.json does not say so"
        problems.append(Unsupported(what, where="config.json", details=said, fix=fix))
    for part in counted:
        for key in EXPERT_COUNTS:
            if _is(part.get(key), old):
                part[key] = [new] * len(part[key]) if isinstance(part[key], list) else new
        problems += _checked(part, new, where)
    if any(_EXPERT_NAME.search(text) for text in texts(config.get("quantization_config"))):
        what = "quantization_config names experts by number, and the numbers change"
        problems.append(Unsupported(what, where="config.json", fix="name an unquantised checkpoint of the same model"))
    return changed, problems


def groups(config: Mapping[str, Any], experts: int) -> int:
    """The number of groups among which the router chooses; 1 if it has none."""
    found = [part.get("n_group") for _, part in sections(config) if any(_is(part.get(key), experts) for key in EXPERT_COUNTS)]
    return next((n for n in found if isinstance(n, int) and n > 1), 1)


def _checked(part: Mapping[str, Any], new: int, where: str) -> list[WeightsmithError]:
    """Problems with `new` experts in one mapping of config.json."""
    problems: list[WeightsmithError] = []
    per_token = 0
    for key in PER_TOKEN:
        needed = max(whole_numbers(part.get(key)), default=0)
        per_token = max(per_token, needed)
        if needed > new:
            left = "1 expert is" if new == 1 else f"{new} experts are"
            what = f"each token is routed to {needed} experts ({key} in config.json), but only {left} left"
            problems.append(LayerError(what, where=where, fix=f"keep at least {needed} in each layer"))
    for key in DIVISORS:
        for n in whole_numbers(part.get(key)):
            if n > 1 and new % n:
                what = f"{new} experts cannot be divided into {n} equal groups ({key} in config.json)"
                problems.append(LayerError(what, where=where, fix=f"keep a multiple of {n}"))
    groups, top = part.get("n_group"), part.get("topk_group")
    if isinstance(groups, int) and groups > 1 and not problems:
        size = new // groups
        # Routers like DeepSeek-V3's rank groups by the sum of their best two experts.
        if size < 2 or (isinstance(top, int) and top * size < per_token):
            what = f"{groups} groups of {size} are too small: a token is routed to {per_token} experts of {top} groups"
            problems.append(LayerError(what, where=where, fix="keep more experts"))
    return problems


def _is(value: object, count: int) -> bool:
    return count in whole_numbers(value) and set(whole_numbers(value)) == {count}
