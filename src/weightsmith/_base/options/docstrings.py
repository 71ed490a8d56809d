"""The options of functions in their docstrings, so that `help(weightsmith.merge)` lists them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from inspect import cleandoc
from typing import Any, TypeVar

from weightsmith._base.options.option import Option, options_of

Function = TypeVar("Function", bound=Callable[..., Any])

WIDTH = 100
"""Width of the lines."""


def lists_options(command: str, *records: type[Any], besides: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Append the options of a function to its docstring, before its examples.

    command  as the options know the function: `extract_lora`
    records  records whose options are keywords of the function
    besides  options that the signature has already
    """

    def document(function: Function) -> Function:
        text, found, examples = cleandoc(function.__doc__ or "").partition("\n\n>>> ")
        lines = [line for record in records for line in _lines(command, record, besides)]
        function.__doc__ = "\n".join([text, "", "Options:", "", *lines]) + found + examples
        return function

    return document


def _lines(command: str, record: type[Any], besides: tuple[str, ...]) -> Iterator[str]:
    for each in options_of(record).values():
        name = each.keyword(command)
        if command in each.commands and name not in besides:
            line = f"    {name:<20} {_meaning(each, command)}"
            yield textwrap.fill(line, WIDTH, subsequent_indent=" " * 25, break_on_hyphens=False)


def _meaning(option: Option, command: str) -> str:
    default = option.default_text(command) if option.type is not bool else option.unset or str(option.default)
    return option.sentence(str) + (f" Default: {default}." if default else "")
