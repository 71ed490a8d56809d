"""`weightsmith studio`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli.failures import failures
from weightsmith._base.text import end_status, status_line


def studio(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders with models. [default: the current folder]", show_default=False),
    ] = None,
    out: Annotated[
        str,
        typer.Option("--out", metavar="FOLDER", help="Folder for results, created with the first one."),
    ] = "results",
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Address to serve; another lets others reach the page, with a token.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", help="Port to serve. [default: the first free one from 7860 on]")
    ] = None,
    hub: Annotated[bool, typer.Option("--hub/--no-hub", help="Allow models of the Hub.")] = True,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Open a local web page for merging without YAML.

    Choose models and a method, mix with sliders and curves, preview and try the merge, and run it. Serves until Ctrl-C.
    Requires the extra `studio`.

    Examples:
        weightsmith studio
        weightsmith studio ./models --browser
    """
    with failures(interrupted=lambda: "Stopped."), status_line("loading the studio", quiet=False):
        from weightsmith._app.studio.places import Places
        from weightsmith._app.studio.server import launch

        launch(Places.of(folders or ["."], out, hub=hub), host=host, port=port, browser=browser, started=end_status)
