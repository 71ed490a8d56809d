"""From an exception to a message on stderr and an exit code, in one place."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import IntEnum

import typer

from weightsmith._base.errors import (
    MAX_MESSAGE,
    NOTHING_WRITTEN,
    CheckpointError,
    Corrupt,
    Finding,
    ParameterError,
    PlanError,
    StoreError,
    WeightsmithError,
    WorkerLost,
    legible,
    printable,
    report,
)
from weightsmith._base.process import ResultLost
from weightsmith._base.text import RED, diagnostic, note, show_json
from weightsmith._files.remote.addresses import check_hub
from weightsmith._files.remote.retries import no_panic

DEBUG = "WEIGHTSMITH_DEBUG"


@contextmanager
def failures(
    *,
    usage: bool = False,
    merging: Callable[[], bool] = lambda: False,
    checking: bool = False,
    writes: bool = True,
    as_json: bool = False,
    interrupted: Callable[[], str] = lambda: "Interrupted.",
) -> Iterator[None]:
    """Turn every exception of the block into a message and an exit code.

    usage        the block reads the command line
    merging      whether tensor data is being read: a failing input is not a problem of the recipe
    checking     the block looks at a finished output: that there is none is a problem of the output
    writes       the command makes something: an error says whether it was written
    as_json      print the errors as one JSON object too, to stdout
    interrupted  what to say after Ctrl-C
    """
    try:
        with no_panic():
            yield
        sys.stdout.flush()  # here, so that a result that cannot be printed shows here and not after the end
    except (typer.Exit, typer.TyperException):
        raise
    except ResultLost as error:
        raise typer.Exit(tell_lost(error)) from None
    except KeyboardInterrupt:
        what, *lines = interrupted().split("\n")
        note("\n".join(["", *map(printable, (what, *lines))]))
        if as_json:
            print_json([Finding(what)], ["interrupted"], Exit.INTERRUPTED)
        raise typer.Exit(Exit.INTERRUPTED) from None
    except WeightsmithError as error:
        _debug()
        if not writes and error.state == NOTHING_WRITTEN:
            error.state = ""
        diagnostic(report(error), RED)
        code = Exit.USAGE if usage else exit_code(error, merging=merging(), checking=checking)
        if as_json:
            problems = error.problems if isinstance(error, PlanError) else (error,)
            print_json([p.finding for p in problems], [p.code for p in problems], code, error.state)
        raise typer.Exit(code) from None
    except Exception as error:
        _debug()
        if broken := _environment():  # a library has met it when it was imported
            diagnostic(report(broken), RED)
            if as_json:
                print_json([broken.finding], [broken.code], Exit.PROBLEMS, broken.state)
            raise typer.Exit(Exit.PROBLEMS) from None
        _report_unexpected(error, as_json=as_json)
        raise typer.Exit(Exit.UNEXPECTED) from None


def _report_unexpected(error: Exception, *, as_json: bool) -> None:
    """An error of the program itself."""
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    diagnostic(f"error[internal]: {legible(what, MAX_MESSAGE)}", RED)
    if not _debugging():
        note(
            "  -> Report it to weightsmith with the recipe and the output of the same command with --verbose, "
            "unless the machine (memory, disk) is at fault."
        )
    if as_json:
        print_json([Finding(what)], ["internal"], Exit.UNEXPECTED)


def exit_code(error: WeightsmithError, *, merging: bool = False, checking: bool = False) -> Exit:
    """The exit code of an error.

    >>> exit_code(StoreError("disk full")), exit_code(CheckpointError("short read"), merging=True)
    (<Exit.OUTPUT: 3>, <Exit.INPUT_FAILED: 5>)
    """
    if isinstance(error, Corrupt):
        return Exit.DAMAGED
    if isinstance(error, StoreError) or checking:
        return Exit.OUTPUT
    if isinstance(error, WorkerLost) or (isinstance(error, CheckpointError) and merging):
        return Exit.INPUT_FAILED
    return Exit.PROBLEMS


def wrote(what: str) -> None:
    """Remember what this command has changed on disk or elsewhere, for the message if its result cannot be printed."""
    _written.append(what)


_written: list[str] = []


def forget_written() -> None:
    """A command begins."""
    _written.clear()
    _tracebacks.clear()


_tracebacks: list[bool] = []


def show_tracebacks() -> None:
    """Show the traceback of an error of this command, as WEIGHTSMITH_DEBUG=1 does."""
    _tracebacks.append(True)


def _debugging() -> bool:
    return bool(_tracebacks or os.environ.get(DEBUG))


def tell_lost(error: ResultLost) -> Exit:
    """Report on stderr that the result is lost, and what was written: the exit code. `| head` of an answer needs no word."""
    if error.no_reader and not _written:
        return Exit.NO_READER
    error.state = "\n".join(_written)
    diagnostic(report(error), RED)
    return Exit.NO_READER if error.no_reader else Exit.OUTPUT


def print_json(findings: Sequence[Finding], codes: Sequence[str], exit: Exit, state: str = "") -> None:
    """What `--json` prints in place of a result: {"errors": [{code, what, where, details, fix}], "state", "exit_code"}."""
    errors = [{"code": code, **asdict(finding)} for code, finding in zip(codes, findings, strict=True)]
    with suppress(ResultLost):  # the error was said on stderr
        show_json({"errors": errors, "state": state, "exit_code": int(exit)})
        sys.stdout.flush()


def _environment() -> ParameterError | None:
    """What is wrong with the variables that libraries read when they are imported; None for nothing."""
    try:
        check_hub()
    except ParameterError as error:
        error.state = ""  # something may be written
        return error
    return None


def _debug() -> None:
    if _debugging():
        lines = traceback.format_exc().rstrip().split("\n")
        note("\n".join(f"| {printable(line)}" for line in lines))  # what an error says may have lines that look like ours


# ---- exit codes: one table for the program, the help text and the docs


class Exit(IntEnum):
    """The exit codes; `MEANINGS` describes them."""

    DONE = 0
    PROBLEMS = 1
    USAGE = 2
    OUTPUT = 3
    DAMAGED = 4
    INPUT_FAILED = 5
    UNEXPECTED = 70
    INTERRUPTED = 130
    NO_READER = 141


MEANINGS = {
    Exit.DONE: "done",
    Exit.PROBLEMS: "the recipe or the models have problems; nothing was written",
    Exit.USAGE: "invalid command line",
    Exit.OUTPUT: "the output cannot be written or checked, or the result not printed",
    Exit.DAMAGED: "verify found damage",
    Exit.INPUT_FAILED: "an input or a worker failed during the run; finished work is kept",
    Exit.UNEXPECTED: "unexpected error; --verbose shows the traceback",
    Exit.INTERRUPTED: "interrupted; run the same command again to resume",
    Exit.NO_READER: "broken pipe (for example | head)",
}
