"""The draft of a calibrated checkpoint: products for every layer, and steps that copy their arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING

from weightsmith._activations.decoder import Features
from weightsmith._activations.model import TextRun, result_of, text_for
from weightsmith._activations.rows import BUILT_IN
from weightsmith._base.errors import PlanError, Unsupported, as_plan_error
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped
from weightsmith._base.options import named
from weightsmith._features.quantisation.base import MEASURED, is_calibrated
from weightsmith._features.quantisation.calibration.activations import LargestStateWork, ScalesWork, attention_of, collected
from weightsmith._features.quantisation.calibration.costs import BlocksWork, MeasureWork, ScoreWork, VocabularyWork, shape_of
from weightsmith._features.quantisation.calibration.layer import CalibratedWork, QuantisedStatesWork, QuantisedWork
from weightsmith._features.quantisation.calibration.scaling import chosen_features, scaled_weights
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats import Encoding, find_cache, find_encoding
from weightsmith._models.formats.engines import find_engine
from weightsmith._planning.planner.encode import encodable
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import COPY, PLAIN, PRODUCTS, FollowUp, PlanDraft, Product, Read, Step
from weightsmith.abc.stored import CacheEncoding

if TYPE_CHECKING:
    from weightsmith._activations.decoder.forward import Decoder

INSTEAD = "; or use --calibration none, which needs no forward pass"


def measure_activations(
    plain: Prepared, draft: PlanDraft, encoding: Encoding, settings: QuantizeSettings, *, calibrates: bool = False
) -> None:
    """Add to a quantised draft what a text says of activations.

    plain       before it was quantised
    encoding    of the weights
    calibrates  whether the weights are quantised for what enters them

    Raises PlanError: as `Chain`; a model that transformers cannot build; a cache of keys and values that cannot be measured.
    """
    cache = None if settings.kv_cache is None else find_cache(settings.kv_cache)
    instead = INSTEAD
    if cache is not None or encoding.inputs is not None:  # they need a text
        other = f"fp8-dynamic without {named('kv_cache')}" if cache else "fp8-dynamic"
        instead = f"; or choose {other}, which needs no forward pass"
    chain = Chain(plain, settings, instead=instead)
    if cache is not None:
        check_cache(chain)
    if calibrates:
        calibrate(chain, draft, cache=cache, storable=frozenset(encodable(plain.draft, encoding.name)))
    else:
        add_scales(chain, draft, encoding, cache)
    if cache is not None:
        draft.config = cache.described(draft.config or {})


def check_cache(chain: Chain) -> None:
    """Raise PlanError for a model whose cache holds something else than keys and values of each attention."""
    base, fix = chain.base, f"leave out {named('kv_cache')}"
    shared = base.config.get("num_kv_shared_layers")
    what = ""
    if not any(attention_of(chain.names(layer)) for layer in range(chain.layers)):
        what = "the scales of its cache cannot be measured: no layer has self_attn.k_proj and self_attn.v_proj"
    elif shared:
        what = f"the scales of its cache cannot be measured: {show(shared)} layers use the keys and values of others"
    if what:
        raise PlanError([Unsupported(what, where=f"{base.label} ({show(base.config.get('model_type'))})", fix=fix)])


def calibrate(
    chain: Chain, draft: PlanDraft, prefix: str = "", *, cache: CacheEncoding | None = None, storable: Collection[str] = ()
) -> None:
    """Quantise the weights of a quantised draft layer by layer for what enters them, instead of rounding them to nearest.

    chain     of the steps before they were quantised
    draft     weights in an encoding that takes a Hessian are calibrated, unless they are copied: `is_calibrated`
    prefix    of names in the draft that those steps do not have
    cache     how keys and values are stored; None: they get no scales
    storable  names of the weights that could be in one encoding
    """
    calibrated = [step for step in draft.steps if is_calibrated(step)]
    encoded = {step.out.name.removeprefix(prefix): step for step in calibrated}
    states = chain.embedding(chain.text_rows)
    products = [chain.text_rows, states]
    inside: set[str] = set()
    scaled: set[str] = set()
    could: set[str] = set()
    changed: dict[str, str] = {}
    scales = [name for name, step in encoded.items() if chain.awq_scales and find_encoding(step.encoding).scaled]
    rounded = {step.out.name.removeprefix(prefix) for step in draft.steps if step.encoding != PLAIN} - encoded.keys()
    float16 = {find_encoding(step.encoding).float16 for step in calibrated} - {"no"}
    largest: list[Product] = []
    for layer in range(chain.layers):
        of_layer = {name: encoded[name] for name in chain.names(layer) if name in encoded}
        inside.update(of_layer)
        scalable = chain.scalable(layer) if scales else []
        features, plain = chain.features(layer, scalable, of_layer, rounded)
        could |= chain.scaled_alike(layer, scalable, storable, encoded[scales[0]].encoding) if scalable else set()
        changed |= plain
        scaled |= scaled_weights(features)
        quantised = chain.quantised(f"layer {layer}", layer, states, of_layer, features, plain) if of_layer else None
        measured = chain.scales(layer, states, "", (), cache, quantised) if cache else ()
        products += [*([] if quantised is None else [quantised]), *measured]
        states = chain.states(layer, states) if quantised is None else chain.quantised_states(layer, states, quantised)
        products.append(states)
        if float16:
            largest.append(chain.largest(layer, states))
            products.append(largest[-1])
    if head := {name: step for name, step in encoded.items() if name not in inside}:
        products.append(chain.quantised("head", chain.layers, states, head))
    elif not float16:
        while products[-1].transient:  # nothing looks at what leaves the last layers
            products.pop()
    products += collected(largest, fixed="always" in float16)
    steps: list[Step] = []
    for step in draft.steps:
        copies = [Step(out, COPY, (Read(PRODUCTS, out.name),)) for out in step.outs]
        is_copied = step in calibrated or step.out.name.removeprefix(prefix) in changed
        steps += copies if is_copied else [step]
    unscaled = inside - scaled
    elsewhere, fix_elsewhere = "in other formats", "give these the same type"
    if any(step.verbatim for step in draft.steps):
        elsewhere, fix_elsewhere = "that are copied, or in other formats,", ""
    for some, why, fix in (
        (unscaled & could, f"weights {elsewhere} make their inputs, or share them", fix_elsewhere),
        (unscaled - could, "no way to scale their inputs is known to be exact", ""),
    ):
        if names := [name for name in scales if name in some]:
            draft.warn(f"{len(names):,} of {len(scales):,} weights get no AWQ scales: {why}", names[0], fix)
    draft.steps = with_scales(steps, products)
    chain.add_to(draft, products)


def add_scales(chain: Chain, draft: PlanDraft, encoding: Encoding, cache: CacheEncoding | None) -> None:
    """Add scales of activations to a quantised draft: of what enters and leaves layers of plain weights.

    chain     of the steps before they were quantised
    encoding  of the weights, which may have a scale for what enters them
    cache     how keys and values are stored; None: they get no scales
    """
    encoded = {step.out.name for step in draft.steps if step.encoding == encoding.name and encoding.inputs is not None}

    def measure(layer: int, states: Product) -> tuple[Product, ...]:
        return chain.scales(layer, states, encoding.name, [name for name in chain.names(layer) if name in encoded], cache)

    products = chain.forward(measure)
    draft.steps = with_scales(draft.steps, products)
    chain.add_to(draft, products)


def with_scales(steps: Iterable[Step], products: Iterable[Product]) -> list[Step]:
    """The steps, with those that copy scales of activations: each follows the last of its module's tensors."""
    outs = [out for product in products if product.op == "activation_scales" for out in product.outs]
    scales = grouped((out.name.rpartition(".")[0], Step(out, COPY, (Read(PRODUCTS, out.name),))) for out in outs)
    placed: list[Step] = []
    for step in reversed([*steps]):
        modules = step.out.name.split(".")[:-1]
        inside = [".".join(modules[:end]) for end in range(1, len(modules) + 1)]
        placed += [scale for module in inside for scale in reversed(scales.pop(module, []))]
        placed.append(step)
    return placed[::-1]


