"""Settings of the products of a text that runs through a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightsmith._activations.decoder import Base
from weightsmith._plans import Product, ProductSettings, TextSource


@dataclass(frozen=True, slots=True)
class Work(ProductSettings):
    """What every product depends on.

    base      the model
    packages  versions of the packages that its forward pass depends on
    """

    base: Base
    packages: Mapping[str, str]

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class TextRowsWork(Work):
    """The rows of tokens of a text.

    text        that is cut into rows
    vocabulary  rows of the model's embedding
    bos         token that begins half of the rows; None: no such token
    """

    text: TextSource
    vocabulary: int
    bos: int | None


@dataclass(frozen=True, slots=True)
class LayerWork(Work):
    """One layer.

    layer   its index; where `HEAD` allows it, the number of layers: what follows the last one, the final norm and the head
    states  the product of what enters it
    """

    HEAD = False

    layer: int
    states: str

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states}

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if not 0 <= self.layer < self.base.layers + self.HEAD:
            return f"there is no layer {self.layer}"
        return "" if self.needs <= set(product.needs) else "it does not need what its settings name"


@dataclass(frozen=True, slots=True)
class GradientWork(LayerWork):
    """The gradients of what enters a layer.

    gradients  the product whose first array is the gradients of what leaves it; "" after the last layer
    weights    the linear layers at whose outputs gradients are looked at, in the order of the arrays
    seed       of the labels
    rows       after the last layer: the product of the rows of tokens whose next tokens are the labels; "": they are drawn
    """

    HEAD = True

    gradients: str
    weights: tuple[str, ...]
    seed: int
    rows: str = ""

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, *filter(None, [self.gradients, self.rows])}


@dataclass(frozen=True, slots=True)
class StatisticWork(LayerWork):
    """A statistic of the linear layers of a layer.

    kind       a name of `statistics.STATISTICS`
    gradients  the product of the gradients of what leaves the layer; "" if the statistic has none
    weights    names of the linear layers' weights
    """

    kind: str
    gradients: str
    weights: tuple[str, ...]

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, *filter(None, [self.gradients])}
