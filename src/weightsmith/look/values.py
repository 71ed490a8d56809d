"""What `weightsmith.diff` returns: frozen values, sums of them, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median_low
from typing import Any

from weightsmith.look.files import FileDifference
from weightsmith.look.models import Place, finite, groups


@dataclass(frozen=True, slots=True)
class Leading:
    """The largest singular values of a difference.

    values  estimates, descending; never larger than the true ones
    upper   the true ones are at most so large, but for a probability of about 1 %
    rank    how many are above the rounding noise of the stored weights; None if the difference is not of low rank
    """

    values: tuple[float, ...]
    upper: tuple[float, ...]
    rank: int | None

    @property
    def largest(self) -> float:
        """The largest."""
        return self.values[0] if self.values else 0.0


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A logical matrix in two models, A and B, and its delta: B - A.

    elements   of the matrix
    delta, a, b   Frobenius norms
    cosine     of the two, as vectors; 1 if both are zero
    changed    elements that differ
    largest    the largest magnitude of the delta
    noise      Frobenius norm of the error with which B's values were rounded to its dtype, as an estimate
    leading    of the weights of linear layers that differ; else None
    """

    name: str
    place: Place
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    elements: int
    delta: float
    a: float
    b: float
    cosine: float
    changed: int
    largest: float
    noise: float
    leading: Leading | None

    @property
    def share(self) -> float:
        """delta / a; 0 if both are zero."""
        return self.delta / self.a if self.a else math.inf if self.delta else 0.0

    @property
    def changed_share(self) -> float:
        """Of the elements."""
        return self.changed / self.elements

    @property
    def stable_rank(self) -> float:
        """delta² over the square of the largest singular value, or a little more; nan where it is not known."""
        return (self.delta / self.leading.largest) ** 2 if self.leading is not None and self.leading.largest else math.nan


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """Some matrices together: a layer, a part of all layers, or all. Fields as for `TensorDifference`.

    ranks  the smallest, the middle and the largest rank of those that are of low rank; None if there is none
    full   how many differ and are not of low rank
    """

    name: str
    tensors: int
    elements: int
    delta: float
    a: float
    cosine: float
    changed: int
    ranks: tuple[int, int, int] | None
    full: int

    @property
    def share(self) -> float:
        """delta / a; 0 if both are zero."""
        return self.delta / self.a if self.a else math.inf if self.delta else 0.0

    @property
    def changed_share(self) -> float:
        """Of the elements."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A row of an embedding or head: its token, and ‖delta‖ / ‖row of A‖."""

    tensor: str
    row: int
    token: str
    share: float


@dataclass(frozen=True)
class Difference:
    """What B differs in from A. `weightsmith.diff` makes it.

    names       of A and B, as they were given
    files       config, tokenizer, chat template
    tensors     in A's order
    only_a, only_b   tensors that one of them has
    different   tensors that cannot be compared: name, and shape and dtype of each
    moved       rows of embeddings and heads that moved most, those that moved most first
    quantised   what the weights of A and B are decoded from; "" for plain weights
    merged_of   the models that B is a merge of, if its card says that it is one; else None
    reading     what the difference probably is, in sentences
    """

    names: tuple[str, str]
    files: FileDifference
    tensors: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    different: tuple[tuple[str, tuple[str, ...]], ...]
    moved: tuple[MovedRow, ...]
    quantised: tuple[str, str]
    merged_of: tuple[str, ...] | None
    reading: tuple[str, ...] = ()

    @cached_property
    def layers(self) -> tuple[GroupDifference, ...]:
        """Each layer, in order, then what is outside."""
        return self._grouped(lambda place: place.group)

    @cached_property
    def parts(self) -> tuple[GroupDifference, ...]:
        """Each part over all layers: `self_attn.q_proj`."""
        return self._grouped(lambda place: place.part)

    @cached_property
    def total(self) -> GroupDifference:
        """All tensors."""
        return _group("all", self.tensors)

    def _grouped(self, key: Callable[[Place], str]) -> tuple[GroupDifference, ...]:
        found = groups([tensor.place for tensor in self.tensors], key)
        return tuple(_group(name, [self.tensors[i] for i in members]) for name, members in found.items())

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is not finite."""
        found: dict[str, Any] = finite(
            {
                "a": self.names[0],
                "b": self.names[1],
                "reading": list(self.reading),
                "files": asdict(self.files),
                "total": _group_json(self.total),
                "layers": [_group_json(group) for group in self.layers],
                "parts": [_group_json(group) for group in self.parts],
                "tensors": [_tensor_json(tensor) for tensor in self.tensors],
                "moved_rows": [asdict(row) for row in self.moved],
                "only_a": list(self.only_a),
                "only_b": list(self.only_b),
                "different_shapes": {name: list(specs) for name, specs in self.different},
            }
        )
        return found


def _tensor_json(tensor: TensorDifference) -> dict[str, Any]:
    place = tensor.place
    found = {"name": tensor.name, "stack": place.stack, "layer": place.layer, "part": place.part, "shape": list(tensor.shape)}
    found |= {"dtypes": list(tensor.dtypes), "elements": tensor.elements}
    found |= {
        "delta_norm": tensor.delta,
        "a_norm": tensor.a,
        "b_norm": tensor.b,
        "share": tensor.share,
        "cosine": tensor.cosine,
    }
    found |= {"changed": tensor.changed, "largest": tensor.largest, "rounding_noise": tensor.noise}
    if tensor.leading is not None:
        leading = tensor.leading
        found["singular_values"] = {"values": list(leading.values), "upper": list(leading.upper), "rank": leading.rank}
        found["stable_rank"] = tensor.stable_rank
    return found


def _group_json(group: GroupDifference) -> dict[str, Any]:
    found = asdict(group)
    return {**found, "share": group.share, "changed_share": group.changed_share}


def _group(name: str, tensors: Sequence[TensorDifference]) -> GroupDifference:
    delta, a, b = (math.sqrt(sum(getattr(tensor, what) ** 2 for tensor in tensors)) for what in ("delta", "a", "b"))
    products = sum(tensor.cosine * tensor.a * tensor.b for tensor in tensors)
    ranks = [tensor.leading.rank for tensor in tensors if tensor.leading is not None]
    low = [rank for rank in ranks if rank is not None]
    return GroupDifference(
        name,
        len(tensors),
        sum(tensor.elements for tensor in tensors),
        delta,
        a,
        1.0 if delta == 0 else min(1.0, products / (a * b)) if a * b else 0.0,
        sum(tensor.changed for tensor in tensors),
        (min(low), median_low(low), max(low)) if low else None,
        sum(rank is None for rank in ranks),
    )
