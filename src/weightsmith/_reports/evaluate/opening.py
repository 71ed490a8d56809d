"""A model, or a recipe whose result need not be written, with what cuts its texts into tokens; where unfinished work is.

A folder on this disk is measured by a command as it is. Another model, or the result of a recipe, is written first, and removed
afterwards. Its folder has the same name each time, so that the next run replaces what a killed one has left.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weightsmith._activations.decoder import Base
from weightsmith._activations.model import PACKAGES, TextModel, base_of, result_of
from weightsmith._activations.rows import TOKENIZER
from weightsmith._activations.scored_rows import Cutter
from weightsmith._base.errors import NOTHING_WRITTEN, NotFound, PlanError, StoreError, WeightsmithError, undoing
from weightsmith._base.files import expand_user
from weightsmith._base.installation import absent_packages, cache_home
from weightsmith._base.options import named
from weightsmith._base.tensors import DTYPES
from weightsmith._base.text import status
from weightsmith._execution.execute import check_computable, execute
from weightsmith._execution.identity import work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._features.any_recipe import prepare_any, prepare_copy
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.places import find_unfinished
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import Prepared, make_readable
from weightsmith._plans import PlanDraft
from weightsmith._reports.command import Command
from weightsmith._reports.options import EvaluateSettings
from weightsmith.abc.output import Unfinished

Named = str | os.PathLike[str] | Mapping[str, Any]
"""A model as a recipe names it; or a recipe: the path of a YAML file, or a mapping."""

Asked = Named | Prepared
"""A model, a recipe, or a plan with its models open."""

_RECIPES = (".yml", ".yaml")


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that is evaluated. positions: the most tokens that a row may have."""

    name: str
    prepared: Prepared
    model: TextModel
    base: Base
    cutter: Cutter
    positions: int


def name_of(model: Named) -> str:
    """The name of a model in messages and tables."""
    return str(model.get("name", "recipe")) if isinstance(model, Mapping) else os.fspath(model)


def is_recipe(path: str | os.PathLike[str]) -> bool:
    """Whether it is the path of a YAML file, and no model."""
    return Path(path).suffix in _RECIPES


def prepare_named(model: Named) -> Prepared:
    """The plan of a model or a recipe. Raises PlanError.

    The result of a recipe has the dtypes that it would be written in. Codes of a quantised model are decoded to float32, so
    that nothing is rounded.
    """
    if isinstance(model, Mapping) or is_recipe(model):
        return prepare_any(model, RecipeOptions(), QuantizeSettings())
    return prepare_copy(model, RecipeOptions(out_dtype=DTYPES["F32"]), QuantizeSettings())


def prepare_readable(model: Named, *, streamed: bool) -> Prepared:
    """As `prepare_named`, with what is missing downloaded, so that tensors can be read. Raises PlanError, CheckpointError.

    streamed  weights of Hub models are read over the network
    """
    prepared = prepare_named(model)
    with undoing(prepared.close):
        make_readable(prepared.inputs, streamed=streamed)
    return prepared


def opened(name: str, prepared: Prepared) -> Opened:
    """A model with its tokenizer. Raises PlanError: a model that is not a decoder, or has no tokenizer."""
    if problems := absent_packages(PACKAGES, "evaluations", "calibration"):
        raise PlanError(problems)
    check_computable(prepared)
    plan = prepared.plan
    model = replace(result_of(PlanDraft.of(plan), prepared.inputs, plan.steps), label=name)
    base, donor = base_of(model), model.checkpoint
    if TOKENIZER not in plan.files and TOKENIZER not in donor.files:
        fix = "put the model's tokenizer.json next to its weights"
        raise PlanError([NotFound("a text needs the model's tokenizer.json", where=name, fix=fix)])
    return Opened(name, prepared, model, base, model.cutter, model.positions)


