"""The losses of a model on rows of tokens: the products, from the embedding layer by layer to the head, and the last of them.

The `losses` product says how surprising each token of a text is to a model, and how far its predictions are from another's.

    loss        -log p(token | those before it in the row), in nats
    divergence  KL(p, q) = Σ p log(p / q) over the whole vocabulary; p: the reference's prediction, q: the model's
    agreement   1 where both find the same token the most probable

Logits are float32 and held for few tokens at a time. A row runs on one thread, so the arrays do not depend on the number of
threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._activations.decoder import Base
from weightsmith._activations.model import TextModel, TextRun
from weightsmith._activations.scored_rows import ScoredRows
from weightsmith._activations.work import LayerWork
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure.vocabulary import is_vocabulary
from weightsmith._plans import Product, TextSource
from weightsmith.abc.product import Arrays, ProductContext, ProductKind

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import NumberedRow

LOGITS_AT_ONCE = 1 << 23
"""The most logits that are computed at once: 32 MiB."""

TOKENS_AT_ONCE = 128
"""The most tokens whose logits are computed at once."""

SMALL_LOGITS = 1 << 18
"""The most logits whose losses are found at once on a CPU. malloc keeps blocks of 1 MiB. Those of all logits come from
the system each time, page by page, which took a third of the time."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Another model's states and head, which were computed before.

    base     the model
    product  whose arrays are what leaves its last layer, and then the weights
    weights  outside its layers that its logits depend on
    """

    base: Base
    product: str
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossesWork(LayerWork):
    """The losses of the tokens of some rows. Its layer is the number of layers.

    rows       the product of the rows: ids, and the bytes of each token; -1: not scored
    reference  the model to compare with
    kept       weights outside the layers that are arrays of the product, after the losses: for use as a reference
    """

    HEAD = True

    rows: str
    reference: Reference | None
    kept: tuple[str, ...]

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.rows, *([] if self.reference is None else [self.reference.product])}

    def outs(self, rows: tuple[int, int], weights: Mapping[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
        """The arrays.

        rows     number of rows, and of tokens in each
        weights  shapes of those that are kept
        """
        kinds = {"losses": "F32"} | ({} if self.reference is None else {"divergences": "F32", "agreement": "U8"})
        specs = [TensorSpec(name, DTYPES[kind], rows) for name, kind in kinds.items()]
        return (*specs, *(TensorSpec(f"kept {name}", DTYPES["F32"], weights[name]) for name in self.kept))


def _compute(context: ProductContext) -> Arrays:
    import torch

    from weightsmith._activations.running import PhaseProgress, Rows, decoder_of, device_of
    from weightsmith._files.arrays import release_pages

    work, device = LossesWork.of(context.product), device_of(context)
    ids, scored = context.arrays(work.rows)
    progress = PhaseProgress(context, work.base, 0, 0, work.base.layers)
    rows = Rows(context, work.base, context.arrays(work.states)[0], device, progress)
    arrays = context.create()
    kept = dict(zip(work.kept, arrays[len(arrays) - len(work.kept) :], strict=True))
    context.fill(kept)
    with ExitStack() as stack:
        head = stack.enter_context(decoder_of(work.base).head(context, device, _tensors(kept) if kept else None))
        other, theirs = None, None
        if work.reference is not None:
            theirs, *weights = context.arrays(work.reference.product)
            weights_of_reference = _tensors(dict(zip(work.reference.weights, weights, strict=True)))
            base = replace(work.reference.base, label=f"the reference {work.reference.base.label}")  # a module of its own
            other = stack.enter_context(decoder_of(base).head(context, device, weights_of_reference))
        vocabulary = next(step.out.shape[0] for step in context.product.steps if is_vocabulary(step.out))
        at_once = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // vocabulary))

        def measure(numbered: NumberedRow) -> None:
            row, states = numbered
            places = np.flatnonzero(scored[row] >= 0)
            for start in range(0, len(places), at_once):
                tokens = places[start : start + at_once]
                logits = head(states[tokens - 1])
                targets = torch.from_numpy(ids[row, tokens].astype(np.int64)).to(device)
                expected = None
                if other is not None and theirs is not None:
                    expected = other(torch.from_numpy(np.array(theirs[row, tokens - 1])).to(device))
                losses, divergences = token_losses(logits, targets, None if expected is None else logs_of(expected))
                rows.check_finite(losses, "the prediction", row)
                arrays[0][row, tokens] = losses.cpu().numpy()
                if expected is not None and divergences is not None:
                    rows.check_finite(divergences, "the divergence from the reference", row)
                    arrays[1][row, tokens] = divergences.cpu().numpy()
                    arrays[2][row, tokens] = (expected.argmax(1) == logits.argmax(1)).cpu().numpy()
            if theirs is not None:
                release_pages(theirs)

        with torch.no_grad():
            for _ in rows.map(measure):
                pass
    return arrays


LogsOf = Callable[[slice], "Tensor"]
"""Log-probabilities of some of the tokens, float32 [tokens, vocabulary]."""


def logs_of(logits: Tensor) -> LogsOf:
    """What logits, float32 [tokens, vocabulary], say of some of the tokens."""
    return lambda part: logits[part].log_softmax(1)


def token_parts(tokens: int, vocabulary: int, device: str) -> Iterator[slice]:
    """The tokens whose log-probabilities are in memory together: on a CPU, those of `SMALL_LOGITS`."""
    at_once = max(1, SMALL_LOGITS // vocabulary if device == "cpu" else tokens)
    return (slice(start, start + at_once) for start in range(0, tokens, at_once))


def token_losses(logits: Tensor, targets: Tensor, expected: LogsOf | None = None) -> tuple[Tensor, Tensor | None]:
    """The nats of each token, and KL(expected, predicted): float32 [tokens] each. Without gradients.

    logits    float32 [tokens, vocabulary]
    targets   the tokens that came, int64 [tokens]
    expected  of the reference; None: no divergences
    """
    import torch

    nats, divergences = torch.empty_like(logits[:, 0]), None if expected is None else torch.empty_like(logits[:, 0])
    for part in token_parts(len(logits), logits.shape[1], logits.device.type):
        logs = logits[part].log_softmax(1)
        nats[part] = _nats(logs, targets[part])
        if expected is not None and divergences is not None:
            theirs = expected(part)
            divergences[part] = torch.nn.functional.kl_div(logs, theirs, reduction="none", log_target=True).sum(1)
    return nats, divergences


def own_losses(expected: LogsOf, targets: Tensor, vocabulary: int) -> Tensor:
    """The nats of each token by a reference itself, float32 [tokens], as `token_losses` finds them."""
    import torch

    parts = token_parts(len(targets), vocabulary, targets.device.type)
    return torch.cat([_nats(expected(part), targets[part]) for part in parts])


def _nats(logs: Tensor, targets: Tensor) -> Tensor:
    return -logs.gather(1, targets[:, None])[:, 0]


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Without a copy. Arrays that are mapped from a file are not written to."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: the array is not writable
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _check(product: Product) -> str:
    if problem := LossesWork.check(product):
        return problem
    work = LossesWork.of(product)
    if work.layer != work.base.layers:
        return "its layer is not what follows the last one"
    shapes = {step.out.name: step.out.shape for step in product.steps}
    if not any(is_vocabulary(step.out) for step in product.steps) or not shapes.keys() >= set(work.kept):
        return "it has no step for the head, or for a weight that is kept"
    shape = product.outs[0].shape if product.outs else ()
    if len(shape) != 2:
        return "its arrays are not those of its rows"
    outs = work.outs((shape[0], shape[1]), shapes)
    expected = [(out.dtype.name, out.shape) for out in outs]
    return "" if [(out.dtype.name, out.shape) for out in product.outs] == expected else "its arrays are not those of its rows"


KIND = ProductKind("predicting the text", compute=_compute, check=_check, device=True)


@dataclass(frozen=True, slots=True)
class Scored:
    """The products of the losses of a model.

    products  in order
    known     the arrays of those that are known, by name
    losses    the one that is asked for
    states    what leaves the last layer
    """

    run: TextRun
    products: tuple[Product, ...]
    known: Mapping[str, Arrays]
    losses: Product
    states: Product

    def reference(self, arrays: Mapping[str, Arrays], identity: str) -> Known:
        """This model as the reference of others.

        arrays    of `states` and `losses`, which must be kept
        identity  of the work that made them: another one if a file of the model has changed
        """
        kept = tuple(self.losses.settings["kept"])
        weights = arrays[self.losses.name][1:]
        return Known(self.run, kept, (arrays[self.states.name][0], *weights), identity)


@dataclass(frozen=True, slots=True)
class Known:
    """A reference: what leaves its last layer, and the weights of its head."""

    run: TextRun
    weights: tuple[str, ...]
    arrays: Arrays
    identity: str


def scored(model: TextModel, rows: ScoredRows, reference: Known | None = None, *, keep: Sequence[str] = ()) -> Scored:
    """The products of the losses of a model.

    reference  to compare its predictions with; of the same vocabulary
    keep       the weights outside the layers that its logits depend on, if it is to be a reference

    Raises PlanError for a model that is not a decoder.
    """
    count, tokens = rows.ids.shape
    run = TextRun(model, TextSource("", rows.sha256, count, tokens, 0))
    ids = Product(
        "rows",
        "given",
        (run.array("ids", "I32", rows.ids.shape), run.array("bytes", "I32", rows.ids.shape)),
        {"sha256": rows.sha256},
    )
    known: dict[str, Arrays] = {ids.name: (rows.ids, rows.nbytes)}
    products = [ids]
    if reference is not None:
        specs = [run.rows("reference states")]
        names = [f"reference {name}" for name in reference.weights]
        specs += [TensorSpec(n, specs[0].dtype, tuple(a.shape)) for n, a in zip(names, reference.arrays[1:], strict=True)]
        digest = hashlib.sha256(reference.identity.encode()).hexdigest()
        products.append(Product("reference", "given", tuple(specs), {"sha256": digest}))
        known["reference"] = reference.arrays
    states = run.embedding(ids)
    products.append(states)
    for layer in range(run.layers):
        states = run.states(layer, states)
        products.append(states)
    if keep:
        states = products[-1] = replace(states, transient=False)
    other = None if reference is None else Reference(reference.run.base, "reference", reference.weights)
    work = LossesWork(run.base, run.packages, run.layers, states.name, ids.name, other, tuple(keep))
    steps = run.steps(run.layers)
    outs = work.outs((count, tokens), {step.out.name: step.out.shape for step in steps})
    products.append(run.product("losses", "losses", outs, work, steps, (states, *products[: len(known)])))
    return Scored(run, tuple(products), known, products[-1], states)
