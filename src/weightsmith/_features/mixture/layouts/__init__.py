"""How each architecture stores a mixture of experts: one file each.

To add one, add a file with a `LAYOUT` and its name to `NAMES`; or a package with an entry point of the group
`weightsmith.layouts`.
"""

from __future__ import annotations

from weightsmith._base.plugins import Plugins
from weightsmith.abc.layout import ExpertLayout

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

LAYOUTS = Plugins(
    "architecture",
    "weightsmith.layouts",
    ExpertLayout,
    {name: f"weightsmith._features.mixture.layouts.{name}:LAYOUT" for name in NAMES},
)
"""In order of preference, for recipes that name no architecture."""
