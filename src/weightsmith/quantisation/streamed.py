"""Formats that need no data: an encoding for each weight, applied to rows as they leave the merge.

w4a16 and w8a16 may have a calibration text; their weights are then products.
"""

from __future__ import annotations

from dataclasses import replace

from weightsmith.errors import Finding, PlanError
from weightsmith.options import QuantizeSettings, option_error
from weightsmith.planner import Plan, Prepared
from weightsmith.planner.encode import encodable, quantise
from weightsmith.quantisation.base import Format
from weightsmith.quantisation.calibration.plan import CALIBRATION_SETTINGS, NONE, Chain, calibrated, unused
from weightsmith.stored import formats
from weightsmith.stored.base import Writing


def streamed(writing: Writing) -> Format:
    """The format whose linear weights all have the encoding, or one of those that differ in the size of their groups."""
    return _grouped(writing) if len(writing.encodings) > 1 else _single(writing)


def _single(writing: Writing) -> Format:
    (encoding,) = writing.encodings.values()

    def apply(prepared: Prepared, settings: QuantizeSettings) -> Plan:
        plan = quantise(prepared.plan, encoding.name)
        stored = [
            step.out.name for step in plan.steps if step.encoding == encoding.name and "experts" in step.out.name.split(".")
        ]
        if not writing.experts or not stored:
            return plan
        fix = "choose fp8-dynamic, w8a16, w4a16 or mxfp4 for transformers"
        finding = Finding(f"{writing.experts} {writing.name}", stored[0], fix=fix)
        return replace(plan, warnings=(*plan.warnings, finding))

    return Format(writing.name, writing.summary, writing.readers, apply)


def _grouped(writing: Writing) -> Format:
    """A format with a choice of group sizes. If none is asked for, it is the first that stores the most weights: the width of a
    weight must be a multiple of it.

    With a calibration text, the codes of those in `CALIBRATED` are GPTQ's; without one, weights are rounded to nearest.
    """
    groups, calibrates = tuple(writing.encodings), writing.name in CALIBRATED

    def apply(prepared: Prepared, settings: QuantizeSettings) -> Plan:
        asked = settings.group_size
        if asked is not None and asked not in groups:
            what = f"{writing.name} has groups of {', '.join(map(str, sorted(groups)))}, not of {asked}"
            raise PlanError([option_error("group_size", what)])
        has_text = calibrates and settings.calibration not in (None, NONE)
        if problems := unused(settings, calibrates=has_text):
            raise PlanError(problems)
        names = {group: encoding.name for group, encoding in writing.encodings.items()}
        group = asked or max(groups, key=lambda group: encodable(prepared.plan, names[group]))
        plan = quantise(prepared.plan, names[group])
        if has_text:
            plan = calibrated(Chain(prepared.plan, prepared, settings), plan)
        if asked is None and group != groups[0]:
            what = f"groups of {group} are used: more weights have a multiple of it as their width than of {groups[0]}"
            return replace(plan, warnings=(*plan.warnings, Finding(what, "quantize")))
        return plan

    more = CALIBRATION_SETTINGS if calibrates else frozenset()
    return Format(writing.name, writing.summary, writing.readers, apply, frozenset({"group_size"}) | more)


CALIBRATED = ("w8a16", "w4a16")
"""What can have a calibration text."""

FORMATS = tuple(streamed(writing) for each in formats() for writing in each.writes)
