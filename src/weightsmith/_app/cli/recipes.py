"""`weightsmith init`, `methods`, `schema` and `studio`: what helps to write a recipe."""

from __future__ import annotations

import glob
import itertools
import os
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import failures, wrote
from weightsmith._app.goals import GOALS, Goal
from weightsmith._base.errors import StoreError, nearest, printable
from weightsmith._base.redaction import has_secret
from weightsmith._base.text import (
    columns,
    end_status,
    heading,
    note,
    result,
    say,
    section,
    show_fact,
    show_json,
    show_table,
    status_line,
    warn,
    wrapped,
)

if TYPE_CHECKING:
    from weightsmith._methods.method import Method


_PRESETS = Path(__file__).parent / "presets"


def preset_names(incomplete: str = "") -> list[str]:
    """Presets, for shell completion."""
    return sorted(file.stem for file in _PRESETS.glob(f"{glob.escape(incomplete)}*.yml"))


def goal_names(incomplete: str) -> list[str]:
    """Goals, for shell completion."""
    return [name for name in GOALS if name.startswith(incomplete)]


def init(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Recipe to write; - for standard output.")] = "recipe.yml",
    goal: Annotated[
        str,
        typer.Option(
            "--goal",
            metavar="GOAL",
            show_default=False,
            help=f"Goal ({', '.join(GOALS)}).",
            autocompletion=goal_names,
        ),
    ] = "",
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", show_default=False, help="Model, a folder or Hub id (repeatable)."),
    ] = None,
    base: Annotated[
        str, typer.Option("--base", metavar="MODEL", show_default=False, help="Base model of the fine-tunes.")
    ] = "",
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            show_default=False,
            help="Recipe of a paper, such as ties-paper.",
            autocompletion=preset_names,
        ),
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="List goals and presets; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it already exists.")] = False,
) -> None:
    """Write a recipe to start from.

    On a terminal, asks for the goal and the models unless options name them. --preset writes the recipe of a paper, with
    placeholders for the models.

    Examples:
        weightsmith init
        weightsmith init --goal combine --base org/base --model org/fr --model ./de
    """
    with failures(interrupted=lambda: "Interrupted. Nothing was written."):
        if listed:
            _list()
            return
        target = None if file == "-" else Path(file)
        if target is not None and not force and os.path.lexists(target):
            raise _exists(file)
        text = _preset(preset) if preset else _recipe(goal, [*(models or ())], base)
        if has_secret(text):
            hint = "the name of a model holds a password, a token or a key: give it by the environment, see docs/remote.md."
            raise typer.BadParameter(hint, param_hint="--model")
        if target is None:
            result(text.rstrip("\n"))
            return
        try:
            with target.open("w" if force else "x", encoding="utf-8") as written:
                written.write(text)
        except FileExistsError:
            raise _exists(file) from None
        except (OSError, ValueError) as error:  # ValueError: a NUL
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreError(f"the recipe cannot be written: {reason}", where=file, fix="name another file") from error
        command = "moe" if re.search(r"^experts:", text, re.MULTILINE) else "merge"
        name = printable(file)
        wrote(f"Recipe written: {name}")
        say(f"wrote {name}; next: weightsmith plan {name}, then weightsmith {command} {name} OUT")


def _exists(file: str) -> typer.BadParameter:
    if Path(file).is_dir():
        what = f"{printable(file)} is a folder, and FILE is the recipe to write: name a model with --model {printable(file)}."
        return typer.BadParameter(what, param_hint="FILE")
    return typer.BadParameter(f"{printable(file)} already exists: name another file, or add --force.", param_hint="FILE")


def _list() -> None:
    show_table(("goal", ""), [(name, goal.words) for name, goal in GOALS.items()])
    result()
    show_table(("preset", ""), [(name, _title(name)) for name in preset_names()])


