"""A whole model as ExLlamaV2 0.3.2 expects it: architectures, names, config.json, and what is not quantised.

Linear layers of blocks and the head are quantised, a tied head too: the file then has both the embedding and a quantised head.
Embeddings, norms, biases and routers are float16, and so is the head on request: the loader takes the embedding for a tied one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weightsmith._base.errors import Finding, PlanError, Unsupported, as_plan_error
from weightsmith._models.formats.exl2.blocks import HEAD, Sublayer, find_blocks, shape_problems
from weightsmith._models.formats.exl2.layout import (
    ARCHITECTURES,
    GEMMA3,
    GEMMA3_PREFIX,
    OTHER_FORMATS,
    VERSION,
    Params,
    differences,
    loader_config,
    quantization_config,
)
from weightsmith._models.formats.exl2.writing import Exl2
from weightsmith._models.formats.unfused import (
    PLAIN_HEAD,
    check_architecture,
    encoded,
    renamed,
    tokenizer_notes,
    unfused_steps,
)
from weightsmith._models.structure import analyse
from weightsmith._models.structure.vocabulary import is_model_head
from weightsmith._plans import Plan, PlanDraft, Step

_WEIGHT = ".weight"


@dataclass(frozen=True)
class Model:
    """The steps of a model with ExLlamaV2's names, before its blocks get settings.

    steps   one for each tensor, with its dtype and plain
    blocks  in model order
    head    the head's weight: always a step of its own
    tied    whether it is the embedding, and stored nowhere else
    prefix  of all names in the output, which the steps do not have yet
    """

    steps: tuple[Step, ...]
    blocks: tuple[Sublayer, ...]
    head: str
    tied: bool
    prefix: str

    @cached_property
    def unsorted(self) -> frozenset[str]:
        """Weights whose input features must stay in their own order.

        The loader moves the order of `down_proj` to the outputs of gate and up, but not to their biases.
        """
        return frozenset(
            spec.name for block in self.blocks if block.biased and "down" in block.linears for spec in block.linears["down"]
        )

    @property
    def weights(self) -> int:
        """The number of weights in all blocks, which the average bits per weight refers to."""
        return sum(block.weights for block in self.blocks)


def prepare_model(plan: Plan | PlanDraft) -> Model:
    """Check architecture, names and shapes, split fused matrices, and give a tied head a step.

    Raises PlanError with what ExLlamaV2 could not load.
    """
    architecture = check_architecture(plan.config, ARCHITECTURES, "EXL2", OTHER_FORMATS)
    steps, tied = unfused_steps(plan)
    split_specs = [step.out for step in steps]
    with as_plan_error():
        blocks = find_blocks(split_specs, analyse(split_specs, plan.config))
    head = next((spec for spec in split_specs if is_model_head(spec)), None)
    problems = shape_problems(spec for block in blocks for specs in block.linears.values() for spec in specs)
    if head is None or not blocks:
        problems.append(
            Unsupported("it has no head or no layers, which ExLlamaV2 expects", where=architecture, fix=OTHER_FORMATS)
        )
    if head is not None and head.shape[1] % 32:
        problems += shape_problems([head])
    if head is not None and head.shape[0] % 32 and f"{head.name.removesuffix(_WEIGHT)}.bias" in {s.name for s in split_specs}:
        what = f"{head.shape[0]:,} outputs with a bias cannot be padded to a multiple of 32"
        problems.append(Unsupported(what, where=head.name, fix=OTHER_FORMATS))
    if problems or head is None:
        raise PlanError(problems)
    return Model(tuple(steps), blocks, head.name, tied, GEMMA3_PREFIX if architecture == GEMMA3 else "")


# ---- the draft


def store(
    draft: PlanDraft, model: Model, params: Mapping[str, Params], head_bits: int, bits: float, calibration: Mapping[str, Any]
) -> None:
    """Make the draft that of the EXL2 model.

    params       setting of each weight of the blocks
    head_bits    one of `blocks.HEAD`, or `unfused.PLAIN_HEAD`
    bits         for each weight, for config.json
    calibration  for config.json
    """
    encodings = {name: Exl2(setting, sort=name not in model.unsorted).name for name, setting in params.items()}
    if head_bits != PLAIN_HEAD:
        encodings[model.head] = Exl2(HEAD[head_bits]).name
    steps = []
    for step in model.steps:
        spec = step.out
        if spec.name == model.head and model.tied and head_bits == PLAIN_HEAD:
            continue
        named = renamed(step, model.prefix + spec.name) if model.prefix else step
        steps.append(encoded(named, encodings.get(spec.name)))
    config = {**(draft.config or {}), **({"tie_word_embeddings": True} if model.tied else {})}
    draft.config = {**loader_config(config, gemma3=bool(model.prefix)), **quantization_config(bits, head_bits, calibration)}
    draft.steps = steps
    draft.warnings += [note for note in notes(draft) if note not in draft.warnings]


def notes(draft: PlanDraft) -> list[Finding]:
    """Warnings about ExLlamaV2: whether it loads the model, and where its results differ from transformers'."""
    what = f"EXL2 is loaded by ExLlamaV2 {VERSION}, which is archived, and by TabbyAPI up to June 2026; TabbyAPI now takes EXL3"
    fix = "choose a gguf format for llama.cpp, Ollama and CPUs, or w4a16 or fp8-dynamic for vLLM and SGLang"
    findings = [Finding(what, "quantize", fix=fix), *tokenizer_notes(draft, "ExLlamaV2 does not load it")]
    config = loader_config(draft.config or {}, gemma3=False)
    return [*findings, *(Finding(what, where, fix=fix) for what, where, fix in differences(config))]
