"""What settings cost: four products.

`measured_layer` has how much each candidate setting of each weight changes the model's predictions.

With Δ the error of a weight, x the inputs of its layer and g the gradients of the predictions at its outputs (`gradients.py`),
the predictions change by ½ E[(g · Δx)²] nats for each token. The errors of different output features are taken to be
independent, and the square of a gradient to be a token's part times a feature's part. Then that is

    ½ Σ_i s_i Δ_i H Δ_iᵀ / tokens,    H = Σ_t |g_t|² x_t x_tᵀ,    s_i = Σ_t g_ti² / Σ_t |g_t|²

and needs no forward pass of a quantised layer. The sum over i is estimated by the mean of `FEATURES` output features, drawn
with probabilities s_i at equal steps; only these are quantised.

`measured_blocks` has how much each option of a block changes what leaves the block: ExLlamaV2's measurement. For each option,
the weights of the block are quantised for what enters them in the plain model, and the rows run through the block. The error is
the mean over the rows of ‖y' - y‖ / ‖y‖, y with the residual stream that the block adds to. What leaves the plain block is held
in memory: as much as the states of all rows.

`scored_layer` and `scored_vocabulary` have how each candidate type of each weight changes single predictions. With g the
gradient of log p(label) at the outputs of a weight's layer, the score of a token is g · Δx. To the second order, the
predictions change by ½ E[(Σ g · Δx)²] nats for each token, summed over weights. The sum is inside the square: errors of many
weights that push the predictions the same way add up to more than their own losses, which `measured_layer` takes to be
independent. A fine-tune is a case: coarse types round what all of its weights have learnt away at once. Scores are computed for
some tokens of each row, at equal steps: `TOKENS` in all. Weights are quantised whole, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.gradients import LAST_FIRST, predict
from weightsmith._activations.states import FORWARD
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import ParameterError, WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._features.quantisation.calibration.layer import (
    CalibratedWork,
    FactoredHessians,
    Hessian,
    Shapes,
    located,
    set_weight,
)
from weightsmith._models.formats import Encoding, find_encoding
from weightsmith._models.structure.projections import is_attention, site_of
from weightsmith._models.structure.vocabulary import is_embedding, is_model_head
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats, ProductContext, ProductKind

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from torch import Tensor

    from weightsmith._activations.decoder.forward import Layer
    from weightsmith._activations.running import LayerRows, NumberedRow, Rows
    from weightsmith._activations.sums import Inputs


FEATURES = 128


@dataclass(frozen=True, slots=True)
class CandidatesWork(LayerWork):
    """A layer, for whose weights several encodings are tried.

    gradients   the product with the gradients of the layer
    candidates  the encodings to try for each weight, by name
    """

    gradients: str
    candidates: Mapping[str, tuple[str, ...]]

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.gradients}


@dataclass(frozen=True, slots=True)
class MeasureWork(CandidatesWork, CalibratedWork):
    """Settings of the product. Its gradients are at the outputs of the same weights, in the same order."""

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and the encodings to try."""
        return ((name, encoding) for name, tried in self.candidates.items() for encoding in tried)

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The losses: nats for each token, [weights, candidates]."""
        return [("F64", (len(self.candidates), max(map(len, self.candidates.values()), default=0)))]


def _measure_layer(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import budget, layer_rows
    from weightsmith._activations.sums import Forward, use_sums

    work = MeasureWork.of(context.product)
    _, norms, squares = context.arrays(work.gradients)
    losses = np.zeros(context.product.outs[0].shape)
    factors = FactoredHessians(budget(context))
    places = {name: i for i, name in enumerate(work.candidates)}
    scales = {name: norms[i] for name, i in places.items()}
    with layer_rows(context, work, 0.3, 1, back=True) as rows:
        tokens = rows.states.shape[0] * rows.states.shape[1]

        def measure(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
            names = inputs.sites[site]
            tried = [find_encoding(encoding) for name in names for encoding in work.candidates[name]]
            with factors.hessian(inputs, site, finish, tried) as hessian:
                for name in names:
                    weighted = finish(name)
                    if weighted is not None:  # else no token reached it, and nothing depends on it
                        weight = rows.layer.linear(name).weight.detach().cpu().numpy()
                        of_features = squares[places[name]][: len(weight)]
                        with located(f"{name}, {work.base.label}"):
                            quantised = partial(_quantised, hessian=hessian)
                            changes = _losses(weight, quantised, weighted, of_features, work.candidates[name])
                        losses[places[name], : len(changes)] = np.divide(changes, tokens)

        use_sums(rows, list(work.candidates), measure, forward=Forward(scales=scales))
    return [losses]


def _quantised(part: Floats, encoding: str, *, hessian: Hessian) -> Floats:
    """Rows of a weight as loaders compute them. hessian: of its inputs."""
    value = find_encoding(encoding)
    return value.dequantise(value.quantise(part, hessian, 1), part.shape)


def _losses(
    weight: Floats,
    quantised: Callable[[Floats, str], Floats],
    weighted: Floats,
    squares: npt.NDArray[np.float64],
    encodings: tuple[str, ...],
) -> list[float]:
    """The change of all predictions together that each encoding causes, in nats.

    quantised  (rows, encoding) → rows as loaders compute them
    weighted   the Hessian of its inputs, each token weighted by the square of its gradient
    squares    of the gradients of each output feature
    """
    some, shares = drawn(squares)
    part = np.ascontiguousarray(weight[some])
    return [0.5 * float(shares @ _energies(part - quantised(part, encoding), weighted)) for encoding in encodings]


def drawn(squares: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Some features in ascending order, and the share of all that each stands for: those with large squares, more than others.

    >>> drawn(np.array([0, 1, 0, 3.0]))
    (array([1, 3]), array([0.25, 0.75]))
    """
    below = squares.cumsum()
    if not below[-1]:
        return np.zeros(1, np.int64), np.zeros(1)
    places = np.searchsorted(below, (np.arange(FEATURES) + 0.5) / FEATURES * below[-1])
    some, counts = np.unique(places, return_counts=True)
    return some, counts / FEATURES


