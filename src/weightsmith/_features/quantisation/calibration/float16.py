"""Hidden states that float16 cannot hold: two products, and a report for formats that programs run in float16.

`largest_state` is the largest magnitude of what leaves a layer, taken from the states of a calibration before they are removed.
`largest_states` puts those of all layers together and reports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightsmith._activations.work import LayerWork
from weightsmith._base.errors import Finding, Unsupported
from weightsmith._base.options import named
from weightsmith._base.report import Column, Table
from weightsmith._base.report.blocks import Block
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import markdown_table
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._features.quantisation.calibration.layer import LAYER_BY_LAYER
from weightsmith._plans import Product, ProductSettings
from weightsmith.abc.product import Arrays, Floats

LARGEST = 65504.0
"""The largest float16."""


@dataclass(frozen=True, slots=True)
class LargestStateWork(LayerWork):
    """Settings of `largest_state`: `states` leave the layer.

    refused_by  the program that the model is for, which cannot run it with larger states; "": they are reported
    """

    refused_by: str

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if problem := LayerWork.problem(self, product, shapes):
            return problem
        return "" if [(out.dtype.name, out.shape) for out in product.outs] == [("F32", (1,))] else "it has not one number"


def _largest(context: ProductContext) -> Arrays:
    from weightsmith._files.arrays import release_pages

    work = LargestStateWork.of(context.product)
    [states] = context.arrays(work.states)
    largest = np.float32(0)
    for row in states:
        largest = max(largest, np.abs(row).max())
        release_pages(states)
    if work.refused_by and largest > LARGEST:
        what = f"hidden states of up to {largest:.3g} leave the layer, and {work.refused_by} computes in float16, "
        raise Unsupported(
            f"{what}which holds {LARGEST:,.0f}",
            where=f"layer {work.layer}, {work.base.label}",
            fix=f"choose a format for a program that computes in bfloat16, such as w4a16, or leave out {named('engine')}",
            state="Nothing was published.",
        )
    return [np.array([largest], np.float32)]


@dataclass(frozen=True, slots=True)
class LargestStates:
    """The report: the largest magnitude of the states that leave each layer.

    layers   their numbers
    largest  float32 [layers]
    fixed    programs run the format in float16 alone
    """

    layers: tuple[int, ...]
    largest: Floats
    fixed: bool

    @property
    def _beyond(self) -> list[tuple[int, float]]:
        return [(layer, x) for layer, x in zip(self.layers, self.largest.tolist(), strict=True) if x > LARGEST]

    def _summary(self) -> str:
        named = ", ".join(f"{x:.3g} behind layer {layer}" for layer, x in self._beyond[:8])
        rest = f", and {len(self._beyond) - 8} more layers" if len(self._beyond) > 8 else ""
        return f"hidden states leave the range of float16, which holds {LARGEST:,.0f}: {named}{rest}"

    def _fix(self) -> str:
        if self.fixed:
            return "choose a format for a program that computes in bfloat16, such as w4a16 or a gguf format"
        return "run the model in bfloat16, which is not the default of every program (vLLM: --dtype bfloat16)"

    def files(self) -> dict[str, bytes]:
        """None."""
        return {}

    def section(self) -> str:
        """A section for the model card; "" if float16 holds all states."""
        if not self._beyond:
            return ""
        rows = [(str(layer), f"{x:.4g}") for layer, x in self._beyond]
        text = f"On the calibration text, {self._summary()}. In float16, the model gives NaN: {self._fix()}."
        return f"\n## Range of the hidden states\n\n{text}\n\n{markdown_table(('behind layer', 'largest magnitude'), rows)}\n"

    def blocks(self) -> Sequence[Block]:
        """The table of all layers, if float16 cannot hold the states of one."""
        if not self._beyond:
            return []
        columns = Column("behind layer"), Column("largest magnitude", "number", f"float16 holds {LARGEST:,.0f}")
        rows = tuple((str(layer), x) for layer, x in zip(self.layers, self.largest.tolist(), strict=True))
        return [Table("Range of the hidden states", columns, rows)]

    def warnings(self, where: str) -> list[Finding]:
        """A warning if float16 cannot hold the states."""
        return [Finding(self._summary(), "calibration", fix=self._fix())] if self._beyond else []


@dataclass(frozen=True, slots=True)
class LargestStatesWork(ProductSettings):
    """Settings of `largest_states`.

    layers  the number of each
    fixed   programs run the format in float16 alone
    """

    layers: tuple[int, ...]
    fixed: bool

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if any(layer < 0 for layer in self.layers):
            return "there is no such layer"
        arrays = [(out.dtype.name, out.shape) for out in product.outs]
        fits = len(self.layers) == len(product.needs) and arrays == [("F32", (len(self.layers),))]
        return "" if fits else "it has not a number for each layer"


def collected(measured: Sequence[Product], *, fixed: bool) -> list[Product]:
    """The product that reports the largest states of all layers; [] if none are measured. fixed: as of the settings."""
    if not measured:
        return []
    name, layers = "largest states", tuple(LargestStateWork.of(product).layer for product in measured)
    out = TensorSpec(name, DTYPES["F32"], (len(measured),))
    settings = LargestStatesWork(layers, fixed).to_json()
    return [Product(name, "largest_states", (out,), settings, (), (), tuple(product.name for product in measured))]


def _collect(context: ProductContext) -> Arrays:
    largest = [context.arrays(name)[0] for name in context.product.needs]
    return [np.concatenate(largest).astype(np.float32)]


def _report(product: Product, arrays: Arrays) -> LargestStates:
    work = LargestStatesWork.of(product)
    return LargestStates(work.layers, arrays[0], work.fixed)


LAYER = ProductKind(LAYER_BY_LAYER, compute=_largest, check=LargestStateWork.check, device=True)
ALL = ProductKind(LAYER_BY_LAYER, compute=_collect, check=LargestStatesWork.check, report=_report)
