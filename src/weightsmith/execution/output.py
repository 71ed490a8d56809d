"""The output of a run: a local folder, or an address in a bucket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith.errors import NOTHING_WRITTEN, ParameterError
from weightsmith.options import RunOptions
from weightsmith.plans import Plan
from weightsmith.plans.parts import Together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsmith.buckets.staging import BucketStaging
    from weightsmith.store.staging import Staging

    Output = Staging | BucketStaging


def open_output(
    out: str | os.PathLike[str],
    plan: Plan,
    plan_hash: str,
    options: RunOptions,
    part: str,
    protected: Sequence[Path],
    **local: Any,
) -> Output:
    """The staging of an output. protected: what the run reads; local: further arguments of `Staging.open`."""
    from weightsmith.store.target import is_address

    chosen: dict[str, Any] = {"facts": local.pop("facts"), "resume": options.resume, "overwrite": options.overwrite}
    if not is_address(out):
        from weightsmith.store.staging import Staging

        return Staging.open(out, plan.layout, plan_hash, part=part, protected=protected, **chosen, **local)
    from weightsmith.buckets.prefix import parse_prefix
    from weightsmith.buckets.staging import BucketStaging

    chosen |= {"part": part, "names": local["names"]}
    return BucketStaging.open(parse_prefix(str(out)), plan.layout, plan_hash, reads=_named(plan), **chosen)


def built_together(out: str | os.PathLike[str], plan: Plan) -> Together:
    """Sets of tensors, each of which one process must build."""
    from weightsmith.store.target import is_address

    if not is_address(out):
        return ()
    from weightsmith.buckets.prefix import parse_prefix
    from weightsmith.buckets.staging import together

    return together(parse_prefix(str(out)), plan.layout)


def check_output(out: str | os.PathLike[str], plan: Plan, options: RunOptions, protected: Sequence[Path]) -> None:
    """Raise StoreError if the output cannot be written there, before work that takes time. Changes nothing."""
    from weightsmith.store.target import check_out, check_vacant, is_address

    if not is_address(out):
        check_vacant(check_out(out), overwrite=options.overwrite, protected=protected)
        return
    from weightsmith.buckets.prefix import parse_prefix
    from weightsmith.buckets.unfinished import check_free

    check_free(parse_prefix(str(out)), overwrite=options.overwrite, reads=_named(plan))


def check_options(out: str | os.PathLike[str], options: RunOptions, *, part: bool = False) -> None:
    """Raise ParameterError for options that an address does not have. part: the run does a part of a plan, for no driver."""
    from weightsmith.store.target import is_address

    if is_address(out):
        if part:
            _refuse("parts of a plan share a local folder", "run the whole plan, with --ray on several machines")
        if options.push is not None:
            _refuse("--push uploads a local folder", "write to a folder, or leave --push out")
        if options.keep_stages:
            _refuse("results of stages are kept in local folders", "write to a folder, or leave --keep-stages out")


def beside(out: str | os.PathLike[str], suffix: str) -> Path:
    """A local folder for what an output needs: next to it, or in the current folder if the output is in a bucket.

    >>> beside("models/out", ".measurement").name, beside("s3://models/out", ".measurement").relative_to(Path.cwd())
    ('out.measurement', PosixPath('out-e614e439.measurement'))
    """
    from weightsmith.store.target import absolute, is_address

    if is_address(out):
        from weightsmith.buckets.prefix import parse_prefix

        out = parse_prefix(str(out)).local_name
    folder = absolute(out)
    return folder.with_name(f"{folder.name}{suffix}")


def _named(plan: Plan) -> list[str]:
    """The models that a plan reads, as the recipe names them."""
    return [ref for model in plan.models for ref in (model.ref, *([] if model.plan is None else _named(model.plan)))]


def _refuse(what: str, fix: str) -> None:
    raise ParameterError(f"the output is an address in a bucket, and {what}", fix=fix, state=NOTHING_WRITTEN)
