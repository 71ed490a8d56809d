"""Formats that need no data: an encoding for each weight, applied to rows as they leave the merge.

w4a16 and w8a16 may have a calibration text; their weights are then products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightsmith.encodings import mlx, packed
from weightsmith.errors import ParameterError, PlanError
from weightsmith.options import QuantizeSettings
from weightsmith.planner import Assembled
from weightsmith.planner.encode import encodable, quantise
from weightsmith.plans import PlanDraft
from weightsmith.quantisation.base import Format
from weightsmith.quantisation.calibration.plan import CALIBRATION_SETTINGS, NONE, Chain, calibrate, unused


def streamed(name: str, summary: str, readers: str, experts: str = "") -> Format:
    """A format whose linear weights all have the encoding of this name.

    experts  which reader cannot take experts in it; users are warned if there are any
    """

    def apply(assembled: Assembled, settings: QuantizeSettings) -> None:
        draft = assembled.draft
        quantise(draft, name)
        stored = [step.out.name for step in draft.steps if step.encoding == name and "experts" in step.out.name.split(".")]
        if experts and stored:
            draft.warn(f"{experts} {name}", stored[0], fix="choose fp8-dynamic, w8a16, w4a16 or mxfp4 for transformers")

    return Format(name, summary, readers, apply)


def _grouped(name: str, summary: str, readers: str, groups: Sequence[int], *, calibrates: bool = False) -> Format:
    """A format whose encoding has a group size. groups: those there are, the default first.

    calibrates  with a calibration text, codes are GPTQ's; without one, weights are rounded to nearest

    If no size is asked for, it is the first one that stores the most weights: the width of a weight must be a multiple of it.
    """

    def apply(assembled: Assembled, settings: QuantizeSettings) -> None:
        asked = settings.group_size
        if asked is not None and asked not in groups:
            what = f"{name} has groups of {', '.join(map(str, sorted(groups)))}, not of {asked}"
            raise PlanError([ParameterError(what, where="group_size")])
        has_text = calibrates and settings.calibration not in (None, NONE)
        if problems := unused(settings, calibrates=has_text):
            raise PlanError(problems)
        names = {group: name if group == groups[0] else f"{name}-g{group}" for group in groups}
        draft, plain = assembled.draft, replace(assembled, draft=PlanDraft.of(assembled.draft))
        group = asked or max(groups, key=lambda group: encodable(draft, names[group]))
        quantise(draft, names[group])
        if has_text:
            calibrate(Chain(plain, settings), draft)
        if asked is None and group != groups[0]:
            what = f"groups of {group} are used: more weights have a multiple of it as their width than of {groups[0]}"
            draft.warn(what, "quantize")

    more = CALIBRATION_SETTINGS if calibrates else frozenset()
    return Format(name, summary, readers, apply, frozenset({"group_size"}) | more)


_ENGINES = "transformers, vLLM, SGLang"
_MLX = "MLX, mlx-lm, LM Studio"
_NOT_LOADED = "transformers 5.23 does not load experts stored as"
_MISREAD = "transformers 5.23 ignores the global scales of experts, and computes garbage from those stored as"

FORMATS = (
    streamed("fp8-dynamic", "8-bit floats with a scale for each row (W8A8)", _ENGINES),
    streamed("fp8-block", "8-bit floats with a scale for each block of 128 by 128 (W8A8)", _ENGINES, _NOT_LOADED),
    streamed("int8", "8-bit integers with a scale for each row (W8A8)", _ENGINES, _NOT_LOADED),
    _grouped("w8a16", "8-bit integers with a scale for each group of a row", _ENGINES, packed.GROUPS, calibrates=True),
    _grouped("w4a16", "4-bit integers with a scale for each group of a row", _ENGINES, packed.GROUPS, calibrates=True),
    streamed("nvfp4a16", "4-bit floats with a scale for 16 elements, and one for the weight", _ENGINES, _MISREAD),
    streamed("mxfp4", "4-bit floats with a power of two for 32 elements", _ENGINES),
    _grouped("mlx-8bit", "8-bit integers with a scale and a bias for each group", _MLX, mlx.GROUPS),
    _grouped("mlx-4bit", "4-bit integers with a scale and a bias for each group", _MLX, mlx.GROUPS),
)
