"""How each architecture stores a mixture of experts: one file each.

To add one, add a file with a `LAYOUT` and its name to `NAMES`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from weightsmith._features.mixture.layouts.base import ExpertLayout

NAMES = (
    "mixtral",
    "qwen3_moe",
    "granitemoe",
    "flex_olmo",
    "qwen2_moe",
    "glm4_moe",
    "dots1",
    "deepseek_v3",
    "deepseek_v2",
    "deepseek",
    "olmoe",
)
"""In order of preference, for recipes that name no architecture."""


@cache
def get(name: str) -> ExpertLayout:
    """The layout of this name."""
    layout: ExpertLayout = import_module(f"weightsmith._features.mixture.layouts.{name}").LAYOUT
    return layout


def all_layouts() -> tuple[ExpertLayout, ...]:
    """Every layout, in order of preference."""
    return tuple(get(name) for name in NAMES)
