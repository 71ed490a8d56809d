"""The work of a command: from the first status line to the result, for every command that makes a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weightsmith._app.cli.failures import failures, wrote
from weightsmith._app.cli.options import keywords
from weightsmith._base.errors import Finding, WeightsmithError, printable
from weightsmith._base.files import exists, expand_user
from weightsmith._base.text import count, duration, is_terminal, say, show_json, size, status, status_line, warn

if TYPE_CHECKING:
    from weightsmith._base.report.blocks import Report
    from weightsmith._execution.run import Callbacks, Merged
    from weightsmith._plans import Plan
    from weightsmith._reports.evaluate.measure import ResultEvaluation


@dataclass(frozen=True, slots=True)
class CommandWork:
    """A command at work.

    page    file for the result as a page
    """

    out: str
    quiet: bool
    as_json: bool
    page: Path | None = None

    @property
    def shows(self) -> bool:
        """Whether the result is shown in words."""
        return not self.quiet and not self.as_json

    @contextmanager
    def running(self) -> Iterator[Callbacks]:
        """Callbacks of a progress bar, while something is computed."""
        from weightsmith._execution.progress import callbacks, meter

        with failures(merging=lambda: True, as_json=self.as_json, interrupted=lambda: interrupted(self.out)):
            with meter(quiet=self.quiet) as shown:
                yield callbacks(shown, "computing")

    def make(
        self,
        function: Callable[..., Merged | None],
        *arguments: object,
        records: Sequence[object],
        details: Callable[[Merged], None] | None = None,
        **others: object,
    ) -> Merged | None:
        """Call a function that makes a model, with a progress bar, and report the result. None: it made a part of one.

        records  of options
        details  shows more, before the result
        others   keywords of the function that are no options
        """
        from weightsmith._execution.progress import meter

        plans: list[Plan] = []

        def announce(plan: Plan, source: tuple[str, str]) -> None:
            plans.append(plan)
            if others.get("part") is None:  # the run that publishes shows them
                show_warnings(plan, source)
            status("preparing the output")

        message = lambda: interrupted(self.out)  # noqa: E731
        told = keywords(function.__name__, *records) | others
        with failures(merging=lambda: bool(plans), as_json=self.as_json, interrupted=message), meter(quiet=self.quiet) as shown:
            shown.announce = announce
            merged = function(*arguments, self.out, progress=shown, **told)
            if merged is not None:
                wrote(f"The output is complete: {printable(merged.url or str(merged.out))}")
        if merged is None:
            return None
        if details is not None and self.shows:
            details(merged)
        self.report(merged, plans[0].warnings)
        return merged

    def report(self, merged: Merged, shown: Collection[Finding] = ()) -> None:
        """Show the warnings that are new, and the result. shown: those of the plan; another may have followed from it."""
        for finding in merged.warnings:
            if finding not in shown:
                warn(finding)
        if self.as_json:
            show_json(_to_json(merged))
        elif not self.quiet:
            say(_summary(merged))

    def present(self, report: Report, *, details: bool = False) -> None:
        """Show a report as JSON or on the terminal, and write its page. details: see `Report.show`."""
        if self.page is not None:
            report.write(self.page)
            wrote(f"Page written: {printable(str(self.page))}")
        if self.as_json:
            show_json(report.to_json())
        elif not self.quiet:
            report.show(details=details)


@contextmanager
def working(
    doing: str,
    *,
    out: str = "",
    quiet: bool,
    as_json: bool,
    page: Path | None = None,
    resumes: bool = False,
    told: Callable[[str], str] | None = None,
) -> Iterator[CommandWork]:
    """Errors as messages, and a status line.

    doing    until there is a progress bar
    resumes  a command without output keeps its unfinished work
    told     what to say after Ctrl-C; None: `interrupted`
    """
    work = CommandWork(out, quiet, as_json, page)
    kept = f" Finished layers are kept.\n  -> Resume with the same command: {_command()}" if resumes else ""
    message = (lambda: (told or interrupted)(out)) if out else (lambda: f"Interrupted.{kept}")
    with failures(as_json=as_json, interrupted=message, writes=bool(out)), status_line(doing, quiet=quiet or as_json):
        if quiet or not is_terminal(sys.stderr):
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # huggingface_hub reads it when it is imported
        if page is not None:
            from weightsmith._base.report.html import check_page

            check_page(page)
        yield work


def show_warnings(plan: Plan, source: tuple[str, str]) -> None:
    """Show the warnings of a plan. source: name and text of the recipe."""
    for finding in plan.warnings:
        warn(finding, source)


def _summary(merged: Merged) -> str:
    steps, weights = len(merged.plan.steps), _weights(merged.plan)
    moved = merged.read_bytes + merged.written_bytes
    them = "them" if weights == steps else f"the {steps:,} stored arrays"
    resumed = f", {merged.resumed:,} of {them} by an earlier run" if merged.resumed else ""
    speed = f" ({size(moved / merged.seconds)}/s read and written)" if merged.seconds > 0 else ""
    tensors = count(weights, "tensor")
    done = f"{printable(str(merged.out))}: {tensors}{resumed}, {size(merged.nbytes)} in {duration(merged.seconds)}{speed}"
    if merged.fetched_bytes:
        done += f"\n{size(merged.fetched_bytes)} streamed"
    if merged.copied_bytes:
        done += f"\n{size(merged.copied_bytes)} read from local copies"
    if merged.url:
        done += f"\nuploaded to {printable(merged.url)}"
    for model, files in merged.plan.lacking.items():
        done += f"\nnot in the output, files of {printable(model)}: {printable(', '.join(files))}"
    if merged.distance:
        whole = merged.distance[0]
        done += f"\ndistance from the base: {whole.percent()} of its norm (for each layer: weightsmith.json)"
    if (evaluated := _evaluation(merged)) is not None:
        done += "".join(f"\n{printable(line)}" for line in evaluated.lines)
    return done


def _evaluation(merged: Merged) -> ResultEvaluation | None:
    """The numbers of `--evaluate`."""
    from weightsmith._execution.run import EVALUATION

    report: Any = merged.reports.get(EVALUATION)
    return None if report is None else cast("ResultEvaluation", report)


def _weights(plan: Plan) -> int:
    """The number of tensors of a plan; a calibrated weight is one."""
    from weightsmith._features.quantisation.calibration.weights import by_weight

    return len(by_weight(plan).steps)


def _to_json(merged: Merged) -> dict[str, Any]:
    from weightsmith._execution.report import to_json

    plan, evaluated = merged.plan, _evaluation(merged)
    return {
        **({} if evaluated is None else {"evaluation": evaluated.to_json()}),
        "out": str(merged.out),
        "url": merged.url,
        "method": plan.provenance.name,
        "tensors": _weights(plan),
        "resumed": merged.resumed,
        "bytes": plan.nbytes,
        "files": [{"name": s.name, "bytes": s.nbytes} for s in plan.layout.shards],
        "read_bytes": merged.read_bytes,
        "written_bytes": merged.written_bytes,
        "fetched_bytes": merged.fetched_bytes,
        "copied_bytes": merged.copied_bytes,
        "seconds": round(merged.seconds, 3),
        "dropped": len(plan.dropped),
        "lacking": {model: list(files) for model, files in plan.lacking.items()},
        "distance_from_base": to_json(merged.distance),
        "warnings": [{"what": w.what, "where": w.where, "details": list(w.details), "fix": w.fix} for w in merged.warnings],
    }


def interrupted(out: str) -> str:
    """The message after Ctrl-C: the place of the finished tensors, and the command that resumes."""
    import glob

    from weightsmith._outputs.area import staging_folder
    from weightsmith._outputs.places import place_of

    resume = f"\n  -> Resume with the same command: {_command()}"
    nothing = "Interrupted. No unfinished work was left."
    try:
        place = place_of(out)
    except WeightsmithError:  # no output can have this address, and nobody had looked at it yet
        return nothing
    target = place.local
    folder = staging_folder(target)
    if not folder.exists():  # the result of another recipe, that this one uses, may be there
        pattern = f"{glob.escape(target.name)}.stage-*"
        folder = next((path for start in (".", "") for path in target.parent.glob(start + pattern)), folder)
    if not folder.exists():
        return nothing
    return f"Interrupted. Finished tensors are kept in {folder}{resume}"


def tuning_interrupted(out: str) -> str:
    """The message after Ctrl-C of a search."""
    path = expand_user(out)
    journal = path.with_suffix(".trials.jsonl")
    if not exists(journal):
        return "Interrupted. No trial was finished."
    best = f" {out} has the best values so far." if exists(path) else ""
    return f"Interrupted.{best} Finished trials are kept in {journal}\n  -> Resume with the same command: {_command()}"


def auto_interrupted(out: str) -> str:
    """The message after Ctrl-C of a search for a good merge."""
    path = expand_user(out)
    folder = path.parent / f"{path.name}.auto"
    if not exists(folder):
        return interrupted(out)
    kept = f"Interrupted. Texts, statistics and scores are kept in {folder}"
    return f"{kept}\n  -> Resume with the same command: {_command()}"


def _command() -> str:
    """The command that resumes this one's work. With --no-resume it would discard it."""
    import shlex

    return shlex.join(["weightsmith", *(a for a in sys.argv[1:] if a != "--no-resume")])
