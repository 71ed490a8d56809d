"""A recipe as frozen values: what the user wrote, checked for form and nothing resolved.

Which parameters the method has, whether models exist and layers fit is for the plan to find out, and `where` for its
messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weightsmith.errors import Finding
from weightsmith.recipe.values import Setting
from weightsmith.tensors import DType

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
class Input:
    """An entry of `models` (no layer_range) or of `sources` (layers first, one past the last).

    matched  of an entry that a pattern stood for: the number of this match, oldest first, and how many there are
    """

    model: ModelRef
    layer_range: tuple[int, int] | None
    parameters: Parameters
    where: str
    range_where: str = ""
    matched: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """An entry of `slices`: a run of output layers and the sources they are made of."""

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
class Recipe:
    """A whole recipe; exactly one of `models`, `slices` and `modules` is filled.

    name       label of the recipe, "" when there is none; without effect
    text       the recipe byte for byte (for a Python mapping: as YAML)
    filename   as shown in positions
    findings   warnings: what was written and has no effect
    positions  of the top-level keys; see `at`
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
    findings: tuple[Finding, ...] = ()
    positions: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        """For messages, where it is written in the place of a model."""
        return f"the merge by {self.merge_method} at {self.positions.get('merge_method', self.filename)}"

    def at(self, key: str) -> str:
        """Position of a top-level key, or the file's when the recipe has no such key."""
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
    """A recipe of `weightsmith moe` that leaves experts of a mixture of experts out, or merges them.

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
    """A recipe of `weightsmith moe` that makes a mixture of experts of dense models.

    base      a model, or the recipe of a merge that is made on the way
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
