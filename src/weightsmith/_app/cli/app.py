"""The commands together."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli import exits
from weightsmith._app.cli.clean import clean
from weightsmith._app.cli.diff import diff
from weightsmith._app.cli.doctor import doctor
from weightsmith._app.cli.eval import evaluate
from weightsmith._app.cli.extract_lora import extract_lora
from weightsmith._app.cli.init import init
from weightsmith._app.cli.inspect import inspect
from weightsmith._app.cli.merge import merge
from weightsmith._app.cli.mergekit_flags import MergeCommand, MoeCommand
from weightsmith._app.cli.methods import methods
from weightsmith._app.cli.moe import moe
from weightsmith._app.cli.plan import plan
from weightsmith._app.cli.preview import preview
from weightsmith._app.cli.quantize import dequantize, quantize
from weightsmith._app.cli.run import run
from weightsmith._app.cli.schema import schema
from weightsmith._app.cli.studio import studio
from weightsmith._app.cli.transplant_tokenizer import transplant_tokenizer
from weightsmith._app.cli.tune import tune
from weightsmith._app.cli.verify import verify
from weightsmith._base.text import result
from weightsmith._version import __version__

# rich_markup_mode=None: typer's plain help. Its other one interprets brackets, cuts long lines, and takes 60 ms to import.
app = typer.Typer(
    name="weightsmith",
    help="Make LLM checkpoints from checkpoints, at the speed of copying files.",
    epilog=exits.epilog(),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(asked: bool) -> None:
    if asked:
        result(f"weightsmith {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


_MERGEKIT = "mergekit-yaml's other flags are accepted and answered, or refused with the next step."
app.command(cls=MergeCommand, epilog=_MERGEKIT)(merge)
app.command(cls=MoeCommand, epilog=_MERGEKIT.replace("-yaml", "-moe"))(moe)
app.command(cls=MoeCommand)(plan)
for command in (preview, inspect, diff):
    app.command()(command)
app.command("eval")(evaluate)
for command in (
    *(tune, studio, quantize, dequantize, extract_lora, transplant_tokenizer),
    *(run, verify, init, methods, schema, clean, doctor),
):
    app.command()(command)