class Chain(TextRun):
    """Makes the products of a calibration, one after the other: those of its text, and what is quantised for them."""

    def __init__(
        self,
        assembled: Prepared,
        settings: QuantizeSettings,
        steps: Sequence[Step] | None = None,
        most_rows: int | None = None,
        prefix: str = "",
        instead: str = INSTEAD,
    ) -> None:
        """
        assembled  the draft of plain tensors
        steps      of the same tensors, with the names of the model that transformers builds; None: the draft's
        most_rows  of the text that are used, if the settings or the text allow more
        prefix     of the names of the products: `MEASURING`, if a plan with others follows from them
        instead    what else the user may do, for errors

        Raises PlanError: packages that are missing, a text that cannot be read or is too short, a model without a tokenizer.
        """
        draft = assembled.draft
        steps = draft.steps if steps is None else steps
        model = result_of(draft, assembled.inputs, steps, instead)
        rows, tokens = settings.calibration_rows, settings.calibration_tokens
        super().__init__(model, text_for(model, settings.calibration, rows, tokens, draft.seed, most_rows), prefix)
        if settings.calibration_dtype == "bfloat16":
            self.base = replace(self.base, arithmetic="bfloat16")
        self._engine = settings.engine
        self.awq_scales = settings.awq_scales

    def add_to(self, draft: PlanDraft, products: Iterable[Product]) -> None:
        """As `TextRun.add_to`. Raises PlanError for a model that transformers cannot build, or that has other tensors."""
        with as_plan_error():
            self._decoder.check(self._shapes, self.text.tokens)
        super().add_to(draft, products)

    def measure(self, draft: PlanDraft, products: Iterable[Product], format: str, settings: QuantizeSettings) -> None:
        """Add a measurement to a draft, from which `Format.follow` makes another plan."""
        measured = [*products]
        self.add_to(draft, measured)
        names = [product.name for product in measured]
        draft.then = FollowUp("quantised", {"format": format, MEASURED: names, **asdict(settings)})

    @property
    def described(self) -> dict[str, object]:
        """The calibration, for config.json."""
        source = self.text.source
        dataset = source if source == BUILT_IN else PurePath(source).name
        return {"rows": self.text.rows, "length": self.text.tokens, "dataset": dataset}

    def scalable(self, layer: int) -> list[Features]:
        """The features of a layer that can be scaled."""
        return self._decoder.scalable(layer, self._shapes)

    def features(
        self, layer: int, scalable: Sequence[Features], encoded: Mapping[str, Step], rounded: Collection[str]
    ) -> tuple[tuple[Features, ...], dict[str, str]]:
        """The input features of quantised weights of a layer that get scales: `chosen_features`.

        scalable  features of the layer
        encoded   steps of the calibrated weights
        rounded   names of weights that are quantised as they are, so that none of their inputs is scaled
        """
        specs = {step.out.name: step.out for step in self.steps(layer) if step.out.name not in rounded}
        return chosen_features(scalable, {weight: step.encoding for weight, step in encoded.items()}, specs)

    def scaled_alike(self, layer: int, scalable: Sequence[Features], weights: Collection[str], encoding: str) -> set[str]:
        """The weights of a layer whose input features would get scales if all these weights were in one encoding."""
        specs = {step.out.name: step.out for step in self.steps(layer)}
        features, _ = chosen_features(scalable, {name: encoding for name in specs if name in weights}, specs)
        return scaled_weights(features)

    @cached_property
    def _decoder(self) -> Decoder:
        from weightsmith._activations.running import build_decoder

        return build_decoder(self.base)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of all the model's tensors, by name."""
        return {step.out.name: step.out.shape for step in self._model.steps}

    def quantised(
        self,
        name: str,
        layer: int,
        states: Product,
        encoded: Mapping[str, Step],
        features: tuple[Features, ...] = (),
        plain: Mapping[str, str] = MappingProxyType({}),
    ) -> Product:
        """The quantised weights of a layer, or the head after the last.

        encoded          steps of the quantised plan
        features, plain  input features that get scales, and what changes with them (`features`)
        """
        changed = tuple(step.out for step in self.steps(layer) if step.out.name in plain)
        outs = (*(out for step in encoded.values() for out in step.outs), *changed)
        weights = {weight: step.encoding for weight, step in encoded.items()} | {out.name: PLAIN for out in changed}
        work = QuantisedWork(self.base, self.packages, layer, states.name, weights, features)
        return self.product(name, "quantised_layer", outs, work, self.steps(layer), (states,))

    def quantised_states(self, layer: int, states: Product, quantised: Product) -> Product:
        """What leaves a layer with quantised weights."""
        weights = quantised.settings["weights"]
        work = QuantisedStatesWork(self.base, self.packages, layer, states.name, weights, quantised.name)
        name, steps, needs = f"states {layer + 1}", self.steps(layer), (states, quantised)
        return self.product(name, "quantised_states", (self.rows(name),), work, steps, needs, transient=True)

    def largest(self, layer: int, states: Product) -> Product:
        """The largest magnitude of what leaves a layer. states: that."""
        engine = None if self._engine is None else find_engine(self._engine)
        refused_by = engine.title if engine is not None and engine.float16 else ""
        work = LargestStateWork(self.base, self.packages, layer, states.name, refused_by)
        name = f"largest state behind layer {layer}"
        return self.product(name, "largest_state", (self.array(name, "F32", (1,)),), work, (), (states,))

    def scales(
        self,
        layer: int,
        states: Product,
        encoding: str,
        weights: Sequence[str],
        cache: CacheEncoding | None,
        quantised: Product | None = None,
    ) -> tuple[Product, ...]:
        """The scales of activations of a layer, if it has any. quantised: what makes its weights; None: they are plain."""
        module = attention_of(self.names(layer)) if cache is not None else ""
        if not weights and not module:
            return ()
        stored = cache.name if cache is not None and module else ""
        scaled = encoding if weights else "", tuple(weights), module, stored
        made_by = () if quantised is None else (quantised.settings["weights"], quantised.name)
        work = ScalesWork(self.base, self.packages, layer, states.name, *scaled, *made_by)
        needs = (states,) if quantised is None else (states, quantised)
        return (self.product(f"scales {layer}", "activation_scales", work.outs, work, self.steps(layer), needs),)

    def losses(self, layer: int, states: Product, gradients: Product, candidates: Mapping[str, tuple[str, ...]]) -> Product:
        """The losses that the candidates for each weight of a layer cause. gradients: of its weights, in the same order."""
        work = MeasureWork(self.base, self.packages, layer, states.name, gradients.name, dict(candidates))
        return self._measured("measured_layer", f"losses of layer {layer}", work, (states, gradients))

    def scores(self, layer: int, states: Product, leaving: Product, candidates: Mapping[str, tuple[str, ...]]) -> Product:
        """The scores of the candidates for each weight of a layer. leaving: the gradients of the layer's output."""
        work = ScoreWork(self.base, self.packages, layer, states.name, leaving.name, dict(candidates))
        out = self.array(f"scores of layer {layer}", "F32", shape_of(candidates, states.outs[0].shape))
        return self.product(f"scored {layer}", "scored_layer", (out,), work, self.steps(layer), (states, leaving))

    def vocabulary_scores(
        self, entering: Product, gradients: Product, leaving: Product, candidates: Mapping[str, tuple[str, ...]]
    ) -> Product:
        """The scores of the candidates for the embedding and the head.

        entering, gradients  what enters the first layer, and the gradients of that
        leaving              output of the last layer
        """
        layers, of_text = self.layers, (self.text_rows.name, entering.name, self.text.seed)
        work = VocabularyWork(self.base, self.packages, layers, leaving.name, gradients.name, dict(candidates), *of_text)
        out = self.array("scores of the vocabulary", "F32", shape_of(candidates, leaving.outs[0].shape))
        needs = (self.text_rows, entering, gradients, leaving)
        return self.product("scored vocabulary", "scored_vocabulary", (out,), work, self.steps(layers), needs)

    def errors(self, layer: int, states: Product, blocks: Mapping[str, tuple[Mapping[str, str], ...]]) -> Product:
        """The errors of the options of each block of a layer."""
        work = BlocksWork(self.base, self.packages, layer, states.name, dict(blocks))
        return self._measured("measured_blocks", f"errors of layer {layer}", work, (states,))

    def _measured(self, op: str, array: str, work: CalibratedWork, needs: tuple[Product, ...]) -> Product:
        outs = tuple(self.array(array, *shape) for shape in work.shapes({}))
        return self.product(f"measured {work.layer}", op, outs, work, self.steps(work.layer), needs)
