"""Options, each said once: a dataclass field with its help, default and limits, from which all else follows.

A new option is one field of a record in the `options.py` of its feature. The command line's flags, the functions' keywords and
docstrings, the help and docs/cli.md have it then; command line and Python share its check. A new record is also one line of
`RECORDS`.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from inspect import cleandoc
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from weightsmith._base.errors import ParameterError, PlanError, nearest
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPE_NAMES, DType, dtype_name

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?)?", re.IGNORECASE | re.ASCII)

GROUPS = (
    *("Options", "Texts", "Command", "Search", "Recipe", "Ranks", "Modules", "Token rows"),
    *("Output", "Quantisation", "Resources", "Remote", "Advanced", "General"),
)
"""Headings of options in help texts, in this order. A heading that is not listed stands after the first."""

_RUN_OPTIONS = "_execution.options:RunOptions"
RECORDS = (
    "_planning.options:RecipeOptions",
    "_features.quantisation.options:QuantizeSettings",
    _RUN_OPTIONS,
    "_features.adapters.options:ExtractSettings",
    "_features.adapters.options:ConvertSettings",
    "_features.transplant.options:TransplantSettings",
    "_reports.options:EvaluateSettings",
    "_activations.options:StatisticsSettings",
    "_reports.options:WriteSettings",
    "_reports.options:AutoSettings",
    "_reports.options:TuneSettings",
)
"""Where the records of options are, below `weightsmith`. Of options with one name, messages name the first."""

_LISTED = 12
"""Choices that a message lists."""

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, as a keyword of Python functions and as a flag of commands.

    usage     flags, and the name of the value in help texts: `-k, --k K`, `--card/--no-card`
    group     heading in help texts, one of `GROUPS`
    help      one sentence without its full stop; `name` in backticks is another option. The choices follow in brackets
    details   further sentences, for the docs only; Markdown
    unset     the default in words, if it is None; by function, "" for the others, if it differs
    choices   the values allowed; "module:NAME" below `weightsmith` for a list of a feature
    lists     the command that lists the choices, if messages do not
    plugins   the entry points whose names are allowed too: "weightsmith.approximations"
    replaced  values that other programs have and we lack, with what to use instead
    least, above, most    limits of a number: at least, more than, at most
    path      the value is a path: pathlib's are accepted too
    commands  functions whose commands have its flag
    spelled   its keyword in functions with another name for it
    required  functions that require it
    brief     functions whose `--help` lists it; None: all. `--help-all` lists it everywhere
    setting   a user may set it once, in a file or in the environment; of `RunOptions` only
    """

    name: str
    hint: Any
    default: Any
    usage: str
    help: str
    group: str
    details: str = ""
    unset: str | Mapping[str, str] = ""
    choices: tuple[Any, ...] | str = ()
    lists: str = ""
    plugins: str = ""
    replaced: Mapping[str, str] = field(default_factory=dict)
    least: float | None = None
    above: float | None = None
    most: float | None = None
    path: bool = False
    commands: Collection[str] = ()
    spelled: Mapping[str, str]
    required: Collection[str] = ()
    brief: Collection[str] | None = None
    setting: bool = False

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in get_args(self.hint)

    @property
    def type(self) -> Any:
        """The type of a value that is not None: bool, int, float, str, DType, tuple or Mapping."""
        hint = next(kind for kind in get_args(self.hint) if kind is not type(None)) if self.optional else self.hint
        return get_origin(hint) or hint

    @property
    def nbytes(self) -> bool:
        """Whether the value is a number of bytes, which has units on the command line."""
        return self.name.endswith("_bytes")

    @property
    def values(self) -> tuple[Any, ...]:
        """The values allowed; () without such a list."""
        return tuple(self._allowed)

    @property
    def _allowed(self) -> Collection[Any]:
        """`values`, one of which can be asked for without an import of all."""
        if self.plugins:
            from weightsmith._base.plugins import installed

            return dict.fromkeys((*self.choices, *installed(self.plugins)))
        if not isinstance(self.choices, str):
            return self.choices
        module, _, name = self.choices.partition(":")
        allowed: Collection[Any] = getattr(import_module(f"weightsmith.{module}"), name)
        return allowed

    def is_brief(self, command: str) -> bool:
        """Whether the `--help` of a function's command lists it."""
        return self.group != "Advanced" if self.brief is None else command in self.brief

    def keyword(self, command: str = "") -> str:
        """Its keyword in a function."""
        return self.spelled.get(command, self.name)

    @property
    def metavar(self) -> str:
        """The name of the value in help texts; "" if the flag has none."""
        return "" if self.type is bool else self.usage.split()[-1]

    def spellings(self, command: str = "") -> tuple[str, ...]:
        """Its flags on the command line of a function, as typer takes them."""
        if command in self.spelled:
            return (f"--{self.spelled[command]}",)
        return tuple(self.usage.removesuffix(self.metavar).rstrip().split(", "))

    def flag(self, command: str = "") -> str:
        """The flag that messages name."""
        return next(spelling for spelling in self.spellings(command) if spelling.startswith("--")).partition("/")[0]

    def named(self, command: str = "") -> str:
        """Flag and keyword, for messages: `--max-rank (max_rank)`."""
        return f"{self.flag(command)} ({self.keyword(command)})"

    def sentence(self, spell: Callable[[str], str]) -> str:
        """The help text. spell: how another option is named there."""
        shown = [str(choice) for choice in self.choices] if not isinstance(self.choices, str) else []
        first = [", ".join(shown[:-1])] if shown[1:] else []
        listed = f" ({' or '.join([*first, shown[-1]])})" if shown else ""
        return re.sub(r"`(\w+)`", lambda match: spell(match[1]), f"{self.help}{listed}.")

    def default_text(self, command: str = "") -> str:
        """The default in words; "" if that is nothing."""
        unset = self.unset if isinstance(self.unset, str) else self.unset.get(command, self.unset[""])
        if self.type is bool and self.default is not None and "/" in self.usage:
            return self.spellings()[-1].split("/")[not self.default].lstrip("-")
        if self.default is None or self.type in (bool, tuple, Mapping):
            return unset
        shown = self.default / 10**9 if self.nbytes else self.default
        return f"{shown:g}GB" if self.nbytes else f"{shown:g}" if isinstance(shown, float) else str(shown)

    def read(self, value: object, *, text: bool = False) -> Any:
        """The value, as the record has it. Raises ValueError with the values allowed and the value given.

        text  the value is from the command line: text, or a list of texts

        >>> find_option("adapter_rank").read("4", text=True)
        4
        >>> find_option("adapter_rank").read(0)
        Traceback (most recent call last):
        ValueError: must be at least 1, not 0
        """
        kind = _KINDS["bytes" if self.nbytes else self.type]
        if value is None and self.optional:
            return None
        if self.path and isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif self.path and isinstance(value, list | tuple):
            value = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in value]
        try:
            checked = (kind.parse if text else kind.take)(value)
        except (TypeError, ValueError):
            raise ValueError(f"must be {kind.words}, not {value!r}") from None
        if self.choices and checked not in self._allowed:
            known = [str(choice) for choice in self.values]
            family = [choice for choice in known if choice.startswith(f"{str(checked).casefold()}-")]
            if len(family) > 1:
                raise ValueError(f"{checked!r} has several variants: write one of {', '.join(family)}")
            hint = nearest(str(checked), known) if checked not in self.replaced else ""
            instead = f": {self.replaced[checked]}" if checked in self.replaced else ""
            if self.lists and len(known) > _LISTED and (hint or instead):  # the answer is not at the end of a long list
                raise ValueError(f"{checked!r} is unknown{hint}{instead}; {self.lists} lists all {len(known)}")
            others = f"{len(known) - _LISTED} others" + f" ({self.lists})" * bool(self.lists)
            listed = ", ".join([*known[:_LISTED], *([others] if len(known) > _LISTED else [])])
            raise ValueError(f"must be one of {listed}{hint}, not {checked!r}{instead}")
        wrong = [
            f"{words} {limit:g}"
            for words, limit, holds in (
                ("at least", self.least, self.least is None or checked >= self.least),
                ("more than", self.above, self.above is None or checked > self.above),
                ("at most", self.most, self.most is None or checked <= self.most),
            )
            if not holds
        ]
        if wrong:
            raise ValueError(f"must be {wrong[0]}, not {checked!r}")
        return BY_TORCH_NAME[checked] if self.type is DType else checked


