"""Sums over the inputs of linear layers: Hessians Σ xxᵀ.

**Determinism.** A row of tokens runs through the layer on one thread, and rows are added in order: of each tile of columns of a
Hessian one thread adds all rows. The result is the same for any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weightsmith.decoder import Base
from weightsmith.decoder.forward import Layer
from weightsmith.jobs.matrix import one_thread
from weightsmith.products.base import Floats, ProductContext
from weightsmith.quantisation.calibration.common import NUMBERED_ROW, PhaseProgress, budget, check_finite, row_batches
from weightsmith.quantisation.calibration.sites import site_of

TILE_COLUMNS = 512
"""Columns of a Hessian that one thread adds."""

ROWS_SHARE = 0.4
"""Of the progress of `use_hessians`: the rows; the rest is the use."""


@contextmanager
def workers(threads: int, device: str) -> Iterator[ThreadPoolExecutor]:
    """Threads on each of which torch computes alone. A GPU gets its work from one."""
    with one_thread(), ThreadPoolExecutor(threads if torch.device(device).type == "cpu" else 1) as pool:
        yield pool


class Inputs:
    """What enters linear layers while rows run through a layer. Any number of threads."""

    def __init__(
        self, layer: Layer, weights: Sequence[str], base: Base, *, last: str = "", scales: Scales | None = None
    ) -> None:
        """
        weights  the linear layers to look at, by the name of their weight
        last     the site after which the rest of the layer need not run; "" runs all of it
        scales   of the tokens of each weight: its inputs are given once more, times these, under the name of the weight
        """
        self._layer = layer
        self._base = base
        self._found = threading.local()
        self._last = last
        self._scales = scales or {}
        self.sites: dict[str, list[str]] = {}
        for weight in weights:
            self.sites.setdefault(site_of(weight), []).append(weight)
        self._hooks = [
            layer.linear(own[0]).register_forward_pre_hook(lambda _module, args, site=site: self._note(site, args[0]))
            for site, own in self.sites.items()
        ]

    def widths(self) -> dict[str, int]:
        """Input features of each site, and of each weight that has scales."""
        found = {site: self.width(site) for site in self.sites}
        return found | {weight: found[site] for site, own in self.sites.items() for weight in own if weight in self._scales}

    def width(self, site: str) -> int:
        """Input features of a site."""
        return int(self._layer.linear(self.sites[site][0]).in_features)

    def _note(self, site: str, x: Tensor) -> None:
        self._found.inputs[site] = x.reshape(-1, x.shape[-1])
        if site == self._last:
            raise _Enough

    def of(self, numbered: NUMBERED_ROW) -> dict[str, Tensor]:
        """Run one row: the inputs of each site and scaled weight that it reaches, float32 [tokens, K]. Raises NonFinite."""
        row, hidden = numbered
        found: dict[str, Tensor] = {}
        self._found.inputs = found
        try:
            with torch.no_grad():
                self._layer(hidden)
        except _Enough:
            pass
        for site, x in found.items():
            check_finite(x, f"the input of {self.sites[site][0].removesuffix('.weight')}", row, self._base)
        return found | {
            weight: x * torch.from_numpy(self._scales[weight][row, : len(x)].copy()).to(x.device)[:, None]
            for site, x in found.items()
            for weight in self.sites[site]
            if weight in self._scales
        }

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class _Enough(Exception):
    """The last site is reached."""


Scales = Mapping[str, Floats]
"""For each weight, float32 [rows, tokens]: of the tokens that reach it, in their order."""


class Hessians:
    """H = Σ xxᵀ of each site: float32 [K, K]; only the lower tiles until `finish`.

    tokens  that reached each site
    """

    def __init__(self, widths: Mapping[str, int], device: str = "cpu") -> None:
        self._sums = {site: torch.zeros(k, k, device=device) for site, k in widths.items()}
        self.tokens = dict.fromkeys(widths, 0)

    def add(self, rows: Sequence[Mapping[str, Tensor]], pool: ThreadPoolExecutor) -> None:
        """Add the inputs of some rows, in order."""
        tasks = [(site, first) for site, total in self._sums.items() for first in range(0, len(total), TILE_COLUMNS)]
        for row in rows:
            for site, x in row.items():
                self.tokens[site] += len(x)

        def run(task: tuple[str, int]) -> None:
            site, first = task
            total = self._sums[site]
            with torch.no_grad():
                for row in rows:
                    if site in row:
                        x = row[site]
                        total[first:, first : first + TILE_COLUMNS].addmm_(x[:, first:].T, x[:, first : first + TILE_COLUMNS])

        list(pool.map(run, tasks))

    def finish(self, site: str) -> Any:
        """A site's Hessian, float32 numpy [K, K], whose memory it gives up; None if no token reached the site."""
        total = self._sums.pop(site)
        if not self.tokens[site]:
            return None
        with torch.no_grad():
            lower = torch.tril(total, -1)
            total.tril_().add_(lower.T)
        return total.cpu().numpy()


