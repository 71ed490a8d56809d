"""Exit codes: one table for the program, the help text and the docs."""

from __future__ import annotations

from enum import IntEnum


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
    Exit.OUTPUT: "the output cannot be written or checked, or the result cannot be printed",
    Exit.DAMAGED: "verify found damage",
    Exit.INPUT_FAILED: "an input changed or failed during the run, or workers were lost; finished work can be resumed",
    Exit.UNEXPECTED: "unexpected error; WEIGHTSMITH_DEBUG=1 prints the traceback",
    Exit.INTERRUPTED: "interrupted; run the same command again to resume",
    Exit.NO_READER: "the program that reads the output closed it (| head)",
}


def epilog() -> str:
    """The table for `--help`; the backspace makes typer preserve the lines."""
    return "\b\nExit codes:\n" + "\n".join(f"  {code:<4} {text}" for code, text in MEANINGS.items())


def markdown() -> str:
    """The table for the docs."""
    rows = [f"| {code:d} | {text} |" for code, text in MEANINGS.items()]
    return "\n".join(["| code | meaning |", "| --- | --- |", *rows])