def head_weights(base: Base) -> tuple[str, ...]:
    """The weights outside the layers that the logits of a model depend on."""
    from weightsmith._activations.running import decoder_of

    return tuple(dict.fromkeys(decoder_of(base).head_weights.values()))


def check_families(bases: Sequence[Base]) -> None:
    """Raise PlanError for models that transformers cannot build."""
    from weightsmith._activations.running import decoder_of

    problems = list[WeightsmithError]()
    for base in bases:
        try:
            decoder_of(base)
        except PlanError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems)


_OUTPUT = ("choose another output folder", "write to another disk", "write somewhere else")


PREFIX = "evaluation-"


def evaluations_folder() -> Path:
    """Where evaluations keep their unfinished work unless the user names a folder. Raises StoreError without a home."""
    try:
        return cache_home() / "evaluations"
    except RuntimeError as error:
        what, fix = f"no folder for unfinished work: {error}", f"name one with {named('work')}"
        raise StoreError(what, where="evaluate", fix=fix, state=NOTHING_WRITTEN) from error


def find_evaluations() -> Iterator[Unfinished]:
    """What interrupted evaluations have left in `evaluations_folder`: unfinished work, and models for a killed command.

    Raises StoreError.
    """
    try:
        folder = evaluations_folder()
    except StoreError:  # without a home, they had to name a folder
        return
    if not folder.is_dir():
        return
    yield from find_unfinished(str(folder))
    for path in sorted(folder.glob(f"{PREFIX}*")):
        if (path / MANIFEST_NAME).is_file():
            why = "a model for the command of an evaluation: remove it yourself, if none is running"
            nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Unfinished(path, path, 0, nbytes, path.stat().st_mtime, why, partial(remove_checkpoint, path))


@contextmanager
def work_folder(settings: EvaluateSettings, name: str) -> Iterator[Path]:
    """The folder of this name for unfinished work. A StoreError of the block says how to choose another place for it."""
    try:
        yield (Path(settings.work) if settings.work else evaluations_folder()) / f"{PREFIX}{name}"
    except StoreError as error:
        step = "choose another folder for unfinished work" + ("" if settings.work else f" with {named('work')}")
        fix = error.finding.fix
        for text in _OUTPUT:
            fix = fix.replace(text, step).replace(text.capitalize(), step.capitalize())
        error.finding = replace(error.finding, fix=fix)
        raise


# ---- models that a command of the user's measures


def measured(
    asked: Mapping[str, Asked], command: Command, settings: EvaluateSettings, running: RunOptions
) -> tuple[float, ...]:
    """The number that a command finds for each model. Raises CommandFailed, and what writing a model raises."""
    numbers = []
    for name, model in asked.items():
        with _folder_of(model, command, settings, running) as folder:
            status(f"measuring {name} by the command")
            numbers.append(command.measured(folder))
    return tuple(numbers)


@contextmanager
def _folder_of(model: Asked, command: Command, settings: EvaluateSettings, running: RunOptions) -> Iterator[Path]:
    if not isinstance(model, Prepared | Mapping) and (folder := expand_user(model)).is_dir():
        yield folder
        return
    with _prepared(model) as prepared:
        identity = f"{work_identity(prepared.plan, prepared.inputs, running.device)} {command.identity}"
        with work_folder(settings, hashlib.sha256(identity.encode()).hexdigest()[:12]) as out:
            execute(prepared, out, replace(running, report=None, push=None, evaluate=None, overwrite=True))
    try:
        yield out
    finally:
        remove_checkpoint(out)


@contextmanager
def _prepared(model: Asked) -> Iterator[Prepared]:
    """The plan of what is to be measured, in the dtypes that it would be written in."""
    if isinstance(model, Prepared):
        yield model
    elif isinstance(model, Mapping) or is_recipe(model):
        with prepare_named(model) as prepared:
            yield prepared
    else:
        with prepare_copy(model, RecipeOptions(), QuantizeSettings()) as prepared:
            yield prepared
