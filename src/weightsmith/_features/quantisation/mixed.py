"""Weights in several encodings of one stored format: `--quantize nvfp4a16 --tensor-type self_attn=fp8-dynamic`.

A type is `REGEX=NAME`. The expression is searched for in the names of weights that are quantised, and the last type that fits
a weight wins. NAME is an encoding of the same stored format, with its group size (`w4a16-g64`), or `plain`.

Engines join query, key and value into one matrix, and gate and up: such weights need the same encoding there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from weightsmith._base.errors import Finding, PlanError, Unsupported, WeightsmithError, nearest
from weightsmith._base.options import option_error
from weightsmith._features.quantisation.base import check_engines, unloaded
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats import find_encoding, format_of_encoding
from weightsmith._models.structure.projections import joined_sets
from weightsmith._planning.planner.encode import encodable
from weightsmith._plans import PLAIN, PlanDraft
from weightsmith.abc.stored import Encoding, StoredFormat

_JOINING = ("vllm", "sglang")
"""Programs that join weights."""

_Types = list[tuple[re.Pattern[str], str]]


def encodings_by_weight(draft: PlanDraft, default: Encoding, texts: Sequence[str]) -> dict[str, str]:
    """The encoding of each weight that a type fits, by its name.

    draft    of plain tensors
    default  the encoding of the other weights
    texts    as users write types: `self_attn=fp8-dynamic`

    Raises PlanError: a type that cannot be read, or that fits no weight which is quantised.
    """
    stored_format = format_of_encoding(default.name)
    types, problems = _read(stored_format, texts)
    if problems:
        raise PlanError([option_error("tensor_types", problem) for problem in problems])
    weights = encodable(draft, default.name)
    for name in {kind for _, kind in types} - {PLAIN}:
        weights += [weight for weight in encodable(draft, name) if weight not in weights]
    unused = [pattern.pattern for pattern, _ in types if not any(map(pattern.search, weights))]
    if unused:
        what, fix = "no weight that is quantised has a name that matches", "write a part of a name, such as self_attn.q_proj"
        raise PlanError([option_error("tensor_types", f"{what} {pattern}", fix) for pattern in unused])
    fitting = ((weight, _type_of(weight, types)) for weight in weights)
    return {weight: kind for weight, kind in fitting if kind not in ("", default.name)}


def _read(stored_format: StoredFormat, texts: Sequence[str]) -> tuple[_Types, list[str]]:
    """Types, and problems of those that cannot be read."""
    types, problems = _Types(), list[str]()
    names = [PLAIN, *(encoding.name for encoding in stored_format.encodings)]
    for text in texts:
        pattern, equals, kind = text.rpartition("=")
        if not equals or not pattern:
            problems.append(f"'{text}' is not REGEX=FORMAT, such as self_attn=fp8-dynamic")
        elif kind not in names:
            what = f"'{kind}' cannot be mixed with formats of {stored_format.name.replace('_', '-')}{nearest(kind, names)}"
            problems.append(f"{what}; those that can are {', '.join(names)}")
        else:
            try:
                types.append((re.compile(pattern), kind))
            except re.error as error:
                problems.append(f"'{pattern}' is not a regular expression: {error}")
    return types, problems


def _type_of(weight: str, types: _Types) -> str:
    return next((kind for pattern, kind in reversed(types) if pattern.search(weight)), "")


def measured_encoding(default: Encoding, by_weight: Mapping[str, str]) -> Encoding:
    """The encoding for which a text is read: one with scales of activations, or one that takes a Hessian, or the default.

    Raises PlanError if two need the text for different things.
    """
    used = dict.fromkeys([default.name, *(name for name in by_weight.values() if name != PLAIN)])
    encodings = [find_encoding(name) for name in used]
    scaled = [encoding for encoding in encodings if encoding.inputs is not None]
    if len(scaled) > 1:
        names = " and ".join(encoding.name for encoding in scaled)
        what = f"{names} need different scales of activations, and one output has one kind"
        raise PlanError([option_error("tensor_types", what, "choose one of them")])
    return next(iter([*scaled, *(encoding for encoding in encodings if encoding.hessian != "no"), default]))


def check_mixture(draft: PlanDraft, default: Encoding, by_weight: Mapping[str, str], settings: QuantizeSettings) -> None:
    """Warn of weights that are not calibrated, and of what programs do not run in a quantised draft.

    Raises PlanError if one of them is the program of `--for`.
    """
    scaled = measured_encoding(default, by_weight).inputs is not None
    rounded = [step.out.name for step in draft.steps if scaled and find_encoding(step.encoding).hessian != "no"]
    if rounded:
        what = f"{len(rounded):,} weights of integers are rounded to nearest: the text gives scales of activations only"
        draft.warn(what, rounded[0])
    used = [name for name in dict.fromkeys(step.encoding for step in draft.steps) if name not in (PLAIN, default.name)]
    problems: list[WeightsmithError] = []
    for name in used:
        writing = next(w for w in format_of_encoding(name).writes if name in {e.name for e in w.encodings.values()})
        problems += unloaded(writing.name, settings)
        if not problems:
            check_engines(draft, name, writing.name, settings)
    divided = list(_divided(draft, {*by_weight}))
    if divided and settings.engine in _JOINING:
        problems += [Unsupported(finding.what, where=finding.where, fix=finding.fix) for finding in divided]
    elif divided and settings.engine is None:
        draft.warnings += divided
    if problems:
        raise PlanError(problems)


def _divided(draft: PlanDraft, asked: set[str]) -> Iterator[Finding]:
    """One finding of all weights that engines join, and that are not in one encoding."""
    encoding_of = {step.out.name: step.encoding for step in draft.steps if len(step.out.shape) == 2}
    sets = [names for names in joined_sets(encoding_of) if len({encoding_of[name] for name in names}) > 1]
    divided = [names for names in sets if not asked.isdisjoint(names)]
    if divided:
        names = ", ".join(f"{name.split('.')[-2]} {encoding_of[name]}" for name in divided[0])
        what = f"vLLM and SGLang join weights of a layer, and need these in one format: {names} ({len(divided):,} layers)"
        yield Finding(what, divided[0][0], fix="give all parts the same type, such as (q|k|v)_proj=fp8-dynamic")