# ---- values of each type


def parse_size(text: str) -> int:
    """Bytes from `500MB`, `2GiB`, `1.5GB` or a plain number of bytes. Raises ValueError.

    >>> parse_size("2GiB"), parse_size("1.5GB"), parse_size("4096")
    (2147483648, 1500000000, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    whole, _, decimals = number.partition(".")
    # In integers: 1.1 is not exact as a float, and importing the decimal module is slow.
    unit: int = (1024 if binary else 1000) ** power
    return int(whole + decimals) * unit // 10 ** len(decimals)


def parse_settings(texts: Collection[str]) -> dict[str, Any]:
    """Key paths and values from texts such as `parameters.t=0.3`; the values are YAML. Raises ValueError.

    >>> parse_settings(["parameters.t=[0, 0.5]"])
    {'parameters.t': [0, 0.5]}
    """
    import yaml

    pairs = [text.partition("=") for text in texts]
    if not all(key.strip() and equals for key, equals, _ in pairs):
        raise ValueError(texts)
    try:
        return {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
    except yaml.YAMLError as error:
        raise ValueError(texts) from error


def _instance(*types: type[Any]) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(value)
        return value

    return take


def _whole(value: Any) -> int:
    return int(_instance(Integral)(value))


def _size(value: Any) -> int:
    return parse_size(value) if isinstance(value, str) else _whole(value)


def _number(value: Any) -> float:
    _instance(Real)(value)
    if not math.isfinite(value):
        raise ValueError(value)
    return value if isinstance(value, int) else float(value)


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(value)
    return tuple(map(_instance(str), value))


def _mapping(value: Any) -> Mapping[str, Any]:
    _strings(list(_instance(Mapping)(value)))
    return value


def _torch_name(value: Any) -> str:
    return value.torch if isinstance(value, DType) else dtype_name(value)


class _Kind(NamedTuple):
    """The values of one type: in words, from Python, and from the command line."""

    words: str
    take: Callable[[Any], Any]
    parse: Callable[[Any], Any]


_KINDS: Mapping[Any, _Kind] = {
    bool: _Kind("True or False", _instance(bool), _instance(bool)),
    int: _Kind("a whole number", _whole, int),
    "bytes": _Kind("a size such as 800MB, 5GB or 2GiB, or a number of bytes", _size, parse_size),
    float: _Kind("a number", _number, lambda text: _number(float(text))),
    str: _Kind("a string", _instance(str), str),
    DType: _Kind(f"one of {', '.join(DTYPE_NAMES)}", _torch_name, str),
    tuple: _Kind("a list of strings", _strings, tuple),
    Mapping: _Kind("a mapping such as {'parameters.t': 0.3}, or --set parameters.t=0.3", _mapping, parse_settings),
}


# ---- records of options


def option(default: object, usage: str, help: str, **facts: Any) -> Any:
    """A field of a record that is an option. facts: the fields of `Option`. default: `dict` for a mapping."""
    metadata = {"usage": usage, "help": help, "spelled": {}} | facts
    return field(default_factory=dict, metadata=metadata) if default is dict else field(default=default, metadata=metadata)


_OPTIONS: dict[type[Any], Mapping[str, Option]] = {}


def option_record(*commands: str, group: str, brief: Collection[str] | None = None) -> Callable[[type[Record]], type[Record]]:
    """Register a dataclass of options, and list them in its docstring. commands, group, brief: of options that name none."""

    def register(record: type[Record]) -> type[Record]:
        hints, options = get_type_hints(record), dict[str, Option]()
        for declared in fields(record):  # type: ignore[arg-type]
            default: Any = {} if declared.default is MISSING else declared.default
            options[declared.name] = Option(
                name=declared.name,
                hint=hints[declared.name],
                default=default,
                **{"commands": commands, "group": group, "brief": brief, **declared.metadata},
            )
        _OPTIONS[record] = options
        lines = [f"    {name:<20} {declared.sentence(str)}" for name, declared in options.items()]
        record.__doc__ = "\n".join([f"{record.__doc__}\n", *lines, ""])
        return record

    return register


def options_of(record: type[Any]) -> Mapping[str, Option]:
    """The options of a record, by keyword."""
    return _OPTIONS[record]


def is_option_record(kind: object) -> bool:
    """Whether this is a record of options."""
    return kind in _OPTIONS


def option_records() -> Iterator[type[Any]]:
    """All records of options, loaded one after another."""
    for place in RECORDS:
        module, _, name = place.partition(":")
        yield getattr(import_module(f"weightsmith.{module}"), name)


def find_option(name: str) -> Option:
    """The option with this keyword.

    >>> find_option("max_shard_bytes").named()
    '--max-shard-size (max_shard_bytes)'
    """
    return next(options_of(record)[name] for record in option_records() if name in options_of(record))


def named(*names: str) -> str:
    """Options, as messages name them.

    >>> named("bits", "head_bits")
    '--bits (bits), --head-bits (head_bits)'
    """
    return ", ".join(find_option(name).named() for name in names)


def assignment(name: str, value: object) -> str:
    """An option and its value, as fixes name them.

    >>> assignment("energy", 0.9)
    '--energy 0.9 (energy=0.9)'
    """
    shown = "" if value is True else f" {value}"
    return f"{find_option(name).flag()}{shown} ({name}={value!r})"


def option_error(name: str, what: str, fix: str = "") -> ParameterError:
    """The error for the value of an option."""
    return ParameterError(what, where=named(name), fix=fix)


def read_options(
    command: str, keywords: Mapping[str, Any], *kinds: type[Any], text: bool = False, planner: str = ""
) -> tuple[Any, ...]:
    """Keywords of a function, checked, as records.

    command  name of the function
    text     the values are from the command line: text, or lists of texts
    planner  name of the function that was called, if it plans what `command` writes

    Raises PlanError with all wrong values; TypeError for an unknown name.
    """
    known = {option.keyword(command): (kind, option) for kind in kinds for option in options_of(kind).values()}
    problems, values = list[ParameterError](), {kind: dict[str, Any]() for kind in kinds}
    for name, value in keywords.items():
        if name not in known:
            what = f"{planner or command}() has no option '{name}'"
            if planner and _is_of_runs(name):
                raise TypeError(f"{what}: it is an option of runs; leave it out of the plan")
            here = [keyword for keyword, (_, option) in known.items() if option.name == name]
            raise TypeError(f"{what}{nearest(here[0], here) if here else nearest(name, known)}")
        kind, option_ = known[name]
        try:
            if value is None and command in option_.required:
                raise ValueError("must be a string, not None")
            values[kind][option_.name] = option_.read(value, text=text)
        except ValueError as error:
            problems.append(ParameterError(str(error), where=option_.named(command)))
    if problems:
        raise PlanError(problems)
    return tuple(kind(**values[kind]) for kind in kinds)


def _is_of_runs(name: str) -> bool:
    module, _, record = _RUN_OPTIONS.partition(":")
    return name in options_of(getattr(import_module(f"weightsmith.{module}"), record))


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
        text, separator, examples = cleandoc(function.__doc__ or "").partition("\n\n>>> ")
        lines = [line for record in records for line in _lines(command, record, besides)]
        function.__doc__ = "\n".join([text, "", "Options:", "", *lines]) + separator + examples
        return function

    return document


def _lines(command: str, record: type[Any], besides: tuple[str, ...]) -> Iterator[str]:
    for option_ in options_of(record).values():
        name = option_.keyword(command)
        if command in option_.commands and name not in besides:
            line = f"    {name:<19}  {_meaning(option_, command)}"
            yield textwrap.fill(line, WIDTH, subsequent_indent=" " * 25, break_on_hyphens=False)


def _meaning(option: Option, command: str) -> str:
    default = option.default_text(command) if option.type is not bool else option.unset or str(option.default)
    return option.sentence(str) + (f" Default: {default}." if default else "")
