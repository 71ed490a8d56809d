"""Scales of the input features of weights (AWQ): searched for, and divided out where the features are made.

Groups of a weight share a scale, so a feature with large values needs smaller errors than its neighbours. If the weights that
read a feature are multiplied by s before their codes are chosen, and what makes the feature is divided by s, the plain layer
computes the same, and the feature's errors are s times smaller (Lin et al. 2023, https://arxiv.org/abs/2306.00978, section
3.2). As there, s = r^alpha, where r is the size of a feature, and the alpha with the smallest loss is chosen. Here r is the
root of the mean square, and the loss is the change of the outputs of the readers, tr ΔHΔᵀ, by the Gram matrix H of the
features. AWQ has the mean magnitude, and the change of the outputs of the attention or the MLP.

**Nothing else changes.** What makes a feature is stored in 16 bits and is rounded once it is divided, so s is taken from the
rounded number: its quotient with the plain one. Where something that is stored plainly would be rounded besides (a bias, a
router that reads the features), s is a power of two. A feature for which neither is exact keeps s = 1.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.decoder import Features, spread
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats import find_encoding
from weightsmith._models.structure.projections import by_site
from weightsmith._plans import PLAIN
from weightsmith.abc.product import Arrays, Floats
from weightsmith.abc.stored import Encoding

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import LayerRows, NumberedRow

STEPS = 20
"""alpha is a multiple of 1 / STEPS, from 0."""
SAMPLED = 256
"""The loss is computed on at most so many output features of a weight."""
ALL_SAMPLED = 2048
"""The same limit for all readers together."""
LEAST = 1e-4
"""Smaller values of r are raised to this share of the largest."""


# ---- which features are scaled


def chosen_features(
    features: Iterable[Features], weights: Mapping[str, str], specs: Mapping[str, TensorSpec]
) -> tuple[tuple[Features, ...], dict[str, str]]:
    """Those of a layer's features that are scaled, and its tensors that are stored plainly and change with them: as `weights`.

    weights  the encoding of each quantised weight, by name
    specs    of the layer's tensors, by name
    """
    chosen: list[Features] = []
    plain: dict[str, str] = {}
    sites = by_site(weights)
    for made in features:
        readers = [name for name in made.readers if name in weights]
        others = [name for name in made.readers if name not in weights]
        shared = {name for names in sites.values() if not set(names).isdisjoint(readers) for name in names}
        stored = [*([made.weight] if made.maker != "linear" else []), *filter(None, [made.bias]), *others]
        if (
            not readers
            or not all(find_encoding(weights[name]).scaled for name in readers)
            or not shared <= set(readers)
            or (made.maker == "linear" and made.weight not in weights)
            or any(name not in specs or find_encoding(PLAIN).refusal(specs[name]) for name in stored)
            or not set(plain).isdisjoint(stored)
        ):
            continue
        chosen.append(made)
        plain |= dict.fromkeys(stored, PLAIN)
    return tuple(chosen), plain


def scaled_weights(features: Iterable[Features]) -> set[str]:
    """The weights whose input features are scaled."""
    return {reader for made in features for reader in made.readers}


def problem_of(features: Sequence[Features], weights: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> str:
    """Why features of untrusted settings cannot be scaled, or ""."""
    chosen, plain = chosen_features(features, {n: e for n, e in weights.items() if e != PLAIN}, specs)
    if chosen != tuple(features) or plain != {name: e for name, e in weights.items() if e == PLAIN}:
        return "its plain weights are not those of its scaled features"
    for made in features:
        count, width = made.heads
        rows = specs[made.weight].shape[0] if made.weight in specs else 0
        columns = {specs[name].shape[1] for name in made.readers if len(specs[name].shape) == 2}
        if (
            min(count, width) < 1
            or rows % width
            or columns != {count * rows}
            or (made.bias and specs[made.bias].shape != (rows,))
        ):
            return f"features of {made.weight} are not those that its readers read"
    return ""


# ---- the search


def candidates(sizes: Floats, *, powers: bool) -> list[Floats]:
    """The scales to try for features of these sizes: float32 [K] each, the first all ones. powers: of two."""
    r = np.maximum(sizes.astype(np.float64), LEAST * float(sizes.max()))
    r /= np.sqrt(r.max() * r.min())
    tried = [r ** (step / STEPS) for step in range(STEPS)]
    return [(np.exp2(np.rint(np.log2(s))) if powers else s).astype(np.float32) for s in tried]


def search(readers: Sequence[tuple[Floats, Encoding]], gram: Floats, heads: tuple[int, int], *, powers: bool) -> Floats:
    """The scales of features that change the outputs of their readers least: float32 [features].

    readers  weights [N, K], and how they are stored
    gram     Σ xxᵀ of their inputs, float32 [K, K]
    heads    as in `Features`
    powers   only powers of two

    Cost: for each alpha, two products of up to `ALL_SAMPLED` rows with the Gram matrix.
    """
    import torch

    count, width = heads
    squares = gram.diagonal().reshape(-1, count, width).mean(1).reshape(-1)
    if not np.isfinite(squares).all() or not squares.any():
        return np.ones(len(squares), np.float32)
    limit = max(8, min(SAMPLED, ALL_SAMPLED // len(readers)) // 8 * 8)
    parts = [(_sampled(weight, limit), encoding) for weight, encoding in readers]
    best, chosen = np.inf, np.ones(len(squares), np.float32)
    whole = torch.from_numpy(gram)
    for scales in candidates(np.sqrt(squares), powers=powers):
        columns, loss = spread(scales, heads), 0.0
        for part, encoding in parts:
            stored = encoding.quantise(part * columns, None, 1)
            error = torch.from_numpy(encoding.dequantise(stored, part.shape) / columns - part)
            loss += float(torch.sum((error @ whole) * error, dtype=torch.float64))
        if loss < best:
            best, chosen = loss, scales
    return chosen


def _sampled(weight: Floats, limit: int) -> Floats:
    """Up to `limit` rows, a multiple of 8 as the weight's are."""
    rows = np.arange(limit) * len(weight) // limit if len(weight) > limit else np.arange(len(weight))
    return np.ascontiguousarray(weight[rows])


