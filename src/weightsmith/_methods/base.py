"""What a merge method says of itself. The maths is in the method's own file, and `signature.py` makes the record of it.

From these records come the registry, `weightsmith methods`, the docs pages, the JSON schema and the checks at plan time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightsmith._base.errors import nearest
from weightsmith._plans import Parameters, Product, Role, Settings, Step, Value

if TYPE_CHECKING:
    from weightsmith.abc.job import Job, Matrix


ParameterType = Literal["float", "int", "bool", "str"]
Scope = Literal["model", "tensor"]
BaseRole = Literal["required", "optional", "input"]
Family = Literal["average", "sphere", "delta", "sparse", "spectral", "data", "copy"]

FAMILIES: Mapping[Family, str] = {
    "average": "Averages: one point between the models",
    "sphere": "Along the sphere: keeps the length of the weights",
    "delta": "Task vectors: adds what fine-tunes learnt to their base",
    "sparse": "Sparse task vectors: drops or elects changes before adding them",
    "spectral": "Singular vectors: merges directions of whole matrices",
    "data": "With a text: weighs layers by what goes through them",
    "copy": "Copies: layers as they are",
}
"""What the families of methods do, in the order in which they are listed."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a method.

    name     as written in recipes
    kind     `float`, `int`, `bool` or `str`
    doc      one sentence
    scope    `model`: one value for each input; `tensor`: one value for the output tensor
    default  None: the parameter is required
    minimum, maximum   inclusive bounds of numbers
    choices  allowed strings
    optional the parameter may be left out and then has no value (None)
    booleans the values that `false` and `true` mean, for a `str` parameter that was a flag in mergekit
    ignored  why the parameter, accepted because mergekit accepts it, changes nothing
    """

    name: str
    kind: ParameterType
    doc: str
    scope: Scope = "tensor"
    default: Value | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    booleans: tuple[str, str] | tuple[()] = ()
    ignored: str = ""

    @property
    def required(self) -> bool:
        """True when a recipe must give a value."""
        return self.default is None and not self.optional

    def problem(self, value: Value) -> str:
        """Why a value of the right kind is not allowed, or ""."""
        if isinstance(value, str):
            wrong = bool(self.choices) and value not in self.choices
            return f"must be one of {', '.join(self.choices)}{nearest(value, self.choices)}" if wrong else ""
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum:g}"
        if self.maximum is not None and value > self.maximum:
            return f"must be at most {self.maximum:g}"
        return ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A statistic that a method looks at, for the weight of each linear layer.

    kind  a name of `weightsmith._activations.statistics.STATISTICS`
    of    `models`: of each model besides the base, on that model's text; `base`: of the base
    merged  what enters a layer comes out of the merged layers below, and not out of the model's own
    """

    kind: str
    of: Literal["models", "base"] = "models"
    merged: bool = False

    def inputs(self, count: int, *, base: bool) -> range:
        """The places of the inputs that it is of, of so many. base: the first is the base."""
        return range(int(base)) if self.of == "base" else range(int(base), count)


@dataclass(frozen=True, slots=True)
class Method:
    """One merge method.

    name        as written in `merge_method:`
    title       a few words
    family      the kind of method, under which lists show it
    summary     what it does, as text for the docs page
    use         when to use it and when not
    passes      how often it reads its inputs, and what for
    source      paper and section, or the project it comes from
    formula     one line of plain text
    parameters  in the order shown to users
    base        `required`: base_model must be given, the base has no per-model parameters;
                `optional`: used when given; `input`: the base, if listed, is an input like the others
    min_models, max_models   inputs besides the base (with base == "input": all inputs)
    example     a recipe
    job         makes the merge of one logical matrix
    check       checks the resolved parameters (shared, one mapping per input); returns the problem, or ""
    copies      says whether these parameters leave the single input as it is, so that its bytes are copied
    needs       says whether tensors with these parameters wait for the method's product
    product     what must be known of all those tensors before the first is merged, from their steps and settings; or None
    ignored     says whether a model with these parameters of its own is left out of the merge of a tensor: its weight is 0
    keeps_base  says whether tensors of this role stay as the base has them
    elementwise says whether, with these parameters (of the tensor), an element depends on its own position in the inputs and
                perhaps on the whole model, but not on the matrix it is in: fused matrices then need not be taken apart
    on_device   says whether, with these parameters (of the tensor), torch computes linear layers on the device of the run
    otherwise   of a method of linear layers' weights: what is done with all other tensors, `averaged`; "" for other methods
    requires    the statistics that it looks at, with these parameters (of the tensor); the recipe names the text
    """

    name: str
    title: str
    family: Family
    summary: str
    use: str
    passes: str
    source: str
    formula: str
    parameters: tuple[Parameter, ...]
    base: BaseRole
    min_models: int
    max_models: int | None
    example: str
    job: Callable[[Matrix], Job]
    check: Callable[[Parameters, Sequence[Parameters]], str] = lambda shared, models: ""
    copies: Callable[[Sequence[Parameters]], bool] = lambda models: False
    needs: Callable[[Parameters], bool] = lambda shared: False
    product: Callable[[Sequence[tuple[Step, Settings]]], Product | None] = lambda merged: None
    ignored: Callable[[Parameters], bool] = lambda parameters_of_model: False
    keeps_base: Callable[[Parameters, Role], bool] = lambda shared, role: False
    elementwise: Callable[[Parameters], bool] = lambda shared: False
    on_device: Callable[[Parameters], bool] = lambda shared: False
    otherwise: str = ""
    requires: Callable[[Parameters], Sequence[Requirement]] = lambda shared: ()


