"""The draft of a calibrated checkpoint: products for every layer, and steps that copy their arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from weightsmith.decoder import Base
from weightsmith.errors import CheckpointError, NotFound, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith.formats.carried import MAX_CARRIED_BYTES
from weightsmith.formats.files import read_bounded
from weightsmith.mixture.packages import missing, package_version
from weightsmith.options import QuantizeSettings
from weightsmith.planner import Assembled
from weightsmith.plans import COPY, PRODUCTS, FileRead, PlanDraft, Product, Read, Step, arrays_of, needs_of
from weightsmith.products import find_kind
from weightsmith.quantisation.calibration.gradients import shapes_of as gradient_shapes
from weightsmith.quantisation.calibration.measured import shape_of
from weightsmith.quantisation.calibration.rows import BUILT_IN, Calibration, calibration_of, rows_of
from weightsmith.quantisation.calibration.schemes import takes_hessian
from weightsmith.quantisation.calibration.work import (
    BlocksWork,
    EmbeddingWork,
    GradientWork,
    ImportanceWork,
    LayerWork,
    MeasureWork,
    Work,
)
from weightsmith.structure import analyse
from weightsmith.structure.configs import count_of
from weightsmith.structure.vocabulary import is_embedding, is_head
from weightsmith.tensors import DTYPES, TensorSpec

NONE = "none"
"""`--calibration none`: round to nearest."""

CALIBRATION_SETTINGS = frozenset({"calibration", "calibration_rows", "calibration_tokens"})
"""What a calibration reads of the settings."""

PACKAGES = ("torch", "transformers", "tokenizers")

_TOKENIZER = "tokenizer.json"


def calibrates(settings: QuantizeSettings) -> bool:
    """Whether a format that can do without a calibration is to have one."""
    return settings.calibration != NONE


def unused(settings: QuantizeSettings, *, calibrates: bool) -> list[WeightsmithError]:
    """A problem if rows or tokens are given, and no text is read."""
    found = [name for name in ("calibration_rows", "calibration_tokens") if getattr(settings, name) is not None]
    if calibrates or not found:
        return []
    fix = f"add --calibration {BUILT_IN} (calibration='{BUILT_IN}') or a text of yours, or leave it out"
    return [ParameterError("no calibration text is read", where=", ".join(found), fix=fix)]


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
        states = chain.states(layer, states, quantised)
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


MEASURING = ("embedding", "plain_states", "gradients", "measured_layer", "measured_blocks", "importances")
"""Kinds of the products of a measurement."""

MEASURED_ROWS = 32
"""Of the calibration text that losses are measured with, at most: their states are stored for all layers at once."""


def measuring(chain: Chain, measure: Callable[[int, Product], Product]) -> tuple[Product, ...]:
    """The products of a measurement. measure: (layer, what enters it) → the product that measures it."""
    states = chain.embedding()
    products = [states]
    for layer in range(chain.layers):
        products.append(measure(layer, states))
        if layer + 1 < chain.layers:
            states = chain.plain_states(layer, states)
            products.append(states)
    return tuple(products)


def measuring_losses(chain: Chain, candidates: Callable[[int], Mapping[str, tuple[str, ...]]]) -> tuple[Product, ...]:
    """The products that measure what settings cost, in nats: forward through all layers, and back with the gradients.

    candidates  (layer) → the encodings to try for each of its weights
    """
    products = [chain.embedding()]
    for layer in range(chain.layers):
        products.append(chain.plain_states(layer, products[-1]))
    states = tuple(products)
    gradients = chain.head_gradients(states[-1])
    products.append(gradients)
    for layer in reversed(range(chain.layers)):
        tried = candidates(layer)
        gradients = chain.gradients(layer, states[layer], gradients, tuple(tried))
        products += [gradients, chain.measured(layer, states[layer], gradients, tried)]
    return tuple(products)


def without_measuring(draft: PlanDraft) -> list[Product]:
    """Remove the measurement from the draft to which it was added; its products."""
    own = [product for product in draft.products if product.op in MEASURING]
    draft.then, draft.products = None, [product for product in draft.products if product not in own]
    return own


class Chain:
    """Makes the products of a calibration, one after the other."""

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
        self._all_steps, self._maker = tuple(steps), arrays_of(draft.products)
        donor = assembled.inputs[draft.donor]
        problems: list[WeightsmithError] = missing(PACKAGES, "calibrated formats", "calibration", "or use --calibration none")
        self._calibration, more = _calibration(settings, draft.seed)
        config, label = draft.config, draft.models[draft.donor].ref
        specs = [step.out for step in steps]
        self._structure = analyse(specs, config)
        stack = self._structure.main
        if config is None or stack is None:
            problems.append(Unsupported("it is not a decoder with a config.json", where=label, fix="use --calibration none"))
        self._files, found = _tokenizer(assembled)
        if problems := [*problems, *more, *found]:
            raise PlanError(problems)
        assert config is not None
        assert stack is not None
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        hidden = count_of(config, "hidden_size") or 0
        self._base = Base(label, draft.donor, config, stack.prefix, stack.n_layers, hidden)
        self._packages = {name: package_version(name) for name in PACKAGES}
        bos = config.get("bos_token_id")
        self._bos = bos if type(bos) is int else None
        vocabulary = next((spec.shape[0] for spec in specs if is_embedding(spec)), 0)
        try:
            rows = len(rows_of(self._calibration, donor.folder, vocabulary, self._bos))
        except WeightsmithError as error:
            raise PlanError([error]) from error
        self._calibration = replace(self._calibration, rows=min(rows, most_rows or rows))

    def add_to(self, draft: PlanDraft, products: Iterable[Product]) -> None:
        """Add products to a draft, after those of the merge, whose own steps are then theirs alone."""
        draft.products = [*map(self._surveyed, draft.products), *products]

    def _surveyed(self, product: Product) -> Product:
        """A product of the merge, which looks at the steps that need it: these are no longer steps of the plan."""
        if product.steps or find_kind(product.op).survey is None:
            return product
        return replace(product, steps=tuple(step for step in self._all_steps if product.name in self._needs(step)))

    def _needs(self, step: Step) -> frozenset[str]:
        return needs_of(step, self._maker)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._base.layers

    @property
    def described(self) -> dict[str, object]:
        """The calibration, for config.json."""
        source = self._calibration.source
        dataset = source if source == BUILT_IN else PurePath(source).name
        return {"rows": self._calibration.rows, "length": self._calibration.tokens, "dataset": dataset}

    def names(self, layer: int) -> list[str]:
        """The tensors of a layer."""
        return [step.out.name for step in self._steps(layer)]

    def embedding(self) -> Product:
        """What enters the first layer."""
        work = EmbeddingWork(self._base, self._packages, self._calibration, self._bos)
        steps = [step for step in self._all_steps if self._structure.locate(step.out.name) is None and not is_head(step.out)]
        return self._product("states 0", "embedding", (self._states(0),), work, steps, files=self._files, transient=True)

    def quantised(self, name: str, layer: int, states: Product, encoded: Mapping[str, Step]) -> Product:
        """The quantised weights of a layer, or the head after the last. encoded: steps of the quantised plan."""
        inside = layer < self.layers
        steps = self._steps(layer) if inside else self._outside()
        outs = tuple(out for step in encoded.values() for out in step.outs)
        work = self._work(layer, states, {own: step.encoding for own, step in encoded.items()})
        return self._product(name, "quantised_layer", outs, work, steps, (states,))

    def states(self, layer: int, states: Product, quantised: Product) -> Product:
        """What leaves a layer with quantised weights."""
        work = self._work(layer, states, quantised.settings["weights"], quantised.name)
        name, needs = f"states {layer + 1}", (states, quantised)
        return self._product(name, "states", (self._states(layer + 1),), work, self._steps(layer), needs, transient=True)

    def plain_states(self, layer: int, states: Product) -> Product:
        """What leaves a layer with plain weights."""
        work = self._work(layer, states, {})
        outs = (self._states(layer + 1),)
        return self._product(f"states {layer + 1}", "plain_states", outs, work, self._steps(layer), (states,), transient=True)

    def head_gradients(self, states: Product) -> Product:
        """The gradients of what leaves the last layer. states: what leaves it."""
        work = GradientWork(self._base, self._packages, self.layers, states.name, "", (), self._calibration.seed)
        outs = (self._states(self.layers, "gradients"),)
        return self._product(outs[0].name, "gradients", outs, work, self._outside(), (states,), transient=True)

    def gradients(self, layer: int, states: Product, leaving: Product, weights: tuple[str, ...]) -> Product:
        """The gradients of what enters a layer, and what is kept of those of its weights. leaving: of what leaves it."""
        seed = self._calibration.seed
        work = GradientWork(self._base, self._packages, layer, states.name, leaving.name, weights, seed)
        steps = self._steps(layer)
        shapes = {step.out.name: step.out.shape for step in steps}
        own = self._states(layer, "gradients")
        norms, squares = gradient_shapes(own.shape, [shapes[name] for name in weights])
        outs = (
            own,
            TensorSpec(f"norms of layer {layer}", DTYPES["F32"], norms),
            TensorSpec(f"squares of layer {layer}", DTYPES["F64"], squares),
        )
        return self._product(own.name, "gradients", outs, work, steps, (states, leaving), transient=True)

    def measured(self, layer: int, states: Product, gradients: Product, candidates: Mapping[str, tuple[str, ...]]) -> Product:
        """The losses that the candidates for each weight of a layer cause. gradients: of its weights, in the same order."""
        work = MeasureWork(self._base, self._packages, layer, states.name, gradients.name, dict(candidates))
        outs = (TensorSpec(f"losses of layer {layer}", DTYPES["F64"], shape_of(candidates)),)
        return self._product(f"measured {layer}", "measured_layer", outs, work, self._steps(layer), (states, gradients))

    def measured_blocks(self, layer: int, states: Product, blocks: Mapping[str, tuple[Mapping[str, str], ...]]) -> Product:
        """The errors of the options of each block of a layer."""
        work = BlocksWork(self._base, self._packages, layer, states.name, dict(blocks))
        shape = len(blocks), max(map(len, blocks.values()), default=0)
        outs = (TensorSpec(f"errors of layer {layer}", DTYPES["F64"], shape),)
        return self._product(f"measured {layer}", "measured_blocks", outs, work, self._steps(layer), (states,))

    def importances(self, layer: int, states: Product, weights: Iterable[str]) -> Product:
        """The importances of the columns of a layer's weights: float32 [cols] of each."""
        widths = {step.out.name: step.out.shape[1:] for step in self._steps(layer)}
        names = tuple(weights)
        work = ImportanceWork(self._base, self._packages, layer, states.name, names)
        outs = tuple(TensorSpec(f"importances of {name}", DTYPES["F32"], widths[name]) for name in names)
        return self._product(f"importances {layer}", "importances", outs, work, self._steps(layer), (states,))

    def _work(self, layer: int, states: Product, weights: Mapping[str, str], made: str = "") -> LayerWork:
        return LayerWork(self._base, self._packages, layer, states.name, dict(weights), made)

    def _steps(self, layer: int) -> list[Step]:
        """The plan's steps for the tensors of a layer."""
        return [step for step in self._all_steps if self._structure.locate(step.out.name) == (self._structure.main, layer)]

    def _outside(self) -> list[Step]:
        """The plan's steps for the tensors outside the layers."""
        return [step for step in self._all_steps if self._structure.locate(step.out.name) is None]

    def _states(self, layer: int, what: str = "states") -> TensorSpec:
        shape = self._calibration.rows, self._calibration.tokens, self._base.hidden
        return TensorSpec(f"{what} {layer}", DTYPES["F32"], shape)

    def _product(
        self,
        name: str,
        op: str,
        outs: tuple[TensorSpec, ...],
        work: Work,
        steps: Iterable[Step],
        needs: Iterable[Product] = (),
        files: tuple[FileRead, ...] = (),
        *,
        transient: bool = False,
    ) -> Product:
        steps = tuple(steps)
        merged = {need: None for step in steps for need in sorted(self._needs(step))}
        named = (*merged, *(product.name for product in needs))
        return Product(name, op, outs, work.to_json(), steps, (), named, files, transient)


