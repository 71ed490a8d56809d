"""How the factors of all experts of a parameter are stored: what the config says, where shapes do not tell.

PEFT's A is [experts · rank, inputs], expert after expert; in its B [outputs, rank · experts] the expert changes fastest. Until
September 2026, Unsloth trained with a B in which the experts lie one after the other, too. Since then it says what it has:
`lora_B_layout` for all parameters, `unsloth_fused_expert_lora` for each.

PEFT 0.17 to 0.19.0 took a parameter for [experts, inputs, outputs], whatever the model makes of it. Since 0.19.1 it knows the
models that have this order, and takes all others for [experts, outputs, inputs].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import show

GROUPED = "grouped_by_expert"
RANK_MAJOR = "rank_major"

_FLAT, _DETAILS = "lora_B_layout", "unsloth_fused_expert_lora"
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(\.dev\d{0,4})?(@.*)?", re.ASCII | re.DOTALL)
_SAYING_SO = (0, 18, 0)  # the first PEFT that writes `peft_version`
_KNOWING = (0, 19, 1)
_FIX = f"Write {_FLAT}: {RANK_MAJOR} (PEFT's) or {GROUPED} into adapter_config.json, as the adapter was trained."

KNOWS_ORDER = ".".join(map(str, _KNOWING))
"""The first version of PEFT that knows which models have [experts, inputs, outputs]."""

INPUTS_FIRST = frozenset({"gpt_oss", "openai_privacy_filter", "aria"})
"""Types of models of which PEFT knows, from transformers' `is_transposed`, that they have [experts, inputs, outputs]."""


class Layouts:
    """The layout of B of each parameter that a config names."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        """Raises FormatError for what contradicts itself, Unsupported for layouts that are not known."""
        self._where = where
        self._all = config.get(_FLAT)
        details = _object(config.get(_DETAILS), _DETAILS, where)
        parameters = _object(details.get("parameters"), f"parameters of {_DETAILS}", where)
        entries = {name: _object(entry, f"{name} of {_DETAILS}", where) for name, entry in parameters.items()}
        self._own = {name: entry.get(_FLAT) for name, entry in entries.items()}
        for key, layout in (
            (_FLAT, self._all),
            *((f"{_FLAT} of {name}", layout_of_parameter) for name, layout_of_parameter in self._own.items()),
        ):
            if layout not in (None, GROUPED, RANK_MAJOR):
                what = f"{key} is {show(layout)}: neither {RANK_MAJOR} nor {GROUPED}"
                raise Unsupported(what, where=where, fix="Merge the adapter with the program that wrote it.")
            if None not in (layout, self._all) and layout != self._all:
                what = f"{key} is {layout}, and {_FLAT} is {self._all}"
                raise FormatError(what, where=where, fix=_FIX)
        if (of_a := details.get("lora_A_layout")) not in (None, GROUPED):
            what = f"lora_A_layout of {_DETAILS} is {show(of_a)}, not {GROUPED}"
            raise Unsupported(what, where=where, fix="Merge the adapter with the program that wrote it.")
        mapping = config.get("auto_mapping")
        self._unsloth = isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed"))

    def grouped(self, parameter: str) -> bool:
        """Whether the experts lie one after the other in B. parameter: its name without the module's"""
        return (self._own.get(parameter) or self._all) == GROUPED

    def check(self, module: str, parameter: str) -> None:
        """Raise Unsupported for factors of several experts and ranks that Unsloth saved before it said which layout it has."""
        if self._unsloth and parameter in ("gate_up_proj", "down_proj") and not (self._own.get(parameter) or self._all):
            what = f"{module}.{parameter}: Unsloth saved it without {_FLAT}, and its versions differ in the order of B"
            why = f"Those before September 2026 trained with {GROUPED}; PEFT reads {RANK_MAJOR}"
            raise Unsupported(what, where=self._where, details=[why], fix=_FIX)


def _object(value: object, what: str, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"{what} is {show(value)}, not an object", where=where, fix="Repair it, or download it again.")
    return value


def transposed_of(version: object, model_type: object) -> bool | None:
    """Whether PEFT took parameters for [experts, inputs, outputs] as it trained an adapter; None if that is not known.

    version     peft_version of the adapter
    model_type  of the base

    >>> transposed_of("0.18.1", "nemotron_h"), transposed_of("0.21.0", "nemotron_h"), transposed_of("0.21.0", "gpt_oss")
    (True, False, None)
    """
    parsed = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if parsed is None:  # PEFT 0.17, or a config that PEFT did not write
        return None
    release, dev = tuple(int(part) for part in parsed.groups()[:3]), bool(parsed[4])
    if release < _SAYING_SO or (dev and release <= _KNOWING) or not isinstance(model_type, str):
        return None
    if release < (0, 19, 0):
        return True
    # Of the others the version of transformers decides, too, which is not known.
    return None if model_type in INPUTS_FIRST else release < _KNOWING
