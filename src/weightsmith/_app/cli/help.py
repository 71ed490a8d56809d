"""Help pages: what a command's parameters and docstring say, as text for a terminal and as a man page.

The docstring of a command has a summary, paragraphs, and a command line in each line after `Examples:`. Options are listed
under the headings of `weightsmith._base.options.GROUPS`; options written by hand name their heading as `rich_help_panel`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from weightsmith._app.cli import other_programs
from weightsmith._app.cli.other_programs import FLAGS, MOE_FLAGS, Flag, Translated, translate
from weightsmith._base.errors import Finding, nearest
from weightsmith._base.idioms import grouped
from weightsmith._base.options import GROUPS
from weightsmith._base.text import note

MAX_WIDTH = 100
"""Longer lines are hard to read."""
_NAMES = 24
"""Columns of names; longer ones have a line of their own."""

START = (
    ("weightsmith demo", "merge three tiny models, in seconds"),
    ("weightsmith init", "write a recipe for your models: recipe.yml"),
    ("weightsmith merge", "run it: weightsmith merge recipe.yml OUT"),
    ("weightsmith help merge", "show what a command can do"),
)
"""First commands to run, for the program's help."""


@dataclass(frozen=True, slots=True)
class HelpRows:
    """A heading, and names with their meanings."""

    title: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HelpPage:
    """The help of a command.

    name      as typed: `weightsmith merge`
    usage     what follows it
    summary   the first sentence
    text      the other paragraphs
    examples  command lines
    sections  arguments and options
    notes     paragraphs at the end
    aligned   the meanings of all sections start in one column
    """

    name: str
    usage: str
    summary: str
    text: tuple[str, ...]
    examples: tuple[str, ...]
    sections: tuple[HelpRows, ...]
    notes: tuple[str, ...] = ()
    aligned: bool = True

    def lines(self, width: int) -> str:
        """The page as text, with lines of at most `width` characters where names allow that."""
        usage = textwrap.fill(f"Usage: {self.name} {self.usage}", width, subsequent_indent="    ", break_on_hyphens=False)
        lines = [usage, "", *_filled(self.summary, width, 2)]
        for paragraph in self.text:
            lines += ["", *_filled(paragraph, width, 2)]
        if self.examples:
            lines += ["", "Examples:", *(f"  {example}" for example in self.examples)]  # never broken: they are copied
        whole = _column(row for section in self.sections for row in section.rows)
        for section in self.sections:
            lines += ["", f"{section.title}:", *_rows(section.rows, whole if self.aligned else _column(section.rows), width)]
        for paragraph in self.notes:
            lines += ["", *_filled(paragraph, width, 0)]
        return "\n".join(lines)


