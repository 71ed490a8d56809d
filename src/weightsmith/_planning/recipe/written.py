"""Recipes as they are written: a file, YAML text, mappings, or a sum of models in Python. With values set by key path."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from weightsmith._base.errors import (
    NotFound,
    ParameterError,
    SyntaxProblem,
    WeightsmithError,
    nearest,
)
from weightsmith._base.files import fix_for_windows_path, is_folder
from weightsmith._planning.recipe.yaml import MAX_BYTES, Document, Node, Pair, describe, from_python, plain, read_yaml


class StandardInput(str):
    """A recipe's text that was read from standard input; messages name it `<stdin>`."""


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    """Recipes before they are parsed: trees, the whole text, file name for positions; and the name and text these refer to."""

    documents: tuple[Document, ...]
    text: str
    filename: str
    shown: tuple[str, str] = ("", "")

    @property
    def last(self) -> int:
        """The document of the result: the first one without a name, else the last."""
        unnamed = (i for i, document in enumerate(self.documents) if not name_of(document))
        return next(unnamed, len(self.documents) - 1)

    @property
    def folder(self) -> Path:
        """Folder of the recipe's file; the current folder if it has no file."""
        return Path() if self.filename.startswith("<") or not self.shown[0] else Path(self.filename).parent


Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]] | WrittenRecipe


def copy_of(model: str | os.PathLike[str], **keys: Any) -> WrittenRecipe:
    """The recipe that copies a model: the argument MODEL of a command, which is the position of all its problems.

    keys  further ones of the recipe
    """
    document = from_python({"merge_method": "passthrough", "models": [{"model": os.fspath(model)}], **keys}, "MODEL")
    return WrittenRecipe((document,), as_yaml(document.root), "recipe")


# ---- sources


_PIPES = (("/", "dev"), ("/", "proc"))
"""Where the pipes of the process itself are: /dev/stdin, and `<(command)` of a shell."""

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")


def read_source(source: Source, *, lenient: bool) -> WrittenRecipe | WeightsmithError:
    if isinstance(source, WrittenRecipe):
        return source
    if isinstance(source, Mapping):
        document = from_python(source)
        return WrittenRecipe((document,), as_yaml(document.root), "recipe")
    if isinstance(source, list | tuple) and source and all(isinstance(mapping, Mapping) for mapping in source):
        read = [from_python(mapping, within=f"[{i}]") for i, mapping in enumerate(source)]
        documents = tuple(replace(document, text=as_yaml(document.root)) for document in read)
        return WrittenRecipe(documents, "---\n".join(document.text for document in documents), "recipe")
    if not isinstance(source, str | os.PathLike):
        what = "a recipe is the path of a file, YAML text, a mapping or a list of mappings"
        example = "{'merge_method': 'linear', 'models': [{'model': 'a'}, {'model': 'b'}], 'parameters': {'weight': 1}}"
        raise TypeError(f"{what}, not {type(source).__name__}. An example of a mapping: {example}")
    if isinstance(source, str) and "\n" in source:
        name = "<stdin>" if isinstance(source, StandardInput) else "<text>"
        return WrittenRecipe(read_yaml(source, name, lenient=lenient), source, name, (name, source))
    if isinstance(source, str) and "://" in source:
        return _address_problem(source)
    text_or_problem = _text_of_file(Path(source))
    if isinstance(text_or_problem, WeightsmithError):
        return text_or_problem
    name = os.fspath(source)
    return WrittenRecipe(read_yaml(text_or_problem, name, lenient=lenient), text_or_problem, name, (name, text_or_problem))