# ---- In words, for `weightsmith methods` and docs/methods: example recipes, and what parameters may be


SCOPES: Mapping[Scope, str] = {"model": "each model", "tensor": "the merge"}
"""What one value of a parameter is for."""

BASES: Mapping[BaseRole, str] = {
    "required": "base_model is needed, and takes no parameters of its own",
    "optional": "base_model may be given",
    "input": "a base_model is an input like the others",
}


def models(method: Method) -> str:
    """How many inputs besides the base; all inputs where the base is one of them."""
    low, high = method.min_models, method.max_models
    return f"{low}" if low == high else f"{low} to {high}" if high is not None else f"{low} or more"


def values(parameter: Parameter, *, markdown: bool = False) -> str:
    """What a parameter may be: one of its choices, or a kind of value with its bounds.

    >>> p = Parameter("density", "float", "Share.", minimum=0, maximum=1)
    >>> values(p), values(Parameter("normalize", "bool", "Divide."), markdown=True)
    ('number 0 to 1', '`true`, `false`')
    """
    names = parameter.choices or (("true", "false") if parameter.kind == "bool" else ())
    if names:
        return ", ".join(f"`{name}`" for name in names) if markdown else " | ".join(names)
    low, high = parameter.minimum, parameter.maximum
    at_least, at_most = ("≥", "≤") if markdown else (">=", "<=")
    bounds = f" {low:g} to {high:g}" if low is not None and high is not None else ""
    bounds = bounds or (f" {at_least} {low:g}" if low is not None else f" {at_most} {high:g}" if high is not None else "")
    return {"float": "number", "int": "whole number", "str": "text"}[parameter.kind] + bounds


def example_value(parameter: Parameter) -> str:
    """A number that a parameter may be.

    >>> example_value(Parameter("density", "float", "Share.", minimum=0, maximum=1))
    '0.5'
    """
    if parameter.minimum == 0 and parameter.maximum == 1:
        return "0.5"
    usual = parameter.default if isinstance(parameter.default, int | float) else 1
    return f"{usual if parameter.minimum is None else max(usual, parameter.minimum):g}"


def default(parameter: Parameter, *, markdown: bool = False) -> str:
    """The default as written in a recipe; `required` or `none` if there is none."""
    value = parameter.default
    if value is None:
        return "required" if parameter.required else "none"
    written = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{written}`" if markdown else written


def doc(parameter: Parameter) -> str:
    """What a parameter does, and why it may do nothing."""
    return f"{parameter.doc} No effect: {parameter.ignored}." if parameter.ignored else parameter.doc


@dataclass(frozen=True, slots=True)
class ParameterText:
    """A parameter in words. scope: what one value of it is for."""

    name: str
    values: str
    default: str
    scope: str
    doc: str


@dataclass(frozen=True, slots=True)
class MethodText:
    """A method's inputs and parameters in words. inputs: how many models, and whether there is a base."""

    inputs: str
    parameters: tuple[ParameterText, ...]


def describe_method(method: Method) -> MethodText:
    """What a method takes, in words.

    >>> from weightsmith.plugin import find_method
    >>> describe_method(find_method("ties")).inputs
    '1 or more besides the base; base_model is needed, and takes no parameters of its own'
    """
    inputs = f"{models(method)}{'' if method.base == 'input' else ' besides the base'}; {BASES[method.base]}"
    parameters = (ParameterText(p.name, values(p), default(p), SCOPES[p.scope], doc(p)) for p in method.parameters)
    return MethodText(inputs, tuple(parameters))


def example_recipe(
    method: str,
    *,
    per_model: str | Sequence[str] = "",
    shared: str = "",
    models: Sequence[str] = ("fr", "de"),
    base: str = "base",
    texts: bool = False,
) -> str:
    """A recipe that merges fine-tunes by a method.

    per_model  parameters of every model, as a YAML mapping; a sequence: one for each
    shared  parameters of the merge
    texts   each model is measured on a text of its own

    >>> print(example_recipe("slerp", shared="{t: 0.5}", models=["fr"]), end="")
    merge_method: slerp
    base_model: ./base
    models:
      - model: ./fr
    parameters: {t: 0.5}
    dtype: bfloat16
    """
    lines = [f"merge_method: {method}", *([f"base_model: ./{base}"] if base else []), "models:"]
    for model, parameters in zip(models, [per_model] * len(models) if isinstance(per_model, str) else per_model, strict=True):
        lines += [f"  - model: ./{model}", *([f"    text: {model}.txt"] if texts else [])]
        lines += [f"    parameters: {parameters}"] if parameters else []
    return "\n".join([*lines, *([f"parameters: {shared}"] if shared else []), "dtype: bfloat16", ""])
