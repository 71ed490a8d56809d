"""Plans that follow from the products of another one, which is run first: a calibration, a decomposition."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weightsmith.errors import NOTHING_WRITTEN, Finding, PlanError, StoreError
from weightsmith.execution.output import check_options, check_output, sibling
from weightsmith.execution.run import Callbacks, Following, kept_products, protected_paths, staged
from weightsmith.options import RunOptions
from weightsmith.outputs.local.area import left_behind
from weightsmith.planner import Prepared
from weightsmith.planner.loading import Beside
from weightsmith.plans import Made, PlanDraft

if TYPE_CHECKING:
    from weightsmith.products.base import Arrays


@contextmanager
def measured(
    prepared: Prepared, out: str | os.PathLike[str], options: RunOptions, callbacks: Callbacks, left: list[Finding]
) -> Iterator[Following]:
    """Compute the products of a plan from which another one follows.

    left  warnings: what could not be removed at the end, when the output is published
    """
    check_options(out, options)
    check_output(out, prepared.plan, options, protected_paths(prepared))
    draft = PlanDraft.of(prepared.plan)
    draft.made, draft.steps, draft.then = Made("measurement"), [], None  # it serves any number of bits, any mixture
    plan = draft.finish()
    with (
        _asking(prepared) as built,
        staged(replace(prepared, plan=plan), sibling(out, ".measurement"), options, callbacks) as (staging, run),
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
        yield following
        try:
            staging.discard()
        except (OSError, StoreError) as error:
            left.append(left_behind(error, staging.folder))


def _extracts(prepared: Prepared) -> bool:
    from weightsmith.adapters.extract import FORMAT

    return (prepared.plan.then or {}).get("format") == FORMAT


@contextmanager
def _asking(prepared: Prepared) -> Iterator[Callable[[], Any]]:
    """While matrices are decomposed, transformers is asked what model it builds of the base of an adapter."""
    if not _extracts(prepared):
        yield lambda: None
        return
    from weightsmith.adapters.built import built_of

    with Beside(partial(built_of, prepared.inputs[0])) as asked:
        yield asked.wait


def _follow(prepared: Prepared, arrays: Mapping[str, Arrays], built: Callable[[], Any]) -> Following:
    from weightsmith.adapters.extract import follow
    from weightsmith.adapters.report import NAME
    from weightsmith.quantisation.formats import followed

    if _extracts(prepared):
        plan, report = follow(prepared, arrays, built())
        return Following(replace(prepared, plan=plan), arrays, reports={NAME: report})
    following, files = followed(prepared, arrays)
    return Following(following, files=files)
