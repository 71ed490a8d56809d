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

if TYPE_CHECKING:
    from typer import Typer


def main() -> None:
    """The `weightsmith` command: reads `sys.argv`, ends the process with one of the codes in `exits.py`."""
    try:
        from weightsmith.cli.app import app
        from weightsmith.heap import one_arena
        from weightsmith.text import prepare_streams

        prepare_streams()
        one_arena()
        code = _run(app)
    except KeyboardInterrupt:  # between the commands' own handlers: while modules are imported
        code = 130
    watch = sys.modules.get("weightsmith.kernels.watch")
    if watch is not None and watch.is_left():  # all is closed; Python would wait for the compiler
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _run(app: Typer) -> int:
    """The exit code of a command line; one that cannot be read is reported as JSON too, if `--json` is in it."""
    from typer import TyperException

    from weightsmith.text import note

    try:
        return int(app(prog_name="weightsmith", standalone_mode=False) or 0)
    except TyperException as error:
        shown = io.StringIO()
        error.show(shown)  # type: ignore[attr-defined]
        note(shown.getvalue().rstrip())
        code: int = getattr(error, "exit_code", 2)
        if "--json" in sys.argv:
            from weightsmith.cli.exits import Exit
            from weightsmith.cli.failures import print_json
            from weightsmith.errors import Finding

            print_json([Finding(error.format_message())], ["usage"], Exit(code))
        return code