def _filled(text: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def _column(rows: Iterable[tuple[str, str]]) -> int:
    """Where meanings start."""
    return max((len(names) for names, _ in rows if len(names) <= _NAMES), default=_NAMES) + 4


def _rows(rows: Sequence[tuple[str, str]], column: int, width: int) -> list[str]:
    shown = []
    for names, meaning in rows:
        lines = _filled(meaning, width, column) or [""]
        if len(names) <= column - 4:
            shown += [f"  {names}".ljust(column) + lines[0].lstrip(), *lines[1:]]
        else:
            shown += [f"  {names}", *lines]
    return [line.rstrip() for line in shown]


def terminal_width() -> int:
    """Columns of a help page."""
    return max(40, min(MAX_WIDTH, shutil.get_terminal_size().columns))


def is_overview(error: Any) -> bool:
    """Whether an error of typer is the help, which it shows where no command is named."""
    return type(error).__name__ == "NoArgsIsHelpError"


PLACED = ("--model", "--base-model", "--out-path")
"""Options of mergekit's commands that are arguments here."""


COMMANDS_OF_MERGEKIT = {
    "mergekit-yaml": "merge",
    "mergekit-multi": "merge",
    "mergekit-mega": "merge",
    "mergekit-pytorch": "merge",
    "mergekit-evolve": "tune",
    "mergekit-moe": "moe",
    "mergekit-extract-lora": "extract-lora",
    "mergekit-tokensurgeon": "transplant-tokenizer",
}
"""The commands that do the same here."""


NO_PLAN = " is no plan"
"""The end of what `run` says of a model."""


def misuse(error: Any) -> Finding:
    """A typer error as a message of ours: the problem, the usage, the next step."""
    context = error.ctx
    name = context.command_path if context else "weightsmith"
    parameter = getattr(error, "param", None)
    what = error.format_message().rstrip(".")
    options = getattr(error, "option_name", "")
    details: tuple[str, ...] = ()
    fix = f"run {name} --help"
    if type(error).__name__ == "MissingParameter" and parameter is not None:
        named = _argument(parameter) if parameter.param_type_name == "argument" else _names(parameter)
        what, fix = f"{named} is missing", f"{fix}, which has examples"
        if named == "OUT" and context is not None and context.info_name == "run":
            plan = sys.argv[2] if len(sys.argv) > 2 else ""
            if plan and not plan.endswith(".json") and not Path(plan).is_file():
                what, fix = f"run takes a plan and OUT, and {plan}{NO_PLAN}", other_programs.COMMANDS["chat"]
        if named.startswith("--format "):
            fix = "add it, such as --format gguf-q4_k_m; weightsmith quantize --list lists all"
    elif options in PLACED:
        *first, last = (_argument(taken) for taken in context.command.params if taken.param_type_name == "argument")
        words = " and ".join(filter(None, [", ".join(first), last]))
        what, fix = f"no such option: {options}", f"write {words} without flags, as in the usage"
    elif options and hasattr(error, "possibilities"):
        known = [flag for taken in context.command.params for flag in (*taken.opts, *taken.secondary_opts)]
        what = f"no such option: {options}"
        if answer := _instead_of(options, context, known):
            fix = answer
        else:
            what += nearest(options, [flag for flag in known if flag.startswith("-")])
    elif (match := re.fullmatch(r"No such command '(.*?)'.*", what)) is not None:
        what = f"no such command: {match[1]}{nearest(match[1], context.command.commands)}"
        if same := COMMANDS_OF_MERGEKIT.get(match[1]):
            what, fix = f"no such command: {match[1]}", f"run {name} {same}: see {name} {same} --help"
        elif answer := other_programs.for_command(match[1], sys.argv[1:], _methods()):
            what, fix = f"no such command: {match[1]}", answer
    elif (match := re.match(r"Option '(.*?)' requires an argument", what)) is not None:
        what = f"{match[1]} needs a value"
    elif (match := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", what)) is not None:
        what = f"too many arguments: {match[1]}"
        fix = _models_for_recipe(context) or fix
    elif (match := re.match(r"Invalid value(?: for ([^:]*))?: (.*)", what)) is not None:
        what = f"{match[1].strip(QUOTES)}: {match[2]}" if match[1] else match[2]
        fix = other_programs.COMMANDS["chat"] if what.endswith(NO_PLAN) else _models_for_recipe(context) or fix
    if context is not None and hasattr(context.command, "usage_line"):
        details = (context.command.usage_line(name),)
    return Finding(what, details=details, fix=fix)


def _instead_of(flag: str, context: Any, known: Sequence[str]) -> str:
    """What to write instead of an option that the command does not have; "" if that is not known. known: the flags it has."""
    if context.parent is None and other_programs.RUN_FLAGS & {flag, *sys.argv[1:2]}:
        return other_programs.COMMANDS["chat"]
    arguments = {taken.name: taken for taken in context.command.params if taken.param_type_name == "argument"}
    if answer := _models_for_recipe(context):
        return answer
    if argument := arguments.get(flag.lstrip("-").replace("-", "_")):
        return f"write {_argument(argument)} without a flag, as in the usage"
    return other_programs.for_option(flag, known, [*map(_argument, arguments.values())], context.info_name or "")


QUOTES = "'\""


def _methods() -> tuple[str, ...]:
    from weightsmith._methods import NAMES

    return NAMES


def _models_for_recipe(context: Any) -> str:
    """The next step for `merge MODEL MODEL … OUT`, which has no recipe; an empty string for other command lines."""
    words = sys.argv[2:]
    named = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in other_programs.OUT_FLAGS), "")
    if (
        context is None
        or context.info_name != "merge"
        or any(word.endswith(other_programs.RECIPES) or word in other_programs.LORA_FLAGS for word in words)
    ):
        return ""
    models = [word for word in words if word != named and (Path(word).is_dir() or Path(word).is_file())]
    others = [word for word in words if word not in models and not word.startswith("-")]
    return other_programs.for_models(models, named or (others[-1] if others else "OUT")) if len(models) > 1 else ""


