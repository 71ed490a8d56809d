"""The list of formats, and the one place where a draft becomes one of them.

Formats that need no data are an encoding for each weight, applied to rows as they leave the merge. w4a16, w8a16, GPTQ and AWQ
may have a calibration text; their weights are then products. Static scales of activations, and of a KV cache, are products of
a text beside the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from weightsmith._activations.rows import BUILT_IN
from weightsmith._base.errors import Finding, FormatError, ParameterError, PlanError, WeightsmithError
from weightsmith._base.files import expand_user
from weightsmith._base.options import assignment, named, option_error, read_options
from weightsmith._features.quantisation import exl2, exl3
from weightsmith._features.quantisation.base import Format, check_target, read_target
from weightsmith._features.quantisation.calibration.plan import (
    CACHE_SETTINGS,
    CALIBRATION_SETTINGS,
    MEASURED,
    NONE,
    measure_activations,
    text_problems,
    without_measuring,
)
from weightsmith._features.quantisation.engines import check_engines, family_problems, unloaded
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._features.quantisation.weighed import format_of
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.formats import formats
from weightsmith._planning.follow_ups import FollowUpKind, SecondPlan
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.encode import encodable, quantise
from weightsmith._plans import PlanDraft, Step
from weightsmith._plans.codec import has_type
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import Writing


def _streamed(writing: Writing, *, caches: bool) -> Format:
    """A format that encodes rows as they leave the merge. If no group size is asked for, it is the first that stores the most
    weights: the width of a weight must be a multiple of it.

    With a calibration text, codes are GPTQ's where the encoding takes a Hessian; without one, weights are rounded to nearest.
    """
    groups, default = tuple(writing.encodings), next(iter(writing.encodings.values()))
    calibrates = default.hessian != "no"

    def apply(assembled: Prepared, settings: QuantizeSettings) -> None:
        group_size = settings.group_size
        if group_size is not None and group_size not in groups:
            what = f"{writing.name} has groups of {', '.join(map(str, sorted(groups)))}, not of {group_size}"
            raise PlanError([option_error("group_size", what)])
        has_text = calibrates and settings.calibration not in (None, NONE)
        if problems := text_problems(default, settings):
            raise PlanError(problems)
        draft, plain = assembled.draft, replace(assembled, draft=PlanDraft.of(assembled.draft))
        group = group_size or max(groups, key=lambda group: len(encodable(draft, writing.encodings[group].name)))
        encoding = writing.encodings[group]
        quantise(draft, encoding.name)
        if group_size is None and group != groups[0]:
            what = f"groups of {group} are used: more weights have a multiple of it as their width than of {groups[0]}"
            draft.warn(what, "quantize")
        check_engines(draft, encoding.name, writing.name, settings)
        measure_activations(plain, draft, encoding, settings, calibrates=has_text)
        writing.adapt(draft, encoding)

    text_settings = CACHE_SETTINGS if caches else CALIBRATION_SETTINGS if calibrates else frozenset[str]()
    sizes = frozenset({"group_size"}) if len(groups) > 1 else frozenset[str]()
    return Format(writing.name, writing.summary, writing.readers, apply, sizes | text_settings)


_STREAMED = [_streamed(writing, caches=bool(stored.caches)) for stored in formats() for writing in stored.writes]
_WHOLE = [format_of(each) for stored in formats() for each in stored.models()]
FORMATS: dict[str, Format] = {each.name: each for each in (*_STREAMED, *_WHOLE, *exl2.FORMATS, *exl3.FORMATS)}
"""Every format, by name."""


def apply_format(prepared: Prepared, name: str, settings: QuantizeSettings) -> None:
    """Change a draft of plain tensors to one in the format `name`. Raises as `Format.apply`."""
    draft = prepared.draft
    draft.warnings += family_problems(name, draft.config, settings)
    FORMATS[name].apply(prepared, settings)
    prepared.draft.provenance = replace(prepared.draft.provenance, format=name)
    prepared.draft.warnings += _decoded(prepared.inputs, name)
    prepared.named += _files(settings)


def _follow(prepared: Prepared, arrays: Mapping[str, Arrays], _answer: object, max_bytes: int | None) -> SecondPlan:
    measuring, settings = _following(prepared)
    if max_bytes is not None:
        settings = replace(settings, size_bytes=max_bytes)
    second = prepared.draft_again()
    assert measuring.follow is not None
    files = measuring.follow(second, settings, without_measuring(second.draft), arrays)
    second.named += _files(settings)
    return SecondPlan(second.finish(), files=files)


def _expected_steps(prepared: Prepared) -> list[Step]:
    """As if nothing were measured."""
    measuring, settings = _following(prepared)
    if settings.target is not None:  # nothing is known of the size
        return []
    text = dict.fromkeys(("calibration_rows", "calibration_tokens", "calibration_dtype", "measure"))
    second = prepared.draft_again()
    without_measuring(second.draft)
    try:
        measuring.apply(second, replace(settings, calibration=NONE, **text))  # type: ignore[arg-type]
    except PlanError:
        return []
    return second.draft.steps


def _target(prepared: Prepared) -> float | None:
    try:
        return read_target(_following(prepared)[1])
    except ParameterError as error:
        raise FormatError(error.finding.what, where="then", fix="make the plan again") from error


def _unquantised(prepared: Prepared) -> Prepared:
    plain = prepared.draft_again()
    without_measuring(plain.draft)
    return plain.finish()


FOLLOW_UP = FollowUpKind(_follow, expected=_expected_steps, target=_target, reference=_unquantised)
"""A format whose settings follow from a measurement. `FollowUp.settings`: `format`, the `products` of the
measurement, and the fields of `QuantizeSettings`."""


def _following(prepared: Prepared) -> tuple[Format, QuantizeSettings]:
    """The format and the settings that follow. Raises FormatError for a plan that no format of ours made."""
    values = dict(prepared.plan.then.settings) if prepared.plan.then is not None else {}
    name, products = values.pop("format", None), values.pop(MEASURED, None)
    names = {product.name for product in prepared.plan.products}
    is_ours = isinstance(products, list | tuple) and all(isinstance(product, str) and product in names for product in products)
    measuring = FORMATS[name] if isinstance(name, str) and name in FORMATS else None
    if measuring is None or measuring.follow is None or not is_ours or not has_type(values, QuantizeSettings):
        raise FormatError("not a plan that can be run: no format of ours measures so", where="then", fix="make the plan again")
    (settings,) = read_options("run", values, QuantizeSettings)
    return measuring, settings


def problems_of(name: str | None, settings: QuantizeSettings) -> list[WeightsmithError]:
    """The problems of a format's name and settings."""
    if name is None:
        if not settings.given:
            return []
        fix = f"add {assignment('quantize', _first_that_reads(settings.given[0]))} or another"
        return [ParameterError("needs a quantised format that reads it", where=named(*settings.given), fix=fix)]
    known = FORMATS[name].settings
    unread = [name for name in settings.given if name not in known and name != "engine"]
    if not unread:
        try:
            check_target(settings)
        except ParameterError as error:
            return [error]
        return unloaded(name, settings)
    reads = f"reads {named(*sorted(known))}" if known else "has none"
    return [ParameterError(f"not a setting of {name}, which {reads}", where=named(*unread), fix=f"leave out {named(*unread)}")]


def _first_that_reads(setting: str) -> str:
    return next((known.name for known in FORMATS.values() if setting in known.settings), next(iter(FORMATS)))


def _files(settings: QuantizeSettings) -> list[Path]:
    """The files that settings name."""
    calibration = None if settings.calibration in (BUILT_IN, NONE) else settings.calibration
    return [expand_user(name) for name in (calibration, settings.measurement, settings.imatrix) if name is not None]


def _decoded(models: Iterable[Checkpoint], name: str) -> list[Finding]:
    """Which models are quantised already."""
    return [
        Finding(f"it is quantised already ({model.decoded}): its weights are dequantised, then stored as {name}", model.ref)
        for model in models
        if model.decoded
    ]
