"""`weightsmith diff A B`: what a model differs in from another, by tensor, layer and part, and in words."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import overload

from weightsmith._base.errors import ParameterError
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.tokenizers.vocabulary import Vocabulary
from weightsmith._reports.look.comparison import Comparison, compare
from weightsmith._reports.look.difference import Difference, Leading, MovedRow, TensorDifference, read_difference
from weightsmith._reports.look.differences import VALUES, differences, measured
from weightsmith._reports.look.models import (
    MatchedTensor,
    compare_files,
    fetch_small,
    is_merge,
    lineage,
    match,
    opened,
    vocabulary_of,
)
from weightsmith._reports.look.surveys import Watching, compact, of_rows
from weightsmith.abc.product import Arrays

Name = str | os.PathLike[str]


@overload
def diff(
    a: Name,
    b: Name,
    /,
    *,
    tensors: Sequence[str] = (),
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Difference: ...
@overload
def diff(
    *models: Name,
    base: Name,
    tensors: Sequence[str] = (),
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Comparison: ...
def diff(
    *models: Name,
    base: Name | None = None,
    tensors: Sequence[str] = (),
    threads: int | None = None,
    stream: bool = False,
    progress: Watching = True,
) -> Difference | Comparison:
    """Compare two models; or, with a base, the task vectors of two or more models.

    models    as in a recipe: a folder, a weight file, a Hub id, `base+adapter`; stored in any format that weightsmith reads
    base      the model that all were fine-tuned from
    tensors   globs of tensor names of A, or of the base; default: all tensors
    threads   default: all available processors; does not affect the result
    stream    stream weights of Hub models that are not cached, instead of downloading them
    progress  called about ten times per second; True: a bar in terminals and notebooks, False: none

    Returns a Difference, or with a base a Comparison. Tensors are matched as in a merge. If embeddings have different numbers
    of tokens, the rows that both have are compared.

    Raises PlanError for models that cannot be opened, UnknownName for a glob that matches no tensor, and ParameterError for a
    wrong number of models.

    Cost: two passes over both models, and one pass over tensors that do not differ. With a base: one pass, and an eighth of
    one. Memory does not depend on the size of the models.

    >>> weightsmith.diff("base", "base-german").reading  # doctest: +SKIP
    ('A change of low rank, as LoRA makes it, or a merge of such models: rank about 8 in all linear layers of all layers.', ...)
    >>> weightsmith.diff("german", "french", base="base").total.cosines  # doctest: +SKIP
    (0.2093,)
    """
    if base is not None:
        if len(models) < 2:
            what = f"--base compares two or more models, but got {len(models)}"
            raise ParameterError(what, fix=f"run weightsmith diff {base} MODEL, to compare one model with its base")
        return compare(base, models, tensors=tensors, threads=threads, stream=stream, progress=progress)
    if len(models) != 2:
        fix = "run weightsmith diff A B, or weightsmith diff --base BASE A B C"
        raise ParameterError(f"diff needs two models, but got {len(models)}", fix=fix)
    return _differ(models[0], models[1], tensors, threads, progress, stream=stream)


def _differ(a: Name, b: Name, tensors: Sequence[str], threads: int | None, progress: Watching, *, stream: bool) -> Difference:
    with opened(a, b, stream=stream) as models:
        first, second = models
        for model in models:
            fetch_small(model)
        seen: dict[str, Vocabulary] = {}
        vocabularies = vocabulary_of(first, seen), vocabulary_of(second, seen)
        files = compare_files(first, second, vocabularies)
        matching = match(models, tensors)
        rows = measured("differences", differences, matching.matrices, models, threads=threads, progress=progress, passes=2)
        compared, moved = list[TensorDifference](), list[_Rows]()
        for matched, arrays in rows:
            tensor, moved_rows = _tensor(matched, arrays, models)
            compared.append(tensor)
            if moved_rows:
                moved.append((tensor.name, moved_rows))
        difference = Difference(
            (first.ref, second.ref),
            files,
            tuple(compared),
            matching.missing[0],
            matching.strange[0],
            matching.different,
            _moved(moved, vocabularies),
            (first.decoded, second.decoded),
            lineage(second) if is_merge(second) else None,
            tuple(tensors),
        )
        return replace(difference, reading=read_difference(difference))


_Moved = tuple[tuple[int, float], ...]
"""Rows of an embedding that moved most, and their squared shares."""
_Rows = tuple[str, _Moved]
"""The same, with the tensor's name."""


def _tensor(matched: MatchedTensor, arrays: Arrays, models: Sequence[Checkpoint]) -> tuple[TensorDifference, _Moved]:
    sums, nonfinite, values, upper, rank, moved, powers = arrays
    aa, ad, dd, changed, largest, noise, bb, ab = sums.tolist()
    in_a, in_b = of_rows(nonfinite)
    # Undefined where it is not of numbers, where a sum overflows, and where the squares of a delta vanish.
    known = math.isfinite(aa + ad + dd) and (dd > 0 or not changed)
    delta, a = math.sqrt(dd) if known else math.nan if changed else 0.0, _root(aa)
    b = _root(bb)
    dtypes = tuple(model.natural_dtype(read.tensor).name for model, read in zip(models, matched.step.inputs, strict=True))
    linear, leading = matched.step.role == "linear", None
    if linear and changed and known:
        k = min(VALUES, *matched.step.out.shape) if math.isfinite(rank) else 0
        leading = Leading(array("d", values[:k].tobytes()), array("d", upper[:k].tobytes()), int(rank) if rank >= 0 else None)
    size = matched.step.out.size
    tensor = TensorDifference(
        matched.step.out.name,
        matched.place,
        matched.step.out.shape,
        (dtypes[0], dtypes[1]),
        size,
        delta,
        a,
        b,
        _cosine(aa, ad, dd, bb, ab) if known else math.nan,
        int(changed),
        largest if known else 0.0 if not changed else math.nan,
        math.sqrt(noise * size),
        linear,
        leading,
        (in_a, in_b),
        matched.rows,
        compact(powers),
    )
    return tensor, tuple((int(row), float(share)) for row, share in moved.tolist() if share > 0)


def _root(square: float) -> float:
    return math.sqrt(square) if math.isfinite(square) else math.nan


def _cosine(aa: float, ad: float, dd: float, bb: float, ab: float) -> float:
    """The cosine of a and b = a + d; nan if either is zero.

    >>> _cosine(1, 0, 0, 1, 1), _cosine(1, -1, 1, 0, 0), _cosine(1e-200, 0, 1e-200, 2e-200, 1e-200) == math.sqrt(0.5)
    (1.0, nan, True)
    """
    if not (aa > 0 and bb > 0):
        return math.nan
    if dd > 0.1 * aa:
        return max(-1.0, min(1.0, ab / math.sqrt(aa) / math.sqrt(bb)))
    # From the part of d that is not along a: near 1 the quotient of sums has lost its digits.
    across = max(0.0, dd / bb - (ad / aa) * (ad / bb))  # sin²
    return math.sqrt(max(0.0, 1 - across))


def _moved(rows: Iterable[_Rows], vocabularies: tuple[Vocabulary | None, Vocabulary | None]) -> tuple[MovedRow, ...]:
    known = vocabularies[1] or vocabularies[0]
    tokens = {} if known is None else known.tokens
    moved = [MovedRow(name, row, tokens.get(row, ""), math.sqrt(share)) for name, shares in rows for row, share in shares]
    return tuple(sorted(moved, key=lambda row: -row.share))
