"""The command line: it parses, calls the Python API and draws what comes back. It decides nothing.

    app.py             the commands together
    merge.py moe.py plan.py run.py verify.py methods.py schema.py      one command each
    options.py         options that several commands have, and how sizes and dtypes are read
    mergekit_flags.py  mergekit's flags, and what becomes of each
    summary.py         a plan in sums
    progress.py        a bar on a terminal, lines in a log
    text.py            streams, colours, tables, numbers for people
    failures.py exits.py    errors to messages and exit codes

numpy, numba, yaml and the rest are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The `weightsmith` command: reads `sys.argv`, ends the process with one of the codes in `exits.py`."""
    try:
        from weightsmith.cli.app import app
        from weightsmith.cli.text import prepare_streams

        prepare_streams()
        app(prog_name="weightsmith")
    except KeyboardInterrupt:  # between the commands' own handlers: while modules are imported
        sys.exit(130)
    except SystemExit as end:
        jit = sys.modules.get("weightsmith.kernels.jit")
        if jit is not None and jit.is_left() and isinstance(end.code, int):  # all is closed; Python would wait for the compiler
            sys.stdout.flush()
            os._exit(end.code)
        raise
