"""The plan of `weightsmith transplant-tokenizer`.

It is the plan of a recipe that copies the model with the donor's tokenizer (`_planning/planner/vocabulary.py`):
config.json, files and all other tensors are as that recipe makes them. Then the tables of the vocabulary get their rows: the
model's own where it has the token (`_models/tokenizers/matching.py`), the others from the product (`rows.py`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weightsmith._base.errors import NotFound, PlanError, Unsupported, WeightsmithError, as_plan_error, first_line
from weightsmith._base.files import expand_user, file_names, is_folder, read_bounded
from weightsmith._base.installation import install_package
from weightsmith._base.options import option_error
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.torch_use import needs_torch
from weightsmith._features.transplant.approximations import APPROXIMATIONS, find_approximation
from weightsmith._features.transplant.options import TransplantSettings
from weightsmith._features.transplant.rows import RowTable, RowWork
from weightsmith._files.copied import copied_files, is_tokenizer
from weightsmith._files.subfolders import template_names
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import vocabulary
from weightsmith._models.structure.configs import count_of, number_of, rope_settings, text_sections, with_defaults
from weightsmith._models.tokenizers.convert import convert
from weightsmith._models.tokenizers.files import settings_of
from weightsmith._models.tokenizers.matching import WAYS, Match, match, pieces_of, roles_of, same_roles, unused_row
from weightsmith._models.tokenizers.vocabulary import MAX_FILE_BYTES, Vocabulary, contents_of, read_vocabulary
from weightsmith._planning import recipe as recipes
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import assemble_recipe
from weightsmith._planning.planner.files import held_files, joined, lacking
from weightsmith._planning.planner.inputs import open_models
from weightsmith._planning.planner.prepared import PlanRequest, Prepared, model_input
from weightsmith._planning.recipe import ModelRef
from weightsmith._planning.recipe.values import parse_reference
from weightsmith._plans import PRODUCTS, Block, Gather, PlanDraft, Provenance, Read, Step
from weightsmith._plans import Table as Numbers
from weightsmith._version import __version__
from weightsmith.abc.approximation import Approximation, Choices

COMMAND = "transplant-tokenizer"

_MODEL, _DONOR = 0, 1
_UNUSED = re.compile(r"unused|reserved", re.IGNORECASE)
_MAX_TEXT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Side:
    """The model, or the one whose tokenizer the output has. model: None for a folder with a tokenizer alone."""

    label: str
    folder: Path
    files: tuple[str, ...]
    config: Mapping[str, Any] | None
    model: Checkpoint | None = None

    @classmethod
    def of(cls, model: Checkpoint) -> _Side:
        """A model, with the files of its tokenizer on this disk."""
        model.fetch([name for name in model.files if is_tokenizer(name)])
        return cls(model.ref, model.folder, model.files, model.config, model)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Its tensors."""
        return () if self.model is None else tuple(self.model.specs.values())

    @property
    def rows(self) -> int:
        """Rows of its tables; 0 without any."""
        return vocabulary.count_rows(self.specs, self.config)

    @property
    def ties(self) -> bool:
        """Its embedding is its head."""
        return vocabulary.ties(self.config, stores_head=any(map(vocabulary.is_head, self.specs)))

    def read(self, seen: dict[str, Vocabulary]) -> Vocabulary:
        """Its vocabulary. Raises NotFound."""
        vocabulary = read_vocabulary(self.label, self.folder, self.files, seen)
        if vocabulary is None:
            fix = "put its tokenizer.json next to its weights"
            raise NotFound("it has no tokenizer that can be read", where=self.label, fix=fix)
        return vocabulary


def prepare_transplant(model: str | os.PathLike[str], donor: str | os.PathLike[str], settings: TransplantSettings) -> Prepared:
    """Plan the model with the tokenizer of the donor.

    model  as in a recipe: a folder, a hub id, `base+adapter`
    donor  the same; or a folder with a tokenizer alone

    Raises PlanError with all problems.
    """
    approximation = find_approximation(settings.approximation)
    if approximation.torch and (missing := needs_torch()):
        what = missing.replace("this method", f"the approximation {approximation.name}")
        raise PlanError([option_error("approximation", what)])
    with ExitStack() as stack:
        side = _open_donor(donor, stack)
        _check_donor(side, approximation, settings)
        assembled = _copy(model, donor, side.rows, settings)
        stack.callback(assembled.close)
        with as_plan_error():
            _Transplant(assembled, side, settings, approximation).fill()
            prepared = assembled.finish()
        stack.pop_all()
        return prepared


