"""What the products of a calibration have in common: encodings, checks of settings, places of errors, memory of Hessians.

Weights are quantised with a Hessian in the encodings EXL2 and EXL3, and as integers with scales for groups (w4a16, GPTQ, AWQ).
Each stores what the encoding of the same name in `_models/formats` stores without a Hessian, with other codes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import NonFinite, WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._features.quantisation.exl2 import matrix
from weightsmith._features.quantisation.exl3 import matrix as exl3
from weightsmith._models.formats import awq, find_encoding, gptq
from weightsmith._models.formats.compressed_tensors import writing as compressed_tensors
from weightsmith._models.formats.exl2.layout import SUFFIXES, groups_of
from weightsmith._models.formats.exl2.writing import Exl2Matrix, parse
from weightsmith._models.formats.exl3.writing import NAME as EXL3
from weightsmith._models.formats.exl3.writing import of_arrays
from weightsmith._models.formats.exl3.writing import parse as parse_exl3
from weightsmith._plans import Product
from weightsmith.abc.product import Arrays, Floats

if TYPE_CHECKING:
    from weightsmith._activations.decoder.forward import Layer
    from weightsmith._activations.sums import Inputs

_EXL2 = "exl2 "
_GROUPED = {**compressed_tensors.GROUPED, **gptq.GROUPED, **awq.GROUPED}

Shapes = list[tuple[str, tuple[int, ...]]]
"""dtype and shape of each."""


def takes_hessian(encoding: str) -> bool:
    """Whether weights in this encoding can be calibrated.

    >>> [name for name in ("exl2 4/g128", "exl3 4", "w4a16", "gptq-8bit-g64", "fp8-dynamic") if takes_hessian(name)]
    ['exl2 4/g128', 'exl3 4', 'w4a16', 'gptq-8bit-g64']
    """
    return encoding.startswith((_EXL2, EXL3)) or encoding in _GROUPED


def keeps_order(encoding: str) -> bool:
    """Whether input features must stay in their own order."""
    return encoding.startswith(_EXL2) and not parse(encoding).sort


def takes_plain_hessian(encoding: str) -> bool:
    """Whether the Hessian is factorised for each weight by itself: `quantise_plainly` instead of `quantise`."""
    return encoding.startswith(EXL3)


def quantise_plainly(weight: Floats | matrix.Unread, encoding: str, hessian: Floats | None, threads: int) -> Arrays:
    """As `quantise`, with a Hessian [K, K] as it is. threads: that may be used; the result does not depend on them."""
    return exl3.quantise_matrix(weight, hessian, parse_exl3(encoding).rate, threads).arrays


def quantise(weight: Floats | matrix.Unread, encoding: str, hessian: matrix.FactoredHessian | None) -> Arrays:
    """The stored arrays of a weight, float32 [N, K], or of what reads it. hessian: of its inputs; None rounds to nearest."""
    if encoding.startswith(_EXL2):
        return matrix.quantise_matrix(weight, hessian, groups_of(parse(encoding).params, weight.shape[1])).arrays
    plain, grouped = weight if isinstance(weight, np.ndarray) else weight.read()[0], _GROUPED[encoding]
    if not np.isfinite(plain).all():
        raise NonFinite("a weight is NaN or infinite", fix="repair the model")
    if hessian is None:
        return grouped.quantise(plain, None)
    return grouped.quantise(plain, lambda rows, scales: matrix.quantise_fixed_groups(rows, hessian, grouped.bits, scales))


def dequantise(arrays: Arrays, encoding: str, shape: tuple[int, ...]) -> Floats:
    """The weight as loaders compute it: float32 [N, K]."""
    if encoding.startswith(EXL3):
        n, k = shape
        return exl3.dequantise_matrix(of_arrays(arrays), (n, k), parse_exl3(encoding).rate)
    if not encoding.startswith(_EXL2):
        return _GROUPED[encoding].decode(arrays)
    stored: dict[str, Any] = dict(zip(SUFFIXES, arrays, strict=True))
    return matrix.dequantise_matrix(Exl2Matrix(**stored, out_features=shape[0])).astype(np.float32)


def split(weights: Mapping[str, str], specs: Mapping[str, TensorSpec], arrays: Arrays) -> Iterator[tuple[str, Arrays]]:
    """The stored arrays of each weight. weights: encodings by name; arrays: of all of them, in order."""
    rest = iter(arrays)
    for name, encoding in weights.items():
        yield name, [next(rest) for _ in find_encoding(encoding).outs(specs[name])]


class CalibratedWork(LayerWork):
    """A layer, some weights of which are quantised."""

    @staticmethod
    def takes(encoding: str) -> bool:
        """Whether weights can be in this encoding."""
        return takes_hessian(encoding)

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
            if name not in specs or not work.takes(encoding):
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
        with self.room(inputs.width(site)):
            hessian = finish(site)
            return None if hessian is None else matrix.prepare(hessian, sort=sort, threads=inputs.threads)

    @contextmanager
    def room(self, width: int) -> Iterator[None]:
        """The memory in which a Hessian of so many inputs is factorised; waits for it."""
        nbytes = matrix.PREPARE_BYTES * width**2
        with self._condition:
            self._condition.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._condition:
                self._taken -= nbytes
                self._condition.notify_all()
