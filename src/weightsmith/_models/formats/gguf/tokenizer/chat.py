"""The keys of a GGUF file for chats: templates, and tokens that end a generation.

Which of a model's files has templates is what transformers decides, too. transformers stops at every id of `eos_token_id`.
llama.cpp stops at three tokens that a file names (the end of a text, of a turn and of a message), and at those whose text it
knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.files import show
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.tokenizers.files import TEMPLATE_FILE

NAMED_TEMPLATE = re.compile(r"additional_chat_templates/(\w[\w.-]*)\.jinja", re.ASCII)
"""Files of templates that have a name, such as `tool_use`."""

CHAT_TEMPLATE = "tokenizer.chat_template"
_DEFAULT = "default"


def template_keys(files: Mapping[str, bytes], settings: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Value]:
    """The chat templates of a model: files of their own, else those of tokenizer_config.json, else of chat_template.json.

    files          the contents of the files of templates, at least
    settings, old  tokenizer_config.json and chat_template.json

    >>> sorted(template_keys({"chat_template.jinja": b"A"}, {"chat_template": "B"}, {}).items())
    [('tokenizer.chat_template', Value(kind='str', value='A'))]
    """
    templates = _in_files(files) or _stated(settings.get("chat_template")) or _stated(old.get("chat_template"))
    values = {CHAT_TEMPLATE: Value("str", templates[_DEFAULT])} if _DEFAULT in templates else {}
    # as gguf-py: names of keys are letters, digits and underscores
    named = {re.sub(r"[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != _DEFAULT}
    values |= {f"{CHAT_TEMPLATE}.{name}": Value("str", text) for name, text in named.items()}
    return values | ({f"{CHAT_TEMPLATE}s": Value("str", list(named))} if named else {})


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


# ---- tokens that end a generation

_TURN_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] <end_of_utterance>".split()
) | {"<\uff5cend\u2581of\u2581sentence\uff5c>"}
"""Texts of tokens that llama.cpp takes for the end of a turn, if a file names none."""

_ENDS = _TURN_ENDS | frozenset(
    "<|return|> <|call|> <|flush|> <|calls|> </s> <|eom_id|> [EOS] <eos> <turn|> <|tool_response> [e~[".split()
)
"""Texts of tokens at which llama.cpp stops, whatever a file names."""

# as llama.cpp's converter: with <|endoftext|> as the end of a turn, these models never stop
_GLM = {"eot": "<|user|>", "unknown": "<|endoftext|>"}
_NAMED: Mapping[str, Mapping[str, str]] = {
    "glm4": {**_GLM, "bos": "<|endoftext|>"},
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _GLM | {"bos": "[gMASK]", "eom": "<|observation|>"}),
}
"""For types of models whose tokenizers' files do not say it: tokens of special meaning."""


def ids_of(value: object, rows: int) -> list[int]:
    """The ids of a setting such as `eos_token_id`: a number or several."""
    listed = value if isinstance(value, list) else [value]
    return [number for number in listed if type(number) is int and 0 <= number < rows]


def with_ends(
    special: Mapping[str, int], stops: Iterable[int], tokens: Sequence[str], model_type: object
) -> tuple[dict[str, int], list[Finding]]:
    """Tokens of special meaning, by llama.cpp's names of their keys, with those that end a generation; and a warning.

    special  by the tokenizer's files
    stops    ids at which transformers stops

    The warning names tokens at which llama.cpp would go on: it has two more places.
    """
    ids = {token: number for number, token in enumerate(tokens)}
    named = _NAMED.get(model_type, {}) if isinstance(model_type, str) else {}
    complete = {key: ids[token] for key, token in named.items() if token in ids} | dict(special)
    stops = list(dict.fromkeys(stops))
    if "eos" not in complete and stops:
        complete["eos"] = stops[0]
    ends = {complete.get(key) for key in ("eos", "eot", "eom")}
    unplaced = [number for number in stops if number not in ends and tokens[number] not in _ENDS]
    places = ["eot", "eom"] if _TURN_ENDS.isdisjoint(tokens) else ["eom", "eot"]  # llama.cpp finds an end of turns by its text
    for key in [key for key in places if key not in complete][: len(unplaced)]:
        complete[key] = unplaced.pop(0)
    return complete, _unsaid(unplaced, tokens)


def _unsaid(unplaced: Sequence[int], tokens: Sequence[str]) -> list[Finding]:
    if not unplaced:
        return []
    texts = ", ".join(show(tokens[number]) for number in unplaced)
    what = f"llama.cpp does not stop at {texts}, as transformers does: a GGUF file names three tokens that end a generation"
    return [Finding(what, "eos_token_id", fix="name it when you run the model: a reverse prompt, or stop in a request")]


def stops_of(configs: Iterable[Mapping[str, Any]], rows: int) -> list[int]:
    """The ids at which transformers stops, those of the first config first."""
    return [number for config in configs for number in ids_of(config.get("eos_token_id"), rows)]
