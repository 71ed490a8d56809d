"""The `scored_layer` and `scored_vocabulary` products: how each candidate type of each weight changes single predictions.

With Δ the error of a weight, x what enters its layer at a token and g the gradient of log p(label) at its outputs
(`gradients.py`), the score of the token is g · Δx. To the second order, the predictions change by ½ E[(Σ g · Δx)²] nats for
each token, summed over weights. The sum is inside the square: errors of many weights that push the predictions the same way
add up to more than their own losses. A fine-tune is a case: coarse types round what all of its weights have learnt away at
once. `measured.py` takes the errors of weights to be independent.

Scores are computed for some tokens of each row, at equal steps: `TOKENS` in all. Weights are quantised whole, some rows at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightsmith._activations.gradients import LAST_FIRST, predict
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration.layer import located
from weightsmith._models.formats import Encoding, find_encoding
from weightsmith._models.structure.vocabulary import is_embedding, is_model_head
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import LayerRows, NumberedRow, Rows
    from weightsmith._activations.sums import Inputs

Places = npt.NDArray[np.int64]

TOKENS = 4096
"""The most tokens that have scores."""

ROWS_AT_ONCE = 256
"""Rows of a weight that are quantised at once."""

TOKENS_AT_ONCE = 64
"""Tokens whose predictions are held in memory at once."""

NONE = np.empty(0, np.float32)
"""No importances."""


@dataclass(frozen=True, slots=True)
class ScoreWork(LayerWork):
    """Settings of `scored_layer`.

    gradients   the product with the gradients of the layer's output
    candidates  the encodings to try for each weight, by name
    """

    gradients: str
    candidates: Mapping[str, tuple[str, ...]]

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.gradients}

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if problem := LayerWork.problem(self, product, shapes):
            return problem
        specs = {step.out.name: step.out for step in product.steps}
        for name, tried in self.candidates.items():
            try:
                encodings = [find_encoding(encoding) for encoding in tried]
            except WeightsmithError as error:
                return error.finding.what
            if name not in specs or len(specs[name].shape) != 2 or not all(map(can_score, encodings)):
                return "it has no step for a weight, or cannot score its encoding"
            if any(encoding.refusal(specs[name]) for encoding in encodings):
                return "the rows of a weight have no whole blocks"
        sizes = len(self.candidates), max(map(len, self.candidates.values()), default=0)
        arrays = [(out.dtype.name, out.shape[:2], len(out.shape)) for out in product.outs]
        return "" if arrays == [("F32", sizes, 3)] else "its arrays are not those of its settings"


@dataclass(frozen=True, slots=True)
class VocabularyWork(ScoreWork):
    """Settings of `scored_vocabulary`. `layer` is the number of layers; `gradients` are those of the first layer's input.

    rows      the product of the rows of tokens
    embedded  the product with the first layer's input
    seed      of the labels
    """

    HEAD = True

    rows: str
    embedded: str
    seed: int

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.gradients, self.rows, self.embedded}

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if self.layer != self.base.layers or not any(is_embedding(step.out) for step in product.steps):
            return "it has no step for the embedding"
        return "its seed is negative" if self.seed < 0 else ScoreWork.problem(self, product, shapes)


def places(rows: int, tokens: int) -> Places:
    """The tokens of a row that have scores, of so many rows.

    >>> places(4, 8), places(2048, 8)
    (array([0, 1, 2, 3, 4, 5, 6, 7]), array([0, 4]))
    """
    return np.arange(0, tokens, -(-rows * tokens // TOKENS))


def shape_of(candidates: Mapping[str, Sequence[str]], states: tuple[int, ...]) -> tuple[int, int, int]:
    """The scores: [weights, candidates, tokens]. states: shape of a layer's input."""
    return len(candidates), max(map(len, candidates.values()), default=0), states[0] * len(places(*states[:2]))


def can_score(encoding: Encoding) -> bool:
    """Whether the errors of an encoding can be scored: it can do without importances, and is decoded."""
    return encoding.kind == "blocks" and encoding.importances == "may"


def _error(part: Floats, encoding: Encoding, importances: Floats) -> Floats:
    """The error that an encoding makes in some rows of a weight. importances: of each column; empty: all are equal."""
    spec = TensorSpec("x.weight", DTYPES["F32"], part.shape)
    blocks = [np.empty(out.nbytes, np.uint8) for out in encoding.outs(spec)]
    encoding.encode(spec, part, 0, blocks, importances)
    return encoding.dequantise(blocks, part.shape) - part


