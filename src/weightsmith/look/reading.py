"""A difference in words: what was probably done to A to make B.

Each sentence follows from numbers of the difference alone, but for those that say what a card says. What kind of change it is:

same            nothing differs
low rank        nearly all matrices that differ are of low rank above the rounding noise: LoRA, or a merge of such models
rounding        the same share of white noise in every matrix that differs, norms untouched: quantised and dequantised
full            the rest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from weightsmith.look.files import NAMES_ONLY
from weightsmith.structure.vocabulary import EMBEDDINGS, HEADS
from weightsmith.text import count

if TYPE_CHECKING:
    from weightsmith.look.values import Difference, TensorDifference

MOST = 0.9
"""What counts as nearly all."""

ALIKE = 0.25
"""Shares of rounding in matrices of one format differ at most so much, relative to their median."""

FLAT = 2.0
"""The largest singular value of white noise [m, n] is 1/√m + 1/√n of its norm; up to so much of that counts as white."""


def read_difference(found: Difference) -> tuple[str, ...]:
    """The sentences, the most telling first."""
    changed = [tensor for tensor in found.tensors if tensor.changed]
    sentences = [*_kind(found, changed), *_vocabulary(found, changed), *_files(found)]
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


def _kind(found: Difference, changed: Sequence[TensorDifference]) -> list[str]:
    if not found.tensors:
        return ["The models have no tensor in common."]
    if not changed:
        return ["The same weights: every tensor that both have is equal in every element."]
    if any(math.isnan(tensor.delta) for tensor in changed):
        names = [tensor.name for tensor in changed if math.isnan(tensor.delta)]
        where = f"{count(len(names), 'tensor')}, the first {names[0]}"
        return [f"NaN or infinities in {where}: `weightsmith inspect --stats` counts them."]
    matrices = [tensor for tensor in changed if tensor.leading is not None]
    where = _where(found, changed)
    for quantised, name in zip(found.quantised, ("A", "B"), strict=True):
        if quantised:
            return [
                f"{name} is quantised ({quantised}): differences of {_percent(_share(matrices))} have its rounding in them."
            ]
    low = [tensor for tensor in matrices if tensor.leading is not None and tensor.leading.rank is not None]
    signal = [tensor.leading.rank for tensor in low if tensor.leading is not None and tensor.leading.rank]
    if matrices and len(low) >= MOST * len(matrices) and signal:
        ranks = f"about {round(median(signal))}" if max(signal) - min(signal) > 0 else str(signal[0])
        text = f"A change of low rank, as LoRA makes it, or a merge of such models: rank {ranks} in {where}"
        noise = math.sqrt(sum(t.noise**2 for t in matrices)) / math.sqrt(sum(t.delta**2 for t in matrices))
        rounding = f", stored with rounding errors of {_percent(min(1.0, noise))} of its size" if noise > 0.1 else ""
        return [f"{text}{rounding}."]
    if matrices and not low and _is_rounding(found, matrices):
        return [
            f"Rounding, not training: white noise of about {_percent(median(t.share for t in matrices))} in {where}, and no "
            "norm differs. B may be quantised and dequantised again, or A may be."
        ]
    if not matrices:
        return [f"No linear layer differs, only {_names(changed)}."]
    trained = f"A change of full rank, as full fine-tuning makes it: {where}"
    share = sum(t.changed for t in changed) / sum(t.elements for t in changed)
    return [f"{trained}; {_percent(share)} of the elements of these tensors differ, by {_percent(_share(changed))} in norm."]


def _is_rounding(found: Difference, matrices: Sequence[TensorDifference]) -> bool:
    shares = [tensor.share for tensor in matrices]
    middle = median(shares)
    alike = sum(abs(share - middle) <= ALIKE * middle for share in shares) >= MOST * len(shares)
    norms = any(tensor.changed for tensor in found.tensors if len(tensor.shape) == 1)
    white = 0
    for tensor in matrices:
        edge = sum(1 / math.sqrt(side) for side in tensor.shape) * tensor.delta
        white += tensor.leading is not None and tensor.leading.largest <= FLAT * edge
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
        linear = {t.place.part for t in every if t.leading is not None or len(t.shape) == 2}
        parts = list(dict.fromkeys(t.place.part for t in own))
        what = _list(parts)
        if set(parts) == linear:
            what = "all linear layers"
        elif set(parts) == {t.place.part for t in every}:
            what = "all tensors"
        where = "all layers" if layers == all_layers else f"layers {ranges(layers)}"
        name = "" if len({t.place.stack for t in inside}) == 1 else f" of {stack.rstrip('.')}"
        there = sum(t.place.part in parts and t.place.layer in layers for t in every)
        some = (
            f"{len(own):,} of the {there:,} tensors of " if len(own) < there else ""
        )  # some experts, some parts of some layers
        texts.append(f"{some}{what} of {where}{name}")
    outside = [tensor for tensor in changed if not tensor.place.stack]
    return "; ".join([*texts, *([_names(outside)] if outside else [])])


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
