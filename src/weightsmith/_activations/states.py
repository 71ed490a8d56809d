"""The products of states: what enters the first layer, what enters the layer after one, and what others compare them with.

text_rows       rows of tokens of a text
embedded_rows   rows of tokens that another product holds, embedded
states          what leaves a layer, from what enters it
sampled_states  the first rows of what leaves a layer, kept to compare it with another model's
given           arrays that whoever runs the plan has already, such as the tokens of a text
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._activations.rows import BUILT_IN, TOKENIZER, rows_of
from weightsmith._activations.work import LayerWork, TextRowsWork
from weightsmith._base.errors import CheckpointError
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._plans import FileRead, Product
from weightsmith._plans.codec import has_type
from weightsmith.abc.product import Arrays, Floats, ProductContext, ProductKind

if TYPE_CHECKING:
    from torch import Tensor

    from weightsmith._activations.running import NumberedRow

FORWARD = "measuring layer by layer"
"""The progress of states and statistics."""

# ---- what leaves a layer


def compute(context: ProductContext) -> Arrays:
    """Run a layer with the model's weights."""
    return run(context, LayerWork.of(context.product), {})


def made_beside(context: ProductContext, work: LayerWork) -> Floats | None:
    """An array for the states that leave a layer, if they are to be computed by its own weights, and nobody has."""
    settings = LayerWork(work.base, work.packages, work.layer, work.states).to_json()

    def same(product: Product) -> bool:
        return product.op == "states" and product.settings == settings and product.steps == context.product.steps

    arrays = context.also(same)
    return None if arrays is None else arrays[0]


def run(context: ProductContext, work: LayerWork, weights: Mapping[str, Tensor]) -> Arrays:
    """Run a layer. weights: to use instead of the model's, by name."""
    import torch

    from weightsmith._activations.running import layer_rows

    [after] = context.create()
    with layer_rows(context, work, 0.7, 1, overrides=weights) as rows:

        def leaving(numbered: NumberedRow) -> Tensor:
            with torch.no_grad():
                return rows.layer(numbered[1])

        rows.fill(after, leaving, f"the output of layer {work.layer}")
    return [after]


def check(product: Product, kind: type[LayerWork] = LayerWork) -> str:
    """Why its settings are invalid, or ""."""
    if problem := kind.check(product):
        return problem
    makes = len(product.outs) == 1 and product.outs[0].dtype.name == "F32" and len(product.outs[0].shape) == 3
    return "" if makes else "it does not make states"


STATES = ProductKind(FORWARD, compute=compute, check=check, device=True, transient=True)


def _sample(context: ProductContext) -> Arrays:
    rows = context.product.outs[0].shape[0]
    return [np.array(context.arrays(LayerWork.of(context.product).states)[0][:rows])]


SAMPLED_STATES = ProductKind(FORWARD, compute=_sample, check=check)


# ---- rows of tokens


def _cut_rows(context: ProductContext) -> Arrays:
    work = TextRowsWork.of(context.product)
    return [rows_of(work.text, context.folder(work.base.model), work.vocabulary, work.bos)]


def _check_rows(product: Product) -> str:
    if problem := TextRowsWork.check(product):
        return problem
    work = TextRowsWork.of(product)
    if work.text.seed < 0:
        return "its seed is negative"
    shape = work.text.rows, work.text.tokens
    if min(shape) < 1 or [(out.dtype.name, out.shape) for out in product.outs] != [("I32", shape)]:
        return "its rows are not those of its text"
    if FileRead(work.base.model, TOKENIZER, work.text.tokenizer) not in product.files:
        return "it does not name the tokenizer's file"
    return ""


def _reads(product: Product) -> list[Path]:
    source = TextRowsWork.of(product).text.source
    return [] if source == BUILT_IN else [Path(source)]


TEXT_ROWS = ProductKind("tokenizing the text", compute=_cut_rows, check=_check_rows, reads=_reads, transient=True)


# ---- what enters the first layer


def _embed_rows(context: ProductContext) -> Arrays:
    from weightsmith._activations.running import PhaseProgress, decoder_of, ids_of
    from weightsmith._files.arrays import release_pages

    work = LayerWork.of(context.product)
    ids = ids_of(context, work.states, context.product.outs[0].shape)
    progress = PhaseProgress(context, work.base, 0, 0, 0)
    [states] = context.create()
    for row, hidden in enumerate(decoder_of(work.base).embedded(context, ids.tolist())):
        states[row] = hidden.numpy()
        progress(0)
    release_pages(states)
    return [states]


def _check_embedded_rows(product: Product) -> str:
    if problem := check(product):
        return problem
    if product.outs[0].shape[2] != LayerWork.of(product).base.hidden:
        return "its states are not those of its rows"
    return "" if any(is_embedding(step.out) for step in product.steps) else "it has no step for an embedding"


EMBEDDED_ROWS = ProductKind(FORWARD, compute=_embed_rows, check=_check_embedded_rows, transient=True)


# ---- arrays that are there


def _absent(context: ProductContext) -> Arrays:
    what = "this plan continues from arrays that only the command that made it has"
    raise CheckpointError(what, where=f"product {context.product.name}", fix="run that command again: weightsmith eval")


def _check_given(product: Product) -> str:
    known = has_type(product.settings, Mapping[str, str]) and set(product.settings) == {"sha256"}
    return "" if known else "its settings are not the hash of its arrays"


GIVEN = ProductKind("reading arrays", compute=_absent, check=_check_given)
