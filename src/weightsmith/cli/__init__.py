"""The command line: it parses, calls the Python API and draws what comes back. It decides nothing.

    app.py             the commands together
    merge.py moe.py quantize.py extract_lora.py transplant_tokenizer.py inspect.py diff.py preview.py plan.py run.py verify.py
    studio.py methods.py schema.py init.py clean.py doctor.py
                       one command each, quantize.py two
    presets/           the recipes of the papers
    options.py         options that several commands have, and how sizes and dtypes are read
    mergekit_flags.py  mergekit's flags, and what becomes of each
    summary.py         a plan in sums
    progress.py        a bar on a terminal, lines in a log
    text.py            streams, colours, tables, numbers for people
    failures.py exits.py    errors to messages and exit codes

numpy, numba, yaml and the rest are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from weightsmith.text import begin_status, end_status, prepare_streams

if TYPE_CHECKING:
    from typer import Typer


WORKING = (
    "merge", "moe", "plan", "preview", "inspect", "diff", "studio", "quantize", "dequantize", "extract-lora",
    "transplant-tokenizer", "run", "verify", "clean", "doctor",
)  # fmt: skip
"""Commands that work for a while. Each has a `status_line`; the others print what they know and are done."""

_SILENT = {"--quiet", "--json", "--help", "-h"}


def main() -> None:
    """The `weightsmith` command: reads `sys.argv`, ends the process with one of the codes in `exits.py`."""
    try:
        prepare_streams()
        if sys.argv[1:2] and sys.argv[1] in WORKING and not _SILENT & {*sys.argv}:
            begin_status("starting")  # before anything is imported, which takes seconds on a busy machine
        from weightsmith.cli.app import app
        from weightsmith.heap import one_arena

        one_arena()
        code = _run(app)
    except KeyboardInterrupt:  # between the commands' own handlers: while modules are imported
        code = 130
    end_status()
    watch = sys.modules.get("weightsmith.kernels.watch")
    if watch is not None and watch.is_left():  # all is closed, and printed; Python would wait for the compiler
        os._exit(code)
    sys.exit(code)


def _run(app: Typer) -> int:
    """The exit code of a command line; one that cannot be read is reported as JSON too, if `--json` is in it."""
    from typer import TyperException

    from weightsmith.cli.failures import forget_written, tell_lost
    from weightsmith.streams import ResultLost
    from weightsmith.text import note

    forget_written()
    try:
        code = int(app(prog_name="weightsmith", standalone_mode=False) or 0)
        sys.stdout.flush()
        return code
    except ResultLost as error:
        return tell_lost(error)
    except TyperException as error:
        shown = io.StringIO()
        error.show(shown)  # type: ignore[attr-defined]
        note(shown.getvalue().rstrip())
        code = getattr(error, "exit_code", 2)
        if "--json" in sys.argv:
            from weightsmith.cli.exits import Exit
            from weightsmith.cli.failures import print_json
            from weightsmith.errors import Finding

            print_json([Finding(error.format_message())], ["usage"], Exit(code))
        return code
