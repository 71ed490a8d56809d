"""The format `exl3`: which rate each weight gets, and a whole model as exllamav3 loads it.

Linear layers of the decoder and the head are quantised, a tied head too: the file then has both the embedding and a quantised
head. Names are those of transformers, with a matrix for each projection. Everything else is float16, as exllamav3 writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._base.errors import Finding, PlanError, Unsupported, WeightsmithError
from weightsmith._base.options import assignment, option_error
from weightsmith._base.tensors import TensorSpec
from weightsmith._features.quantisation.base import (
    CALIBRATION_SETTINGS,
    Format,
    as_problems,
    calibrates,
    engine_findings,
    unused,
)
from weightsmith._features.quantisation.calibration.plan import Chain, calibrate
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats.exl2.layout import OTHER_FORMATS
from weightsmith._models.formats.exl3.layout import (
    ARCHITECTURES,
    BLOCK,
    RATES,
    VERSION,
    Rate,
    config_entry,
    contradiction,
    differences,
    loader_config,
)
from weightsmith._models.formats.exl3.writing import Exl3
from weightsmith._models.formats.unfused import (
    DEFAULT_HEAD_BITS,
    PLAIN_HEAD,
    check_architecture,
    encoded,
    tokenizer_notes,
    unfused_steps,
)
from weightsmith._models.structure.projections import ProjectionRole, projection_role
from weightsmith._models.structure.vocabulary import is_model_head
from weightsmith._planning.planner.encode import encodable
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import PlanDraft

_WEIGHT = ".weight"
_FIRST: tuple[ProjectionRole, ...] = ("v", "k", "o", "down", "q")
"""Projections that get more bits first: those with few weights, and those whose errors go straight to the residual stream."""


def _prepare(draft: PlanDraft) -> bool:
    """Split fused matrices, and give a tied head a step; whether it is tied. Raises PlanError: what exllamav3 cannot load."""
    architecture = check_architecture(draft.config, ARCHITECTURES, "EXL3", OTHER_FORMATS)
    config = draft.config or {}
    if key := contradiction(config):
        expected = ARCHITECTURES[architecture][key]
        what = f"exllamav3 {VERSION} loads {architecture} with {key} {expected!r}, not {config[key]!r}"
        raise PlanError([Unsupported(what, where="config.json", fix=OTHER_FORMATS)])
    steps, tied = unfused_steps(draft)
    if not any(is_model_head(step.out) for step in steps):
        raise PlanError([Unsupported("it has no head, which exllamav3 expects", where=architecture, fix=OTHER_FORMATS)])
    draft.steps = steps
    return tied


def _rates(draft: PlanDraft, bits: float) -> dict[str, Rate]:
    """The rate of each weight of the layers: that of all if there is one of these bits, else the two next to them.

    Raises PlanError.
    """
    names = encodable(draft, Exl3(RATES[0]).name)
    specs = {step.out.name: step.out for step in draft.steps}
    if not names:
        what = "nothing can be stored as EXL3: no decoder of this model has the weight of a linear layer"
        raise PlanError([Unsupported(what, where="quantize", fix=OTHER_FORMATS)])
    biases = [_bias(name) for name in names if specs[name].shape[0] % BLOCK and _bias(name) in specs]
    if biases:
        what = f"its {specs[biases[0]].shape[0]:,} numbers would have to be padded to a multiple of {BLOCK}"
        many = f" (and {len(biases) - 1:,} more biases)" if len(biases) > 1 else ""
        raise PlanError([Unsupported(f"exllamav3 cannot load the bias: {what}{many}", where=biases[0], fix=OTHER_FORMATS)])
    low = max(rate for rate in RATES if rate.bits <= bits)
    rates = dict.fromkeys(names, low)
    if low.bits == bits:
        return rates
    high = min(rate for rate in RATES if rate > low)
    room = (bits - low.bits) * sum(specs[name].size for name in names)
    for name in sorted(names, key=_order(names)):
        cost = (high.bits - low.bits) * specs[name].size
        if cost <= room:
            rates[name] = high
            room -= cost
    return rates


def _bias(weight: str) -> str:
    return f"{weight.removesuffix(_WEIGHT)}.bias"


def _order(names: Sequence[str]) -> Any:
    """The key by which weights are sorted to get more bits: by projection, and layers in an order that spreads them."""
    place: dict[str, tuple[int, int]] = {}
    count: dict[int, int] = {}
    for name in names:
        role = projection_role(name.removesuffix(_WEIGHT))
        kind = _FIRST.index(role) if role in _FIRST else len(_FIRST)
        count[kind] = count.get(kind, -1) + 1
        place[name] = kind, int(f"{count[kind]:032b}"[::-1], 2)  # 0, 1/2, 1/4, 3/4, 1/8, … of 2^32
    return place.__getitem__


def _store(draft: PlanDraft, rates: Mapping[str, Rate], head_bits: int, *, tied: bool, calibration: dict[str, int]) -> None:
    """Make the draft that of the EXL3 model."""
    encodings = {name: Exl3(rate).name for name, rate in rates.items()}
    steps = []
    for step in draft.steps:
        spec = step.out
        if is_model_head(spec) and spec.name not in rates:
            if head_bits == PLAIN_HEAD and tied:
                continue
            if head_bits != PLAIN_HEAD and not _padded_bias(spec, draft):
                encodings[spec.name] = Exl3(Rate(2 * head_bits)).name
        steps.append(encoded(step, encodings.get(spec.name)))
    sizes = {step.out.name: step.out.size for step in draft.steps}
    bits = sum(sizes[name] * rate.bits for name, rate in rates.items()) / sum(sizes[name] for name in rates)
    draft.steps = steps
    config = loader_config(draft.config or {})
    if tied and head_bits != PLAIN_HEAD:
        config["tie_word_embeddings"] = False
    draft.config = {**config, "quantization_config": config_entry(bits, head_bits, calibration)}
    draft.warnings += [Finding(what, where, fix=fix) for what, where, fix in differences(config)]
    draft.warnings += tokenizer_notes(draft, "exllamav3 makes no text")


def _padded_bias(head: TensorSpec, draft: PlanDraft) -> bool:
    """Whether the head has a bias that would have to be padded. It is float16 then."""
    return bool(head.shape[0] % BLOCK) and any(step.out.name == _bias(head.name) for step in draft.steps)


class Exl3Format(Format):
    """EXL3."""

    name = "exl3"
    summary = "1 to 8 bits for each weight, codes of a trellis; half bits below 4, others on average"
    readers = "exllamav3 (TabbyAPI)"
    settings = frozenset({"bits", "head_bits"}) | CALIBRATION_SETTINGS

    def apply(self, prepared: Prepared, settings: QuantizeSettings) -> None:
        check_architecture(prepared.draft.config, ARCHITECTURES, "EXL3", OTHER_FORMATS)
        problems: list[WeightsmithError] = []
        if settings.bits is None:
            fix = f"write {assignment('bits', 4)}, or any number from 1 to 8"
            problems.append(option_error("bits", "exl3 needs the average bits per weight", fix))
        elif not 1 <= settings.bits <= 8:
            problems.append(option_error("bits", f"exl3 has 1 to 8 bits per weight, not {settings.bits:g}"))
        problems += unused(settings, calibrates=calibrates(settings))
        if problems or settings.bits is None:
            raise PlanError(problems)
        draft = prepared.draft
        tied = _prepare(draft)
        steps = list(draft.steps)
        rates = _rates(draft, settings.bits)
        if findings := engine_findings("exl3", [step.out for step in steps if step.out.name in rates], settings, OTHER_FORMATS):
            raise PlanError(as_problems(findings))
        head_bits = settings.head_bits or DEFAULT_HEAD_BITS
        chain = Chain(prepared, settings, steps) if calibrates(settings) else None
        calibration = {} if chain is None else {"rows": chain.text.rows, "cols": chain.text.tokens}
        _store(draft, rates, head_bits, tied=tied, calibration=calibration)
        if chain is not None:
            calibrate(chain, draft)


FORMAT = Exl3Format()
