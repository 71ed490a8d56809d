"""The keys of a GGUF file that come from the files beside the weights: tokenizer, chat templates, model card, pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.files import read_bounded
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._models.card import CARD_NAME, hub_id_of, read_card
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.formats.gguf.architecture import Architecture
from weightsmith._models.formats.gguf.chat_templates import NAMED_TEMPLATE
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.metadata import Origin, is_said, origin_keys, sampling_keys
from weightsmith._models.formats.gguf.pooling import MODULES, pooling_keys
from weightsmith._models.formats.gguf.tokenizer import READ, tokenizer_keys
from weightsmith._models.tokenizers.files import settings_in
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.companions import GENERATION


def keys_of_files(
    assembled: Prepared, config: Mapping[str, Any], architecture: Architecture, rows: int
) -> tuple[dict[str, Value], list[Finding]]:
    """The keys that come from the files beside the weights, and warnings. rows: of the embedding."""
    files = files_of(assembled, (*READ, GENERATION, MODULES, *_named_templates(assembled)))
    keys = origin_keys([_origin(checkpoint) for checkpoint in assembled.inputs])
    name = str(keys["general.name"].value) if "general.name" in keys else ""  # a folder may be called "-"
    tokenizer, warnings = tokenizer_keys(files, config, architecture, rows, name)
    donor = assembled.inputs[assembled.draft.donor]

    def read(name: str) -> bytes | None:
        donor.fetch([name])
        path = donor.folder / name
        return read_bounded(path, MAX_COPIED_BYTES) if path.is_file() else None

    pooling, more = pooling_keys(files.get(MODULES), architecture.name, read)
    sampling = sampling_keys(settings_in(files[GENERATION])) if GENERATION in files else {}
    return {**keys, **sampling, **pooling, **tokenizer}, [*warnings, *more]


def _origin(checkpoint: Checkpoint) -> Origin:
    """What a model is called, and its card."""
    checkpoint.fetch([CARD_NAME])
    if checkpoint.repositories:
        address = checkpoint.repositories[0].name
        name = address.rstrip("/").rpartition("/")[2] if "://" in address else address
        return Origin(name, read_card(checkpoint.folder))
    weights = next((path.absolute() for path in checkpoint.paths), None)
    folder = checkpoint.folder.absolute()
    if weights is not None and not weights.is_relative_to(folder):  # a GGUF file, whose other files are made from it
        folder = weights.parent
    if checkpoint.alone and weights is not None and weights.stem != "model":
        return Origin(weights.stem)
    return Origin(hub_id_of(str(folder)) or folder.name or "model", {} if checkpoint.alone else read_card(folder))


def _named_templates(assembled: Prepared) -> list[str]:
    """The files of templates with a name."""
    listed = dict.fromkeys([*assembled.draft.carried, *assembled.draft.files])
    return [name for name in listed if NAMED_TEMPLATE.fullmatch(name)]


def files_of(assembled: Prepared, wanted: Sequence[str]) -> dict[str, bytes]:
    """Those of some files that the output has."""
    draft = assembled.draft
    donor = assembled.inputs[draft.donor]
    names = [name for name in wanted if name in draft.carried]
    donor.fetch(names)
    written = {name: data for name, data in draft.files.items() if name in wanted}
    return {name: read_bounded(donor.folder / name, MAX_COPIED_BYTES) for name in names} | written


def said_generation(assembled: Prepared, about: Mapping[str, Value]) -> list[str]:
    """generation_config.json, if it says nothing but what the keys and config.json say."""
    config, made_by = assembled.draft.config or {}, ("_from_model_config", "transformers_version")
    ends = [about[key].value for end in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{end}_token_id") in about]

    def known(key: str, value: object) -> bool:
        if key == "eos_token_id" and isinstance(value, list):
            return all(stop in ends for stop in value)
        return key in made_by or is_said(key) or config.get(key) == value

    found = {name: settings_in(data) for name, data in files_of(assembled, (GENERATION,)).items()}
    return [name for name, own in found.items() if all(known(key, value) for key, value in own.items())]
