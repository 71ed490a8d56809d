"""FlexOlmo: OLMo 2 with experts, with norms after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from weightsmith._features.mixture.layouts import olmoe
from weightsmith.abc.layout import ATTENTION, POST_NORMS, QK_NORMS

LAYOUT = replace(
    olmoe.LAYOUT,
    name="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    title="FlexOlmo",
    dense=("olmo2",),
    layer=ATTENTION | POST_NORMS | QK_NORMS,
    keys=olmoe.keys,
    warnings=lambda facts: (),
    llama_cpp="not supported",
    check=lambda config: (),
    note="",
)
