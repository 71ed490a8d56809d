"""Losses of models on texts, and their differences with standard errors: the result of `weightsmith.evaluate`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.report.blocks import Block, Code, Column, Facts, Mark, Report, Reported, Table, Value
from weightsmith._base.text import count
from weightsmith._reports.look.models import json_of

Numbers = npt.NDArray[np.float64]

LayerErrors = tuple[float, ...]
"""‖own - reference's‖ / ‖reference's‖ of what leaves each layer, over the scored tokens of the sampled rows."""

TOLD_APART = 2.0
"""A difference of fewer standard errors may be noise."""


@dataclass(frozen=True, eq=False)
class RowLosses:
    """Sums over the scored tokens of each row of a text: arrays [rows].

    nats         losses
    tokens       number of scored tokens
    nbytes       bytes that they stand for
    divergences  KL(reference, model); None without a reference of the same vocabulary
    agreements   tokens where both find the same token the most probable; None as above
    tokenized    identity of the rows' tokens: losses of the same ones can be compared row by row
    """

    nats: Numbers
    tokens: Numbers
    nbytes: Numbers
    divergences: Numbers | None
    agreements: Numbers | None
    tokenized: str


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tokens, and its standard error over rows; nan for a single row."""

    value: float
    error: float

    @classmethod
    def of(cls, sums: Numbers, tokens: Numbers) -> Mean:
        """From sums over the tokens of each row. Rows may differ in length, so the error is that of a ratio of sums.

        >>> Mean.of(np.array([2.0, 4.0]), np.array([2.0, 2.0]))
        Mean(value=1.5, error=0.5)
        """
        value, rows = float(sums.sum() / tokens.sum()), len(sums)
        rest = sums - value * tokens
        error = math.sqrt(float(rest @ rest) * rows / (rows - 1)) / float(tokens.sum()) if rows > 1 else math.nan
        return cls(value, error)


@dataclass(frozen=True, slots=True)
class Change:
    """How much lower the perplexity of a model is than that of the baseline: 1 - perplexity / baseline's.

    error   standard error of that, of the differences row by row
    better  rows on which the model's loss is lower
    rows    number of rows
    """

    value: float
    error: float
    better: int
    rows: int

    @property
    def told_apart(self) -> bool | None:
        """Whether it is more than noise; None if one row does not tell."""
        return None if math.isnan(self.error) else abs(self.value) > TOLD_APART * self.error


@dataclass(frozen=True, slots=True)
class Score:
    """A model on a text, or on all texts.

    rows, tokens, nbytes  that are scored
    loss           mean over the tokens, in nats
    perplexity     exp(loss); of all texts the geometric mean
    bits_per_byte  of the text; of all texts the mean
    divergence     KL(reference, model) for each token, in nats; None: not compared with a reference
    agreement      share of the tokens where both find the same token the most probable; None as above
    change         against the baseline; None for the baseline, and for a model that cuts the text into other tokens
    """

    rows: int
    tokens: int
    nbytes: int
    loss: Mean
    perplexity: float
    bits_per_byte: float
    divergence: Mean | None
    agreement: float | None
    change: Change | None


