"""`weightsmith.evaluate`: models are opened, texts are cut into rows, and the losses of each model are computed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from weightsmith._activations.losses import Known, Scored, scored
from weightsmith._activations.model import PACKAGES, TextRun
from weightsmith._activations.rows import TOKENS, GivenText, as_files, text_source
from weightsmith._activations.scored_rows import MAX_ROWS, ScoredRows, together
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import Finding, ParameterError, PlanError, WeightsmithError, as_plan_error
from weightsmith._base.installation import absent_packages
from weightsmith._base.options import assignment, lists_options, option_error, read_options
from weightsmith._base.options import named as named_option
from weightsmith._base.report.blocks import Block
from weightsmith._base.text import count, markdown, markdown_table
from weightsmith._engine.local import Progress
from weightsmith._engine.resources import Workload
from weightsmith._execution.options import RunOptions
from weightsmith._execution.output import check_options, sibling
from weightsmith._execution.progress import Meter, callbacks, shown_meter
from weightsmith._execution.run import Callbacks, RunRequest, kept_products, staged
from weightsmith._outputs.staging import Staging
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import Plan, PlanDraft, Product, Provenance
from weightsmith._reports.command import Command
from weightsmith._reports.evaluate.opening import (
    Asked,
    Named,
    Opened,
    check_families,
    head_weights,
    measured,
    name_of,
    opened,
    prepare_named,
    work_folder,
)
from weightsmith._reports.evaluate.values import (
    Evaluation,
    LayerErrors,
    Numbers,
    RowLosses,
    layer_blocks,
    of_change,
    perplexity,
    score_of,
    score_table,
    worst_layers,
)
from weightsmith._reports.look.surveys import Watching
from weightsmith._reports.options import EvaluateSettings
from weightsmith.abc.product import Arrays

if TYPE_CHECKING:
    from weightsmith._reports.keywords import EvaluateKeywords


@lists_options("evaluate", EvaluateSettings, RunOptions, besides=("text",))
def evaluate(
    *models: Named,
    text: GivenText = (),
    reference: Named | None = None,
    progress: Watching = True,
    **options: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Measure how well models predict texts: perplexity, bits per byte, and differences with their standard errors; or measure
    them by a command.

    models     folders, Hub ids or `base+adapter`, stored in any format that weightsmith reads; or recipes, whose results are
               not written: the path of a YAML file, or a mapping
    text       a .txt, .jsonl or .parquet file, or several; `built-in`. Or the text itself: a string with a space or a line
               break, or a list of strings, the documents of one text. In a .jsonl file with `messages`, the answers are
               scored. None is needed with `command`
    reference  a model to compare the predictions with: KL divergence and agreement. It need not be one of `models`
    progress   called about ten times per second; True: a bar in terminals and notebooks, False: none

    Weights are used as stored, activations are float32, and the numbers do not depend on the number of threads. The reference,
    or else the first model, is the baseline of differences. An interrupted evaluation resumes with the same call.

    With `command`, what is no folder on this disk is written to a temporary folder in `work`, and measured there.

    Raises PlanError with all problems of models and texts, before tensor data is read; NonFinite; CommandFailed, a
    WeightsmithError, for a command that fails or gives no number.

    Memory: one layer, its states of some rows, and the head. Disk: the states of all rows between two layers, twice.

    >>> found = weightsmith.evaluate("base", "ties.yml", text="fr.txt", reference="base")  # doctest: +SKIP
    >>> found.reading  # doctest: +SKIP
    ('ties.yml is 3.1 ± 0.7% better than base: perplexity 10.12 against 10.44, lower on 14 of 16 rows.',)
    """
    with as_files(text=text) as texts:
        settings, running = read_options("evaluate", {**texts.paths, **options}, EvaluateSettings, RunOptions)
        measured = evaluation(named(models, reference), reference is not None, settings, running, progress)
        return replace(measured, texts=texts.named(measured.texts))


