"""The files beside the weights that the donor lacks and another model has.

The output gets a tokenizer, a chat template and a generation_config.json if any model has one. All other files are the donor's;
those of other models that the output lacks are listed in the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightsmith._base.errors import Finding, MismatchError
from weightsmith._base.files import read_bounded, show
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count
from weightsmith._files.containers import Naming
from weightsmith._files.copied import holds_tokens, is_tokenizer
from weightsmith._files.subfolders import TEMPLATES
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.tokenizers import Vocabulary, read_vocabulary
from weightsmith._models.tokenizers.files import TEMPLATE_FILE, settings_in, settings_of, templates_of, with_template
from weightsmith._models.tokenizers.vocabulary import MAX_FILE_BYTES
from weightsmith._plans import Dropped, PlanDraft

GENERATION = "generation_config.json"

CHOOSE_TOKENIZER = "write tokenizer_source: and the model whose tokenizer the output is to have"

OLD_TEMPLATE = "chat_template.json"
_SETTINGS = "tokenizer_config.json"
_TEMPLATES = (TEMPLATE_FILE, _SETTINGS, OLD_TEMPLATE)


@dataclass
class Companions:
    """Files of the output that are not the donor's.

    labels, opened  the models
    donor           index of the donor
    files           to write; they replace the donor's
    removed         files of the donor that the output does not have
    tokenizer       index of the model whose tokenizer the output has, -1 for one outside the merge
    template        index of the model whose chat template it has
    findings        notes on what is taken from another model
    """

    labels: Sequence[str]
    opened: Sequence[Checkpoint]
    donor: int
    files: dict[str, bytes] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    tokenizer: int = field(init=False)
    template: int = field(init=False)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = self.template = self.donor

    def fill_tokenizer(self, where: str, fix: str, seen: dict[str, Vocabulary]) -> None:
        """Take the tokenizer of the first model that has one, if the donor has none.

        where  of the models in the recipe
        fix    what to do if the tokenizers differ: the end of the message
        seen   tokenizers that were read, see `read_vocabulary`

        Raises MismatchError if the models that have one differ in a token.
        """
        owners = [k for k, checkpoint in enumerate(self.opened) if any(map(holds_tokens, checkpoint.files))]
        if not owners or self.donor in owners:
            return
        first, *others = owners
        tokens = {k: self._tokens(k, seen) for k in owners}
        if differing := [k for k in others if not _same_tokens(tokens[first], tokens[k])]:
            what = f"{self.labels[self.donor]} has no tokenizer, and those of the other models differ"
            lines = {k: f"{self.labels[k]}: {_described(tokens[k])}" for k in (first, *differing)}
            details = [lines[first], *(f"{lines[k]}{_first_difference(tokens[first], tokens[k])}" for k in differing)]
            raise MismatchError(what, where=where, details=details, fix=fix)
        donor = self.opened[self.donor]
        template = self._template_of(self.donor)
        self.removed |= frozenset(name for name in donor.files if is_tokenizer(name))
        self.files |= {name: self._bytes(first, name) for name in self.opened[first].files if is_tokenizer(name)}
        if template:
            self.write_template(template, self.donor)
        self.tokenizer = self.template = first
        if template:
            self.template = self.donor
        what = f"{self.labels[self.donor]} has no tokenizer: the output has that of {self.labels[first]}"
        self.findings.append(Finding(what, "tokenizer"))
        self.findings += own_code(self.labels[first], self.opened[first].folder, self.opened[first].files)

    def fill_template(self) -> None:
        """Take the chat template of the first model that has one, if the output has none."""
        if self._template_of(self.template):
            return
        for k in range(len(self.opened)):
            if template := self._template_of(k):
                self.write_template(template, k)
                self.template = k
                what = f"{self.labels[self.donor]} has no chat template: the output has that of {self.labels[k]}"
                self.findings.append(Finding(what, "chat_template"))
                return

    def fill_generation(self, moved: Callable[[int, bytes], bytes] = lambda _k, data: data) -> None:
        """Take the generation_config.json of the first model that has one, if the output has none.

        moved  (model, file) → the file with the ids of the output's tokenizer
        """
        if GENERATION in self.files or GENERATION in self.opened[self.donor].files:
            return
        owners = [k for k, checkpoint in enumerate(self.opened) if GENERATION in checkpoint.files]
        if not owners:
            return
        first = self.tokenizer if self.tokenizer in owners else owners[0]
        data = self._bytes(first, GENERATION)
        self.files[GENERATION] = moved(first, data)
        what = f"{self.labels[self.donor]} has no {GENERATION}: the output has that of {self.labels[first]}"
        differing = [self.labels[k] for k in owners if settings_in(self._bytes(k, GENERATION)) != settings_in(data)]
        others = f"{', '.join(differing)} {'has' if len(differing) == 1 else 'have'} another one"
        self.findings.append(Finding(what, GENERATION, (others,) if differing else ()))

    # ---- files

    def _bytes(self, k: int, name: str) -> bytes:
        self.opened[k].fetch([name])
        return read_bounded(self.opened[k].folder / name, MAX_FILE_BYTES)

    def _tokens(self, k: int, seen: dict[str, Vocabulary]) -> Vocabulary | dict[str, bytes]:
        """The tokens of a model; the digests of its files if they cannot be read."""
        checkpoint = self.opened[k]
        checkpoint.fetch([name for name in checkpoint.files if is_tokenizer(name)])
        vocabulary = read_vocabulary(self.labels[k], checkpoint.folder, checkpoint.files, seen)
        if vocabulary is not None:
            return vocabulary
        names = filter(holds_tokens, checkpoint.files)
        return {name: hashlib.sha256(self._bytes(k, name)).digest() for name in names}

    def _template_of(self, k: int) -> object:
        checkpoint = self.opened[k]
        names = [name for name in _TEMPLATES if name in checkpoint.files]
        checkpoint.fetch(names[:1] if TEMPLATE_FILE in names else names)
        return templates_of(checkpoint.folder, checkpoint.files)

    def write_template(self, template: object, owner: int = -1) -> None:
        """Write a chat template in the place of whatever the files have. owner: the model whose other templates go with it."""
        donor = self.opened[self.donor]
        settings = settings_of(donor.folder, donor.files, _SETTINGS) if _SETTINGS not in self.removed else {}
        if _SETTINGS in self.files:
            settings = settings_in(self.files[_SETTINGS])
        for name in (TEMPLATE_FILE, OLD_TEMPLATE):
            self.files.pop(name, None)
        self.removed |= {OLD_TEMPLATE, *filter(_is_another, donor.files)}
        for name in list(filter(_is_another, self.files)):
            del self.files[name]
        if owner >= 0:
            self.files |= {name: self._bytes(owner, name) for name in self.opened[owner].files if _is_another(name)}
        with_template(self.files, settings, template)


def _is_another(name: str) -> bool:
    """True for a chat template besides the default one, in a file of its own."""
    return name.startswith(f"{TEMPLATES}/")


def own_code(label: str, folder: Path, files: Sequence[str]) -> list[Finding]:
    """The warning that a tokenizer that is copied has code, which is not."""
    if not settings_of(folder, files, _SETTINGS).get("auto_map"):
        return []
    what = f"the tokenizer of {label} has code of its own, which is not copied"
    return [Finding(what, _SETTINGS, fix="copy what auto_map names into the output")]


def _same_tokens(a: Vocabulary | dict[str, bytes], b: Vocabulary | dict[str, bytes]) -> bool:
    if isinstance(a, Vocabulary) and isinstance(b, Vocabulary):
        return a.ids == b.ids
    return a == b


def _described(tokens: Vocabulary | dict[str, bytes]) -> str:
    return f"{len(tokens.ids):,} tokens" if isinstance(tokens, Vocabulary) else ", ".join(tokens)


def _first_difference(a: Vocabulary | dict[str, bytes], b: Vocabulary | dict[str, bytes]) -> str:
    if not isinstance(a, Vocabulary) or not isinstance(b, Vocabulary):
        return ""
    number = min(i for i in a.tokens.keys() | b.tokens.keys() if a.tokens.get(i) != b.tokens.get(i))
    token = f"{show(b.tokens[number])}" if number in b.tokens else "no token"
    return f"; {number} is {token}, and {show(a.tokens[number]) if number in a.tokens else 'no token'} there"


def carried(names: Iterable[str], files: Collection[str], removed: Collection[str]) -> tuple[str, ...]:
    """The donor's files to copy: those that are neither written nor removed."""
    gone = {"config.json", *files, *removed}
    return tuple(name for name in names if name not in gone)


