"""A model, or a recipe whose result need not be written, with what cuts its texts into tokens; where unfinished work is."""

from __future__ import annotations

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
from weightsmith._base.errors import NOTHING_WRITTEN, NotFound, PlanError, StoreError, WeightsmithError
from weightsmith._base.installation import absent_packages, cache_home
from weightsmith._base.options import named
from weightsmith._base.tensors import DTYPES
from weightsmith._execution.execute import check_computable
from weightsmith._features.any_recipe import prepare_any, prepare_copy
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.places import find_unfinished
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner import Prepared
from weightsmith._plans import PlanDraft
from weightsmith._reports.evaluate.options import EvaluateSettings
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


_OUTPUT = ("choose another output folder", "write to another disk")


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
