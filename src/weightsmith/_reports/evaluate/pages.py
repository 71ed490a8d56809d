"""An evaluation as a page: `--report FILE.html`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from weightsmith._base.report import Code, Column, Facts, Mark, Report, Table
from weightsmith._base.report.blocks import Block, Value
from weightsmith._reports.evaluate.layers import worst_layers
from weightsmith._reports.evaluate.values import Evaluation, Score, of_change


def evaluation_report(found: Evaluation) -> Report:
    """Models on texts."""
    facts: list[tuple[str, Value]] = [("tokens in a row", f"{found.row_tokens:,}")] if found.texts else []
    facts += [("reference", found.reference)] if found.reference is not None else []
    facts += [("command", found.command[1])] if found.command else []
    blocks: list[Block] = [Facts("Settings", tuple(facts))]
    if found.measured:
        blocks.append(_command_table(found))
    if len(found.texts) > 1:
        about = "Means over the texts; of the perplexity the geometric one."
        blocks.append(score_table("All texts", found, found.totals, about))
    for number, text in enumerate(found.texts):
        blocks.append(score_table(text, found, [own[number] for own in found.scores]))
    blocks += layer_blocks(found)
    texts = [word for text in found.texts for word in ("--text", text)]
    reference = [] if found.reference is None else ["--reference", found.reference]
    blocks.append(Code("Reproduce", shlex.join(["weightsmith", "eval", *found.models, *texts, *reference, *found.command])))
    by = f"on {', '.join(found.texts[:3])}" if found.texts else "by a command"
    title = f"{', '.join(found.models[:3])}{', …' if len(found.models) > 3 else ''} {by}"
    return Report(title, found.reading, tuple(blocks), found.to_json())


def score_table(title: str, found: Evaluation, scores: Sequence[Score], about: str = "") -> Table:
    """The scores of all models on a text, or on all."""
    columns = [
        Column("model"),
        Column("perplexity", "number", "exp of the mean loss of a token"),
        Column("bits per byte", "number", "of the text: independent of the tokenizer"),
    ]
    if found.reference is not None:
        columns.append(Column("KL", "number", "divergence of the predictions from the reference's, nats for each token"))
        columns.append(Column("same top token", "share", "tokens where the most probable one is the reference's"))
    columns += [
        Column("against the first", "text", "perplexity, with the standard error of the differences row by row"),
        Column("loss", "number", "nats for each token"),
        Column("±", "number", "standard error of the loss, over rows"),
        *(Column(name, "count") for name in ("rows", "tokens", "bytes")),
    ]
    return Table(title, tuple(columns), tuple(_row(*own, found) for own in zip(found.models, scores, strict=True)), about)


def _command_table(found: Evaluation) -> Table:
    """The command's numbers, and their differences from the first model's."""
    columns = Column("model"), Column("number", "number"), Column("more than the first", "number")
    first = found.measured[0]
    rows = zip(found.models, found.measured, strict=True)
    return Table("By the command", columns, tuple((name, own, own - first) for name, own in rows))


def layer_blocks(found: Evaluation) -> list[Block]:
    """The error of each layer's output, a table for each model that has them. With a name: terminals leave such tables out."""
    columns = (
        Column("layer"),
        Column("error", "number", "of the layer's output, relative to the reference's, on the first rows"),
        Column("increase", "number", "of the error in this layer"),
    )
    about = "The layers with the largest increase come first."
    return [
        Table(f"Layers of {model}", columns, _by_increase(errors), about, f"layers-{number}")
        for number, (model, errors) in enumerate(zip(found.models, found.layers, strict=False))
        if errors
    ]


def _by_increase(errors: Sequence[float]) -> tuple[tuple[Value, ...], ...]:
    return tuple((f"{layer}", error, grown) for layer, error, grown in worst_layers(errors, len(errors)))


def _row(name: str, score: Score, found: Evaluation) -> tuple[Value, ...]:
    change: Value = Mark.NOTHING if score.change is None else of_change(score.change)
    row: list[Value] = [name, score.perplexity, score.bits_per_byte]
    if found.reference is not None:
        row += [None if score.divergence is None else score.divergence.value, score.agreement]
    return (*row, change, score.loss.value, score.loss.error, score.rows, score.tokens, score.nbytes)