def held_files(draft: PlanDraft, folder: Path) -> set[str]:
    """The names of the output's files beside the weights; all those of a chat template if it has one, in whatever file.

    folder  of the files that the draft carries
    """
    written = draft.files.get(_SETTINGS)
    settings = settings_of(folder, draft.carried, _SETTINGS) if written is None else settings_in(written)
    templates = {TEMPLATE_FILE, OLD_TEMPLATE}
    return draft.held | (templates if settings.get("chat_template") or draft.held & templates else set())


def lacking(models: Iterable[tuple[str, Sequence[str]]], held: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each model, its files beside the weights that the output does not have. held: names of the output's files

    >>> lacking([("base", ["config.json"]), ("fr", ["config.json", "vocab.txt"])], {"config.json"})
    {'fr': ('vocab.txt',)}
    """
    missing: dict[str, tuple[str, ...]] = {}
    for label, files in models:
        if names := tuple(name for name in files if name not in held):
            missing[label] = names
    return missing


def joined(listed: Iterable[Mapping[str, Sequence[str]]], held: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Several results of `lacking` as one, without files that the output has."""
    missing: dict[str, dict[str, None]] = {}
    for missing_files in listed:
        for label, files in missing_files.items():
            missing.setdefault(label, {}).update(dict.fromkeys(name for name in files if name not in held))
    return {label: tuple(files) for label, files in missing.items() if files}


# ---- subfolders with weights of their own


_ABSENT = "its subfolder is not in the output"


def without_foreign(
    specs: Sequence[Mapping[str, TensorSpec]], inputs: Sequence[Checkpoint], donor: Checkpoint
) -> list[Mapping[str, TensorSpec]]:
    """The tensors of each model, without those in subfolders that the donor does not have."""
    kept: list[Mapping[str, TensorSpec]] = []
    for tensors, checkpoint in zip(specs, inputs, strict=True):
        names = set(_foreign(checkpoint, donor))
        kept.append({name: spec for name, spec in tensors.items() if name not in names} if names else tensors)
    return kept


def foreign(inputs: Iterable[Checkpoint], donor: Checkpoint) -> list[Dropped]:
    """The tensors that `without_foreign` leaves out."""
    return [Dropped(i, name, _ABSENT) for i, checkpoint in enumerate(inputs) for name in _foreign(checkpoint, donor)]


def foreign_findings(inputs: Sequence[Checkpoint], labels: Sequence[str], donor: int) -> Iterator[Finding]:
    """Warnings of subfolders with weights that the donor does not have."""
    for label, checkpoint in zip(labels, inputs, strict=True):
        if inner := [folder for folder in checkpoint.subfolders if folder not in inputs[donor].subfolders]:
            what = f"left out with its weights: {', '.join(inner)}, which {labels[donor]} does not have"
            yield Finding(
                what, label, fix="merge models with the same modules, or list first the one whose modules the output has"
            )


def drop_subfolders(draft: PlanDraft, reader: str) -> None:
    """Leave the weights of subfolders out of the output, with a warning. reader: of the output, which reads none."""
    naming = draft.naming
    if not naming.folders:
        return
    inner = [step for step in draft.steps if naming.folder_of(step.out.name)]
    draft.steps = [step for step in draft.steps if not naming.folder_of(step.out.name)]
    draft.dropped += [Dropped(r.model, r.tensor, _ABSENT) for step in inner for r in step.reads if r.model >= 0]
    draft.naming = Naming(naming.stem, naming.metadata)
    listed = ", ".join(naming.folders)
    what = f"left out, {count(len(inner), 'tensor')}: {reader} computes what comes out of the transformer, without {listed}"
    draft.warn(what, listed, "apply these modules to its output yourself, or choose another format")


def _foreign(checkpoint: Checkpoint, donor: Checkpoint) -> list[str]:
    others = Naming(folders=tuple(folder for folder in checkpoint.subfolders if folder not in donor.subfolders))
    return [name for name in checkpoint.specs if others.folder_of(name)] if others.folders else []
