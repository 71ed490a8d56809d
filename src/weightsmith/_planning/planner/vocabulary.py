"""The vocabulary of a merge: the tokenizer of the output, and which rows of the models' embeddings and heads become its rows.

Two steps. `VocabularyPlanner` reads the tokenizers, before the tensors are matched; with it, every embedding and head has the
output's number of rows, whatever it has on disk. `Aligned.place` then turns the reads of the finished steps into gathers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import (
    Finding,
    NotFound,
    ParameterError,
    PlanError,
    UnknownName,
    Unsupported,
    WeightsmithError,
    nearest,
)
from weightsmith._base.files import expand_user, file_names, is_folder, read_bounded, show
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import some
from weightsmith._files.copied import is_tokenizer
from weightsmith._files.subfolders import template_names
from weightsmith._models.checkpoint import Checkpoint, check_links, open_checkpoint
from weightsmith._models.structure import vocabulary
from weightsmith._models.structure.stacks import INDEX
from weightsmith._models.tokenizers.convert import REPLACED, Converted, convert
from weightsmith._models.tokenizers.files import (
    CHAT_TEMPLATES,
    choose_template,
    json_bytes,
    move_ids,
    settings_in,
    settings_of,
    template_of,
    with_added,
)
from weightsmith._models.tokenizers.matching import (
    RowAlignment,
    RowRule,
    Rows,
    United,
    align,
    extend,
    is_marker,
    left_out,
    missing_tokens,
    roles_of,
)
from weightsmith._models.tokenizers.vocabulary import MAX_FILE_BYTES, Vocabulary, contents_of, digest_of, read_vocabulary
from weightsmith._planning.planner.files import CHOOSE_TOKENIZER, GENERATION, Companions, own_code
from weightsmith._planning.planner.inputs import at, changed, find_model
from weightsmith._planning.recipe import ModelRef, Recipe, Tokenizer, TokenRule
from weightsmith._plans import Block, Dropped, Gather, Read, Step, Table

_PREFERRED = frozenset({"tekken.json"})
"""Files beside tokenizer.json that list all tokens too. Programs with mistral_common read them instead."""

Specs = Mapping[str, TensorSpec]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _TokenizerFolder:
    """A folder with the files of a tokenizer; of a model on the Hub those that were fetched."""

    label: str
    folder: Path
    files: tuple[str, ...]
    checkpoint: Checkpoint | None = None

    def fetch(self, *others: str) -> None:
        """Download the files of the tokenizer, and some others."""
        if self.checkpoint is not None:
            self.checkpoint.fetch([name for name in self.files if is_tokenizer(name) or name in others])


@dataclass
class Aligned:
    """What the output's vocabulary makes of a merge.

    models     the tensors of each model, by name; labels, configs and counts (of rows) of each
    specs      the same, with the output's rows
    where      what asks for the vocabulary, for messages
    files      to write; they replace the donor's
    removed    files of the donor that the output does not have
    named      files that the recipe names
    summary    for `weightsmith plan`: `Plan.vocabulary`
    tokenizer, template  index of the model whose tokenizer or chat template the output has; None if the recipe chooses it
    """

    models: Sequence[Specs]
    labels: Sequence[str]
    configs: Sequence[Mapping[str, Any] | None]
    counts: Sequence[int]
    alignment: RowAlignment | None
    specs: list[Specs]
    where: str = "vocabulary"
    files: dict[str, bytes] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    named: tuple[Path, ...] = ()
    summary: dict[str, Any] | None = None
    tokenizer: int | None = None
    template: int | None = None
    move: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]] | None = None
    findings: list[Finding] = field(default_factory=list)

    def place(
        self, steps: Sequence[Step], counterpart: Callable[[str, int], str | None], dropped: Sequence[Dropped]
    ) -> tuple[list[Step], tuple[Table, ...], tuple[Dropped, ...]]:
        """The steps with the rows of embeddings and heads in the output's order; their tables; what is still not used.

        counterpart  what a model uses as an output tensor outside the layers, by that tensor's name

        Raises PlanError for tensors that cannot follow the vocabulary.
        """
        if self.alignment is None:
            return list(steps), (), tuple(dropped)
        placer = _Placer(self, self.alignment, counterpart)
        placed = [placer.step(step) for step in steps]
        if placer.problems:
            raise PlanError(placer.problems)
        used = {(read.model, read.tensor) for read in placer.fallbacks}
        unused = tuple(d for d in dropped if (d.model, d.tensor) not in used)
        return placed, tuple(map(Table, placer.tables)), unused


class _Placer:
    """Turns reads into gathers. Equal tables are stored once."""

    def __init__(self, aligned: Aligned, alignment: RowAlignment, counterpart: Callable[[str, int], str | None]) -> None:
        self.models, self.counts = aligned.models, aligned.counts
        self.labels, self.configs, self.where = aligned.labels, aligned.configs, aligned.where
        self.alignment = alignment
        self.counterpart = counterpart
        self.tables: dict[bytes, int] = {}
        self.fallbacks: list[Read] = []
        self._limited: dict[tuple[bool, int, int, int], Rows] = {}
        self._blocked: dict[tuple[str, str], tuple[dict[str, None], dict[int, str]]] = {}

    def step(self, step: Step) -> Step:
        if not step.out.size:
            return step
        for read in step.inputs if not step.pieces else step.pieces[0].inputs:
            self._check(read)
        if step.pieces:
            return step
        reads = tuple(self._read(read, step) for read in step.inputs)
        return step if reads == step.inputs else replace(step, inputs=reads)

    def _check(self, read: Read) -> None:
        """Note a tensor that cannot follow the vocabulary."""
        spec, rows = self.models[read.model].get(read.tensor), self.counts[read.model]
        table = self.alignment.model_rows[read.model]
        if spec is None or (len(table) == rows and np.array_equal(table, np.arange(rows))):
            return
        if why := vocabulary.obstacle(spec, rows, self.configs[read.model]):
            kept = min(len(table), rows)
            changing = rows - kept + int((table[:kept] != np.arange(kept)).sum())
            said = f"{self.labels[read.model]}: {changing:,} of {rows:,} ids change; the output has {len(table):,}"
            tensors, by_model = self._blocked.setdefault((re.sub("[0-9]+", "N", read.tensor), why), ({}, {}))
            tensors[read.tensor], by_model[read.model] = None, said

    @property
    def problems(self) -> list[WeightsmithError]:
        """The tensors that cannot follow the vocabulary; alike ones of all layers and models are one."""
        fix = "keep the tokenizer that these tensors were made for, or merge models that have the same tokens"
        problems: list[WeightsmithError] = []
        for (_, why), (tensors, by_model) in self._blocked.items():
            what = f"this tensor cannot follow the change of vocabulary that {self.where} asks for: {why}"
            what += f"; so for {len(tensors) - 1:,} more like it" if len(tensors) > 1 else ""
            problems.append(Unsupported(what, where=next(iter(tensors)), details=list(by_model.values()), fix=fix))
        return problems

    def _read(self, read: Read, step: Step) -> Read:
        out, spec = step.out, self.models[read.model].get(read.tensor)
        if read.view is not None or spec is None or not vocabulary.has_tokens(spec, self.counts[read.model]):
            return read
        height = _height(spec)
        cols = spec.size // height if height else 0
        rows = out.size // cols if cols else 0
        table = self._rows(read.model, height, rows, default=False)
        if rows == height and np.array_equal(table, np.arange(rows)):
            return read
        fallback, nowhere = self._fallback(step, spec, table < 0, rows, cols)
        self.fallbacks += fallback
        if not spec.dtype.floating or INDEX.search(read.tensor):  # zeros would be an expert, or a token without a value
            unused = self.alignment.unused[read.model]
            table = np.where(nowhere, np.int32(unused if unused < height else -1), table).astype(np.int32)
        return replace(read, view=Gather(self._table(table), Block(0, height, cols, cols), 0, tuple(fallback)))

    def _fallback(self, step: Step, spec: TensorSpec, missing: Mask, rows: int, cols: int) -> tuple[list[Read], Mask]:
        """Gathers of the rows that a model's tensor lacks; and which of them no other model has.

        Integers have no mean: the first model that has a row gives it.
        """
        fallback: list[Read] = []
        nowhere = missing.copy()
        for k in range(len(self.models)) if missing.any() else ():
            name = self.counterpart(step.out.name, k) or next((r.tensor for r in step.inputs if r.model == k), None)
            other = None if name is None else self.models[k][name]
            if name is None or other is None or not _height(other):
                continue
            if not (spec.dtype.floating and other.dtype.floating) and spec.dtype is not other.dtype:
                continue
            other_table = self._rows(k, _height(other), rows, default=True)
            if not other.dtype.floating:
                other_table = np.where(nowhere, other_table, np.int32(-1)).astype(np.int32)
            if (missing & (other_table >= 0)).any():
                fallback.append(Read(k, name, Gather(self._table(other_table), Block(0, _height(other), cols, cols))))
                nowhere &= other_table < 0
        return fallback, nowhere

    def _rows(self, model: int, height: int, rows: int, *, default: bool) -> Rows:
        """A model's table for a tensor of `height` rows, of which the output has `rows`."""
        key = (default, model, height, rows)
        if key not in self._limited:
            table = (self.alignment.defaults if default else self.alignment.model_rows)[model][:rows]
            self._limited[key] = np.where(table < height, table, np.int32(-1)).astype(np.int32)
        return self._limited[key]

    def _table(self, rows: Rows) -> int:
        return self.tables.setdefault(Table.of(rows).data, len(self.tables))