# ---- what is stored


def stored_quotient(values: Floats, scales: Floats, spec: TensorSpec, offset: float = 0) -> tuple[Any, Floats]:
    """(offset + values) / scales - offset as it is stored, and the scales that it then has: float32, 1 where there are none.

    values, scales  float32 [K]
    """
    whole = offset + values.astype(np.float64)
    with np.errstate(all="ignore"):
        stored = rounded((whole / scales - offset).astype(np.float32), spec)
        exact = whole / (offset + stored.astype(np.float64))
        keeps = np.isfinite(exact) & (np.abs(exact / scales - 1) < 0.25) & (whole != 0)
    stored[~keeps] = rounded(values, spec)[~keeps]
    return stored, np.where(keeps, exact, 1).astype(np.float32)


def rounded(values: Floats, spec: TensorSpec) -> Any:
    """Numbers as a plain tensor has them."""
    from weightsmith._kernels.codecs import encode

    array = np.empty(values.shape, spec.dtype.numpy)
    encode(np.ascontiguousarray(values).reshape(-1), values.size, spec.dtype.code, 0, array.reshape(-1).view(np.uint8))
    return array


@dataclass
class Scaling:
    """What weights of a layer are multiplied by, and divided by, before their codes are chosen.

    columns  of a weight's inputs, float32 [K], by name
    rows     that its outputs are divided by, float32 [N], by name
    plain    the tensors that are stored plainly
    """

    columns: dict[str, Floats] = field(default_factory=dict)
    rows: dict[str, Floats] = field(default_factory=dict)
    plain: dict[str, Arrays] = field(default_factory=dict)

    def weight(self, name: str, weight: Floats) -> Floats:
        """A weight with its scales."""
        if name in self.columns:
            weight = weight * self.columns[name]
        return weight / self.rows[name][:, None] if name in self.rows else weight

    def gram(self, name: str, gram: Floats | None) -> Floats | None:
        """The Gram matrix of the inputs of a weight, with scales: in place."""
        if gram is not None and name in self.columns:
            gram /= self.columns[name]
            gram /= self.columns[name][:, None]
        return gram

    def add(self, made: Features, scales: Floats, tensors: Mapping[str, Floats], specs: Mapping[str, TensorSpec]) -> None:
        """Scale some features, as far as this is exact.

        scales   float32 [features], powers of two if there is more than one tensor that is stored plainly
        tensors  those that are stored plainly, float32
        """
        others = [name for name in tensors if name != made.weight and name != made.bias]
        exact, is_norm = scales, made.maker != "linear"
        if is_norm:
            values, spec = tensors[made.weight], specs[made.weight]
            stored, exact = stored_quotient(values, scales, spec, float(made.maker == "offset norm"))
        for name in filter(None, [made.bias]):
            exact = np.where(_holds(tensors[name] / exact, specs[name], tensors[name], exact), exact, np.float32(1))
        for name in others:
            columns = spread(exact, made.heads)
            held = _holds(tensors[name] * columns, specs[name], tensors[name], np.float32(1) / columns).all(0)
            exact = np.where(held.reshape(-1, made.heads[0], made.heads[1]).all(1).reshape(-1), exact, np.float32(1))
        if is_norm:
            self.plain[made.weight] = [np.where(exact == 1, rounded(values, spec), stored)]
        else:
            self.rows[made.weight] = exact
        if made.bias:
            self.plain[made.bias] = [rounded(tensors[made.bias] / exact, specs[made.bias])]
        columns = spread(exact, made.heads)
        for name in others:
            self.plain[name] = [rounded(tensors[name] * columns, specs[name])]
        self.columns |= {name: columns for name in made.readers if name not in others}


