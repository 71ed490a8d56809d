"""A merge method: its record, in words, and made of a function by the types of its parameters.

The maths is in the method's own file. From the records come the registry, `weightsmith methods`, the docs pages, the JSON
schema and the checks at plan time.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from weightsmith._base.errors import MethodError, nearest
from weightsmith._plans import Parameters, Product, Role, Settings, Step, Value
from weightsmith.abc.job import Job, Matrix

ParameterType = Literal["float", "int", "bool", "str"]
Scope = Literal["model", "tensor"]
BaseRole = Literal["required", "optional", "input"]
Family = Literal["average", "sphere", "delta", "sparse", "spectral", "data", "copy"]

FAMILIES: Mapping[Family, str] = {
    "average": "Averages: a point between the models",
    "sphere": "Spherical interpolation: keeps the length of the weights",
    "delta": "Task vectors: adds what fine-tunes learnt to their base",
    "sparse": "Sparse task vectors: drops or selects changes before adding them",
    "spectral": "Singular vectors: merges the main directions of whole matrices",
    "data": "With text: weights layers by the inputs that they receive",
    "copy": "Single models: copies or scales layers, or adds noise",
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
    "required": "base_model is required, and takes no parameters",
    "optional": "base_model is optional",
    "input": "a base_model counts as one of the models",
}


def models_text(method: Method) -> str:
    """How many inputs besides the base; all inputs where the base is one of them."""
    low, high = method.min_models, method.max_models
    return f"{low}" if low == high else f"{low} to {high}" if high is not None else f"{low} or more"


def values_text(parameter: Parameter, *, markdown: bool = False) -> str:
    """What a parameter may be: one of its choices, or a kind of value with its bounds.

    >>> p = Parameter("density", "float", "Share.", minimum=0, maximum=1)
    >>> values_text(p), values_text(Parameter("normalize", "bool", "Divide."), markdown=True)
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


