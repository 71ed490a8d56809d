"""The files around tokenizer.json: chat templates, tokenizer_config.json, generation_config.json, and ids in config.json."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsmith._base.errors import UnknownName, WeightsmithError, nearest
from weightsmith._base.files import expand_user, read_bounded
from weightsmith._base.strict_json import parse_object
from weightsmith._models.structure.configs import section_at, sections, whole_number, whole_numbers
from weightsmith._models.tokenizers.vocabulary import MAX_FILE_BYTES, Added, Vocabulary

MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"
CHAT_TEMPLATES: Mapping[str, str] = {
    path.stem: path.read_text("utf-8") for path in sorted(Path(__file__).with_name("chat_templates").glob("*.jinja"))
}
"""Chat templates that a recipe can name. Each writes the format that its family of models was trained on."""
_ID_KEY = re.compile(
    r"^(?!codec_)\w*_token_(id|ids|index)$|^(bos|eos|pad|unk|mask)_index$|^(im|image|slice)_(start|end|newline|patch)_id$|^newline_id$"
)
"""Keys that hold token ids, also in XLM, Molmo 2, HunYuan-VL and MiniCPM-V. Qwen3-Omni's codec has its own vocabulary."""


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """A JSON file as transformers writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def settings_of(folder: Path, files: Sequence[str], name: str) -> dict[str, Any]:
    """A JSON object in the folder; {} if it is missing or damaged: loaders say so."""
    if name not in files:
        return {}
    with contextlib.suppress(WeightsmithError, OSError):
        return settings_in(read_bounded(folder / name, MAX_FILE_BYTES))
    return {}


def settings_in(data: bytes) -> dict[str, Any]:
    """The JSON object in the bytes of a file; {} if it is damaged."""
    with contextlib.suppress(WeightsmithError):
        return parse_object(data, "it", "", "", unique=False, max_memory=1 << 30)
    return {}


# ---- chat templates


def templates_of(folder: Path, files: Sequence[str]) -> Any:
    """The chat template of a model as text, or its named ones as tokenizer_config.json has them; "" if it has none."""
    if TEMPLATE_FILE in files:
        with contextlib.suppress(WeightsmithError, OSError):
            return read_bounded(folder / TEMPLATE_FILE, MAX_TEMPLATE_BYTES).decode("utf-8", "replace").strip()
    for name in ("tokenizer_config.json", OLD_TEMPLATE):
        template = settings_of(folder, files, name).get("chat_template")
        template = template.strip() if isinstance(template, str) else template
        if template:
            return template
    return ""


def template_of(folder: Path, files: Sequence[str]) -> str:
    """The default chat template of a model; "" if it has none."""
    template = templates_of(folder, files)
    if isinstance(template, list):  # named templates
        template = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    return template.strip() if isinstance(template, str) else ""


def choose_template(asked: str, templates: Sequence[str], folder: Path, where: str) -> tuple[str, Path | None]:
    """The template that a recipe asks for; and the file that it is from, if it names one.

    asked      `auto`, one of `CHAT_TEMPLATES`, a path, or Jinja
    templates  of the models, in the recipe's order
    folder     that relative paths start from

    `auto` is the most frequent template, of equally frequent ones the first; "" if no model has one. Raises UnknownName.
    """
    if asked == "auto":
        counts = Counter(template for template in templates if template)
        if not counts:
            return "", None
        return max(counts, key=lambda template: (counts[template], -templates.index(template))), None
    if asked in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[asked].strip(), None
    if "{" in asked or "\n" in asked:
        return asked.strip(), None
    path = folder / expand_user(asked)
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():
            return read_bounded(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace").strip(), path
    what = f"there is no chat template {asked!r}{nearest(asked, ['auto', *CHAT_TEMPLATES])}, and no such file"
    raise UnknownName(
        what, where=where, fix=f"Write auto, {', '.join(CHAT_TEMPLATES)}, the path of a file, or Jinja text with {{{{ }}}}."
    )


def with_template(files: dict[str, bytes], settings: Mapping[str, Any], template: Any) -> None:
    """Write the template as a file of its own; tokenizer_config.json has it no more. It has named ones.

    settings  tokenizer_config.json
    template  as `templates_of` returns it
    """
    if not isinstance(template, str):
        files["tokenizer_config.json"] = json_bytes({**settings, "chat_template": template})
        return
    files[TEMPLATE_FILE] = (template + "\n").encode()
    if "chat_template" in settings:
        files["tokenizer_config.json"] = json_bytes({k: v for k, v in settings.items() if k != "chat_template"})


# ---- added tokens


def with_added(settings: Mapping[str, Any], added: Mapping[str, Added], new: Sequence[str]) -> dict[str, Any]:
    """tokenizer_config.json with the new tokens, if it lists added tokens."""
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return dict(settings)
    entries = {str(added[t]["id"]): {k: v for k, v in added[t].items() if k != "id"} for t in new}
    return {**settings, "added_tokens_decoder": {**listed, **entries}}


# ---- ids of tokens in configs


def move_ids(
    config: Mapping[str, Any], theirs: Sequence[Mapping[str, Any]], old: Vocabulary | None, new: Vocabulary
) -> tuple[dict[str, Any], list[str]]:
    """A config with the ids of another tokenizer: that model's own value, else the ids of the same tokens.

    theirs  configs of the tokenizer's model, the first that has a key wins
    old     the tokenizer that the ids are of

    Returns the config, and what it lost because the new tokenizer lacks a token.
    """
    moved = json.loads(json.dumps(config))
    lost: list[str] = []
    for path, section in sections(moved):
        for key in [key for key in section if _ID_KEY.search(key) or key in _MORE_IDS]:
            stated = [value for other in theirs if (value := _at(other, path, key)) is not None]
            if stated:
                section[key] = stated[0]
                continue
            move = _Move(old, new)
            section[key] = _MORE_IDS.get(key, _Move.ids)(move, section[key])
            if move.lost:
                lost.append(f"{key} is null" if section[key] is None else f"{key} is shorter")
    return moved, lost


def with_end(settings: Mapping[str, Any], number: int) -> dict[str, Any]:
    """generation_config.json, or a part of config.json, with another token that ends texts.

    >>> with_end({"eos_token_id": 2}, 7), with_end({"eos_token_id": [2, 7]}, 7), with_end({}, 7)
    ({'eos_token_id': [2, 7]}, {'eos_token_id': [2, 7]}, {'eos_token_id': 7})
    """
    ends = whole_numbers(settings.get("eos_token_id"))
    return {**settings, "eos_token_id": ([*ends, number] if number not in ends else ends) if ends else number}


class _Move:
    """Moves the ids in one value. lost: the new tokenizer lacks a token."""

    def __init__(self, old: Vocabulary | None, new: Vocabulary) -> None:
        self._old, self._new, self.lost = old, new, False

    def one(self, value: Any) -> Any:
        """An id; None for one whose token is missing. What is no id (-1, null, text) stays."""
        number = whole_number(value)
        if number is None or number < 0:
            return value
        token = None if self._old is None else self._old.tokens.get(number)
        moved = None if token is None or self._old is None else self._new.find(self._old)(token)
        self.lost = self.lost or moved is None
        return moved

    def ids(self, value: Any) -> Any:
        """An id or a list of ids: without those whose token is missing."""
        if not isinstance(value, list):
            return self.one(value)
        return [moved for number in value if (moved := self.one(number)) is not None or number is None]

    def sequences(self, value: Any) -> Any:
        """A list of lists of ids, or of such lists: without those that have a token that is missing."""
        if not isinstance(value, list):
            return value
        if any(isinstance(sequence, list) and any(isinstance(inner, list) for inner in sequence) for sequence in value):
            return [self.sequences(sequence) for sequence in value]
        moved = [(sequence, self.ids(sequence)) for sequence in value]
        return [ids for sequence, ids in moved if isinstance(sequence, list) and len(ids) == len(sequence)]

    def pairs(self, value: Any) -> Any:
        """A list of places and ids: without those whose token is missing."""
        return self._entries(value, 1, self.one)

    def biased(self, value: Any) -> Any:
        """A list of lists of ids and numbers."""
        return self._entries(value, 0, lambda ids: next(iter(self.sequences([ids])), None))

    def names(self, value: Any) -> Any:
        """A mapping to ids."""
        if not isinstance(value, dict):
            return value
        return {name: moved for name, number in value.items() if (moved := self.one(number)) is not None}

    def _entries(self, value: Any, at: int, move: Callable[[Any], Any]) -> Any:
        if not isinstance(value, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
            return value
        moved = [[*pair[:at], move(pair[at]), *pair[at + 1 :]] for pair in value]
        return [entry for entry, pair in zip(moved, value, strict=True) if entry[at] is not None or pair[at] is None]


_MORE_IDS: Mapping[str, Callable[[_Move, Any], Any]] = {
    "suppress_tokens": _Move.ids,
    "begin_suppress_tokens": _Move.ids,
    "bad_words_ids": _Move.sequences,
    "force_words_ids": _Move.sequences,
    "forced_decoder_ids": _Move.pairs,
    "sequence_bias": _Move.biased,
    "lang_to_id": _Move.names,
    "task_to_id": _Move.names,
    "vocabulary_map": _Move.names,
}
"""Keys of generation_config.json, and of Chameleon's config.json, that hold ids under other names."""


def _at(config: Mapping[str, Any], path: tuple[str, ...], key: str) -> Any:
    with contextlib.suppress(KeyError, TypeError):
        return section_at(config, path).get(key)
    return None
