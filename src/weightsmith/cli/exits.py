"""Exit codes: one table for the program, the help text and the docs."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the exit code says; `MEANINGS` says it in words."""

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
    Exit.USAGE: "the command line is wrong",
    Exit.OUTPUT: "the output folder cannot be written, or cannot be checked",
    Exit.DAMAGED: "verify found damage",
    Exit.INPUT_FAILED: "an input changed or failed while merging; finished work is kept",
    Exit.UNEXPECTED: "an error nobody foresaw; WEIGHTSMITH_DEBUG=1 shows where",
    Exit.INTERRUPTED: "interrupted; the same command goes on where it stopped",
    Exit.NO_READER: "whoever read the output went away (| head)",
}


def epilog() -> str:
    """The table for `--help`; the backspace tells typer to keep the lines."""
    return "\b\nExit codes:\n" + "\n".join(f"  {code:<4} {text}" for code, text in MEANINGS.items())


def markdown() -> str:
    """The table for the docs."""
    rows = [f"| {code:d} | {text} |" for code, text in MEANINGS.items()]
    return "\n".join(["| code | meaning |", "| --- | --- |", *rows])