def _open_donor(donor: str | os.PathLike[str], stack: ExitStack) -> _Side:
    name = os.fspath(donor)
    folder = expand_user(name)
    if is_folder(folder):
        names = (*file_names(folder), *template_names(folder))
        if any(map(is_tokenizer, names)) and not any(
            name.endswith((".safetensors", ".bin", ".gguf", ".pt", ".pth")) for name in names
        ):
            return _Side(name, folder, names, settings_of(folder, names, "config.json") or None)
    ref = parse_reference(name, "DONOR")
    if not isinstance(ref, ModelRef):
        raise PlanError([ref])
    (model,), problems = open_models([ref], stack)
    if model is None:
        raise PlanError(problems)
    return _Side.of(model)


def _check_donor(donor: _Side, approximation: Approximation, settings: TransplantSettings) -> None:
    """Raise PlanError if the donor has no embeddings and these are needed."""
    if donor.model is not None:
        return
    needing = (
        f"the approximation {approximation.name}" if approximation.donor else "the filter magikarp" if settings.magikarp else ""
    )
    if needing:
        others = ", ".join(known.name for known in APPROXIMATIONS if not known.donor)
        what = f"{needing} needs the donor's embeddings, and this is a tokenizer alone"
        fix = f"name a model as donor, or use one of {others}" + (", without magikarp" if settings.magikarp else "")
        raise PlanError([Unsupported(what, where=donor.label, fix=fix)])


def _copy(model: str | os.PathLike[str], donor: str | os.PathLike[str], rows: int, settings: TransplantSettings) -> Prepared:
    """The draft of the recipe that copies the model with the donor's tokenizer. rows: of the output; 0: one for each id."""
    source = parse_reference(os.fspath(donor), "DONOR")  # a folder may have the name of a word of the recipe, such as `base`
    if not isinstance(source, ModelRef):
        raise PlanError([source])
    loaded = recipes.load(recipes.copy_of(model, tokenizer={"source": "base"}), "merge")
    if not isinstance(loaded.recipe, recipes.Recipe) or loaded.recipe.tokenizer is None:
        raise PlanError(list(loaded.problems))
    asked = replace(loaded.recipe, tokenizer=replace(loaded.recipe.tokenizer, source=source, rows=rows))
    options = RecipeOptions(seed=settings.seed, max_shard_bytes=settings.max_shard_bytes)
    return assemble_recipe(PlanRequest(asked, options, problems=tuple(loaded.problems)))


