"""The `embedding` product: rows of tokens of a text, embedded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsmith._activations.decoder import Base
from weightsmith._activations.rows import BUILT_IN, TOKENIZER, rows_of
from weightsmith._activations.states import FORWARD
from weightsmith._activations.work import EmbeddingWork
from weightsmith._engine.products import ProductContext, ProductKind
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._plans import FileRead, Product
from weightsmith.abc.product import Arrays


def _compute(context: ProductContext) -> Arrays:
    work = EmbeddingWork.of(context.product)
    vocabulary = next(step.out.shape[0] for step in context.product.steps if is_embedding(step.out))
    rows = rows_of(work.text, context.folder(work.base.model), vocabulary, work.bos)
    return embedded(context, work.base, rows)


def embedded(context: ProductContext, base: Base, ids: npt.NDArray[np.int32]) -> Arrays:
    """Embed rows of tokens, int32 [rows, tokens]: the states that enter the first layer."""
    from weightsmith._activations.running import PhaseProgress, decoder_of
    from weightsmith._files.mapped import release_pages

    progress = PhaseProgress(context, base, 0, 0, 0)
    [states] = context.create()
    for row, hidden in enumerate(decoder_of(base).embedded(context, ids.tolist())):
        states[row] = hidden.numpy()
        progress(0)
    release_pages(states)
    return [states]


def _check(product: Product) -> str:
    if problem := EmbeddingWork.check(product):
        return problem
    work = EmbeddingWork.of(product)
    if work.text.seed < 0:
        return "its seed is negative"
    shape = work.text.rows, work.text.tokens, work.base.hidden
    if min(shape) < 1 or [(out.dtype.name, out.shape) for out in product.outs] != [("F32", shape)]:
        return "its states are not those of its calibration text"
    if FileRead(work.base.model, TOKENIZER, work.text.tokenizer) not in product.files:
        return "it does not name the tokenizer's file"
    return "" if any(is_embedding(step.out) for step in product.steps) else "it has no step for an embedding"


def _reads(product: Product) -> list[Path]:
    source = EmbeddingWork.of(product).text.source
    return [] if source == BUILT_IN else [Path(source)]


KIND = ProductKind(FORWARD, compute=_compute, check=_check, reads=_reads, transient=True)