def named(models: Sequence[Named], reference: Named | None) -> dict[str, Named]:
    """Models by name, the reference first. Raises ParameterError for two recipes of one name."""
    models_by_name = dict[str, Named]()
    for model in (*([] if reference is None else [reference]), *models):
        if isinstance(model, list | tuple):
            raise ParameterError("a list of models was given", fix="pass them one by one: evaluate(*models, text=…)")
        name = name_of(model)
        if isinstance(model, Mapping) and models_by_name.setdefault(name, model) != model:
            what = f"two recipes have the name '{name}'"
            raise ParameterError(what, fix="give each a name of its own: {'name': 'first', 'merge_method': …}")
        models_by_name.setdefault(name, model)
    return models_by_name


def evaluation(
    asked: Mapping[str, Asked], compared: bool, settings: EvaluateSettings, running: RunOptions, progress: Watching
) -> Evaluation:
    """What `evaluate` does after reading its options.

    asked     models by name
    compared  whether the first is the reference of the others
    """
    if not asked:
        raise ParameterError("no model is given", fix="name one or more models or recipes")
    command = Command.asked(settings)
    if not settings.text and command is None:
        fix = f"name a .txt, .jsonl or .parquet file, or a command that scores a model: {named_option('command')}"
        raise option_error("text", "there is no text to score", fix)
    if compared and not settings.text:
        raise option_error("reference", "a reference is for texts", "name a text, or leave the reference out")
    names, numbers = tuple(asked), dict[str, Any]()
    if command is not None:
        numbers = {"command": command.options, "measured": measured(asked, command, settings, running)}
    if not settings.text:
        return Evaluation(names, (), None, ((),) * len(names), 0, (), **numbers)
    with ExitStack() as stack:
        ready = _open(asked, stack)
        tokens = _row_tokens(ready, settings)
        parts = _cut(ready, settings, tokens)
        check_families([one.base for one in ready])
        rows = [together(model_rows) for model_rows in parts]
        shown = stack.enter_context(_watching(progress))
        computed, errors = _losses(ready, rows, compared, settings, running, shown)
    own_rows = [[len(part.ids) for part in model_rows] for model_rows in parts]
    losses = [_by_text(arrays, model_rows, counts) for arrays, model_rows, counts in zip(computed, rows, own_rows, strict=True)]
    scores = tuple(
        tuple(score_of(model_rows, first if i else None) for model_rows, first in zip(arrays, losses[0], strict=True))
        for i, arrays in enumerate(losses)
    )
    notes = _notes(names, settings, parts, computed, compared)
    return Evaluation(names, settings.text, names[0] if compared else None, scores, tokens, notes, tuple(errors), **numbers)


def _open(asked: Mapping[str, Asked], stack: ExitStack) -> list[Opened]:
    problems, ready = list[WeightsmithError](), list[Opened]()
    for name, model in asked.items():
        try:
            held = nullcontext(model) if isinstance(model, Prepared) else prepare_named(model)
            ready.append(opened(name, stack.enter_context(held)))
        except PlanError as error:
            if len(asked) == 1:
                raise
            problems += error.problems
        except WeightsmithError as error:
            problems.append(error)
    if problems:
        raise PlanError(problems)
    return ready


def _row_tokens(ready: Sequence[Opened], settings: EvaluateSettings) -> int:
    """Tokens in a row: as many as asked, or as all models take."""
    least = min(ready, key=lambda one: one.positions)
    tokens = settings.tokens or min(TOKENS, least.positions)
    if tokens > least.positions:
        fix = f"use {assignment('tokens', least.positions)} or less"
        raise ParameterError(f"its rows have at most {least.positions:,} tokens, not {tokens:,}", where=least.name, fix=fix)
    return tokens


def _cut(ready: Sequence[Opened], settings: EvaluateSettings, tokens: int) -> list[list[ScoredRows]]:
    """The rows of each text for each model. Raises PlanError with all problems."""
    problems = dict[str, WeightsmithError]()
    parts: list[list[ScoredRows]] = [[] for _ in ready]
    for path in settings.text:
        try:
            source = text_source(path, settings.rows, tokens, 0, "text")
        except WeightsmithError as error:
            problems[str(error)] = error
            continue
        for one, model_parts in zip(ready, parts, strict=True):
            try:
                model_parts.append(one.cutter.rows(source, MAX_ROWS))
            except WeightsmithError as error:
                problems[str(error)] = error
    if problems:
        raise PlanError([*problems.values()])
    return parts