def _energies(weight: Floats, hessian: Floats) -> npt.NDArray[np.float64]:
    """The diagonal of W H Wᵀ. The product in float32, on one thread; the sums in float64."""
    import torch

    with torch.no_grad():
        product = (torch.from_numpy(weight) @ torch.from_numpy(hessian)).numpy()
    return (product.astype(np.float64) * weight).sum(1)


MEASURED_LAYER = ProductKind(LAST_FIRST, compute=_measure_layer, check=MeasureWork.check, device=True)


# ---- ExLlamaV2's measurement


_QUANTISING = 0.3
"""The share of a block's progress that its Hessians take."""


@dataclass(frozen=True, slots=True)
class BlocksWork(CalibratedWork):
    """Settings of the product.

    blocks  the options of each block, by its key: the encoding of each of its weights, by name
    """

    blocks: Mapping[str, tuple[Mapping[str, str], ...]]

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and the encodings to try."""
        return (pair for options in self.blocks.values() for option in options for pair in option.items())

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The errors: [blocks, options]."""
        return [("F64", (len(self.blocks), max(map(len, self.blocks.values()), default=0)))]

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """All options of a block have the same weights."""
        every = self.blocks.values()
        same = all(options and all(one and set(one) == set(options[0]) for one in options) for options in every)
        return CalibratedWork.problem(self, product, shapes) if same else "the options of a block are for other weights"


