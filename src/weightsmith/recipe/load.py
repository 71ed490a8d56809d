"""A recipe from a file, a YAML text or a Python mapping."""

from __future__ import annotations

import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from weightsmith.errors import NotFound, SyntaxProblem, WeightsmithError, nearest
from weightsmith.recipe.grammar import read_recipe
from weightsmith.recipe.moe_grammar import SURGERY, read_moe
from weightsmith.recipe.nodes import Document, Node, from_python, plain
from weightsmith.recipe.records import Recipe, Surgery, Upcycling
from weightsmith.recipe.walk import Walker
from weightsmith.recipe.yaml import MAX_BYTES, read_yaml

Source = str | Path | Mapping[str, Any]
Command = Literal["merge", "moe"]

_PIPES = (("/", "dev"), ("/", "proc"))
"""Where the pipes of the process itself are: /dev/stdin, and `<(command)` of a shell."""
_MERGE_KEYS = frozenset({"merge_method", "models", "slices", "modules"})
_MOE_KEYS = frozenset({"experts", *SURGERY.one_of})


def load(
    source: Source, *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Recipe | None, list[WeightsmithError]]:
    """The recipe of a merge, and all its problems; see `parse`. Never raises.

    source  a path to a YAML file; YAML text, known by its newline; or a mapping, whose positions are key paths like
            `models[0].parameters.weight`

    >>> load({"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]})[1]
    []
    """
    return _load(source, "merge", lenient, parameter_names)


def load_moe(
    source: Source, *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Upcycling | Surgery | None, list[WeightsmithError]]:
    """The recipe of `weightsmith moe`, and all its problems; see `load`.

    parameter_names  of all merge methods, for a merge in the place of a model

    >>> recipe, problems = load_moe({"base_model": "a", "experts": [{"source_model": "b", "noise_scal": 1}]})
    >>> print(problems[0].finding.what)
    unknown key 'noise_scal' in an entry of 'experts' (did you mean 'noise_scale'?); mergekit silently ignored it
    """
    return _load(source, "moe", lenient, parameter_names)


def load_any(
    source: Source, *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Recipe | Upcycling | Surgery | None, list[WeightsmithError]]:
    """The recipe of whichever command its top-level keys are of (of a merge, if they do not say), and all its problems.

    >>> [type(load_any(r)[0]).__name__ for r in (
    ...     {"merge_method": "linear", "models": [{"model": "a"}]},
    ...     {"base_model": "a", "experts": [{"source_model": "b"}]},
    ...     {"model": "a", "prune_experts": {"keep": [0, 1]}})]
    ['Recipe', 'Upcycling', 'Surgery']
    """
    return _load(source, None, lenient, parameter_names)


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
    return _build(_Written(read_yaml(text, filename, lenient=lenient), text, filename), "merge", lenient, parameter_names)


@dataclass(frozen=True, slots=True)
class _Written:
    """What the user wrote: the tree, its text, the name of the file in positions; whether these are lines of the text."""

    document: Document
    text: str
    filename: str
    lines: bool = True


def _load(
    source: Source, wanted: Command | None, lenient: bool, parameter_names: Collection[str]
) -> tuple[Any, list[WeightsmithError]]:
    written = _read(source, lenient=lenient)
    if isinstance(written, WeightsmithError):
        return None, [written]
    root = written.document.root
    found = _command(root)
    if root is not None and wanted and found and found != wanted:  # that its keys are unknown here would say nothing
        what = f"this is a recipe of `weightsmith {found}`, not of `weightsmith {wanted}`"
        fix = f"Run `weightsmith {found}` (in Python: weightsmith.{found})."
        return None, [SyntaxProblem(what, where=root.where, fix=fix)]
    return _build(written, wanted or found or "merge", lenient, parameter_names)


def _command(root: Node | None) -> Command | None:
    """The command that a recipe is of; None where the keys are those of both, or of neither."""
    keys = root.value if root is not None and isinstance(root.value, dict) else {}
    merge, moe = not _MERGE_KEYS.isdisjoint(keys), not _MOE_KEYS.isdisjoint(keys)
    return None if merge == moe else "merge" if merge else "moe"


def _build(
    written: _Written, command: Command, lenient: bool, parameter_names: Collection[str]
) -> tuple[Any, list[WeightsmithError]]:
    document = written.document
    walk = Walker(document, written.filename, lenient=lenient, parameter_names=parameter_names)
    read = read_moe if command == "moe" else read_recipe
    recipe = read(document.root, written.text, walk) if document.root else None
    problems: dict[tuple[type, str], WeightsmithError] = {}  # each once: an aliased value is read at each of its uses
    for problem in (*document.problems, *walk.problems):
        problems.setdefault((type(problem), str(problem)), problem)
    # Those of the text itself were found in a pass of their own.
    return recipe, sorted(problems.values(), key=_position) if written.lines else list(problems.values())


def _position(problem: WeightsmithError) -> tuple[int, int]:
    _, line, column = problem.finding.where.rsplit(":", 2)
    return int(line), int(column)


def _read(source: Source, *, lenient: bool) -> _Written | WeightsmithError:
    if isinstance(source, Mapping):
        document = from_python(source)
        text = yaml.safe_dump(plain(document.root), sort_keys=False, allow_unicode=True) if document.root else ""
        return _Written(document, text, "recipe", lines=False)
    if isinstance(source, str) and "\n" in source:
        return _Written(read_yaml(source, "<text>", lenient=lenient), source, "<text>")
    text_or_problem = _text(Path(source))
    if isinstance(text_or_problem, WeightsmithError):
        return text_or_problem
    return _Written(read_yaml(text_or_problem, str(source), lenient=lenient), text_or_problem, str(source))


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