def _text_of_file(path: Path) -> str | WeightsmithError:
    try:
        about = path.stat()
        if stat.S_ISFIFO(about.st_mode) and path.parts[:2] not in _PIPES:  # reading might wait forever
            return NotFound("the recipe is a named pipe, not a file", where=str(path), fix="Name a YAML file.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # longer ones are refused
    except IsADirectoryError:
        inside = path / "mergekit_config.yml"
        fix = (
            f"Name the file in it: {inside}."
            if inside.is_file()
            else "Name a YAML file: weightsmith init writes one, with --goal experts for moe."
        )
        if (path / "config.json").is_file():
            fix = f"Write a recipe that names it: weightsmith init --model {path}."
            return NotFound("this is the folder of a model, not a recipe", where=str(path), fix=fix)
        return NotFound("the recipe is a folder", where=str(path), fix=fix)
    except FileNotFoundError:
        return _not_found(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        return NotFound(f"the recipe cannot be read: {reason}", where=str(path))
    if path.suffix in _MODEL_FILES:
        fix = f"Write a recipe that names it: weightsmith init --model {path}."
        return NotFound("this is the file of a model, not a recipe", where=str(path), fix=fix)
    if len(data) > MAX_BYTES:
        return SyntaxProblem(f"the recipe is larger than {MAX_BYTES:,} bytes", where=f"{path}:1:1")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        line = before.count("\n") + 1
        column = len(before) - before.rfind("\n")
        if path.suffix in _WEIGHTS:
            return NotFound("this is a file of weights, not a recipe", where=str(path), fix="Name a YAML file.")
        what = f"the recipe is not UTF-8 text: byte 0x{data[error.start]:02x}"
        return SyntaxProblem(what, where=f"{path}:{line}:{column}", fix="Save the file as UTF-8.")


_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]", re.ASCII)
_MODEL_FILES = (".gguf", ".safetensors")
_HUB_PAGE = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/([\w.-]+/[\w.-]+)/?", re.ASCII)


def _address_problem(address: str) -> NotFound:
    """Why an address is no recipe. No key or password of it is shown."""
    if page := _HUB_PAGE.fullmatch(address):
        fix = f"Write a recipe that names it: weightsmith init --model {page[1]}."
        return NotFound("this is the address of a model, not a recipe", where=address, fix=fix)
    scheme, _, rest = address.partition("://")
    shown = f"{scheme}://{rest.rpartition('@')[2]}".partition("?")[0]
    return NotFound("a recipe is read from this disk, not from an address", where=shown, fix="Download it, and name the file.")


def _not_found(path: Path) -> NotFound:
    folder = path.parent
    if os.sep == "/" and (fix := fix_for_windows_path(str(path))):
        return NotFound("no such recipe: this is a Windows path", where=str(path), fix=fix)
    if not is_folder(folder):
        is_name = _HUB_NAME.fullmatch(str(path)) and path.suffix not in (".yml", ".yaml")
        fix = f"Write a recipe that names it, if it is a model of the Hub: weightsmith init --model {path}." if is_name else ""
        return NotFound(f"no such recipe: the folder {folder} does not exist", where=str(path), fix=fix)
    names = sorted(p.name for p in folder.iterdir()) if os.access(folder, os.R_OK) else []
    recipes = [name for name in names if name.endswith((".yml", ".yaml"))]
    details = (f"recipes in {folder}: {', '.join(recipes[:10])}{', ...' if len(recipes) > 10 else ''}",)
    fix = "" if recipes else "Write a recipe with `weightsmith init`."
    return NotFound(f"no such recipe{nearest(path.name, names)}", where=str(path), details=details if recipes else (), fix=fix)


# ---- values that options set


_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def with_settings(written: WrittenRecipe, settings: Mapping[str, Any]) -> WrittenRecipe:
    """Set values by key path. The texts are generated again, without comments."""
    documents = list(written.documents)
    names = [name_of(document) for document in documents] if len(documents) > 1 else []
    for path, value in settings.items():
        where = f"--set {path}"
        i = next((i for i, name in enumerate(names) if name and path.startswith(f"{name}.")), written.last)
        inner = path.removeprefix(f"{names[i]}.") if names else path
        document = documents[i]
        root, problems = document.root, list(document.problems)
        if root is None:
            continue
        new = from_python({"value": value}, where)
        problems += new.problems
        steps = [name or int(index) for name, index in _STEP.findall(inner)]
        if "".join(m[0] for m in _STEP.finditer(inner)) != inner or not steps or not isinstance(root.value, dict):
            fix = "Write the keys with dots between them: parameters.t, models[0].parameters.weight."
            problems.append(SyntaxProblem("this is not the place of a value in the recipe", where=where, fix=fix))
        elif new.root is not None and isinstance(new.root.value, dict):
            changed = _put(root, steps, new.root.value["value"].value, where)
            root = changed if isinstance(changed, Node) else root
            problems += [changed] if isinstance(changed, WeightsmithError) else []
        documents[i] = replace(document, root=root, problems=tuple(problems), text=as_yaml(root))
    return replace(written, documents=tuple(documents), text="---\n".join(as_yaml(document.root) for document in documents))


def _put(node: Node, steps: Sequence[str | int], value: Node, where: str) -> Node | SyntaxProblem:
    """The tree with one value set; missing mappings are created."""
    if not steps:
        return value
    (step, *rest), inside = steps, node.value
    if isinstance(step, int) and isinstance(inside, tuple) and step < len(inside):
        changed = _put(inside[step], rest, value, where)
        return (
            changed
            if isinstance(changed, SyntaxProblem)
            else replace(node, value=(*inside[:step], changed, *inside[step + 1 :]))
        )
    if isinstance(step, str) and (inside is None or isinstance(inside, dict)):
        pairs = inside or {}
        old = pairs.get(step)
        changed = _put(old.value if old else Node(None, where), rest, value, where)
        new = {**pairs, step: Pair(old.where if old and rest else where, changed)} if isinstance(changed, Node) else pairs
        return changed if isinstance(changed, SyntaxProblem) else replace(node, value=new)
    what = f"{step!r} cannot be set in {describe(node)}"
    if isinstance(step, int):
        known = len(inside) if isinstance(inside, tuple) else 0
        what = f"the recipe has no entry [{step}] there" + (f", but {known}, counted from 0" if known else "")
    return SyntaxProblem(what, where=where, fix="Write the place of a value in the recipe.")


def as_yaml(root: Node | None) -> str:
    return "" if root is None else yaml.safe_dump(plain(root), sort_keys=False, allow_unicode=True)


def name_of(document: Document) -> str:
    """The name that a recipe has, which may be broken; "" for none."""
    pairs = document.root.value if document.root is not None else None
    name = pairs["name"].value.value if isinstance(pairs, dict) and "name" in pairs else None
    return name if isinstance(name, str) else ""


# ---- sums of models: `base + 0.5 * (fr - base)`

_TOLERANCE = 1e-6
"""How far the sum of the coefficients may be from 1: that of (a + b + c) / 3 is 0.9999999999999999."""


def model(name: str | os.PathLike[str]) -> Sum:
    """A model in a sum, which is a recipe.

    name  folder, Hub id or `base+adapter`, or an open or merged model

    >>> base, fr, de = model("base"), model("fr"), model("de")
    >>> base + 0.5 * (fr - base)
    <base + 0.5 * (fr - base)>
    >>> dict((fr + de) / 2)["merge_method"]
    'linear'
    """
    return Sum({os.fspath(name): 1.0}, (os.fspath(name),))


class Sum(Mapping[str, Any]):
    """Models times numbers: a recipe, with the keys that the same recipe has as a dict. See `weightsmith.model`.

    coefficients       model → number, in the order of the sum
    added, subtracted  models with a plus before them, and with a minus, in order; some have both

    A sum whose coefficients add up to 1 is a model. If one model alone is subtracted, and added too, the sum is that model
    plus task vectors: `merge_method: task_arithmetic`. Other sums are `linear`.

    >>> base, fr, de = model("base"), model("fr"), model("de")
    >>> dict(base + 0.5 * (fr - base))
    {'merge_method': 'task_arithmetic', 'base_model': 'base', 'models': [{'model': 'fr', 'parameters': {'weight': 0.5}}]}
    >>> recipe = {**(fr + de) / 2, "dtype": "bfloat16"}
    """

    __array_ufunc__ = None  # numpy leaves `np.float64(2) * sum` to the sum

    def __init__(self, coefficients: Mapping[str, float], added: Iterable[str], subtracted: Iterable[str] = ()) -> None:
        self.coefficients = dict(coefficients)
        self.added, self.subtracted = tuple(dict.fromkeys(added)), tuple(dict.fromkeys(subtracted))

    def __add__(self, other: object) -> Sum:
        if not isinstance(other, Sum):
            return NotImplemented
        coefficients = dict(self.coefficients)
        for name, coefficient in other.coefficients.items():
            coefficients[name] = coefficients.get(name, 0.0) + coefficient
        return Sum(coefficients, (*self.added, *other.added), (*self.subtracted, *other.subtracted))

    def __sub__(self, other: object) -> Sum:
        return self + -other if isinstance(other, Sum) else NotImplemented

    def __mul__(self, factor: object) -> Sum:
        number = _number(factor)
        if number is None:
            return NotImplemented
        if not math.isfinite(number):
            raise ParameterError(f"a model times {number} is no model", fix="write a finite number")
        signs = (self.added, self.subtracted) if number >= 0 else (self.subtracted, self.added)
        return Sum({name: coefficient * number for name, coefficient in self.coefficients.items()}, *signs)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Sum:
        number = _number(divisor)
        if number is None:
            return NotImplemented
        if not number:
            raise ParameterError("a model divided by 0 is no model", fix="write another number")
        return self * (1 / number)

    def __neg__(self) -> Sum:
        return self * -1.0

    @property
    def _base(self) -> str | None:
        """The model that the others are task vectors of, if the sum is written so."""
        return self.subtracted[0] if len(self.subtracted) == 1 and self.subtracted[0] in self.added else None

    @cached_property
    def _recipe(self) -> dict[str, Any]:
        total = math.fsum(self.coefficients.values())
        if abs(total - 1) > _TOLERANCE:
            what = f"the coefficients of {self!r} add up to {total:g}, and those of a model to 1"
            fix = "add a base, as in base + 0.5 * (fr - base); or write a recipe with merge_method linear and normalize false"
            raise ParameterError(what, fix=fix)
        weights = {name: weight for name, weight in self.coefficients.items() if weight}
        if self._base is not None and weights.keys() != {self._base}:
            models = _entries({name: weight for name, weight in weights.items() if name != self._base})
            return {"merge_method": "task_arithmetic", "base_model": self._base, "models": models}
        if len(weights) == 1:
            return {"merge_method": "passthrough", "models": [{"model": name} for name in weights]}
        return {"merge_method": "linear", "models": _entries(weights), "parameters": {"normalize": False}}

    def __getitem__(self, key: str) -> Any:
        return self._recipe[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipe)

    def __len__(self) -> int:
        return len(self._recipe)

    def __repr__(self) -> str:
        """As one would write it, with the coefficients added up."""
        total = math.fsum(self.coefficients.values())
        if self._base is not None and abs(total - 1) <= _TOLERANCE:
            others = {name: factor for name, factor in self.coefficients.items() if name != self._base and factor}
            return (
                f"<{_joined([self._base, *(f'{_times(factor)}({name} - {self._base})' for name, factor in others.items())])}>"
            )
        return f"<{_joined([f'{_times(factor)}{name}' for name, factor in self.coefficients.items() if factor]) or '0'}>"


def _number(value: object) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, Real) else float(value)


def _entries(weights: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"model": name, "parameters": {"weight": weight}} for name, weight in weights.items()]


def _times(number: float) -> str:
    return {1.0: "", -1.0: "-"}.get(number, f"{number:g} * ")


def _joined(terms: list[str]) -> str:
    """Terms with the signs between them.

    >>> _joined(["a", "-0.5 * b", "c"])
    'a - 0.5 * b + c'
    """
    return " + ".join(terms).replace("+ -", "- ")
