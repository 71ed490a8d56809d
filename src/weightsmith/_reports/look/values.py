"""What `weightsmith.diff` returns: frozen values, sums of them, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median_low
from typing import Any, ClassVar

from weightsmith._base.pages import Mark, Shown
from weightsmith._base.pages.values import finite_or_mark, written
from weightsmith._execution.distance import share_of
from weightsmith._reports.look.files import FileDifference
from weightsmith._reports.look.models import Place, by_layer_and_part, json_values
from weightsmith._reports.look.nonfinite import NonFinite, mark_of, together


@dataclass(frozen=True, slots=True)
class Leading:
    """The largest singular values of a difference.

    values  estimates, descending; never larger than the true ones; () if they are beyond what float32 holds
    upper   the true ones are at most so large, but for a probability of about 1 %
    rank    how many are above the rounding noise of the stored weights; None if that is not known: more than half as many as
            a sketch of a larger matrix has columns (128), without a gap after them; or hidden in the rounding
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
    delta, a, b   Frobenius norms; nan where an element is NaN or infinite, or a sum is beyond what float64 holds. `delta` is 0
               where nothing differs
    cosine     of the two, as vectors; nan where a norm is zero or nan
    changed    elements that differ; NaN is equal to NaN
    largest    the largest magnitude of the delta; nan as for `delta`
    noise      Frobenius norm of the error with which B's values were rounded to its dtype, as an estimate
    linear     the weight of a linear layer
    leading    of the weights of linear layers that differ in finite numbers; else None
    nonfinite  NaN and infinities in A and in B
    common_rows  of an embedding whose models have different numbers of tokens: the first rows, which are compared; else 0
    magnitudes  elements of a sample of the delta by powers of two, from 2**-40 on; without zeros
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
    linear: bool
    leading: Leading | None
    nonfinite: tuple[NonFinite, NonFinite] = (NonFinite(), NonFinite())
    common_rows: int = 0
    magnitudes: tuple[int, ...] = ()

    @property
    def measured(self) -> bool:
        """Norms and products are numbers: nothing is NaN, infinite, or beyond what float64 holds."""
        return math.isfinite(self.a + self.b + self.delta)

    @property
    def share(self) -> float:
        """delta / a; 0 if nothing differs, infinite if only a is zero, nan if either is."""
        return share_of(self.delta, self.a)

    @property
    def rank(self) -> int | Mark:
        """Of the delta; `Mark.FULL` if it is min(shape), `Mark.HIGH` if it is not known how high it is."""
        if not self.changed:
            return Mark.SAME
        if not self.linear:
            return Mark.NOTHING
        if self.leading is None or not self.leading.values:
            return mark_of(self.nonfinite) or Mark.UNDEFINED
        if self.leading.rank is None:
            return Mark.HIGH
        return Mark.FULL if self.leading.rank == min(self.shape) else self.leading.rank

    @property
    def low_rank(self) -> bool:
        """At most half of min(shape) singular values are above the rounding noise."""
        return self.leading is not None and self.leading.rank is not None and 2 * self.leading.rank <= min(self.shape)

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

    measured   how many have norms and products that are numbers: `delta`, `a` and `cosine` are of them alone; nan without any
    ranks      the smallest, the middle and the largest rank of the deltas whose rank is known and not full; None without any
    full       how many deltas are of full rank
    high       how many have a rank that is not known: see `Leading`
    nonfinite  NaN and infinities in A and in B
    """

    name: str
    tensors: int
    elements: int
    delta: float
    a: float
    cosine: float
    changed: int
    measured: int
    ranks: tuple[int, int, int] | None
    full: int
    high: int
    nonfinite: tuple[NonFinite, NonFinite]

    @property
    def share(self) -> float:
        """As for `TensorDifference`."""
        return share_of(self.delta, self.a)

    @property
    def changed_share(self) -> float:
        """Of the elements; nan if there are none."""
        return self.changed / self.elements if self.elements else math.nan


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A row of an embedding or head: its token, and ‖delta‖ / ‖row of A‖; infinite if the row of A is zero."""

    tensor: str
    row: int
    token: str
    share: float


