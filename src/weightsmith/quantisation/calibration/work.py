"""Settings of the products of a calibration, as records and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from weightsmith.decoder import Base
from weightsmith.plans import Product
from weightsmith.plans.codec import has_type
from weightsmith.quantisation.calibration.rows import Calibration


@dataclass(frozen=True, slots=True)
class Work:
    """What every product of a calibration depends on.

    base      the model
    packages  versions of the packages that its forward pass depends on
    """

    base: Base
    packages: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """To the settings of a product."""
        return asdict(self)

    @classmethod
    def of(cls, product: Product) -> Self:
        """From the settings of a product."""
        data = dict(product.settings)
        return cls(**data | {"base": Base(**data["base"])})

    @classmethod
    def check(cls, product: Product) -> str:
        """Why the settings of a product are invalid, or ""."""
        return "" if has_type(product.settings, cls) else "its settings are not those of a calibration"


@dataclass(frozen=True, slots=True)
class EmbeddingWork(Work):
    """The states that enter the first layer.

    calibration  the text
    bos          token that begins half of the rows; None: no such token
    """

    calibration: Calibration
    bos: int | None

    @classmethod
    def of(cls, product: Product) -> Self:
        """From the settings of a product."""
        data = dict(product.settings)
        return cls(**data | {"base": Base(**data["base"]), "calibration": Calibration(**data["calibration"])})


@dataclass(frozen=True, slots=True)
class LayerWork(Work):
    """One layer.

    layer    its index; the number of layers: what follows the last one, the final norm and the head
    states   the product of what enters it
    weights  the encoding of each weight to quantise, by name
    made     the product of its quantised weights, if those are to be used; ""
    """

    layer: int
    states: str
    weights: Mapping[str, str]
    made: str


@dataclass(frozen=True, slots=True)
class ImportanceWork(Work):
    """The importances of a layer's weights.

    layer    its index
    states   the product of what enters it
    weights  their names, in the order of the product's arrays
    """

    layer: int
    states: str
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlocksWork(Work):
    """The blocks of a layer to measure.

    layer   its index
    states  the product of what enters it
    blocks  the options of each block, by its key: the encoding of each of its weights, by name
    """

    layer: int
    states: str
    blocks: Mapping[str, tuple[Mapping[str, str], ...]]


@dataclass(frozen=True, slots=True)
class GradientWork(Work):
    """The gradients of a layer.

    layer      its index; the number of layers: what follows the last one, the final norm and the head
    states     the product of what enters it
    gradients  the product whose first array is the gradients of what leaves it; "" after the last layer
    weights    the linear layers at whose outputs gradients are looked at, in the order of the arrays
    seed       of the labels
    """

    layer: int
    states: str
    gradients: str
    weights: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class MeasureWork(Work):
    """One layer to measure.

    layer       its index
    states      the product of what enters it
    gradients   the product of its gradients, for the same weights in the same order
    candidates  the encodings to try for each weight, by name
    """

    layer: int
    states: str
    gradients: str
    candidates: Mapping[str, tuple[str, ...]]
