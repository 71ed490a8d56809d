"""The keys of a GGUF file that come from the files beside the weights: model card, generation_config.json, tokenizer.

Name, author, licence and the models that it is made from are as llama.cpp's converter derives them, from the model card and the
name of the model. It also guesses version and size from the name; these keys are left out, because the guesses are often wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from weightsmith._base.errors import Finding, nearest
from weightsmith._base.files import show
from weightsmith._files.hf_folder import MAX_FRONT_CHARACTERS
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture
from weightsmith._models.formats.gguf.header import GgufHeader
from weightsmith._models.formats.gguf.layout import Value, ValueType
from weightsmith._models.formats.gguf.tokenizer.chat import CHAT_TEMPLATE, NAMED_TEMPLATE, template_keys
from weightsmith._models.formats.gguf.tokenizer.files import READ, tokenizer_keys
from weightsmith._models.formats.gguf.tokenizer.parts import name_like, object_of
from weightsmith._models.tokenizers.files import settings_in
from weightsmith._plans import PlanDraft
from weightsmith.abc.stored import ModelFiles, ModelOrigin

GENERATION = "generation_config.json"


Stated = Mapping[str, Value | None]
"""Keys that a user states, and their values; None: the key is left out."""


def keys_of_files(
    draft: PlanDraft,
    companions: ModelFiles,
    config: Mapping[str, Any],
    architecture: GgufArchitecture,
    rows: int,
    stated: Stated = MappingProxyType({}),
) -> tuple[dict[str, Value], list[Finding]]:
    """The keys that come from the files beside the weights, and warnings.

    rows    of the embedding
    stated  by the user, who knows better than the model card

    Those of a tokenizer that comes from a GGUF file, unchanged, are that file's. `pooling.py` has those of embedding models.
    """
    templates = [name for name in dict.fromkeys([*draft.carried, *draft.files]) if NAMED_TEMPLATE.fullmatch(name)]
    keys = with_stated(origin_keys(companions.origins), stated)
    name = str(keys["general.name"].value) if "general.name" in keys else ""  # a folder may be called "-"
    in_file = companions.header((*(name for name in READ if name not in _SETTINGS), GENERATION))
    if _is_tokenizer_of(in_file, architecture, rows) and (kept := _kept(in_file, companions, templates)):
        name = name_like(name, str(in_file["general.name"].value) if "general.name" in in_file else "")
        return {**keys, **({"general.name": Value("str", name)} if name else {}), **kept}, []
    files = companions.read((*READ, GENERATION, *templates))
    tokenizer, warnings = tokenizer_keys(files, config, architecture, rows, name)
    sampling = sampling_keys(settings_in(files[GENERATION])) if GENERATION in files else {}
    return {**keys, **sampling, **tokenizer}, warnings


_SETTINGS = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""The files of `READ` with a chat template."""
_KEPT = ("tokenizer.", "general.sampling.")


def _is_tokenizer_of(in_file: Mapping[str, Value], architecture: GgufArchitecture, rows: int) -> bool:
    """Whether a file has a tokenizer of this architecture, or of dense models for its mixture, and a token for each row.

    in_file  from `values_of`; {} for no file
    """
    missing = Value("bool", False)
    tokens, kind = (in_file.get(f"tokenizer.ggml.{key}", missing).value for key in ("tokens", "model"))
    same = in_file.get("general.architecture", missing).value == architecture.name
    same = same or (not architecture.encodes and kind in ("gpt2", architecture.tokenizer))
    return same and isinstance(tokens, list) and len(tokens) == rows


def _kept(in_file: Mapping[str, Value], companions: ModelFiles, templates: Sequence[str]) -> dict[str, Value]:
    """The keys of the file, with the chat templates that the output has; {} if it has other settings of the tokenizer.

    templates  names of files of templates that have a name
    """
    names = (*_SETTINGS, *templates)
    files = companions.read(names)
    before = {name: data for name in names if (data := companions.donor(name)) is not None}
    settings, others = (object_of(contents, "tokenizer_config.json") for contents in (files, before))
    if {**settings, "chat_template": ""} != {**others, "chat_template": ""}:
        return {}
    keys = {key: value for key, value in in_file.items() if key.startswith(_KEPT)}
    if dict(files) == before:
        return keys
    keys = {key: value for key, value in keys.items() if not key.startswith(CHAT_TEMPLATE)}
    return keys | template_keys(files, settings, object_of(files, "chat_template.json"))