@dataclass(frozen=True)
class Difference(Shown):
    """The differences between models A and B. Returned by `weightsmith.diff`.

    names       of A and B, as they were given
    files       config, tokenizer, chat template
    tensors     in A's order
    only_a, only_b   tensors that one of them has
    different   tensors that cannot be compared: name, and shape and dtype of each
    moved       rows of embeddings and heads that moved most, those that moved most first
    quantised   what the weights of A and B are decoded from; "" for plain weights
    merged_of   the models that B is a merge of, if its card says that it is one; else None
    chosen      the globs of tensors that were compared; () for all
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
    chosen: tuple[str, ...] = ()
    reading: tuple[str, ...] = ()

    page_function: ClassVar[str] = "_reports.look.pages:difference_page"

    def __repr__(self) -> str:
        """Short: a dataclass's own would list every tensor."""
        changed = sum(1 for tensor in self.tensors if tensor.changed)
        share = written(finite_or_mark(self.total.share), "share")
        names = " and ".join(self.names)
        return f"<Difference of {names}: {changed:,} of {len(self.tensors):,} tensors changed, {share} of the norm>"

    @cached_property
    def layers(self) -> tuple[GroupDifference, ...]:
        """Each layer, in order, then what is outside."""
        return tuple(_group(name, own) for name, own in by_layer_and_part(self.tensors)[0].items())

    @cached_property
    def parts(self) -> tuple[GroupDifference, ...]:
        """Each part over all layers: `self_attn.q_proj`."""
        return tuple(_group(name, own) for name, own in by_layer_and_part(self.tensors)[1].items())

    @cached_property
    def total(self) -> GroupDifference:
        """All tensors."""
        return _group("all", self.tensors)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined or infinite."""
        return json_values(
            a=self.names[0],
            b=self.names[1],
            reading=self.reading,
            files=asdict(self.files),
            total=_group_json(self.total),
            layers=[_group_json(group) for group in self.layers],
            parts=[_group_json(group) for group in self.parts],
            tensors=[_tensor_json(tensor) for tensor in self.tensors],
            moved_rows=[asdict(row) for row in self.moved],
            only_a=self.only_a,
            only_b=self.only_b,
            different_shapes={name: list(specs) for name, specs in self.different},
        )


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
    found["nonfinite"] = _nonfinite_json(tensor.nonfinite)
    found["magnitudes"] = list(tensor.magnitudes)
    if tensor.leading is not None:
        leading, full = tensor.leading, None if tensor.rank is Mark.HIGH else tensor.rank is Mark.FULL
        found["singular_values"] = {"values": list(leading.values), "upper": list(leading.upper), "rank": leading.rank}
        found["full_rank"] = full
        found["stable_rank"] = tensor.stable_rank
    return found


def _group_json(group: GroupDifference) -> dict[str, Any]:
    found = asdict(group) | {"nonfinite": _nonfinite_json(group.nonfinite)}
    return {**found, "share": group.share, "changed_share": group.changed_share}


def _nonfinite_json(found: tuple[NonFinite, NonFinite]) -> dict[str, Any]:
    return {name: own.to_json() for name, own in zip("ab", found, strict=True)}


def _group(name: str, tensors: Sequence[TensorDifference]) -> GroupDifference:
    own = [tensor for tensor in tensors if tensor.measured]
    delta, a, b = (_norm([getattr(tensor, what) for tensor in own]) for what in ("delta", "a", "b"))
    products = math.fsum(tensor.cosine * tensor.a * tensor.b for tensor in own if tensor.a and tensor.b)
    ranks = [tensor.rank for tensor in tensors]
    low = [rank for rank in ranks if not isinstance(rank, Mark)]
    return GroupDifference(
        name,
        len(tensors),
        sum(tensor.elements for tensor in tensors),
        delta,
        a,
        (1.0 if delta == 0 else max(-1.0, min(1.0, products / a / b))) if a > 0 and b > 0 else math.nan,
        sum(tensor.changed for tensor in tensors),
        len(own),
        (min(low), median_low(low), max(low)) if low else None,
        ranks.count(Mark.FULL),
        ranks.count(Mark.HIGH),
        (together(tensor.nonfinite[0] for tensor in tensors), together(tensor.nonfinite[1] for tensor in tensors)),
    )


def _norm(norms: Sequence[float]) -> float:
    """Of some vectors together; nan of none."""
    return math.hypot(*norms) if norms else math.nan
