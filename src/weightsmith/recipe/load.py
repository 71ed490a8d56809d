"""A recipe from a file, a YAML text or a Python mapping."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weightsmith.errors import NotFound, SyntaxProblem, WeightsmithError, nearest
from weightsmith.recipe.kind import for_other_command
from weightsmith.recipe.nodes import Document, from_python, plain
from weightsmith.recipe.records import Recipe
from weightsmith.recipe.walk import build, in_order
from weightsmith.recipe.yaml import MAX_BYTES, read_yaml


def load(
    source: str | Path | Mapping[str, Any], *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Recipe | None, list[WeightsmithError]]:
    """The recipe in `source`, and all its problems; see `parse`.

    source  a path to a YAML file; YAML text, known by its newline; or a mapping, whose positions are key paths like
            `models[0].parameters.weight`

    >>> load({"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]})[1]
    []
    """
    found = read(source, lenient=lenient)
    if isinstance(found, WeightsmithError):
        return None, [found]
    if misplaced := for_other_command(found.document.root, "merge"):
        return None, [misplaced]
    recipe, problems = build(found.document, found.text, found.filename, lenient=lenient, parameter_names=parameter_names)
    return recipe, problems if isinstance(source, Mapping) else in_order(problems)


@dataclass(frozen=True, slots=True)
class Written:
    """What the user wrote: the tree, the text it was read from, and how positions in it name the file."""

    document: Document
    text: str
    filename: str


def read(source: str | Path | Mapping[str, Any], *, lenient: bool = False) -> Written | WeightsmithError:
    """The tree of a recipe of any kind, or why there is none; see `load`."""
    if isinstance(source, Mapping):
        document = from_python(source)
        text = yaml.safe_dump(plain(document.root), sort_keys=False, allow_unicode=True) if document.root else ""
        return Written(document, text, "recipe")
    if isinstance(source, str) and "\n" in source:
        return Written(read_yaml(source, "<text>", lenient=lenient), source, "<text>")
    text_or_problem = _read(Path(source))
    if isinstance(text_or_problem, WeightsmithError):
        return text_or_problem
    return Written(read_yaml(text_or_problem, str(source), lenient=lenient), text_or_problem, str(source))


def _read(path: Path) -> str | WeightsmithError:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # parse() refuses the longer ones
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