def _losses(
    ready: Sequence[Opened],
    rows: Sequence[ScoredRows],
    compare: bool,
    settings: EvaluateSettings,
    running: RunOptions,
    shown: Callable[[str], Callbacks],
) -> tuple[list[Arrays], list[LayerErrors | None]]:
    """The arrays of the losses of each model, and the errors of its layers. compare: with the first one's predictions."""
    computed, errors, reference = list[Arrays](), list[LayerErrors | None](), dict[str, Arrays]()
    with ExitStack() as stack:
        finished = list[Staging]()
        known: Known | None = None
        for one, model_rows in zip(ready, rows, strict=True):
            first = one is ready[0]
            usable = known if not first and _comparable(ready[0], rows[0], one, model_rows) else None
            model_products = scored(one.model, model_rows, usable, keep=head_weights(one.base) if first and compare else ())
            if (first and compare) or usable is not None:
                model_products = replace(model_products, products=with_samples(model_products))
            staging, arrays = stack.enter_context(_computed(one, model_products, settings, running, shown(one.name)))
            finished.append(staging)
            computed.append([np.array(array) for array in arrays[model_products.losses.name][: 1 if first else None]])
            errors.append(layer_errors(arrays, reference, model_rows) if usable is not None else None)
            if first and compare:
                known, reference = model_products.reference(arrays, staging.plan_hash), dict(arrays)
        for staging in finished:
            staging.discard()
    return computed, errors


def _comparable(first: Opened, rows: ScoredRows, other: Opened, other_rows: ScoredRows) -> bool:
    """Whether two models predict the same tokens of the same vocabulary."""
    return rows.sha256 == other_rows.sha256 and first.model.vocabulary == other.model.vocabulary


@contextmanager
def _computed(
    one: Opened, model_products: Scored, settings: EvaluateSettings, running: RunOptions, watching: Callbacks
) -> Iterator[tuple[Staging, Mapping[str, Arrays]]]:
    """The staging folder of a model's losses, while it is open, and the arrays that are kept."""
    draft = PlanDraft.of(one.prepared.plan)
    draft.provenance, draft.steps, draft.then = Provenance("evaluation"), [], None
    model_products.run.add_to(draft, model_products.products)
    plan = draft.finish()
    prepared = replace(one.prepared.with_plan(plan), loading=None)
    with (
        work_folder(settings, plan.hash[:12]) as folder,
        staged(prepared, RunRequest(folder, running, watching)) as opened,
    ):
        staging = opened.staging
        try:
            results = opened.compute(Workload(results=kept_products(plan, staging, model_products.known), release=True)).results
        except WeightsmithError:
            if not staging.products:  # what fails first leaves nothing behind
                staging.discard()
            raise
        sampled = [product for product in model_products.products if product.op == "sampled_states"]
        kept = [product for product in (model_products.losses, model_products.states, *sampled) if not product.transient]
        yield staging, {product.name: results.arrays(product.name) for product in kept}


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Progress with the name of the model that is evaluated."""

    name: str
    show: Callable[[Progress], None]

    def __call__(self, now: Progress) -> None:
        if now.computation is not None:
            now = replace(now, computation=replace(now.computation, doing=f"{self.name}: {now.computation.doing}"))
        self.show(now)


@contextmanager
def _watching(progress: Watching) -> Iterator[Callable[[str], Callbacks]]:
    """Callbacks that show progress under a model's name."""
    if progress is False:
        yield lambda name: Callbacks()
    elif not isinstance(progress, bool | Meter):
        yield lambda name: Callbacks(_Labelled(name, progress))
    else:
        with shown_meter(progress) as meter:
            showing = callbacks(meter, "evaluating")
            show = showing.progress
            assert show is not None
            yield lambda name: replace(showing, progress=_Labelled(name, show))