def _calibration(settings: QuantizeSettings, seed: int) -> tuple[Calibration, list[WeightsmithError]]:
    try:
        path = settings.calibration
        return calibration_of(path, settings.calibration_rows, settings.calibration_tokens, seed), []
    except WeightsmithError as error:
        return Calibration("", "", 0, 0, 0), [error]


def _tokenizer(assembled: Assembled) -> tuple[tuple[FileRead, ...], list[WeightsmithError]]:
    """The donor's tokenizer, with its checksum."""
    donor = assembled.draft.donor
    checkpoint = assembled.inputs[donor]
    if _TOKENIZER in assembled.draft.files:
        fix = "merge first, and then quantise the result; or use --calibration none"
        return (), [Unsupported("a merge that changes the tokenizer cannot be calibrated in one step", fix=fix)]
    if _TOKENIZER not in checkpoint.files:
        fix = "put the model's tokenizer.json next to its weights, or use --calibration none"
        return (), [NotFound("calibration needs the model's tokenizer.json", where=checkpoint.ref, fix=fix)]
    checkpoint.fetch([_TOKENIZER])
    try:
        content = read_bounded(checkpoint.folder / _TOKENIZER, MAX_CARRIED_BYTES)
    except CheckpointError as error:
        return (), [error]
    return (FileRead(donor, _TOKENIZER, hashlib.sha256(content).hexdigest()),), []
