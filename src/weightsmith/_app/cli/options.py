"""Arguments and flags that several commands share, flags made from the records of `weightsmith._base.options`, and settings.

A user makes settings once, in a file or in the environment. They are defaults of the command line, not of Python. A flag wins
over a variable, a variable over the file of the current folder, that over the user's own file. The file of the current folder
may be anyone's: it can neither run code, replace anything, nor say where models and tokens go.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from weightsmith._app.cli.failures import failures, show_tracebacks
from weightsmith._app.cli.help import HELP_ALL, show_all
from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError, SyntaxProblem, nearest, printable
from weightsmith._base.files import is_folder, open_regular
from weightsmith._base.options import Option, find_option, is_option_record, options_of, read_options
from weightsmith._base.text import note
from weightsmith._execution.options import RunOptions

FILE = "weightsmith.toml"
PROJECT = "pyproject.toml"
CHOSEN = "WEIGHTSMITH_CONFIG"
"""Variable that names the user's file; empty for none."""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UserSetting:
    """One setting.

    key       in a file
    variable  in the environment
    help      what it does
    option    whose default it is; None for one of every command
    user_only  only the user's own file may have it
    """

    key: str
    variable: str
    help: str
    option: Option | None = None
    user_only: bool = False

    def read(self, value: object, *, text: bool) -> Any:
        """The value, checked. text: it is from the environment. Raises ValueError."""
        if self.option is not None and self.option.type is not bool:
            return self.option.read(value, text=text or (self.option.nbytes and isinstance(value, str)))
        if self.user_only:
            if not isinstance(value, str) or not value:
                raise ValueError(f"must be a string, not {value!r}")
            return value
        if text:
            words = {"1": True, "true": True, "0": False, "false": False}
            value = words.get(str(value).lower(), value)
        if not isinstance(value, bool):
            raise ValueError(f"must be {'1 or 0' if text else 'true or false'}, not {value!r}")
        return value


@dataclass(frozen=True, slots=True)
class InForce:
    """A setting that is in force. source: `variable NAME`, or file and line."""

    setting: UserSetting
    value: Any
    source: str


def settings() -> dict[str, UserSetting]:
    """All settings, by key."""
    of_runs = {}
    for option in options_of(RunOptions).values():
        if option.setting:
            key = option.flag().removeprefix("--")
            of_runs[key] = UserSetting(key, f"WEIGHTSMITH_{key.upper().replace('-', '_')}", option.sentence(str), option)
    of_every_command = (
        UserSetting("quiet", "WEIGHTSMITH_QUIET", "Hide progress and summary."),
        UserSetting("hub-cache", "HF_HUB_CACHE", "Folder for downloaded Hub models.", user_only=True),
        UserSetting("hub-endpoint", "HF_ENDPOINT", "Address of the Hub; your token is sent there.", user_only=True),
    )
    return of_runs | {setting.key: setting for setting in of_every_command}


def user_file() -> Path | None:
    """The user's own file, whether it is there or not; None if there is to be none."""
    chosen = os.environ.get(CHOSEN)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(home).expanduser() / "weightsmith" / FILE
    except RuntimeError:  # no HOME, and no such user
        return None


def in_force() -> dict[str, InForce]:
    """The settings that are made anywhere, by key. Raises ParameterError for what is wrong, with its line or variable."""
    known = settings()
    chosen: dict[str, InForce] = {}
    users_file = user_file()
    if users_file is not None and (users_file.is_file() or os.environ.get(CHOSEN)):
        chosen |= _of_file(users_file, known, (), is_users=True)
    if Path(FILE).exists():
        chosen |= _of_file(Path(FILE), known, (), is_users=False)
    elif Path(PROJECT).is_file():
        chosen |= _of_file(Path(PROJECT), known, ("tool", "weightsmith"), is_users=False)
    for setting in known.values():
        text = os.environ.get(setting.variable)
        if text and not setting.user_only:  # those of the Hub's library are read and checked where it is imported
            try:
                chosen[setting.key] = InForce(setting, setting.read(text, text=True), f"variable {setting.variable}")
            except ValueError as error:
                raise _wrong(str(error), setting.variable, "correct the variable, or unset it") from None
        elif text:
            chosen[setting.key] = InForce(setting, text, f"variable {setting.variable}")
    return chosen


def _of_file(path: Path, known: Mapping[str, UserSetting], table: tuple[str, ...], *, is_users: bool) -> dict[str, InForce]:
    with open_regular(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _wrong(f"is larger than {_MAX_BYTES:,} bytes", str(path), "remove what is no setting")
    if table and b"weightsmith" not in data:  # another program's, which may be broken
        return {}
    import tomllib

    try:
        text = data.decode()
        values: Any = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        line = re.search(r"\(at line (\d+)", str(error))
        raise _wrong(f"not valid TOML: {error}", f"{path}:{line[1]}" if line else str(path), "correct the file") from None
    for name in table:
        values = values.get(name, {}) if isinstance(values, dict) else {}
    if not isinstance(values, dict):
        raise _wrong(f"[{'.'.join(table)}] must be a table", str(path), "correct the file")
    in_file = {}
    for key, value in values.items():
        where = f"{path}:{_line(text, key, table)}"
        setting = known.get(key)
        if setting is None:
            what = f"unknown setting {key!r}{nearest(key, known)}"
            raise _wrong(what, where, f"write one of {', '.join(known)}; other options belong on the command line")
        if setting.user_only and not is_users:
            what = f"{key} decides where models come from and tokens go, so a project's file cannot set it"
            raise _wrong(what, where, f"set it in {user_file() or FILE}, or as the variable {setting.variable}")
        try:
            in_file[key] = InForce(setting, setting.read(value, text=False), where)
        except ValueError as error:
            raise _wrong(f"{key} {error}", where, "correct the value") from None
    return in_file


def _line(text: str, key: str, table: tuple[str, ...]) -> int:
    """The line of a key; 1 if it is written in another way."""
    inside = not table
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
            inside = header[1].replace('"', "").replace(" ", "") == ".".join(table)
        if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", line) and inside:
            return number
        if re.match(rf"\s*\[\s*{re.escape(key)}\s*[.\]]", line):
            return number
    return 1


def _wrong(what: str, where: str, fix: str) -> ParameterError:
    return ParameterError(what, where=where, fix=fix, state=NOTHING_WRITTEN)


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
        help="Also write the result to a self-contained HTML file.",
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
        what = f"{printable(out)} is a recipe, but {printable(recipe)} is not: RECIPE comes first, then OUT."
        raise typer.BadParameter(what)
    if is_folder(Path(recipe)) and is_folder(Path(out)):
        raise typer.BadParameter(f"{printable(recipe)} and {printable(out)} are folders, and neither is a recipe.")


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_plan(plan: str) -> None:
    """Raise BadParameter for a model in the place of a plan: a folder, or the name of one."""
    is_id = _HUB_ID.fullmatch(plan) is not None and not plan.endswith(".json")
    if is_folder(Path(plan)) or (is_id and not os.path.lexists(plan)):
        raise typer.BadParameter(f"run takes a plan and OUT, and {printable(plan)} is no plan.")


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
