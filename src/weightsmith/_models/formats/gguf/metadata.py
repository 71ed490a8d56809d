"""The keys of a GGUF file that say where a model comes from: name, author, licence, the models that it is made from.

As llama.cpp's converter derives them, from the model card and the name of the model. It also guesses version and size from
the name; these keys are left out, because the guesses are often wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsmith._models.formats.gguf.layout import Value, ValueType

_HUB = "https://huggingface.co/"
_HUB_PAGE = re.compile(r"https?://huggingface\.co/([^/]+/[^/]+)")
_UNCHANGED = re.compile(r"v\d+(\.\d+)*|\d.*", re.ASCII)
"""Words of a name that are versions or sizes."""

_TEXTS: Mapping[str, tuple[str, ...]] = {
    "author": ("author", "model_author", "model_creator"),
    "version": ("version", "model_version"),
    "organization": ("organization", "model_organization"),
    "description": ("description", "model_description"),
    "source.url": ("url", "model_url"),
    "source.doi": ("doi", "model_doi"),
    "source.repo_url": ("repo_url", "model_repo_url"),
}
"""Keys of a GGUF file, and those of model cards that say the same."""
_LICENCE = {"license": "license", "license.name": "license_name", "license.link": "license_link"}
_LISTS = {"tags": ("tags", "pipeline_tag"), "languages": ("languages", "language")}
_OF_BASES = ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")
_SAMPLING: Mapping[str, tuple[str, ValueType]] = {
    **{name: (name, "f32") for name in ("top_p", "min_p", "xtc_probability", "xtc_threshold", "penalty_repeat")},
    **{name: (name, "f32") for name in ("mirostat_tau", "mirostat_eta")},
    **{name: (name, "i32") for name in ("top_k", "penalty_last_n", "mirostat")},
    "temperature": ("temp", "f32"),
}
"""Settings of generation_config.json, and llama.cpp's names and types of them."""
_MOST = 1e30  # NaN and infinities are not below


@dataclass(frozen=True, slots=True)
class Origin:
    """A model that a file is made from.

    id    org/name on the Hub, or the name of its folder
    card  front matter of its card
    """

    id: str
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As a title: of the card, else made from the id."""
        stated = _text(self.card, ("name", "model_name"))
        return stated or title_of(self.id.rpartition("/")[2] if _is_hub_id(self.id) else self.id)


def title_of(name: str) -> str:
    """A model's name as a title.

    >>> title_of("llama-3.1-8b-instruct"), title_of("Phi-3-mini-4k-instruct")
    ('Llama 3.1 8b Instruct', 'Phi 3 Mini 4k Instruct')
    """
    words = name.replace("-", " ").split()
    return " ".join(word.title() if word.islower() and not _UNCHANGED.fullmatch(word) else word for word in words)


def origin_keys(origins: Sequence[Origin]) -> dict[str, Value]:
    """The keys for a conversion of one model, or for a merge of several: a merge has the licence that all of them have."""
    values: dict[str, str | list[str]] = {"name": " + ".join(dict.fromkeys(origin.name for origin in origins))}
    licences = {tuple(_text(origin.card, (here,)) for here in _LICENCE.values()) for origin in origins}
    if len(licences) == 1:
        values |= dict(zip(_LICENCE, licences.pop(), strict=True))
    if len(origins) == 1:
        card = origins[0].card
        values |= {there: _text(card, names) for there, names in _TEXTS.items()}
        if not values["organization"] and _is_hub_id(origins[0].id):
            values["organization"] = title_of(origins[0].id.partition("/")[0])
        values |= {there: [each for name in names for each in _listed(card.get(name))] for there, names in _LISTS.items()}
        bases = [_base(each) for each in _first_list(card, ("base_model", "base_models", "base_model_sources"))]
    else:
        bases = [_base(origin.id) for origin in origins]
    found = {f"general.{name}": _value(value) for name, value in values.items() if value}
    return found | _base_keys(bases)


def _base_keys(bases: Sequence[Mapping[str, str]]) -> dict[str, Value]:
    if not bases:
        return {}
    values = {"general.base_model.count": Value("u32", len(bases))}
    for number, base in enumerate(bases):
        values |= {f"general.base_model.{number}.{name}": _value(base[name]) for name in _OF_BASES if base.get(name)}
    return values


def _value(value: str | list[str]) -> Value:
    """Text as a value. Names of folders and cards may hold what no UTF-8 can: it is replaced."""
    texts = [text.encode(errors="replace").decode() for text in ([value] if isinstance(value, str) else value)]
    return Value("str", texts[0] if isinstance(value, str) else texts)


def _base(named: object) -> dict[str, str]:
    """What is known of a model from its id, its page, or an entry of a card."""
    if isinstance(named, dict):
        return {str(name): text for name, text in named.items() if isinstance(text, str)}
    text = str(named)
    page = _HUB_PAGE.fullmatch(text)
    if text.startswith(("http://", "https://", "ssh://")) and page is None:
        return {"repo_url": text}
    hub_id = text if page is None else page[1]
    if not _is_hub_id(hub_id):
        return {"name": title_of(hub_id)}
    organization, _, name = hub_id.partition("/")
    known = {"name": title_of(name), "organization": title_of(organization)}
    return known | {"repo_url": text if page is not None else f"{_HUB}{hub_id}"}


def sampling_keys(generation: Mapping[str, Any]) -> dict[str, Value]:
    """The keys for settings of generation_config.json by which llama.cpp chooses tokens, unless a user says otherwise."""
    found = {}
    for here, (there, kind) in _SAMPLING.items():
        value = generation.get(here)
        if kind == "i32" and type(value) is int and abs(value) < 1 << 31:
            found[f"general.sampling.{there}"] = Value(kind, value)
        elif kind == "f32" and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST:
            found[f"general.sampling.{there}"] = Value(kind, float(value))
    return found


def is_said(setting: str) -> bool:
    """Whether a setting of generation_config.json is in `sampling_keys`."""
    return setting in _SAMPLING


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/")) and " " not in name


def _text(card: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first of some values of a card, as text; "" if it has none."""
    for name in names:
        if listed := _listed(card.get(name)):
            return ",".join(listed)
    return ""


def _first_list(card: Mapping[str, Any], names: Iterable[str]) -> list[object]:
    value = next((card[name] for name in names if name in card), None)
    listed = value if isinstance(value, list) else [value]
    return [each for each in listed if isinstance(each, dict) or (isinstance(each, str) and each)]


def _listed(value: object) -> list[str]:
    """The texts of a value that is one text or several."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str) and each]
