"""The keys of a GGUF file for chat templates: which of a model's files has them is what transformers decides, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.tokenizers.files import TEMPLATE_FILE

NAMED_TEMPLATE = re.compile(r"additional_chat_templates/(\w[\w.-]*)\.jinja", re.ASCII)
"""Files of templates that have a name, such as `tool_use`."""

_KEY = "tokenizer.chat_template"
_DEFAULT = "default"


def template_keys(files: Mapping[str, bytes], settings: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Value]:
    """The chat templates of a model: files of their own, else those of tokenizer_config.json, else of chat_template.json.

    files          the contents of the files of templates, at least
    settings, old  tokenizer_config.json and chat_template.json

    >>> sorted(template_keys({"chat_template.jinja": b"A"}, {"chat_template": "B"}, {}).items())
    [('tokenizer.chat_template', Value(kind='str', value='A'))]
    """
    templates = _in_files(files) or _stated(settings.get("chat_template")) or _stated(old.get("chat_template"))
    values = {_KEY: Value("str", templates[_DEFAULT])} if _DEFAULT in templates else {}
    # as gguf-py: names of keys are letters, digits and underscores
    named = {re.sub(r"[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != _DEFAULT}
    values |= {f"{_KEY}.{name}": Value("str", text) for name, text in named.items()}
    return values | ({f"{_KEY}s": Value("str", list(named))} if named else {})


def _in_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Templates with a file of their own, by name."""
    names = {TEMPLATE_FILE: _DEFAULT} | {file: match[1] for file in sorted(files) if (match := NAMED_TEMPLATE.fullmatch(file))}
    return {name: files[file].decode(errors="replace") for file, name in names.items() if file in files}


def _stated(template: object) -> dict[str, str]:
    """The templates of a setting, by name: a text, a mapping, or a list with names."""
    if isinstance(template, str):
        return {_DEFAULT: template}
    if isinstance(template, dict):
        pairs = list(template.items())
    else:
        entries = [entry for entry in template if isinstance(entry, dict)] if isinstance(template, list) else []
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {name: text for name, text in pairs if isinstance(name, str) and name and isinstance(text, str)}
