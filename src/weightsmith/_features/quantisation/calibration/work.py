"""Settings of the products of a calibration, as records and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightsmith._activations.work import LayerWork


@dataclass(frozen=True, slots=True)
class QuantisedWork(LayerWork):
    """The quantised weights of a layer, or of the head.

    weights  the encoding of each weight to quantise, by name
    """

    HEAD = True

    weights: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class QuantisedStatesWork(LayerWork):
    """What leaves a layer with quantised weights.

    weights  the encoding of each of them, by name
    made     the product that makes them
    """

    weights: Mapping[str, str]
    made: str

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.made}


@dataclass(frozen=True, slots=True)
class BlocksWork(LayerWork):
    """The blocks of a layer to measure.

    blocks  the options of each block, by its key: the encoding of each of its weights, by name
    """

    blocks: Mapping[str, tuple[Mapping[str, str], ...]]


@dataclass(frozen=True, slots=True)
class MeasureWork(LayerWork):
    """One layer to measure.

    gradients   the product of its gradients, for the same weights in the same order
    candidates  the encodings to try for each weight, by name
    """

    gradients: str
    candidates: Mapping[str, tuple[str, ...]]

    @property
    def needs(self) -> set[str]:
        """The products that the settings name."""
        return {self.states, self.gradients}
