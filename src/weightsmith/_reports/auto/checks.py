"""What `weightsmith auto` refuses before anything is computed or written: models that do not belong together, bad texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from weightsmith._activations.rows import TOKENIZER, encoded, text_source
from weightsmith._activations.scored_rows import Cutter
from weightsmith._activations.stored import weights_hash
from weightsmith._base.errors import MismatchError, ParameterError, PlanError, WeightsmithError
from weightsmith._base.idioms import grouped
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.sources.files import sample_files
from weightsmith._models.structure.vocabulary import is_model_head, names_head, tie_flag, tied_substitute
from weightsmith._planning.planner.tensor_data import surely_differ, trained_head
from weightsmith._plans import Plan
from weightsmith._reports.auto.pool import Models
from weightsmith._reports.auto.write import CutText, cut, row_tokens
from weightsmith._reports.evaluate.opening import Opened, check_families, opened, prepare_named
from weightsmith._reports.tuning.evaluator import other_settings, other_tensors

SAMPLE_ROWS = 16
"""Rows of a text on which tokenizers are compared."""

BELONG = "name fine-tunes of one base, with its tokenizer; to change a tokenizer: weightsmith transplant-tokenizer"
"""How to get models that belong together."""


def check_texts(one: Opened, files: Mapping[str, str]) -> dict[str, CutText]:
    """The texts of the fine-tunes, cut in two, by name. files: by name; {}: none is given.

    Raises PlanError with all problems: a text that cannot be read, or is too short.
    """
    problems, texts = list[WeightsmithError](), dict[str, CutText]()
    for name, file in files.items():
        with _noting_all(problems):
            texts[name] = cut(one, file)
    if problems:
        raise PlanError(problems)
    return texts


def check_models(one: Opened, models: Models, texts: Mapping[str, CutText]) -> None:
    """Check that the models belong together. Reads headers and tokenizers, and the weights of models that look like copies.

    one    the mean of the fine-tunes
    texts  of the fine-tunes; {}: tokenizers are compared on the built-in text

    Raises PlanError with all problems: an architecture that does not run here; tensors, settings or tokens that differ; a model
    with the weights of another one.
    """
    check_families([replace(one.base, label=models.label(models.base))])
    problems = list[WeightsmithError]()
    sample = [row for text in texts.values() for row in text.held] or _built_in_rows(one)
    with ExitStack() as stack:
        checkpoints = dict[str, Checkpoint]()
        for model in models.names:
            label = models.label(model)
            with _noting_all(problems):
                prepared = stack.enter_context(prepare_named(model))
                if changes := _differences(one.prepared.plan, prepared.plan):
                    what = "its tensors or its config.json are not those of the other models"
                    raise MismatchError(what, where=label, details=changes, fix=BELONG)
                _check_head(prepared.inputs[0], label)
                if model != models.base or TOKENIZER in prepared.inputs[0].files:
                    _check_tokenizer(one.cutter, opened(label, prepared).cutter, label, sample)
                checkpoints[label] = prepared.inputs[0]
        problems += _copies(checkpoints)
    if problems:
        raise PlanError(problems)


def check_copies(models: Models) -> None:
    """Raise PlanError if models on this disk have the weights of others. Reads those of models that look like copies."""
    with ExitStack() as stack:
        checkpoints = {models.label(name): stack.enter_context(prepare_named(name)).inputs[0] for name in models.names}
        problems = [*_copies(checkpoints)]
    if problems:
        raise PlanError(problems)


@contextmanager
def _noting_all(problems: list[WeightsmithError]) -> Iterator[None]:
    """As `noting`, with each problem of a PlanError."""
    try:
        yield
    except PlanError as error:
        problems += error.problems
    except WeightsmithError as error:
        problems.append(error)


def _differences(plan: Plan, other: Plan) -> list[str]:
    return other_tensors(plan, other) or other_settings(plan.config, other.config)


def _check_head(checkpoint: Checkpoint, label: str) -> None:
    """Raise MismatchError for a head that is stored beside the embedding that config.json ties it to, with other numbers."""
    specs = checkpoint.specs if tie_flag(checkpoint.config) else {}
    embeddings = {name: spec for name, spec in specs.items() if not names_head(name)}
    for head in filter(is_model_head, specs.values()):
        embedding = tied_substitute(head, embeddings, checkpoint.config)
        if embedding is not None and surely_differ(checkpoint, head.name, embedding):
            raise trained_head(label, head.name, embedding)


def _built_in_rows(one: Opened) -> list[str]:
    rows = one.cutter.rows(text_source(None, None, row_tokens(one), 0, ""), SAMPLE_ROWS)
    return [one.cutter.tokenizer.decode(ids.tolist()) for ids in rows.ids]


def _check_tokenizer(usual: Cutter, cutter: Cutter, model: str, sample: Sequence[str]) -> None:
    """Raise MismatchError unless it cuts the sample into the tokens of the usual one."""
    for text in sample:
        here, there = ([*c.before, *encoded(c.tokenizer, text, c.where).ids] for c in (cutter, usual))
        if here != there:
            at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
            shown = [f"{where}: {ids[at : at + 3]}" for where, ids in (("here", here), ("in the others", there))]
            what = "its tokenizer cuts a text into other tokens than that of the other models"
            raise MismatchError(what, where=model, details=[f"at token {at:,} of a row:", *shown], fix=BELONG)


def _copies(checkpoints: Mapping[str, Checkpoint]) -> Iterator[WeightsmithError]:
    """An error for each model with the weights of one before it. Reads those of models that are alike on some pages."""
    samples = {model: _sample(checkpoint) for model, checkpoint in checkpoints.items()}
    for alike in grouped((sample, model) for model, sample in samples.items() if sample).values():
        first = dict[str, str]()
        for model in alike if len(alike) > 1 else ():
            other = first.setdefault(weights_hash(checkpoints[model]), model)
            if other != model:
                fix = "leave it out, or name the fine-tune that was meant"
                yield ParameterError(f"its weights are those of {other}", where=model, fix=fix)


def _sample(checkpoint: Checkpoint) -> str:
    """Equal for a copy, see `Checkpoint.sample`; "" for a model that is computed, or not on this disk."""
    if checkpoint.plan is not None or not all(path.is_file() for path in checkpoint.paths):
        return ""
    return checkpoint.sample() or sample_files(checkpoint.paths)