def hessians(inputs: Inputs, rows: Iterator[list[NUMBERED_ROW]], pool: ThreadPoolExecutor, device: str = "cpu") -> Hessians:
    """The Hessians of all sites. rows: some at a time, which run at once; the result does not depend on how many."""
    found = Hessians(inputs.widths(), device)
    for some in rows:
        found.add(list(pool.map(inputs.of, some)), pool)
    return found


def batches(
    weights: Sequence[str], widths: Mapping[str, int], limit_bytes: int, scaled: Collection[str] = ()
) -> list[list[str]]:
    """The weights in batches whose Hessians take at most `limit_bytes` together. Those of one site may take more.

    widths  input features of each weight
    scaled  weights that have a Hessian of their own, beside that of their site

    >>> names = [f"experts.{i}.{leaf}_proj.weight" for i in range(2) for leaf in ("gate", "up", "down")]
    >>> batches(names, dict.fromkeys(names, 100), 80_000)[0]
    ['experts.0.gate_proj.weight', 'experts.0.up_proj.weight', 'experts.0.down_proj.weight']
    """
    sites: dict[str, list[str]] = {}
    for weight in weights:
        sites.setdefault(site_of(weight), []).append(weight)
    found: list[list[str]] = []
    taken = 0
    for own in sites.values():
        nbytes = 4 * widths[own[0]] ** 2 * (1 + sum(weight in scaled for weight in own))
        if not found or taken + nbytes > limit_bytes:
            found.append([])
            taken = 0
        found[-1] += own
        taken += nbytes
    return found


def use_hessians(
    layer: Layer,
    weights: Sequence[str],
    base: Base,
    entering: Floats,
    bench: ProductContext,
    device: str,
    progress: PhaseProgress,
    span: tuple[float, float],
    use: Callable[[Inputs, str, Callable[[str], Any]], None],
    *,
    last: str = "",
    scales: Scales | None = None,
) -> None:
    """Call `use` for each site, on any thread: with the inputs, the site, and what gives its Hessian and those of its weights
    that have scales (`Hessians.finish`).

    entering  rows of states, which run through the layer once for each of the `batches` that the product's memory allows; so
              `use` may not change the layer
    span      of the progress: its first value, and its share
    last, scales  as for `Inputs`
    """
    widths = {name: int(layer.linear(name).in_features) for name in weights}
    parts = batches(weights, widths, budget(bench), scales or ())
    share = span[1] / max(1, len(parts))
    with workers(bench.threads, device) as pool:
        for number, part in enumerate(parts):
            first = span[0] + number * share
            inputs = Inputs(layer, part, base, last=last, scales=scales)
            try:
                rows = row_batches(entering, bench.threads, device, progress, (first, first + share * ROWS_SHARE))
                sums = hessians(inputs, rows, pool, device)
            finally:
                inputs.close()
            tasks = [partial(use, inputs, site, sums.finish) for site in inputs.sites]
            for done, _ in enumerate(pool.map(lambda task: task(), tasks), 1):
                progress(first + share * (ROWS_SHARE + (1 - ROWS_SHARE) * done / len(tasks)))
