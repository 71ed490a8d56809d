"""Experts of MLX: the matrices of one projection are one tensor [experts, outputs, inputs], as mlx-lm's own files have them.

mlx-lm 0.32.2 joins quantised experts of some models while it loads them (`engines`), and of others plain experts alone.
"""

from __future__ import annotations

import re
from dataclasses import replace

from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats import find_encoding
from weightsmith._models.formats.mlx import STACK, STACKED
from weightsmith._plans import JOIN, PLAIN, PlanDraft, Step

_EXPERT = re.compile(r"(.+\.)experts\.(\d+)\.(\w+)\.weight")


def stack_experts(draft: PlanDraft, encoding: str) -> None:
    """Join the encoded experts of a draft, if mlx-lm needs that, and all of a projection are encoded."""
    if (draft.config or {}).get("model_type") not in STACKED:
        return
    stacks: dict[tuple[str, str], dict[int, Step]] = {}
    for step in draft.steps:
        if match := _EXPERT.fullmatch(step.out.name):
            stacks.setdefault((match[1], match[3]), {})[int(match[2])] = step
    joined: dict[str, Step | None] = {}
    for (prefix, projection), own in stacks.items():
        ordered = [own[number] for number in sorted(own)]
        alike = {(step.encoding, step.out.shape, step.out.dtype) for step in ordered}
        if sorted(own) == list(range(len(own))) and len(alike) == 1 and ordered[0].encoding == encoding:
            name = f"{prefix}{STACK}.{projection}.weight"
            joined[ordered[0].out.name] = _joined(name, ordered)
            joined |= dict.fromkeys(step.out.name for step in ordered[1:])
    draft.steps = [found for step in draft.steps if (found := joined.get(step.out.name, step)) is not None]


def _joined(name: str, ordered: list[Step]) -> Step:
    first = ordered[0]
    spec = TensorSpec(name, first.out.dtype, (len(ordered), *first.out.shape))
    needs = tuple(dict.fromkeys(need for step in ordered for need in step.needs))
    pieces = tuple(replace(leaf, encoding=PLAIN, stored=()) for step in ordered for leaf in step.leaves)
    joined = Step(spec, JOIN, (), pieces=pieces, needs=needs, role=first.role, layer=first.layer)
    return replace(joined, encoding=first.encoding, stored=find_encoding(first.encoding).outs(spec))
