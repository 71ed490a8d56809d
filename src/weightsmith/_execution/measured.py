"""Plans that follow from the products of another one, which is run first: a calibration, a decomposition."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, OutputExists, PlanError, StoreError, WeightsmithError
from weightsmith._base.options import RunOptions
from weightsmith._execution.output import check_options, check_output, sibling
from weightsmith._execution.run import MEASUREMENT, Callbacks, Following, kept_products, protected_paths, staged
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.local.area import left_behind, staging_folder
from weightsmith._outputs.local.claim import JOURNAL
from weightsmith._outputs.local.unfinished import remove_work
from weightsmith._outputs.manifest import read_manifest
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.loading import Beside
from weightsmith._plans import Made, PlanDraft

if TYPE_CHECKING:
    from weightsmith.abc.product import Arrays


@contextmanager
def measured(
    prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, callbacks: Callbacks, left: list[Finding]
) -> Iterator[Following]:
    """Compute the products of a plan from which another one follows.

    left  warnings: what could not be removed at the end, when the output is published
    """
    place, folder = check_options(out, options), sibling(out, ".measurement")
    try:
        check_output(out, prepared.plan, options, protected_paths(prepared))
    except OutputExists:
        _remove_used(folder, place.local)
        raise
    draft = PlanDraft.of(prepared.plan)
    draft.made, draft.steps, draft.then = Made("measurement"), [], None  # it serves any number of bits, any mixture
    plan = draft.finish()
    with (
        _asking(prepared) as built,
        staged(replace(prepared, plan=plan), folder, options, callbacks) as (staging, run),
    ):
        results = kept_products(plan, staging)
        found = run(results=results).results
        arrays = {product.name: found.arrays(product.name) for product in plan.products if not product.transient}
        try:
            following = _follow(prepared, arrays, built)
        except PlanError as error:
            if error.state == NOTHING_WRITTEN:
                staging.discard()
            raise
        yield replace(following, measurement=staging.plan_hash)
        try:
            staging.discard()
        except (OSError, StoreError) as error:
            left.append(left_behind(error, staging.folder))


def _remove_used(measurement: Path, out: Path) -> None:
    """Remove the measurement of a run that died after its output, a local folder, was published."""
    with suppress(WeightsmithError, OSError):
        if read_journal(staging_folder(measurement) / JOURNAL).plan == read_manifest(out).data.get(MEASUREMENT):
            remove_work(measurement)


def _extracts(prepared: Prepared) -> bool:
    from weightsmith._features.adapters.extract import FORMAT

    return (prepared.plan.then or {}).get("format") == FORMAT


@contextmanager
def _asking(prepared: Prepared) -> Iterator[Callable[[], Any]]:
    """While matrices are decomposed, transformers is asked what model it builds of the base of an adapter."""
    if not _extracts(prepared):
        yield lambda: None
        return
    from weightsmith._features.adapters.built import built_of

    with Beside(partial(built_of, prepared.inputs[0])) as asked:
        yield asked.answer


def _follow(prepared: Prepared, arrays: Mapping[str, Arrays], built: Callable[[], Any]) -> Following:
    from weightsmith._features.adapters.extract import follow
    from weightsmith._features.adapters.report import NAME
    from weightsmith._features.quantisation.formats import followed

    if _extracts(prepared):
        plan, report = follow(prepared, arrays, built())
        return Following(replace(prepared, plan=plan), arrays, reports={NAME: report})
    following, files = followed(prepared, arrays)
    return Following(following, files=files)
