"""What `weightsmith.diff` returns: frozen values, sums of them, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median, median_low
from typing import Any

from weightsmith._base.report.blocks import Mark, Report, Reported, finite_or_mark, report_by, written
from weightsmith._base.text import count
from weightsmith._execution.report import share_of
from weightsmith._models.structure.vocabulary import EMBEDDINGS, HEADS
from weightsmith._reports.look.differences import WIDTH
from weightsmith._reports.look.models import NAMES_ONLY, FileDifference, LayerPlace, by_layer_and_part, json_of
from weightsmith._reports.look.surveys import NonFiniteCounts, mark_of, sentences, together


@dataclass(frozen=True, slots=True)
class Leading:
    """The largest singular values of a difference.

    values  estimates, descending; never larger than the true ones; () if they are beyond what float32 holds
    upper   the true ones are at most so large, but for a probability of about 1%
    rank    how many are above the rounding noise of the stored weights; None if that is not known: more than half as many as
            a sketch of a larger matrix has columns (128), without a gap after them; or hidden in the rounding
    """

    values: Sequence[float]
    upper: Sequence[float]
    rank: int | None

    @property
    def largest(self) -> float:
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
    place: LayerPlace
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
    nonfinite: tuple[NonFiniteCounts, NonFiniteCounts] = (NonFiniteCounts(), NonFiniteCounts())
    common_rows: int = 0
    magnitudes: Sequence[int] = ()

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
        """The rank of the delta: `Mark.FULL` if it is min(shape), `Mark.HIGH` if it is only known to be high."""
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
        """The share of the elements that changed."""
        return self.changed / self.elements

    @property
    def stable_rank(self) -> float:
        """delta² over the square of the largest singular value, or a little more; nan where it is not known."""
        return (self.delta / self.leading.largest) ** 2 if self.leading is not None and self.leading.largest else math.nan

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = {"name": self.name, **asdict(self.place), "shape": list(self.shape), "dtypes": list(self.dtypes)}
        values |= {"elements": self.elements, "delta_norm": self.delta, "a_norm": self.a, "b_norm": self.b}
        values |= {"share": self.share, "cosine": self.cosine, "changed": self.changed, "largest": self.largest}
        values |= {"rounding_noise": self.noise, "nonfinite": _nonfinite_json(self.nonfinite)}
        values["magnitudes"] = list(self.magnitudes)
        if self.leading is not None:
            values["singular_values"] = {
                "values": list(self.leading.values),
                "upper": list(self.leading.upper),
                "rank": self.leading.rank,
            }
            values["full_rank"] = None if self.rank is Mark.HIGH else self.rank is Mark.FULL
            values["stable_rank"] = self.stable_rank
        return values


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
    nonfinite: tuple[NonFiniteCounts, NonFiniteCounts]

    @property
    def share(self) -> float:
        """As for `TensorDifference`."""
        return share_of(self.delta, self.a)

    @property
    def changed_share(self) -> float:
        """The share of the elements that changed; nan if there are none."""
        return self.changed / self.elements if self.elements else math.nan

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = asdict(self) | {"nonfinite": _nonfinite_json(self.nonfinite)}
        return {**values, "share": self.share, "changed_share": self.changed_share}


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A row of an embedding or head: its token, and ‖delta‖ / ‖row of A‖; infinite if the row of A is zero."""

    tensor: str
    row: int
    token: str
    share: float


