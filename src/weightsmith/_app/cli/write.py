"""`weightsmith write`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import wrote
from weightsmith._app.cli.work import working
from weightsmith._base.errors import printable
from weightsmith._base.text import count, say, show_json
from weightsmith._execution.options import RunOptions
from weightsmith._reports.auto.options import WriteSettings


@options.expand
def write(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id, base+adapter, or a recipe (.yml).")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Text to write, OUT.jsonl.")],
    settings: WriteSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Let MODEL write text by itself, as a text for statistics, calibration or tuning.

    Tokens are drawn from the model's predictions, beginning with a start token. A fine-tune writes text of its domain if its
    training was long enough: look at the file before you use it. The model is in memory as float32.

    Examples:
        weightsmith write ./fr fr.jsonl
        weightsmith write ./base+./adapter own.jsonl --rows 40 --seed 1
    """
    with working("reading the model's headers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.auto.write import written

        with meter(quiet=quiet) as shown:
            found = written(model, out, settings, running, shown)
        wrote(f"The text is complete: {printable(str(found.out))}")
        if as_json:
            show_json(found.to_json())
        elif work.shows:
            say(f"{count(found.rows, 'row')} written: {printable(str(found.out))}")