def _measure_blocks(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows, workers

    work = BlocksWork.of(context.product)
    errors = np.zeros(context.product.outs[0].shape)
    with layer_rows(context, work, 0, 0.7) as rows:
        for number, options in enumerate(work.blocks.values()):
            first, share = number / len(work.blocks), 1 / len(work.blocks)
            measuring = first + share * _QUANTISING
            hessians = _hessians(rows, work.layer, options, (first, measuring))
            with workers(context.threads, rows.device) as pool, _block(rows.layer, options[0]) as plain:
                errors[number, : len(options)] = _errors(plain, options, hessians, rows, pool, (measuring, first + share))
    return [errors]


def _hessians(
    rows: LayerRows, layer: int, options: Sequence[Mapping[str, str]], span: tuple[float, float]
) -> dict[str, Hessian]:
    """The Hessian of each weight, ready for all its settings. Raises ParameterError if they take too much memory together."""
    from weightsmith._activations.running import budget
    from weightsmith._activations.sums import use_sums

    limit = budget(rows.context)
    weights = list(options[0])
    widths = {site_of(name): int(rows.layer.linear(name).in_features) for name in weights}
    nbytes = sum(4 * width**2 for width in widths.values())
    if nbytes > limit:
        what = f"the Hessians of layer {layer} take {nbytes:,} bytes, and the limit is {limit:,}"
        fix = "use --measure proxy, which needs one at a time, or a larger --max-memory"
        raise ParameterError(what, where=rows.base.label, fix=fix)
    factored: dict[str, Hessian] = {}
    factors = FactoredHessians(limit)

    def use(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        names = inputs.sites[site]
        tried = [find_encoding(option[name]) for name in names for option in options]
        with factors.hessian(inputs, site, finish, tried) as hessian:
            factored.update(dict.fromkeys(names, hessian))

    use_sums(rows, weights, use, span=span)
    return factored


class _LayerReached(Exception):
    """What leaves the attention is known; the rest of the layer need not run."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


def _leave(_module: object, args: tuple[Tensor, ...]) -> None:
    raise _LayerReached(args[0][0])


@contextmanager
def _block(layer: Layer, weights: Collection[str]) -> Iterator[dict[str, Floats]]:
    """The plain weights of attention or MLP, which the layer has again at the end. It ends with the block meanwhile."""
    hooks = [layer.before_mlp.register_forward_pre_hook(_leave)] if is_attention(next(iter(weights))) else []
    plain = {name: layer.linear(name).weight.detach().cpu().numpy().copy() for name in weights}
    try:
        yield plain
    finally:
        for hook in hooks:
            hook.remove()
        for name, weight in plain.items():
            set_weight(layer, name, weight)


def _run(layer: Layer, hidden: Tensor) -> Tensor:
    """The output of the block for one row of the layer's input."""
    import torch

    with torch.no_grad():
        try:
            return layer(hidden)
        except _LayerReached as reached:
            return reached.state


def _errors(
    weights: Mapping[str, Floats],
    options: tuple[Mapping[str, str], ...],
    hessians: Mapping[str, Hessian],
    rows: LayerRows,
    pool: ThreadPoolExecutor,
    span: tuple[float, float],
) -> list[float]:
    """The error of each option. weights: the plain ones. Settings that follow each other are quantised once."""

    def run(numbered: NumberedRow) -> Tensor:
        return _run(rows.layer, numbered[1])

    def error(pair: tuple[NumberedRow, Tensor]) -> float:
        numbered, plain = pair
        return float((run(numbered).clamp_(-65504, 65504) - plain).norm() / plain.norm())

    def give(item: tuple[str, str]) -> None:
        name, encoding = item
        value = find_encoding(encoding)
        arrays = value.quantise(weights[name], hessians[name], 1)
        set_weight(rows.layer, name, value.dequantise(arrays, weights[name].shape))

    share = (span[1] - span[0]) / (len(options) + 1)
    plain = [out for some in rows.batches((span[0], span[0] + share)) for out in pool.map(run, some)]
    errors, current = [], dict[str, str]()
    for number, option in enumerate(options, 1):
        list(pool.map(give, [item for item in option.items() if current.get(item[0]) != item[1]]))
        current = dict(option)
        batches = rows.batches((span[0] + number * share, span[0] + (number + 1) * share))
        errors.append([e for some in batches for e in pool.map(error, [(row, plain[row[0]]) for row in some])])
    return [float(np.mean(of_rows)) for of_rows in errors]


MEASURED_BLOCKS = ProductKind(FORWARD, compute=_measure_blocks, check=BlocksWork.check, device=True)


# ---- Scores: how single predictions change


Places = npt.NDArray[np.int64]

TOKENS = 4096
"""The most tokens that have scores."""

ROWS_AT_ONCE = 256
"""Rows of a weight that are quantised at once."""

TOKENS_AT_ONCE = 64
"""Tokens whose predictions are held in memory at once."""

NO_IMPORTANCES = np.empty(0, np.float32)
"""No importances."""


@dataclass(frozen=True, slots=True)
class ScoreWork(CandidatesWork):
    """Settings of `scored_layer`. Its gradients are those of the layer's output."""

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
                    parts_of_scores[name, first, i] = at, ((x @ error.T) * g).sum(1).cpu().numpy()

        parts_of_scores: dict[tuple[str, int, int], tuple[npt.NDArray[np.int64], Floats]] = {}
        heights = {name: rows.layer.linear(name).weight.shape[0] for name in work.candidates}
        tasks = [(name, first) for name, height in heights.items() for first in range(0, height, ROWS_AT_ONCE)]
        with workers(context.threads, rows.device) as pool:
            for done, _ in enumerate(pool.map(score, tasks), 1):
                rows.progress(done / len(tasks))
        for name, first in tasks:  # in order, so that the sums do not depend on threads
            for i in range(len(work.candidates[name])):
                if (name, first, i) in parts_of_scores:
                    at, values = parts_of_scores[name, first, i]
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
        error = _error(np.ascontiguousarray(stored), find_encoding(encoding), NO_IMPORTANCES)[which]
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
                error = torch.from_numpy(_error(plain, encoding, NO_IMPORTANCES)).to(rows.device)
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


SCORED_LAYER = ProductKind(LAST_FIRST, compute=_score_layer, check=ScoreWork.check, device=True)
SCORED_VOCABULARY = ProductKind(LAST_FIRST, compute=_score_vocabulary, check=VocabularyWork.check, device=True)
