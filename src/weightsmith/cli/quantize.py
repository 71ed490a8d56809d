"""`weightsmith quantize` and `weightsmith dequantize`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.merge import interrupted, make, show_warnings
from weightsmith.options import QuantizeSettings, RecipeOptions, RunOptions
from weightsmith.progress import no_bars_in_logs
from weightsmith.tensors import DType
from weightsmith.text import show_table, status_line

_OF_RECIPES = (
    "lenient",
    "allow_code",
    "routing_report",
    "quantize",
    "check_loading",
    "settings",
    "keep_stages",
    "adapter_rank",
    "adapter_space",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or base+adapter, as in a recipe.")]
PlanOnly = Annotated[
    bool, typer.Option("--plan", help="Show what would be made, as `weightsmith plan` does; compute and write nothing.")
]


def _list(asked: bool) -> None:
    if asked:
        from weightsmith.quantisation.formats import FORMATS

        show_table(("format", "", "read by"), [(each.name, each.summary, each.readers) for each in FORMATS.values()])
        raise typer.Exit


@options.expand(*_OF_RECIPES)
def quantize(
    model: Model,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    format: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", parser=options.parse_format, help="The format; --list shows all."),
    ],
    out: options.OutOrPlan = "",
    plan_only: PlanOnly = False,
    list_formats: Annotated[
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List the formats, and which programs read them.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Store MODEL in a quantised FORMAT, in OUT.

    A flag that the format does not read is an error. A model that is quantised already is dequantised first. OUT is created
    only when complete. If interrupted, run the same command again to resume.
    """
    planning = replace(planning, quantize=format)
    _copy(model, out, planning, settings, running, "quantising", plan_only=plan_only, quiet=quiet, as_json=as_json)


@options.expand(*_OF_RECIPES, "out_dtype", "seed", "device")
def dequantize(
    model: Model,
    planning: RecipeOptions,
    running: RunOptions,
    out: options.OutOrPlan = "",
    dtype: Annotated[
        DType | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            parser=options.parse_dtype,
            help="Of all floating-point tensors: bfloat16, float16, float32 or float64; the model's own if not given.",
        ),
    ] = None,
    plan_only: PlanOnly = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Copy MODEL with plain weights into the folder OUT.

    The weights may be stored in any format that weightsmith reads. OUT is created only when complete. Interrupted work is
    kept beside it, and the same command resumes it.
    """
    planning = replace(planning, out_dtype=dtype)
    _copy(model, out, planning, QuantizeSettings(), running, "dequantising", plan_only=plan_only, quiet=quiet, as_json=as_json)


def _copy(
    model: str,
    out: str,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    doing: str,
    *,
    plan_only: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    began = time.monotonic()
    options.check_out(out, plan_only=plan_only)
    with (
        failures(as_json=as_json, interrupted=lambda: interrupted(out)),
        status_line("reading the model's headers", quiet=quiet or as_json),
    ):
        no_bars_in_logs(quiet=quiet)
        from weightsmith.quantisation.copies import prepare_copy

        with prepare_copy(model, planning, settings) as prepared:
            show_warnings(prepared)
            if plan_only:
                from weightsmith.cli.plan import show_plan

                show_plan(prepared, running, as_json=as_json)
                return
            make(prepared, out, running, doing, quiet=quiet, as_json=as_json, began=began)
