"""The files beside the weights: config.json, made to say what the tensors are, and what the donor lacks and another model has.

The output gets a tokenizer, a chat template and a generation_config.json if any model has one. All other files are the donor's;
those of other models that the output lacks are listed in the plan.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, LayerError, MismatchError, ShapeError, WeightsmithError
from weightsmith._base.files import read_bounded, show
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._files.copied import holds_tokens, is_tokenizer
from weightsmith._files.subfolders import MODULES, ROUTER, TEMPLATES, folders_in, module_code, module_steps
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Stack, Structure, resize_config, vocabulary
from weightsmith._models.structure.configs import (
    of_diffusers,
    replace_value,
    sections,
    text_sections,
    whole_number,
    whole_numbers,
    writes_texts,
)
from weightsmith._models.structure.perlayer import Remap, is_per_layer, rules_for
from weightsmith._models.tokenizers.files import (
    OLD_TEMPLATE,
    TEMPLATE_FILE,
    json_bytes,
    settings_in,
    settings_of,
    templates_of,
    with_end,
    with_template,
)
from weightsmith._models.tokenizers.vocabulary import MAX_FILE_BYTES, Vocabulary, read_vocabulary
from weightsmith._planning.planner.match import InputModels, ModelNames, is_buffer
from weightsmith._planning.planner.steps import main_dtype
from weightsmith._plans import PlanDraft

GENERATION = "generation_config.json"
NO_CONFIG = "the output has no config.json"

CHOOSE_TOKENIZER = "write tokenizer_source: and the model whose tokenizer the output is to have"

_ENDS = "eos_token_id"
_SETTINGS = "tokenizer_config.json"
_TEMPLATES = (TEMPLATE_FILE, _SETTINGS, OLD_TEMPLATE)
_OF_MODULES = re.compile(r"modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json", re.ASCII)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SENSES = re.compile(r"vision|image|audio|speech|video")
"""Keys of config.json of models that see or hear."""


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
    seen            tokenizers that were read, see `read_vocabulary`
    """

    labels: Sequence[str]
    opened: Sequence[Checkpoint]
    donor: int
    files: dict[str, bytes] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    tokenizer: int = field(init=False)
    template: int = field(init=False)
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, Vocabulary] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokenizer = self.template = self.donor

    def fill_tokenizer(self, where: str, fix: str) -> None:
        """Take the tokenizer of the first model that has one, if the donor has none.

        where  of the models in the recipe
        fix    what to do if the tokenizers differ: the end of the message

        Raises MismatchError if the models that have one differ in a token.
        """
        owners = [k for k, checkpoint in enumerate(self.opened) if any(map(holds_tokens, checkpoint.files))]
        if not owners or self.donor in owners:
            return
        first, *others = owners
        tokens = {k: self._tokens(k) for k in owners}
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

    def fill_modules(self) -> None:
        """Take the modules of sentence-transformers of the other models, if all have the same ones and the donor has none.

        Only modules without weights and without code of their own.
        """
        others = [k for k in range(len(self.opened)) if k != self.donor]
        steps = {self._modules_of(k) for k in others}
        if MODULES in self.opened[self.donor].files or len(steps) != 1 or not steps.pop():
            return
        first = others[0]
        folders = tuple(f"{folder}/" for folder in folders_in(self._bytes(first, MODULES)))
        names = [name for name in self.opened[first].files if _OF_MODULES.fullmatch(name) or name.startswith(folders)]
        self.files |= {name: self._bytes(first, name) for name in names}
        what = (
            f"{self.labels[self.donor]} has no modules of sentence-transformers: the output has those of {self.labels[first]}"
        )
        self.findings.append(Finding(what, MODULES))

    def _modules_of(self, k: int) -> str:
        """What the modules of a model compute; "" if it has none that another model could have."""
        checkpoint = self.opened[k]
        if MODULES not in checkpoint.files or checkpoint.subfolders or ROUTER in checkpoint.files:
            return ""
        folders = folders_in(self._bytes(k, MODULES))
        checkpoint.fetch([name for name in checkpoint.files if name.startswith(tuple(f"{folder}/" for folder in folders))])
        own_classes = module_code(checkpoint.folder, checkpoint.files, folders)
        return "" if next(own_classes, None) else module_steps(checkpoint.folder)

    def fill_processor(self) -> None:
        """Take the processor of images or audio of the first model that has one, if the donor sees or hears, and has none."""
        donor = self.opened[self.donor]
        if not any(_SENSES.search(key) for key in donor.config or {}) or not _lacks_all(donor.files, _PROCESSOR):
            return
        owners = [k for k, checkpoint in enumerate(self.opened) if not _lacks_all(checkpoint.files, _PROCESSOR)]
        if not owners:
            return
        first = owners[0]
        files = {name: self._bytes(first, name) for name in _PROCESSOR if name in self.opened[first].files}
        if any(settings_in(data).get("auto_map") for data in files.values()):  # its code would be missing
            return
        self.files |= files
        what = f"{self.labels[self.donor]} has no processor of images or audio: the output has that of {self.labels[first]}"
        differing = [
            self.labels[k]
            for k in owners[1:]
            if any(self._bytes(k, n) != data for n, data in files.items() if n in self.opened[k].files)
        ]
        others = f"{', '.join(differing)} {'has' if len(differing) == 1 else 'have'} another one"
        self.findings.append(Finding(what, next(iter(files)), (others,) if differing else ()))

    def add_ends(self, output: Vocabulary | None) -> None:
        """Let texts also end with what ends those of another model, if the output has its chat template.

        output  the tokenizer of the output, if the recipe chooses it

        Only in generation_config.json, and only tokens that are known.
        """
        k = self.template
        if k in (-1, self.donor) or GENERATION not in {*self.files, *self.opened[self.donor].files}:
            return
        data = self.files.get(GENERATION)
        stated = settings_in(data) if data is not None else self._generation_of(self.donor)
        ends = _ends(stated, {})
        theirs = _ends(self._generation_of(k), self.opened[k].config or {}) or []
        if not stated or not ends or not theirs:
            return
        named = self._named(k, theirs)
        ours = {} if output is not None else self._named(self.tokenizer, theirs)
        added = []
        for token, number in ((named[number], number) for number in theirs if number in named):
            moved = output.ids.get(token) if output is not None else number if ours.get(number) == token else None
            if moved is not None and moved not in ends:
                stated = with_end(stated, moved)
                added.append(token)
        if added:
            self.files[GENERATION] = json_bytes(stated)
            what = f"texts end with {', '.join(map(show, added))} too, as those of {self.labels[k]}"
            what += ", whose chat template the output has"
            self.findings.append(Finding(what, GENERATION))

    def note_ends(self, output: Vocabulary | None, config: Mapping[str, Any]) -> None:
        """Warn of tokens that end the texts of a model and not those of the output, whose texts would go on and on.

        output  the tokenizer of the output, if the recipe chooses it
        config  the donor's config.json, with the ids of the output's tokenizer

        Only models that generate text are compared, and of these only tokens that are known.
        """
        if GENERATION in self.files:
            ends = _ends(settings_in(self.files[GENERATION]), {})
        else:
            ends = _ends(self._generation_of(self.donor), config)
        stated = {k: _ends(self._generation_of(k), self.opened[k].config or {}) or [] for k in range(len(self.opened))}
        if ends is None or (output is None and all(set(ids) <= set(ends) for ids in stated.values())):
            return
        writers = [k for k, ids in stated.items() if ids and self._generates(k)]
        known = {} if not writers else self._named(self.tokenizer, ends) if output is None else output.tokens
        tokens = [known[number] for number in ends if number in known]
        if (ends and not tokens) or not self._generates(self.donor):
            return
        details = []
        for k in writers:
            theirs = self._named(k, stated[k])
            if others := [theirs[number] for number in stated[k] if number in theirs and theirs[number] not in tokens]:
                details.append(f"{self.labels[k]}: {', '.join(map(show, others))}")
        if details:
            listed = ", ".join(map(show, tokens)) or "no token"
            what = f"the models end texts with different tokens; those of the output end with {listed}"
            fix = "add the others to eos_token_id in its generation_config.json, if its chat template ends turns with them"
            self.findings.append(Finding(what, GENERATION, tuple(details), fix))

    def _generates(self, k: int) -> bool:
        """True if a model writes texts, as far as its files tell."""
        checkpoint = self.opened[k]
        return GENERATION in checkpoint.files or writes_texts(checkpoint.config) or bool(self._template_of(k))

    def _generation_of(self, k: int) -> dict[str, Any] | None:
        """The generation_config.json of a model; None if it has none."""
        return settings_in(self._bytes(k, GENERATION)) if GENERATION in self.opened[k].files else None

    def _named(self, k: int, numbers: Sequence[int]) -> Mapping[int, str]:
        """Token by id of a model, for these ids at least, as far as they are known.

        tokenizer.json is downloaded only if the small tokenizer_config.json does not list them.
        """
        checkpoint = self.opened[k]
        checkpoint.fetch([name for name in (_SETTINGS,) if name in checkpoint.files])
        listed = settings_of(checkpoint.folder, checkpoint.files, _SETTINGS).get("added_tokens_decoder")
        entries = {n: listed.get(str(n)) for n in numbers} if isinstance(listed, dict) else {}
        contents = {n: entry.get("content") for n, entry in entries.items() if isinstance(entry, dict)}
        named = {n: content for n, content in contents.items() if isinstance(content, str)}
        if set(numbers) <= named.keys():
            return named
        with contextlib.suppress(WeightsmithError, OSError):
            tokens = self._tokens(k)
            return tokens.tokens if isinstance(tokens, Vocabulary) else {}
        return {}

    # ---- files

    def _bytes(self, k: int, name: str) -> bytes:
        self.opened[k].fetch([name])
        return read_bounded(self.opened[k].folder / name, MAX_FILE_BYTES)

    def _tokens(self, k: int) -> Vocabulary | dict[str, bytes]:
        """The tokens of a model; the digests of its files if they cannot be read."""
        checkpoint = self.opened[k]
        checkpoint.fetch([name for name in checkpoint.files if is_tokenizer(name)])
        vocabulary = read_vocabulary(self.labels[k], checkpoint.folder, checkpoint.files, self.seen)
        if vocabulary is not None:
            return vocabulary
        names = filter(holds_tokens, checkpoint.files)
        return {name: hashlib.sha256(self._bytes(k, name)).digest() for name in names}

    def _template_of(self, k: int) -> object:
        checkpoint = self.opened[k]
        names = [name for name in _TEMPLATES if name in checkpoint.files]
        checkpoint.fetch(names[:1] if TEMPLATE_FILE in names else names)
        return templates_of(checkpoint.folder, checkpoint.files)

    def write_template(self, template: object, owner: int) -> None:
        """Write a chat template in the place of whatever the files have. owner: the model whose others go with it; -1: none."""
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


