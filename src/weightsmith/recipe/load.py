"""A recipe from a file, a YAML text or a Python mapping."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from weightsmith.errors import NotFound, SyntaxProblem, WeightsmithError, nearest
from weightsmith.recipe.grammar import read_recipe
from weightsmith.recipe.moe_grammar import SURGERY, read_moe
from weightsmith.recipe.nodes import Document, Node, Pair, describe, from_python, plain
from weightsmith.recipe.records import ModelRef, Recipe, Surgery, Upcycling
from weightsmith.recipe.walk import Walker
from weightsmith.recipe.yaml import MAX_BYTES, read_yaml

Source = str | os.PathLike[str] | Mapping[str, Any]
Command = Literal["merge", "moe"]

_PIPES = (("/", "dev"), ("/", "proc"))
"""Where the pipes of the process itself are: /dev/stdin, and `<(command)` of a shell."""
_MERGE_KEYS = frozenset({"merge_method", "models", "slices", "modules"})
_MOE_KEYS = frozenset({"experts", *SURGERY.one_of})


@dataclass(frozen=True, slots=True)
class Loaded:
    """What reading a recipe gave.

    recipe    None when its skeleton is broken; with no problems it is always there
    problems  in the order of the text
    models    every reference that could be read, also of a broken recipe
    source    name and text of the file for messages; ("", "") of a Python mapping, whose positions are key paths
    """

    recipe: Recipe | Upcycling | Surgery | None
    problems: tuple[WeightsmithError, ...]
    models: tuple[ModelRef, ...] = ()
    source: tuple[str, str] = ("", "")


def load(
    source: Source,
    command: Command | None = "merge",
    *,
    settings: Mapping[str, Any] | None = None,
    lenient: bool = False,
    parameter_names: Collection[str] = (),
) -> Loaded:
    """The recipe of a command, and all its problems.

    source    a path to a YAML file; YAML text, known by its newline; or a mapping, whose positions are key paths like
              `models[0].parameters.weight`
    command   None: whichever its top-level keys are of (`merge`, if they do not say)
    settings  values that are put into the recipe first, by key path: {"parameters.t": 0.3, "models[0].model": "a"}
    lenient, parameter_names   see `parse`; the names are of all merge methods, also for a merge in the place of a model

    Raises TypeError for a source of another type, nothing else.

    >>> soup = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]}
    >>> load(soup).problems
    ()
    >>> load(soup, settings={"dtype": "float61"}).problems[0].finding.where
    '--set dtype'
    >>> mixture = {"base_model": "a", "experts": [{"source_model": "b", "noise_scal": 1}]}
    >>> print(load(mixture, "moe").problems[0].finding.what)
    unknown key 'noise_scal' in an entry of 'experts' (did you mean 'noise_scale'?); mergekit silently ignored it
    >>> type(load(mixture | {"experts": [{"source_model": "b"}]}, None).recipe).__name__
    'Upcycling'
    """
    written = _read(source, lenient=lenient)
    if isinstance(written, WeightsmithError):
        return Loaded(None, (written,))
    if settings:
        written = _with_settings(written, settings)
    root = written.document.root
    if root is not None and (problem := _of_another_kind(root, written.filename)):
        return Loaded(None, (problem,), source=written.shown)
    found = _command(root)
    if root is not None and command and found and found != command:  # that its keys are unknown here would say nothing
        what = f"this is a recipe of `weightsmith {found}`, not of `weightsmith {command}`"
        fix = f"Run `weightsmith {found}` (in Python: weightsmith.{found})."
        return Loaded(None, (SyntaxProblem(what, where=root.where, fix=fix),), source=written.shown)
    return _build(written, command or found or "merge", lenient, parameter_names)


def parse(
    text: str, filename: str, *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Recipe | None, list[WeightsmithError]]:
    """The recipe of a merge in a YAML text, and all its problems in the order of the text. Never raises.

    filename         for positions
    lenient          what mergekit ignores silently becomes a warning, and is ignored
    parameter_names  of all methods: to recognise a parameter outside `parameters:`
    Recipe is None when its skeleton is broken; with no problems it is always there.

    >>> recipe, problems = parse("merge_method: linear\\nmodels: [{modle: a}]\\n", "r.yml")
    >>> print(problems[0])
    r.yml:2:11: unknown key 'modle' in an entry of 'models' (did you mean 'model'?); mergekit silently ignored it
      -> Write 'model'.
    """
    written = _Written(read_yaml(text, filename, lenient=lenient), text, filename, (filename, text))
    loaded = _build(written, "merge", lenient, parameter_names)
    return cast("Recipe | None", loaded.recipe), list(loaded.problems)


@dataclass(frozen=True, slots=True)
class _Written:
    """What the user wrote: the tree, its text, the name of the file in positions; name and text whose lines positions name."""

    document: Document
    text: str
    filename: str
    shown: tuple[str, str] = ("", "")


def _of_another_kind(root: Node, filename: str) -> SyntaxProblem | None:
    """The one problem of a file that is no recipe at all, where it is known what it is."""
    keys = root.value if isinstance(root.value, dict) else {}
    if {"made", "steps", "weightsmith"} <= keys.keys():
        fix = "Run `weightsmith run` with it (in Python: weightsmith.run)."
        return SyntaxProblem("this is a plan, not a recipe", where=root.where, fix=fix)
    if {"architectures", "model_type"} & keys.keys() and not (_MERGE_KEYS | _MOE_KEYS) & keys.keys():
        folder = os.path.dirname(filename) or "."  # noqa: PTH120  `./a` stays `./a`
        fix = f"Write a recipe, a YAML file that names the model: - model: {folder}."
        return SyntaxProblem("this is the config.json of a model, not a recipe", where=root.where, fix=fix)
    return None


def _command(root: Node | None) -> Command | None:
    """The command that a recipe is of; None where the keys are those of both, or of neither."""
    keys = root.value if root is not None and isinstance(root.value, dict) else {}
    merge, moe = not _MERGE_KEYS.isdisjoint(keys), not _MOE_KEYS.isdisjoint(keys)
    return None if merge == moe else "merge" if merge else "moe"


def _build(written: _Written, command: Command, lenient: bool, parameter_names: Collection[str]) -> Loaded:
    document = written.document
    walk = Walker(document, written.filename, lenient=lenient, parameter_names=parameter_names)
    read = read_moe if command == "moe" else read_recipe
    recipe = read(document.root, written.text, walk) if document.root else None
    problems: dict[tuple[type, str], WeightsmithError] = {}  # each once: an aliased value is read at each of its uses
    for problem in (*document.problems, *walk.problems):
        problems.setdefault((type(problem), str(problem)), problem)
    # Those of the text itself were found in a pass of their own.
    ordered = sorted(problems.values(), key=_position) if written.shown[0] else problems.values()
    return Loaded(recipe, tuple(ordered), tuple(dict.fromkeys(walk.models)), written.shown)


def _position(problem: WeightsmithError) -> tuple[float, int]:
    match = re.search(r":(\d+):(\d+)$", problem.finding.where)
    return (int(match[1]), int(match[2])) if match else (math.inf, 0)


_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def _with_settings(written: _Written, settings: Mapping[str, Any]) -> _Written:
    """What was written, with values put in by key path. Its text is made anew: without comments."""
    document = written.document
    root = document.root
    if root is None:
        return written
    problems = list(document.problems)
    for path, value in settings.items():
        where = f"--set {path}"
        new = from_python({"value": value}, where)
        problems += new.problems
        steps = [name or int(index) for name, index in _STEP.findall(path)]
        if "".join(m[0] for m in _STEP.finditer(path)) != path or not steps or not isinstance(root.value, dict):
            fix = "Write the keys with dots between them: parameters.t, models[0].parameters.weight."
            problems.append(SyntaxProblem("this is not the place of a value in the recipe", where=where, fix=fix))
        elif new.root is not None and isinstance(new.root.value, dict):
            changed = _put(root, steps, new.root.value["value"].value, where)
            root = changed if isinstance(changed, Node) else root
            problems += [changed] if isinstance(changed, WeightsmithError) else []
    text = yaml.safe_dump(plain(root), sort_keys=False, allow_unicode=True)
    return replace(written, document=replace(document, root=root, problems=tuple(problems)), text=text)


def _put(node: Node, steps: Sequence[str | int], value: Node, where: str) -> Node | SyntaxProblem:
    """The tree with a value in another place; mappings on the way are made."""
    if not steps:
        return value
    (step, *rest), inside = steps, node.value
    if isinstance(step, int) and isinstance(inside, tuple) and step < len(inside):
        made = _put(inside[step], rest, value, where)
        return made if isinstance(made, SyntaxProblem) else replace(node, value=(*inside[:step], made, *inside[step + 1 :]))
    if isinstance(step, str) and (inside is None or isinstance(inside, dict)):
        pairs = inside or {}
        old = pairs.get(step)
        made = _put(old.value if old else Node(None, where), rest, value, where)
        new = {**pairs, step: Pair(old.where if old and rest else where, made)} if isinstance(made, Node) else pairs
        return made if isinstance(made, SyntaxProblem) else replace(node, value=new)
    what = (
        f"the recipe has no entry [{step}] there" if isinstance(step, int) else f"{step!r} cannot be put into {describe(node)}"
    )
    return SyntaxProblem(what, where=where, fix="Write the place of a value in the recipe.")


def _read(source: Source, *, lenient: bool) -> _Written | WeightsmithError:
    if isinstance(source, Mapping):
        document = from_python(source)
        text = yaml.safe_dump(plain(document.root), sort_keys=False, allow_unicode=True) if document.root else ""
        return _Written(document, text, "recipe")
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"a recipe is the path of a file, YAML text or a mapping, not {type(source).__name__}")
    if isinstance(source, str) and "\n" in source:
        return _Written(read_yaml(source, "<text>", lenient=lenient), source, "<text>", ("<text>", source))
    text_or_problem = _text(Path(source))
    if isinstance(text_or_problem, WeightsmithError):
        return text_or_problem
    name = os.fspath(source)
    return _Written(read_yaml(text_or_problem, name, lenient=lenient), text_or_problem, name, (name, text_or_problem))


def _text(path: Path) -> str | WeightsmithError:
    try:
        about = path.stat()
        if stat.S_ISFIFO(about.st_mode) and path.parts[:2] not in _PIPES:  # nobody may ever write into it
            return NotFound("the recipe is a named pipe, not a file", where=str(path), fix="Name a YAML file.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # longer ones are refused
    except IsADirectoryError:
        inside = path / "mergekit_config.yml"
        fix = f"Name the file in it: {inside}." if inside.is_file() else "Name a YAML file."
        return NotFound("the recipe is a folder", where=str(path), fix=fix)
    except FileNotFoundError:
        return _not_found(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        return NotFound(f"the recipe cannot be read: {reason}", where=str(path))
    if len(data) > MAX_BYTES:
        return SyntaxProblem(f"the recipe is larger than {MAX_BYTES:,} bytes", where=f"{path}:1:1")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        line = before.count("\n") + 1
        column = len(before) - before.rfind("\n")
        what = f"the recipe is not UTF-8 text: byte 0x{data[error.start]:02x}"
        return SyntaxProblem(what, where=f"{path}:{line}:{column}", fix="Save the file as UTF-8.")


def _not_found(path: Path) -> NotFound:
    folder = path.parent
    if not folder.is_dir():
        return NotFound("no such recipe: there is no such folder", where=str(path))
    names = sorted(p.name for p in folder.iterdir())
    recipes = [name for name in names if name.endswith((".yml", ".yaml"))]
    details = (f"recipes in {folder}: {', '.join(recipes[:10])}{', ...' if len(recipes) > 10 else ''}",)
    return NotFound(f"no such recipe{nearest(path.name, names)}", where=str(path), details=details if recipes else ())