class _Plain:
    """A command whose parameters do without pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Typer's hook for all parameters of a command, `--help` too."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            _keep_text(parameter)
        return parameters


class CommandWithPage(_Plain, TyperCommand):
    """A command with our help page."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer's hook for reading the arguments of a command. One option under two of its names may have two values."""
        words = [word.partition("=")[0] for word in itertools.takewhile("--".__ne__, args)]
        rest: list[str] = super().parse_args(ctx, args)
        parameters: list[Any] = self.params
        for taken in parameters:
            names = dict.fromkeys(word for word in words if word in taken.opts)
            if len(names) > 1 and not (taken.multiple or taken.is_flag):
                ctx.fail(f"{' and '.join(names)} are names of one option, which takes one value")
        return rest

    def get_help(self, ctx: Any) -> str:
        """Typer's hook for `--help`."""
        return page_of(self, ctx.command_path, brief=True).lines(terminal_width())

    def usage_line(self, name: str) -> str:
        """Its usage, for messages."""
        return f"usage: {name} {page_of(self, name).usage}"


class CommandGroup(_Plain, TyperGroup):
    """All commands, with our help page."""

    def get_help(self, ctx: Any) -> str:
        """Typer's hook for `--help`."""
        return overview(self, ctx.command_path).lines(terminal_width())


ANSWERS = "weightsmith.mergekit_flags"
"""Key of `translate`'s result in the context's `meta`."""


class MergeCommand(CommandWithPage):
    """`merge`, with mergekit's flags removed before typer reads the command line; they are in no help text."""

    flags: Sequence[Flag] = FLAGS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer's hook for reading the arguments of a command."""
        try:
            translated = translate(args, self.flags)
        except typer.BadParameter as error:
            ctx.fail(error.message)
        ctx.meta[ANSWERS] = translated
        return super().parse_args(ctx, translated.args)


class MoeCommand(MergeCommand):
    """`moe`, with mergekit-moe's flags removed."""

    flags = MOE_FLAGS


def answer(context: typer.Context, *, quiet: bool) -> None:
    """Apply mergekit's flags of this command line, and print the answers."""
    flags: Translated = context.meta[ANSWERS]
    if flags.hub_cache:  # huggingface_hub reads this when it is imported, which has not happened yet
        os.environ["HF_HUB_CACHE"] = flags.hub_cache
    for line in () if quiet else flags.answers:
        note(line)


HELP_ALL = "--help-all"


def show_all(context: Any, is_asked: bool) -> None:
    """Typer's hook for `--help-all`: print the whole help of a command, and end."""
    if is_asked and not context.resilient_parsing:
        typer.echo(page_of(context.command, context.command_path).lines(terminal_width()))
        raise typer.Exit


