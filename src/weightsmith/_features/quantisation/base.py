"""What formats share: the interface, whether programs that run models load an output, and a divergence as a target.

An output that some program cannot load is a warning, or with `--for` an error, before tensor data is read. With `--target
kl=0.02` a result must not exceed a divergence: the format chooses the settings of a size, from its measurement; which size, is
found by evaluating results (`_execution/second_plans.py`).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from weightsmith._activations.rows import BUILT_IN
from weightsmith._base.errors import Finding, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith._base.idioms import grouped
from weightsmith._base.options import assignment, named, option_error
from weightsmith._base.tensors import TensorSpec
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats import Encoding, find_encoding, formats
from weightsmith._models.formats.engines import (
    Engine,
    engines_of,
    find_engine,
    find_support,
    formats_of,
    objections,
)
from weightsmith._models.structure.vocabulary import is_embedding
from weightsmith._planning.options import SHARD_BYTES
from weightsmith._planning.planner.encode import encodable
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import PlanDraft, Product, Step
from weightsmith.abc.product import Arrays


class Format(ABC):
    """One way to store a whole checkpoint.

    name      as users write it: `fp8-dynamic`
    summary   one line: what is stored, and how many bits a weight takes
    readers   the programs that load it
    settings  fields of `QuantizeSettings` that it reads; any other that is given is an error before `apply` is called
    measures  `apply` may set `then`, and `follow` makes the plan that follows from the measurement
    shard_bytes  maximum size of a weight file, unless the user says another
    """

    name: str
    summary: str
    readers: str
    settings: frozenset[str] = frozenset()
    measures: bool = False
    shard_bytes: int = SHARD_BYTES

    @abstractmethod
    def apply(self, prepared: Prepared, settings: QuantizeSettings) -> None:
        """Make the draft of plain tensors one of the format. Raises PlanError with all problems.

        Reads headers and small files of `prepared.inputs[prepared.draft.donor]` only, never tensor data.
        """

    def follow(
        self, prepared: Prepared, settings: QuantizeSettings, measured: Sequence[Product], arrays: Mapping[str, Arrays]
    ) -> Mapping[str, bytes]:
        """Make the draft of plain tensors one of the format, by what was measured; files to add to the output.

        measured  products, whose arrays are in `arrays` by name

        Raises PlanError, FormatError.
        """
        raise NotImplementedError

    def part(self, parts: Collection[str]) -> str:
        """The part of a pipeline that it stores, of these; "" for none."""
        return ""


# ---- a divergence instead of a size


_KL = re.compile(r"kl\s*=\s*([0-9.]+(?:e-?[0-9]+)?)", re.IGNORECASE)


def read_target(settings: QuantizeSettings) -> float | None:
    """The largest divergence, in nats per token; None if the settings have no target. Raises ParameterError.

    >>> read_target(QuantizeSettings(target="kl=0.02"))
    0.02
    """
    if settings.target is None:
        return None
    match = _KL.fullmatch(settings.target.strip())
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        fix = f"write {assignment('target', 'kl=0.02')}, in nats per token"
        raise option_error("target", f"'{settings.target}' is not a divergence above 0", fix)
    return value


def check_target(settings: QuantizeSettings) -> float | None:
    """`read_target`, for settings that a user gives. Raises ParameterError for a target beside a size or bits, too."""
    value = read_target(settings)
    contradicting = [name for name in ("bits", "size_bytes") if getattr(settings, name) is not None]
    if value is not None and contradicting:
        what = "the size follows from the target"
        raise option_error("target", what, f"leave out {named(*contradicting)} or {named('target')}")
    return value


_Refusals = list[tuple[Engine, str, list[str]]]
"""(program, reason, names of weights)"""


def unloaded(format: str, settings: QuantizeSettings) -> list[WeightsmithError]:
    """A problem if the program of `--for` does not load the format at all."""
    if settings.engine is None or find_support(settings.engine, format) is not None:
        return []
    engine = find_engine(settings.engine)
    loads = ", ".join(formats_of(engine.name)) or "no format that weightsmith writes"
    what, fix = f"{engine.release} does not load {format}, only {loads}", ""
    if others := engines_of(format):
        fix = f"choose another format, or a program that loads {format}: {', '.join(other.name for other in others)}"
    return [option_error("engine", what, fix)]


def family_problems(format: str, config: Mapping[str, object] | None, settings: QuantizeSettings) -> list[Finding]:
    """Programs that load the format, but no model of this type. Raises PlanError if it is that of `--for`."""
    family = (config or {}).get("model_type")
    refused: _Refusals = [
        (engine, f"has no models of the type {family}", [])
        for engine in engines_of(format)
        if engine.families and family is not None and family not in engine.families
    ]
    return _reported(refused, format, settings, lambda engine: "")


def check_engines(draft: PlanDraft, encoding: str, format: str, settings: QuantizeSettings) -> None:
    """Warn of the weights of a draft that programs which load the format do not run, one warning for each reason.

    Raises PlanError with all reasons if one of them is the program of `--for`.
    """
    stored = [step.out for step in draft.steps if step.encoding == encoding]
    plain = [step.out for step in draft.steps if step.encoding != encoding]

    def instead(engine: Engine) -> str:
        fitting = _fitting(engine, [*stored, *plain], draft, len(stored))
        return f"choose {', '.join(fitting)} for {engine.title}" if fitting else ""

    draft.warnings += _reported(_refused(format, stored, plain, family_of(draft)), format, settings, instead)


def engine_findings(format: str, stored: Sequence[TensorSpec], settings: QuantizeSettings, instead: str) -> list[Finding]:
    """As `check_engines`, for a format that one program loads. instead: what to do, for its users."""
    return _reported(_refused(format, stored, (), None), format, settings, lambda engine: instead)


def family_of(draft: PlanDraft) -> object:
    """`model_type` of config.json."""
    return (draft.config or {}).get("model_type")


def _refused(format: str, stored: Sequence[TensorSpec], plain: Sequence[TensorSpec], family: object) -> _Refusals:
    return [
        (engine, reason, names)
        for engine in engines_of(format)
        if (support := find_support(engine.name, format)) is not None
        for reason, names in objections(support, format, stored, plain, family).items()
    ]


def _reported(refused: _Refusals, format: str, settings: QuantizeSettings, instead: Callable[[Engine], str]) -> list[Finding]:
    """Warnings, one for each reason, or none if a program is named. Raises PlanError with the reasons of that program."""
    asked = [refusal for refusal in refused if settings.engine in (None, refusal[0].name)]
    by_reason = grouped(
        ((reason, names[0] if names else "model_type in config.json"), (engine, names)) for engine, reason, names in asked
    )
    findings = []
    for (reason, where), refusals in by_reason.items():
        who, refusing = " and ".join(engine.release for engine, _ in refusals), [engine for engine, _ in refusals]
        others = [other.title for other in engines_of(format) if other not in refusing]
        ways = [*filter(None, map(instead, refusing)), *([f"use {' or '.join(others)}"] if others else [])]
        findings.append(Finding(f"{who} {reason}{_count(refusals[0][1])}", where, fix="; or ".join(dict.fromkeys(ways))))
    if settings.engine is not None and findings:
        raise PlanError(as_problems(findings))
    return findings


def as_problems(findings: Iterable[Finding]) -> list[WeightsmithError]:
    """Warnings as errors, for the program of `--for`."""
    return [Unsupported(finding.what, where=finding.where, fix=finding.fix) for finding in findings]


def _count(names: Sequence[str]) -> str:
    return f": {len(names):,} weights" if len(names) > 1 else ": one weight" if names else ""


def _fitting(engine: Engine, specs: Sequence[TensorSpec], draft: PlanDraft, least: int) -> list[str]:
    """Formats in which the program runs this model, each with at least this many weights."""
    chosen = []
    for writing in (writing for stored_format in formats() for writing in stored_format.writes):
        support = find_support(engine.name, writing.name)
        for group, encoding in writing.encodings.items() if support is not None else ():
            names = set(encodable(draft, encoding.name))
            stored, plain = [s for s in specs if s.name in names], [s for s in specs if s.name not in names]
            if support and len(stored) >= least and not objections(support, writing.name, stored, plain, family_of(draft)):
                chosen.append(writing.name if encoding.name == writing.name else f"{writing.name} --group-size {group}")
                break
    return chosen


# ---- settings of a calibration text, and a measurement on it


NONE = "none"
"""`--calibration none`: round to nearest."""

_OF_THE_TEXT = ("calibration_rows", "calibration_tokens", "calibration_dtype")

CALIBRATION_SETTINGS = frozenset({"calibration", *_OF_THE_TEXT})
"""What a calibration reads of the settings."""

CACHE_SETTINGS = CALIBRATION_SETTINGS | {"kv_cache"}
"""The same, and scales of the cache."""

SCALES_SETTINGS = frozenset({"awq_scales"})
"""What it reads too if input features of weights may get scales."""


MEASURING = "measurement: "
"""Prefix of the names of a measurement's products: a merge may measure the same on another text."""
MEASURED = "products"
"""Key of `FollowUp.settings`: the names of a measurement's products."""

