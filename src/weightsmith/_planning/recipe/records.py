"""A recipe as frozen values, checked for form only. Nothing is resolved yet.

Which parameters the method has, whether models exist and layers fit is for the plan to find out, and `where` for its
messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weightsmith._base.errors import Finding
from weightsmith._base.tensors import DType
from weightsmith._planning.recipe.values import Setting

Parameters = Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as named in the recipe. Equal when paths and revisions are, wherever they were written.

    path      folder, file or hub id
    revision  branch, tag or commit; "" when none is named
    text      `path@revision`, or `base+adapter`, for messages
    where     position
    lora      an adapter that is applied to it
    """

    path: str
    revision: str = ""
    text: str = field(default="", compare=False)
    where: str = field(default="", compare=False)
    lora: ModelRef | None = None

    def __str__(self) -> str:
        return self.text

    def with_lora(self, lora: ModelRef) -> ModelRef:
        """This model with an adapter."""
        return replace(self, text=f"{self}+{lora}", lora=lora)


@dataclass(frozen=True, slots=True)
class TextRef:
    """A text that models are measured on.

    path    a file, or `built-in`
    rows    of tokens that are read; None: as many as the text has, with a limit
    tokens  of a row; None: the default of a calibration
    where   position
    """

    path: str
    rows: int | None = None
    tokens: int | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Input:
    """An entry of `models` (no layer_range) or of `sources` (layers first, one past the last).

    matched  of an entry that a pattern stood for: the number of this match, oldest first, and how many there are
    measured the text that this model is measured on, of an entry of `models`
    """

    model: ModelRef
    layer_range: tuple[int, int] | None
    parameters: Parameters
    where: str
    range_where: str = ""
    matched: tuple[int, int] | None = None
    measured: TextRef | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """An entry of `slices`: a run of output layers and their sources."""

    sources: tuple[Input, ...]
    base_model: ModelRef | None
    parameters: Parameters
    where: str


@dataclass(frozen=True, slots=True)
class Module:
    """An entry of `modules`; exactly one of `models` and `slices` is filled."""

    name: str
    where: str
    models: tuple[Input, ...] = ()
    slices: tuple[Slice, ...] = ()
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRule:
    """An entry of `tokenizer.tokens`: where models without a token take its row from.

    model   whose row; None: the choice is left to the merge, or zeros
    other   another token of that model, or its id; None: the token itself
    chosen  the recipe names a kind of row: without a model, zeros
    force   models that have the token take the row too
    """

    token: str
    where: str
    model: ModelRef | None = None
    other: str | int | None = None
    chosen: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Whose tokenizer the output has, and its rows.

    source    "union", "base" or a model
    multiple  the number of rows is rounded up to a multiple of it
    rows      of a source that is not in the merge; 0: one for each id
    """

    source: str | ModelRef
    where: str
    rules: tuple[TokenRule, ...] = ()
    multiple: int = 1
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe; exactly one of `models`, `slices` and `modules` is filled.

    name       by which other recipes of the file use its result as a model; "" when there is none
    tokenizer  None: the donor's files are copied, and rows are merged by number
    measured   the text that models are measured on, for methods that look at one
    chat_template  "" for the tokenizer's own, `auto`, a name, a path, or the template
    text       the recipe byte for byte (for a Python mapping: as YAML)
    filename   as shown in positions
    findings   warnings: what was written and has no effect
    positions  of the top-level keys; see `at`
    stages     the recipes whose results are models here, by `ModelRef.path`: those of the file, and those inside it. None: a
               recipe that could not be read
    """

    merge_method: str
    text: str
    filename: str
    base_model: ModelRef | None = None
    models: tuple[Input, ...] = ()
    slices: tuple[Slice, ...] = ()
    modules: tuple[Module, ...] = ()
    parameters: Parameters = field(default_factory=dict)
    dtype: DType | None = None
    out_dtype: DType | None = None
    name: str = ""
    tokenizer: Tokenizer | None = None
    measured: TextRef | None = None
    chat_template: str = ""
    findings: tuple[Finding, ...] = ()
    positions: Mapping[str, str] = field(default_factory=dict, compare=False)
    stages: Mapping[str, Recipe | None] = field(default_factory=dict, compare=False)

    @property
    def references(self) -> Iterator[ModelRef]:
        """Every model that it names: the base, then in the order of the text, then the bases of single slices.

        The base of one slice must not become the donor of config and tokenizer by standing first.
        """
        parts: list[Recipe | Module] = [self, *self.modules]
        if self.base_model is not None:
            yield self.base_model
        for part in parts:
            yield from (i.model for i in part.models)
            for s in part.slices:
                yield from (i.model for i in s.sources)
        for part in parts:
            yield from (s.base_model for s in part.slices if s.base_model is not None)

    def __str__(self) -> str:
        """For messages about a merge used as a model."""
        return f"the merge by {self.merge_method} at {self.positions.get('merge_method', self.filename)}"

    def at(self, key: str) -> str:
        """Position of a top-level key, or of the file if the recipe has no such key."""
        return self.positions.get(key, self.filename)


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of a level that has no record of its own.

    values     by key
    where      position
    positions  of the keys' values
    """

    values: Mapping[str, Any]
    where: str
    positions: Mapping[str, str]

    def at(self, key: str) -> str:
        """Position of a key's value, or of the whole."""
        return self.positions.get(key, self.where)


@dataclass(frozen=True, slots=True)
class Expert:
    """An entry of `experts` or `shared_experts`; see the grammar for what each key means. Files: "" when none is named."""

    model: ModelRef | Recipe
    section: Section
    positive_prompts: tuple[str, ...] = ()
    negative_prompts: tuple[str, ...] = ()
    prompts_file: str = ""
    held_out_file: str = ""
    noise_scale: float = 0.0
    noise_fraction: float = 1.0
    drop_fraction: float = 0.0
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Surgery:
    """A recipe of `weightsmith moe` that prunes or merges the experts of a mixture.

    prune, merge  exactly one is given; see the grammar for their keys
    """

    model: ModelRef
    prune: Section | None
    merge: Section | None
    section: Section
    text: str
    filename: str
    findings: tuple[Finding, ...] = ()
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class Upcycling:
    """A recipe of `weightsmith moe` that builds a mixture of experts from dense models.

    base      a model, or the recipe of a merge to use as the base
    gate_mode "" when the recipe names none
    prompt_tokens  None: a paragraph of a text file is a prompt
    """

    base: ModelRef | Recipe
    experts: tuple[Expert, ...]
    experts_per_token: int
    section: Section
    text: str
    filename: str
    findings: tuple[Finding, ...] = ()
    shared_experts: tuple[Expert, ...] = ()
    architecture: str = ""
    gate_mode: str = ""
    prompt_tokens: int | None = None
    router_scale: float = 1.0
    virtual_groups: int = 1
    dtype: DType | None = None