def _ends(generation: Mapping[str, Any] | None, config: Mapping[str, Any]) -> list[int] | None:
    """The ids that end the texts of a model; None if its files do not say.

    generation  generation_config.json, if there is one: transformers then takes none from config.json
    """
    parts = [part for _, part in sections(config)] if generation is None else [generation]
    stated = [part[_ENDS] for part in parts if _ENDS in part]
    if generation is None and not stated:  # a default of the model class counts
        return None
    return next((whole_numbers(value) for value in stated if value is not None), [])


def _lacks_all(files: Collection[str], names: Iterable[str]) -> bool:
    """Whether a model has none of these files."""
    return not any(name in files for name in names)


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


_DTYPE_KEYS = ("dtype", "torch_dtype")


def output_config(
    config: Mapping[str, Any],
    structure: Structure,
    layers: Mapping[str, Sequence[int]],
    outputs: Sequence[TensorSpec],
    *,
    stored: Mapping[str, TensorSpec],
    asked: DType | None,
    untie: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The donor's config with layer counts, dtype, tying, vocabulary and quantisation as the output tensors are.

    layers  for each stack prefix that changes: the donor's layer behind each output layer
    stored  the donor's own tensors
    asked   dtype that all tensors were to have
    untie   the output holds a head of its own

    Returns the config, and notes on what follows the layers. Raises LayerError when the config cannot express the stack,
    ShapeError when it cannot express the vocabulary.
    """
    notes: tuple[str, ...] = ()
    if layers:
        new, notes = resize_config(config, structure, layers)
    else:
        new = copy.deepcopy(dict(config))
    dtype = main_dtype(outputs)
    if dtype is not None:
        _set_dtype(new, dtype, everywhere=asked is not None)
    for key in ("quantization_config", "_name_or_path"):  # llama.cpp's converter would call the output by an input's name
        new.pop(key, None)
    if untie:
        vocabulary.untie(new)
    _set_vocabulary(new, outputs, stored)
    return new, notes


def move_alignment_heads(
    generation: Mapping[str, Any], structure: Structure, layers: Mapping[str, Sequence[int]]
) -> Mapping[str, Any]:
    """generation_config.json with `alignment_heads` (Whisper's, pairs of decoder layer and head) for the layers of the output.

    layers  for each stack prefix that changes: the donor's layer behind each output layer

    A layer's heads are those of its last copy. Without any that are left, the key is removed, and transformers then says so.
    """
    heads = generation.get("alignment_heads")
    sources = [layers[stack.prefix] for stack in structure.stacks if stack.kind == "decoder" and stack.prefix in layers]
    if not isinstance(heads, list) or len(sources) != 1:
        return generation
    last = {old: new for new, old in enumerate(sources[0])}
    pairs = [(whole_number(pair[0]), pair[1]) for pair in heads if isinstance(pair, list) and len(pair) == 2]
    moved = [[last[layer], head] for layer, head in pairs if layer in last]
    rest = {key: value for key, value in generation.items() if key != "alignment_heads"}
    return {**generation, "alignment_heads": moved} if moved else rest


def _set_dtype(config: dict[str, Any], dtype: DType, *, everywhere: bool) -> None:
    """Sub-configs follow where they said what the whole said, or its text part; a vision tower kept in float32 keeps saying so.

    everywhere  all tensors were cast, towers too
    """
    stated = [part[key] for part in text_sections(config) for key in _DTYPE_KEYS if isinstance(part.get(key), str)]
    said, is_named = next(iter(stated), None), any(isinstance(config.get(key), str) for key in _DTYPE_KEYS)
    for _, part in sections(config):
        for key in _DTYPE_KEYS:
            if isinstance(part.get(key), str) and (everywhere or part is config or said is None or part[key] == said):
                part[key] = dtype.torch
    if not is_named and not of_diffusers(config):  # its classes take no such setting
        config["dtype"] = dtype.torch


def _set_vocabulary(config: dict[str, Any], outputs: Sequence[TensorSpec], stored: Mapping[str, TensorSpec]) -> None:
    """vocab_size follows an embedding that has more or fewer rows than the donor's own (it came from another model)."""
    rows = vocabulary.count_rows(stored.values(), config)
    tokens = [(stored[s.name], s) for s in outputs if s.name in stored and _has_tokens(stored[s.name], rows)]
    per_layer = [(donors, s) for donors, s in tokens if vocabulary.module_of(s.name) == vocabulary.PER_LAYER]
    for donors, s in per_layer:
        replace_value(config, vocabulary.PER_LAYER_SIZE_KEY, _rows(donors), _rows(s))
    tokens = [pair for pair in tokens if pair not in per_layer]
    changes = {s.name: (_rows(donors), _rows(s)) for donors, s in tokens if donors.shape != s.shape}
    if not changes:
        return
    kept = {s.name: _rows(s) for donors, s in tokens if donors.shape == s.shape}
    old, new = next(iter(changes.values()))
    if len(set(changes.values())) > 1 or old in kept.values():
        counts = {**{name: n for name, (_, n) in changes.items()}, **kept}
        what = "tables of the vocabulary would have different numbers of rows, which config.json cannot express"
        fix = "give all models the same tokenizer and number of rows first"
        raise ShapeError(what, where=next(iter(changes)), details=[f"{name}: {n} rows" for name, n in counts.items()], fix=fix)
    for key in vocabulary.SIZE_KEYS:
        replace_value(config, key, old, new)


def _has_tokens(spec: TensorSpec, rows: int) -> bool:
    return vocabulary.is_vocabulary(spec) or vocabulary.has_tokens(spec, rows)


def _rows(spec: TensorSpec) -> int:
    """Tokens of a tensor that has some; the final_logits_bias of an encoder-decoder is [1, tokens]."""
    return spec.shape[-1] if spec.name.endswith("final_logits_bias") else spec.shape[0]


# ---- Which layer of the donor describes each output layer in config.json.

Shapes = Mapping[str, tuple[int, ...]]


class Counterparts:
    """Finds the donor's layer for a layer of another model."""

    def __init__(self, models: InputModels) -> None:
        self.models = models
        self.names, self.configs, self.donor, self.labels = models.names, models.configs, models.donor, models.labels
        self._shapes: dict[tuple[int, str], list[Shapes]] = {}
        self._kinds: dict[tuple[int, str], list[Hashable]] = {}
        self._alike: dict[str, dict[Hashable, list[int]]] = {}
        self._found: dict[tuple[int, str, int], int] = {}

    def find(self, prefix: str, model: int, layer: int) -> int:
        """The donor's layer that is like `layer` of `model` under the donor's stack `prefix`; the nearest by number.

        Raises LayerError when there is none.
        """
        if model == self.donor:
            return layer
        key = (model, prefix, layer)
        if key not in self._found:
            self._found[key] = self._find(prefix, model, layer)
        return self._found[key]

    def _find(self, prefix: str, model: int, layer: int) -> int:
        theirs, mine = self._shapes_of(self.donor, prefix), self._shapes_of(model, prefix)[layer]
        alike, shapes = self._alike_of(prefix), frozenset(mine.items())
        if shapes not in alike:
            raise self._unlike(prefix, model, layer, theirs[min(layer, len(theirs) - 1)], mine)
        kind, kinds = self._kinds_of(model, prefix)[layer], self._kinds_of(self.donor, prefix)
        if (shapes, kind) not in alike:
            label, donors = self.labels[model], self.labels[self.donor]
            what = f"layer {layer} of {label} is of a kind that no layer of {donors} has, whose config.json the output takes"
            fix = "take layers that both models have, or name the other model as base_model"
            raise LayerError(what, details=[f"{label}: {kind}", f"{donors}: {kinds[alike[shapes][0]]}"], fix=fix)
        same = alike[shapes, kind]
        after = bisect_left(same, layer)
        return min(same[max(0, after - 1) : after + 1], key=lambda i: (abs(i - layer), i))

    def _alike_of(self, prefix: str) -> dict[Hashable, list[int]]:
        """The donor's layers, in order, by their shapes, and by (shapes, kind)."""
        if prefix not in self._alike:
            alike: dict[Hashable, list[int]] = {}
            for i, (shapes, kind) in enumerate(
                zip(self._shapes_of(self.donor, prefix), self._kinds_of(self.donor, prefix), strict=True)
            ):
                key = frozenset(shapes.items())
                alike.setdefault(key, []).append(i)
                alike.setdefault((key, kind), []).append(i)
            self._alike[prefix] = alike
        return self._alike[prefix]

    def _unlike(self, prefix: str, model: int, layer: int, theirs: Shapes, mine: Shapes) -> LayerError:
        differing = next(n for n in dict.fromkeys([*theirs, *mine]) if theirs.get(n) != mine.get(n))
        here, there = (list(s[differing]) if differing in s else "missing" for s in (mine, theirs))
        label, donors = self.labels[model], self.labels[self.donor]
        what = f"the config.json of {donors} cannot express layer {layer} of {label}: "
        what += "none of its own layers has these tensors and shapes"
        details, fix = [f"{label}: {here}", f"{donors}: {there}"], "take layers of models of one architecture and size"
        return LayerError(what, where=f"{prefix}{layer}.{differing}", details=details, fix=fix)

    def _shapes_of(self, model: int, prefix: str) -> list[Shapes]:
        key = (model, prefix)
        if key not in self._shapes:
            names = self.names[model]
            tables = [used_in(self.models, model, prefix, i) for i in range(names.depth.get(prefix, 0))]
            self._shapes[key] = [
                {suffix: names.specs[name].shape for suffix, name in table.items() if not is_buffer(names.specs[name])}
                for table in tables
            ]
        return self._shapes[key]

    def _kinds_of(self, model: int, prefix: str) -> list[Hashable]:
        """What a model's config says of each of its layers, in the terms that the donor's config has too."""
        key = (model, prefix)
        if key not in self._kinds:
            n = self.names[model].depth.get(prefix, 0)
            mine, theirs = self._home(model, prefix), self._home(self.donor, prefix)
            n_donor = self.names[self.donor].depth.get(prefix, 0)
            said: list[tuple[Hashable, ...]] = []
            for name, value in theirs.items():
                if _per_layer(name, value, n_donor) and _per_layer(name, mine.get(name), n):
                    said.append(tuple(f"{name} = {v!r}" for v in mine[name][:n]))
            if not said:  # model code reads the list, if there is one; numbers next to it may be stale
                said = [tuple(rule.kinds(mine, n)) for rule in rules_for(theirs) if rule.applies(mine)]
            self._kinds[key] = list(zip(*said, strict=True)) if said else [()] * n
        return self._kinds[key]

    def _home(self, model: int, prefix: str) -> Mapping[str, Any]:
        """The part of a model's config that describes a stack."""
        names, config = self.names[model], self.configs[model] or {}
        stack: Stack | None = next((s for s in names.structure.stacks if names.paired[s.prefix] == prefix), None)
        return stack.section(config) if stack is not None else config


def _per_layer(name: str, value: Any, n_layers: int) -> bool:
    return isinstance(value, list | str) and is_per_layer(name, value, Remap(tuple(range(n_layers)), n_layers))


# ---- tensors that files hold although the model never uses them


NEVER_USED = "its layer uses the keys and values of an earlier one"

_OWN_KEYS = re.compile(r"^self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
_PARTS = {"self_attn.q_proj.weight", "per_layer_input_gate.weight"}


def shares_keys(names: ModelNames, config: Mapping[str, Any] | None, prefix: str, layer: int) -> bool | None:
    """Whether a layer uses the keys and values of an earlier one; None if the model has no config.json.

    prefix  the donor's, of the layer's stack
    """
    if config is None:
        return None
    stack = next((s for s in names.structure.stacks if names.paired[s.prefix] == prefix), None)
    section = config if stack is None else stack.section(config)
    sharing = whole_number(section.get("num_kv_shared_layers")) or 0
    return layer >= names.depth.get(prefix, 0) - sharing


def is_unused(models: InputModels, prefix: str, suffix: str, layers: Sequence[tuple[int, int]]) -> bool:
    """True for a tensor that no model with it uses. Not all models store it.

    prefix, suffix  of its name: the donor's stack, and what follows the number of the layer
    layers          each model that feeds it, and the layer in it

    A file without config.json is taken to share as another model visibly does.
    """
    if not _OWN_KEYS.match(suffix):
        return False
    stored = [(m, layer) for m, layer in layers if suffix in models.names[m].layers.get(prefix, {}).get(layer, {})]
    said = [shares_keys(models.names[model], models.configs[model], prefix, layer) for model, layer in stored]
    if None in said and not any(_lacks_keys(models.names[model], prefix, layer) for model, layer in layers):
        return False
    return False not in said


def _lacks_keys(names: ModelNames, prefix: str, layer: int) -> bool:
    """True if a Gemma with inputs for each layer has queries and no keys from a layer on."""
    tables = [names.layers.get(prefix, {}).get(i, {}) for i in range(layer, names.depth.get(prefix, 0))]
    return layer > 0 and all(_PARTS <= table.keys() and not any(map(_OWN_KEYS.match, table)) for table in tables)


def used_in(models: InputModels, model: int, prefix: str, layer: int) -> dict[str, str]:
    """The tensors of a layer that its model uses: name inside the layer → the model's own name."""
    names = models.names[model]
    table = names.layers.get(prefix, {}).get(layer, {})
    if not shares_keys(names, models.configs[model], prefix, layer):
        return table
    return {suffix: name for suffix, name in table.items() if not _OWN_KEYS.match(suffix)}