def lost_tokens(lost: Sequence[str], where: str) -> list[Finding]:
    """Warnings for ids of a config whose tokens the new tokenizer lacks. lost: from `move_ids`."""
    return [Finding(f"{what}: the new tokenizer lacks its token", where) for what in lost]


def _height(spec: TensorSpec) -> int:
    """Rows of a tensor with a row for each token; of a bias, its elements."""
    return spec.size if len(spec.shape) == 1 or spec.shape[0] == 1 else spec.shape[0]


class VocabularyPlanner:
    """Reads the tokenizers, and decides the output's tokenizer and rows.

    numbers  index of each reference of the recipe
    folder   that paths of the recipe start from
    donor    index of the model that gives names, config.json and other files
    stack    closes what is opened

    Without a key of the recipe the rows are merged by number, and no tokenizer is read unless the models differ in rows: then
    those that differ in padding alone are aligned.
    """

    def __init__(
        self,
        recipe: Recipe,
        labels: Sequence[str],
        numbers: Mapping[ModelRef, int],
        folder: Path,
        opened: Sequence[Checkpoint],
        donor: int,
        stack: ExitStack,
    ) -> None:
        self.recipe, self.labels, self.numbers, self.folder = recipe, labels, numbers, folder
        self.opened, self.donor, self.stack = opened, donor, stack
        self.problems: list[WeightsmithError] = []
        self.counts = [vocabulary.count_rows(c.specs.values(), c.config) for c in opened]
        self.places = [_TokenizerFolder(label, c.folder, c.files, c) for label, c in zip(self.labels, opened, strict=True)]
        self.outside = self.places[0]  # a model that is not in the merge, whose tokenizer the output has
        self.source = donor  # index of the model whose tokenizer the output has; -1: that one
        self.output: Vocabulary | None = None  # the output's, if the recipe asks for one
        self.seen: dict[str, Vocabulary] = {}
        self.template: int | None = None  # index of the model whose chat template the recipe chooses

    def plan(self) -> tuple[Aligned, list[WeightsmithError]]:
        """The vocabulary, and what is wrong with what the recipe asks for."""
        recipe = self.recipe
        specs = [c.specs for c in self.opened]
        configs = [c.config for c in self.opened]
        aligned = Aligned(specs, self.labels, configs, self.counts, None, list(specs))
        try:
            if recipe.tokenizer is not None:
                self._merge(recipe.tokenizer, aligned)
            elif len({count for count in self.counts if count}) > 1:
                self._padding(aligned)
            if recipe.chat_template:
                self._template(recipe.chat_template, aligned)
            self._fill(aligned)
        except WeightsmithError as error:
            self.problems.append(error)
        return aligned, self.problems

    def _fill(self, aligned: Aligned) -> None:
        """Take from another model what the donor lacks of tokenizer, chat template and generation_config.json."""
        recipe, chosen = self.recipe, self.recipe.tokenizer is not None
        companions = Companions(self.labels, self.opened, self.donor, aligned.files, aligned.removed, seen=self.seen)
        if not chosen:
            where = recipe.at("models" if recipe.base_model is None else "base_model")
            companions.fill_tokenizer(where, CHOOSE_TOKENIZER)
        elif self.source >= 0:
            companions.tokenizer = companions.template = self.source
        if not recipe.chat_template and self.source == self.donor:
            companions.fill_template()
        companions.fill_generation(self._moved)
        companions.fill_modules()
        companions.fill_processor()
        if self.template is not None:
            companions.template = self.template
        companions.add_ends(self.output)
        config = copy.deepcopy(dict(self.opened[self.donor].config or {}))
        companions.note_ends(self.output, config if aligned.move is None else aligned.move(config)[0])
        aligned.files, aligned.removed = companions.files, companions.removed
        aligned.findings += companions.findings
        aligned.tokenizer = None if chosen else companions.tokenizer
        aligned.template = None if recipe.chat_template or self.source < 0 else companions.template

    def _moved(self, k: int, data: bytes) -> bytes:
        """A model's generation_config.json with the ids of the output's tokenizer."""
        tokens = self._read(self.places[k])
        if self.output is None or tokens is None or k == self.source:
            return data
        return json_bytes(move_ids(settings_in(data), (), tokens, self.output)[0])

    # ---- which tokenizer

    def _read(self, place: _TokenizerFolder) -> Vocabulary | None:
        place.fetch(GENERATION)
        return read_vocabulary(place.label, place.folder, place.files, self.seen)

    def _padding(self, aligned: Aligned) -> None:
        """Models without a key that have the same tokens, and different numbers of rows."""
        read = [self._read(place) for place, count in zip(self.places, self.counts, strict=True) if count]
        first = read[0]
        if first is None or any(vocab is None or vocab.ids != first.ids for vocab in read):
            return  # the tensors say what is wrong
        rows, sizes = self.counts[self.donor], [count for count in self.counts if count]
        if not rows or any(min(sizes) <= number < max(sizes) for number in first.ids.values()):
            return  # a token has a row in some of the models only
        self._align(aligned, first, rows, [first] * len(self.opened))
        details = [f"{label}: {count:,} rows" for label, count in zip(self.labels, self.counts, strict=True) if count]
        what = f"the models have the same {len(first.tokens):,} tokens and different numbers of rows; the output has {rows:,}"
        aligned.findings.append(Finding(what, "vocabulary", tuple(details)))

    def _merge(self, asked: Tokenizer, aligned: Aligned) -> None:
        """The tokenizer that the recipe asks for."""
        aligned.where = asked.where
        if self._is_shared(asked):
            rows = self.counts[self.donor]
            aligned.summary = {"tokenizer": self.labels[self.donor], "rows": rows, "rows_before": rows, "shared": True}
            return
        read = [self._read(place) for place in self.places]
        source, k = self._source(asked, read)
        if source is None:
            what = f"{self.labels[k] if k >= 0 else asked.source} has no tokenizer that can be read"
            fix = "put its tokenizer.json next to its weights, or remove the key"
            raise NotFound(what, where=asked.where, fix=fix)
        vocabularies = [vocab or source for vocab in read]
        aligned.findings += [
            Finding(f"{label} has no tokenizer that can be read: its rows are taken to be those of {source.label}")
            for vocab, label in zip(read, self.labels, strict=True)
            if vocab is None
        ]
        others = [vocab for vocab in dict.fromkeys(read) if vocab is not None and vocab is not source]
        self.source = k
        united, converted = self._extended(asked, source, others)
        out = self.output = united.vocabulary
        rows = self.counts[k] if k >= 0 else asked.rows or max(out.ids.values()) + 1
        rows = max([rows, *(out.ids[token] + 1 for token in united.new)])
        rows = -(-rows // asked.multiple) * asked.multiple
        self._check_reserved(asked, out, read[self.donor])
        rules = [row_rule for rule in asked.rules if (row_rule := self._rule(rule, out, vocabularies)) is not None]
        if self.problems:
            return
        self._align(aligned, out, rows, vocabularies, rules)
        self._write(aligned, k, source, united, converted)
        assert aligned.summary is not None
        aligned.summary["new"] = list(united.new)
        aligned.summary["left_out"] = {label: n for label, n in left_out(out, others).items() if n}
        self._warn_of_splits(asked, source, united, vocabularies, aligned)

    def _check_reserved(self, asked: Tokenizer, out: Vocabulary, mine: Vocabulary | None) -> None:
        """Add a problem if ids that the donor's model takes for images or audio would change. mine: the donor's tokenizer."""
        reserved = vocabulary.first_reserved(self.opened[self.donor].config)
        if reserved is None:
            return
        first, key = reserved
        theirs = {} if mine is None else mine.tokens
        wrong = [(n, token) for n, token in sorted(out.tokens.items()) if n >= first and theirs.get(n) != token]
        wrong += [(n, token) for n, token in sorted(theirs.items()) if n >= first and n not in out.tokens]
        if wrong:
            number, token = wrong[0]
            what = f"{self.labels[self.donor]} takes ids from {first:,} on for images or audio ({key} of config.json), and "
            what += f"{len(wrong):,} of them would change their tokens, the first of which is {number:,} ({show(token)})"
            fix = f"keep the tokenizer of {self.labels[self.donor]} as it is"
            self.problems.append(Unsupported(what, where=asked.where, fix=fix))

    def _extended(self, asked: Tokenizer, source: Vocabulary, others: Sequence[Vocabulary]) -> tuple[United, Converted | None]:
        """The tokenizer with the tokens that the recipe adds; and what its tokenizer.json is made of, if it has none."""
        new = dict(missing_tokens(source, others, asked.where)) if asked.source == "union" else {}
        for rule in asked.rules:
            if rule.token not in source.ids:
                new.setdefault(rule.token, {"content": rule.token, "special": False})
        if not new:
            return United(source, ()), None
        place = self._source_place
        files = contents_of(place.folder, place.files)
        converted = None if "tokenizer.json" in files else convert(source, files)
        return extend(source, new, files["tokenizer.json"] if converted is None else converted.data), converted

    def _warn_of_splits(
        self, asked: Tokenizer, source: Vocabulary, united: United, vocabularies: Sequence[Vocabulary], aligned: Aligned
    ) -> None:
        """Warn of text that the output splits otherwise than a model was trained on."""
        chosen = {rule.token for rule in asked.rules}
        if plain := [token for token in united.new if token not in chosen and not is_marker(token)]:
            what = f"text is split at added tokens of other models that are ordinary text: {some([*map(show, plain)], 6)}"
            fix = f"use tokenizer_source: base to split text as {self._source_place.label} does"
            fix += "; the output then lacks these tokens"
            aligned.findings.append(Finding(what, asked.where, fix=fix))
        families = {vocab.family for vocab in vocabularies}
        if len(families) > 1:
            what = "the tokenizers are of different families: rows are matched by the bytes of their tokens"
            details = tuple(f"{label}: {vocab.family}" for label, vocab in zip(self.labels, vocabularies, strict=True))
            aligned.findings.append(Finding(what, asked.where, details, "test the result: text is split differently by each"))

    @property
    def _source_place(self) -> _TokenizerFolder:
        """Where the files of the output's tokenizer are."""
        return self.places[self.source] if self.source >= 0 else self.outside

    def _is_shared(self, asked: Tokenizer) -> bool:
        """All models have the donor's tokenizer and rows, and the recipe asks for no other: then nothing is parsed."""
        donors = isinstance(asked.source, str) or find_model(self.numbers, asked.source) == self.donor
        if not donors or asked.rules or len(set(self.counts)) > 1 or self.counts[0] % asked.multiple:
            return False
        for place in self.places:
            place.fetch()
        digests = {digest_of(place.folder, place.files) for place in self.places}
        return len(digests) == 1 and "" not in digests

    def _source(self, asked: Tokenizer, read: Sequence[Vocabulary | None]) -> tuple[Vocabulary | None, int]:
        """The tokenizer to begin with, and the index of its model; -1 if that is not in the merge."""
        if isinstance(asked.source, str):
            return read[self.donor], self.donor
        k = find_model(self.numbers, asked.source)
        if k is not None:
            return read[k], k
        try:
            self.outside = self._open(asked.source)
        except WeightsmithError as error:
            what = error.finding.what + nearest(asked.source.path, ("union", "base"))
            raise at(changed(error, what=what), asked.where) from error
        return self._read(self.outside), -1

    def _open(self, ref: ModelRef) -> _TokenizerFolder:
        """A model that is not in the merge: of a folder, the files alone."""
        folder = expand_user(ref.path)
        if not ref.revision and is_folder(folder):
            names = (*file_names(folder), *template_names(folder))
            check_links(folder, [name for name in names if is_tokenizer(name)])
            return _TokenizerFolder(str(ref), folder, names)
        checkpoint = open_checkpoint(ref.path, revision=ref.revision or None, download=False)
        self.stack.callback(checkpoint.close)
        return _TokenizerFolder(str(ref), checkpoint.folder, checkpoint.files, checkpoint)

    def _rule(self, rule: TokenRule, out: Vocabulary, vocabularies: Sequence[Vocabulary]) -> RowRule | None:
        number = out.ids[rule.token]
        if rule.model is None:
            return RowRule(number, -1, 0, rule.force) if rule.chosen else None
        k = find_model(self.numbers, rule.model)
        if k is None:
            what, fix = (
                f"the source of the token {show(rule.token)} is not in the merge",
                f"name one of {', '.join(self.labels)}",
            )
            self.problems.append(UnknownName(what, where=rule.where, fix=fix))
            return None
        theirs, token = vocabularies[k], rule.token if rule.other is None else rule.other
        row = token if isinstance(token, int) else theirs.ids.get(token)
        if rule.other is None:
            row = theirs.find(out)(rule.token)
        if row is None or not 0 <= row < self.counts[k]:
            what = f"{self.labels[k]} has no row for the token {show(token)}"
            what += "" if row is None else f": it has {self.counts[k]:,} rows, and this is number {row:,}"
            fix = "name a token of that model with {kind: model_token, model: ..., token: ...}"
            self.problems.append(ParameterError(what, where=rule.where, fix=fix))
            return None
        return RowRule(number, k, row, rule.force)

    # ---- rows and files

    def _align(
        self, aligned: Aligned, out: Vocabulary, rows: int, vocabularies: Sequence[Vocabulary], rules: Sequence[RowRule] = ()
    ) -> None:
        base = self.donor if self.recipe.base_model is None else self.numbers[self.recipe.base_model]
        aligned.alignment = align(out, rows, vocabularies, self.labels, self.counts, base, rules)
        aligned.specs = [self._aligned(k, rows) for k in range(len(self.opened))]
        aligned.summary = {
            "tokenizer": self._source_place.label,
            "rows": rows,
            "rows_before": self.counts[self.donor],
            "tokens": len(out.tokens),
            "sources": dict(aligned.alignment.sources),
        }

    def _aligned(self, k: int, rows: int) -> Specs:
        """The tensors of a model, as if they had the output's rows."""
        specs, count = dict(self.opened[k].specs), self.counts[k]
        donor = self.opened[self.donor].specs
        layer_rows = next((s.shape[0] for s in donor.values() if vocabulary.module_of(s.name) == vocabulary.PER_LAYER), 0)
        layer_rows = (
            rows if layer_rows == self.counts[self.donor] else layer_rows
        )  # Gemma 3n's has no rows for tokens of images and audio
        for name, spec in self.opened[k].specs.items():
            if not vocabulary.has_tokens(spec, count):
                continue
            height = (layer_rows or _height(spec)) if vocabulary.module_of(name) == vocabulary.PER_LAYER else rows
            shape = (1, height) if spec.shape[0] == 1 and len(spec.shape) == 2 else (height, *spec.shape[1:])
            if shape != spec.shape:
                specs[name] = replace(spec, shape=shape)
        return specs

    def _write(self, aligned: Aligned, k: int, source: Vocabulary, united: United, converted: Converted | None) -> None:
        """The files of the tokenizer."""
        place = self._source_place
        if k != self.donor:
            aligned.removed = frozenset(name for name in self.places[self.donor].files if is_tokenizer(name))
            names = [name for name in place.files if is_tokenizer(name)]
            aligned.files |= {name: read_bounded(place.folder / name, MAX_FILE_BYTES) for name in names}
            aligned.findings += own_code(place.label, place.folder, place.files)
            self._ids(aligned, k, place, source)
        new, out = united.new, united.vocabulary
        if new:
            aligned.files["tokenizer.json"] = united.tokenizer
            settings = settings_of(place.folder, place.files, "tokenizer_config.json")
            extended = with_added(settings if converted is None else converted.settings(settings), out.added, new)
            if extended != settings:
                aligned.files["tokenizer_config.json"] = json_bytes(extended)
            if converted is not None:
                what = f"{place.label} has no tokenizer.json: that of the output is made from {converted.source}"
                aligned.findings.append(Finding(what, fix="compare what both make of a text"))
            stale = frozenset(place.files) & (REPLACED if converted is not None else _PREFERRED)
            aligned.removed |= stale
            aligned.files = {name: data for name, data in aligned.files.items() if name not in stale}
            if stale and converted is None:
                stale_names = " and ".join(sorted(stale))
                what = f"{stale_names} of {place.label} is left out: it lacks the new tokens, and programs may prefer it"
                aligned.findings.append(Finding(what, fix="load the output with tokenizer.json"))
            if {"added_tokens.json", "tokenizer.model"}.intersection(place.files):  # llama.cpp looks for new tokens there
                listed = settings_of(place.folder, place.files, "added_tokens.json")
                aligned.files["added_tokens.json"] = json_bytes({**listed, **{token: out.ids[token] for token in new}})

    def _ids(self, aligned: Aligned, k: int, place: _TokenizerFolder, source: Vocabulary) -> None:
        """The ids of special tokens in config.json and generation_config.json, which are those of the donor's tokenizer."""
        mine = self.places[self.donor]
        old = self._read(mine)
        config = self.opened[k].config if k >= 0 else settings_of(place.folder, place.files, "config.json")
        generation = settings_of(place.folder, place.files, GENERATION)
        roles = {}
        if not config:  # a tokenizer alone: its own files name its special tokens
            named = roles_of(source, place.folder, place.files, None)
            roles = {f"{role}_token_id": source.ids[token] for role, token in named.items()}
        aligned.move = lambda donors: move_ids(donors, [config or {}, generation, roles], old, source)
        if stored := settings_of(mine.folder, mine.files, GENERATION):
            moved, lost = move_ids(stored, [generation, config or {}, roles], old, source)
            aligned.files[GENERATION] = json_bytes(moved)
            aligned.findings += lost_tokens(lost, GENERATION)

    def _template(self, asked: str, aligned: Aligned) -> None:
        for place in self.places:
            place.fetch()
        templates = [template_of(place.folder, place.files) for place in self.places]
        where = self.recipe.at("chat_template")
        template, path = choose_template(asked, templates, self.folder, where)
        aligned.named = () if path is None else (path,)
        if asked == "auto" and not template:
            fix = f"name one: {', '.join(CHAT_TEMPLATES)}; or leave the line out"
            aligned.findings.append(Finding("no model has a chat template, and neither does the output", where, fix=fix))
            return
        self.template = templates.index(template) if asked == "auto" else -1
        companions = Companions(self.labels, self.opened, self.donor, aligned.files)
        companions.write_template(template, self.template)
        aligned.removed |= companions.removed
