"""`weightsmith extract-lora`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightsmith.cli import options
from weightsmith.cli.failures import failures
from weightsmith.cli.merge import interrupted, make, show_warnings
from weightsmith.options import ExtractSettings, RunOptions
from weightsmith.progress import no_bars_in_logs
from weightsmith.tensors import DType
from weightsmith.text import count, result, show_json, show_table, status_line

if TYPE_CHECKING:
    from weightsmith.adapters.report import Extraction
    from weightsmith.plans import Plan


@options.expand("keep_stages")
def extract_lora(
    finetuned: Annotated[str, typer.Argument(metavar="FINETUNED", help="The fine-tune: a folder, a hub id, or base+adapter.")],
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that was fine-tuned: a folder, or a hub id.")],
    settings: ExtractSettings,
    running: RunOptions,
    out: options.OutOrPlan = "",
    dtype: Annotated[
        DType | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            parser=options.parse_dtype,
            help="Of the factors: bfloat16, float16 or float32; that of the fine-tune's weights if not given.",
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show what would be decomposed and compared; compute and write nothing.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Make a LoRA adapter of FINETUNED for BASE in OUT.

    PEFT loads the adapter, and BASE+OUT names the model with it in a recipe. OUT is created only when complete. If interrupted,
    run the same command again to resume; what was decomposed is used for other ranks too.
    """
    began = time.monotonic()
    options.check_out(out, plan_only=plan_only)
    with (
        failures(as_json=as_json, interrupted=lambda: interrupted(out)),
        status_line("reading the models' headers", quiet=quiet or as_json),
    ):
        no_bars_in_logs(quiet=quiet)
        from weightsmith.adapters.extract import prepare_extraction
        from weightsmith.adapters.report import NAME

        with prepare_extraction(finetuned, base, settings, dtype) as prepared:
            show_warnings(prepared)
            if plan_only:
                _show_plan(prepared.plan, as_json=as_json)
                return
            merged = make(prepared, out, running, "storing", quiet=quiet, as_json=as_json, began=began)
            if not quiet and not as_json:
                report = cast("Extraction", merged.reports[NAME])
                head, rows = report.table()
                show_table(head, rows, right=set(range(1, len(head) - 1)))


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        show_json(plan.to_json(), exact=True)
        return
    from weightsmith.adapters.factors import FactorWork

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
