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
    Exit.OUTPUT: "the output cannot be written or checked, or the result not printed",
    Exit.DAMAGED: "verify found damage",
    Exit.INPUT_FAILED: "an input or a worker failed during the run; finished work is kept",
    Exit.UNEXPECTED: "unexpected error; --verbose shows the traceback",
    Exit.INTERRUPTED: "interrupted; run the same command again to resume",
    Exit.NO_READER: "broken pipe (for example | head)",
}
