"""Adapters of other kinds than LoRA in PEFT's format: which of their tensors belong to which module, and their configs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.text import count
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora.adapter import (
    CONFIG_NAME,
    PREFIX,
    SAVED,
    Adapter,
    OtherParts,
    check_empty,
    saved_modules,
)
from weightsmith._models.lora.config import BIASES, REPAIR, ModulePatterns
from weightsmith._models.lora.forms import other_kind
from weightsmith._models.lora.kinds import KINDS
from weightsmith._models.sources.parts import WRAPPERS
from weightsmith._models.structure.configs import finite_number
from weightsmith.abc.adapter import AdapterKind

_USED = frozenset(
    "auto_mapping base_model_name_or_path bias fan_in_fan_out modules_to_save peft_type peft_version task_type".split()
)
_UNUSED = frozenset("exclude_modules inference_mode init_weights layers_pattern layers_to_transform revision".split())
_UNUSED |= {"runtime_config", "target_modules"}


def check_other(config: Mapping[str, Any], kind: AdapterKind, where: str) -> None:
    """Raise Unsupported for settings of an adapter whose meaning is not known, FormatError for values of a wrong type."""
    known = _USED | _UNUSED | kind.used | kind.unused | set(kind.patterns.values())
    if unknown := [f"{show(key)}: {show(value)}" for key, value in config.items() if value and key not in known]:
        what = f"keys that weightsmith does not know may change what the tensors of {kind.title} mean"
        fix = "Merge the adapter with the program that wrote it. If a key changes no weights, remove it from the file."
        raise Unsupported(what, where=where, details=unknown, fix=fix)
    if (bias := config.get("bias")) not in (None, *BIASES) and bias != f"{config.get('peft_type')}_only".lower():
        raise FormatError(f"bias is {show(bias)}, none of {', '.join(BIASES)}", where=where, fix=REPAIR)
    if not isinstance(value := config.get("fan_in_fan_out"), bool | None):
        raise FormatError(f"fan_in_fan_out is {show(value)}, not true or false", where=where, fix=REPAIR)


def sort_others(checkpoint: Checkpoint, config: Mapping[str, Any], name_of_kind: str) -> Adapter:
    """The adapter in a file. Raises FormatError for tensors that belong to no module."""
    check_empty(checkpoint)
    kind, where = KINDS.get(name_of_kind), checkpoint.ref
    names = "|".join(map(re.escape, sorted((*kind.parts, *kind.shared), key=len, reverse=True)))
    pattern = re.compile(rf"(.+?)(?:\.token_adapter)?\.({names})(?:\.default)?(\.\w+)?")
    parts_of_module: dict[str, dict[str, str]] = {}
    shared, replacements, problems = dict[str, str](), dict[str, str](), list[str]()
    for name in checkpoint.specs:
        inner = WRAPPERS.sub("", name).removeprefix(PREFIX)
        match, last = pattern.fullmatch(inner), inner.removeprefix("base_model.").removesuffix(".default")
        if ".original_module." in inner:
            continue
        if last in kind.shared:
            shared[last] = name
        elif match and kind.replaces:
            replacements[f"{match[1]}{match[3] or ''}"] = name
        elif match and match[3] in (None, ".weight"):
            if parts_of_module.setdefault(match[1], {}).setdefault(match[2], name) != name:
                problems.append(f"{show(name)} and {show(parts_of_module[match[1]][match[2]])} are the same part")
        elif match or other_kind(inner):
            problems.append(f"{show(name)} is no part of {kind.title}")
        else:
            replacements[SAVED.sub("", inner).replace(".base_layer", "")] = name
    if problems:
        what = f"the adapter's tensors have {count(len(problems), 'problem')}"
        fix = "Save it again with peft: the config and the weights are of different adapters, or this is not one of PEFT's."
        raise FormatError(what, where=str(checkpoint.paths[0]), details=problems[:8], fix=fix)
    settings = _Settings(config, kind, f"{where}, {CONFIG_NAME}")
    others = {
        module: OtherParts(name_of_kind, shared | parts, settings.of(module)) for module, parts in parts_of_module.items()
    }
    return Adapter(
        checkpoint,
        {},
        replacements,
        transposed=config.get("fan_in_fan_out") is True,
        saved=frozenset(saved_modules(config, replacements)),
        others=others,
    )


class _Settings:
    """The config, with what patterns say of a module in place of a number of all."""

    def __init__(self, config: Mapping[str, Any], kind: AdapterKind, where: str) -> None:
        self._all = {key: value for key, value in config.items() if key in kind.used | {"init_weights"}}
        self._patterns = {
            key: ModulePatterns(dict(_numbers(config, name, where)), name, where) for key, name in kind.patterns.items()
        }

    def of(self, module: str) -> Mapping[str, Any]:
        return self._all | dict(self._of_patterns(module))

    def _of_patterns(self, module: str) -> Iterator[tuple[str, Any]]:
        for key, patterns in self._patterns.items():
            value = patterns.find(module, float("nan"))
            if value == value:
                yield key, int(value) if value == int(value) else value


def _numbers(config: Mapping[str, Any], key: str, where: str) -> Iterator[tuple[str, float]]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise FormatError(f"{key} is {show(value)}, not an object", where=where, fix=REPAIR)
    for text, stated in value.items():
        if (number := finite_number(stated)) is None:
            raise FormatError(f"{key} of {show(text)} is {show(stated)}, not a finite number", where=where, fix=REPAIR)
        yield text, float(number)
