"""What the products of a calibration have in common: checks of settings, places of errors, memory of Hessians.

An encoding with a `hessian` chooses the codes of a weight (`Encoding.quantise`); it stores what it stores without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats import Encoding, find_encoding, hessians
from weightsmith._models.structure.projections import site_of
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats
from weightsmith.abc.stored import FactoredHessian, HessianForm

if TYPE_CHECKING:
    from weightsmith._activations.decoder.forward import Layer
    from weightsmith._activations.sums import Inputs

Hessian = Floats | FactoredHessian | None
Shapes = list[tuple[str, tuple[int, ...]]]
"""dtype and shape of each."""


def split(weights: Mapping[str, str], specs: Mapping[str, TensorSpec], arrays: Arrays) -> Iterator[tuple[str, Arrays]]:
    """The stored arrays of each weight. weights: encodings by name; arrays: of all of them, in order."""
    rest = iter(arrays)
    for name, encoding in weights.items():
        yield name, [next(rest) for _ in find_encoding(encoding).outs(specs[name])]


class CalibratedWork(LayerWork):
    """A layer, some weights of which are quantised."""

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and their encodings."""
        raise NotImplementedError

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The arrays of the product. specs: of the layer's tensors, by name."""
        raise NotImplementedError

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if problem := super().problem(product, shapes):
            return problem
        specs = {step.out.name: step.out for step in product.steps}
        forms: dict[str, HessianForm] = {}
        for name, setting in self.encodings():
            try:
                encoding = find_encoding(setting)
            except WeightsmithError as error:
                return error.finding.what
            if name not in specs or encoding.hessian == "no":
                return "it has no step for a weight, or cannot calibrate its encoding"
            if forms.setdefault(site_of(name), encoding.hessian) != encoding.hessian:
                return "weights with the same inputs take the Hessian in different forms"
            if why := encoding.refusal(specs[name]):
                return why
        arrays = [(out.dtype.name, out.shape) for out in product.outs]
        return "" if arrays == self.shapes(specs) else "its arrays are not those of its settings"


def set_weight(layer: Layer, name: str, weight: Floats) -> None:
    """Give a linear layer another weight."""
    import torch

    with torch.no_grad():
        layer.linear(name).weight.copy_(torch.from_numpy(weight))


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors of weightsmith are of this place."""
    try:
        yield
    except WeightsmithError as error:
        error.finding = replace(error.finding, where=where)
        raise


def factorised(hessian: Hessian, form: HessianForm, threads: int) -> Hessian:
    """A Hessian in the form that an encoding takes. threads: that may compute; the result does not depend on their number."""
    if form == "whole" or not isinstance(hessian, np.ndarray):
        return hessian
    return hessians.prepare(hessian, sort=form == "sorted", threads=threads)


class Factors:
    """Factorises Hessians on any thread, as many at once as `limit_bytes` allow. One alone may take more."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._taken = 0
        self._condition = threading.Condition()

    @contextmanager
    def hessian(
        self, inputs: Inputs, site: str, finish: Callable[[str], Any], encodings: Iterable[Encoding]
    ) -> Iterator[Hessian]:
        """The Hessian of a site, as encodings take it; None if no token reached it. Memory is counted while it is whole.

        finish     gives the array of a key: see `activations.sums.use_sums`
        encodings  of the weights of the site, which all take it in one form
        """
        with self.room(inputs.width(site)):
            plain: Hessian = finish(site)
            form: HessianForm = next((encoding.hessian for encoding in encodings), "sorted")
            if form == "whole":
                yield plain
                return
            factored = factorised(plain, form, inputs.threads)
            del plain
        yield factored

    @contextmanager
    def room(self, width: int) -> Iterator[None]:
        """The memory in which a Hessian of so many inputs is factorised; waits for it."""
        nbytes = hessians.PREPARE_BYTES * width**2
        with self._condition:
            self._condition.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._condition:
                self._taken -= nbytes
                self._condition.notify_all()
