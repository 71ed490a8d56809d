"""What planning reads besides headers: samples of tensors that are taken for copies of others, and single numbers.

A merge leaves out copies of other tensors of their model, such as a head that config.json ties to the embedding. A model may
store both and have trained them apart. Samples tell: of models on this disk while the recipe is planned, of others when they
can be read. For the result of another recipe, samples are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from weightsmith._base.errors import MismatchError, NonFinite, PlanError, Unsupported
from weightsmith._base.options import named
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure.vocabulary import names_head
from weightsmith._planning.planner.prepared import MAX_READS, Prepared
from weightsmith._plans import PRODUCTS, PlanDraft
from weightsmith.abc.tensors import read

_SAMPLED, _SAMPLED_ELSEWHERE, _SAMPLE_BYTES = 64, 4, 4096

_Compared = dict[tuple[int, str, str], bool]
"""What is known of pairs, by the id of their model. Results of recipes that use each other have models in common."""


def check_copies(prepared: Prepared) -> None:
    """Compare what was taken for copies, in a plan and in those of its stages, once their models can be read.

    Raises PlanError for tensors that are no copies, CheckpointError.
    """
    plans = [*((stage.plan, stage.source.inputs) for stage in prepared.stages), (prepared.plan, prepared.inputs)]
    taken = {(id(inputs[copy.model]), copy): (plan, inputs) for plan, inputs in plans for copy in plan.copies}
    problems = [
        problem
        for (_, copy), (plan, inputs) in taken.items()
        if (problem := copy_problem(inputs[copy.model], plan.models[copy.model].ref, copy.tensor, copy.other)) is not None
    ]
    if problems:
        raise PlanError(problems, prepared.source)


def copy_problem(checkpoint: Checkpoint, label: str, tensor: str, other: str) -> MismatchError | None:
    """The error of a tensor that is no copy of another of its model; None if it seems to be one. Raises CheckpointError."""
    if not surely_differ(checkpoint, tensor, other):
        return None
    if names_head(tensor):
        return trained_head(label, tensor, other)
    what = f"its {tensor} differs from {other}, and the other models have one tensor for both"
    fix = "merge models that all share an embedding between encoder and decoder, or none"
    return MismatchError(what, where=label, fix=fix)


def surely_differ(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors of a model differ in dtype or shape, or in samples, or one of them alone is changed by an adapter.

    Results of other recipes that must be written first differ in them if they are made in two ways, or of tensors that differ.
    False if nothing is known: they are not downloaded yet, or are decoded.
    """
    return _differ(checkpoint, one, other, {})


def _differ(checkpoint: Checkpoint, one: str, other: str, compared: _Compared) -> bool:
    key = id(checkpoint), one, other
    if key not in compared:
        compared[key] = one != other and _surely_differ(checkpoint, one, other, compared)
    return compared[key]


def _surely_differ(checkpoint: Checkpoint, one: str, other: str, compared: _Compared) -> bool:
    from weightsmith._engine.computed import computed_source

    first, second = checkpoint.specs[one], checkpoint.specs[other]
    if checkpoint.missing:
        return False
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return True
    stored = [checkpoint.location(name) is not None for name in (one, other)]
    if all(stored):
        return _samples_differ(checkpoint, one, other, _SAMPLED)
    if (computed := computed_source(checkpoint)) is not None:
        if max(computed.tiles_read(one), computed.tiles_read(other)) <= MAX_READS:
            try:
                return _samples_differ(checkpoint, one, other, _SAMPLED_ELSEWHERE)
            except NonFinite:  # a run may allow them
                pass
        pairs = computed.counterparts(one, other)
        return pairs is None or any(_differ(source, a, b, compared) for source, a, b in pairs)
    if any(stored):
        return True
    streamed = all(checkpoint.extents(name, 0, first.nbytes) for name in (one, other))
    return streamed and _samples_differ(checkpoint, one, other, _SAMPLED_ELSEWHERE)


def _samples_differ(checkpoint: Checkpoint, one: str, other: str, count: int) -> bool:
    """Whether two tensors of one dtype and shape differ in one of `count` + 1 samples."""
    nbytes = checkpoint.specs[one].nbytes
    size = min(nbytes, _SAMPLE_BYTES)
    pages = memoryview(bytearray(size)), memoryview(bytearray(size))
    for start in {(nbytes - size) * i // count for i in range(count + 1)}:
        for name, page in zip((one, other), pages, strict=True):
            checkpoint.read_into(name, start, page)
        if pages[0] != pages[1]:
            return True
    return False


def trained_head(model: str, head: str, embedding: str) -> MismatchError:
    """The error of a head that differs from the embedding that config.json ties it to."""
    what = f"its head {head} is stored and differs from {embedding}, and config.json ties the two"
    fix = "set tie_word_embeddings to false in its config.json if the head was trained; if not, remove the head"
    return MismatchError(what, where=model, fix=fix)


# ---- Single numbers of the output, read or computed while a recipe is planned: keys of some GGUF files hold them


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
