"""A difference in words: what was probably done to A to make B.

Each sentence follows from numbers of the difference alone, but for those that say what a card says. What kind of change it is:

same            nothing differs
low rank        nearly all matrices that differ are of low rank above the rounding noise: LoRA, or a merge of such models
rounding        nothing but rounding noise in nearly all matrices that differ: stored in another dtype
white noise     the same share in each matrix that differs, norms untouched: quantised and dequantised
full            the rest: all of full rank, of a rank that is full or too high to be told, or some of either

NaN and infinities are counted first. The other sentences are about the tensors without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from weightsmith._base.pages import Mark
from weightsmith._base.text import count
from weightsmith._models.structure.vocabulary import EMBEDDINGS, HEADS
from weightsmith._reports.look.differences import WIDTH
from weightsmith._reports.look.files import NAMES_ONLY
from weightsmith._reports.look.nonfinite import sentences

if TYPE_CHECKING:
    from weightsmith._reports.look.values import Difference, TensorDifference

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


def read_difference(found: Difference) -> tuple[str, ...]:
    """The sentences, the most telling first."""
    changed = [tensor for tensor in found.tensors if tensor.changed]
    sentences = [*_unmeasured(found), *_kind(found, changed), *_vocabulary(found, changed), *_files(found)]
    short = [tensor for tensor in found.tensors if tensor.common_rows]
    if short:
        sentences.append(f"Compared in the rows that both have, the first {short[0].common_rows:,}: {_names(short)}.")
    if found.chosen:
        sentences.append(f"Only tensors that match {_list([repr(glob) for glob in found.chosen])} were compared.")
    if found.only_a or found.only_b or found.different:
        counts = (
            (len(found.only_a), "that only A has"),
            (len(found.only_b), "that only B has"),
            (len(found.different), "with another shape in B"),
        )
        sentences.append(f"Not compared: {_counted(counts, 'tensor')}.")
    if found.merged_of is not None:
        made_of = f" of {', '.join(found.merged_of)}" if found.merged_of else ""
        sentences.append(f"The card of B says that it is a merge{made_of}.")
    return tuple(sentences)


def _unmeasured(found: Difference) -> list[str]:
    """NaN and infinities in each model, and what is left out of norms and cosines."""
    texts = sentences("AB", [(tensor.name, tensor.nonfinite) for tensor in found.tensors])
    left_out = [tensor for tensor in found.tensors if not tensor.measured]
    beyond = [tensor for tensor in left_out if not any(tensor.nonfinite)]
    if beyond:
        texts.append(f"Too large or too small to be measured: {count(len(beyond), 'tensor')}, the first {beyond[0].name}.")
    if left_out and len(left_out) == len(found.tensors):
        texts.append("No norm and no cosine is defined.")
    elif left_out:
        texts.append(f"Norms and cosines of several tensors leave {'it' if len(left_out) == 1 else 'them'} out.")
    return texts


def _kind(found: Difference, changed: Sequence[TensorDifference]) -> list[str]:
    if not found.tensors:
        return [f"The models have no {'such tensor' if found.chosen else 'tensor'} in common that can be compared."]
    if not changed:
        part = bool(found.chosen) or any(tensor.common_rows for tensor in found.tensors)
        return [f"The same weights: every tensor that {'was compared' if part else 'both have'} is equal in every element."]
    changed = [tensor for tensor in changed if tensor.measured]
    if not changed:
        return []
    matrices = [tensor for tensor in changed if tensor.linear]
    where = _where(found, changed)
    for quantised, name in zip(found.quantised, ("A", "B"), strict=True):
        if quantised:
            share = _share(changed)
            size = f" of {_percent(share)}" if math.isfinite(share) else ""
            return [f"{name} is quantised ({quantised}): differences{size} have its rounding in them."]
    low = [tensor for tensor in matrices if tensor.low_rank]
    signal = [tensor.leading.rank for tensor in low if tensor.leading is not None and tensor.leading.rank]
    if matrices and len(low) >= MOST * len(matrices) and signal:
        ranks = f"about {round(median(signal))}" if max(signal) - min(signal) > 0 else str(signal[0])
        where = _where(found, [tensor for tensor in low if tensor.rank])
        text = f"A change of low rank, as LoRA makes it, or a merge of such models: rank {ranks} in {where}"
        noise = math.sqrt(sum(t.noise**2 for t in matrices)) / math.sqrt(sum(t.delta**2 for t in matrices))
        rounding = f", stored with rounding errors of {_percent(min(1.0, noise))} of its size" if noise > 0.1 else ""
        others = [tensor for tensor in changed if not tensor.low_rank]
        return [f"{text}{rounding}.", *([f"Not of low rank, or no linear layer: {_names(others)}."] if others else [])]
    if matrices and len(low) >= MOST * len(matrices):
        return [
            f"Rounding, not training: nothing but what storing the weights in another dtype changes, in {_where(found, low)}."
        ]
    if matrices and not low and _is_rounding(found, matrices):
        return [
            f"White noise, as rounding makes it: about {_percent(median(t.share for t in matrices))} in {where}, and no "
            "norm differs. B may be quantised and dequantised again, or A may be."
        ]
    if not matrices:
        return [f"No linear layer differs, only {_names(changed)}."]
    share, moved = sum(t.changed for t in changed) / sum(t.elements for t in changed), _share(changed)
    by = f", by {_percent(moved)} in norm" if math.isfinite(moved) else ", from zero"
    differ = f"{_percent(share)} of the elements of these tensors differ{by}."
    cosine = found.total.cosine
    unlike = ", as between models of which neither was made from the other" if cosine < KIN else ""
    made = ", as full fine-tuning makes it" if cosine >= KIN else unlike
    return [f"A change of {_ranks(matrices)}{made}: {where}; {differ}"]


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


def _is_rounding(found: Difference, matrices: Sequence[TensorDifference]) -> bool:
    if not all(tensor.share <= COARSE and tensor.rank in (Mark.FULL, Mark.HIGH) for tensor in matrices):
        return False
    shares = [tensor.share for tensor in matrices]
    middle = median(shares)
    alike = sum(abs(share - middle) <= ALIKE * middle for share in shares) >= MOST * len(shares)
    norms = any(tensor.changed for tensor in found.tensors if len(tensor.shape) == 1)
    white = 0
    for tensor in matrices:
        edge = sum(1 / math.sqrt(side) for side in tensor.shape) * tensor.delta
        white += tensor.leading is not None and 0 < tensor.leading.largest <= FLAT * edge
    return alike and not norms and white >= MOST * len(matrices)


def _share(tensors: Sequence[TensorDifference]) -> float:
    a = math.sqrt(sum(tensor.a**2 for tensor in tensors))
    return math.sqrt(sum(tensor.delta**2 for tensor in tensors)) / a if a else math.inf


def _where(found: Difference, changed: Sequence[TensorDifference]) -> str:
    """`self_attn.q_proj and v_proj of layers 12 to 23`."""
    inside = [tensor for tensor in changed if tensor.place.stack]
    if not inside:
        return _names(changed)
    texts = []
    for stack in dict.fromkeys(tensor.place.stack for tensor in inside):
        own = [tensor for tensor in inside if tensor.place.stack == stack]
        every = [tensor for tensor in found.tensors if tensor.place.stack == stack]
        layers, all_layers = {t.place.layer for t in own}, {t.place.layer for t in every}
        linear = {t.place.part for t in every if t.linear or len(t.shape) == 2}
        parts = list(dict.fromkeys(t.place.part for t in own))
        what = _list(parts)
        if set(parts) == linear:
            what = "all linear layers"
        elif set(parts) == {t.place.part for t in every}:
            what = "all tensors"
        where = "all layers" if layers == all_layers else in_layers(layers)
        name = "" if len({t.place.stack for t in inside}) == 1 else f" of {stack.rstrip('.')}"
        there = sum(t.place.part in parts and t.place.layer in layers for t in every)
        some = (
            f"{len(own):,} of the {there:,} tensors of " if len(own) < there else ""
        )  # some experts, some parts of some layers
        texts.append(f"{some}{what} of {where}{name}")
    outside = [tensor for tensor in changed if not tensor.place.stack]
    return "; ".join([*texts, *([_names(outside)] if outside else [])])


def in_layers(numbers: Iterable[int]) -> str:
    """Layers by their numbers.

    >>> in_layers([29]), in_layers([0, 1])
    ('layer 29', 'layers 0 to 1')
    """
    found = list(numbers)
    return f"layer{'s' if len(found) > 1 else ''} {ranges(found)}"


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


def _vocabulary(found: Difference, changed: Sequence[TensorDifference]) -> list[str]:
    """Of the embedding and the head, if anything else differs."""
    names = {
        name: [t for t in found.tensors if not t.place.stack and t.place.part.split(".")[-1] in names] for name, names in _KINDS
    }
    texts = []
    for name, tensors in names.items():
        if tensors and changed and not any(tensor.changed for tensor in tensors):
            texts.append(f"The {name} is frozen: not one of its elements differs.")
    return texts


_KINDS = (("embedding", EMBEDDINGS), ("head", HEADS))


def _files(found: Difference) -> list[str]:
    files = found.files
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
    ('12 %', '0.046 %', '100 %')
    """
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
