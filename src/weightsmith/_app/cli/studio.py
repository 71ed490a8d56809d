"""`weightsmith studio`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli.failures import failures
from weightsmith._base.text import status_line


def studio(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders with models; default: the current folder.", show_default=False),
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
            help="Address to serve. With any other, other machines can reach the page, and it replaces nothing.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", help="Port to serve; by default the first free one from 7860 on.")
    ] = None,
    hub: Annotated[bool, typer.Option(" /--no-hub", show_default=False, help="Read no models of the Hub.")] = True,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Open a local web page for merging without YAML.

    Choose models, a goal and a method, set parameters with sliders, preview the merge, run it, and compare the result. Serves
    until Ctrl-C. Requires Gradio: pip install 'weightsmith[studio]'.
    """
    with failures(interrupted=lambda: "Stopped."), status_line("loading Gradio", quiet=False):
        from weightsmith._app.studio.page import launch
        from weightsmith._app.studio.places import Places

        launch(Places.of(folders or ["."], out, hub=hub), host=host, port=port, browser=browser)
