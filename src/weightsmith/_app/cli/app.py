"""The commands together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.help import CommandGroup, CommandWithPage, MergeCommand, MoeCommand, overview, page_of, terminal_width
from weightsmith._base.errors import nearest
from weightsmith._base.text import result
from weightsmith._version import __version__

_MERGEKIT = "Other mergekit-{} flags are either ignored with a note or rejected with a suggestion."
MAKE, LOOK, WRITE, KEEP = "Make a model", "Look before and after", "Write a recipe", "Housekeeping"

COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "merge": (MAKE, {"cls": MergeCommand, "epilog": _MERGEKIT.format("yaml")}),
    "moe": (MAKE, {"cls": MoeCommand, "epilog": _MERGEKIT.format("moe")}),
    **dict.fromkeys(
        ("quantize", "dequantize", "extract-lora", "convert-lora", "transplant-tokenizer", "auto", "tune", "run"), (MAKE, {})
    ),
    "plan": (LOOK, {"cls": MoeCommand}),
    **dict.fromkeys(("preview", "inspect", "diff", "eval", "statistics", "write", "verify", "status"), (LOOK, {})),
    **dict.fromkeys(("init", "methods", "schema", "studio"), (WRITE, {})),
    **dict.fromkeys(("demo", "clean", "doctor", "help"), (KEEP, {})),
}
"""The heading of each command in `weightsmith --help`, and what else typer is told of it. In the order of the help."""

_PLACES = {
    **{name: f"merge:{name}" for name in ("moe", "run", "plan")},
    **{name: f"convert:{name}" for name in ("quantize", "dequantize", "extract-lora", "convert-lora", "transplant-tokenizer")},
    **{
        name: f"reports:{name}"
        for name in ("inspect", "diff", "preview", "verify", "status", "tune", "auto", "write", "statistics")
    },
    **{name: f"recipes:{name}" for name in ("init", "methods", "schema", "studio")},
    **{name: f"housekeeping:{name}" for name in ("demo", "clean", "doctor")},
    **{"eval": "reports:evaluate", "help": "app:help_"},
}
"""Module and function of commands; of all others both have the command's name."""


class App(typer.Typer):
    """Typer, with our help pages and the options that every command has."""

    def command(self, name: str | None = None, *, group: str = "More", **how: Any) -> Callable[..., Any]:
        """Register a command. group: its heading in `weightsmith --help`."""
        register = super().command(name, rich_help_panel=group, **{"cls": CommandWithPage, **how})
        return lambda function: register(options.common(function))


def _version(asked: bool) -> None:
    if asked:
        result(f"weightsmith {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: options.Verbose = False,
) -> None:
    options.set_verbose(verbose)


def help_(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="Command to describe.", show_default=False)] = "",
) -> None:
    """Show the help of a command.

    Examples:
        weightsmith help
        weightsmith help merge
    """
    program = context.parent
    assert program is not None
    commands: dict[str, Any] = program.command.commands  # type: ignore[attr-defined]
    if command and command not in commands:
        from weightsmith._methods import NAMES

        hint = f" (a merge method: weightsmith methods {command})" if command in NAMES else nearest(command, commands)
        raise typer.BadParameter(f"there is no command {command!r}{hint}.", param_hint="COMMAND")
    path = program.command_path
    page = page_of(commands[command], f"{path} {command}") if command else overview(program.command, path)
    result(page.lines(terminal_width()))


def make_app(args: Sequence[str] = ()) -> App:
    """The app: with the command alone that the arguments begin with, or with all. To import and make all takes 0.06 s."""
    # rich_markup_mode=None: typer's plain help. Its other one interprets brackets, cuts long lines, and takes 60 ms to import.
    app = App(
        name="weightsmith",
        help="Merge, stack and quantise LLM checkpoints.",
        cls=CommandGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    alone = args and args[0] in COMMANDS and args[0] != "help"
    for name in args[:1] if alone else COMMANDS:
        group, how = COMMANDS[name]
        module, _, function = _PLACES.get(name, f"{name}:{name}").replace("-", "_").partition(":")
        app.command(name, group=group, **how)(getattr(import_module(f"weightsmith._app.cli.{module}"), function))
    return app
