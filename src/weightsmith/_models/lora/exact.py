"""Adapters of other kinds as LoRA, without any loss: what some kinds add to a weight is a product of two matrices.

The factors are computed while they are read, in float64, and rounded to float32. Their ranks follow from the kind: that of a
LoHa is squared, those of the matrices of a LoKr are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.checkpoint import Checkpoint, ModelFolder
from weightsmith._models.formats.decoded import DecodedTensors, Weight, read_all
from weightsmith._models.lora.adapter import Adapter, Factors, OtherParts
from weightsmith._models.lora.forms import PAIRS, FactorNames
from weightsmith._models.lora.kinds import KINDS
from weightsmith.abc.adapter import AdapterModule, ExactFactors
from weightsmith.abc.tensors import Tensors

_FLAT_NAMES = next(pair for pair in PAIRS if pair.a == ".lora_down.weight")


@dataclass(frozen=True, slots=True)
class ExactFactor(Weight):
    """A factor that is computed from the tensors of a module.

    kind  its name in `kinds.KINDS`; `code` is the identity of one that an installed package brings
    is_b  whether it is B, else A
    """

    kind: str
    code: str
    module: AdapterModule
    is_b: bool

    @property
    def preferred_rows(self) -> int:
        return self.spec.shape[0]

    def decode(self, stored: Tensors, first: int, values: npt.NDArray[np.float32]) -> None:
        exact = KINDS.get(self.kind).exact
        assert exact is not None
        arrays = {
            part: read_all(stored, spec.name).astype(np.float64).reshape(spec.shape) for part, spec in self.module.parts.items()
        }
        try:
            left, right = exact.factors(self.module, arrays)
        except ValueError as error:
            raise FormatError(str(error), where=self.module.name, fix="save the adapter again") from error
        whole = left if self.is_b else right
        values[:] = whole.reshape(-1)[first : first + values.size]


def needs_base(adapter: Adapter) -> bool:
    """Whether the shapes of its modules are in the base alone."""
    kinds = (KINDS.get(parts.kind).exact for parts in adapter.others.values())
    return any(exact is not None and exact.shape is None for exact in kinds)


def as_lora(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> Adapter:
    """The adapter with factors in place of tensors of other kinds; itself if it is a LoRA. Closing it closes the adapter.

    shapes  module → outputs and inputs of its weight, for modules whose tensors do not tell them (`needs_base`)

    Raises Unsupported for kinds that are no LoRA, FormatError for tensors that do not fit together.
    """
    if not adapter.others:
        return adapter
    refused = {KINDS.get(parts.kind).title for parts in adapter.others.values() if KINDS.get(parts.kind).exact is None}
    where = adapter.checkpoint.ref
    if refused:
        what = (
            f"it is {adapter.title}: what {' and '.join(sorted(refused))} does to a weight is no product of two small matrices"
        )
        raise Unsupported(what, where=where)
    weights: list[ExactFactor] = []
    updates, problems = dict(adapter.updates), list[str]()
    pairs = dict(adapter.file.pairs) if adapter.file is not None else {}
    names = _FLAT_NAMES if adapter.file is not None and adapter.file.flat else PAIRS[0]
    for module, parts in adapter.others.items():
        try:
            a, b = _factors(adapter, module, parts, names, shapes.get(module, ()))
        except ValueError as error:
            problems.append(f"{module}: {error}")
            continue
        weights += [a, b]
        updates[module] = Factors(a.spec.name, b.spec.name, False, 1.0)
        pairs[module] = names
    if problems:
        what = f"{len(problems):,} of its modules are no LoRA"
        raise Unsupported(what, where=where, details=problems[:8])
    checkpoint = adapter.checkpoint
    source = DecodedTensors(checkpoint.source, weights, (), where)
    exact = Checkpoint(where, source, ModelFolder.like(checkpoint), metadata=checkpoint.metadata, notes=checkpoint.notes)
    file = None if adapter.file is None else replace(adapter.file, pairs=pairs)
    return replace(adapter, checkpoint=exact, updates=updates, others={}, file=file)


def _factors(
    adapter: Adapter, module: str, parts: OtherParts, names: FactorNames, shape: tuple[int, ...]
) -> Iterator[ExactFactor]:
    """A and B of a module. shape: what the base says. Raises ValueError for tensors that do not fit together."""
    kind, specs = KINDS.get(parts.kind), adapter.checkpoint.specs
    exact = kind.exact
    assert isinstance(exact, ExactFactors)
    headers = {part: specs[stored] for part, stored in parts.parts.items()}
    bare = AdapterModule(module, (), headers, parts.settings)
    if exact.shape is not None:
        shape = exact.shape(bare)
    elif len(shape) != 2:
        raise ValueError("the base has no linear layer there" if shape else "how many inputs it has is in the base alone")
    described = replace(bare, shape=shape)
    if problems := list(kind.problems(described)):
        raise ValueError("; ".join(problems))
    rank = exact.rank(described)
    if not 0 < rank < 1 << 20 or 0 in described.shape:
        raise ValueError(f"its factors have rank {rank}")
    outputs, *others = described.shape
    ones = (1,) * (len(others) - 1)
    stored = tuple(spec.name for spec in headers.values())
    code = KINDS.identity(parts.kind)
    for ending, factor_shape, is_b in ((names.a, (rank, *others), False), (names.b, (outputs, rank, *ones), True)):
        spec = TensorSpec(f"{module}{ending}", DTYPES["F32"], factor_shape)
        yield ExactFactor(spec, stored, DTYPES["F32"], parts.kind, code, described, is_b)
