"""Texts about methods for `weightsmith methods` and docs/methods: example recipes, and in words what parameters may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsmith._methods.base import BaseRole, Method, Parameter, Scope

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
