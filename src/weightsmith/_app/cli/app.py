"""The commands together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.clean import clean
from weightsmith._app.cli.demo import demo
from weightsmith._app.cli.diff import diff
from weightsmith._app.cli.doctor import doctor
from weightsmith._app.cli.eval import evaluate
from weightsmith._app.cli.extract_lora import extract_lora
from weightsmith._app.cli.help import Command, Group, overview, page_of, terminal_width
from weightsmith._app.cli.init import init
from weightsmith._app.cli.inspect import inspect
from weightsmith._app.cli.merge import merge
from weightsmith._app.cli.mergekit_flags import MergeCommand, MoeCommand
from weightsmith._app.cli.methods import methods
from weightsmith._app.cli.moe import moe
from weightsmith._app.cli.plan import plan
from weightsmith._app.cli.preview import preview
from weightsmith._app.cli.quantize import dequantize, quantize
from weightsmith._app.cli.run import run
from weightsmith._app.cli.schema import schema
from weightsmith._app.cli.statistics import statistics
from weightsmith._app.cli.studio import studio
from weightsmith._app.cli.transplant_tokenizer import transplant_tokenizer
from weightsmith._app.cli.tune import tune
from weightsmith._app.cli.verify import verify
from weightsmith._base.errors import nearest
from weightsmith._base.text import result
from weightsmith._version import __version__


class App(typer.Typer):
    """Typer, with our help pages and the options that every command has."""

    def command(self, name: str | None = None, *, group: str = "More", **how: Any) -> Callable[..., Any]:
        """Register a command. group: its heading in `weightsmith --help`."""

        def register(function: Callable[..., Any]) -> Any:
            own = name or function.__name__.replace("_", "-")
            return super(App, self).command(own, rich_help_panel=group, **{"cls": Command, **how})(options.common(function))

        return register

    def of(self, args: Sequence[str]) -> App:
        """The app for some arguments: with the command alone that they begin with, if they do. Making all takes 0.03 s."""
        made = [each for each in self.registered_commands if [each.name] == [*args[:1]] and each.name != "help"]
        if not made:
            return self
        found = copy.copy(self)
        found.registered_commands = made
        return found


# rich_markup_mode=None: typer's plain help. Its other one interprets brackets, cuts long lines, and takes 60 ms to import.
app = App(
    name="weightsmith",
    help="Merge, stack and quantise LLM checkpoints.",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        result(f"weightsmith {__version__}")
        raise typer.Exit


@app.callback()
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
        raise typer.BadParameter(f"there is no command {command!r}{nearest(command, commands)}.", param_hint="COMMAND")
    path = program.command_path
    page = page_of(commands[command], f"{path} {command}") if command else overview(program.command, path)
    result(page.lines(terminal_width()))


_MERGEKIT = "Other mergekit-{} flags are either ignored with a note or rejected with a suggestion."
MAKE, LOOK, WRITE, KEEP = "Make a model", "Look before and after", "Write a recipe", "Housekeeping"

app.command(group=MAKE, cls=MergeCommand, epilog=_MERGEKIT.format("yaml"))(merge)
app.command(group=MAKE, cls=MoeCommand, epilog=_MERGEKIT.format("moe"))(moe)
for command in (quantize, dequantize, extract_lora, transplant_tokenizer, tune, run):
    app.command(group=MAKE)(command)
app.command(group=LOOK, cls=MoeCommand)(plan)
for command in (preview, inspect, diff):
    app.command(group=LOOK)(command)
app.command("eval", group=LOOK)(evaluate)
app.command(group=LOOK)(statistics)
app.command(group=LOOK)(verify)
for command in (init, methods, schema, studio):
    app.command(group=WRITE)(command)
for command in (demo, clean, doctor):
    app.command(group=KEEP)(command)
app.command("help", group=KEEP)(help_)
