"""The `gradients` product: how much the model's predictions depend on what passes through a layer.

For each token of a row, a label is drawn from the model's own prediction p, and log p(label) is differentiated. The expected
square of such gradients g is the Fisher information (Martens and Grosse 2015, https://arxiv.org/abs/1503.05671, section 2): a
small error δ anywhere in the model changes its predictions by KL(p, p') = ½ E[(g · δ)²] nats, to the second order. Where the
labels are the next tokens of the text instead, the mean of g says how the text becomes likelier; a row's last token has none.

One product turns the states after the last layer into gradients. Each layer's product then passes them on, from the last layer
to the first. It also keeps what the layer's measurement needs of the gradients at the outputs of its linear layers.

**Determinism.** A row runs on one thread, and rows are added in order. Labels depend on the seed and the row alone. On a GPU,
the gradients of some kernels are sums in any order: a measurement there may differ in its last digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._activations.work import GradientWork, LayerWork
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure.vocabulary import is_embedding, is_head
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats, ProductContext, ProductKind

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import NumberedRow

LAST_FIRST = "measuring from the last layer to the first"
"""The progress of gradients and losses, after that of the states."""

TOKENS_AT_ONCE = 64
"""Whose predictions are held in memory: as many numbers as the vocabulary has tokens, for each."""


def _compute(context: ProductContext) -> Arrays:
    work = GradientWork.of(context.product)
    return _of_head(context, work) if work.layer == work.base.layers else _of_layer(context, work)


def _head(product: Product) -> TensorSpec | None:
    """The head, or the embedding that is the head too; None if there is neither."""
    specs = [step.out for step in product.steps if len(step.out.shape) == 2]
    return next((spec for is_one in (is_head, is_embedding) for spec in specs if is_one(spec)), None)


def _of_head(context: ProductContext, work: GradientWork) -> Arrays:
    """The gradients of what leaves the last layer."""
    import torch

    from weightsmith._activations.running import decoder_of, ids_of, rows_of_states

    rows = rows_of_states(context, work, 0, 0, back=True)
    [gradients] = context.create()
    head = _head(context.product)
    assert head is not None
    numbers = np.empty(head.shape, np.float32)
    context.fill({head.name: numbers})
    weight = torch.from_numpy(numbers).to(rows.device)
    decoder = decoder_of(work.base)
    cap = decoder.logit_cap
    ids = ids_of(context, work.rows, rows.states.shape) if work.rows else None
    with decoder.final_norm(context, rows.device) as norm:

        def gradient(numbered: NumberedRow) -> Tensor:
            row, hidden = numbered
            draws = np.random.default_rng([work.seed, row]).random(len(hidden), np.float32)
            targets = torch.from_numpy(draws).to(rows.device)
            if ids is not None:
                targets = torch.from_numpy(ids[row, 1:].astype(np.int64)).to(rows.device)
            with torch.enable_grad():
                final = norm(hidden.requires_grad_())
                labelled = final.detach()[: len(targets)]
                parts = zip(labelled.split(TOKENS_AT_ONCE), targets.split(TOKENS_AT_ONCE), strict=True)
                slopes = [_of_logits(x, weight, cap, part_targets) for x, part_targets in parts]
                slopes.append(torch.zeros_like(final[len(targets) :]))
                return torch.autograd.grad(final, hidden, torch.cat(slopes))[0]

        rows.fill(gradients, gradient, "the gradient of the prediction")
    return [gradients]


def predict(final: Tensor, head: Tensor, cap: float | None, draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Predictions p [tokens, vocabulary], a label drawn from each, log Σ exp of the logits, and the slope of their cap.

    final  input of the head
    draws  0 … 1, one for each token
    """
    import torch

    with torch.no_grad():
        p = final @ head.T
        slope = None
        if cap is not None:
            p.div_(cap).tanh_()
            slope = 1 - p.square()
            p.mul_(cap)
        largest = p.amax(1, keepdim=True)
        p.sub_(largest).exp_()
        total = p.sum(1, keepdim=True)
        p.div_(total)
        below = p.cumsum(1)
        labels = torch.searchsorted(below, (draws * below[:, -1])[:, None], right=True).clamp_(max=p.shape[1] - 1)
        return p, labels[:, 0], (largest + total.log())[:, 0], slope


