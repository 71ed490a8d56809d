"""Single numbers of the output, read or computed while a recipe is planned: keys of some GGUF files hold them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from weightsmith._base.errors import PlanError, Unsupported
from weightsmith._base.options import named
from weightsmith._planning.planner.prepared import MAX_READS, Prepared
from weightsmith._plans import PRODUCTS, PlanDraft
from weightsmith.abc.tensors import read

_AT_ONCE = 16
"""Numbers that are read together: each is a request, of a model that is elsewhere."""


def numbers_of(prepared: Prepared, names: Sequence[str]) -> dict[str, float]:
    """The numbers of tensors of a draft that have one each, as the output would store them.

    Weights that are not on this disk are read where they are. Raises PlanError for numbers that follow from whole models,
    NonFinite and CheckpointError.
    """
    from weightsmith._engine.computed import ComputedSource

    draft, listed = PlanDraft.of(prepared.draft), {*names}
    draft.steps = [step for step in draft.steps if step.out.name in listed]
    source = ComputedSource(draft.finish(stored=False), prepared.inputs, "the output")
    if whole := [name for name in names if source.tiles_read(name) > MAX_READS]:
        what = "its number belongs in the header of the file, and a merge finds it from whole tensors or models"
        fix = f"merge without {named('quantize')}, then quantise the result"
        raise PlanError([Unsupported(what, where=name, fix=fix) for name in whole[:1]])
    models = {leaf_read.model for step in draft.steps for leaf_read in step.reads} - {PRODUCTS}
    repositories = {id(repo): repo for model in models for repo in prepared.inputs[model].repositories}
    with ExitStack() as stack:
        for repository in repositories.values():
            stack.enter_context(repository.peek())
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            arrays = pool.map(lambda name: read(source, name, None, where="the output"), names)
            return {name: float(np.float32(array.item())) for name, array in zip(names, arrays, strict=True)}
