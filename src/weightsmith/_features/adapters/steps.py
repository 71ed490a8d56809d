"""Steps that copy, cast, scale or reorder factors for other programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._features.adapters.options import ConvertSettings
from weightsmith._models.formats.gguf.cuts import CutEncoding, Piece
from weightsmith._plans import COPY, Block, Gather, PlanDraft, Read, Settings, Step, Table

PLAIN_DTYPES = ("F32", "F16", "BF16")
"""Names of the dtypes that factors are stored in."""


def stored_dtype(spec: TensorSpec, settings: ConvertSettings) -> DType:
    """The dtype that a factor is stored in: the requested one, or else its own if it is plain, or else float32."""
    if settings.out_dtype is not None:
        return settings.out_dtype
    return spec.dtype if spec.dtype.name in PLAIN_DTYPES else DTYPES["F32"]


def factor_step(draft: PlanDraft, name: str, spec: TensorSpec, factor: float, view: Any = None, axis: int = 0) -> Step:
    """The step that copies a factor or multiplies it by a number. view: the order of its rows or columns, as in `ordered`"""
    read = Read(0, spec.name) if view is None else Read(0, spec.name, ordered(draft, spec, view, axis))
    if factor == 1:
        return Step(replace(spec, name=name), COPY, (read,))
    settings = draft.add_settings(Settings({"normalize": False}, ({"weight": factor},)))
    return Step(TensorSpec(name, DTYPES["F32"], spec.shape), "linear", (read,), settings=settings)


def transposed(step: Step, name: str, dtype: DType) -> Step:
    """The step of a factor that is stored transposed, under this name."""
    height = step.out.shape[0]
    encoding = CutEncoding(height, ((dtype, (Piece(0, height, transposed=True),)),))
    (out,) = encoding.outs(step.out)
    return replace(step, encoding=encoding.name, stored=(replace(out, name=name),))


def ordered(draft: PlanDraft, spec: TensorSpec, order: Any, axis: int) -> Gather:
    """Rows (axis 0) or columns (axis 1) of a factor in another order: int64 numbers of them, -1 for zeros."""
    rows, cols = spec.shape
    return Gather(draft.add_table(Table.of(order)), Block(0, rows, cols, cols), 1 if axis else 0)
