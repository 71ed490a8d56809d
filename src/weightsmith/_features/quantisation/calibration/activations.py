"""The `activation_scales` product: scales for what enters the linear layers of a layer, and for what it caches.

They follow from the largest magnitudes on a text. Layers with the same input have the same scale. So have the experts of a
layer, for the same projection: few tokens of the text reach some of them, or none, and engines' FP8 kernels have one for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.states import FORWARD, made_beside
from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import NonFinite, Unsupported, WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._models.formats import find_cache, find_encoding
from weightsmith._models.structure.projections import by_site
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats
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
    """

    encoding: str
    weights: tuple[str, ...]
    attention: str
    cache: str

    @property
    def scales(self) -> tuple[ActivationScale, ...]:
        """Of keys and values; () without."""
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


def _compute(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows

    work, cached = ScalesWork.of(context.product), Cached()
    # With a cache, attention may round otherwise.
    after = made_beside(context, work) if work.weights and not work.attention else None
    with layer_rows(context, work, 0, 0.7 if after is None else 1) as rows:
        if work.attention:
            rows = replace(rows, layer=rows.layer.with_cache(cached))
        inputs = _inputs(rows, work.weights, after)
        if not work.weights:
            for _ in rows.each(lambda numbered: rows.layer.batch(numbered[1][None])):
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
    """The largest magnitude of what enters each layer, and those that share a scale with it. after: `Forward.beside`."""
    from weightsmith._activations.statistics.maxima import STATISTIC as MAXIMA
    from weightsmith._activations.sums import Forward, use_sums

    largest_of: dict[str, float] = {}

    def keep(_inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        maxima = finish(site)
        largest_of[site] = 0.0 if maxima is None else float(maxima.max())  # None: no token reached it

    use_sums(rows, weights, keep, MAXIMA, forward=Forward(beside=after))
    shared: dict[str, float] = {}
    for site, largest in largest_of.items():
        shared[shared_site(site)] = max(largest, shared.get(shared_site(site), 0.0))
    return {weight: shared[shared_site(site)] for site, names in by_site(weights).items() for weight in names}


KIND = ProductKind(FORWARD, compute=_compute, check=ScalesWork.check, device=True)
