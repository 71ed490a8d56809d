"""How an embedding model makes one vector of a text: modules of sentence-transformers, and llama.cpp's number for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from weightsmith._base.errors import Finding, FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.tokenizers.files import settings_in

MODULES = "modules.json"

_FOLDER = re.compile(r"\w[\w.-]*", re.ASCII)
_PREFIX = "pooling_mode_"
_MODES = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
"""Names of modes, behind `_PREFIX`, and llama.cpp's numbers."""
_ALSO = {"mean": "mean_tokens", "cls": "cls_token"}
_OTHER = "choose another format, such as fp8-dynamic"
_DONE = ("Transformer", "Pooling", "Normalize")
"""Modules that llama.cpp has: it normalises vectors unless told otherwise."""


def pooling_keys(
    modules: bytes | None, architecture: str, read: Callable[[str], bytes | None]
) -> tuple[dict[str, Value], list[Finding]]:
    """The key that says how tokens are pooled, and a warning for modules that a GGUF file does not have.

    modules  the contents of modules.json; None: the model is no embedding model
    read     gives the contents of a file of the model's folder, by its name

    Raises FormatError for a damaged modules.json, Unsupported for a way to pool that llama.cpp does not know.
    """
    values: dict[str, Value] = {}
    others: list[str] = []
    warnings: list[Finding] = []
    for module in _listed(modules):
        kind, path = str(module.get("type", "")).rpartition(".")[2], module.get("path")
        if kind == "Pooling" and isinstance(path, str) and _FOLDER.fullmatch(path):
            where = f"{path}/config.json"
            if (data := read(where)) is None:
                what = f"{MODULES} names the module {show(path)}, which is missing: the file does not say how tokens are pooled"
                warnings.append(Finding(what, where, fix="download the folder, or name the way to pool when you run the model"))
            else:
                values[f"{architecture}.pooling_type"] = Value("u32", _pooling(settings_in(data), where))
        elif kind not in _DONE:
            others.append(kind)
    if others:
        what = f"the file holds the model without its modules {', '.join(map(show, others))}: llama.cpp gives other vectors"
        warnings.append(Finding(what, MODULES, fix=_OTHER))
    return values, warnings


def _listed(modules: bytes | None) -> list[Mapping[str, Any]]:
    try:
        value = [] if modules is None else parse(modules, max_memory=1 << 24)
    except JsonError as error:
        raise FormatError(f"it {error}", where=MODULES, fix="repair it, or download it again") from error
    return [module for module in value if isinstance(module, dict)] if isinstance(value, list) else []


def _pooling(settings: Mapping[str, Any], where: str) -> int:
    """llama.cpp's number for how a module pools. Raises Unsupported."""
    stated = settings.get("pooling_mode")
    modes = [name.removeprefix(_PREFIX) for name, value in settings.items() if name.startswith(_PREFIX) and value is True]
    modes = [_ALSO.get(stated, stated)] if isinstance(stated, str) else modes
    if len(modes) != 1 or modes[0] not in _MODES:
        what = f"its tokens are pooled by {' and '.join(map(show, modes)) or 'no known mode'}, and llama.cpp knows "
        raise Unsupported(what + ", ".join(_MODES), where=where, fix=_OTHER)
    return _MODES[modes[0]]
