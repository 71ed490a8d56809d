"""Models measured by a command of the user's: `weightsmith eval --command`.

A folder on this disk is measured as it is. Another model, or the result of a recipe, is written first, and removed afterwards.
Its folder has the same name each time, so that the next run replaces what a killed one has left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from weightsmith._base.files import expand_user
from weightsmith._base.text import status
from weightsmith._execution.execute import execute
from weightsmith._execution.identity import work_identity
from weightsmith._execution.options import RunOptions
from weightsmith._features.any_recipe import prepare_copy
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner import Prepared
from weightsmith._reports.command import Command
from weightsmith._reports.evaluate.opening import Asked, is_recipe, prepare_named, work_folder
from weightsmith._reports.evaluate.options import EvaluateSettings


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
