"""`weightsmith eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import working
from weightsmith._base.errors import printable
from weightsmith._base.options import EvaluateSettings, RunOptions
from weightsmith._base.text import fact, result, say, section, show_table

if TYPE_CHECKING:
    from weightsmith._reports.evaluate.values import Evaluation, Score


@options.expand
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Folders, Hub ids, base+adapter, or recipes (.yml), which are not merged."),
    ],
    settings: EvaluateSettings,
    running: RunOptions,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", metavar="MODEL", help="Compare the predictions with those of MODEL: KL divergence, agreement."
        ),
    ] = None,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Measure how well models predict texts.

    Shows perplexity and bits per byte, and the difference from the first model with its standard error over rows. Models are
    read as they are stored, layer by layer. The result of a recipe is computed, and not written. If interrupted, run the same
    command again to resume.

    In a jsonl file with `messages`, the assistant's answers are scored, in the model's chat template.
    """
    doing = "reading the models' headers"
    with working(doing, quiet=quiet, as_json=as_json, page=report, resumes=True) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.evaluate.measure import evaluation, named
        from weightsmith._reports.evaluate.pages import evaluation_page

        with meter(quiet=quiet) as shown:
            found = evaluation(named(models, reference), reference is not None, settings, running, shown)
        work.present(lambda: evaluation_page(found), found.to_json, lambda: _show(found))


def _show(found: Evaluation) -> None:
    if found.reference is not None:
        fact("KL", f"from {found.reference} to each model, in nats for each token")
    fact("rows", f"of at most {found.row_tokens:,} tokens, each scored by itself")
    for number, text in enumerate(found.texts):
        section(text)
        _table(found, [own[number] for own in found.scores])
    if len(found.texts) > 1:
        section("all texts: means, of the perplexity the geometric one")
        _table(found, found.totals)
    if found.reading:
        result()
    for sentence in found.reading:
        say(printable(sentence))


def _table(found: Evaluation, scores: Sequence[Score]) -> None:
    from weightsmith._reports.evaluate.values import of_change, perplexity

    compared = found.reference is not None
    head = ["model", "perplexity", "bits/byte", *(["KL", "same top token"] if compared else [])]
    head += ["against the first", "tokens"] if len(scores) > 1 else ["tokens"]
    rows = []
    for name, score in zip(found.models, scores, strict=True):
        row = [name, perplexity(score.perplexity), f"{score.bits_per_byte:.4f}"]
        if compared:
            row.append("-" if score.divergence is None else f"{score.divergence.value:.5f}")
            row.append("-" if score.agreement is None else f"{score.agreement:.2%}")
        if len(scores) > 1:
            row.append("-" if score.change is None else of_change(score.change))
        rows.append((*row, f"{score.tokens:,}"))
    show_table(head, rows, right=set(range(1, len(head))))