def _title(preset: str) -> str:
    """The first sentence of a preset's comment; on a terminal cut to fit a line of 80."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), _text(preset).splitlines())
    sentence = re.split(r"[.;] ", " ".join(line[2:] for line in comment))[0]
    return sentence if columns(sys.stdout) is None else textwrap.shorten(sentence, 59, placeholder=" …")


def _text(preset: str) -> str:
    return (_PRESETS / f"{preset}.yml").read_text(encoding="utf-8")


def _preset(name: str) -> str:
    preset, known = name.removesuffix(".yml").replace("_", "-"), preset_names()
    if preset not in known:
        raise typer.BadParameter(
            f"there is no preset {name!r}{nearest(preset, known)}; `weightsmith init --list` lists them.", param_hint="--preset"
        )
    return _text(preset)


def _recipe(name: str, models: list[str], base: str) -> str:
    asking = sys.stdin.isatty()
    if not name:
        if not asking:
            raise typer.BadParameter(f"write one of {', '.join(GOALS)}; or --preset NAME.", param_hint="--goal")
        name = _ask_goal()
    if name not in GOALS:
        raise typer.BadParameter(f"must be one of {', '.join(GOALS)}{nearest(name, GOALS)}, not {name!r}.", param_hint="--goal")
    goal = GOALS[name]
    if goal.adapter and not base and len(models) == 1:  # base+adapter, as a recipe has it
        base, _, models[0] = models[0].rpartition("+")
    if asking and goal.base == "needed" and not base:
        base = _ask("the base, a folder or Hub id")
    while asking and len(models) < (goal.most or goal.least):
        models.append(_ask("the adapter" if goal.adapter else f"model {len(models) + 1}"))
    while asking and goal.most is None and (model := _ask("one more model (Enter: no more)", default="")):
        models.append(model)
    if len(models) < goal.least or (goal.most and len(models) > goal.most) or (goal.base == "needed" and not base):
        raise typer.BadParameter(f"{name} takes {_wants(goal)}.", param_hint="--model")
    return goal.recipe(models, base)


def _wants(goal: Goal) -> str:
    """Its models, as the command line names them."""
    number = f"{goal.least}" if goal.most == goal.least else f"{goal.least} or more"
    return f"{number} --model{' and --base' if goal.base == 'needed' else ''}"


def _ask_goal() -> str:
    for number, (name, goal) in enumerate(GOALS.items(), 1):
        note(f"{number}  {name:<9} {goal.words}")
    answer = _ask("goal, by number or name")
    return list(GOALS)[int(answer) - 1] if answer in map(str, range(1, len(GOALS) + 1)) else answer


def _ask(what: str, default: str | None = None) -> str:
    answer: str = typer.prompt(what, default=default, show_default=False, err=True)
    return answer.strip()


def method_names(incomplete: str) -> list[str]:
    """Methods, for shell completion."""
    from weightsmith._methods import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def methods(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Method to describe.", show_default=False, autocompletion=method_names),
    ] = "",
    as_json: options.Json = False,
) -> None:
    """List the merge methods by family, or describe one.

    The list includes methods of installed packages. A description shows parameters with defaults, the formula, its source and
    an example.

    Examples:
        weightsmith methods
        weightsmith methods ties
    """
    with failures(as_json=as_json):
        from weightsmith._methods import all_methods, get, installed_methods
        from weightsmith._methods.method import FAMILIES

        if as_json:
            shown = (replace(get(name), name=name),) if name else (*all_methods(), *installed_methods()[0])
            data = [_to_json(method) for method in shown]
            show_json(data[0] if name else data)
            return

        if name:
            _show(replace(get(name), name=name))
            return
        installed, broken = installed_methods()
        listed = (*all_methods(), *installed)
        longest = max(len(method.name) for method in listed)
        for family, words in FAMILIES.items():
            show_table(("", words), [(m.name.ljust(longest), m.title) for m in listed if m.family == family])
            result()
        say("To describe a method: weightsmith methods NAME")
        for error in broken:
            warn(error.finding)


def _to_json(method: Method) -> dict[str, Any]:
    from weightsmith._methods.method import doc_text, models_text

    return {
        "name": method.name,
        "title": method.title,
        "family": method.family,
        "models": models_text(method),
        "base": method.base,
        "formula": method.formula,
        "source": method.source,
        "parameters": [
            {
                "name": p.name,
                "kind": p.kind,
                "given_for": p.scope,
                "default": p.default,
                "required": p.required,
                "minimum": p.minimum,
                "maximum": p.maximum,
                "choices": list(p.choices),
                "doc": doc_text(p),
            }
            for p in method.parameters
        ],
    }


def _show(method: Method) -> None:
    from weightsmith._methods.method import FAMILIES, describe_method

    # A plug-in may have written it.
    result(f"{heading(printable(method.name))}: {printable(method.title)}")
    result()
    say(_lines(method.summary.strip()) if columns(sys.stdout) is None else printable(" ".join(method.summary.split())))
    result()
    described = describe_method(method)
    for label, text in (
        ("family", FAMILIES[method.family]),
        ("formula", method.formula),
        ("use", " ".join(method.use.split())),
        ("passes", " ".join(method.passes.split())),
        ("source", method.source),
        ("models", described.inputs),
    ):
        if text:
            show_fact(label, _lines(text), 8)
    if method.parameters:
        section("parameters")
        for parameter, p in zip(method.parameters, described.parameters, strict=True):
            facts = f"{p.values}; {'' if parameter.required else 'default '}{p.default}; for {p.scope}"
            name = printable(p.name)
            lines = wrapped(f"{name}: {printable(facts)}", columns(sys.stdout))
            result(heading(name) + lines[len(name) :])
            result(wrapped(f"    {printable(p.doc)}", columns(sys.stdout), ""))
    if method.example:
        section("example")
        result(_lines(method.example.rstrip()))


def _lines(text: str) -> str:
    """Text that has lines, each of them printable."""
    return "\n".join(map(printable, text.split("\n")))


# ---- weightsmith schema


def schema(
    command: Annotated[
        Literal["recipe", "moe"],
        typer.Argument(metavar="recipe|moe", help="Recipes of `weightsmith merge`, or of `weightsmith moe`."),
    ] = "recipe",
    moe: Annotated[bool, typer.Option("--moe", help="The same as `weightsmith schema moe`.")] = False,
) -> None:
    """Print the JSON Schema of recipes.

    Editors use it to complete and check recipes. Save it to a file, and start a recipe with the comment
    `# yaml-language-server: $schema=FILE`. It includes the methods of installed packages.

    Examples:
        weightsmith schema > recipe.schema.json
        weightsmith schema moe > moe.schema.json
    """
    with failures():
        from weightsmith._methods import all_methods, installed_methods
        from weightsmith._planning.recipe.grammar import moe_schema
        from weightsmith._planning.recipe.grammar import schema as merge_schema

        installed, broken = installed_methods()
        for error in broken:
            warn(error.finding)
        make = moe_schema if moe or command == "moe" else merge_schema
        show_json(make((*all_methods(), *installed)), indent=2)


def studio(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders with models. [default: the current folder]", show_default=False),
    ] = None,
    out: Annotated[
        str,
        typer.Option("--out", metavar="FOLDER", help="Folder for results, created with the first one."),
    ] = "results",
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Address to serve; another lets others reach the page, with a token.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", help="Port to serve. [default: the first free one from 7860 on]")
    ] = None,
    hub: Annotated[bool, typer.Option("--hub/--no-hub", help="Allow models of the Hub.")] = True,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Open a local web page for merging without YAML.

    Choose models and a method, mix with sliders and curves, preview and try the merge, and run it. Serves until Ctrl-C.
    Requires the extra `studio`.

    Examples:
        weightsmith studio
        weightsmith studio ./models --browser
    """
    with failures(interrupted=lambda: "Stopped."), status_line("loading the studio", quiet=False):
        from weightsmith._app.studio.places import Places
        from weightsmith._app.studio.server import launch

        launch(Places.of(folders or ["."], out, hub=hub), host=host, port=port, browser=browser, started=end_status)