def _of_logits(final: Tensor, head: Tensor, cap: float | None, targets: Tensor) -> Tensor:
    """The gradient of Σ log p(label) with respect to the inputs of the head. given: draws as in `predict`, or labels, int64.

    That of the logits is 1 for the label, minus p. autograd would keep five arrays of the size of the logits; here are two.
    """
    import torch

    drawn = targets.is_floating_point()
    p, labels, _, slope = predict(final, head, cap, targets if drawn else torch.zeros_like(final[:, 0]))
    with torch.no_grad():
        labels = labels if drawn else targets
        of_logits = p.neg_().scatter_add_(1, labels[:, None], torch.ones_like(p[:, :1]))
        return (of_logits if slope is None else of_logits.mul_(slope)) @ head


def _of_layer(context: ProductContext, work: GradientWork) -> Arrays:
    """The gradients of what enters a layer, and what is kept of those of its linear layers."""
    import torch

    from weightsmith._activations.running import layer_rows
    from weightsmith._activations.sums import Outputs
    from weightsmith._files.arrays import release_pages

    leaving = context.arrays(work.gradients)[0]
    gradients, norms, squares = context.create()
    with layer_rows(context, work, 0, 0.3, back=True) as rows:
        outputs = Outputs(rows.layer, work.weights)

        def run(numbered: NumberedRow) -> list[Floats]:
            row, hidden = numbered
            with torch.enable_grad():
                hidden.requires_grad_()
                outputs_here = outputs.begin()
                layer_states = rows.layer(hidden)
                leaving_gradient = torch.from_numpy(np.array(leaving[row])).to(rows.device)
                gradient, *inside = torch.autograd.grad(layer_states, [hidden, *outputs_here.values()], leaving_gradient)
            rows.check_finite(gradient, f"the gradient of layer {work.layer}", row)
            gradients[row] = gradient.cpu().numpy()
            sums = [np.zeros(0, np.float32)] * len(work.weights)
            for name, g in zip(outputs_here, inside, strict=True):
                place, g = work.weights.index(name), g.reshape(-1, g.shape[-1])
                norms[place, row, : len(g)] = g.norm(dim=1).cpu().numpy()
                sums[place] = g.square().sum(0).cpu().numpy()
            return sums

        try:
            for some in rows.map(run):
                for sums in some:
                    for place, total in enumerate(sums):
                        squares[place, : len(total)] += total
                release_pages(gradients)
        finally:
            outputs.close()
    return [gradients, norms, squares]


def made_beside(context: ProductContext, layer: LayerWork, leaving: str) -> Floats | None:
    """An array for the gradients of what enters a layer, if they are to be computed, of no weights, and nobody has.

    leaving  the product of those of what leaves it
    """

    def same(product: Product) -> bool:
        if product.op != "gradients" or product.steps != context.product.steps:
            return False
        work = GradientWork.of(product)
        row_work = GradientWork(layer.base, layer.packages, layer.layer, layer.states, leaving, work.weights, work.seed)
        return work == row_work and not work.weights

    shared_arrays = context.also(same)
    return None if shared_arrays is None else shared_arrays[0]


def shapes_of(states: tuple[int, ...], weights: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is kept of the gradients at the outputs of linear layers: the norm of each token's [weights, rows, tokens], and the
    sum of the squares of each feature's [weights, features].

    states   shape of what enters the layer: [rows, tokens, hidden]
    weights  shapes of the weights
    """
    return (len(weights), *states[:2]), (len(weights), max((shape[0] for shape in weights), default=0))


def _check(product: Product) -> str:
    if problem := GradientWork.check(product):
        return problem
    work = GradientWork.of(product)
    if work.seed < 0:
        return "its seed is negative"
    outs = [(out.dtype.name, out.shape) for out in product.outs]
    if not outs or outs[0][0] != "F32" or len(outs[0][1]) != 3:
        return "it does not make gradients"
    if work.layer == work.base.layers:
        if len(outs) != 1 or _head(product) is None:
            return "it has no step for the head, or other arrays"
        return ""
    if work.rows:
        return "it has labels, and is not of the head"
    specs = {step.out.name: step.out.shape for step in product.steps}
    if not all(len(specs.get(name, ())) == 2 for name in work.weights):
        return "it has no step for a weight"
    norms, squares = shapes_of(outs[0][1], [specs[name] for name in work.weights])
    if outs[1:] != [("F32", norms), ("F64", squares)]:
        return "its arrays are not those of its weights"
    return "" if work.gradients else "it does not need what its settings name"


KIND = ProductKind(LAST_FIRST, compute=_compute, check=_check, device=True, transient=True)
