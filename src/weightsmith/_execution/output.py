"""The output of a run: what a plan and the options ask of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, OutputExists, ParameterError
from weightsmith._base.files import expand_user
from weightsmith._base.options import named
from weightsmith._execution.options import RunOptions
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.locks import JOURNAL
from weightsmith._outputs.places import place_of, remove_published
from weightsmith._outputs.staging import staged_path
from weightsmith._plans import Plan
from weightsmith.abc.output import Target

PAGE_NAME = "report.html"
"""The page of a run, in its output."""


def check_output(out: str | os.PathLike[str], plan: Plan, options: RunOptions, protected: Sequence[Path]) -> None:
    """Raise StoreError if the output cannot be written there, before work that takes time.

    Removes only what a run has left that died after it had published this output.
    """
    target = place_of(out)
    try:
        path = staged_path(target, options.staging)
        notes = read_journal(staging_folder(path) / JOURNAL).notes if options.resume else {}
        target.check_free(overwrite=options.overwrite, protected=protected, reads=models_read(plan), notes=notes)
    except OutputExists:
        remove_published(staged_path(target, options.staging), target)
        raise


def check_options(out: str | os.PathLike[str], options: RunOptions, *, part: bool = False) -> Target:
    """The place of an output. Raises ParameterError for options that it does not have.

    part  the run does a part of a plan, for no driver
    """
    place = place_of(out)
    if options.report is not None and (page := page_beside(out, options.report)) is not None:
        from weightsmith._base.report import check_page

        check_page(page)
    is_folder = place.publication == "rename"
    if options.ray is not None and not place.parts:
        _refuse("one process uploads weight files to the Hub", "write to a bucket or a shared folder, or leave --ray out")
    if part and not is_folder:
        _refuse("parts of a plan share a local folder", "run the whole plan, with --ray on several machines")
    if options.push is not None and not is_folder:
        _refuse("--push uploads a local folder", "write to a folder, or leave --push out")
    if options.evaluate is not None and not is_folder:
        _refuse("--evaluate reads the result before it is published", "write to a folder, or leave --evaluate out")
    if options.keep_stages and not is_folder:
        _refuse("results of stages are kept in local folders", "write to a folder, or leave --keep-stages out")
    if options.commit_message is not None and options.push is None and place.publication != "commit":
        what = "there is no commit: the output is not on the Hub"
        fix = "write to hf://org/name, add --push org/name, or leave --commit-message out"
        raise ParameterError(what, where="commit_message", fix=fix, state=NOTHING_WRITTEN)
    return place


def page_beside(out: str | os.PathLike[str], report: str) -> str | None:
    """The file of a report outside the output; None for OUT/report.html, which is a file of the output.

    >>> page_beside("out", "page.html"), page_beside("out", "./out/report.html"), page_beside("s3://b/out", "s3://b/out/report.html")
    ('page.html', None, None)
    """
    page, home = (
        str(name).rstrip("/") if "://" in str(name) else os.path.abspath(expand_user(name))  # noqa: PTH100  links stay
        for name in (report, out)
    )
    if not page.startswith(f"{home}/") and "://" not in page:
        return report
    if page != f"{home}/{PAGE_NAME}":
        what = "a report in the output has the name report.html" if page.startswith(f"{home}/") else "a report is a local file"
        fix = f"write --report {home}/{PAGE_NAME}, or a file outside of the output"
        raise ParameterError(what, where=named("report"), fix=fix, state=NOTHING_WRITTEN)
    return None


def sibling(out: str | os.PathLike[str], suffix: str) -> Path:
    """A local folder for what an output needs: next to it, or in the current folder if the output is an address.

    >>> sibling("models/out", ".measurement").name, sibling("s3://models/out", ".measurement").relative_to(Path.cwd())
    ('out.measurement', PosixPath('out-e614e439.measurement'))
    """
    folder = place_of(out).local
    return folder.with_name(f"{folder.name}{suffix}")


def models_read(plan: Plan) -> list[str]:
    """The models that a plan reads, as the recipe names them."""
    return [ref for model in plan.models for ref in (model.ref, *([] if model.plan is None else models_read(model.plan)))]


def _refuse(what: str, fix: str) -> None:
    raise ParameterError(f"the output is an address, and {what}", fix=fix, state=NOTHING_WRITTEN)
