"""A recipe as frozen values, checked for form only. Nothing is resolved yet.

Which parameters the method has, whether models exist and layers fit is for the plan to find out, and `where` for its
messages.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from weightsmith._base.errors import Finding
from weightsmith._base.tensors import DType
from weightsmith._planning.recipe.yaml import Scalar, float_of

# ---- Parameter values as written, and their values for one tensor: gradients over layers, filters on names, and
# weights over the checkpoints of one run by a rule (EMA, LAWA, WSM)


# ---- Schedules

Rule = Literal["ema", "lawa", "wsm"]

SCHEDULED = "weight"
"""The parameter of each model that may be a schedule."""

NESTED = "prior_parameters"
"""The parameter that is a mapping of another method's parameters. Its value is the mapping as JSON."""

DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "1-sqrt": lambda x: 1.0 - math.sqrt(x),
}
"""Learning rate curves: from 1 at 0 to 0 at 1."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A rule for the weights of n models, oldest first.

    ema   mᵢ = β mᵢ₋₁ + (1 - β) Wᵢ, from m₁ = W₁, with 0 <= β < 1: as an averager in the training loop would have it
    lawa  the mean of the last k, and nothing of the others (Kaddour 2022, https://arxiv.org/abs/2209.14981)
    wsm   checkpoint j (0 … n - 1) weighs d(j / n) - d((j + 1) / n): to first order the model that the learning rate curve d
          would have led to from the oldest of them on (Tian et al. 2025, section 3, https://arxiv.org/abs/2507.17634).
          `linear` is the plain mean
    """

    rule: Rule
    setting: float | int | str

    def __str__(self) -> str:
        return f"{{{self.rule}: {self.setting}}}"

    def weights(self, n: int) -> tuple[float, ...]:
        """The weights of n models; they sum to 1. ValueError when the rule needs more of them.

        >>> Schedule("ema", 0.5).weights(3), Schedule("lawa", 2).weights(3), Schedule("wsm", "1-sqrt").weights(4)[:2]
        ((0.25, 0.25, 0.5), (0.0, 0.5, 0.5), (0.5, 0.20710678118654757))
        """
        return _weights(self, n)


@cache
def _weights(schedule: Schedule, n: int) -> tuple[float, ...]:
    if schedule.rule == "ema":
        beta = float(schedule.setting)
        return (beta ** (n - 1), *((1.0 - beta) * beta ** (n - 1 - i) for i in range(1, n)))
    if schedule.rule == "lawa":
        last = int(schedule.setting)
        if n < last:
            raise ValueError(f"lawa: {last} is the mean of the last {last} models, and here {'is' if n == 1 else 'are'} {n}")
        return tuple(1.0 / last if i >= n - last else 0.0 for i in range(n))
    curve = [DECAYS[str(schedule.setting)](j / n) for j in range(n)] + [0.0]
    return tuple(now - later for now, later in itertools.pairwise(curve))


_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def numeric(value: Scalar) -> int | float | None:
    """The finite number that a value or text means, or None (YAML 1.1 reads `1e-5` as text).

    Booleans are not numbers here: the parameter decides whether `true` may mean 1.

    >>> numeric(2), numeric("1e-5"), numeric("3"), numeric(True), numeric("union")
    (2, 1e-05, 3, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            return None
        digits = value.lstrip("+-")
        value = int(value) if digits.isdigit() and len(digits) < 19 else float(value)
    return value if math.isfinite(float_of(value)) else None


def gradient(values: Sequence[Scalar], t: float, *, stepped: bool = False) -> Scalar | None:
    """The value of a list at depth t, 0..1: linear between numbers (see `numeric`), a step when one entry is none.

    t        position in the slice: layer i of L has i / (L - 1); a slice of one layer has 1; tensors outside layers have 0
    stepped  of a flag or a choice: there is nothing between its values, 0 and 1 among them

    None for an empty list. Numbers between which it is linear come back as float.

    >>> gradient([0, 0.5, 1], 0.25), gradient(["1e-3", "3e-3"], 0.5), gradient([0, 1], 0.9, stepped=True)
    (0.25, 0.002, 0)
    """
    n = len(values)
    if n == 0:
        return None
    s = t * (n - 1)
    i = min(math.floor(s), n - 1)
    numbers = [numeric(v) for v in values]
    low, high = numbers[i], numbers[min(i + 1, n - 1)]
    if stepped or low is None or high is None or None in numbers:
        return values[i]
    return (1.0 - (s - i)) * low + (s - i) * high


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a parameter, with the filter it holds for.

    value         a scalar, a tuple of scalars: a gradient, or a schedule of weights
    filter        part of a tensor name; None or `*`: every tensor
    where         position of the value
    filter_where  position of the filter, "" when there is none
    starts        of a block of a diffusion model, whose name `filter` is: what the names of its tensors begin with
    """

    value: Scalar | tuple[Scalar, ...] | Schedule
    filter: str | None
    where: str
    filter_where: str = ""
    starts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that one `parameters:` block says about one parameter.

    entries  in the user's order; the first whose filter fits counts. Empty when the value was refused: its problem is
             reported already, so a missing value must not be reported on top of it (`reported`)
    where    position of the parameter's name
    """

    entries: tuple[Entry, ...]
    where: str
    _rules: tuple[_Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rules", tuple(_Rule(entry) for entry in self.entries))

    @property
    def reported(self) -> bool:
        """True if the value was wrong and has been reported."""
        return not self.entries

    def at(self, name: str, t: float, *, stepped: bool = False) -> tuple[Scalar | Schedule, Entry] | None:
        """The value for a tensor and the entry it came from; None when no filter fits, or the list that fits is empty.

        name        tensor name the filters look at; plain case-sensitive substrings: `layers.1` also fits `layers.10`
        t, stepped  see `gradient`; `stepped` is a property of the parameter, and the same in all calls

        >>> s = Setting((Entry((0.0, 1.0), "mlp", "r.yml:3:5"), Entry(0.5, None, "r.yml:4:5")), "r.yml:2:3")
        >>> s.at("layers.3.mlp.up.weight", 0.25)[0], s.at("lm_head.weight", 0.0)[0]
        (0.25, 0.5)
        """
        for rule in self._rules:
            if rule.part in name and (not rule.starts or f"{name}.".startswith(rule.starts)):
                try:
                    return rule.known[t]
                except KeyError:
                    return rule.evaluate(t, stepped)
        return None


class _Rule:
    """A prepared entry: `known` caches the value for each depth, one per layer of a model."""

    __slots__ = ("entry", "known", "part", "starts")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.part = "" if entry.filter in (None, "*") or entry.starts else str(entry.filter)  # "" is part of every name
        self.starts = entry.starts
        self.known: dict[float, tuple[Scalar | Schedule, Entry] | None] = {}

    def evaluate(self, t: float, stepped: bool) -> tuple[Scalar | Schedule, Entry] | None:
        entry = self.entry
        value = gradient(entry.value, t, stepped=stepped) if isinstance(entry.value, tuple) else entry.value
        result = None if value is None else (value, entry)
        self.known[t] = result
        return result


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

    path    a file; `built-in`; `own`: what the model writes by itself
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
