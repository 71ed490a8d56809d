"""Sums over the tokens of a text, for each linear layer of a layer.

**Determinism.** A row of tokens runs through the layer on one thread, and rows are added in order: of each part of a sum one
thread adds all rows. The result is the same for any number of threads. On a GPU, the gradients of some kernels are sums in any
order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightsmith._activations.decoder.forward import Layer
from weightsmith._activations.running import LayerRows, NumberedRow, budget, processors, workers
from weightsmith._activations.statistics import GRAM
from weightsmith._files.arrays import release_pages
from weightsmith._models.structure.projections import by_site
from weightsmith.abc.product import Floats, Statistic

ROWS_SHARE = 0.4
"""The share of the progress of `use_sums` that running the rows takes; using the sums takes the rest."""

Scales = Mapping[str, Floats]
"""For each weight, float32 [rows, tokens]: of the tokens that reach it, in their order."""


class Outputs:
    """What leaves linear layers while rows run through a layer. Any number of threads."""

    def __init__(self, layer: Layer, weights: Sequence[str]) -> None:
        self._found = threading.local()
        self._hooks = [
            layer.linear(name).register_forward_hook(lambda _module, _args, out, name=name: self._note(name, out))
            for name in weights
        ]

    def _note(self, name: str, out: Tensor) -> None:
        self._found.outputs[name] = out

    def begin(self) -> dict[str, Tensor]:
        """The outputs of the row that this thread runs next, by weight."""
        self._found.outputs = {}
        return self._found.outputs

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


@dataclass(frozen=True, slots=True)
class Forward:
    """Options of running rows through a layer.

    last     the site after which the rest of the layer need not run; "" runs all of it
    scales   of the tokens of each weight: its inputs are given once more, times these, under the name of the weight
    leaving  gradients of what leaves the layer, [rows, tokens, hidden]: each weight then has its own inputs, and gradients
    target   is filled with what leaves the layer, or, with `leaving`, with the gradients of what enters it
    """

    last: str = ""
    scales: Scales | None = None
    leaving: Floats | None = None
    target: Floats | None = None


class Inputs:
    """What enters linear layers while rows run through a layer. Any number of threads."""

    def __init__(self, rows: LayerRows, weights: Sequence[str], forward: Forward = Forward()) -> None:
        """weights: the linear layers to look at, by the name of their weight."""
        self._rows = rows
        self._found = threading.local()
        self._last = forward.last
        self._scales = forward.scales or {}
        self._leaving = leaving = forward.leaving
        self._target = forward.target
        self.sites = by_site(weights)
        self._outputs = Outputs(rows.layer, () if leaving is None else weights)
        self._hooks = [
            rows.layer.linear(weights_of_site[0]).register_forward_pre_hook(
                lambda _module, args, site=site: self._note(site, args[0])
            )
            for site, weights_of_site in self.sites.items()
        ]

    @property
    def threads(self) -> int:
        """Threads of the run."""
        return self._rows.context.threads

    def keys(self, site: str) -> list[str]:
        """What the inputs of a site are given under: its own name, and those of weights with scales; with gradients, all."""
        weights = self.sites[site]
        return weights if self._leaving is not None else [site, *(weight for weight in weights if weight in self._scales)]

    def shapes(self, site: str) -> dict[str, tuple[int, int]]:
        """The shape of the weight of each of the keys of a site."""
        weights = self.sites[site]
        return {key: self._shape(key if key in weights else weights[0]) for key in self.keys(site)}

    def _shape(self, weight: str) -> tuple[int, int]:
        linear = self._rows.layer.linear(weight)
        return int(linear.out_features), int(linear.in_features)

    def width(self, site: str) -> int:
        """Input features of a site."""
        return self._shape(self.sites[site][0])[1]

    def _note(self, site: str, x: Tensor) -> None:
        self._found.inputs[site] = x.reshape(-1, x.shape[-1])
        if site == self._last:
            raise _StopForward

    def of(self, numbered: NumberedRow) -> dict[str, tuple[Tensor, ...]]:
        """Run one row: of each key that it reaches the inputs [tokens, K], and the gradients [tokens, N] if there are any.

        Raises NonFinite.
        """
        row, hidden = numbered
        inputs: dict[str, Tensor] = {}
        self._found.inputs = inputs
        gradients = {} if self._leaving is None else self._gradients(row, hidden, self._leaving)
        if self._leaving is None:
            try:
                with torch.no_grad():
                    output = self._rows.layer(hidden)
                if self._target is not None:
                    self._rows.keep(output, self._target, row, "the output")
            except _StopForward:
                pass
        for site, x in inputs.items():
            self._rows.check_finite(x, f"the input of {self.sites[site][0].removesuffix('.weight')}", row)
        if gradients:
            weights = [(site, weight) for site in inputs for weight in self.sites[site] if weight in gradients]
            return {weight: (inputs[site].detach(), gradients[weight]) for site, weight in weights}
        return {site: (x,) for site, x in inputs.items()} | {
            weight: (x * torch.from_numpy(self._scales[weight][row, : len(x)].copy()).to(x.device)[:, None],)
            for site, x in inputs.items()
            for weight in self.sites[site]
            if weight in self._scales
        }

    def _gradients(self, row: int, hidden: Tensor, leaving: Floats) -> dict[str, Tensor]:
        outputs = self._outputs.begin()
        with torch.enable_grad():
            output = self._rows.layer(hidden.requires_grad_())
            gradients_leaving = torch.from_numpy(np.array(leaving[row])).to(hidden.device)
            entering = [] if self._target is None else [hidden]
            asked = [*entering, *outputs.values()]
            pulled = list(torch.autograd.grad(output, asked, gradients_leaving)) if asked else []
        if self._target is not None:
            self._rows.keep(pulled.pop(0), self._target, row, "the gradient")
        gradients = {weight: g.reshape(-1, g.shape[-1]) for weight, g in zip(outputs, pulled, strict=True)}
        for weight, g in gradients.items():
            if len(g):
                self._rows.check_finite(g, f"the gradient at the output of {weight.removesuffix('.weight')}", row)
        return gradients

    def close(self) -> None:
        """Remove the hooks."""
        self._outputs.close()
        for hook in self._hooks:
            hook.remove()


class _StopForward(Exception):
    """The last site is reached."""


class Sums:
    """The sums of a statistic: one for each key, on the device.

    reached  tokens that reached each key
    """

    def __init__(self, statistic: Statistic, shapes: Mapping[str, tuple[int, int]], device: str = "cpu") -> None:
        """shapes: of the weights, by key."""
        kind = torch.float64 if statistic.precise else torch.float32
        self._statistic = statistic
        self._sums = {key: torch.zeros(statistic.shape(*shape), dtype=kind, device=device) for key, shape in shapes.items()}
        self.reached = dict.fromkeys(shapes, 0)

    def add(self, rows: Sequence[Mapping[str, tuple[Tensor, ...]]], pool: ThreadPoolExecutor) -> None:
        """Add what some rows give (`Inputs.of`), in order."""
        for row in rows:
            for key, (x, *_) in row.items():
                self.reached[key] += len(x)
        step = self._statistic.tile
        tasks = [
            (key, slice(first, min(first + (step or len(total)), len(total))))
            for key, total in self._sums.items()
            for first in range(0, len(total), step or len(total))
        ]

        def run(task: tuple[str, slice]) -> None:
            key, part = task
            with torch.no_grad():
                for row in rows:
                    if key in row:
                        self._statistic.add(self._sums[key], part, *row[key])

        list(pool.map(run, tasks))

    def finish(self, key: str, tokens: int = 0) -> Any:
        """The array of a key, float32 numpy, whose memory it gives up; None if no token reached it. tokens: of the text."""
        total = self._sums.pop(key)
        if not self.reached[key]:
            return None
        with torch.no_grad():
            array = self._statistic.finish(total, self.reached[key], tokens)
        return array.float().cpu().numpy()


def batches(sizes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    """Sites in batches whose sums take at most `limit_bytes` together; one alone may take more. sizes: bytes of each site.

    >>> batches({"q": 40, "o": 40, "down": 90}, 80)
    [['q', 'o'], ['down']]
    """
    parts: list[list[str]] = []
    taken = 0
    for site, nbytes in sizes.items():
        if not parts or taken + nbytes > limit_bytes:
            parts.append([])
            taken = 0
        parts[-1].append(site)
        taken += nbytes
    return parts


def use_sums(
    rows: LayerRows,
    weights: Sequence[str],
    use: Callable[[Inputs, str, Callable[[str], Any]], None],
    statistic: Statistic = GRAM,
    *,
    span: tuple[float, float] = (0, 1),
    forward: Forward = Forward(),
) -> None:
    """Call `use` for each site, on any thread: with the inputs, the site, and what gives the array of a key (`Sums.finish`).

    rows  run through the layer once for each of the `batches` that the product's memory allows; so `use` may not change the
          layer
    span  of the progress
    """
    tokens = rows.states.shape[0] * rows.states.shape[1]

    every = Inputs(rows, weights, forward)
    every.close()
    width = 8 if statistic.precise else 4
    sizes = {
        site: sum(width * int(np.prod(statistic.shape(*shape))) for shape in every.shapes(site).values())
        for site in every.sites
    }
    parts = batches(sizes, budget(rows.context))
    share = (span[1] - span[0]) / max(1, len(parts))
    with workers(rows.context.threads, rows.device) as pool, processors(rows.context.threads, rows.device, pool) as others:
        for number, sites in enumerate(parts):
            first = span[0] + number * share
            weights_of_part = [weight for site in sites for weight in every.sites[site]]
            inputs = Inputs(rows, weights_of_part, replace(forward, target=None) if number else forward)
            sums = Sums(statistic, {k: s for site in sites for k, s in inputs.shapes(site).items()}, rows.device)
            try:
                for some in rows.batches((first, first + share * ROWS_SHARE)):
                    sums.add(list(pool.map(inputs.of, some)), pool)
                    if forward.target is not None:
                        release_pages(forward.target)
            finally:
                inputs.close()
            tasks = [partial(use, inputs, site, partial(sums.finish, tokens=tokens)) for site in sites]
            for done, _ in enumerate(others.map(lambda task: task(), tasks), 1):
                rows.progress(first + share * (ROWS_SHARE + (1 - ROWS_SHARE) * done / len(tasks)))
