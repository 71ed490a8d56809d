"""The `measured_blocks` product: how much each option of a block changes what leaves the block. ExLlamaV2's measurement.

For each option, the weights of the block are quantised for what enters them in the plain model, and the rows run through the
block. The error is the mean over the rows of ‖y' - y‖ / ‖y‖, y with the residual stream that the block adds to. What leaves
the plain block is held in memory: as much as the states of all rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith.errors import ParameterError
from weightsmith.plans import Product
from weightsmith.products import ProductContext, ProductKind
from weightsmith.products.base import Arrays, Floats
from weightsmith.quantisation.calibration import schemes
from weightsmith.quantisation.calibration.sites import is_attention, site_of
from weightsmith.quantisation.calibration.work import BlocksWork

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from torch import Tensor

    from weightsmith.decoder.forward import Layer
    from weightsmith.quantisation.calibration.common import NUMBERED_ROW, PhaseProgress
    from weightsmith.quantisation.exl2.matrix import FactoredHessian

_QUANTISING = 0.3
"""Of the progress of a block: the Hessians."""


def _compute(bench: ProductContext) -> Arrays:
    from weightsmith.quantisation.calibration.common import PhaseProgress, decoder_of, device_of
    from weightsmith.quantisation.calibration.sums import workers

    work, device = BlocksWork.of(bench.product), device_of(bench)
    progress = PhaseProgress(bench, work.base, work.layer, 0, 0.7)
    [entering] = bench.arrays(work.states)
    errors = np.zeros(bench.product.outs[0].shape)
    with decoder_of(work.base).layer(work.layer, bench, entering.shape[1], device) as layer:
        for number, options in enumerate(work.blocks.values()):
            first, share = number / len(work.blocks), 1 / len(work.blocks)
            span = first, share * _QUANTISING
            prepared = _prepared(bench, work, layer, list(options[0]), entering, device, progress, span)
            span = first + share * _QUANTISING, share * (1 - _QUANTISING)
            with workers(bench.threads, device) as pool, _Block(layer, options[0]) as block:
                rows = _Rows(entering, bench.threads, device, progress)
                errors[number, : len(options)] = _errors(block, options, prepared, rows, pool, span)
    return [errors]


def _prepared(
    bench: ProductContext,
    work: BlocksWork,
    layer: Layer,
    weights: list[str],
    entering: Floats,
    device: str,
    progress: PhaseProgress,
    span: tuple[float, float],
) -> dict[str, FactoredHessian | None]:
    """The Hessian of each weight, ready for all its settings. Raises ParameterError if they take too much memory together."""
    from weightsmith.quantisation.calibration.common import Room, budget
    from weightsmith.quantisation.calibration.sums import Inputs, use_hessians
    from weightsmith.quantisation.exl2.matrix import PREPARE_BYTES, prepare

    widths = {site_of(name): int(layer.linears[name].in_features) for name in weights}
    nbytes = sum(4 * width**2 for width in widths.values())
    if nbytes > budget(bench):
        what = f"the Hessians of layer {work.layer} take {nbytes:,} bytes, and the limit is {budget(bench):,}"
        fix = "use --measure proxy, which needs one at a time, or a larger --max-memory"
        raise ParameterError(what, where=work.base.label, fix=fix)
    found: dict[str, FactoredHessian | None] = {}
    room = Room(budget(bench))

    def use(inputs: Inputs, site: str, finish: Callable[[str], Any]) -> None:
        with room(PREPARE_BYTES * inputs.width(site) ** 2):
            hessian = finish(site)
            ready = None if hessian is None else prepare(hessian)
        found.update(dict.fromkeys(inputs.sites[site], ready))

    use_hessians(layer, weights, work.base, entering, bench, device, progress, span, use)
    return found


class _Rows:
    """The rows that enter the layer, as often as they are needed."""

    def __init__(self, entering: Floats, at_once: int, device: str, progress: PhaseProgress) -> None:
        self._entering, self._at_once, self._device, self._progress = entering, at_once, device, progress

    def __call__(self, span: tuple[float, float]) -> Iterator[list[NUMBERED_ROW]]:
        """All of them. span: of the progress: its first value, and its share."""
        from weightsmith.quantisation.calibration.common import row_batches

        return row_batches(self._entering, self._at_once, self._device, self._progress, (span[0], span[0] + span[1]))


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
    rows: _Rows,
    pool: ThreadPoolExecutor,
    span: tuple[float, float],
) -> list[float]:
    """The error of each option. Settings that follow each other are quantised once."""

    def run(numbered: NUMBERED_ROW) -> Tensor:
        return block.run(numbered[1])

    def error(pair: tuple[NUMBERED_ROW, Tensor]) -> float:
        numbered, plain = pair
        return float((run(numbered).clamp_(-65504, 65504) - plain).norm() / plain.norm())

    def give(item: tuple[str, str]) -> None:
        name, encoding = item
        weight = block.plain[name]
        arrays = schemes.quantise(weight, encoding, prepared[name])
        block.set(name, schemes.dequantise(arrays, encoding, weight.shape))

    share = span[1] / (len(options) + 1)
    plain = [out for some in rows((span[0], share)) for out in pool.map(run, some)]
    found, current = [], dict[str, str]()
    for number, option in enumerate(options, 1):
        list(pool.map(give, [item for item in option.items() if current.get(item[0]) != item[1]]))
        current = dict(option)
        batches = rows((span[0] + number * share, share))
        found.append([e for some in batches for e in pool.map(error, [(row, plain[row[0]]) for row in some])])
    return [float(np.mean(each)) for each in found]


def _check(product: Product) -> str:
    if problem := BlocksWork.check(product):
        return problem
    work = BlocksWork.of(product)
    if not 0 <= work.layer < work.base.layers:
        return f"there is no layer {work.layer}"
    if work.states not in product.needs:
        return "it does not need the states that its settings name"
    if not all(
        options and all(option and set(option) == set(options[0]) for option in options) for options in work.blocks.values()
    ):
        return "the options of a block are for other weights"
    specs = {step.out.name: step.out for step in product.steps}
    if problem := schemes.problem((each for options in work.blocks.values() for one in options for each in one.items()), specs):
        return problem
    shape = len(work.blocks), max(map(len, work.blocks.values()), default=0)
    return "" if [out.shape for out in product.outs] == [shape] else "its arrays are not those of its options"


KIND = ProductKind("measuring layer by layer", compute=_compute, check=_check, device=True)