def _keep_text(parameter: Any) -> None:
    """Take the values of a flag, a text or a list of texts as they are. Typer imports pydantic to check them: 0.1 s."""
    by_typer, kind = parameter.process_value, getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if kind not in (str, bool, list[str]) or "process_value" in vars(parameter):
        return
    several = parameter.multiple or parameter.nargs == -1

    def process(context: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            value = () if several else None
        elif several and isinstance(value, list | tuple) and value:
            value = list(value)
        elif several or type(value) is not kind:
            return by_typer(context, value)  # a text that is missing, or no text
        return value if parameter.callback is None else parameter.callback(context, parameter, value)

    parameter.process_value = process


def page_of(command: Any, name: str, *, brief: bool = False) -> HelpPage:
    """The help of a command. brief: without the options that few need."""
    summary, text, examples = _parts(command.help)
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(["[OPTIONS]", *map(_place, arguments)])
    listed = HelpRows("Arguments", tuple((_argument(parameter), _meaning(parameter)) for parameter in arguments))
    notes = (command.epilog,) if command.epilog else ()
    return HelpPage(
        name, usage, summary, text, examples, (*([listed] if arguments else []), *_options(command, brief=brief)), notes
    )


def overview(group: Any, name: str) -> HelpPage:
    """The help of the program: what to run first, and all commands in groups."""
    from weightsmith._app.cli.failures import MEANINGS

    shown = [(called, command) for called, command in group.commands.items() if not command.hidden]
    commands = grouped((command.rich_help_panel, (called, _parts(command.help)[0])) for called, command in shown)
    listed = [HelpRows(title, tuple(rows)) for title, rows in commands.items()]
    codes = HelpRows("Exit codes", tuple((f"{code:d}", meaning) for code, meaning in MEANINGS.items()))
    summary, text, _ = _parts(group.help)
    sections = (HelpRows("Start here", START), *listed, *_options(group), codes)
    return HelpPage(name, "[OPTIONS] COMMAND [ARGS]...", summary, text, (), sections, aligned=False)


def _parts(text: str | None) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Summary, further paragraphs and examples of a docstring."""
    words, _, examples = inspect.cleandoc(text or "").partition("\n\nExamples:\n")
    summary, *paragraphs = (" ".join(paragraph.split()) for paragraph in words.split("\n\n"))
    return summary, tuple(paragraphs), tuple(line.strip() for line in examples.splitlines() if line.strip())


def _options(command: Any, *, brief: bool = False) -> list[HelpRows]:
    options = [option for option in command.params if option.param_type_name == "option" and not option.hidden]
    shown = [option for option in options if not brief or _is_brief(command, option.name)]
    groups = grouped((option.rich_help_panel or GROUPS[0], (_names(option), _meaning(option))) for option in shown)
    general = groups.setdefault(GROUPS[-1], [])
    general.append(("-h, --help", "Show this help."))
    if len(shown) < len(options):
        general.append((HELP_ALL, f"Show all options, {len(options) - len(shown)} more."))
    order = [GROUPS[0], *(name for name in groups if name not in GROUPS), *GROUPS[1:]]
    return [HelpRows(name, tuple(groups[name])) for name in order if name in groups]


def _is_brief(command: Any, name: str) -> bool:
    option = getattr(command.callback, "flags", {}).get(name)
    return option is None or option.is_brief(command.callback.__name__)


def _names(option: Any) -> str:
    names = ", ".join(sorted((*option.opts, *option.secondary_opts), key=lambda name: name.startswith("--")))
    return f"{names} {option.metavar}" if option.metavar else names


def _argument(argument: Any) -> str:
    return str(argument.metavar).strip("[]").replace("]", "").removesuffix("...")


def _place(argument: Any) -> str:
    """An argument in the line of the usage."""
    name = _argument(argument)
    many = "..." if argument.nargs != 1 else ""
    return f"{name}{many}" if argument.required else f"[{name}]{many}"


def _meaning(parameter: Any) -> str:
    default = parameter.default
    if isinstance(default, bool):
        default = (parameter.opts if default else parameter.secondary_opts)[-1].lstrip("-") if parameter.secondary_opts else ""
    shown = parameter.show_default and default not in (None, "", []) and not parameter.required
    notes = [f"[default: {default}]"] * bool(shown)
    notes += ["[required]"] * bool(parameter.required and parameter.param_type_name == "option")
    return " ".join([parameter.help or "", *notes]).strip()
