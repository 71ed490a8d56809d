"""config.json with another number of experts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from weightsmith.errors import LayerError, Unsupported, WeightsmithError

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of routed experts, or of a list of it for each layer."""

PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Keys of how many experts a token is sent to, or of a list of it for each layer."""

DIVISORS = ("n_group", "ep_size", "moe_ep_size", "expert_parallel_size")
"""Keys of what the number of experts must be a multiple of."""

_EXPERT_NAME = re.compile(r"experts\.\d")


def with_experts(config: Mapping[str, Any], old: int, new: int, where: str) -> tuple[dict[str, Any], list[WeightsmithError]]:
    """A config for `new` experts in the place of `old`, and why it cannot be. where: in the recipe.

    >>> with_experts({"num_experts": 8, "num_experts_per_tok": 2}, 8, 3, "r.yml:2:1")
    ({'num_experts': 3, 'num_experts_per_tok': 2}, [])
    """
    changed = copy.deepcopy(dict(config))
    problems: list[WeightsmithError] = []
    counted = [part for part in _mappings(changed) if any(_is(part.get(key), old) for key in COUNTS)]
    if not counted:
        said = [f"{key}: {part[key]}" for part in _mappings(changed) for key in COUNTS if key in part]
        fix = f"one of {', '.join(COUNTS)} must say {old}"
        what = f"config.json does not say that there are {old} experts, as the tensors do"
        problems.append(Unsupported(what, where="config.json", details=said, fix=fix))
    for part in counted:
        for key in COUNTS:
            if _is(part.get(key), old):
                part[key] = [new] * len(part[key]) if isinstance(part[key], list) else new
        problems += _checked(part, new, where)
    if any(_EXPERT_NAME.search(text) for text in _texts(config.get("quantization_config"))):
        what = "quantization_config names experts by their number, and the numbers change"
        problems.append(Unsupported(what, where="config.json", fix="name an unquantised checkpoint of the same model"))
    return changed, problems


def groups(config: Mapping[str, Any], experts: int) -> int:
    """In how many groups a router sees its experts; 1 where it does not."""
    found = [part.get("n_group") for part in _mappings(dict(config)) if any(_is(part.get(key), experts) for key in COUNTS)]
    return next((n for n in found if isinstance(n, int) and n > 1), 1)


def _checked(part: Mapping[str, Any], new: int, where: str) -> list[WeightsmithError]:
    """What in one mapping of config.json `new` experts cannot be."""
    problems: list[WeightsmithError] = []
    per_token = 0
    for key in PER_TOKEN:
        needed = max(_ints(part.get(key)), default=0)
        per_token = max(per_token, needed)
        if needed > new:
            left = "1 expert is" if new == 1 else f"{new} experts are"
            what = f"each token is sent to {needed} experts ({key} in config.json), and {left} left"
            problems.append(LayerError(what, where=where, fix=f"leave at least {needed} in each layer"))
    for key in DIVISORS:
        for n in _ints(part.get(key)):
            if n > 1 and new % n:
                what = f"{new} experts do not make {n} equal groups ({key} in config.json)"
                problems.append(LayerError(what, where=where, fix=f"leave a multiple of {n}"))
    groups, top = part.get("n_group"), part.get("topk_group")
    if isinstance(groups, int) and groups > 1 and not problems:
        size = new // groups
        # The routers of DeepSeek-V3 and its kin rank groups by the sum of their best two experts.
        if size < 2 or (isinstance(top, int) and top * size < per_token):
            what = f"{groups} groups of {size} are too small: a token is sent to {per_token} experts of {top} groups"
            problems.append(LayerError(what, where=where, fix="leave more experts"))
    return problems


def _is(value: object, count: int) -> bool:
    return count in _ints(value) and set(_ints(value)) == {count}


def _ints(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _mappings(config: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """The config and the configs in it."""
    yield config
    for value in config.values():
        if isinstance(value, dict) and depth < 6:
            yield from _mappings(value, depth + 1)


def _texts(value: object) -> Iterator[str]:
    """Every text in a value, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
