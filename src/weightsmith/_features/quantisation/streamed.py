"""Formats that need no data: an encoding for each weight, applied to rows as they leave the merge.

w4a16 and w8a16 may have a calibration text; their weights are then products.
"""

from __future__ import annotations

from dataclasses import replace

from weightsmith._base.errors import PlanError
from weightsmith._base.options import QuantizeSettings, option_error
from weightsmith._features.quantisation.base import Format
from weightsmith._features.quantisation.calibration.plan import CALIBRATION_SETTINGS, NONE, Chain, calibrate, unused
from weightsmith._models.formats import formats
from weightsmith._planning.planner import Assembled
from weightsmith._planning.planner.encode import encodable, quantise
from weightsmith._plans import PlanDraft
from weightsmith.abc.stored import Writing


def streamed(writing: Writing) -> Format:
    """The format whose linear weights all have the encoding, or one of those that differ in the size of their groups."""
    return _grouped(writing) if len(writing.encodings) > 1 else _single(writing)


def _single(writing: Writing) -> Format:
    (encoding,) = writing.encodings.values()

    def apply(assembled: Assembled, settings: QuantizeSettings) -> None:
        draft = assembled.draft
        quantise(draft, encoding.name)
        stored = [
            step.out.name for step in draft.steps if step.encoding == encoding.name and "experts" in step.out.name.split(".")
        ]
        if writing.experts and stored:
            fix = "choose fp8-dynamic, w8a16, w4a16 or mxfp4 for transformers"
            draft.warn(f"{writing.experts} {writing.name}", stored[0], fix=fix)

    return Format(writing.name, writing.summary, writing.readers, apply)


def _grouped(writing: Writing) -> Format:
    """A format with a choice of group sizes. If none is asked for, it is the first that stores the most weights: the width of a
    weight must be a multiple of it.

    With a calibration text, the codes of those in `CALIBRATED` are GPTQ's; without one, weights are rounded to nearest.
    """
    groups, calibrates = tuple(writing.encodings), writing.name in CALIBRATED

    def apply(assembled: Assembled, settings: QuantizeSettings) -> None:
        asked = settings.group_size
        if asked is not None and asked not in groups:
            what = f"{writing.name} has groups of {', '.join(map(str, sorted(groups)))}, not of {asked}"
            raise PlanError([option_error("group_size", what)])
        has_text = calibrates and settings.calibration not in (None, NONE)
        if problems := unused(settings, calibrates=has_text):
            raise PlanError(problems)
        names = {group: encoding.name for group, encoding in writing.encodings.items()}
        draft, plain = assembled.draft, replace(assembled, draft=PlanDraft.of(assembled.draft))
        group = asked or max(groups, key=lambda group: encodable(draft, names[group]))
        quantise(draft, names[group])
        if has_text:
            calibrate(Chain(plain, settings), draft)
        if asked is None and group != groups[0]:
            what = f"groups of {group} are used: more weights have a multiple of it as their width than of {groups[0]}"
            draft.warn(what, "quantize")

    more = CALIBRATION_SETTINGS if calibrates else frozenset()
    return Format(writing.name, writing.summary, writing.readers, apply, frozenset({"group_size"}) | more)


CALIBRATED = ("w8a16", "w4a16")
"""What can have a calibration text."""

FORMATS = tuple(streamed(writing) for each in formats() for writing in each.writes)
