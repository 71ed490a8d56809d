"""The draft of a calibrated checkpoint: products for every layer, and steps that copy their arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from weightsmith._activations.model import TextRun, result_of, text_for
from weightsmith._activations.rows import BUILT_IN
from weightsmith._base.errors import ParameterError, WeightsmithError
from weightsmith._base.options import QuantizeSettings, assignment, named
from weightsmith._features.quantisation.calibration.measured import shape_of
from weightsmith._features.quantisation.calibration.schemes import takes_hessian
from weightsmith._features.quantisation.calibration.work import BlocksWork, MeasureWork, QuantisedStatesWork, QuantisedWork
from weightsmith._planning.planner import Assembled
from weightsmith._plans import COPY, PRODUCTS, PlanDraft, Product, Read, Step

NONE = "none"
"""`--calibration none`: round to nearest."""

CALIBRATION_SETTINGS = frozenset({"calibration", "calibration_rows", "calibration_tokens"})
"""What a calibration reads of the settings."""

INSTEAD = "; or use --calibration none, which needs no forward pass"


def calibrates(settings: QuantizeSettings) -> bool:
    """Whether a format that can do without a calibration is to have one."""
    return settings.calibration != NONE


def unused(settings: QuantizeSettings, *, calibrates: bool) -> list[WeightsmithError]:
    """A problem if rows or tokens are given, and no text is read."""
    found = [name for name in ("calibration_rows", "calibration_tokens") if getattr(settings, name) is not None]
    if calibrates or not found:
        return []
    fix = f"add {assignment('calibration', BUILT_IN)} or a text of yours, or leave out {named(*found)}"
    return [ParameterError("no calibration text is read", where=named(*found), fix=fix)]


def calibrate(chain: Chain, draft: PlanDraft, prefix: str = "") -> None:
    """Quantise the weights of a quantised draft layer by layer for what enters them, instead of rounding them to nearest.

    chain   of the steps before they were quantised
    draft   every weight is in an encoding that `takes_hessian`
    prefix  of names in the draft that those steps do not have
    """
    encoded = {step.out.name.removeprefix(prefix): step for step in draft.steps if takes_hessian(step.encoding)}
    states = chain.embedding()
    products = [states]
    inside: set[str] = set()
    for layer in range(chain.layers):
        own = {name: encoded[name] for name in chain.names(layer) if name in encoded}
        inside.update(own)
        quantised = chain.quantised(f"layer {layer}", layer, states, own)
        states = chain.quantised_states(layer, states, quantised)
        products += [quantised, states]
    if head := {name: step for name, step in encoded.items() if name not in inside}:
        products.append(chain.quantised("head", chain.layers, states, head))
    else:
        products.pop()  # nothing looks at what leaves the last layer
    steps: list[Step] = []
    for step in draft.steps:
        copies = [Step(out, COPY, (Read(PRODUCTS, out.name),)) for out in step.outs]
        steps += copies if takes_hessian(step.encoding) else [step]
    draft.steps = steps
    chain.add_to(draft, products)


MEASURING = ("embedding", "states", "gradients", "statistic", "measured_layer", "measured_blocks")
"""Kinds of the products of a measurement."""

MEASURED_ROWS = 32
"""The most rows of a calibration text that losses are measured with: their states are stored for all layers at once."""


def without_measuring(draft: PlanDraft) -> list[Product]:
    """Remove the measurement from the draft to which it was added; its products."""
    own = [product for product in draft.products if product.op in MEASURING]
    draft.then, draft.products = None, [product for product in draft.products if product not in own]
    return own


class Chain(TextRun):
    """Makes the products of a calibration, one after the other: those of its text, and what is quantised for them."""

    def __init__(
        self,
        assembled: Assembled,
        settings: QuantizeSettings,
        steps: Sequence[Step] | None = None,
        most_rows: int | None = None,
    ) -> None:
        """
        assembled  the draft of plain tensors
        steps      of the same tensors, with the names of the model that transformers builds; None: the draft's
        most_rows  of the text that are used, if the settings or the text allow more

        Raises PlanError: packages that are missing, a text that cannot be read or is too short, a model without a tokenizer.
        """
        draft = assembled.draft
        steps = draft.steps if steps is None else steps
        model = result_of(draft, assembled.inputs, steps, INSTEAD)
        rows, tokens = settings.calibration_rows, settings.calibration_tokens
        super().__init__(model, text_for(model, settings.calibration, rows, tokens, draft.seed, most_rows))

    @property
    def described(self) -> dict[str, object]:
        """The calibration, for config.json."""
        source = self.text.source
        dataset = source if source == BUILT_IN else PurePath(source).name
        return {"rows": self.text.rows, "length": self.text.tokens, "dataset": dataset}

    def quantised(self, name: str, layer: int, states: Product, encoded: Mapping[str, Step]) -> Product:
        """The quantised weights of a layer, or the head after the last. encoded: steps of the quantised plan."""
        outs = tuple(out for step in encoded.values() for out in step.outs)
        weights = {own: step.encoding for own, step in encoded.items()}
        work = QuantisedWork(self.base, self.packages, layer, states.name, weights)
        return self.product(name, "quantised_layer", outs, work, self.steps(layer), (states,))

    def quantised_states(self, layer: int, states: Product, quantised: Product) -> Product:
        """What leaves a layer with quantised weights."""
        weights = quantised.settings["weights"]
        work = QuantisedStatesWork(self.base, self.packages, layer, states.name, weights, quantised.name)
        name, steps, needs = f"states {layer + 1}", self.steps(layer), (states, quantised)
        return self.product(name, "quantised_states", (self.rows(name),), work, steps, needs, transient=True)

    def measured(self, layer: int, states: Product, gradients: Product, candidates: Mapping[str, tuple[str, ...]]) -> Product:
        """The losses that the candidates for each weight of a layer cause. gradients: of its weights, in the same order."""
        work = MeasureWork(self.base, self.packages, layer, states.name, gradients.name, dict(candidates))
        outs = (self.array(f"losses of layer {layer}", "F64", shape_of(candidates)),)
        return self.product(f"measured {layer}", "measured_layer", outs, work, self.steps(layer), (states, gradients))

    def measured_blocks(self, layer: int, states: Product, blocks: Mapping[str, tuple[Mapping[str, str], ...]]) -> Product:
        """The errors of the options of each block of a layer."""
        work = BlocksWork(self.base, self.packages, layer, states.name, dict(blocks))
        shape = len(blocks), max(map(len, blocks.values()), default=0)
        outs = (self.array(f"errors of layer {layer}", "F64", shape),)
        return self.product(f"measured {layer}", "measured_blocks", outs, work, self.steps(layer), (states,))
