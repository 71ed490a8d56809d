"""The list of formats, and the one place where a draft becomes one of them.

Formats that need no data are an encoding for each weight, applied to rows as they leave the merge. w4a16, w8a16, GPTQ and AWQ
may have a calibration text; their weights are then products. Static scales of activations, and of a KV cache, are products of
a text beside the weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from weightsmith._activations.rows import BUILT_IN
from weightsmith._base.errors import Finding, FormatError, ParameterError, PlanError, WeightsmithError, undoing
from weightsmith._base.files import expand_user
from weightsmith._base.options import assignment, named, option_error, read_options
from weightsmith._features.quantisation import exl2, exl3
from weightsmith._features.quantisation.base import Format, check_target, read_target
from weightsmith._features.quantisation.calibration.plan import (
    CACHE_SETTINGS,
    CALIBRATION_SETTINGS,
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
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner import Assembled, Prepared, build
from weightsmith._planning.planner.encode import encodable, quantise
from weightsmith._planning.recipe import copy_of
from weightsmith._plans import Made, PlanDraft, Step
from weightsmith._plans.codec import has_type
from weightsmith._version import __version__
from weightsmith.abc.product import Arrays
from weightsmith.abc.stored import Writing


def _streamed(writing: Writing, *, caches: bool) -> Format:
    """A format that encodes rows as they leave the merge. If no group size is asked for, it is the first that stores the most
    weights: the width of a weight must be a multiple of it.

    With a calibration text, codes are GPTQ's where the encoding takes a Hessian; without one, weights are rounded to nearest.
    """
    groups, default = tuple(writing.encodings), next(iter(writing.encodings.values()))
    calibrates = default.hessian != "no"

    def apply(assembled: Assembled, settings: QuantizeSettings) -> None:
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


def prepare_copy(model: str | os.PathLike[str], options: RecipeOptions, settings: QuantizeSettings) -> Prepared:
    """Plan a copy of a model in the format `options.quantize`; None: with plain weights.

    model  as in a recipe: a folder, a hub id, `base+adapter`

    Raises PlanError with all problems.
    """
    assembled = in_format(lambda: build.assemble(copy_of(model), options), options.quantize, settings)
    provenance = Made("dequantize", f"Dequantised with weightsmith {__version__}.", relation="")
    if options.quantize is not None:
        title = f"Quantised with weightsmith {__version__} as `{options.quantize}`."
        provenance = Made("quantize", title, relation="quantized", format=options.quantize)
    assembled.draft.made = provenance
    return assembled.finish()


def in_format(assemble: Callable[[], Assembled], name: str | None, settings: QuantizeSettings) -> Assembled:
    """What `assemble` returns, its draft in the format `name`; unchanged if that is None.

    Raises PlanError with the problems of `assemble`, and those of the format's name and settings; then as `Format.apply`.
    """
    problems = _problems(name, settings)
    try:
        assembled = assemble()
    except PlanError as error:
        if not problems:
            raise
        raise PlanError([*error.problems, *problems], error.source) from error
    with undoing(assembled.close):
        if problems:
            raise PlanError(problems)
        if name is None:
            return assembled
        assembled.draft.warnings += family_problems(name, assembled.draft.config, settings)
        FORMATS[name].apply(assembled, settings)
    draft, before = assembled.draft, assembled.again
    draft.made = replace(draft.made, format=name)
    draft.warnings += _decoded(assembled.inputs, name)
    assembled.again = None if before is None else lambda written: in_format(lambda: before(written), name, settings)
    assembled.named += _files(settings)
    return assembled


def expected_steps(prepared: Prepared) -> list[Step]:
    """About the steps of the plan that follows from one with `Plan.then`: as if nothing were measured; [] if that cannot be."""
    then = dict(prepared.plan.then or {})
    settings = replace(
        QuantizeSettings(**then["settings"]),
        calibration=NONE,
        calibration_rows=None,
        calibration_tokens=None,
        calibration_dtype=None,
        measure=None,
    )
    if settings.target is not None:  # nothing is known of the size
        return []
    assembled = Assembled.of(prepared)
    without_measuring(assembled.draft)
    try:
        FORMATS[then["format"]].apply(assembled, settings)
    except PlanError:
        return []
    return assembled.draft.steps


def followed(
    prepared: Prepared, arrays: Mapping[str, Arrays], size_bytes: int | None = None
) -> tuple[Prepared, Mapping[str, bytes]]:
    """The plan that follows from the products of one with `Plan.then`, and files to add to the output.

    arrays      of the products, by name
    size_bytes  of the weight files, if the settings have a target instead of a size: the next size that the format can have

    Raises PlanError; FormatError for a plan that no format of ours made.
    """
    made, settings = _following(prepared)
    if size_bytes is not None:
        settings = replace(settings, size_bytes=size_bytes)
    assert made.follow is not None
    assembled = Assembled.of(prepared)
    files = made.follow(assembled, settings, without_measuring(assembled.draft), arrays)
    assembled.named += _files(settings)
    return assembled.finish(), files


def target_of(prepared: Prepared) -> float | None:
    """The largest divergence of the result of a plan with `Plan.then`; None if it has no target. Raises as `followed`."""
    try:
        return read_target(_following(prepared)[1])
    except ParameterError as error:
        raise FormatError(error.finding.what, where="then", fix="make the plan again") from error


def unquantised(prepared: Prepared) -> Prepared:
    """The plan of the plain tensors of one with `Plan.then`."""
    assembled = Assembled.of(prepared)
    without_measuring(assembled.draft)
    return assembled.finish()


def _following(prepared: Prepared) -> tuple[Format, QuantizeSettings]:
    """The format and the settings of `Plan.then`. Raises FormatError for a plan that no format of ours made."""
    then = dict(prepared.plan.then or {})
    name, given = then.get("format"), then.get("settings") or {}
    made = FORMATS[name] if isinstance(name, str) and name in FORMATS else None
    if made is None or made.follow is None or not has_type(given, QuantizeSettings):
        raise FormatError("not a plan that can be run: no format of ours measures so", where="then", fix="make the plan again")
    (settings,) = read_options("run", given, QuantizeSettings)
    return made, settings


def _problems(name: str | None, settings: QuantizeSettings) -> list[WeightsmithError]:
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
