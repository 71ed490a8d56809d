"""Patterns in place of a model, `./run/checkpoint-*`: one entry becomes one for each folder that matches.

`*`, `?` and `[...]` in an entry of `models` or `sources`; local folders only, in natural order (checkpoint-9 before
checkpoint-10). An existing path of this exact name is not a pattern.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weightsmith._base.errors import Finding, NotFound, SyntaxProblem, WeightsmithError
from weightsmith._base.files import expand_user, is_folder, real_path
from weightsmith._files.copied import is_weights
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.formats.opening import choose_kind, suffixes
from weightsmith._planning.recipe import SCHEDULED, Input, ModelRef, Recipe, Schedule, Slice

_SHOWN = 8  # names that a message lists


def match_patterns(recipe: Recipe, base: ModelRef | None) -> tuple[Recipe, list[WeightsmithError], list[Finding]]:
    """The recipe with its patterns replaced by what they match, the problems with them, and warnings.

    base  never one of the matches: the model that is the base of the merge by a method that has one

    Of an entry that takes the mean of the last few (`weight: {lawa: 5}`) only these stay: the others, with a weight of 0, would
    be read for nothing. Left out with a warning: a folder without weights (an optimizer's state, logs), and a link to another
    match. A folder whose weights cannot be used is not left out: opening it says why.
    """
    matcher = _Matcher(base)
    matched = replace(
        recipe,
        models=matcher.inputs(recipe.models),
        slices=matcher.slices(recipe.slices),
        modules=tuple(replace(m, models=matcher.inputs(m.models), slices=matcher.slices(m.slices)) for m in recipe.modules),
    )
    if recipe.base_model is not None:
        matcher.single(recipe.base_model)
    return matched, matcher.problems, matcher.findings


def is_pattern(ref: ModelRef) -> bool:
    """True if a reference is a pattern for folders."""
    if not glob.has_magic(ref.path) or "://" in ref.path:
        return False
    try:
        os.lstat(expand_user(ref.path))
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # a name too long, a NUL: no possible path, and no possible pattern
        pass
    return False


class _Matcher:
    def __init__(self, base: ModelRef | None) -> None:
        self.base = None if base is None or base.revision else _place(base.path)
        self.problems: list[WeightsmithError] = []
        self.findings: list[Finding] = []

    def inputs(self, inputs: Sequence[Input]) -> tuple[Input, ...]:
        found: list[Input] = []
        for entry in inputs:
            if not is_pattern(entry.model):
                found.append(entry)
                continue
            refs = self.matches(entry.model)
            refs = refs[-_wanted(entry, len(refs)) :]
            found += [replace(entry, model=ref, matched=(k, len(refs))) for k, ref in enumerate(refs)]
        return tuple(found)

    def slices(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        for s in slices:
            if s.base_model is not None:
                self.single(s.base_model)
        return tuple(replace(s, sources=self.inputs(s.sources)) for s in slices)

    def single(self, ref: ModelRef) -> None:
        """Refuse a pattern where one model is meant."""
        if is_pattern(ref):
            what = f"base_model is one model, and {ref} is a pattern"
            self.problems.append(SyntaxProblem(what, where=ref.where, fix="Name the folder."))

    def matches(self, ref: ModelRef) -> list[ModelRef]:
        """A reference for each model that matches, in natural order; none when there is a problem."""
        if ref.revision:
            what = f"{ref}: a pattern matches local folders, which have no revisions"
            self.problems.append(SyntaxProblem(what, where=ref.where, fix="Drop the @."))
            return []
        pattern = str(ref.path).rstrip("/")
        if pattern.startswith("~"):
            pattern = str(expand_user(pattern))
        every = glob.glob(pattern)  # noqa: PTH207  Path.glob drops the `./` in front, and refuses absolute patterns
        files = pattern.lower().endswith(suffixes())
        found = [Path(p) for p in every]
        meant = [path.is_dir() or (files and path.is_file() and is_weights(path.name)) for path in found]
        paths = sorted(itertools.compress(every, meant), key=_natural)
        paths = [p for p in paths if self.base is None or _place(p) != self.base]
        kept, left_out = _sort_out(paths)
        if kept:
            if left_out:
                are = "is" if len(left_out) == 1 else "are"
                what = f"{len(left_out)} of {len(paths)} folders that match {ref} {are} left out"
                self.findings.append(Finding(what, ref.where, _some(left_out)))
            return [ModelRef(path, "", path, ref.where) for path in kept]
        if left_out:
            what = f"no folder that matches {ref} holds weights"
            fix = "correct the pattern, or write the models one by one"
            self.problems.append(NotFound(what, where=ref.where, details=_some(left_out), fix=fix))
        else:
            self.problems.append(_no_match(ref, pattern))
        return []


def _wanted(entry: Input, count: int) -> int:
    """How many of the last matches of an entry can have a weight, `count` if all."""
    setting = entry.parameters.get(SCHEDULED)
    first = setting.entries[0] if setting is not None and setting.entries else None
    if first is None or first.filter not in (None, "*") or not isinstance(first.value, Schedule) or first.value.rule != "lawa":
        return count
    return min(count, int(first.value.setting))


def _sort_out(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths that are models, and why the others are not."""
    real = {_place(p): p for p in reversed(paths) if not Path(p).is_symlink()}
    kept: list[str] = []
    left_out: list[str] = []
    for path in paths:
        other = real.setdefault(_place(path), path)
        if other != path:
            left_out.append(f"{path}: a link to {other}")
        elif reason := _without_weights(Path(path)):
            left_out.append(f"{path}: {reason}")
        else:
            kept.append(path)
    return kept, left_out


def _without_weights(path: Path) -> str:
    """What a folder holds instead of weights, "" for one that has some, usable or not."""
    if not path.is_dir():
        return ""
    try:
        entries = sorted(path.iterdir())
        choose_kind([p.name for p in entries if not p.is_dir()], str(path))
    except NotFound:
        names = [p.name for p in entries]
        return f"no weights, but {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}" if names else "empty"
    except (OSError, WeightsmithError):
        pass
    return ""


def _no_match(ref: ModelRef, pattern: str) -> NotFound:
    fixed = Path(pattern)
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    where = "the current folder" if fixed == Path() else str(fixed)
    details = (f"there is no folder {where}",)
    if os.access(fixed, os.R_OK | os.X_OK) and is_folder(fixed):
        names = sorted((p.name for p in fixed.iterdir() if p.is_dir() and not p.name.startswith(".")), key=natural_key)
        shown = f"{', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
        details = (f"folders in {where}: {shown}" if names else f"{where} holds no folders",)
    fix = "" if Path(pattern).is_absolute() else f"Check the pattern: it matches local folders, relative to {Path.cwd()}."
    return NotFound(f"no folder matches {ref}", where=ref.where, details=details, fix=fix)


def _some(lines: Sequence[str]) -> tuple[str, ...]:
    return (*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more") if len(lines) > _SHOWN else tuple(lines)


def _natural(path: str) -> tuple[tuple[str, str], ...]:
    return tuple(natural_key(part) for part in Path(path).parts)


def _place(path: str) -> Path:
    return real_path(expand_user(path))