def _sampled(rows: LayerRows, inputs: Inputs, step: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """For each row, what enters each weight and the gradients at its outputs: every `step`-th token that reaches it."""

    def sampled(numbered: NumberedRow) -> dict[str, tuple[Tensor, Tensor]]:
        # The tokens that reach an expert are fewer: as many of them as of all tokens.
        shared: dict[int, Tensor] = {}  # of weights with the same inputs
        at_weights = inputs.of(numbered).items()
        return {name: (shared.setdefault(x.data_ptr(), x[::step].clone()), g[::step].clone()) for name, (x, g) in at_weights}

    try:
        return [sample for some in rows.map(sampled) for sample in some]
    finally:
        inputs.close()


def _score_layer(context: ProductContext) -> Arrays:
    import torch

    from weightsmith._activations.running import layer_rows, workers
    from weightsmith._activations.sums import Forward, Inputs

    work = ScoreWork.of(context.product)
    leaving = context.arrays(work.gradients)[0]
    scores = np.zeros(context.product.outs[0].shape, np.float32)
    order = {name: i for i, name in enumerate(work.candidates)}
    with layer_rows(context, work, 0.3, 1, back=True) as rows:
        scored_tokens = places(*rows.states.shape[:2])
        step = int(scored_tokens[1]) if len(scored_tokens) > 1 else 1
        samples = _sampled(rows, Inputs(rows, list(work.candidates), Forward(leaving=leaving)), step)

        def score(task: tuple[str, int]) -> None:
            name, first = task
            reached = [(row, *sample[name]) for row, sample in enumerate(samples) if name in sample and len(sample[name][0])]
            if not reached:  # nothing depends on it
                return
            weight = rows.layer.linear(name).weight.detach().cpu().numpy()
            part = np.ascontiguousarray(weight[first : first + ROWS_AT_ONCE])
            x = torch.cat([x for _, x, _ in reached])
            g = torch.cat([g[:, first : first + len(part)] for _, _, g in reached])
            at = np.concatenate([row * len(scored_tokens) + np.arange(len(x)) for row, x, _ in reached])
            importances = np.ascontiguousarray(x.square().mean(0).cpu().numpy(), np.float32)
            with located(f"{name}, {work.base.label}"), torch.no_grad():
                for i, encoding in enumerate(work.candidates[name]):
                    error = torch.from_numpy(_error(part, find_encoding(encoding), importances)).to(rows.device)
                    partial[name, first, i] = at, ((x @ error.T) * g).sum(1).cpu().numpy()

        partial: dict[tuple[str, int, int], tuple[npt.NDArray[np.int64], Floats]] = {}
        heights = {name: rows.layer.linear(name).weight.shape[0] for name in work.candidates}
        tasks = [(name, first) for name, height in heights.items() for first in range(0, height, ROWS_AT_ONCE)]
        with workers(context.threads, rows.device) as pool:
            for done, _ in enumerate(pool.map(score, tasks), 1):
                rows.progress(done / len(tasks))
        for name, first in tasks:  # in order, so that the sums do not depend on threads
            for i in range(len(work.candidates[name])):
                if (name, first, i) in partial:
                    at, values = partial[name, first, i]
                    scores[order[name], i, at] += values
    return [scores]


def _score_vocabulary(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import rows_of_states

    work = VocabularyWork.of(context.product)
    rows = rows_of_states(context, work, 0, 0, back=True)
    chosen = places(rows.states.shape[0], rows.states.shape[1])
    specs = [step.out for step in context.product.steps]
    table = next(spec for spec in specs if is_embedding(spec))
    head = next((spec for spec in specs if is_model_head(spec)), table)
    scores = np.zeros(context.product.outs[0].shape, np.float32)
    names = list(work.candidates)
    if table.name in names:
        _add_embedding(context, work, table, chosen, scores[names.index(table.name)])
    if head.name in names:
        _add_head(rows, work, head, chosen, scores[names.index(head.name)])
    return [scores]


def _add_embedding(context: ProductContext, work: VocabularyWork, table: TensorSpec, chosen: Places, scores: Floats) -> None:
    """scores[i] += what each chosen token loses with candidate i of the embedding: the error of its row times the gradient."""

    from weightsmith._activations.running import ids_of

    def flat(states: Floats) -> Floats:
        return np.ascontiguousarray(states[:, chosen]).reshape(-1, states.shape[-1])

    embedded, gradients = context.arrays(work.embedded)[0], context.arrays(work.gradients)[0]
    ids = ids_of(context, work.rows, embedded.shape)[:, chosen].reshape(-1)
    used, which = np.unique(ids, return_inverse=True)
    stored, entering, back = context.rows(table.name, used.tolist()), flat(embedded), flat(gradients)
    plain = stored[which]
    scale = float((entering * plain).sum(dtype=np.float64) / (plain * plain).sum(dtype=np.float64))  # Gemma has one
    for i, encoding in enumerate(work.candidates[table.name]):
        error = _error(np.ascontiguousarray(stored), find_encoding(encoding), NONE)[which]
        scores[i] += (error * back).sum(1) * np.float32(scale)


def _add_head(rows: Rows, work: VocabularyWork, head: TensorSpec, chosen: Places, scores: Floats) -> None:
    """scores[i] += what each chosen token loses with candidate i of the head, for a label drawn from its own predictions."""
    import torch

    from weightsmith._activations.running import decoder_of, workers

    context, decoder = rows.context, decoder_of(work.base)
    count, tokens, _ = rows.states.shape
    numbers = np.empty(head.shape, np.float32)
    context.fill({head.name: numbers})
    weight, cap = torch.from_numpy(numbers).to(rows.device), decoder.logit_cap
    draws = np.stack([np.random.default_rng([work.seed, row]).random((tokens,), np.float32)[chosen] for row in range(count)])
    with decoder.final_norm(context, rows.device) as norm, workers(context.threads, rows.device) as pool, torch.no_grad():
        final = torch.cat([norm(torch.from_numpy(np.array(rows.states[row])).to(rows.device))[chosen] for row in range(count)])
        drawn = torch.from_numpy(draws.reshape(-1)).to(rows.device)

        def look(first: int) -> tuple[Tensor, Tensor]:
            part = slice(first, first + TOKENS_AT_ONCE)
            _, label, log, _ = predict(final[part], weight, cap, drawn[part])
            return label, log

        seen = list(pool.map(look, range(0, len(final), TOKENS_AT_ONCE)))
        labels, logs = torch.cat([pair[0] for pair in seen]), torch.cat([pair[1] for pair in seen])
        tried = [find_encoding(name) for name in work.candidates[head.name]]

        def score(first: int) -> list[Floats]:
            part = weight[first : first + ROWS_AT_ONCE]
            of_logits = _gradients(final @ part.T, cap, labels - first, logs)
            plain = np.ascontiguousarray(part.cpu().numpy())
            sums = []
            for encoding in tried:
                error = torch.from_numpy(_error(plain, encoding, NONE)).to(rows.device)
                sums.append(((of_logits @ error) * final).sum(1).cpu().numpy())
            return sums

        for done, sums in enumerate(pool.map(score, range(0, len(weight), ROWS_AT_ONCE)), 1):
            scores[: len(tried)] += np.stack(sums)
            rows.progress(min(1.0, done * ROWS_AT_ONCE / len(weight)))


def _gradients(logits: Tensor, cap: float | None, labels: Tensor, logs: Tensor) -> Tensor:
    """The gradients of the labels' log-probabilities at some logits [tokens, n], before Gemma's cap on them.

    labels  the column of each token's label; outside 0 … n - 1 it is among other logits
    logs    the logarithm of each token's sum of exponentials
    """
    slope = None
    if cap is not None:
        slope = 1 - (logits / cap).tanh().square()
        logits = (logits / cap).tanh() * cap
    gradients = (logits - logs[:, None]).exp().neg()
    inside = (labels >= 0) & (labels < logits.shape[1])
    gradients[inside.nonzero()[:, 0], labels[inside]] += 1
    if slope is not None:
        gradients *= slope
    return gradients


LAYER = ProductKind(LAST_FIRST, compute=_score_layer, check=ScoreWork.check, device=True)
VOCABULARY = ProductKind(LAST_FIRST, compute=_score_vocabulary, check=VocabularyWork.check, device=True)
