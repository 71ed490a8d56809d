"""The `measured_blocks` product: how much each option of a block changes what leaves the block. ExLlamaV2's measurement.

For each option, the weights of the block are quantised for what enters them in the plain model, and the rows run through the
block. The error is the mean over the rows of ‖y' - y‖ / ‖y‖, y with the residual stream that the block adds to. What leaves
the plain block is held in memory: as much as the states of all rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.sites import is_attention, site_of
from weightsmith._activations.states import FORWARD
from weightsmith._base.errors import ParameterError
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration import schemes
from weightsmith._features.quantisation.calibration.work import BlocksWork
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from torch import Tensor

    from weightsmith._activations.decoder.forward import Layer
    from weightsmith._activations.running import LayerRows, NumberedRow
    from weightsmith._activations.sums import Inputs
    from weightsmith._features.quantisation.exl2.matrix import FactoredHessian

_QUANTISING = 0.3
"""The share of a block's progress that its Hessians take."""


def _compute(bench: ProductContext) -> Arrays:
    from weightsmith._activations.running import layer_rows, workers

    work = BlocksWork.of(bench.product)
    errors = np.zeros(bench.product.outs[0].shape)
    with layer_rows(bench, work, 0, 0.7) as rows:
        for number, options in enumerate(work.blocks.values()):
            first, share = number / len(work.blocks), 1 / len(work.blocks)
            measuring = first + share * _QUANTISING
            prepared = _prepared(rows, work.layer, list(options[0]), (first, measuring))
            with workers(bench.threads, rows.device) as pool, _Block(rows.layer, options[0]) as block:
                errors[number, : len(options)] = _errors(block, options, prepared, rows, pool, (measuring, first + share))
    return [errors]


def _prepared(rows: LayerRows, layer: int, weights: list[str], span: tuple[float, float]) -> dict[str, FactoredHessian | None]:
    """The Hessian of each weight, ready for all its settings. Raises ParameterError if they take too much memory together."""
    from weightsmith._activations.running import budget
    from weightsmith._activations.sums import use_sums
    from weightsmith._features.quantisation.calibration.common import Room
    from weightsmith._features.quantisation.exl2.matrix import PREPARE_BYTES, prepare

    limit = budget(rows.bench)
    widths = {site_of(name): int(rows.layer.linears[name].in_features) for name in weights}
    nbytes = sum(4 * width**2 for width in widths.values())
    if nbytes > limit:
        what = f"the Hessians of layer {layer} take {nbytes:,} bytes, and the limit is {limit:,}"
        fix = "use --measure proxy, which needs one at a time, or a larger --max-memory"
        raise ParameterError(what, where=rows.base.label, fix=fix)
    found: dict[str, FactoredHessian | None] = {}
    room = Room(limit)

    def use(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        with room(PREPARE_BYTES * inputs.width(site) ** 2):
            hessian = finish(site)
            ready = None if hessian is None else prepare(hessian)
        found.update(dict.fromkeys(inputs.sites[site], ready))

    use_sums(rows, weights, use, span=span)
    return found


class _Left(Exception):
    """What leaves the block is known; the rest of the layer need not run."""


class _Block:
    """Attention or MLP of a layer, whose weights change for a while. A context manager; `run` is thread-safe."""

    def __init__(self, layer: Layer, weights: Mapping[str, str]) -> None:
        self._layer = layer
        self._left = threading.local()
        self._hooks = [layer.before_mlp.register_forward_pre_hook(self._note)] if is_attention(next(iter(weights))) else []
        self.plain = {name: layer.linears[name].weight.detach().cpu().numpy().copy() for name in weights}

    def __enter__(self) -> _Block:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, weight in self.plain.items():
            self.set(name, weight)

    def _note(self, _module: object, args: tuple[Tensor, ...]) -> None:
        self._left.state = args[0][0]
        raise _Left

    def set(self, name: str, weight: Floats) -> None:
        """Give it another weight."""
        import torch

        with torch.no_grad():
            self._layer.linears[name].weight.copy_(torch.from_numpy(weight))

    def run(self, hidden: Tensor) -> Tensor:
        """What leaves it, for a row of what enters the layer."""
        import torch

        with torch.no_grad():
            try:
                return self._layer(hidden)
            except _Left:
                left: Tensor = self._left.state
                return left


def _errors(
    block: _Block,
    options: tuple[Mapping[str, str], ...],
    prepared: Mapping[str, FactoredHessian | None],
    rows: LayerRows,
    pool: ThreadPoolExecutor,
    span: tuple[float, float],
) -> list[float]:
    """The error of each option. Settings that follow each other are quantised once."""

    def run(numbered: NumberedRow) -> Tensor:
        return block.run(numbered[1])

    def error(pair: tuple[NumberedRow, Tensor]) -> float:
        numbered, plain = pair
        return float((run(numbered).clamp_(-65504, 65504) - plain).norm() / plain.norm())

    def give(item: tuple[str, str]) -> None:
        name, encoding = item
        weight = block.plain[name]
        arrays = schemes.quantise(weight, encoding, prepared[name])
        block.set(name, schemes.dequantise(arrays, encoding, weight.shape))

    share = (span[1] - span[0]) / (len(options) + 1)
    plain = [out for some in rows.batches((span[0], span[0] + share)) for out in pool.map(run, some)]
    found, current = [], dict[str, str]()
    for number, option in enumerate(options, 1):
        list(pool.map(give, [item for item in option.items() if current.get(item[0]) != item[1]]))
        current = dict(option)
        batches = rows.batches((span[0] + number * share, span[0] + (number + 1) * share))
        found.append([e for some in batches for e in pool.map(error, [(row, plain[row[0]]) for row in some])])
    return [float(np.mean(each)) for each in found]


def _check(product: Product) -> str:
    if problem := BlocksWork.check(product):
        return problem
    work = BlocksWork.of(product)
    if not all(
        options and all(option and set(option) == set(options[0]) for option in options) for options in work.blocks.values()
    ):
        return "the options of a block are for other weights"
    specs = {step.out.name: step.out for step in product.steps}
    if problem := schemes.problem((each for options in work.blocks.values() for one in options for each in one.items()), specs):
        return problem
    shape = len(work.blocks), max(map(len, work.blocks.values()), default=0)
    return "" if [out.shape for out in product.outs] == [shape] else "its arrays are not those of its options"


KIND = ProductKind(FORWARD, compute=_compute, check=_check, device=True)
