"""`weightsmith extract-lora`, `convert-lora`, `quantize`, `dequantize` and `transplant-tokenizer`: what changes one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, cast

import typer

import weightsmith
from weightsmith._app.cli import options
from weightsmith._app.cli.merge import show_plan
from weightsmith._app.cli.work import CommandWork, show_warnings, working
from weightsmith._base.text import count, result, say, show_json, show_table
from weightsmith._execution.options import RunOptions
from weightsmith._features.adapters.options import ConvertSettings, ExtractSettings
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._features.transplant.options import TransplantSettings
from weightsmith._planning.options import RecipeOptions

if TYPE_CHECKING:
    from weightsmith._execution.run import Merged
    from weightsmith._features.adapters.report import Extraction
    from weightsmith._features.transplant.rows import Transplant
    from weightsmith._plans import Plan


@options.expand
def extract_lora(
    finetuned: Annotated[str, typer.Argument(metavar="FINETUNED", help="Fine-tune: a folder, Hub id or base+adapter.")],
    base: Annotated[str, typer.Argument(metavar="BASE", help="Base of the fine-tune: a folder or Hub id.")],
    settings: ExtractSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show the matrices to decompose and compare; compute and write nothing.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Extract a LoRA adapter of FINETUNED into OUT.

    PEFT loads the adapter. In a recipe, BASE+OUT is the model with the adapter applied. OUT is created only when complete. If
    interrupted, run the same command again to resume; decompositions are reused for other ranks.

    Examples:
        weightsmith extract-lora ./tuned org/base ./adapter --max-rank 16
        weightsmith extract-lora ./tuned org/base ./adapter --energy 0.95
    """
    options.check_out(out, plan=plan_only)
    with working("reading the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        if plan_only:
            told = options.keywords("extract_lora", settings)
            _present(weightsmith.plan_extract_lora(finetuned, base, **told), _show_factors, work)
            return

        def show(merged: Merged) -> None:
            from weightsmith._features.adapters.report import NAME

            head, rows = cast("Extraction", merged.reports[NAME]).summary_table()
            show_table(head, rows, right=set(range(1, len(head))))
            result()

        work.make(weightsmith.extract_lora, finetuned, base, records=(settings, running), details=show)


def _present(plan: Plan, show: Callable[[Plan], None], work: CommandWork) -> None:
    """Show a plan, as JSON or in words."""
    show_warnings(plan, ("", ""))
    if work.as_json:
        show_json(plan.to_json(), exact=True)
    else:
        show(plan)


def _show_factors(plan: Plan) -> None:
    from weightsmith._features.adapters.factors import FactorWork

    rows, parameters = [], 0
    for product in plan.products:
        if product.op != "factors":
            continue
        shapes = {step.out.name: step.out.shape for step in product.steps}
        for target in FactorWork.of(product).targets:
            rows_, cols = shapes[target.matrices[0]]
            parameters += target.rank * (rows_ + cols) * max(1, target.experts)
            size = f"{target.experts} x {rows_} x {cols}" if target.experts else f"{rows_} x {cols}"
            rows.append((target.module, size, str(target.rank), "exact" if target.exact else "randomised"))
    show_table(("module", "matrix", "largest rank", "decomposition"), rows, right={1, 2})
    compared = sum(len(product.steps) for product in plan.products if product.op == "changes")
    result(f"factors of at most {parameters:,} parameters; {count(compared, 'other tensor')} compared")


@options.expand
def convert_lora(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Adapter: a folder, a file or a Hub id.")],
    settings: ConvertSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: Annotated[bool, typer.Option("--plan", help="Show the tensors; write nothing.")] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Convert ADAPTER for another program, in OUT.

    OUT is created only when complete.

    Examples:
        weightsmith convert-lora ./adapter ./gguf --for llama.cpp --base org/base
        weightsmith convert-lora adapter.gguf ./adapter --for peft --base org/base
    """
    options.check_out(out, plan=plan_only)
    with working("reading the adapter's header", out=out, quiet=quiet, as_json=as_json) as work:
        if plan_only:
            _present(weightsmith.plan_convert_lora(adapter, **options.keywords("convert_lora", settings)), _show_tensors, work)
            return
        work.make(weightsmith.convert_lora, adapter, records=(settings, running))


def _show_tensors(plan: Plan) -> None:
    stored = [spec for step in plan.steps for spec in step.stored]
    rows = [(spec.name, " x ".join(map(str, spec.shape)), spec.dtype.name) for spec in stored]
    show_table(("tensor", "shape", "dtype"), rows)
    result(f"{count(len(stored), 'tensor')}")


# ---- weightsmith quantize, dequantize


def _list(asked: bool) -> None:
    if asked:
        from weightsmith._features.quantisation.formats import FORMATS

        show_table(
            ("format", "", "read by"), [(format_.name, format_.summary, format_.readers) for format_ in FORMATS.values()]
        )
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

    An option that the format does not use is an error. A quantised model is dequantised first. OUT is created only when
    complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith quantize ./model ./model-fp8 --format fp8-dynamic
        weightsmith quantize org/model ./model-q4 --format gguf-q4_k_m
    """
    _copy(weightsmith.quantize, model, out, (planning, settings, running), plan_only=plan_only, quiet=quiet, as_json=as_json)


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
    records = planning, QuantizeSettings(), running
    _copy(weightsmith.dequantize, model, out, records, plan_only=plan_only, quiet=quiet, as_json=as_json)


def _copy(
    function: Callable[..., Merged],
    model: str,
    out: str,
    records: tuple[RecipeOptions, QuantizeSettings, RunOptions],
    *,
    plan_only: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    options.check_out(out, plan=plan_only)
    with working("reading the model's headers", out=out, quiet=quiet, as_json=as_json) as work:
        if not plan_only:
            work.make(function, model, records=records)
            return
        from weightsmith._features.any_recipe import prepare_copy

        planning, settings, running = records
        with prepare_copy(model, planning, settings) as prepared:
            show_warnings(prepared.plan, prepared.source)
            show_plan(prepared, running, out, as_json=as_json)


# ---- weightsmith transplant-tokenizer


@options.expand
def transplant_tokenizer(
    model: options.Model,
    donor: Annotated[
        str, typer.Argument(metavar="DONOR", help="Model with the new tokenizer, or a folder with a tokenizer alone.")
    ],
    settings: TransplantSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show the sources of the token rows; compute and write nothing.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Give MODEL the tokenizer of DONOR, in OUT.

    Shared tokens keep the model's rows; rows of missing tokens are approximated. OUT is created only when complete. If
    interrupted, run the same command again to resume.

    Examples:
        weightsmith transplant-tokenizer ./model org/donor ./out
        weightsmith transplant-tokenizer ./model org/donor --plan
    """
    options.check_out(out, plan=plan_only)
    with working("reading the models' headers and tokenizers", out=out, quiet=quiet, as_json=as_json) as work:
        if plan_only:
            told = options.keywords("transplant_tokenizer", settings)
            _present(weightsmith.plan_transplant_tokenizer(model, donor, **told), _show_rows, work)
            return
        merged = work.make(weightsmith.transplant_tokenizer, model, donor, records=(settings, running))
        if merged is not None and work.shows:
            from weightsmith._features.transplant.rows import NAME

            if NAME in merged.reports:
                report = cast("Transplant", merged.reports[NAME])
                say(report.summary())
                head, rows = report.summary_table()
                if rows:
                    show_table(head, rows, right={1, 3})


def _show_rows(plan: Plan) -> None:
    vocabulary = plan.vocabulary or {}
    show_table(("tokens", ""), [(how, f"{n:,}") for how, n in vocabulary.get("sources", {}).items()], right={1})
    result(f"{vocabulary.get('rows', 0):,} rows; the model has {vocabulary.get('rows_before', 0):,}")
