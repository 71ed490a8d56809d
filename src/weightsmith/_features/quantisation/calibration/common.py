"""What the products of a calibration have in common: checks of their settings, places of errors, memory that threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._features.quantisation.calibration.schemes import takes_hessian
from weightsmith._features.quantisation.exl2 import matrix
from weightsmith._models.formats import find_encoding
from weightsmith._plans import Product
from weightsmith.abc.product import Floats

if TYPE_CHECKING:
    from weightsmith._activations.decoder.forward import Layer
    from weightsmith._activations.sums import Inputs

Shapes = list[tuple[str, tuple[int, ...]]]
"""dtype and shape of each."""


class CalibratedWork(LayerWork):
    """A layer, some weights of which are quantised."""

    def encodings(self) -> Iterable[tuple[str, str]]:
        """The names of the weights, and their encodings."""
        raise NotImplementedError

    def shapes(self, specs: Mapping[str, TensorSpec]) -> Shapes:
        """The arrays of the product. specs: of the layer's tensors, by name."""
        raise NotImplementedError

    def problem(self) -> str:
        """Why the settings contradict each other, or ""."""
        return ""

    @classmethod
    def check(cls, product: Product) -> str:
        """Why the settings of a product are invalid, or ""."""
        if problem := super().check(product) or cls.of(product).problem():
            return problem
        work, specs = cls.of(product), {step.out.name: step.out for step in product.steps}
        for name, encoding in work.encodings():
            if name not in specs or not takes_hessian(encoding):
                return "it has no step for a weight, or cannot calibrate its encoding"
            try:
                if why := find_encoding(encoding).refusal(specs[name]):
                    return why
            except WeightsmithError as error:
                return error.finding.what
        made = [(out.dtype.name, out.shape) for out in product.outs]
        return "" if made == work.shapes(specs) else "its arrays are not those of its settings"


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


class Factors:
    """Factorises Hessians on any thread, as many at once as `limit_bytes` allow. One alone may take more."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._taken = 0
        self._condition = threading.Condition()

    def prepare(
        self, inputs: Inputs, site: str, finish: Callable[[str], Any], *, sort: bool = True
    ) -> matrix.FactoredHessian | None:
        """The Hessian of a site, in the order of its diagonal (sort) or its own; None if no token reached it.

        finish  gives the array of a key: see `activations.sums.use_sums`
        """
        nbytes = matrix.PREPARE_BYTES * inputs.width(site) ** 2
        with self._condition:
            self._condition.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            hessian = finish(site)
            return None if hessian is None else matrix.prepare(hessian, sort=sort)
        finally:
            with self._condition:
                self._taken -= nbytes
                self._condition.notify_all()
