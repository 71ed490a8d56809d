"""The `embedding` product: rows of calibration tokens, embedded."""

from __future__ import annotations

from pathlib import Path

from weightsmith.plans import Product
from weightsmith.products import Bench, ProductKind
from weightsmith.products.base import Arrays
from weightsmith.quantisation.calibration.rows import BUILT_IN
from weightsmith.quantisation.calibration.work import EmbeddingWork
from weightsmith.structure.vocabulary import is_embedding


def _compute(bench: Bench) -> Arrays:
    from weightsmith.outputs.local.products import release_pages
    from weightsmith.quantisation.calibration.common import PhaseProgress, decoder_of
    from weightsmith.quantisation.calibration.rows import rows_of

    work = EmbeddingWork.of(bench.product)
    decoder = decoder_of(work.base)
    vocabulary = next(step.out.shape[0] for step in bench.product.steps if is_embedding(step.out))
    rows = rows_of(work.calibration, bench.folder(work.base.model), vocabulary, work.bos)
    progress = PhaseProgress(bench, work.base, 0, 0, 0)
    [states] = bench.create()
    for r, hidden in enumerate(decoder.embedded(bench, rows.tolist())):
        states[r] = hidden.numpy()
        progress(0)
    release_pages(states)
    return [states]


def _check(product: Product) -> str:
    if problem := EmbeddingWork.check(product):
        return problem
    work = EmbeddingWork.of(product)
    if work.calibration.seed < 0:
        return "its seed is negative"
    shape = work.calibration.rows, work.calibration.tokens, work.base.hidden
    if min(shape) < 1 or [(out.dtype.name, out.shape) for out in product.outs] != [("F32", shape)]:
        return "its states are not those of its calibration text"
    if work.base.model not in {file.model for file in product.files}:
        return "it does not name the tokenizer's file"
    return "" if any(is_embedding(step.out) for step in product.steps) else "it has no step for an embedding"


def _reads(product: Product) -> list[Path]:
    source = EmbeddingWork.of(product).calibration.source
    return [] if source == BUILT_IN else [Path(source)]


KIND = ProductKind("quantising layer by layer", compute=_compute, check=_check, reads=_reads, transient=True)