def default_text(parameter: Parameter, *, markdown: bool = False) -> str:
    """The default as written in a recipe; `required` or `none` if there is none."""
    value = parameter.default
    if value is None:
        return "required" if parameter.required else "none"
    written = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{written}`" if markdown else written


def doc_text(parameter: Parameter) -> str:
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
    '1 or more in addition to the base; base_model is required, and takes no parameters'
    """
    inputs = f"{models_text(method)}{'' if method.base == 'input' else ' in addition to the base'}; {BASES[method.base]}"
    parameters = (
        ParameterText(p.name, values_text(p), default_text(p), SCOPES[p.scope], doc_text(p)) for p in method.parameters
    )
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


# ---- Parameters as a function's signature says them: the one form, for weightsmith's own methods and for the user's
#
#     density: Annotated[PerModel[float], "Share of the delta that is kept.", Bounds(0.0, 1.0)] = 1.0
#
# The type is `float`, `int`, `bool`, `str` or a `Literal` of choices; `float | None = None` may be left out; `PerModel[float]`
# has a value for each model. `Annotated` adds what the documentation says, and bounds. The function is called with the values,
# checked and of that type.


T = TypeVar("T")

_PER_MODEL = "one for each model"
PerModel = Annotated[Union[Sequence[T], Any], _PER_MODEL]  # noqa: UP007  Any: type checkers then take a default for all models
"""The type of a parameter that each model has a value of its own for: `weight: PerModel[float]`."""

_KINDS: Mapping[Any, ParameterType] = {float: "float", int: "int", bool: "bool", str: "str"}
_TAKEN = ("method", "out_dtype", "threads", "seed", "allow_nonfinite")  # by merge_state_dicts


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive bounds of a number; None: none on that side."""

    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Booleans:
    """Which choices `false` and `true` mean, of a parameter that is a flag in mergekit."""

    false: str
    true: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """Why a parameter, accepted because mergekit accepts it, changes nothing."""

    why: str


# ---- reading signatures


def parameters_of(function: Callable[..., Any], *, skip: Collection[str], called: str = "") -> tuple[Parameter, ...]:
    """The parameters of a merge method, from the signature of its function.

    skip    arguments that are not parameters
    called  the function's name in messages

    Raises MethodError where a parameter has no type, or one that no parameter can have.

    >>> def f(matrix, t: Annotated[float, "How far.", Bounds(0)] = 1): ...
    >>> parameters_of(f, skip=["matrix"])[0].minimum
    0
    """
    called = called or function.__name__
    arguments = inspect.signature(function).parameters
    for argument in arguments.values():
        if argument.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            what = f"the argument '{argument}' of {called} cannot be given by name"
            raise MethodError(what, fix="write it without * and /")
    names = [name for name in arguments if name not in skip]
    hints = _hints(function, {name: arguments[name].annotation for name in names}, called)
    return tuple(_parameter(arguments[name], hints[name], called) for name in names)


def _hints(function: Callable[..., Any], annotations: dict[str, Any], called: str) -> dict[str, Any]:
    """The types that annotations mean; they may be text (`from __future__ import annotations`)."""
    bare = [n for n, annotation in annotations.items() if annotation is inspect.Parameter.empty]
    if bare:
        raise MethodError(f"the parameter '{bare[0]}' of {called} has no type", fix=f"write {bare[0]}: float, or what it is")
    holder = types.SimpleNamespace(__annotations__=annotations)
    try:
        return get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)
    except Exception as error:  # whatever evaluating the user's text raises
        what = f"the types of {called}'s parameters cannot be read: {type(error).__name__}: {error}"
        raise MethodError(what, fix="import or define every name in the annotations at the top level of the file") from error


def _parameter(argument: inspect.Parameter, hint: Any, called: str) -> Parameter:
    """The record of one parameter."""
    name = argument.name
    if name in _TAKEN:
        raise MethodError(f"the parameter '{name}' of {called} has a name that merge_state_dicts takes", fix="give it another")
    said: list[Any] = []
    per_model = False
    while get_origin(hint) is Annotated:
        said += [s for s in hint.__metadata__ if s != _PER_MODEL]
        if _PER_MODEL in hint.__metadata__:
            per_model, hint = True, get_args(get_args(hint.__origin__)[0])[0]  # T of Sequence[T] | Any
        else:
            hint = hint.__origin__
    inner = [a for a in get_args(hint) if a is not types.NoneType] if get_origin(hint) in (Union, types.UnionType) else [hint]
    optional = hint is not inner[0]
    choices = get_args(inner[0]) if get_origin(inner[0]) is Literal else ()
    plain = str if choices else inner[0]
    if len(inner) != 1 or plain not in _KINDS or not all(isinstance(choice, str) for choice in choices):
        shown = argument.annotation if isinstance(argument.annotation, str) else inspect.formatannotation(argument.annotation)
        raise MethodError(
            f"the parameter '{name}' of {called} has the type {shown}",
            fix="write float, int, bool, str or a Literal of str, one of these or None, or PerModel[...] of one",
        )
    bounds = next((s for s in said if isinstance(s, Bounds)), Bounds())
    booleans = next((s for s in said if isinstance(s, Booleans)), None)
    return Parameter(
        name=name[:-1] if name.endswith("_") and iskeyword(name[:-1]) else name,
        kind=_KINDS[plain],
        doc=next((s for s in said if isinstance(s, str)), ""),
        scope="model" if per_model else "tensor",
        default=_default(argument, _KINDS[plain], choices, optional, called),
        minimum=bounds.minimum,
        maximum=bounds.maximum,
        choices=choices,
        optional=optional and argument.default is None,
        booleans=(booleans.false, booleans.true) if booleans else (),
        ignored=next((s.why for s in said if isinstance(s, Ignored)), ""),
    )


def _default(argument: inspect.Parameter, kind: ParameterType, choices: Sequence[str], optional: bool, called: str) -> Any:
    """The default as a value of the parameter's kind, or None."""
    default, whose = argument.default, f"of the parameter '{argument.name}' of {called}"
    if default is inspect.Parameter.empty or (default is None and optional):
        return None
    if default is None:
        raise MethodError(f"the default None {whose} is no {kind}", fix=f"write {argument.name}: {kind} | None")
    allowed: Any = {"float": (float, int), "int": int, "bool": bool, "str": str}[kind]
    if not isinstance(default, allowed) or (isinstance(default, bool) and kind != "bool"):
        raise MethodError(f"the default {default!r} {whose} is not of type {kind}", fix="change the default or the type")
    if choices and default not in choices:
        raise MethodError(f"the default {default!r} {whose} is not one of {', '.join(choices)}")
    return float(default) if kind == "float" else default


# ---- calling


def _argument(parameter: Parameter) -> str:
    """The argument that a parameter is given as: `lambda_` for lambda."""
    return f"{parameter.name}_" if iskeyword(parameter.name) else parameter.name


def values(parameters: Sequence[Parameter], shared: Parameters, models: Sequence[Parameters]) -> dict[str, Any]:
    """What a function with these parameters is called with. Of each model: an array of float64, int64 or bool; else a tuple.

    models  those of each model, a base left out
    """
    value_of_argument: dict[str, Any] = {}
    for p in parameters:
        if p.scope == "tensor":
            value_of_argument[_argument(p)] = shared.get(p.name, p.default)
        else:
            of_each = [model.get(p.name, p.default) for model in models]
            types_ = {"float": np.float64, "int": np.int64, "bool": np.bool_}
            value_of_argument[_argument(p)] = (
                tuple(of_each) if p.optional or p.kind == "str" else np.array(of_each, types_[p.kind])
            )
    return value_of_argument


def bound(function: Callable[..., T], parameters: Sequence[Parameter], *, skip: Collection[str] = ()) -> Callable[..., T]:
    """The function as one of (..., shared, models): called with the values of those parameters that it has as arguments.

    skip  the leading arguments, which are not parameters. Raises MethodError for any other argument that is not one.
    """
    arguments = [name for name in inspect.signature(function).parameters if name not in skip]
    by_argument = {_argument(p): p for p in parameters}
    if unknown := [name for name in arguments if name not in by_argument]:
        raise MethodError(f"{function.__name__} has the argument '{unknown[0]}', which is not a parameter of the method")
    parameters_read = [by_argument[name] for name in arguments]
    return lambda *first, shared, models=(): function(*first, **values(parameters_read, shared, models))


# ---- methods that make a job


def merge_method(
    *,
    title: str,
    family: Family,
    summary: str,
    use: str,
    passes: str,
    source: str,
    formula: str,
    example: str,
    base: BaseRole = "required",
    min_models: int = 1,
    max_models: int | None = None,
    check: Callable[..., str] = lambda: "",
    copies: Callable[..., bool] = lambda: False,
    needs: Callable[..., bool] = lambda: False,
    product: Callable[[Sequence[tuple[Step, Settings]]], Product | None] = lambda merged: None,
    keeps_base: Callable[..., bool] = lambda role: False,
    elementwise: Callable[..., bool] = lambda: False,
    on_device: bool = False,
    otherwise: str = "",
    requires: Callable[..., Sequence[Requirement]] = lambda: (),
) -> Callable[[Callable[..., Job]], Method]:
    """Make a merge method of a function from one logical matrix, `matrix`, and its parameters to the job that merges it.

    Its name is the function's; `Method` says what the rest is. `check`, `copies`, `needs`, `elementwise` and `requires` take
    parameters of the method by name, as many as they want to know; `keeps_base` also the tensor's `role`. A model whose
    `weight` is 0 is left out. Raises MethodError for a signature that is wrong, and for a family that is not of `FAMILIES`.
    """

    if family not in FAMILIES:
        raise MethodError(
            f"'{family}' is no family of methods{nearest(family, FAMILIES)}", fix=f"write one of {', '.join(FAMILIES)}"
        )

    def make(function: Callable[..., Job]) -> Method:
        parameters = parameters_of(function, skip=("matrix",))
        job = bound(function, parameters, skip=("matrix",))
        checked, copied = bound(check, parameters), bound(copies, parameters)
        needed, by_element = bound(needs, parameters), bound(elementwise, parameters)
        kept, required = bound(keeps_base, parameters, skip=("role",)), bound(requires, parameters)
        return Method(
            name=function.__name__,
            title=title,
            family=family,
            summary=summary,
            use=use,
            passes=passes,
            source=source,
            formula=formula,
            parameters=parameters,
            base=base,
            min_models=min_models,
            max_models=max_models,
            example=example,
            job=lambda matrix: job(matrix, shared=matrix.shared, models=matrix.model_parameters),
            check=lambda shared, models: checked(
                shared=shared, models=[parameters_of_model for parameters_of_model in models if parameters_of_model]
            ),
            copies=lambda models: copied(shared={}, models=models),
            needs=lambda shared: needed(shared=shared),
            product=product,
            ignored=lambda parameters_of_model: parameters_of_model.get("weight") == 0,
            keeps_base=lambda shared, role: kept(role, shared=shared),
            elementwise=lambda shared: by_element(shared=shared),
            on_device=lambda shared: on_device,
            otherwise=otherwise,
            requires=lambda shared: required(shared=shared),
        )

    return make


def always() -> bool:
    """The `elementwise` of methods that look at one position at a time, whatever their parameters."""
    return True
