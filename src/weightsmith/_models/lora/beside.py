"""The tokenizer that lies beside an adapter: when a model with the adapter gets it, and which files of the base it replaces."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, FormatError
from weightsmith._base.files import same_bytes, show
from weightsmith._files.copied import holds_tokens, is_tokenizer
from weightsmith._files.subfolders import TEMPLATES
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.structure.configs import sections, whole_numbers, writes_texts
from weightsmith._models.tokenizers.files import (
    OLD_TEMPLATE,
    TEMPLATE_FILE,
    json_bytes,
    settings_of,
    templates_of,
    with_end,
    with_template,
)
from weightsmith._models.tokenizers.vocabulary import Vocabulary, read_vocabulary

_SETTINGS, _GENERATION, _ENDS = "tokenizer_config.json", "generation_config.json", "eos_token_id"


def differing_files(first: Checkpoint, other: Checkpoint) -> list[str]:
    """The files of the first model's tokenizer that the other lacks, or has otherwise.

    Lists of tokens of equal sizes are not downloaded to be compared.
    """
    names = [name for name in first.files if is_tokenizer(name)]
    for model in (first, other):
        model.fetch([name for name in names if name in other.files and not holds_tokens(name)])
    return [name for name in names if name not in other.files or not _alike(first, other, name)]


def _alike(first: Checkpoint, other: Checkpoint, name: str) -> bool:
    paths = [model.folder / name for model in (first, other)]
    if all(path.is_file() for path in paths):
        return same_bytes(*paths)
    sizes = [
        path.stat().st_size if path.is_file() else model.repositories[0].sizes.get(name, -1) if model.repositories else -1
        for path, model in zip(paths, (first, other), strict=True)
    ]
    return sizes[0] == sizes[1] >= 0


@dataclass(frozen=True, slots=True)
class Beside:
    """A tokenizer beside an adapter.

    base, adapter  the models
    ref            both, as the user named them
    """

    base: Checkpoint
    adapter: Checkpoint
    ref: str

    def apply(self, folder: ModelFolder, *, grown: bool, trains_tokens: bool) -> tuple[ModelFolder, list[Finding]]:
        """The base's folder, with this tokenizer where the model needs it; and what the user should know.

        grown          the adapter has rows for more tokens
        trains_tokens  it changes the token embedding
        """
        base, adapter = self.base, self.adapter
        why = self._reason(grown=grown, trains_tokens=trains_tokens)
        if why:
            listed = f"{why}: the tokenizer is the one beside it: {', '.join(adapter.files)}"
            taken, findings = self._taken(folder)
            return taken, [Finding(listed, self.ref), *findings]
        differing = differing_files(adapter, base)
        if not differing:
            return folder, []
        what = f"tokenizer files beside the adapter differ from the base's, and are not used: {', '.join(differing)}"
        return folder, [Finding(what, self.ref, fix="copy it into the output, if the adapter was trained with it")]

    def _reason(self, *, grown: bool, trains_tokens: bool) -> str:
        """Why the model gets this tokenizer; "" if it keeps the base's."""
        base, adapter = self.base, self.adapter
        if base.subfolders or not any(map(holds_tokens, adapter.files)):
            return ""
        if grown:
            return "the adapter adds tokens"
        adapter.fetch([name for name in adapter.files if not holds_tokens(name)])
        lends = bool(templates_of(adapter.folder, adapter.files)) and not self._template()
        ours, theirs = self._tokens() if lends or trains_tokens else ({}, {})
        if not ours or not theirs:
            return ""
        if trains_tokens and ours != theirs:
            return "the adapter has trained other tokens than the base's"
        # a base may have more: a GGUF file has a token for each row
        return "the adapter has a chat template, and the base has none" if lends and theirs.items() <= ours.items() else ""

    def _template(self) -> Any:
        """The base's chat template."""
        self.base.fetch([name for name in (TEMPLATE_FILE, _SETTINGS, OLD_TEMPLATE) if name in self.base.files])
        return templates_of(self.base.folder, self.base.files)

    def _tokens(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The ids of the base's tokens, and of the adapter's; {} for those that cannot be read."""
        seen: dict[str, Vocabulary] = {}  # equal files are parsed once
        ids: list[Mapping[str, int]] = []
        for model in (self.base, self.adapter):
            model.fetch([name for name in model.files if is_tokenizer(name)])
            with contextlib.suppress(FormatError):
                vocabulary = read_vocabulary(model.ref, model.folder, model.files, seen)
                ids.append({} if vocabulary is None else vocabulary.ids)
        return (ids[0], ids[1]) if len(ids) == 2 else ({}, {})

    def _taken(self, folder: ModelFolder) -> tuple[ModelFolder, list[Finding]]:
        """The base's folder with the adapter's tokenizer. It is a temporary one: both are read from elsewhere."""
        base, adapter = self.base, self.adapter
        adapter.fetch(adapter.files)
        kept = [name for name in base.files if self._stays(name)]
        base.fetch(kept)
        temporary = tempfile.TemporaryDirectory(prefix="weightsmith-", ignore_cleanup_errors=True)
        path = Path(temporary.name)
        for source, names in ((base, kept), (adapter, adapter.files)):
            for name in names:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.folder / name, path / name)
        settings = settings_of(adapter.folder, adapter.files, _SETTINGS)
        written: dict[str, bytes] = {}
        if not templates_of(path, [*kept, *adapter.files]) and (template := self._template()):
            with_template(written, settings, template)
        config, ends, findings = self._with_end(folder.config, settings)
        written |= ends
        for name, data in written.items():
            (path / name).write_bytes(data)
        files = tuple(sorted({*kept, *adapter.files, *written}))
        return replace(folder, path=path, config=config, files=files, subfolders=(), temporary=temporary), findings

    def _stays(self, name: str) -> bool:
        """Whether a file of the base goes with the adapter's tokenizer. Lists of tokens never do."""
        if holds_tokens(name) or name == "added_tokens.json":
            return False
        if name in (TEMPLATE_FILE, OLD_TEMPLATE) or name.startswith(f"{TEMPLATES}/"):
            return not templates_of(self.adapter.folder, self.adapter.files)
        return name not in (_SETTINGS, "special_tokens_map.json") or _SETTINGS not in self.adapter.files

    def _with_end(
        self, config: Mapping[str, Any] | None, settings: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any] | None, dict[str, bytes], list[Finding]]:
        """config.json and other files in which texts also end with the end that the tokenizer names; and a note on it.

        Without it, a model that was trained with this tokenizer would write on and on.
        """
        named = settings.get("eos_token")
        token = named.get("content") if isinstance(named, dict) else named
        vocabulary = None
        with contextlib.suppress(FormatError):
            vocabulary = read_vocabulary(self.adapter.ref, self.adapter.folder, self.adapter.files)
        number = vocabulary.ids.get(token) if vocabulary is not None and isinstance(token, str) else None
        if number is None:
            return config, {}, []
        finding = Finding(f"texts end with {show(token)} too, as the tokenizer beside the adapter says", self.ref)
        if _GENERATION in self.base.files:
            self.base.fetch([_GENERATION])
            stated = settings_of(self.base.folder, self.base.files, _GENERATION)
            if not stated or number in whole_numbers(stated.get(_ENDS)):
                return config, {}, []
            return config, {_GENERATION: json_bytes(with_end(stated, number))}, [finding]
        if not writes_texts(config):
            return config, {}, []
        changed = copy.deepcopy(dict(config or {}))
        parts = [part for _, part in sections(changed) if whole_numbers(part.get(_ENDS))]
        for part in parts:
            part.update(with_end(part, number))
        return changed, {}, [finding] if changed != config else []
