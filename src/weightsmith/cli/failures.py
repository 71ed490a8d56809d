"""From an exception to a message on stderr and an exit code, in one place."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from weightsmith.cli.exits import Exit
from weightsmith.cli.text import RED, colour, note, printable
from weightsmith.errors import CheckpointError, Corrupt, PlanError, StoreError, WeightsmithError

DEBUG = "WEIGHTSMITH_DEBUG"


@contextmanager
def failures(
    *, merging: bool = False, checking: bool = False, interrupted: Callable[[], str] = lambda: "Interrupted."
) -> Iterator[None]:
    """Every way in which the block can end badly becomes a message and an exit.

    merging      tensor data is being read: a failing input is no longer a problem of the recipe
    checking     the block looks at a finished output: that there is none is a problem of the output
    interrupted  what to say after Ctrl-C
    """
    try:
        yield
        sys.stdout.flush()  # here, so that a reader that went away shows here and not after the end
    except (typer.Exit, typer.TyperException):
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(Exit.NO_READER) from None
    except KeyboardInterrupt:
        note(f"\n{printable(interrupted())}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    except WeightsmithError as error:
        _debug()
        _say(error)
        raise typer.Exit(exit_code(error, merging=merging, checking=checking)) from None
    except Exception as error:
        _debug()
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        note(f"{colour('unexpected error:', RED, sys.stderr)} {printable(what)}")
        if not os.environ.get(DEBUG):
            note(
                f"  -> If this is no fault of the machine (memory, disk), please report it to weightsmith with the recipe and "
                f"what the same command prints with {DEBUG}=1."
            )
        raise typer.Exit(Exit.UNEXPECTED) from None


def exit_code(error: WeightsmithError, *, merging: bool = False, checking: bool = False) -> Exit:
    """The exit code of an error.

    >>> exit_code(StoreError("disk full")), exit_code(CheckpointError("short read"), merging=True)
    (<Exit.OUTPUT: 3>, <Exit.INPUT_FAILED: 5>)
    """
    if isinstance(error, Corrupt):
        return Exit.DAMAGED
    if isinstance(error, StoreError) or checking:
        return Exit.OUTPUT
    if isinstance(error, CheckpointError) and merging:
        return Exit.INPUT_FAILED
    return Exit.PROBLEMS


def _say(error: WeightsmithError) -> None:
    text = str(error)
    if not isinstance(error, PlanError):  # its text names the class of each problem
        text = f"{type(error).__name__}: {text}"
    lines = []
    for line in printable(text).split("\n"):
        name, colon, rest = line.partition(": ")
        known = colon and name.isidentifier() and name[0].isupper()
        lines.append(f"{colour(name + ':', RED, sys.stderr)} {rest}" if known else line)
    note("\n".join(lines))


def _debug() -> None:
    if os.environ.get(DEBUG):
        note(traceback.format_exc().rstrip())
