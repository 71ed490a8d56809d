"""The interface of a kind of adapter: how its files name its tensors, and how these change the rows of a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import TensorSpec

Rows = npt.NDArray[np.float64]
Arrays = Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One module that an adapter changes, as far as headers and config say.

    name      as the adapter's files name it
    shape     of the weight [outputs, inputs], of a convolution [outputs, inputs, height, width]. Models that store
              [inputs, outputs] are turned round before a kind sees them
    parts     the adapter's tensors of this module and those of all modules, by the part of the name
    settings  adapter_config.json, with the numbers that patterns give this module. Of a single file: `alpha`, if it has one
    tensor    "weight" or "bias": what is changed. A bias has the shape [outputs, 1]

    The methods raise ValueError for a setting of a wrong type; the error names the module.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, TensorSpec]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensor: str = "weight"

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.shape[0]

    @property
    def inputs(self) -> int:
        """Columns of the weight as a matrix: of a convolution, inputs times the elements of a kernel."""
        return math.prod(self.shape[1:])

    def has(self, *parts: str) -> bool:
        """Whether the adapter has all of these tensors for the module."""
        return all(part in self.parts for part in parts)

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number of the config."""
        value = self.settings.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ValueError(f"{key} is {value!r:.40}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of the config."""
        value = self.settings.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{key} is {value!r:.40}, not a finite number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false of the config; null is false."""
        value = self.settings.get(key, default)
        if value not in (True, False, None):
            raise ValueError(f"{key} is {value!r:.40}, not true or false")
        return bool(value)


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ExactFactors:
    """How a kind is a LoRA: what it adds to a weight is the product of two matrices, whatever the weight is.

    shape    module without a shape → the shape of its weight [outputs, inputs], of a convolution with its kernel: its tensors
             tell it. None: they do not tell the number of inputs, so the base is asked
    rank     module → the rank of the factors
    factors  module, its tensors (float64) → left [outputs, rank] and right [rank, inputs], whose product is all that is added.
             A kernel counts as a matrix

    `shape` and `rank` look at headers alone, and raise ValueError for a module without such factors. `rank` is told the shape.
    """

    shape: Callable[[AdapterModule], tuple[int, ...]] | None
    rank: Callable[[AdapterModule], int]
    factors: Callable[[AdapterModule, Arrays], tuple[Rows, ...]]


def full_rank(kind: Callable[[], AdapterKind]) -> ExactFactors:
    """The factors of a kind that adds to a weight what does not depend on the weight: all of that, and the identity.

    kind  returns the kind. Cost: one matrix as large as the weight
    """

    def factors(module: AdapterModule, arrays: Arrays) -> tuple[Rows, ...]:
        whole = np.zeros((module.outputs, module.inputs))
        kind().apply(module, kind().prepare(module, arrays), whole, 0)
        one = np.eye(min(whole.shape))
        return (whole, one) if module.inputs <= module.outputs else (one, whole)

    return ExactFactors(None, lambda module: min(module.outputs, module.inputs), factors)


def no_keys() -> Mapping[str, str]:
    """A kind without patterns."""
    return {}


@dataclass(frozen=True)
class AdapterKind:
    """A kind of adapter.

    title     as messages name it: "LoHa"
    types     `peft_type` of its adapter_config.json; () if it is in files without a config alone
    parts     last parts of the names of a module's tensors: "hada_w1_a". PEFT may put `.weight` behind them
    shapes    module → the shape that each of its tensors must have. Names only those that it uses; one that is missing, has
              another shape or is not named is an error. Raises ValueError for a module that the kind cannot change
    prepare   module, its tensors (float64) → the arrays that `change` needs. Called once for a module, and kept
              while there is space
    change    module, those arrays, rows of the weight (float64 [n, inputs], changed in place), number of the first of them.
              The rows may be any of the weight's, and what becomes of one must not depend on the others that come with it.
              None: the arrays are left [outputs, rank] and right [rank, inputs], and left @ right is added to the weight
    shared    tensors that all modules share: "vera_A". A file may also repeat them for each module
    used      keys of the config that change the result
    unused    keys that matter only in training
    patterns  key → the key of the patterns that give modules other values: {"r": "rank_pattern"}
    biases    whether the bias of a module is changed too, if it has one: `shapes` and the others are then called for it, too
    of_biases  parts that change the bias alone. A module that has one must have a bias; one that has no others keeps its weight
    vectors   norms, whose weights are vectors, may be changed too
    replaces  the tensors take the place of the module's own; no function is called
    integers  parts that hold whole numbers
    exact     how it is a LoRA, so that adapters of this kind merge with others; None: it is none
    """

    title: str
    types: tuple[str, ...]
    parts: tuple[str, ...]
    shapes: Callable[[AdapterModule], Shapes] = lambda module: {}
    prepare: Callable[[AdapterModule, Arrays], tuple[Rows, ...]] = lambda module, arrays: ()
    change: Callable[[AdapterModule, tuple[Rows, ...], Rows, int], None] | None = None
    shared: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    patterns: Mapping[str, str] = field(default_factory=no_keys)
    biases: Callable[[AdapterModule], bool] = lambda module: False
    of_biases: frozenset[str] = frozenset()
    vectors: bool = False
    replaces: bool = False
    integers: frozenset[str] = frozenset()
    exact: ExactFactors | None = None

    def problems(self, module: AdapterModule) -> Iterator[str]:
        """What is wrong with the tensors of a module; all sizes are known from headers."""
        try:
            shapes = self.shapes(module)
        except ValueError as error:
            yield str(error)
            return
        for part, shape in shapes.items():
            spec = module.parts.get(part)
            if spec is None:
                yield f"it has no {part}"
            elif spec.shape != shape:
                yield f"{part} is {list(spec.shape)}, and {list(shape)} is what config and weight {list(module.shape)} ask for"
            elif not spec.dtype.floating and part not in self.integers:
                yield f"{part} is {spec.dtype}, no floating numbers"
        yield from (f"{part} has no use there" for part in module.parts if part not in shapes)

    def apply(self, module: AdapterModule, arrays: tuple[Rows, ...], rows: Rows, first: int) -> None:
        """Change rows of the weight in place, from number `first` on."""
        if self.change is not None:
            self.change(module, arrays, rows, first)
            return
        from weightsmith._kernels.combine import add_matrix_product

        left, right = arrays
        add_matrix_product(np.ascontiguousarray(left[first : first + len(rows)]), right, rows)

    def of_bias(self, module: AdapterModule) -> AdapterModule:
        """The same for the bias of a module."""
        return replace(module, shape=(module.outputs, 1), tensor="bias")
