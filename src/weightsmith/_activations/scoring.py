"""The losses of a model on rows of tokens, as products of a plan: from the embedding layer by layer to the head."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weightsmith._activations.losses import LossesWork, Reference
from weightsmith._activations.model import TextModel, TextRun
from weightsmith._activations.scored_rows import ScoredRows
from weightsmith._activations.work import LayerWork
from weightsmith._base.tensors import TensorSpec
from weightsmith._plans import Product
from weightsmith._plans.statistics import TextSource
from weightsmith.abc.product import Arrays


@dataclass(frozen=True, slots=True)
class Scored:
    """The products of the losses of a model.

    products  in order
    given     the arrays of those that are known, by name
    losses    the one that is asked for
    states    what leaves the last layer
    """

    run: TextRun
    products: tuple[Product, ...]
    given: Mapping[str, Arrays]
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
    given: dict[str, Arrays] = {ids.name: (rows.ids, rows.nbytes)}
    products = [ids]
    if reference is not None:
        specs = [run.rows("reference states")]
        names = [f"reference {name}" for name in reference.weights]
        specs += [TensorSpec(n, specs[0].dtype, tuple(a.shape)) for n, a in zip(names, reference.arrays[1:], strict=True)]
        digest = hashlib.sha256(reference.identity.encode()).hexdigest()
        products.append(Product("reference", "given", tuple(specs), {"sha256": digest}))
        given["reference"] = reference.arrays
    first = LayerWork(run.base, run.packages, 0, ids.name)
    states = run.product(
        "states 0", "embedded_rows", (run.rows("states 0"),), first, run.steps(run.layers), (ids,), transient=True
    )
    products.append(states)
    for layer in range(run.layers):
        states = run.states(layer, states)
        products.append(states)
    if keep:
        states = products[-1] = replace(states, transient=False)
    other = None if reference is None else Reference(reference.run.base, "reference", reference.weights)
    work = LossesWork(run.base, run.packages, run.layers, states.name, ids.name, other, tuple(keep))
    steps = run.steps(run.layers)
    outs = work.outs("", (count, tokens), {step.out.name: step.out.shape for step in steps})
    products.append(run.product("losses", "losses", outs, work, steps, (states, *products[: len(given)])))
    return Scored(run, tuple(products), given, products[-1], states)