class _Transplant:
    """One call of `prepare_transplant`."""

    def __init__(self, assembled: Prepared, donor: _Side, settings: TransplantSettings, approximation: Approximation) -> None:
        self.assembled, self.donor, self.settings, self.approximation = assembled, donor, settings, approximation
        self.model, seen = _Side.of(assembled.inputs[_MODEL]), dict[str, Vocabulary]()
        self.model_vocabulary, self.out = self.model.read(seen), donor.read(seen)
        self.size, self.rows = self.model.rows, donor.rows or max(self.out.tokens) + 1
        self.reads_donor = donor.model is not None and (approximation.donor or settings.magikarp)
        self.specs = assembled.inputs[_MODEL].specs

    def fill(self) -> None:
        """Change the draft: rows in the donor's order, and a product for those that are missing."""
        draft = self.assembled.draft
        tables = [i for i, step in enumerate(draft.steps) if self._is_table(step)]
        places = [i for i in tables if draft.steps[i].out.dtype.floating]
        if not places:
            what = "no tensor of the model has a row for each token"
            raise Unsupported(what, where=self.model.label, fix="name a language model")
        matches = {kind: self._match(kind) for kind in ("embedding", "head")}
        row_tables = [self._table(draft.steps[i], matches) for i in places]
        missing = [(i, table) for i, table in zip(places, row_tables, strict=True) if table.missing]
        draft.tables = []
        for i, table in zip(places, row_tables, strict=True):
            draft.steps[i] = _gathered(draft.steps[i], table, draft)
        if len(places) < len(tables):
            rows = rows_of(matches["embedding"], self.out, self.model_vocabulary, self.size)
            numbers = draft.add_table(Numbers.of(rows))
            for i in tables:
                if i not in places:
                    draft.steps[i] = self._with_rows(draft.steps[i], numbers)
        draft.products = []
        if missing:
            work = self._work([table for _, table in missing], matches["embedding"])
            dtypes = [draft.steps[i].out.dtype for i, _ in missing]
            draft.products.append(work.product(dtypes, [s for _, table in missing for s in self._reading(table)]))
        donor = [] if self.donor.model is None else [self.donor.model]
        draft.models += map(model_input, donor)
        held = held_files(draft, self.assembled.inputs[draft.donor].folder)
        draft.lacking = joined([draft.lacking, lacking([(self.donor.label, copied_files(self.donor.files))], held)])
        how = f"transplanted with weightsmith {__version__}, approximation `{self.approximation.name}`."
        title = f"The tokenizer of `{self.donor.label}` {how}"
        draft.provenance = Provenance(COMMAND, title, _SOURCE + self.approximation.source, relation="merge")
        draft.vocabulary = self._summary(matches["embedding"])
        draft.recipe, draft.follows_recipe = self._settings(), False
        self.assembled.inputs = [*self.assembled.inputs, *donor]

    # ---- tokens

    def _match(self, kind: str) -> Match:
        """The model's rows for the donor's tokens, in one kind of table."""
        allowed = ("yes", "lm_head" if kind == "head" else "embed")
        donors = roles_of(self.out, self.donor.folder, self.donor.files, self.donor.config)
        model_roles = roles_of(self.model_vocabulary, self.model.folder, self.model.files, self.model.config)
        byte, prefix = self.settings.byte_match in allowed, self.settings.prefix_match in allowed
        return match(
            self.out, self.model_vocabulary, self.rows, self.size, same_roles(donors, model_roles), byte=byte, prefix=prefix
        )

    # ---- tables

    def _is_table(self, step: Step) -> bool:
        spec = self.specs.get(step.out.name)
        return spec is not None and len(step.inputs) == 1 and vocabulary.has_tokens(spec, self.size)

    def _table(self, step: Step, matches: Mapping[str, Match]) -> RowTable:
        spec = self.specs[step.out.name]
        head = vocabulary.is_head(spec) and not self.model.ties
        kind = "bias" if 1 in spec.shape or len(spec.shape) == 1 else "head" if head else "embedding"
        token_match = matches["head" if head else "embedding"]
        height = spec.size if kind == "bias" else spec.shape[0]
        theirs = self._counterpart(kind)
        n = step.out.size * height // spec.size  # Gemma 3n's per-layer embeddings have fewer rows than there are tokens
        missing = (
            range(n) if self.settings.magikarp and kind != "bias" else token_match.missing[token_match.missing < n].tolist()
        )
        model_rows = [row if row < height else -1 for row in token_match.rows[:n].tolist()]
        return RowTable(
            name=spec.name,
            kind=kind,
            cols=(spec.size // height, 0 if theirs is None else theirs.shape[1]),
            sizes=(height, 0 if theirs is None else theirs.shape[0]),
            model_rows=tuple(model_rows),
            missing=tuple(missing),
        )

    def _with_rows(self, step: Step, table: int) -> Step:
        """The step with the model's rows in the order of a table of the plan."""
        spec = self.specs[step.out.name]
        height = spec.shape[0]
        block = Block(0, height, spec.size // height, spec.size // height)
        return replace(step, inputs=(Read(_MODEL, spec.name, Gather(table, block)),))

    def _counterpart(self, kind: str) -> TensorSpec | None:
        """The donor's table for one of the model's: its head for a head, if it has one, else its embedding."""
        if not self.reads_donor or kind == "bias":
            return None
        rows, ties = self.donor.rows, self.donor.ties
        tables = [spec for spec in self.donor.specs if vocabulary.is_vocabulary(spec) and spec.shape[0] == rows]
        heads = [spec for spec in tables if vocabulary.is_head(spec) and kind == "head" and not ties]
        candidates = [*heads, *(spec for spec in tables if not vocabulary.is_head(spec)), *tables]
        if not candidates:
            what = "no tensor of the donor has a row for each token"
            raise Unsupported(what, where=self.donor.label, fix="name a language model")
        return candidates[0]

    def _reading(self, table: RowTable) -> Iterator[Step]:
        """The steps that the product reads a table with."""
        theirs = self._counterpart(table.kind)
        donor = None if theirs is None else (_DONOR, theirs)
        return table.steps([(_MODEL, self.specs[table.name]), donor])

    # ---- the product

    def _work(self, tables: Sequence[RowTable], token_match: Match) -> RowWork:
        settings, missing = self.settings, sorted({number for table in tables for number in table.missing})
        texts = {number: self.out.key(self.out.tokens[number]) for number in missing if number in self.out.tokens}
        pieces: dict[str, tuple[int, ...]] = {}
        if self.approximation.pieces:
            pieces_of_token = pieces_of(texts.values(), self.model_vocabulary, self.size)
            pieces = {str(number): numbers for number, numbers in zip(texts, pieces_of_token, strict=True) if numbers}
        same = {WAYS.index("same token"), WAYS.index("same byte")}
        special = {self.out.ids[token] for token in self.out.added if self.out.is_special(token)}
        ways, rows = token_match.ways.tolist(), token_match.rows.tolist()
        return RowWork(
            approximation=self.approximation.name,
            choices=self._choices(),
            match_norms=settings.match_norms,
            noise=settings.new_vocab_noise or 0.0,
            scale=1.0 if settings.new_vocab_scale is None else settings.new_vocab_scale,
            magikarp=settings.magikarp,
            tables=tuple(tables),
            shared=tuple(i for i, way in enumerate(ways) if way in same and rows[i] >= 0 and i not in special),
            pieces=pieces,
            unused=(_unused(self.model_vocabulary, self.size), _unused(self.out, self.rows)) if settings.magikarp else ((), ()),
            untied=(not self.model.ties, self.donor.model is not None and not self.donor.ties),
            tokens={str(number): text.decode("utf-8", "backslashreplace") for number, text in texts.items()},
            counts=self._counts(set(missing)),
        )

    def _choices(self) -> Choices:
        settings = self.settings
        reads = "heads" in self.approximation.reads
        model_geometry, donor_geometry = (_geometry(side) if reads else (1, 1e4) for side in (self.model, self.donor))
        return Choices(
            k=settings.k,
            weight_scheme=settings.weight_scheme,
            cosine_similarity=settings.cosine_similarity,
            subword_method=settings.subword_method,
            heads=(model_geometry[0], donor_geometry[0]),
            rope_bases=(model_geometry[1], donor_geometry[1]),
            seed=settings.seed,
        )

    def _counts(self, missing: set[int]) -> dict[str, int] | None:
        """How often the missing tokens occur in the user's text."""
        if self.settings.report_text is None:
            return None
        path = expand_user(self.settings.report_text)
        try:
            text = read_bounded(path, _MAX_TEXT_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise NotFound(f"the text cannot be read: {first_line(error)}", where=str(path), fix="name a text file") from error
        try:
            from tokenizers import Tokenizer

            if "tokenizer.json" in self.donor.files:
                content = read_bounded(self.donor.folder / "tokenizer.json", MAX_FILE_BYTES).decode()
            else:
                content = convert(self.out, contents_of(self.donor.folder, self.donor.files)).data.decode()
            tokenizer = Tokenizer.from_str(content)
            tokenizer.no_truncation()
            counts = Counter(tokenizer.encode(text, add_special_tokens=False).ids)
        except ImportError as error:
            what = "report_text needs the package tokenizers, which is not installed"
            raise option_error("report_text", what, f"run {install_package('tokenizers')}") from error
        except WeightsmithError:
            raise
        except Exception as error:  # tokenizers raises anything
            what = f"the donor's tokenizer cannot be used on the text: {first_line(error)}"
            raise Unsupported(what, where=str(path), fix="leave out report_text") from error
        return {str(number): counts[number] for number in sorted(missing & counts.keys())}

    # ---- about the plan

    def _summary(self, token_match: Match) -> dict[str, Any]:
        counts = Counter(token_match.ways.tolist())
        sources = {_DESCRIBED.get(way, way): counts[i] for i, way in enumerate(WAYS) if counts[i]}
        return {
            "tokenizer": self.donor.label,
            "rows": self.rows,
            "rows_before": self.size,
            "tokens": len(self.out.tokens),
            "sources": sources,
        }

    def _settings(self) -> str:
        """The settings, for the card."""
        import yaml

        defaults = asdict(TransplantSettings())
        chosen = {name: value for name, value in asdict(self.settings).items() if value != defaults[name]}
        models = {"model": self.assembled.draft.models[_MODEL].ref, "donor": self.donor.label}
        return yaml.safe_dump(
            {COMMAND: {**models, "approximation": self.approximation.name, **chosen}}, sort_keys=False, allow_unicode=True
        )


_SOURCE = "Tokens that both have keep the rows of the model; missing tokens: "
_DESCRIBED = {"missing": "approximated", "no token": "rows without a token"}


def _gathered(step: Step, table: RowTable, draft: PlanDraft) -> Step:
    """The step with its rows in the order of the output. draft: gets the tables."""
    height, cols, n = table.sizes[0], table.cols[0], len(table.missing)
    approximated = dict.fromkeys(table.missing)
    model_rows = [-1 if number in approximated else row for number, row in enumerate(table.model_rows)]
    if model_rows == list(range(height)):
        return replace(step, inputs=(Read(_MODEL, table.name),))
    fallback: tuple[Read, ...] = ()
    if n:
        places = {number: k for k, number in enumerate(table.missing)}
        numbers = [places.get(number, -1) for number in range(len(model_rows))]
        view = Gather(draft.add_table(Numbers.of(numbers)), Block(0, n, cols, cols))
        fallback = (Read(PRODUCTS, f"{table.name}: rows", view),)
    view = Gather(draft.add_table(Numbers.of(model_rows)), Block(0, height, cols, cols), 0, fallback)
    return replace(step, inputs=(Read(_MODEL, table.name, view),))


def _unused(tokens: Vocabulary, size: int) -> tuple[int, ...]:
    """Rows that are surely not trained: padding, and tokens that are called unused or reserved."""
    return tuple(
        i
        for i in range(size)
        if i not in tokens.tokens or (tokens.tokens[i] in tokens.added and _UNUSED.search(tokens.tokens[i]))
    )


def _geometry(model: _Side) -> tuple[int, float]:
    """Attention heads and RoPE base."""
    sections = text_sections(model.config or {})
    section = next((s for s in sections if "num_attention_heads" in s), {})
    heads = count_of(section, "num_attention_heads", where=model.label)
    rope = rope_settings(with_defaults(section), model.label)
    base = number_of({**with_defaults(section), **rope}, "rope_theta", 0, where=model.label)
    width = next((s.shape[1] for s in model.specs if vocabulary.is_embedding(s)), 0)
    if base <= 1:
        what = f"mp_rope needs the base of RoPE, and rope_theta of config.json is {'missing' if not base else f'{base:g}'}"
        raise Unsupported(what, where=model.label, fix="Add it to config.json, or use omp.")
    if not heads or width % (2 * heads):
        what = f"mp_rope needs an embedding whose width ({width}) is a multiple of twice the attention heads ({heads})"
        raise Unsupported(what, where=model.label, fix="use omp")
    return heads, base


# ---- Rows of tables that hold whole numbers for each token, such as the experts that DeepSeek V4 routes it to


def rows_of(token_match: Match, out: Vocabulary, model: Vocabulary, size: int) -> list[int]:
    """The model's row for each id of the output.

    token_match  rows of the tokens that both have
    size   rows of the model
    """
    rows: list[int] = token_match.rows.tolist()
    missing = [number for number, row in enumerate(rows) if row < 0]
    texts = [out.key(out.tokens[number]) if number in out.tokens else b"" for number in missing]
    unused = unused_row(model, size)
    for number, pieces in zip(missing, pieces_of(texts, model, size), strict=True):
        rows[number] = pieces[0] if pieces else unused
    return rows
