"""Parameters as a function's signature says them: the one form, for weightsmith's own methods and for the user's.

    density: Annotated[PerModel[float], "Share of the delta that is kept.", Bounds(0.0, 1.0)] = 1.0

The type is `float`, `int`, `bool`, `str` or a `Literal` of choices; `float | None = None` may be left out; `PerModel[float]`
has a value for each model. `Annotated` adds what the documentation says, and bounds. The function is called with the values,
checked and of that type.
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
from weightsmith._methods.base import FAMILIES, BaseRole, Family, Method, Parameter, ParameterType, Requirement
from weightsmith._plans import Parameters, Product, Settings, Step
from weightsmith.abc.job import Job

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