def _holds(values: Floats, spec: TensorSpec, plain: Floats, back: Any) -> Any:
    """Where numbers are what they were, once they are stored and multiplied back."""
    with np.errstate(all="ignore"):
        return rounded(values, spec).astype(np.float32) * back == plain


def scaling_of(
    rows: LayerRows, features: Sequence[Features], weights: Mapping[str, str], specs: Mapping[str, TensorSpec], span: Any
) -> Scaling:
    """The scales of some features of a layer. weights: encodings by name, those of plain tensors too; span: of the progress."""
    scaling = Scaling()
    parameters, lock = rows.layer.weights, threading.Lock()

    def use(made: Features, gram: Floats | None) -> None:
        names = [name for name in dict.fromkeys((made.weight, made.bias, *made.readers)) if name in weights]
        arrays: dict[str, Floats] = {name: parameters[name].detach().cpu().numpy() for name in names}
        tensors = {name: arrays[name] for name in names if weights[name] == PLAIN}
        readers = [(arrays[name], find_encoding(weights[name])) for name in made.readers if name not in tensors]
        scales = np.ones(len(parameters[made.weight]), np.float32)
        if gram is not None:
            scales = search(readers, gram, made.heads, powers=len(tensors) > (made.maker != "linear"))
        with lock:
            scaling.add(made, scales, tensors, specs)

    _use_grams(rows, features, use, span)
    return scaling


def _use_grams(rows: LayerRows, features: Sequence[Features], use: Any, span: tuple[float, float]) -> None:
    """Call `use` with each of some features and their Gram matrix, None if no token reaches them, on any thread.

    Rows run through the layer once for each of the batches of Gram matrices that the product's memory allows.
    """
    from weightsmith._activations.running import budget, processors, workers
    from weightsmith._activations.statistics import GRAM
    from weightsmith._activations.sums import Sums, batches

    by_weight = {made.weight: made for made in features}
    widths = {made.weight: len(rows.layer.weights[made.weight]) * made.heads[0] for made in features}
    parts = batches({name: 4 * width**2 for name, width in widths.items()}, budget(rows.context))
    share = (span[1] - span[0]) / max(1, len(parts))
    with workers(rows.context.threads, rows.device) as pool, processors(rows.context.threads, rows.device, pool) as others:
        for number, names in enumerate(parts):
            sums = Sums(GRAM, {name: (1, widths[name]) for name in names}, rows.device)
            first, entering = span[0] + number * share, Entering(rows, [by_weight[name] for name in names])
            try:
                for some in rows.batches((first, first + share)):
                    sums.add(list(pool.map(entering.of, some)), pool)
            finally:
                entering.close()
            list(others.map(lambda name, sums=sums: use(by_weight[name], sums.finish(name)), names))


class Entering:
    """What enters the readers of features while rows run through a layer. Any number of threads."""

    def __init__(self, rows: LayerRows, features: Collection[Features]) -> None:
        from torch.nn import Linear

        self._rows = rows
        self._noted = threading.local()
        modules = {id(p): module for module in rows.layer.module.modules() for p in module.parameters(recurse=False)}
        self._hooks = []
        for made in features:
            readers = {name: modules[id(rows.layer.weights[name])] for name in made.readers}
            # All tokens enter these, and with what the features were multiplied by on the way, such as a gate.
            plain = [m for name, m in readers.items() if "experts" not in name.split(".") and isinstance(m, Linear)]
            if plain or made.maker == "linear":
                reader = [*plain, *readers.values()][0]
                self._hooks.append(
                    reader.register_forward_pre_hook(lambda _m, args, name=made.weight: self._note(name, args[0]))
                )
            else:
                norm = modules[id(rows.layer.weights[made.weight])]
                self._hooks.append(norm.register_forward_hook(lambda _m, _args, out, name=made.weight: self._note(name, out)))

    def _note(self, name: str, x: Tensor) -> None:
        self._noted.inputs[name] = x.reshape(-1, x.shape[-1])

    def of(self, numbered: NumberedRow) -> dict[str, tuple[Tensor, ...]]:
        """Run one row: the inputs [tokens, K] of each that it reaches, by the weight that makes them. Raises NonFinite."""
        import torch

        row, hidden = numbered
        inputs: dict[str, Tensor] = {}
        self._noted.inputs = inputs
        with torch.no_grad():
            self._rows.layer(hidden)
        for name, x in inputs.items():
            self._rows.check_finite(x, f"what leaves {name.removesuffix('.weight')}", row)
        return {name: (x,) for name, x in inputs.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
