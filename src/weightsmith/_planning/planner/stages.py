"""Recipes whose results are models of others: in which order they are planned, and which results must be written first.

A result that is not written is a source of tensors that computes what is read (`engine.computed`), so several recipes are one
plan: nothing but the last result is stored.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import Finding
from weightsmith._base.files import exists, expand_user, is_folder, read_bounded
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._outputs.manifest import check_file_name
from weightsmith._planning.recipe import ModelRef, Recipe
from weightsmith._plans import Plan

if TYPE_CHECKING:
    from weightsmith._engine.computed import Computed

MAX_READS = 64
"""Tiles that are read for one tile of a result that is computed on the way. Each use of it reads them again."""
MAX_DEPTH = 8
"""Results that are computed on the way, each for the next."""


def in_order(recipe: Recipe) -> list[ModelRef]:
    """The other recipes that a recipe depends on, by a reference to each, and each after those that it depends on itself."""
    found: list[ModelRef] = []
    seen: set[str] = set()
    trail: list[tuple[ModelRef | None, Iterator[ModelRef]]] = [(None, recipe.references)]
    while trail:
        ref = next(trail[-1][1], None)
        if ref is None:
            done, _ = trail.pop()
            found += [done] if done is not None else []
        elif ref.path in recipe.stages and ref.path not in seen:
            seen.add(ref.path)
            inner = recipe.stages[ref.path]
            trail.append((ref, inner.references if inner is not None else iter(())))
    return found


def adapted(recipe: Recipe, stages: Sequence[ModelRef]) -> set[str]:
    """The recipes to whose results an adapter is applied."""
    users = [recipe, *(recipe.stages[ref.path] for ref in stages)]
    return {ref.path for user in users if user is not None for ref in user.references if ref.lora is not None}


def result_of(label: str, source: Computed, *, whole: bool) -> Checkpoint:
    """The result of a plan, as a model of another.

    source  of its tensors
    whole   the other plan computes them; else its result is written before it is read
    """
    plan = source.plan
    donor = source.inputs[plan.donor]
    others = [checkpoint for checkpoint in source.inputs if checkpoint is not donor]
    temporary = _files_of(plan, donor) if plan.files else None
    folder = ModelFolder(
        donor.folder if temporary is None else Path(temporary.name),
        config=plan.config,
        files=tuple(sorted({*plan.carried, *plan.files, *([] if plan.config is None else ["config.json"])})),
        alone=donor.alone,
        temporary=temporary,
        repositories=tuple(dict.fromkeys(r for checkpoint in (donor, *others) for r in checkpoint.repositories)),
    )
    return Checkpoint(label, source, folder, plan=plan if whole else None)


def _files_of(plan: Plan, donor: Checkpoint) -> tempfile.TemporaryDirectory[str]:
    """The files of a result that has some of its own, such as a tokenizer; they replace the donor's."""
    donor.fetch(plan.carried)
    temporary = tempfile.TemporaryDirectory(prefix="weightsmith-", ignore_cleanup_errors=True)
    files: dict[str, bytes | Path] = {name: donor.folder / name for name in plan.carried}
    for name, data in {**files, **plan.files}.items():
        path = Path(temporary.name) / check_file_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_bounded(data, MAX_COPIED_BYTES) if isinstance(data, Path) else data)
    return temporary


def why_written(plan: Plan, source: Computed, reads: int, depth: int) -> str:
    """Why the result of a plan must be written before another plan reads it; "" if it can be computed then.

    reads  tiles that are read for one of its tiles
    depth  results that are computed for it, each for the next
    """
    name = plan.made.name
    if plan.products:
        return f"{name} looks at the whole model first"
    if source.holds_matrices:
        return f"{name} holds whole matrices"
    if reads > MAX_READS:
        return f"each of its tiles is computed from {reads} others"
    if depth > MAX_DEPTH:
        return f"it depends on {depth} others, one after the other"
    return ""


def count_reads(plan: Plan, inner: Mapping[int, int]) -> int:
    """Tiles of models that are read for one tile of a result. inner: the same of its models that are computed, by number."""
    leaves = [leaf.inputs for step in plan.steps for leaf in step.leaves]
    return max((sum(inner.get(read.model, 1) for read in reads) for reads in leaves), default=1)


def same_name(refs: Sequence[ModelRef]) -> list[Finding]:
    """A warning for each recipe whose name is also a folder."""
    found = []
    for ref in refs:
        path = expand_user(ref.path)
        if exists(path):
            what = f"{ref.path!r} is the recipe of this name, not the {'folder' if is_folder(path) else 'file'}"
            found.append(Finding(what, ref.where, fix=f"rename the recipe, or write ./{ref.path} for the other"))
    return found
