"""`weightsmith extract-lora`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._base.text import count, result, show_json, show_table
from weightsmith._execution.options import RunOptions
from weightsmith._features.adapters.options import ExtractSettings

if TYPE_CHECKING:
    from weightsmith._execution.run import Merged
    from weightsmith._features.adapters.report import Extraction
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

    PEFT loads the adapter, and BASE+OUT names the model with it in a recipe. OUT is created only when complete. If
    interrupted, run the same command again to resume; decompositions are reused for other ranks.

    Examples:
        weightsmith extract-lora ./tuned org/base ./adapter --max-rank 16
        weightsmith extract-lora ./tuned org/base ./adapter --energy 0.95
    """
    options.check_out(out, plan=plan_only)
    with working("reading the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._features.adapters.extract import prepare_extraction
        from weightsmith._features.adapters.report import NAME

        with prepare_extraction(finetuned, base, settings) as prepared:
            show_warnings(prepared)
            if plan_only:
                _show_plan(prepared.plan, as_json=as_json)
                return

            def show(merged: Merged) -> None:
                head, rows = cast("Extraction", merged.reports[NAME]).table()
                show_table(head, rows, right=set(range(1, len(head))))
                result()

            work.make(prepared, running, "storing", show)


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        show_json(plan.to_json(), exact=True)
        return
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
