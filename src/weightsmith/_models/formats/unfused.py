"""A model with one step for each matrix, as ExLlamaV2 and exllamav3 load it. EXL2 and EXL3 share this.

Tensors have transformers' names. A tied head gets a step of its own, because the head is quantised and the embedding is not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightsmith._base.errors import Finding, PlanError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats import find_encoding
from weightsmith._models.structure import analyse
from weightsmith._models.structure.projections import SubMatrix, fused_parts
from weightsmith._models.structure.vocabulary import TIED_HEAD, is_embedding, is_model_head, ties
from weightsmith._plans import JOIN, Block, Plan, PlanDraft, Read, Step

DEFAULT_HEAD_BITS = 6
PLAIN_HEAD = 16
"""The value of `head_bits` with which the head is float16. A tied head is then the embedding, and is not stored again."""

_HALF = "plain F16"


def check_architecture(config: Mapping[str, Any] | None, loaded: Collection[str], title: str, fix: str) -> str:
    """Return the architecture of a model. title: of the format.

    Raises PlanError for one that the loader does not know: it would be read as Llama.
    """
    if config is None:
        what = "the output has no config.json, without which no model is loaded"
        fix = "put a config.json into the folder of the model that it is taken from"
        raise PlanError([Unsupported(what, where="quantize", fix=fix)])
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name in loaded:
        return name
    what = f"{show(name if name is not None else names)} cannot be stored as {title}, only {', '.join(loaded)}"
    raise PlanError([Unsupported(what, where="architectures in config.json", fix=fix)])


def unfused_steps(plan: Plan | PlanDraft) -> tuple[list[Step], bool]:
    """Return one step for each matrix, and whether the head is tied. A tied head comes last. Raises PlanError."""
    config, specs = plan.config or {}, {step.out.name: step.out for step in plan.steps}
    structure = analyse(specs.values(), config)
    steps = [part for step in plan.steps for part in _split(step, fused_parts(step.out, specs, structure, config))]
    embedding = next((step for step in steps if is_embedding(step.out)), None)
    # A head that is stored although config.json ties it may differ from the embedding, and transformers uses it then.
    tied = not any(is_model_head(step.out) for step in steps) and ties(config, stores_head=False)
    if tied and embedding is not None:
        steps.append(renamed(embedding, TIED_HEAD))
    return steps, tied


def encoded(step: Step, encoding: str | None) -> Step:
    """The step with its encoding. None stores float16, and leaves integers and scalars as they are."""
    spec = step.out
    if encoding is None and (not spec.shape or not spec.dtype.floating or spec.dtype.name == "F16"):
        return step
    encoding = encoding or _HALF
    return replace(step, encoding=encoding, stored=find_encoding(encoding).outs(spec))


def renamed(step: Step, name: str) -> Step:
    """The same numbers under another name: random masks depend on names, and those of the parts stay."""
    out = replace(step.out, name=name)
    if step.op == JOIN or not step.merges:
        return replace(step, out=out)
    return Step(out, JOIN, (), pieces=(step,), role=step.role)


def tokenizer_notes(draft: PlanDraft, lack: str) -> list[Finding]:
    """Warn if there is no tokenizer.json. lack: what fails without it, as the end of the sentence."""
    if "tokenizer.json" in (*draft.carried, *draft.files):
        return []
    fix = "make one: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    return [Finding(f"the model has no tokenizer.json, without which {lack}", "quantize", fix=fix)]


def _split(step: Step, parts: Sequence[SubMatrix]) -> list[Step]:
    """A step for each matrix of a fused tensor; the step itself if it holds one. Raises PlanError."""
    if not parts:
        return [step]
    if step.op == JOIN:
        if [piece.out.name for piece in step.pieces] != [part.name for part in parts]:
            what = "the merge does not compute its matrices one by one, and ExLlama stores them so"
            raise PlanError([Unsupported(what, where=step.out.name, fix="merge first, then quantise the result")])
        return list(step.pieces)
    return [
        replace(
            step,
            out=TensorSpec(part.name, step.out.dtype, part.shape),
            inputs=tuple(_part_of(read, part, step.out.name) for read in step.inputs),
        )
        for part in parts
    ]


def _part_of(read: Read, part: SubMatrix, name: str) -> Read:
    rows, cols = math.prod(part.shape[:-1]), part.shape[-1]
    if read.view is None:
        return replace(read, view=Block(part.offset, rows, cols, cols))
    if isinstance(read.view, Block) and read.view.whole_rows:
        return replace(read, view=Block(read.view.offset + part.offset, rows, cols, cols))
    what = "it is gathered from other rows, and its matrices cannot be told apart"
    raise PlanError([Unsupported(what, where=name, fix="merge first, then quantise the result")])
