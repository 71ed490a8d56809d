"""`weightsmith quantize` and `weightsmith dequantize`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.plan import show_plan
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._base.text import show_table
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions


def _list(asked: bool) -> None:
    if asked:
        from weightsmith._features.quantisation.formats import FORMATS

        show_table(("format", "", "read by"), [(each.name, each.summary, each.readers) for each in FORMATS.values()])
        raise typer.Exit


@options.expand
def quantize(
    model: options.Model,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: options.PlanOnly = False,
    list_formats: Annotated[
        bool,
        typer.Option("--list", callback=_list, is_eager=True, help="List the formats and their readers, and exit."),
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Store MODEL in a quantised format, in OUT.

    A flag that the format does not read is an error. A quantised model is dequantised first. OUT is created only when
    complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith quantize ./model ./model-fp8 --format fp8-dynamic
        weightsmith quantize org/model ./model-q4 --format gguf-q4_k_m
    """
    _copy(model, out, planning, settings, running, "quantising", plan_only=plan_only, quiet=quiet, as_json=as_json)


@options.expand
def dequantize(
    model: options.Model,
    planning: RecipeOptions,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: options.PlanOnly = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Convert MODEL to unquantised weights, in OUT.

    MODEL may be stored in any format that weightsmith reads. OUT is created only when complete. If interrupted, run the same
    command again to resume.

    Examples:
        weightsmith dequantize ./model-gptq ./plain
        weightsmith dequantize model.gguf ./plain --out-dtype bfloat16
    """
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
    options.check_out(out, plan=plan_only)
    with working("reading the model's headers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._features.any_recipe import prepare_copy

        with prepare_copy(model, planning, settings) as prepared:
            show_warnings(prepared)
            if plan_only:
                show_plan(prepared, running, as_json=as_json)
            else:
                work.make(prepared, running, doing)