def values_of(header: GgufHeader) -> dict[str, Value]:
    """The keys of a file that `keys_of_files` may keep, and those by which it decides."""
    names = [key for key in header.keys if key.startswith(_KEPT) or key in ("general.architecture", "general.name")]
    values = {name: header.keys[name] for name in names}
    return {
        name: Value(header.kinds[name], value.tolist() if isinstance(value, np.ndarray) else value)
        for name, value in values.items()
    }


def said_generation(draft: PlanDraft, companions: ModelFiles, about: Mapping[str, Value]) -> list[str]:
    """generation_config.json, if it says nothing but what the keys and config.json say."""
    config, made_by = draft.config or {}, ("_from_model_config", "transformers_version")
    ends = [about[key].value for end in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{end}_token_id") in about]

    def known(key: str, value: object) -> bool:
        if key == "eos_token_id" and isinstance(value, list):
            return all(stop in ends for stop in value)
        return key in made_by or is_said(key) or config.get(key) == value

    settings = {name: settings_in(data) for name, data in companions.read((GENERATION,)).items()}
    return [name for name, values in settings.items() if all(known(key, value) for key, value in values.items())]


# ---- what a user states

_GENERAL = "general."
_STATED = (
    "name author version organization finetune basename description quantized_by size_label license license.name license.link "
    "url doi uuid repo_url source.url source.doi source.uuid source.repo_url"
).split()
_STATED_LISTS = ("tags", "languages")
_DESCRIBING = ("tokenizer", "split", "clip", "adapter", "imatrix", "quantize")
"""First words of keys that say how a file is read, besides the name of its architecture."""
_KEY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*", re.ASCII)
_MAX_KEY_BYTES, _MAX_VALUE_BYTES = 65_535, 1 << 20


def read_metadata(texts: Iterable[str], architecture: str) -> tuple[dict[str, Value | None], list[str]]:
    """Keys of a GGUF file from `license=mit`, and what is wrong with those that are none. architecture: its name.

    A key without a dot, or one of `general`, says where a model comes from. Keys with another first word are the user's own,
    unless they say how the model runs: those follow from config.json and the tokenizer.

    >>> read_metadata(["license=mit", "tags=merge,code", "acme.ticket=7", "name="], "llama")[0]["general.tags"].value
    ['merge', 'code']
    >>> read_metadata(["licence=mit"], "llama")[1]
    ["'licence' is no key of GGUF that says where a model comes from (did you mean 'license'?)"]
    """
    stated, problems = dict[str, Value | None](), list[str]()
    for text in texts:
        key, equals, value = text.partition("=")
        name = key.removeprefix(_GENERAL)
        general = "." not in key or key.startswith(_GENERAL) or name in _STATED
        if not equals or not _KEY.fullmatch(key) or len(key) > _MAX_KEY_BYTES:
            problems.append(f"{show(text)} is not KEY=VALUE, such as license=mit; keys are of a-z, 0-9, _ and dots")
        elif len(value.encode(errors="replace")) > _MAX_VALUE_BYTES:
            problems.append(f"{show(key)} has a value of more than {_MAX_VALUE_BYTES:,} bytes")
        elif general and name not in (*_STATED, *_STATED_LISTS):
            what = f"{show(key)} is no key of GGUF that says where a model comes from"
            problems.append(what + (nearest(name, [*_STATED, *_STATED_LISTS]) or f"; these are {', '.join(_STATED)}"))
        elif not general and (first := key.partition(".")[0]) in (*_DESCRIBING, architecture):
            problems.append(f"{show(key)} is a key by which llama.cpp reads the file ({first}), and follows from the model")
        elif name in _STATED_LISTS and general:
            stated[_GENERAL + name] = _value([word for word in value.split(",") if word]) if value else None
        else:
            stated[_GENERAL + name if general else key] = _value(value) if value else None
    return stated, problems


def with_stated(keys: Mapping[str, Value], stated: Stated) -> dict[str, Value]:
    """The keys with those that a user states.

    >>> list(with_stated({"general.name": Value("str", "m")}, {"general.name": None, "acme.a": Value("str", "b")}))
    ['acme.a']
    """
    return {key: value for key, value in {**keys, **stated}.items() if value is not None}


# ---- where a model comes from, and how tokens are chosen


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
_MOST_TEXTS = 1_000
_MOST = 1e30  # NaN and infinities are not below


def title_of(name: str) -> str:
    """A model's name as a title.

    >>> title_of("llama-3.1-8b-instruct"), title_of("Phi-3-mini-4k-instruct")
    ('Llama 3.1 8b Instruct', 'Phi 3 Mini 4k Instruct')
    """
    words = name.replace("-", " ").split()
    return " ".join(word.title() if word.islower() and not _UNCHANGED.fullmatch(word) else word for word in words)


def _name_of(origin: ModelOrigin) -> str:
    """A model's name as a title: of its card, else made from its id."""
    stated = _text(origin.card, ("name", "model_name"))
    return stated or title_of(origin.id.rpartition("/")[2] if _is_hub_id(origin.id) else origin.id)


def origin_keys(origins: Sequence[ModelOrigin]) -> dict[str, Value]:
    """The keys for a conversion of one model, or for a merge of several: a merge has the licence that all of them have."""
    values: dict[str, str | list[str]] = {"name": " + ".join(dict.fromkeys(_name_of(origin) for origin in origins))}
    licences = {tuple(_text(origin.card, (here,)) for here in _LICENCE.values()) for origin in origins}
    if len(licences) == 1:
        values |= dict(zip(_LICENCE, licences.pop(), strict=True))
    if len(origins) == 1:
        card = origins[0].card
        values |= {there: _text(card, names) for there, names in _TEXTS.items()}
        if not values["organization"] and _is_hub_id(origins[0].id):
            values["organization"] = title_of(origins[0].id.partition("/")[0])
        values |= {there: [text for name in names for text in _texts_of(card.get(name))] for there, names in _LISTS.items()}
        bases = [_base(text) for text in _first_list(card, ("base_model", "base_models", "base_model_sources"))]
    else:
        bases = [_base(origin.id) for origin in origins]
    keys = {f"general.{name}": _value(value) for name, value in values.items() if value}
    return keys | _base_keys(bases)


def card_of_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What the keys of a GGUF file say of its model, as a model card says it: the inverse of `origin_keys` for one model.

    Without the name: files are renamed, and a merge is named after the files.

    >>> card_of_keys({"general.license": "mit", "general.languages": ["en"], "general.size_label": "7B"})
    {'license': 'mit', 'language': ['en']}
    """
    names = {there: here[0] for there, here in _TEXTS.items()} | _LICENCE
    card: dict[str, Any] = {here: text for there, here in names.items() if (text := _short_text(keys.get(f"general.{there}")))}
    for there, here in (("tags", "tags"), ("languages", "language")):
        if texts := [text for text in _texts_of(keys.get(f"general.{there}"))[:_MOST_TEXTS] if _short_text(text)]:
            card[here] = texts
    count = keys.get("general.base_model.count")
    bases = []
    for number in range(min(count, _MOST_TEXTS) if type(count) is int else 0):
        values = {name: _short_text(keys.get(f"general.base_model.{number}.{name}")) for name in _OF_BASES}
        bases.append({name: text for name, text in values.items() if text})
    pages = [_HUB_PAGE.fullmatch(base.get("repo_url", "")) for base in bases]
    if bases and all(pages):
        card["base_model"] = [page[1] for page in pages if page is not None]
    elif bases:
        card["base_models"] = [base for base in bases if base]
    return card


def _short_text(value: object) -> str:
    """A text that a model card could hold, else ""."""
    return value if isinstance(value, str) and len(value) <= MAX_FRONT_CHARACTERS else ""


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
    keys = {}
    for here, (there, kind) in _SAMPLING.items():
        value = generation.get(here)
        if kind == "i32" and type(value) is int and abs(value) < 1 << 31:
            keys[f"general.sampling.{there}"] = Value(kind, value)
        elif kind == "f32" and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST:
            keys[f"general.sampling.{there}"] = Value(kind, float(value))
    return keys


def generation_of_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of generation_config.json that the keys of a GGUF file state: the inverse of `sampling_keys`.

    >>> generation_of_keys({"general.sampling.temp": 0.5, "general.sampling.top_k": "many"})
    {'temperature': 0.5}
    """
    stated = {here: keys.get(f"general.sampling.{there}") for here, (there, _) in _SAMPLING.items()}
    whole = {here for here, (_, kind) in _SAMPLING.items() if kind == "i32"}
    return {
        here: value
        for here, value in stated.items()
        if type(value) is int or (type(value) is float and here not in whole and abs(value) < _MOST)
    }


def is_said(setting: str) -> bool:
    """Whether a setting of generation_config.json is in `sampling_keys`."""
    return setting in _SAMPLING


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/")) and " " not in name


def _text(card: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first of some values of a card, as text; "" if it has none."""
    for name in names:
        if listed := _texts_of(card.get(name)):
            return ",".join(listed)
    return ""


def _first_list(card: Mapping[str, Any], names: Iterable[str]) -> list[object]:
    value = next((card[name] for name in names if name in card), None)
    listed = value if isinstance(value, list) else [value]
    return [entry for entry in listed if isinstance(entry, dict) or (isinstance(entry, str) and entry)]


def _texts_of(value: object) -> list[str]:
    """The texts of a value that is one text or several."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]