def _by_text(arrays: Arrays, rows: ScoredRows, counts: Sequence[int]) -> list[RowLosses]:
    """The sums of the rows of each text. counts: rows of each."""
    is_scored, losses, start = rows.nbytes >= 0, list[RowLosses](), 0
    for n in counts:
        places = slice(start, start + n)
        tokens = is_scored[places].sum(1).astype(np.float64)
        used = tokens > 0

        def sums(array: npt.NDArray[Any], places: slice = places, used: npt.NDArray[Any] = used) -> Numbers:
            return np.where(is_scored[places], array[places], 0).astype(np.float64).sum(1)[used]

        nats, *others = map(sums, arrays)
        divergences, agreements = others or (None, None)
        tokenized = ScoredRows(rows.ids[places], rows.nbytes[places]).sha256
        losses.append(RowLosses(nats, tokens[used], sums(rows.nbytes), divergences, agreements, tokenized))
        start += n
    return losses


def _notes(
    names: Sequence[str],
    settings: EvaluateSettings,
    parts: Sequence[Sequence[ScoredRows]],
    computed: Sequence[Arrays],
    compared: bool,
) -> tuple[str, ...]:
    notes = []
    for text, text_rows in zip(settings.text, parts[0], strict=True):
        if not settings.rows and len(text_rows.ids) == MAX_ROWS:
            notes.append(f"Only the first {MAX_ROWS:,} rows of {text} are scored; --rows N (rows=N) scores more.")
        if text_rows.shortened:
            notes.append(
                f"{count(text_rows.shortened, 'conversation')} of {text} cut off at the end of a row: see --tokens (tokens)."
            )
        if text_rows.unplaced:
            what = "because the chat template changes earlier turns when the conversation goes on"
            notes.append(f"{count(text_rows.unplaced, 'answer')} of {text} not scored, {what}.")
    without = [name for name, arrays in zip(names[1:], computed[1:], strict=True) if len(arrays) == 1]
    if without and compared:
        notes.append(f"No divergence for {', '.join(without)}: its vocabulary or its tokens are not those of {names[0]}.")
    return tuple(notes)


# ---- how far what leaves each layer is from what leaves that of the reference, on the first rows of a text


SAMPLE_BYTES = 128 << 20
"""The most states of a model that are kept, of all layers together; at least one row."""


def with_samples(scored: Scored) -> tuple[Product, ...]:
    """Its products, and after each layer one that keeps the first rows of what leaves it: the rest need not stay on disk."""
    run, products, layers = scored.run, list[Product](), itertools.count()
    for product in scored.products:
        products.append(product)
        if product.op == "states":
            layer = next(layers)
            kept = run.array(f"sample {layer}", "F32", (_rows(run), run.text.tokens, run.base.hidden))
            work = LayerWork(run.base, run.packages, layer, product.name)
            products.append(run.product(kept.name, "sampled_states", (kept,), work, (), (product,)))
    return tuple(products)


