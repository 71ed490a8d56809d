"""The output of a run: a local folder, an address in a bucket, or a model on the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith.errors import NOTHING_WRITTEN, ParameterError
from weightsmith.options import RunOptions
from weightsmith.outputs.hub.address import is_hub_address, parse_hub_address
from weightsmith.plans import Plan
from weightsmith.plans.parts import Together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightsmith.outputs.bucket.staging import BucketStaging
    from weightsmith.outputs.hub.staging import HubStaging
    from weightsmith.outputs.staging import Staging

    Output = Staging | BucketStaging | HubStaging
    Shared = Staging | BucketStaging  # with other processes, which build parts


def open_output(
    out: str | os.PathLike[str],
    plan: Plan,
    plan_hash: str,
    options: RunOptions,
    part: str,
    protected: Sequence[Path],
    uploading: Callable[[int, int], None] | None,
    **local: Any,
) -> Output:
    """The staging of an output.

    protected  what the run reads
    uploading  see `Callbacks`
    local      further arguments of `Staging.open`
    """
    from weightsmith.outputs.local.target import is_address

    chosen: dict[str, Any] = {"facts": local.pop("facts"), "resume": options.resume, "overwrite": options.overwrite}
    if not is_address(out):
        from weightsmith.outputs.staging import Staging

        return Staging.open(out, plan.layout, plan_hash, part=part, protected=protected, **chosen, **local)
    if is_hub_address(out):
        from weightsmith.outputs.hub.staging import HubStaging

        chosen |= {"public": options.public, "uploading": uploading, "message": options.commit_message or plan.made.title}
        chosen |= {name: local[name] for name in ("other_bytes", "threads", "progress")}
        return HubStaging.open(parse_hub_address(str(out)), plan.layout, plan_hash, reads=_named(plan), **chosen)
    from weightsmith.outputs.bucket.prefix import parse_prefix
    from weightsmith.outputs.bucket.staging import BucketStaging

    chosen |= {"part": part, "names": local["names"]}
    return BucketStaging.open(parse_prefix(str(out)), plan.layout, plan_hash, reads=_named(plan), **chosen)


def built_together(out: str | os.PathLike[str], plan: Plan) -> Together:
    """Sets of tensors, each of which one process must build."""
    from weightsmith.outputs.local.target import is_address

    if not is_address(out):
        return ()
    from weightsmith.outputs.bucket.prefix import parse_prefix
    from weightsmith.outputs.bucket.staging import together

    return together(parse_prefix(str(out)), plan.layout)


def check_output(out: str | os.PathLike[str], plan: Plan, options: RunOptions, protected: Sequence[Path]) -> None:
    """Raise StoreError if the output cannot be written there, before work that takes time. Changes nothing."""
    from weightsmith.outputs.local.target import check_out, check_vacant, is_address

    if not is_address(out):
        check_vacant(check_out(out), overwrite=options.overwrite, protected=protected)
        return
    if is_hub_address(out):
        from weightsmith.outputs.hub.staging import check_free as check_hub

        check_hub(parse_hub_address(str(out)), overwrite=options.overwrite, reads=_named(plan))
        return
    from weightsmith.outputs.bucket.prefix import parse_prefix
    from weightsmith.outputs.bucket.unfinished import check_free

    check_free(parse_prefix(str(out)), overwrite=options.overwrite, reads=_named(plan))


def check_options(out: str | os.PathLike[str], options: RunOptions, *, part: bool = False) -> None:
    """Raise ParameterError for options that an address does not have. part: the run does a part of a plan, for no driver."""
    from weightsmith.outputs.local.target import is_address

    if is_address(out):
        if options.ray is not None and is_hub_address(out):
            _refuse("one process uploads weight files to the hub", "write to a bucket or a shared folder, or leave --ray out")
        if part:
            _refuse("parts of a plan share a local folder", "run the whole plan, with --ray on several machines")
        if options.push is not None:
            _refuse("--push uploads a local folder", "write to a folder, or leave --push out")
        if options.keep_stages:
            _refuse("results of stages are kept in local folders", "write to a folder, or leave --keep-stages out")
    if options.commit_message is not None and options.push is None and not is_hub_address(out):
        what = "there is no commit: the output is not on the hub"
        fix = "write to hf://org/name, add --push org/name, or leave --commit-message out"
        raise ParameterError(what, where="commit_message", fix=fix, state=NOTHING_WRITTEN)


def beside(out: str | os.PathLike[str], suffix: str) -> Path:
    """A local folder for what an output needs: next to it, or in the current folder if the output is an address.

    >>> beside("models/out", ".measurement").name, beside("s3://models/out", ".measurement").relative_to(Path.cwd())
    ('out.measurement', PosixPath('out-e614e439.measurement'))
    """
    from weightsmith.outputs.local.target import absolute, is_address

    if is_hub_address(out):
        out = parse_hub_address(str(out)).local_name
    elif is_address(out):
        from weightsmith.outputs.bucket.prefix import parse_prefix

        out = parse_prefix(str(out)).local_name
    folder = absolute(out)
    return folder.with_name(f"{folder.name}{suffix}")


def name_of(out: str | os.PathLike[str]) -> str:
    """The name of the model: the last part of the path or the address.

    >>> name_of("models/merged"), name_of("s3://bucket/models/merged"), name_of("hf://org/merged@v2")
    ('merged', 'merged', 'merged')
    """
    return parse_hub_address(str(out)).name if is_hub_address(out) else Path(out).name


def repo_of(out: str | os.PathLike[str], options: RunOptions) -> str:
    """The model on the Hub that the output becomes, org/name[@branch]; "" for none."""
    if is_hub_address(out):
        return parse_hub_address(str(out)).spec
    return "" if options.push is None else parse_hub_address(options.push).spec


def _named(plan: Plan) -> list[str]:
    """The models that a plan reads, as the recipe names them."""
    return [ref for model in plan.models for ref in (model.ref, *([] if model.plan is None else _named(model.plan)))]


def _refuse(what: str, fix: str) -> None:
    raise ParameterError(f"the output is an address, and {what}", fix=fix, state=NOTHING_WRITTEN)
