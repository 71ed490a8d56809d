"""The grammar of a recipe as tables: the keys of each kind of mapping, what each key takes, and one sentence on it.

The check (`walk.py`), the "it belongs there" messages (`misuse.py`) and the JSON Schema (`schema.py`) all read these
tables, so a key added here exists everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "text",  # a text that is not empty
    "dtype",  # the name of a floating dtype
    "model",  # a model reference: text, or a mapping of the level REFERENCE
    "path",  # inside a model reference: text, or a mapping of the level PATH
    "layer_range",  # [first, one past the last]
    "parameters",  # parameter name -> value forms
    "value",  # inside a value form: a scalar, a list of scalars, or a mapping of the level SCHEDULE
    "share",  # inside a schedule: a number from 0 to below 1
    "count",  # inside a schedule: a whole number from 1 on
    "decay",  # inside a schedule: the name of a learning rate curve
    "choice",  # one of the key's `choices`
    "texts",  # a list of texts, or one text
    "number",  # a finite number
    "source",  # a model reference, or a whole recipe of a merge
    "flag",  # true or false
    "experts",  # a list of expert numbers
    "experts_by_layer",  # layer -> such a list
    "groups",  # a list of lists of expert numbers
    "groups_by_layer",  # layer -> such a list
    "weights",  # a list of lists of numbers
    "weights_by_layer",  # layer -> such a list
    "section",  # a mapping of the level `of`
    "list",  # a list of mappings of the level `of`
    "named",  # a mapping of names to mappings of the level `of`
    "refused",  # mergekit has it, weightsmith does not yet: an error, never ignored
    "unused",  # accepted, without effect: a warning
]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a mapping.

    of                the level of a `section`, and of the mappings inside a `list` or `named` value
    choices           of a `choice`
    minimum, maximum  inclusive bounds of a `number`; the largest `count`
    """

    name: str
    kind: Kind
    doc: str
    required: bool = False
    of: Level | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of mapping in a recipe.

    name    for the schema's $defs
    place   for messages: "unknown key 'x' <place>"
    one_of  exactly one of these keys must be given
    """

    name: str
    place: str
    doc: str
    keys: tuple[Key, ...]
    one_of: tuple[str, ...] = ()

    def key(self, name: str) -> Key | None:
        """The key of this name, or None."""
        return next((key for key in self.keys if key.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys, in the order shown to users."""
        return tuple(key.name for key in self.keys)


PATH = Level(
    "path",
    "in a model path",
    "A model's place and version.",
    (
        Key("path", "text", "Folder, .safetensors file, or hub id `org/name`.", required=True),
        Key("revision", "text", "Branch, tag or commit of a hub model."),
    ),
)

REFERENCE = Level(
    "reference",
    "in a model reference",
    "A model, written as a mapping: for paths that hold `+` or `@`.",
    (
        Key("model", "path", "`path[@revision]`, or a mapping with `path` and `revision`.", required=True),
        Key("lora", "path", "A LoRA adapter that is applied to the model: `path[@revision]`, or a mapping as for `model`."),
        Key("override_architecture", "unused", "Not needed: structure comes from tensor names."),
    ),
)

CONDITION = Level(
    "condition",
    "in a value with a filter",
    "A value for the tensors whose name holds `filter`; the first that fits counts.",
    (
        Key("filter", "text", "Part of a tensor name, case-sensitive; `*` or none: every tensor."),
        Key("value", "value", "A scalar, a list (a gradient over the layers of the slice), or a schedule.", required=True),
    ),
)

SCHEDULE = Level(
    "schedule",
    "in a schedule of weights",
    "Weights over the checkpoints of a run, oldest first.",
    (
        Key("ema", "share", "Exponential moving average: the part of the average that each checkpoint leaves standing."),
        Key("lawa", "count", "The mean of so many checkpoints, the last ones."),
        Key("wsm", "decay", "The learning rate curve whose effect the mean is to have."),
    ),
    one_of=("ema", "lawa", "wsm"),
)

_MODEL = Key(
    "model", "model", "The model: `path_or_hub_id[@revision]`; or a pattern, for all folders that match.", required=True
)
_BASE = Key("base_model", "model", "The base of this slice; the recipe's `base_model` otherwise.")

INPUT = Level(
    "input",
    "in an entry of 'models'",
    "One model of the merge, whole, or all that a pattern matches.",
    (_MODEL, Key("parameters", "parameters", "Parameters of this model alone; they win over all others.")),
)

SOURCE = Level(
    "source",
    "in an entry of 'sources'",
    "Some layers of one model.",
    (
        _MODEL,
        Key("layer_range", "layer_range", "`[first, end]`: layers first to end - 1, counted from 0.", required=True),
        Key("parameters", "parameters", "Parameters of this source alone; they win over all others."),
    ),
)

SLICE = Level(
    "slice",
    "in an entry of 'slices'",
    "A run of output layers; slices are stacked in order and layers numbered anew.",
    (
        Key("sources", "list", "The layers of this slice, as many from each source.", required=True, of=SOURCE),
        _BASE,
        Key("parameters", "parameters", "Parameters of this slice."),
        Key("residual_weight", "unused", "Read by mergekit and never used."),
    ),
)

_MODELS = Key("models", "list", "The models to merge, whole.", of=INPUT)
_SLICES = Key("slices", "list", "Runs of layers to merge or stack.", of=SLICE)

MODULE = Level(
    "module",
    "in a module",
    "The merge of one module of a model of several (a language model, a vision tower).",
    (_MODELS, _SLICES, Key("parameters", "parameters", "Parameters of this module.")),
    one_of=("models", "slices"),
)

RECIPE = Level(
    "recipe",
    "at the top level",
    "A merge: exactly one of models, slices and modules.",
    (
        Key("merge_method", "text", "The method; `weightsmith methods` lists them.", required=True),
        Key("base_model", "model", "The model that deltas are taken from; also gives config and tokenizer."),
        _MODELS,
        _SLICES,
        Key("modules", "named", "Module name to its merge; `weightsmith plan` shows the names.", of=MODULE),
        Key("parameters", "parameters", "Parameters for all models and tensors."),
        Key("dtype", "dtype", "Dtype of the output unless `out_dtype` is given."),
        Key("out_dtype", "dtype", "Dtype of the output."),
        Key("name", "text", "A label; without effect."),
        Key("tokenizer_source", "refused", "Not supported yet: without it the base (else first) model's is copied."),
        Key("tokenizer", "refused", "Not supported yet: without it the base (else first) model's is copied."),
        Key("chat_template", "refused", "Not supported yet: without it the base (else first) model's is copied."),
    ),
    one_of=("models", "slices", "modules"),
)

LEVELS = (RECIPE, INPUT, SLICE, SOURCE, MODULE, REFERENCE, PATH, CONDITION, SCHEDULE)
"""Every kind of mapping, outermost first."""