def _rows(run: TextRun) -> int:
    row = 4 * run.text.tokens * run.base.hidden * run.layers
    return max(1, min(run.text.rows, SAMPLE_BYTES // row))


def layer_errors(arrays: Mapping[str, Arrays], reference: Mapping[str, Arrays], rows: ScoredRows) -> LayerErrors | None:
    """Error of each layer; None if the models' layers differ. Arrays are keyed by name, with those of `with_samples`."""
    names = [name for name in arrays if name.startswith("sample ")]
    if names != [name for name in reference if name.startswith("sample ")]:
        return None
    errors = []
    for name in names:
        [ours], [theirs] = arrays[name], reference[name]
        if ours.shape != theirs.shape:
            return None
        error = norm = 0.0
        for mine, other, nbytes in zip(ours, theirs, rows.nbytes, strict=False):
            is_scored = nbytes >= 0
            reference_states = other[is_scored].astype(np.float64)
            error += float(np.square(mine[is_scored] - reference_states).sum())
            norm += float(np.square(reference_states).sum())
        errors.append((error / norm) ** 0.5 if norm else 0.0)
    return tuple(errors)


# ---- The evaluation of a result that is not published yet: `--evaluate` of merge and quantize


RESULT = "the result"


@dataclass(frozen=True, slots=True)
class ResultEvaluation:
    """How well a result predicts a text, beside its source: a report of the run that made it."""

    evaluation: Evaluation

    @property
    def lines(self) -> tuple[str, ...]:
        """For the summary."""
        [text], score = self.evaluation.texts, self.evaluation.totals[-1]
        facts = [f"perplexity {perplexity(score.perplexity)}"]
        if len(self.evaluation.models) > 1:
            facts[0] += f" ({perplexity(self.evaluation.totals[0].perplexity)} for {self.evaluation.models[0]})"
        facts += [of_change(score.change)] if score.change is not None else []
        if score.divergence is not None and score.agreement is not None:
            facts += [f"KL {score.divergence.value:.5f}", f"same top token {score.agreement:.2%}"]
        return (f"on {text}: {'; '.join(facts)}", *self._layers, *self.evaluation.notes)

    @property
    def divergence(self) -> float | None:
        """From the model that it is compared with, in nats per token."""
        divergence = self.evaluation.totals[-1].divergence
        return None if divergence is None else divergence.value

    @property
    def _layers(self) -> list[str]:
        """Layers where the error grows most."""
        errors = self.evaluation.layers[-1] if self.evaluation.layers else None
        if not errors:
            return []
        listed = ", ".join(f"{layer} ({grown:+.2%})" for layer, _, grown in worst_layers(errors))
        return [f"error of the last layer's output {errors[-1]:.2%}; it grows most in layers {listed}"]

    def to_json(self) -> dict[str, Any]:
        """For the manifest and `--json`."""
        return self.evaluation.to_json()

    def files(self) -> Mapping[str, bytes]:
        """None besides the manifest."""
        return {}

    def section(self) -> str:
        """For the model card."""
        head = ["model", "perplexity", "bits per byte", "KL", "same top token", "against the source"]
        rows = []
        for name, score in zip(self.evaluation.models, self.evaluation.totals, strict=True):
            kl = "" if score.divergence is None else f"{score.divergence.value:.5f}"
            same = "" if score.agreement is None else f"{score.agreement:.2%}"
            change = "" if score.change is None else of_change(score.change)
            rows.append((name, perplexity(score.perplexity), f"{score.bits_per_byte:.4f}", kl, same, change))
        text, tokens = Path(self.evaluation.texts[0]).name, self.evaluation.totals[-1].tokens
        layers = "".join(f"\n{line[0].upper()}{line[1:]}.\n" for line in self._layers)
        about = f"On {tokens:,} tokens of {markdown(text)}, in rows of {self.evaluation.row_tokens:,}."
        return f"\n## Evaluation\n\n{about}\n\n{markdown_table(head, rows, right=range(1, 6))}\n{layers}"

    def blocks(self) -> Sequence[Block]:
        """For the page of the run."""
        return [
            score_table(f"Evaluation on {self.evaluation.texts[0]}", self.evaluation, self.evaluation.totals),
            *layer_blocks(self.evaluation),
        ]

    def warnings(self, where: str) -> list[Finding]:
        """None."""
        return []


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a result in its staging folder. progress: as for `evaluate`."""

    settings: EvaluateSettings
    running: RunOptions
    progress: Watching = True

    def __call__(self, plan: Plan, folder: Path, compared: Prepared | None = None) -> ResultEvaluation:
        """Evaluate the folder of a plan's result, beside the model that it was made from, or the result of another plan."""
        source = next((model.ref for model in (plan.models[plan.donor], *plan.models) if model.plan is None), None)
        asked: dict[str, Asked] = {} if source is None else {source: source}
        if compared is not None:
            source = source if len(plan.refs) == 1 and source is not None else "before it was quantised"
            asked = {source: compared}
        asked[RESULT] = folder
        return ResultEvaluation(evaluation(asked, source is not None, self.settings, self.running, self.progress))


def evaluator(options: RunOptions, out: str | os.PathLike[str]) -> Evaluator | None:
    """The evaluator that the options ask for; None if they ask for none.

    Raises PlanError for missing packages and for a text that cannot be used, ParameterError for an output that is not a folder.
    """
    if options.evaluate is None:
        return None
    check_options(out, options)
    if problems := absent_packages(PACKAGES, "evaluations", "calibration"):
        raise PlanError(problems)
    with as_plan_error():
        text_source(options.evaluate, None, TOKENS, 0, "evaluate")
    running = replace(
        options, evaluate=None, push=None, commit_message=None, ray=None, processes=1, keep_stages=False, overwrite=False
    )
    return Evaluator(EvaluateSettings(text=(options.evaluate,), work=str(sibling(out, "").parent)), running)
