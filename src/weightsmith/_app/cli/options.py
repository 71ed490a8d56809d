"""Arguments and flags that several commands share; flags that are made from the records of `weightsmith._base.options`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from weightsmith._app.cli.configuration import in_force
from weightsmith._app.cli.failures import failures, show_tracebacks
from weightsmith._app.cli.help import HELP_ALL, show_all
from weightsmith._base.errors import SyntaxProblem, printable
from weightsmith._base.files import is_folder
from weightsmith._base.options import Option, find_option, is_option_record, options_of, read_options
from weightsmith._base.text import note

_OUT = "Folder to create, or s3://BUCKET/PREFIX, gs://, az://, hf://ORG/NAME[@BRANCH]"

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file; - for standard input.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id or base+adapter.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help=f"{_OUT}.")]
OutOrPlan = Annotated[str, typer.Argument(metavar="OUT", help=f"{_OUT}; ignored with --plan.", show_default=False)]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Show the plan; compute and write nothing.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Hide progress and summary; warnings and errors are still shown.", rich_help_panel="General"),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.", rich_help_panel="General")]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Show tracebacks and the settings in force.", rich_help_panel="General"),
]
HelpAll = Annotated[bool, typer.Option(HELP_ALL, callback=show_all, is_eager=True, hidden=True)]
PageFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Also write the result to one HTML file, readable offline.",
        rich_help_panel="Output",
    ),
]


def recipe_source(recipe: str) -> str:
    """The path of a recipe, or for `-` the text on standard input."""
    if recipe != "-":
        return recipe
    from weightsmith._planning.recipe import StandardInput
    from weightsmith._planning.recipe.yaml import MAX_BYTES

    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    try:
        return StandardInput(f"{data.decode()}\n")  # text is known by its newline
    except UnicodeDecodeError as error:
        what = f"the recipe is not UTF-8 text: byte 0x{data[error.start]:02x}"
        raise SyntaxProblem(what, where="<stdin>", fix="save it as UTF-8") from None


def check_out(out: str, **unwritten: bool) -> None:
    """Raise BadParameter unless there is an output, or one of the flags that write none: these ignore OUT, as `plan` does."""
    if not out and not any(unwritten.values()):
        raise typer.BadParameter("name the folder to create.", param_hint="OUT")


def check_order(recipe: str, out: str) -> None:
    """Raise BadParameter if the recipe stands where OUT does, and no recipe in its place."""
    if out.endswith((".yml", ".yaml")) and Path(out).is_file() and recipe != "-" and not Path(recipe).is_file():
        what = f"{printable(out)} is a recipe, and {printable(recipe)} is none: RECIPE comes first, then OUT."
        raise typer.BadParameter(what)
    if is_folder(Path(recipe)) and is_folder(Path(out)):
        raise typer.BadParameter(f"{printable(recipe)} and {printable(out)} are folders, and neither is a recipe.")


def expand(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose parameters are option records: each option that it has becomes a flag."""
    name = function.__name__
    parameters, flags, records = [], dict[str, Option](), dict[str, type[Any]]()
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if is_option_record(parameter.annotation):
            records[parameter.name] = parameter.annotation
            listed = [option for option in options_of(parameter.annotation).values() if name in option.commands]
            flags |= {option.keyword(name): option for option in listed}
            parameters += [_parameter(option, name) for option in listed]
        else:
            parameters.append(parameter)

    @wraps(function)
    def command(**arguments: Any) -> None:
        asked = {keyword: arguments.pop(keyword) for keyword in flags}
        unset = {keyword: option.name for keyword, option in flags.items() if asked[keyword] is None}
        asked |= {keyword: _settings[name] for keyword, name in unset.items() if name in _settings}
        texts = {keyword: value for keyword, value in asked.items() if value is not None and value != []}
        with failures(as_json=arguments.get("as_json", False), usage=True):
            read = read_options(name, texts, *records.values(), text=True)
        function(**arguments, **dict(zip(records, read, strict=True)))

    _sign(command, parameters)
    command.flags = flags  # type: ignore[attr-defined]
    return command


def keywords(command: str, *records: Any) -> dict[str, Any]:
    """The options of records as keywords of the function that a command calls, without defaults."""
    return {
        option.keyword(command): value
        for record in records
        for option in options_of(type(record)).values()
        if (value := getattr(record, option.name)) != option.default
    }


_settings: dict[str, Any] = {}
"""Option → its default by the user's settings, for the command that runs."""


def common(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that every command has."""

    @wraps(function)
    def command(*, verbose: bool, help_all: bool, **arguments: Any) -> None:  # help_all ends the program before
        set_verbose(verbose)
        with failures(as_json=arguments.get("as_json", False), usage=True):
            settings = in_force()
        _settings.clear()
        for chosen in settings.values():
            if chosen.setting.option is not None:
                _settings[chosen.setting.option.name] = chosen.value if isinstance(chosen.value, bool) else str(chosen.value)
            elif chosen.setting.user_only:
                os.environ.setdefault(chosen.setting.variable, chosen.value)
            elif chosen.setting.key in arguments:
                arguments[chosen.setting.key] = arguments[chosen.setting.key] or chosen.value
            if verbose:
                note(f"{chosen.setting.key} = {printable(str(chosen.value))} ({printable(chosen.source)})")
        function(**arguments)

    shared = {"verbose": Verbose, "help_all": HelpAll}
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind) for name, kind in shared.items()
    ]
    _sign(command, [*inspect.signature(function, eval_str=True).parameters.values(), *flags])
    return command


def set_verbose(verbose: bool) -> None:
    """Apply `--verbose`, of the program or of a command."""
    if verbose:
        show_tracebacks()


def _sign(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function the parameters that typer reads."""
    command.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _parameter(option: Option, command: str) -> inspect.Parameter:
    """The flag of an option, as typer reads it. Values are read by the option itself, not by typer."""
    is_flag, is_list = option.type is bool, option.type in (tuple, Mapping)
    kind: Any = (
        (bool | None if option.optional or option.setting else bool) if is_flag else list[str] if is_list else str | None
    )
    required = command in option.required
    default: Any = inspect.Parameter.empty if required else option.default if is_flag and not option.setting else None
    help = option.sentence(lambda name: find_option(name).flag(command))
    if default_text := option.default_text(command):
        help += f" [default: {default_text}]"
    flag = typer.Option(
        *option.spellings(command),
        metavar=option.metavar or None,
        help=help,
        show_default=False,
        rich_help_panel=option.group,
    )
    annotation: Any = Annotated[str if required else kind, flag]
    return inspect.Parameter(option.keyword(command), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