def _columns(score: Score) -> dict[str, Any]:
    """The score in the columns of a table."""
    kl, change = score.divergence, score.change
    return {
        **{"rows": score.rows, "tokens": score.tokens, "loss": score.loss.value, "loss_error": score.loss.error},
        **{"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte},
        **{"divergence": kl and kl.value, "divergence_error": kl and kl.error, "agreement": score.agreement},
        **{"change": change and change.value, "change_error": change and change.error},
    }


def score_of(losses: RowLosses, baseline: RowLosses | None) -> Score:
    """The score of a model on a text. baseline: None for the baseline itself."""
    loss, tokens = Mean.of(losses.nats, losses.tokens), float(losses.tokens.sum())
    change = None
    if baseline is not None and baseline.tokenized == losses.tokenized:
        less = Mean.of(losses.nats - baseline.nats, losses.tokens)
        better = int((losses.nats < baseline.nats).sum())
        change = Change(1 - math.exp(less.value), math.exp(less.value) * less.error, better, len(losses.nats))
    nbytes = float(losses.nbytes.sum())
    return Score(
        len(losses.nats),
        int(tokens),
        int(nbytes),
        loss,
        math.exp(min(loss.value, 700.0)),
        float(losses.nats.sum()) / math.log(2) / nbytes if nbytes else math.nan,
        None if losses.divergences is None else Mean.of(losses.divergences, losses.tokens),
        None if losses.agreements is None else float(losses.agreements.sum()) / tokens,
        change,
    )


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean of the scores of a model on several texts, each of which counts the same."""
    loss = _mean([score.loss for score in scores])
    divergences = [score.divergence for score in scores if score.divergence is not None]
    agreements = [score.agreement for score in scores if score.agreement is not None]
    changes = [score.change for score in scores if score.change is not None]
    change = None
    if len(changes) == len(scores):
        less = _mean([Mean(math.log1p(-change.value), change.error / (1 - change.value)) for change in changes])
        better, rows = sum(change.better for change in changes), sum(change.rows for change in changes)
        change = Change(1 - math.exp(less.value), math.exp(less.value) * less.error, better, rows)
    n = len(scores)
    return Score(
        sum(score.rows for score in scores),
        sum(score.tokens for score in scores),
        sum(score.nbytes for score in scores),
        loss,
        math.exp(min(loss.value, 700.0)),
        sum(score.bits_per_byte for score in scores) / n,
        _mean(divergences) if len(divergences) == n else None,
        sum(agreements) / n if len(agreements) == n else None,
        change,
    )


def _mean(means: Sequence[Mean]) -> Mean:
    n = len(means)
    return Mean(sum(mean.value for mean in means) / n, math.sqrt(sum(mean.error**2 for mean in means)) / n)


@dataclass(frozen=True)
class Evaluation(Reported):
    """The scores of models on texts. Returned by `weightsmith.evaluate`.

    models     as they were given; the first is the baseline
    texts      as they were given; () for a command alone
    reference  the model of `divergence` and `agreement`, which is the baseline then; None without one
    scores     [model][text]
    row_tokens tokens in a row
    notes      what is not scored or not compared, in sentences
    layers     [model][layer]: error of what leaves the layer, relative to the reference's (`layers.LayerErrors`); None for the
               reference, without one, and for a model with other layers
    command    that measured the models too, as options: `--command`, …; () without one
    measured   its number for each model
    """

    models: tuple[str, ...]
    texts: tuple[str, ...]
    reference: str | None
    scores: tuple[tuple[Score, ...], ...]
    row_tokens: int
    notes: tuple[str, ...]
    layers: tuple[tuple[float, ...] | None, ...] = ()
    command: tuple[str, ...] = ()
    measured: tuple[float, ...] = ()

    def __repr__(self) -> str:
        """Short: a dataclass's own would list every score."""
        if not self.texts:
            measured = (f"{name} {number:g}" for name, number in zip(self.models, self.measured, strict=True))
            return f"<Evaluation by a command: {', '.join(measured)}>"
        scores = (f"{name} {perplexity(total.perplexity)}" for name, total in zip(self.models, self.totals, strict=True))
        return f"<Evaluation on {', '.join(self.texts)}: perplexity {', '.join(scores)}>"

    @cached_property
    def totals(self) -> tuple[Score, ...]:
        """The score of each model on all texts together; () without a text."""
        return tuple(scores[0] if len(scores) == 1 else mean_score(scores) for scores in self.scores if scores)

    @property
    def reading(self) -> tuple[str, ...]:
        """The conclusions, in sentences."""
        others = range(1, len(self.models))
        by_texts = [_compared(self, i) for i in others] if self.texts else []
        return (*by_texts, *(_by_command(self, i) for i in others if self.measured), *self.notes)

    def table(self) -> list[dict[str, Any]]:
        """A row for each model and text, for pandas: `pandas.DataFrame(evaluation.table())`.

        Columns: model, text, rows, tokens, loss, loss_error, perplexity, bits_per_byte; divergence, divergence_error,
        agreement, change and change_error, which are None where nothing is compared; measured, with a command.
        """
        if not self.texts:
            return [{"model": name, "measured": number} for name, number in zip(self.models, self.measured, strict=True)]
        rows = []
        for i, (model, scores) in enumerate(zip(self.models, self.scores, strict=True)):
            for text, score in zip(self.texts, scores, strict=True):
                row = {"model": model, "text": text, **_columns(score)}
                rows.append({**row, "measured": self.measured[i]} if self.measured else row)
        return rows

    def report(self) -> Report:
        from weightsmith._reports.evaluate.values import evaluation_report

        return evaluation_report(self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined."""
        return json_of(self, "models texts reference row_tokens reading scores totals layers command measured")


def _by_command(evaluation: Evaluation, i: int) -> str:
    (a, b), (first, measured) = (evaluation.models[0], evaluation.models[i]), (evaluation.measured[0], evaluation.measured[i])
    return f"The command finds {measured:g} for {b} and {first:g} for {a}."


def _compared(evaluation: Evaluation, i: int) -> str:
    """A model and the baseline."""
    base, other = evaluation.totals[0], evaluation.totals[i]
    a, b = evaluation.models[0], evaluation.models[i]
    change = other.change
    if change is None:
        bits = f"{other.bits_per_byte:.4f} bits per byte against {base.bits_per_byte:.4f}"
        return f"{b} and {a} cut the text into different tokens, so only bits per byte are compared: {bits}."
    where = "this text" if len(evaluation.texts) == 1 else "these texts"
    numbers = f"perplexity {perplexity(other.perplexity)} against {perplexity(base.perplexity)}"
    if not change.told_apart:
        if change.value == 0 and change.error == 0:
            return f"{b} and {a} predict {where} equally well."
        size = f"{abs(change.value):.2%} {'better' if change.value > 0 else 'worse'}"
        if change.told_apart is None:
            return f"{b} is {size} than {a}, {numbers}. One row does not tell how much of it is noise."
        return f"{b} and {a} cannot be told apart on {where}: {b} is {of_change(change)}, {numbers}."
    rows = f"lower on {change.better:,} of {count(change.rows, 'row')}"
    return f"{b} is {of_change(change)} than {a}: {numbers}, {rows}."


def of_change(change: Change) -> str:
    """A change in words, with its standard error.

    >>> of_change(Change(0.0312, 0.007, 14, 16)), of_change(Change(-0.2, 0.01, 0, 16))
    ('3.1 ± 0.7% better', '20.0 ± 1.0% worse')
    """
    digits = 1 if math.isnan(change.error) or change.error >= 0.0005 else 2 if change.error >= 0.00005 else 3
    value, error = f"{100 * abs(change.value):.{digits}f}", f"{100 * change.error:.{digits}f}"
    size = f"{value}%" if math.isnan(change.error) else f"{value} ± {error}%"
    return f"{size} {'better' if change.value >= 0 else 'worse'}"


def perplexity(value: float) -> str:
    """A perplexity for people.

    >>> perplexity(8.4712), perplexity(123.456), perplexity(49152.0), perplexity(1e9)
    ('8.471', '123.5', '49,152', '1e+09')
    """
    if value >= 1e7:
        return f"{value:.4g}"
    return f"{value:,.0f}" if value >= 9999.5 else f"{value:.4g}"


def evaluation_report(evaluation: Evaluation) -> Report:
    """Models on texts."""
    facts: list[tuple[str, Value]] = [("tokens in a row", f"{evaluation.row_tokens:,}")] if evaluation.texts else []
    facts += [("reference", evaluation.reference)] if evaluation.reference is not None else []
    facts += [("command", evaluation.command[1])] if evaluation.command else []
    blocks: list[Block] = [Facts("Settings", tuple(facts))]
    if evaluation.measured:
        blocks.append(_command_table(evaluation))
    if len(evaluation.texts) > 1:
        about = "Means over the texts; of the perplexity the geometric one."
        blocks.append(score_table("All texts", evaluation, evaluation.totals, about))
    for number, text in enumerate(evaluation.texts):
        blocks.append(score_table(text, evaluation, [scores[number] for scores in evaluation.scores]))
    blocks += layer_blocks(evaluation)
    texts = [word for text in evaluation.texts for word in ("--text", text)]
    reference = [] if evaluation.reference is None else ["--reference", evaluation.reference]
    blocks.append(
        Code("Reproduce", shlex.join(["weightsmith", "eval", *evaluation.models, *texts, *reference, *evaluation.command]))
    )
    by = f"on {', '.join(evaluation.texts[:3])}" if evaluation.texts else "by a command"
    title = f"{', '.join(evaluation.models[:3])}{', …' if len(evaluation.models) > 3 else ''} {by}"
    return Report(title, evaluation.reading, tuple(blocks), evaluation.to_json())


def score_table(title: str, evaluation: Evaluation, scores: Sequence[Score], about: str = "") -> Table:
    """The scores of all models on a text, or on all."""
    columns = [
        Column("model"),
        Column("perplexity", "number", "exp of the mean loss of a token"),
        Column("bits per byte", "number", "of the text: independent of the tokenizer"),
    ]
    if evaluation.reference is not None:
        columns.append(Column("KL", "number", "divergence of the predictions from the reference's, nats for each token"))
        columns.append(Column("same top token", "share", "tokens where the most probable one is the reference's"))
    columns += [
        Column("against the first", "text", "perplexity, with the standard error of the differences row by row"),
        Column("loss", "number", "nats for each token"),
        Column("±", "number", "standard error of the loss, over rows"),
        *(Column(name, "count") for name in ("rows", "tokens", "bytes")),
    ]
    return Table(
        title, tuple(columns), tuple(_row(*pair, evaluation) for pair in zip(evaluation.models, scores, strict=True)), about
    )


def _command_table(evaluation: Evaluation) -> Table:
    """The command's numbers, and their differences from the first model's."""
    columns = Column("model"), Column("number", "number"), Column("more than the first", "number")
    first = evaluation.measured[0]
    rows = zip(evaluation.models, evaluation.measured, strict=True)
    return Table("By the command", columns, tuple((name, number, number - first) for name, number in rows))


def worst_layers(errors: Sequence[float], most: int = 3) -> list[tuple[int, float, float]]:
    """Layers where the error grows most, worst first: (layer, error of its output, increase).

    >>> worst_layers([0.1, 0.12, 0.3], most=2)
    [(2, 0.3, 0.18), (0, 0.1, 0.1)]
    """
    before = [0.0, *errors[:-1]]
    grown = [(layer, error, round(error - last, 12)) for layer, (error, last) in enumerate(zip(errors, before, strict=True))]
    return sorted(grown, key=lambda layer: -layer[2])[:most]


def layer_blocks(evaluation: Evaluation) -> list[Block]:
    """The error of each layer's output, a table for each model that has them. With a name: terminals leave such tables out."""
    columns = (
        Column("layer"),
        Column("error", "number", "of the layer's output, relative to the reference's, on the first rows"),
        Column("increase", "number", "of the error in this layer"),
    )
    about = "The layers with the largest increase come first."
    return [
        Table(f"Layers of {model}", columns, _by_increase(errors), about, f"layers-{number}")
        for number, (model, errors) in enumerate(zip(evaluation.models, evaluation.layers, strict=False))
        if errors
    ]


def _by_increase(errors: Sequence[float]) -> tuple[tuple[Value, ...], ...]:
    return tuple((f"{layer}", error, grown) for layer, error, grown in worst_layers(errors, len(errors)))


def _row(name: str, score: Score, evaluation: Evaluation) -> tuple[Value, ...]:
    change: Value = Mark.NOTHING if score.change is None else of_change(score.change)
    row: list[Value] = [name, score.perplexity, score.bits_per_byte]
    if evaluation.reference is not None:
        row += [None if score.divergence is None else score.divergence.value, score.agreement]
    return (*row, change, score.loss.value, score.loss.error, score.rows, score.tokens, score.nbytes)