MEASURED_ROWS = 32
"""The most rows of a calibration text that losses are measured with: their states are stored for all layers at once."""


def calibrates(settings: QuantizeSettings) -> bool:
    """Whether a format that can do without a calibration is to have one."""
    return settings.calibration != NONE


def is_calibrated(step: Step) -> bool:
    """Whether a weight of a quantised draft gets its codes from a calibration: not if they are copied, or tokens enter it."""
    return find_encoding(step.encoding).hessian != "no" and not step.verbatim and not is_embedding(step.out)


def unused(settings: QuantizeSettings, *, calibrates: bool) -> list[WeightsmithError]:
    """A problem if a setting of the text is given, and no text is read."""
    names = [name for name in _OF_THE_TEXT if getattr(settings, name) is not None]
    if calibrates or not names:
        return []
    fix = f"add {assignment('calibration', BUILT_IN)} or a text of yours, or leave out {named(*names)}"
    return [ParameterError("no calibration text is read", where=named(*names), fix=fix)]


def text_problems(encoding: Encoding | None, settings: QuantizeSettings) -> list[WeightsmithError]:
    """Problems of the settings of the text, for weights in one encoding. None: only the embedding is quantised."""
    asked = "kv_cache" if settings.kv_cache is not None else "quantize"
    name = "an embedding, which tokens enter," if encoding is None else encoding.name
    if settings.kv_cache is not None or (encoding is not None and encoding.inputs is not None):
        if settings.calibration != NONE:
            return []
        what = f"{named('kv_cache')} needs a text" if settings.kv_cache is not None else f"{name} needs a text"
        fix = f"add {assignment('calibration', BUILT_IN)} or a text of yours"
        return [ParameterError(f"{what}, from which it gets the scales of activations", where=named(asked), fix=fix)]
    if encoding is not None and encoding.hessian != "no":
        return unused(settings, calibrates=settings.calibration not in (None, NONE))
    if names := [setting for setting in ("calibration", *_OF_THE_TEXT) if getattr(settings, setting) is not None]:
        fix = f"leave out {named(*names)}, or add {assignment('kv_cache', 'fp8')}"
        return [ParameterError(f"{name} reads no text without {named('kv_cache')}", where=named(*names), fix=fix)]
    return []


def without_measuring(draft: PlanDraft) -> list[Product]:
    """Remove the measurement from the draft to which it was added; its products. A merge keeps what it measures itself."""
    names = set() if draft.then is None else {*draft.then.settings[MEASURED]}
    measured = [product for product in draft.products if product.name in names]
    draft.then, draft.products = None, [product for product in draft.products if product.name not in names]
    return measured
