"""Kinds of adapters besides LoRA and DoRA: one file each, whose `KIND` says what the tensors of a module do to its weight.

To add one, add a file and its name to `NAMES`; or a package with an entry point of the group `weightsmith.adapters`.
"""

from __future__ import annotations

from functools import cache

from weightsmith._base.plugins import Plugins
from weightsmith.abc.adapter import AdapterKind

NAMES = (
    "loha",
    "lokr",
    "ia3",
    "oft",
    "boft",
    "hra",
    "vera",
    "adalora",
    "miss",
    "randlora",
    "fourierft",
    "vblora",
    "shira",
    "c3a",
    "ln_tuning",
    "trainable_tokens",
    "locon",
    "difference",
)

IN_FILES = ("loha", "lokr", "locon", "difference")
"""Kinds in files without a config."""

KINDS = Plugins(
    "kind of adapter",
    "weightsmith.adapters",
    AdapterKind,
    {name: f"weightsmith._models.lora.kinds.{name}:KIND" for name in NAMES},
)


@cache
def _types(brought: tuple[str, ...]) -> dict[str, str]:
    return {kind: name for name in (*reversed(brought), *NAMES) for kind in KINDS.get(name).types}


def kind_of_type(peft_type: object) -> str:
    """The name of the kind that an adapter_config.json says; "" if there is none."""
    return _types(KINDS.brought).get(peft_type, "") if isinstance(peft_type, str) else ""


def kind_of_part(part: str) -> str:
    """The name of the kind that has tensors of this name: for files without a config. "" if there is none.

    >>> kind_of_part("hada_w1_a"), kind_of_part("weight")
    ('loha', '')
    """
    return next((name for name in IN_FILES if part in KINDS.get(name).parts), "")
