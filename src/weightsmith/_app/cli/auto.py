"""`weightsmith auto`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import wrote
from weightsmith._app.cli.work import working
from weightsmith._base.errors import printable
from weightsmith._execution.options import RunOptions
from weightsmith._reports.auto.options import AutoSettings


@options.expand
def auto(
    models: Annotated[
        list[str],
        typer.Argument(metavar="BASE MODEL...", help="Base, then its fine-tunes: folders, Hub ids or base+adapter."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to create.")],
    settings: AutoSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Find a good merge of fine-tunes by measuring, and write it.

    Candidates are scored on held-back text: of yours, one for each fine-tune, or of their own, which the fine-tunes write
    first. The best is written if it beats the plain mean by more than noise; otherwise the mean is. OUT/recipe.yml repeats the
    merge. Texts, scores and a page are kept in OUT.auto: if interrupted, run the same command again to resume.

    Examples:
        weightsmith auto ./base ./fr ./de merged
        weightsmith auto ./base ./fr ./de merged --text fr=fr.txt --text de=de.txt
    """
    base, *fine_tunes = models
    with working("reading the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.auto.auto import find_merge
        from weightsmith._reports.auto.pool import Models

        with meter(quiet=quiet) as shown:
            result = find_merge(Models(base, tuple(fine_tunes)), out, settings, running, shown)
        wrote(f"The output is complete: {printable(str(result.out))}")
        work.present(result.report())
