"""The command line: parses arguments, calls the Python API and prints results. Makes no decisions.

    app.py             the commands together
    merge.py           merge, moe, run, plan
    convert.py         extract-lora, convert-lora, quantize, dequantize, transplant-tokenizer
    reports.py         inspect, diff, preview, verify, status; eval, tune, auto, write, statistics
    recipes.py         init, methods, schema, studio; presets/ has the recipes of the papers
    housekeeping.py    demo, clean, doctor
    options.py         shared arguments, flags made from the records of the features' `options.py`, and settings
    work.py            the frame of a command: status line, errors, progress bar, result
    other_programs.py  other programs' commands and options: what to type here; mergekit's flags: accepted, passed on or refused
    help.py            help pages, and the man page
    failures.py        errors to messages and exit codes

numpy, numba, yaml and the rest are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import TYPE_CHECKING

from weightsmith._base.text import begin_status, end_status, prepare_streams

if TYPE_CHECKING:
    from typer import Typer


WORKING = (
    "merge", "moe", "plan", "preview", "inspect", "diff", "eval", "tune", "studio", "quantize", "dequantize", "extract-lora",
    "convert-lora", "transplant-tokenizer", "statistics", "auto", "write", "run", "verify", "status", "clean", "doctor", "demo",
)  # fmt: skip
"""Commands that take a while. Each shows a `status_line`."""

_SILENT = {"--quiet", "--json", "--help", "-h"}


def main() -> None:
    """The `weightsmith` command: reads `sys.argv`, ends the process with one of the codes in `failures.py`."""
    # What is imported lives on, so looking for garbage 700 objects later finds none: a seventh of a small merge's time.
    gc.set_threshold(50_000, 10, 10)
    atexit.register(gc.freeze)  # as it ends Python looks for garbage in all that was imported: 0.4 s after a merge
    try:
        prepare_streams()
        if sys.argv[1:2] and sys.argv[1] in WORKING and not _SILENT & {*sys.argv}:
            begin_status("starting")  # before anything is imported, which takes seconds on a busy machine
        from weightsmith._app.cli.app import make_app
        from weightsmith._base.process import limit_malloc_arenas

        limit_malloc_arenas()
        code = _run(make_app(sys.argv[1:]))
    except KeyboardInterrupt:  # between the commands' own handlers: while modules are imported
        code = 130
    end_status()
    kernels = sys.modules.get("weightsmith._kernels.jit")
    if kernels is not None and kernels.is_left():  # all is closed, and printed; Python would wait for the compiler
        os._exit(code)
    if code == 130 and "torch" in sys.modules and sys._getframe(1).f_globals.get("__name__") == "__main__":
        # torch aborts in its destructors now and then if its work was interrupted: exit code 134 in place of 130
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(app: Typer) -> int:
    """The exit code of a command line; one that cannot be read is reported as JSON too, if `--json` is in it."""
    from typer import TyperException

    from weightsmith._app.cli.failures import forget_written, tell_lost
    from weightsmith._base.process import ResultLost
    from weightsmith._base.text import note

    forget_written()
    try:
        code = int(app(prog_name="weightsmith", standalone_mode=False) or 0)
        sys.stdout.flush()
        return code
    except ResultLost as error:
        return tell_lost(error)
    except TyperException as error:
        from weightsmith._app.cli.failures import Exit, print_json
        from weightsmith._app.cli.help import is_overview, misuse
        from weightsmith._base.text import RED, diagnostic

        code = getattr(error, "exit_code", 2)
        if is_overview(error):  # no command was given
            note(error.format_message())
            return code
        finding = misuse(error)
        diagnostic(f"error[usage]: {finding}", RED)
        if "--json" in sys.argv:
            print_json([finding], ["usage"], Exit(code))
        return code