@dataclass(frozen=True)
class Difference(Reported):
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

    def __repr__(self) -> str:
        """Short: a dataclass's own would list every tensor."""
        changed = sum(1 for tensor in self.tensors if tensor.changed)
        share = written(finite_or_mark(self.total.share), "share")
        names = " and ".join(self.names)
        return f"<Difference of {names}: {changed:,} of {len(self.tensors):,} tensors changed, {share} of the norm>"

    @cached_property
    def layers(self) -> tuple[GroupDifference, ...]:
        """Each layer, in order, then what is outside."""
        return tuple(_group(name, tensors) for name, tensors in by_layer_and_part(self.tensors)[0].items())

    @cached_property
    def parts(self) -> tuple[GroupDifference, ...]:
        """Each part over all layers: `self_attn.q_proj`."""
        return tuple(_group(name, tensors) for name, tensors in by_layer_and_part(self.tensors)[1].items())

    @cached_property
    def total(self) -> GroupDifference:
        """All tensors."""
        return _group("all", self.tensors)

    def report(self) -> Report:
        return report_by("_reports.look.reports:difference_report", self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; null for what is undefined or infinite."""
        names = "a b reading files total layers parts tensors moved_rows only_a only_b different_shapes"
        a, b = self.names
        return json_of(self, names, a=a, b=b, moved_rows=self.moved, different_shapes=dict(self.different))


def _nonfinite_json(counts: tuple[NonFiniteCounts, NonFiniteCounts]) -> dict[str, Any]:
    return {name: asdict(count) for name, count in zip("ab", counts, strict=True)}


def _group(name: str, tensors: Sequence[TensorDifference]) -> GroupDifference:
    measured = [tensor for tensor in tensors if tensor.measured]
    delta, a, b = (_norm([getattr(tensor, what) for tensor in measured]) for what in ("delta", "a", "b"))
    products = math.fsum(tensor.cosine * tensor.a * tensor.b for tensor in measured if tensor.a and tensor.b)
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
        len(measured),
        (min(low), median_low(low), max(low)) if low else None,
        ranks.count(Mark.FULL),
        ranks.count(Mark.HIGH),
        (together(tensor.nonfinite[0] for tensor in tensors), together(tensor.nonfinite[1] for tensor in tensors)),
    )


def _norm(norms: Sequence[float]) -> float:
    """The norm of some vectors together; nan for none."""
    return math.hypot(*norms) if norms else math.nan


MOST = 0.9
"""What counts as nearly all."""

ALIKE = 0.25
"""Shares of rounding in matrices of one format differ at most so much, relative to their median."""

KIN = 0.5
"""The cosine of two models from which on one may be a fine-tune of the other. Of fine-tunes it is near 1."""

COARSE = 0.65
"""The largest share that rounding can be: of normal numbers, one bit for each weight leaves an error of 0.6 of their norm."""

FLAT = 2.0
"""The largest singular value of white noise [m, n] is 1/√m + 1/√n of its norm; up to so much of that counts as white."""


def read_difference(difference: Difference) -> tuple[str, ...]:
    """The sentences, the most telling first."""
    changed = [tensor for tensor in difference.tensors if tensor.changed]
    sentences = [*_unmeasured(difference), *_kind(difference, changed), *_vocabulary(difference, changed), *_files(difference)]
    short = [tensor for tensor in difference.tensors if tensor.common_rows]
    if short:
        sentences.append(f"Compared in the rows that both have, the first {short[0].common_rows:,}: {_names(short)}.")
    if difference.chosen:
        sentences.append(f"Only tensors that match {_list([repr(glob) for glob in difference.chosen])} were compared.")
    if difference.only_a or difference.only_b or difference.different:
        counts = (
            (len(difference.only_a), "that only A has"),
            (len(difference.only_b), "that only B has"),
            (len(difference.different), "with another shape in B"),
        )
        sentences.append(f"Not compared: {_counted(counts, 'tensor')}.")
    if difference.merged_of is not None:
        made_of = f" of {', '.join(difference.merged_of)}" if difference.merged_of else ""
        sentences.append(f"The card of B says that it is a merge{made_of}.")
    return tuple(sentences)


def _unmeasured(difference: Difference) -> list[str]:
    """NaN and infinities in each model, and what is left out of norms and cosines."""
    texts = sentences("AB", [(tensor.name, tensor.nonfinite) for tensor in difference.tensors])
    left_out = [tensor for tensor in difference.tensors if not tensor.measured]
    beyond = [tensor for tensor in left_out if not any(tensor.nonfinite)]
    if beyond:
        texts.append(f"Too large or too small to be measured: {count(len(beyond), 'tensor')}, the first {beyond[0].name}.")
    if left_out and len(left_out) == len(difference.tensors):
        texts.append("No norm and no cosine is defined.")
    elif left_out:
        texts.append(f"Norms and cosines of several tensors leave {'it' if len(left_out) == 1 else 'them'} out.")
    return texts


def _kind(difference: Difference, changed: Sequence[TensorDifference]) -> list[str]:
    if not difference.tensors:
        return [f"The models have no {'such tensor' if difference.chosen else 'tensor'} in common that can be compared."]
    if not changed:
        part = bool(difference.chosen) or any(tensor.common_rows for tensor in difference.tensors)
        return [f"The same weights: every tensor that {'was compared' if part else 'both have'} is equal in every element."]
    changed = [tensor for tensor in changed if tensor.measured]
    if not changed:
        return []
    matrices = [tensor for tensor in changed if tensor.linear]
    where = _where(difference, changed)
    for quantised, name in zip(difference.quantised, ("A", "B"), strict=True):
        if quantised:
            share = _share(changed)
            size = f" of {_percent(share)}" if math.isfinite(share) else ""
            return [f"{name} is quantised ({quantised}): differences{size} have its rounding in them."]
    low = [tensor for tensor in matrices if tensor.low_rank]
    signal = [tensor.leading.rank for tensor in low if tensor.leading is not None and tensor.leading.rank]
    if matrices and len(low) >= MOST * len(matrices) and signal:
        ranks = f"about {round(median(signal))}" if max(signal) - min(signal) > 0 else str(signal[0])
        where = _where(difference, [tensor for tensor in low if tensor.rank])
        text = f"A change of low rank, as LoRA makes it, or a merge of such models: rank {ranks} in {where}"
        noise = math.sqrt(sum(t.noise**2 for t in matrices)) / math.sqrt(sum(t.delta**2 for t in matrices))
        rounding = f", stored with rounding errors of {_percent(min(1.0, noise))} of its size" if noise > 0.1 else ""
        others = [tensor for tensor in changed if not tensor.low_rank]
        return [f"{text}{rounding}.", *([f"Not of low rank, or no linear layer: {_names(others)}."] if others else [])]
    if matrices and len(low) >= MOST * len(matrices):
        return [
            "Rounding, not training: nothing but what storing the weights in another dtype changes, "
            f"in {_where(difference, low)}."
        ]
    if matrices and not low and _is_rounding(difference, matrices):
        return [
            f"White noise, as rounding makes it: about {_percent(median(t.share for t in matrices))} in {where}, and no "
            "norm differs. B may be quantised and dequantised again, or A may be."
        ]
    if not matrices:
        return [f"No linear layer differs, only {_names(changed)}."]
    share, moved = sum(t.changed for t in changed) / sum(t.elements for t in changed), _share(changed)
    by = f", by {_percent(moved)} in norm" if math.isfinite(moved) else ", from zero"
    differ = f"{_percent(share)} of the elements of these tensors differ{by}."
    cosine = difference.total.cosine
    unlike = ", as between models that were not made from each other" if cosine < KIN else ""
    as_tuned = ", as full fine-tuning makes it" if cosine >= KIN else unlike
    return [f"A change of {_ranks(matrices)}{as_tuned}: {where}; {differ}"]


def _ranks(matrices: Sequence[TensorDifference]) -> str:
    """`full rank`, or how many matrices are of what rank."""
    ranks = [tensor.rank for tensor in matrices]
    full, high, unknown = (ranks.count(mark) for mark in (Mark.FULL, Mark.HIGH, Mark.UNDEFINED))
    if full >= MOST * len(ranks):
        return "full rank"
    if full + high >= MOST * len(ranks):
        return f"full rank, or of a rank above {WIDTH // 2}" if high else "full rank"
    low = sum(tensor.low_rank for tensor in matrices)
    between = len(ranks) - full - high - unknown - low
    counts = (
        (low, "of low rank"),
        (between, "of a higher rank"),
        (full + high, "of full or high rank"),
        (unknown, "of unknown rank"),
    )
    return f"mixed ranks ({_counted(counts, 'weight')})"


def _is_rounding(difference: Difference, matrices: Sequence[TensorDifference]) -> bool:
    if not all(tensor.share <= COARSE and tensor.rank in (Mark.FULL, Mark.HIGH) for tensor in matrices):
        return False
    shares = [tensor.share for tensor in matrices]
    middle = median(shares)
    alike = sum(abs(share - middle) <= ALIKE * middle for share in shares) >= MOST * len(shares)
    norms = any(tensor.changed for tensor in difference.tensors if len(tensor.shape) == 1)
    white = 0
    for tensor in matrices:
        edge = sum(1 / math.sqrt(side) for side in tensor.shape) * tensor.delta
        white += tensor.leading is not None and 0 < tensor.leading.largest <= FLAT * edge
    return alike and not norms and white >= MOST * len(matrices)


def _share(tensors: Sequence[TensorDifference]) -> float:
    a = math.sqrt(sum(tensor.a**2 for tensor in tensors))
    return math.sqrt(sum(tensor.delta**2 for tensor in tensors)) / a if a else math.inf


def _where(difference: Difference, changed: Sequence[TensorDifference]) -> str:
    """`self_attn.q_proj and v_proj of layers 12 to 23`."""
    inside = [tensor for tensor in changed if tensor.place.stack]
    if not inside:
        return _names(changed)
    texts = []
    for stack in dict.fromkeys(tensor.place.stack for tensor in inside):
        changed_here = [tensor for tensor in inside if tensor.place.stack == stack]
        every = [tensor for tensor in difference.tensors if tensor.place.stack == stack]
        layers, all_layers = {t.place.layer for t in changed_here}, {t.place.layer for t in every}
        linear = {t.place.part for t in every if t.linear or len(t.shape) == 2}
        parts = list(dict.fromkeys(t.place.part for t in changed_here))
        what = _list(parts)
        if set(parts) == linear:
            what = "all linear layers"
        elif set(parts) == {t.place.part for t in every}:
            what = "all tensors"
        where = "all layers" if layers == all_layers else in_layers(layers)
        name = "" if len({t.place.stack for t in inside}) == 1 else f" of {stack.rstrip('.')}"
        there = sum(t.place.part in parts and t.place.layer in layers for t in every)
        some = (
            f"{len(changed_here):,} of the {there:,} tensors of " if len(changed_here) < there else ""
        )  # some experts, some parts of some layers
        texts.append(f"{some}{what} of {where}{name}")
    outside = [tensor for tensor in changed if not tensor.place.stack]
    return "; ".join([*texts, *([_names(outside)] if outside else [])])


def in_layers(numbers: Iterable[int]) -> str:
    """Layers by their numbers.

    >>> in_layers([29]), in_layers([0, 1])
    ('layer 29', 'layers 0 to 1')
    """
    layers = list(numbers)
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as runs.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0 to 2, 5, 7 to 8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in runs)


def _names(tensors: Sequence[TensorDifference]) -> str:
    return _list(list(dict.fromkeys(tensor.place.part for tensor in tensors)))


def _list(names: Sequence[str], most: int = 8) -> str:
    shown = [*names[:most], *([f"{len(names) - most:,} more"] if len(names) > most else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _vocabulary(difference: Difference, changed: Sequence[TensorDifference]) -> list[str]:
    """What is said of the embedding and the head, if anything else differs."""
    names = {
        name: [t for t in difference.tensors if not t.place.stack and t.place.part.split(".")[-1] in names]
        for name, names in _KINDS
    }
    texts = []
    for name, tensors in names.items():
        if tensors and changed and not any(tensor.changed for tensor in tensors):
            texts.append(f"The {name} is frozen: not one of its elements differs.")
    return texts


_KINDS = (("embedding", EMBEDDINGS), ("head", HEADS))


def _files(difference: Difference) -> list[str]:
    files = difference.files
    keys = [change.key for change in files.config if change.key.split(".")[-1] not in NAMES_ONLY]
    texts = [f"config.json differs in {_list(keys)}."] if keys else []
    tokenizer = files.tokenizer
    if tokenizer is not None and not tokenizer.same:
        if 0 in tokenizer.sizes:
            texts.append(f"Only {'B' if tokenizer.sizes[0] == 0 else 'A'} has a tokenizer.")
        else:
            counts = (
                (len(tokenizer.added), "that only B has"),
                (len(tokenizer.removed), "that only A has"),
                (tokenizer.moved, "with another id"),
            )
            texts.append(f"The tokenizers differ: {_counted(counts, 'token')}.")
    if files.templates is not None:
        a, b = files.templates
        texts.append("The chat templates differ." if a and b else f"Only {'A' if a else 'B'} has a chat template.")
    return texts


def _counted(counts: Iterable[tuple[int, str]], noun: str) -> str:
    """Those that are not zero, with their nouns: `2 tensors that only A has`."""
    return ", ".join(f"{count(n, noun)} {what}" for n, what in counts if n)


def _percent(share: float) -> str:
    """A share with two digits.

    >>> _percent(0.123), _percent(0.000456), _percent(1)
    ('12%', '0.046%', '100%')
    """
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"
