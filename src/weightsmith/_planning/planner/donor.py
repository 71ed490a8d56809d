"""The donor: the model that gives the output its names, config.json, tokenizer and all other files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weightsmith._base.errors import Finding
from weightsmith._models.structure import Structure


def choose_donor(structures: Sequence[Structure | None], labels: Sequence[str]) -> tuple[int, list[Finding]]:
    """The index of the donor, and a warning when it is not the first model.

    It is the base, else the first model (which is index 0); unless another has all its kinds of layers and more: a plain
    language model merged with a vision-language model gives a vision-language model, which only the config of that one
    can describe.
    """
    first = structures[0] if structures else None
    if first is None:
        return 0, []
    kinds = [_kinds(s) for s in structures]
    larger = [i for i, k in enumerate(kinds) if k > kinds[0]]
    if not larger:
        return 0, []
    best = max(larger, key=lambda i: (kinds[i].total(), -i))
    more = ", ".join((kinds[best] - kinds[0]).elements())
    return best, [
        Finding(f"config.json, tokenizer and other files are {labels[best]}'s, not {labels[0]}'s: only it has {more} layers")
    ]


def _kinds(structure: Structure | None) -> Counter[str]:
    """How many stacks of each kind a model has; those of heads, projectors and prediction layers do not count."""
    return Counter(s.kind for s in structure.stacks if s.kind != "other") if structure is not None else Counter()
