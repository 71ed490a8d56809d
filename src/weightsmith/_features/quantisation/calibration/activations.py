"""The largest magnitudes of a text, and what follows from them: scales for activations, and a warning about float16.

`activation_scales` are for what enters the linear layers of a layer, and for what it caches. Layers with the same input have
the same scale. So have the experts of a layer, for the same projection: few tokens of the text reach some of them, or none,
and engines' FP8 kernels have one for all.

`largest_state` is the largest magnitude of what leaves a layer, taken from the states of a calibration before they are removed.
`largest_states` puts those of all layers together, and reports hidden states that float16 cannot hold, for formats that
programs run in float16.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.states import FORWARD, made_beside
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import Finding, FormatError, NonFinite, Unsupported, WeightsmithError
from weightsmith._base.options import named
from weightsmith._base.report.blocks import Block, Column, Table
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import markdown_table
from weightsmith._features.quantisation.calibration.layer import LAYER_BY_LAYER, dequantised_weights, problem_of_quantised
from weightsmith._models.formats import find_cache, find_encoding
from weightsmith._models.structure.projections import by_site
from weightsmith._plans import Product, ProductSettings
from weightsmith._plans.codec import OMITTED
from weightsmith.abc.product import Arrays, Floats, ProductContext, ProductKind
from weightsmith.abc.stored import ActivationScale

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import LayerRows
    from weightsmith._activations.sums import Inputs


@dataclass(frozen=True, slots=True)
class ScalesWork(LayerWork):
    """Settings of the product.

    encoding   of the weights; "" if there are none
    weights    names of the weights whose inputs get a scale
    attention  name of the module whose keys and values get one; "" for none
    cache      how they are stored: a name for `find_cache`; "" without
    quantised  the encoding of each quantised weight of the layer, by name
    quantised_by  the product that makes them; "": the layer is plain
    """

    encoding: str
    weights: tuple[str, ...]
    attention: str
    cache: str
    quantised: Mapping[str, str] = field(default_factory=dict, metadata=OMITTED)
    quantised_by: str = field(default="", metadata=OMITTED)

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, *filter(None, [self.quantised_by])}

    @property
    def scales(self) -> tuple[ActivationScale, ...]:
        """The scales of keys and values; () without."""
        cache = find_cache(self.cache) if self.attention else None
        return () if cache is None else (cache.keys, cache.values)

    @property
    def outs(self) -> tuple[TensorSpec, ...]:
        """The scales: one for each weight, then those of keys and values."""
        scale = find_encoding(self.encoding).inputs if self.weights else None
        inputs = () if scale is None else tuple(scale.out(weight) for weight in self.weights)
        return (*inputs, *(cached.out(self.attention) for cached in self.scales))

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if problem := LayerWork.problem(self, product, shapes):
            return problem
        try:
            if self.weights and find_encoding(self.encoding).inputs is None:
                return f"there is no scale of activations for weights stored as {self.encoding}"
        except WeightsmithError as error:
            return error.finding.what
        if bool(self.attention) != (find_cache(self.cache) is not None):
            return "there is no such cache"
        if problem := problem_of_quantised(self.quantised, product):
            return problem
        return "" if product.outs == self.outs else "its arrays are not those of its settings"


def attention_of(names: Iterable[str]) -> str:
    """The module that caches its keys and values, of the tensors of a layer; "" if there is none that readers know.

    >>> attention_of(["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"])
    'model.layers.0.self_attn'
    >>> attention_of(["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"])
    ''
    """
    for name in names:
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in ("k_proj", "qkv_proj") and module.endswith(".self_attn"):
            return module
    return ""


def shared_site(site: str) -> str:
    """What the inputs share a scale by: experts have the same.

    >>> shared_site("model.layers.0.mlp.experts.7.gate_up")
    'model.layers.0.mlp.experts.*.gate_up'
    """
    parts = site.split(".")
    for at in range(1, len(parts)):
        if parts[at - 1] == "experts" and parts[at].isdecimal():
            parts[at] = "*"
    return ".".join(parts)


class Cached:
    """Takes the place of a cache, and notes the largest magnitudes of keys and values. Any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.largest: list[float] = []

    def update(self, keys: Tensor, values: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
        """Return them as they are. Infinity counts for NaN, whose maximum would depend on the order."""
        magnitudes = [float(x.abs().amax().nan_to_num(np.inf)) for x in (keys, values)]
        with self._lock:
            self.largest = (
                magnitudes if not self.largest else [max(pair) for pair in zip(self.largest, magnitudes, strict=True)]
            )
        return keys, values


def _compute_scales(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows

    work, cached = ScalesWork.of(context.product), Cached()
    # With a cache, attention may round otherwise.
    after = made_beside(context, work) if work.weights and not work.attention else None
    weights = dequantised_weights(context, work.quantised, work.quantised_by) if work.quantised_by else {}
    with layer_rows(context, work, 0, 0.7 if after is None else 1, overrides=weights) as rows:
        if work.attention:
            rows = replace(rows, layer=rows.layer.with_cache(cached))
        inputs = _inputs(rows, work.weights, after)
        if not work.weights:
            for _ in rows.map(lambda numbered: rows.layer.batch(numbered[1][None])):
                pass
    if work.attention and not cached.largest:
        what = f"layer {work.layer} gives no keys and values to a cache"
        raise Unsupported(what, where=work.base.label, fix=f"leave out the scales of the cache{work.base.instead}")
    if not np.isfinite(cached.largest).all():
        raise NonFinite(f"the keys or values of layer {work.layer} are NaN or infinite", where=work.base.label)
    scale = find_encoding(work.encoding).inputs if work.weights else None
    of_inputs = [] if scale is None else [scale.of(inputs[weight]) for weight in work.weights]
    return [*of_inputs, *(of_cache.of(largest) for of_cache, largest in zip(work.scales, cached.largest, strict=False))]


def _inputs(rows: LayerRows, weights: Sequence[str], after: Floats | None) -> dict[str, float]:
    """The largest magnitude of what enters each layer, and those that share a scale with it. after: `Forward.target`."""
    from weightsmith._activations.statistics import MAXIMA
    from weightsmith._activations.sums import Forward, use_sums

    largest_of: dict[str, float] = {}

    def keep(_inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        maxima = finish(site)
        largest_of[site] = 0.0 if maxima is None else float(maxima.max())  # None: no token reached it

    use_sums(rows, weights, keep, MAXIMA, forward=Forward(target=after))
    shared: dict[str, float] = {}
    for site, largest in largest_of.items():
        shared[shared_site(site)] = max(largest, shared.get(shared_site(site), 0.0))
    return {weight: shared[shared_site(site)] for site, names in by_site(weights).items() for weight in names}


SCALES = ProductKind(FORWARD, compute=_compute_scales, check=ScalesWork.check, device=True)


LARGEST = 65504.0
"""The largest float16."""


@dataclass(frozen=True, slots=True)
class LargestStateWork(LayerWork):
    """Settings of `largest_state`: `states` leave the layer.

    refused_by  the program that the model is for, which cannot run it with larger states; "": they are reported
    """

    refused_by: str

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if problem := LayerWork.problem(self, product, shapes):
            return problem
        return "" if [(out.dtype.name, out.shape) for out in product.outs] == [("F32", (1,))] else "it has not one number"


def _largest(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import states_of
    from weightsmith._files.arrays import release_pages

    work = LargestStateWork.of(context.product)
    states = states_of(context, work)
    largest = np.float32(0)
    for row in states:
        largest = max(largest, np.abs(row).max())
        release_pages(states)
    if work.refused_by and largest > LARGEST:
        what = f"hidden states of up to {largest:.3g} leave the layer, and {work.refused_by} computes in float16, "
        raise Unsupported(
            f"{what}which holds {LARGEST:,.0f}",
            where=f"layer {work.layer}, {work.base.label}",
            fix=f"choose a format for a program that computes in bfloat16, such as w4a16, or leave out {named('engine')}",
            state="Nothing was published.",
        )
    return [np.array([largest], np.float32)]


@dataclass(frozen=True, slots=True)
class LargestStates:
    """The report: the largest magnitude of the states that leave each layer.

    layers   their numbers
    largest  float32 [layers]
    fixed    programs run the format in float16 alone
    """

    layers: tuple[int, ...]
    largest: Floats
    fixed: bool

    @property
    def _beyond(self) -> list[tuple[int, float]]:
        return [(layer, x) for layer, x in zip(self.layers, self.largest.tolist(), strict=True) if x > LARGEST]

    def _summary(self) -> str:
        named = ", ".join(f"{x:.3g} behind layer {layer}" for layer, x in self._beyond[:8])
        rest = f", and {len(self._beyond) - 8} more layers" if len(self._beyond) > 8 else ""
        return f"hidden states leave the range of float16, which holds {LARGEST:,.0f}: {named}{rest}"

    def _fix(self) -> str:
        if self.fixed:
            return "choose a format for a program that computes in bfloat16, such as w4a16 or a gguf format"
        return "run the model in bfloat16, which is not the default of every program (vLLM: --dtype bfloat16)"

    def files(self) -> dict[str, bytes]:
        """None."""
        return {}

    def section(self) -> str:
        """A section for the model card; "" if float16 holds all states."""
        if not self._beyond:
            return ""
        rows = [(str(layer), f"{x:.4g}") for layer, x in self._beyond]
        text = f"On the calibration text, {self._summary()}. In float16, the model gives NaN: {self._fix()}."
        return f"\n## Range of the hidden states\n\n{text}\n\n{markdown_table(('behind layer', 'largest magnitude'), rows)}\n"

    def blocks(self) -> Sequence[Block]:
        """The table of all layers, if float16 cannot hold the states of one."""
        if not self._beyond:
            return []
        columns = Column("behind layer"), Column("largest magnitude", "number", f"float16 holds {LARGEST:,.0f}")
        rows = tuple((str(layer), x) for layer, x in zip(self.layers, self.largest.tolist(), strict=True))
        return [Table("Range of the hidden states", columns, rows)]

    def warnings(self, where: str) -> list[Finding]:
        """A warning if float16 cannot hold the states."""
        return [Finding(self._summary(), "calibration", fix=self._fix())] if self._beyond else []


@dataclass(frozen=True, slots=True)
class LargestStatesWork(ProductSettings):
    """Settings of `largest_states`.

    layers  the number of each
    fixed   programs run the format in float16 alone
    """

    layers: tuple[int, ...]
    fixed: bool

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if any(layer < 0 for layer in self.layers):
            return "there is no such layer"
        arrays = [(out.dtype.name, out.shape) for out in product.outs]
        fits = len(self.layers) == len(product.needs) and arrays == [("F32", (len(self.layers),))]
        return "" if fits else "it has not a number for each layer"


def collected(measured: Sequence[Product], *, fixed: bool) -> list[Product]:
    """The product that reports the largest states of all layers; [] if none are measured. fixed: as of the settings."""
    if not measured:
        return []
    name, layers = "largest states", tuple(LargestStateWork.of(product).layer for product in measured)
    out = TensorSpec(name, DTYPES["F32"], (len(measured),))
    settings = LargestStatesWork(layers, fixed).to_json()
    return [Product(name, "largest_states", (out,), settings, (), (), tuple(product.name for product in measured))]


def _collect(context: ProductContext) -> Arrays:
    largest = {name: context.arrays(name) for name in context.product.needs}
    if wrong := next((name for name, arrays in largest.items() if [array.shape for array in arrays] != [(1,)]), ""):
        what = f"product {wrong} does not have the largest state of a layer"
        raise FormatError(what, where=f"product {context.product.name}", fix="make the plan again")
    return [np.concatenate([array for [array] in largest.values()]).astype(np.float32)]


def _report(product: Product, arrays: Arrays) -> LargestStates:
    work = LargestStatesWork.of(product)
    return LargestStates(work.layers, arrays[0], work.fixed)


LARGEST_STATE = ProductKind(LAYER_BY_LAYER, compute=_largest, check=LargestStateWork.check, device=True)
LARGEST_STATES = ProductKind(LAYER_BY_LAYER, compute=_collect, check=LargestStatesWork.check, report=_report)
