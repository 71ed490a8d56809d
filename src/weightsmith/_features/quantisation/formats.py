"""The list of formats, and the one place where a draft becomes one of them.

Formats that need no data are an encoding for each weight, applied to rows as they leave the merge. w4a16, w8a16, GPTQ and AWQ
may have a calibration text; their weights are then products. Static scales of activations, and of a KV cache, are products of
a text beside the weights.

Other formats write whole models, and may weigh the columns of weights by a calibration text, or choose types for a size. What
such a format is made of, it knows itself (`abc.stored.ModelFormat`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from weightsmith._activations.rows import BUILT_IN, OWN
from weightsmith._base.errors import Finding, FormatError, ParameterError, PlanError, Unsupported, WeightsmithError, nearest
from weightsmith._base.files import expand_user, read_bounded
from weightsmith._base.idioms import grouped
from weightsmith._base.options import assignment, named, option_error, read_options
from weightsmith._base.strict_json import parse_object
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._features.quantisation.base import (
    CACHE_SETTINGS,
    CALIBRATION_SETTINGS,
    MEASURED,
    MEASURED_ROWS,
    MEASURING,
    NONE,
    SCALES_SETTINGS,
    Format,
    as_problems,
    check_engines,
    check_target,
    family_problems,
    is_calibrated,
    read_target,
    text_problems,
    unloaded,
    unused,
    without_measuring,
)
from weightsmith._features.quantisation.optimise import solve_together
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._files.containers import PLAIN_NAMES
from weightsmith._files.copied import MAX_COPIED_BYTES
from weightsmith._files.hf_folder import CARD_NAME, hub_id_of
from weightsmith._files.subfolders import PIPELINE
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.formats import find_encoding, format_of_encoding, formats, formats_for
from weightsmith._models.formats.engines import engines_of, head_objections
from weightsmith._models.formats.verbatim import copied
from weightsmith._models.structure.projections import joined_sets, site_of
from weightsmith._models.structure.vocabulary import (
    TIED_HEAD,
    is_embedding,
    is_model_embedding,
    is_model_head,
    is_vocabulary,
    tie_flag,
)
from weightsmith._planning.follow_ups import FollowUpKind, SecondPlan
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.encode import encodable, quantise
from weightsmith._planning.planner.files import NO_CONFIG, joined, lacking
from weightsmith._planning.planner.pipelines import drop_subfolders
from weightsmith._planning.planner.prepared import Prepared, model_input
from weightsmith._planning.planner.tensor_data import numbers_of
from weightsmith._plans import CAST, COPY, PLAIN, Plan, PlanDraft, Product, Read, Step
from weightsmith._plans.codec import has_type
from weightsmith.abc.product import Arrays, Floats
from weightsmith.abc.stored import Encoding, ModelFiles, ModelFormat, ModelOrigin, ModelRequest, StoredFormat, Writing
from weightsmith.abc.tensors import StoredAs

_SIZES = frozenset({"size_bytes", "target"})


class WholeFormat(Format):
    """A format that writes whole models. With a text, importances of columns and types of weights follow from it."""

    def __init__(self, model_format: ModelFormat) -> None:
        self._format, self.measures = model_format, model_format.measures
        self.name, self.summary, self.readers = model_format.name, model_format.summary, model_format.readers
        self.settings = model_format.settings | (CALIBRATION_SETTINGS | _SIZES if self.measures else frozenset[str]())
        self.shard_bytes = model_format.shard_bytes

    def part(self, parts: Collection[str]) -> str:
        return self._format.part(parts)

    def apply(self, prepared: Prepared, settings: QuantizeSettings) -> None:
        model_format = self._format
        sized = settings.size_bytes is not None or settings.target is not None
        if sized and settings.calibration is None:
            settings = replace(settings, calibration=BUILT_IN)
        measures = settings.calibration not in (None, NONE)
        _check(settings, sized=sized, measures=measures)
        draft, request = prepared.draft, self._request(settings)
        with _problems_of_a_plan():
            kept = () if measures else model_format.modules(draft.config, partial(_file_of_output, prepared))
            drop_subfolders(draft, model_format.program, kept)
            if not measures:
                self._prepare(prepared, request)
                return
            model_format.weighed(draft.config, ())  # refuses a model that it cannot write, before the text is read
            from weightsmith._features.quantisation.calibration.plan import Chain

            chain = Chain(prepared, settings, None, MEASURED_ROWS if sized else None, MEASURING)
            weights = [model_format.weighed(draft.config, _outs(draft, chain.names(layer))) for layer in range(chain.layers)]
            tried = [model_format.candidates(draft.config, specs, request) for specs in weights] if sized else []
            ends = model_format.candidates(draft.config, _vocabulary(chain.steps(chain.layers)), request) if sized else {}
            ones = {spec.name: np.ones(spec.shape[1:], np.float32) for specs in weights for spec in specs}
            trial = replace(prepared, draft=PlanDraft.of(draft))
            self._prepare(trial, replace(request, importances=ones))  # its errors, before anything is measured
            if sized:
                encodings = {name: names for candidates in (*tried, ends) for name, names in candidates.items()}
                _slots(model_format, trial.draft, draft, settings, encodings)

        def moments(layer: int, states: Product) -> list[Product]:
            return [chain.statistic("moments", layer, states, [spec.name for spec in weights[layer]])]

        def scores(layer: int, states: Product, _gradients: Product, leaving: Product) -> list[Product]:
            return [chain.scores(layer, states, leaving, tried[layer])] if tried[layer] else []

        def of_ends(entering: Product, gradients: Product, leaving: Product) -> list[Product]:
            return [chain.vocabulary_scores(entering, gradients, leaving, ends)] if ends else []

        products = chain.backward(scores, before=moments, after=of_ends) if sized else chain.forward(moments)
        chain.measure(draft, products, model_format.name, settings)

    def follow(
        self, prepared: Prepared, settings: QuantizeSettings, measured: Sequence[Product], arrays: Mapping[str, Arrays]
    ) -> Mapping[str, bytes]:
        importances: dict[str, Floats] = {}
        scores: dict[str, Floats] = {}
        tried: dict[str, tuple[str, ...]] = {}
        for product in measured:
            if product.name in arrays and product.op in ("scored_layer", "scored_vocabulary"):
                candidates: Mapping[str, tuple[str, ...]] = product.settings["candidates"]
                tried |= candidates
                scores |= dict(zip(candidates, arrays[product.name][0], strict=True))
            elif product.name in arrays:
                importances |= _by_weight(product, arrays[product.name])
        with _problems_of_a_plan():
            request = replace(self._request(settings), importances=importances)
            if settings.size_bytes is not None:  # the search for a target gives one
                trial = replace(prepared, draft=PlanDraft.of(prepared.draft))
                self._prepare(trial, request)
                slots, budget = _slots(self._format, trial.draft, prepared.draft, settings, tried)
                request = replace(request, types=_fitting_types(slots, budget, scores))
            return self._prepare(prepared, request)

    def _request(self, settings: QuantizeSettings) -> ModelRequest:
        return ModelRequest({name: getattr(settings, name) for name in self._format.settings})

    def _prepare(self, prepared: Prepared, request: ModelRequest) -> Mapping[str, bytes]:
        """`ModelFormat.prepare` of a draft, which then lists what the output lacks."""
        draft, held = prepared.draft, set[str]()
        origins = [_origin(original) for checkpoint in prepared.inputs for original in _originals(checkpoint)]
        of_donor = partial(_file_of_donor, prepared)
        companions = ModelFiles(
            origins,
            partial(_files_of, prepared),
            of_donor,
            held.update,
            partial(_tensor_of_donor, prepared),
            partial(numbers_of, prepared),
            partial(_stored_as, prepared),
            partial(_undecoded, prepared),
            partial(_header_of_donor, prepared),
        )
        files = self._format.prepare(draft, companions, request)
        if draft.config is None:  # programs that read the format need no config.json
            draft.warnings = [finding for finding in draft.warnings if not finding.what.startswith(NO_CONFIG)]
        draft.lacking = joined([draft.lacking, lacking(((model.ref, model.files) for model in prepared.inputs), held)])
        return files


def _check(settings: QuantizeSettings, *, sized: bool, measures: bool) -> None:
    """Raise PlanError for settings that contradict each other."""
    if sized and not measures:
        what = "types for a size are chosen by a measurement on a text"
        which = "size_bytes" if settings.target is None else "target"
        raise PlanError([option_error(which, what, f"leave out {named('calibration')}, or name a text")])
    if measures and settings.imatrix is not None:
        what = "importances come from a file or from a calibration text, not both"
        raise PlanError([option_error("imatrix", what, f"leave out {named('imatrix')} or {named('calibration')}")])
    if problems := unused(settings, calibrates=measures):
        raise PlanError(problems)


def _outs(draft: PlanDraft, names: Iterable[str]) -> list[TensorSpec]:
    listed = set(names)
    return [step.out for step in draft.steps if step.out.name in listed]


def _vocabulary(steps: Iterable[Step]) -> list[TensorSpec]:
    """The embedding, and the head."""
    return [step.out for step in steps if is_vocabulary(step.out) and len(step.out.shape) == 2]


@contextmanager
def _problems_of_a_plan() -> Iterator[None]:
    try:
        yield
    except WeightsmithError as error:
        if isinstance(error, PlanError):
            raise
        error.finding = replace(error.finding, where=f"quantize: {error.finding.where}".removesuffix(": "))
        raise PlanError([error]) from error


# ---- what is beside the weights


def _in_files(prepared: Prepared, read: Read) -> tuple[Checkpoint, str] | None:
    """The model and its tensor that is read, also as a copy in results that are computed on the way."""
    from weightsmith._engine.computed import computed_source

    source: tuple[Checkpoint, str] | None = (prepared.inputs[read.model], read.tensor) if read.model >= 0 else None
    while source is not None and (computed := computed_source(source[0])) is not None:
        source = computed.copy_of(source[1])
    return source


def _stored_as(prepared: Prepared, read: Read) -> StoredAs | None:
    """How the files of a model have a tensor; None: not so that it can be copied."""
    source = _in_files(prepared, read)
    return None if source is None or source[0].verbatim is None else source[0].verbatim.stored_as(source[1])


def _undecoded(prepared: Prepared, read: Read) -> int:
    """The index of a model as its files have it, which the first call adds to the draft."""
    source = _in_files(prepared, read)
    assert source is not None
    model = source[0]
    assert model.verbatim is not None
    for number, other in enumerate(prepared.inputs):
        if other.source is model.verbatim.source:
            return number
    files = model.undecoded()
    prepared.inputs = (*prepared.inputs, files)
    prepared.draft.models.append(model_input(files))
    return len(prepared.inputs) - 1


def _header_of_donor(prepared: Prepared, names: Sequence[str]) -> Mapping[str, Any]:
    """What the donor's files say in the words of their format, if the output says the same in its files `names`."""
    from weightsmith._engine.computed import computed_source

    draft: PlanDraft | Plan = prepared.draft
    donor, config = prepared.inputs[draft.donor], draft.config or {}
    while True:
        in_donor = {name for name in names if name in donor.files}
        if not in_donor <= set(draft.carried) or not draft.files.keys().isdisjoint(names):
            return {}
        if (source := computed_source(donor)) is None:
            break
        draft, donor = source.plan, source.inputs[source.plan.donor]
    same_tokens = _token_ids(config) == _token_ids(donor.config or {})
    return donor.verbatim.header if donor.verbatim is not None and same_tokens else {}


def _token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: number for key, number in config.items() if key.endswith("_token_id") and number is not None}


def _files_of(assembled: Prepared, names: Sequence[str]) -> dict[str, bytes]:
    """Those of some files that the output has."""
    draft = assembled.draft
    donor = assembled.inputs[draft.donor]
    carried = [name for name in names if name in draft.carried]
    donor.fetch(carried)
    written = {name: data for name, data in draft.files.items() if name in names}
    return {name: read_bounded(donor.folder / name, MAX_COPIED_BYTES) for name in carried} | written


def _file_of_output(assembled: Prepared, name: str) -> bytes | None:
    """A file that the output has, or else the donor's."""
    written = assembled.draft.files.get(name)
    return _file_of_donor(assembled, name) if written is None else written


def _file_of_donor(assembled: Prepared, name: str) -> bytes | None:
    donor = assembled.inputs[assembled.draft.donor]
    donor.fetch([name])
    path = donor.folder / name
    return read_bounded(path, MAX_COPIED_BYTES) if path.is_file() else None


def _tensor_of_donor(assembled: Prepared, name: str) -> bytes | None:
    donor = assembled.inputs[assembled.draft.donor]
    spec = donor.specs.get(name)
    return donor[name].tobytes() if spec is not None and spec.nbytes <= MAX_COPIED_BYTES else None


def _originals(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """The model, or those of which it is the result."""
    from weightsmith._engine.computed import computed_source

    source = computed_source(checkpoint)
    if source is None:
        yield checkpoint
    else:
        for model in source.inputs:
            yield from _originals(model)


def _origin(checkpoint: Checkpoint) -> ModelOrigin:
    """What a model is called, and its card."""
    checkpoint.fetch([CARD_NAME])
    if checkpoint.repositories:
        address = checkpoint.repositories[0].name
        name = address.rstrip("/").rpartition("/")[2] if "://" in address else address
        return ModelOrigin(name, checkpoint.card)
    stem = next((path.stem for path in checkpoint.paths), "model")
    if checkpoint.alone and stem != "model":
        return ModelOrigin(stem, checkpoint.card)
    return ModelOrigin(hub_id_of(str(checkpoint.home)) or checkpoint.home.name or "model", checkpoint.card)


# ---- types for a size

_HEADER_BYTES = 100
"""At most what a file has for a tensor besides name and numbers, with padding."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor whose type is chosen.

    bits     that the tensor has in each type
    weights  that it is made of: several, for experts
    default  the type that the format gives it
    """

    bits: dict[str, int]
    weights: list[str]
    default: str


def _slots(
    model_format: ModelFormat,
    prepared: PlanDraft,
    plain: PlanDraft,
    settings: QuantizeSettings,
    tried: Mapping[str, Sequence[str]],
) -> tuple[dict[str, _Slot], int]:
    """The tensors whose types are chosen, by name, and the bits available for them.

    prepared  the draft with the types of the format; plain: before
    tried     the encodings that were tried for each weight

    Raises ParameterError if even the smallest do not fit.
    """
    weights = grouped((model_format.stored_name(plain.config, weight), weight) for weight in tried)
    slots: dict[str, _Slot] = {}
    fixed = len(prepared.header) + len(prepared.mmproj) + 4096
    for out in (out for step in prepared.steps for out in step.stored):
        fixed += len(out.name) + _HEADER_BYTES
        if out.name not in weights:
            fixed += out.nbytes
            continue
        plain_out = replace(out, dtype=DTYPES["F32"])
        encoded = [find_encoding(name).outs(plain_out)[0] for name in tried[weights[out.name][0]]]
        slots[out.name] = _Slot({spec.dtype.name: 8 * spec.nbytes for spec in encoded}, weights[out.name], out.dtype.name)
    budget = 8 * ((settings.size_bytes or 0) - fixed)
    least = sum(min(slot.bits.values()) for slot in slots.values())
    if settings.target is not None:
        budget = max(budget, least)
    if budget < least:
        what = f"the file has at least {fixed + least // 8:,} bytes with the types that are tried, not {settings.size_bytes:,}"
        fix = f"ask for more, or set types that are smaller ({named('tensor_types')})"
        raise option_error("size_bytes", what, fix)
    return slots, budget


def _fitting_types(slots: Mapping[str, _Slot], budget: int, scores: Mapping[str, Floats]) -> dict[str, str]:
    """The types that change the predictions least and fit into the size. scores: of each weight, [encodings, tokens]."""
    bits = [list(slot.bits.values()) for slot in slots.values()]
    losses = [np.sum([scores[weight][: len(slot.bits)] for weight in slot.weights], 0) for slot in slots.values()]
    defaults = [list(slot.bits).index(slot.default) if slot.default in slot.bits else 0 for slot in slots.values()]
    chosen = solve_together(bits, losses, budget, [defaults])
    return {name: list(slot.bits)[i] for (name, slot), i in zip(slots.items(), chosen, strict=True)}


def _by_weight(product: Product, arrays: Arrays) -> dict[str, Floats]:
    """The importances of each weight; 1 where no token reached it."""
    from weightsmith._activations.statistic import keys_of
    from weightsmith._activations.statistics import find_statistic
    from weightsmith._activations.work import StatisticWork

    work = StatisticWork.of(product)
    at_site = dict(zip(keys_of(find_statistic(work.kind), work.weights), arrays, strict=True))
    of_weights = {weight: at_site[site_of(weight)] for weight in work.weights}
    return {weight: array if array.any() else np.ones_like(array) for weight, array in of_weights.items()}


class StreamedFormat(Format):
    """A format that encodes rows as they leave the merge. If no group size is asked for, it is the first that stores the most
    weights: the width of a weight must be a multiple of it. Other weights get a scale for each row, if the format can.

    With a calibration text, codes are GPTQ's where the encoding takes a Hessian; without one, weights are rounded to nearest.
    """

    def __init__(self, writing: Writing, stored: StoredFormat) -> None:
        """stored: the format that the writing is of. Weights may have other encodings of it, if it can mix them."""
        self._writing, mixes = writing, stored.mixed is not None
        self.name, self.summary, self.readers = writing.name, writing.summary, writing.readers
        calibrates = next(iter(writing.encodings.values())).hessian != "no"
        text_settings = CACHE_SETTINGS if stored.caches else CALIBRATION_SETTINGS if calibrates else frozenset[str]()
        scales = any(encoding.scaled for encoding in (stored.encodings if mixes else writing.all_encodings))
        sizes = frozenset({"group_size"}) if len(writing.encodings) > 1 else frozenset[str]()
        types = frozenset({"tensor_types"}) if mixes else frozenset[str]()
        self.settings = sizes | types | text_settings | (SCALES_SETTINGS if scales else frozenset[str]())

    def apply(self, prepared: Prepared, settings: QuantizeSettings) -> None:
        writing, groups, group_size = self._writing, tuple(self._writing.encodings), settings.group_size
        if group_size is not None and group_size not in groups:
            what = f"{writing.name} has groups of {', '.join(map(str, sorted(groups)))}, not of {group_size}"
            raise PlanError([option_error("group_size", what)])
        draft, plain = prepared.draft, replace(prepared, draft=PlanDraft.of(prepared.draft))
        group = group_size or max(groups, key=lambda group: len(encodable(draft, writing.encodings[group].name)))
        encoding = writing.encodings[group]
        by_row = _stored_by_row(draft, writing, encoding) if group_size is None else {}
        others = {**by_row, **encodings_by_weight(draft, encoding, settings.tensor_types, by_row)}
        quantise(draft, encoding.name, others)
        measured = measured_encoding(encoding, draft)
        if problems := text_problems(measured, settings):
            raise PlanError(problems)
        scales_inputs = measured is not None and measured.inputs is not None
        calibrates = measured is not None and not scales_inputs and measured.hessian != "no"
        has_text = calibrates and settings.calibration not in (None, NONE)
        if not settings.awq_scales and not (has_text and measured and measured.scaled):
            what = "no weights are calibrated in a format that scales their inputs"
            fix = f"leave it out, or add {assignment('calibration', BUILT_IN)} or a text of yours"
            raise PlanError([option_error("awq_scales", what, fix)])
        if group_size is None and group != groups[0]:
            what = f"groups of {group} are used: more weights have a multiple of it as their width than of {groups[0]}"
            draft.warn(what, "quantize")
        draft.warnings += _by_row_findings(draft, by_row)
        check_engines(draft, encoding.name, writing.name, settings)
        check_mixture(draft, encoding, others, settings)
        if has_text:
            _keep_codes(prepared)
            has_text = any(map(is_calibrated, draft.steps))
            if not has_text and settings.kv_cache is None:
                fix = "leave it out, or dequantise the model first, to choose other codes"
                draft.warn("no text is read: all weights that it would calibrate are copied", named("calibration"), fix)
        if has_text or settings.kv_cache is not None or scales_inputs:
            from weightsmith._features.quantisation.calibration.plan import measure_activations

            measure_activations(plain, draft, measured or encoding, settings, calibrates=has_text)
        writing.adapt(draft, encoding)
        _keep_codes(prepared)  # the rest: experts are one tensor now, if programs take them so


def _keep_codes(prepared: Prepared) -> None:
    """Copy what inputs store as the output does."""
    sources = partial(_stored_as, prepared), partial(_undecoded, prepared)
    draft = prepared.draft
    draft.steps = [copied(step, step.encoding, step.stored, *sources) or step for step in draft.steps]


def _stored_by_row(draft: PlanDraft, writing: Writing, encoding: Encoding) -> dict[str, str]:
    """The weights that get a scale for each row, and that encoding. Experts are not among them: programs run all projections of
    an expert in one encoding."""
    if writing.rows is None:
        return {}
    grouped_weights = set(encodable(draft, encoding.name))
    others = (name for name in encodable(draft, writing.rows.name) if name not in grouped_weights)
    return {name: writing.rows.name for name in others if "experts" not in name.split(".")}


def _by_row_findings(draft: PlanDraft, by_row: Mapping[str, str]) -> Iterator[Finding]:
    stored = [step.out for step in draft.steps if by_row.get(step.out.name) == step.encoding]
    if stored:
        what = f"{len(stored):,} weights have one scale for each row, which is less accurate: no group size divides"
        fix = f"add {assignment('tensor_types', 'REGEX=plain')} to store them as they are"
        yield Finding(f"{what} the width {stored[0].shape[1]:,}", stored[0].name, fix=fix)


_CALIBRATED = {name: f"weightsmith._features.quantisation.{name}" for name in ("exl2", "exl3")}
"""Formats with a plan of their own for a calibration text: name → module with a `FORMAT`."""


class _Formats(Mapping[str, Format]):
    """Every format, by name. What one needs is imported when it is asked for."""

    def __getitem__(self, name: str) -> Format:
        if name in _CALIBRATED:
            calibrated: Format = import_module(_CALIBRATED[name]).FORMAT
            return calibrated
        for stored in formats_for(name):
            for writing in stored.writes:
                if writing.name == name:
                    return StreamedFormat(writing, stored)
            for model_format in stored.models():
                if model_format.name == name:
                    return WholeFormat(model_format)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from (writing.name for stored in formats() for writing in stored.writes)
        yield from (model_format.name for stored in formats() for model_format in stored.models())
        yield from _CALIBRATED

    def __len__(self) -> int:
        return sum(1 for _ in self)


FORMATS = _Formats()
"""Every format, by name."""


def apply_format(prepared: Prepared, name: str, settings: QuantizeSettings, options: RecipeOptions) -> None:
    """Change a draft of plain tensors to one in the format `name`. Raises PlanError as `Format.apply`."""
    draft, chosen = prepared.draft, FORMATS[name]
    if options.max_shard_bytes is None:
        draft.max_shard_bytes = chosen.shard_bytes
    if part := chosen.part(draft.naming.parts):
        _keep_part(prepared, part)
    elif draft.naming.parts:
        model, parts = prepared.inputs[draft.donor].ref, ", ".join(draft.naming.parts)
        what = f"a pipeline of several models, and a quantised output holds one: {parts}"
        fix = f"name the folder of one part, such as {model}/{next(iter(draft.naming.parts))}, and copy the result there"
        raise PlanError([Unsupported(what, where=model, fix=fix)])
    draft.warnings += family_problems(name, draft.config, settings)
    chosen.apply(prepared, settings)
    prepared.draft.provenance = replace(prepared.draft.provenance, format=name)
    prepared.draft.warnings += _decoded(prepared, name)
    prepared.named += _files(settings)


def _keep_part(prepared: Prepared, part: str) -> None:
    """Reduce the draft of a pipeline to one of its parts."""
    draft, prefix, config = prepared.draft, f"{part}/", f"{part}/config.json"
    others = [step for step in draft.steps if not step.out.name.startswith(prefix)]
    draft.leave_out(others, f"the file holds only the part {part}")
    draft.steps = [replace(step, out=replace(step.out, name=step.out.name.removeprefix(prefix))) for step in draft.steps]
    stored = _files_of(prepared, [config]).get(config)
    draft.config = {} if stored is None else parse_object(stored, config, prepared.inputs[draft.donor].ref, "repair it")
    left_out = [name for name in draft.naming.parts if name != part]
    draft.naming, draft.files = PLAIN_NAMES, {}
    draft.carried = [name for name in draft.carried if "/" not in name and name != PIPELINE]
    if left_out:
        what = f"the other parts of the pipeline are left out: {', '.join(left_out)}"
        draft.warn(what, "quantize", "load them from the input, or from files of their own")


def _follow(prepared: Prepared, arrays: Mapping[str, Arrays], _answer: object, max_bytes: int | None) -> SecondPlan:
    from weightsmith._activations.own_text import own_text_reports

    measuring, settings = _following(prepared)
    if max_bytes is not None:
        settings = replace(settings, size_bytes=max_bytes)
    second = prepared.draft_again()
    measured = without_measuring(second.draft)
    texts = [product for product in measured if product.op == "own_text"]
    files = measuring.follow(second, settings, [product for product in measured if product not in texts], arrays)
    second.named += _files(settings)
    prepared = second.finish()
    written = {str(product.settings): arrays[product.name] for product in texts}
    again = {p.name: written[key] for p in prepared.plan.products if (key := str(p.settings)) in written and p.op == "own_text"}
    reports = {} if again else own_text_reports(texts, arrays)
    return SecondPlan(prepared, again, files, reports)


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


FOLLOW_UP = FollowUpKind(_follow, expected=_expected_steps, target=_target, reference=_unquantised, divisible=True)
"""A format whose settings follow from a measurement. `FollowUp.settings`: `format`, the `products` of the
measurement, and the fields of `QuantizeSettings`."""


def _following(prepared: Prepared) -> tuple[Format, QuantizeSettings]:
    """The format and the settings that follow. Raises FormatError for a plan that no format of ours made."""
    values = dict(prepared.plan.then.settings) if prepared.plan.then is not None else {}
    name, products = values.pop("format", None), values.pop(MEASURED, None)
    names = {product.name for product in prepared.plan.products}
    is_ours = isinstance(products, list | tuple) and all(isinstance(product, str) and product in names for product in products)
    measuring = FORMATS[name] if isinstance(name, str) and name in FORMATS else None
    if measuring is None or not measuring.measures or not is_ours or not has_type(values, QuantizeSettings):
        raise FormatError("not a plan that can be run: no format of ours measures so", where="then", fix="make the plan again")
    (settings,) = read_options("run", values, QuantizeSettings)
    return measuring, settings


def problems_of(name: str | None, settings: QuantizeSettings) -> list[WeightsmithError]:
    """The problems of a format's name and settings. name: None: there is no format, but settings of one."""
    if name is None:
        fix = f"add {assignment('quantize', _first_that_reads(settings.changed[0]))} or another"
        return [ParameterError("needs a quantised format that reads it", where=named(*settings.changed), fix=fix)]
    known = FORMATS[name].settings
    unread = [name for name in settings.changed if name not in known and name != "engine"]
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
    calibration = None if settings.calibration in (BUILT_IN, OWN, NONE) else settings.calibration
    return [expand_user(name) for name in (calibration, settings.measurement, settings.imatrix) if name is not None]


def _decoded(prepared: Prepared, name: str) -> list[Finding]:
    """Which models are quantised already, and are decoded."""
    draft = prepared.draft
    copies = {step.out.name for step in draft.steps if step.verbatim}  # text runs through their decoded numbers
    measured = (step for product in draft.products for step in product.steps if step.out.name not in copies)
    steps = [*draft.steps, *measured]
    reads = dict.fromkeys(read for step in steps for read in step.reads if read.model >= 0)
    in_files = ((read, _stored_as(prepared, read)) for read in reads)
    decoded = grouped((read.model, in_file) for read, in_file in in_files if in_file is None or in_file.decoded)
    copied_from = {prepared.inputs[read.model].ref for step in draft.steps if step.verbatim for read in step.reads}
    findings = []
    for number, model in enumerate(prepared.inputs):
        if not model.decoded or (number not in decoded and draft.then is None):
            continue
        which = "its weights are"
        if draft.then is not None:
            which = "weights that get another type are"
        elif model.ref in copied_from:
            which = f"{len(decoded[number]):,} of its weights are"
        what = f"it is quantised already ({model.decoded}): {which} dequantised, then stored as {name}"
        findings.append(Finding(what, model.ref, fix=_to_copy(prepared, number, name)))
    return findings


def _to_copy(prepared: Prepared, number: int, name: str) -> str:
    """How to keep the codes of a model, if what is copied of it is in groups of another size than that of the output."""
    steps = [step for step in prepared.draft.steps if step.encoding != PLAIN and step.made_by in (COPY, CAST)]
    reads = [(step, read) for step in steps for read in step.reads if read.model == number]
    places = ((step, _stored_as(prepared, read)) for step, read in reads)
    encodings = {place.encoding for step, place in places if place is not None and place.encoding != step.encoding}
    writes = (writing for stored in formats_for(name) for writing in stored.writes if writing.name == name)
    sizes = [size for writing in writes for size, encoding in writing.encodings.items() if encoding.name in encodings]
    return f"add {assignment('group_size', sizes[0])} to copy its codes" if len(sizes) == 1 else ""


# ---- Weights in several encodings of one stored format: `--quantize nvfp4a16 --tensor-type self_attn=fp8-dynamic`
#
# A type is `REGEX=NAME`. The expression is searched for in the names of weights that are quantised, and the last type that fits
# a weight wins. NAME is an encoding of the same stored format, with its group size (`w4a16-g64`), or `plain`. The name of
# the chosen format stands for the group size of the other weights.
#
# A type that fits no weight of the layers may fit the head, `lm_head=w8a16`, or the embedding. `.=w8a16` fits neither.
#
# Engines join query, key and value into one matrix, and gate and up: such weights need the same encoding there.


_JOINING = ("vllm", "sglang")
"""Programs that join weights."""

_Types = list[tuple[re.Pattern[str], str]]


def encodings_by_weight(
    draft: PlanDraft, default: Encoding, texts: Sequence[str], by_row: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The encoding of each weight that a type fits, by its name.

    draft    of plain tensors
    default  the encoding of the other weights
    texts    as users write types: `self_attn=fp8-dynamic`
    by_row   other weights that are quantised: their encoding, by name

    Raises PlanError: a type that cannot be read, or that fits no weight which is quantised.
    """
    stored_format = format_of_encoding(default.name)
    types, problems = _read_types(stored_format, texts)
    family = _writing_of(default.name)
    types = [(pattern, default.name if kind == family else kind) for pattern, kind in types]
    if problems:
        raise PlanError([option_error("tensor_types", problem) for problem in problems])
    if not texts:
        return {}
    by_row = by_row or {}
    weights = dict.fromkeys([*encodable(draft, default.name), *by_row])
    for name in dict.fromkeys(kind for _, kind in types if kind != PLAIN):
        weights |= dict.fromkeys(encodable(draft, name))
    unmatched = [(pattern, kind) for pattern, kind in types if not any(map(pattern.search, weights))]
    tied = tie_flag(draft.config)
    ends = {} if tied else {spec.name: spec for spec in _outs_of_ends(draft)}
    unused = [pattern.pattern for pattern, _ in unmatched if not any(map(pattern.search, ends))]
    if unused:
        what, fix = "no weight that is quantised has a name that matches", "write a part of a name, such as self_attn.q_proj"
        if tied and any(re.search(unused[0], name) for name in (TIED_HEAD, *(spec.name for spec in _outs_of_ends(draft)))):
            fix = "leave it out: the head is tied to the embedding, which is stored as it is"
        raise PlanError([option_error("tensor_types", f"{what} {pattern}", fix) for pattern in unused])
    by_end = {name: _type_of(name, unmatched) for name in ends}
    for name, kind in by_end.items():
        if kind and find_encoding(kind).inputs is not None:
            what = f"{kind} needs the scale of what enters a layer, which is not measured for {name}"
            raise PlanError([option_error("tensor_types", what, "choose another format for it, such as w8a16")])
        if kind not in ("", PLAIN) and is_embedding(ends[name]) and not find_encoding(kind).looked_up:
            what = f"no program looks up tokens in {name} stored as {kind}"
            raise PlanError([option_error("tensor_types", what, "leave it as it is, or choose w8a16 or w4a16 for it")])
    by_weight = {**{weight: _type_of(weight, types) for weight in weights}, **by_end}
    return {weight: kind for weight, kind in by_weight.items() if kind}


def _outs_of_ends(draft: PlanDraft) -> list[TensorSpec]:
    """The embedding and the head of the model."""
    return [step.out for step in draft.steps if is_model_head(step.out) or is_model_embedding(step.out)]


def _read_types(stored_format: StoredFormat, texts: Sequence[str]) -> tuple[_Types, list[str]]:
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


def measured_encoding(default: Encoding, draft: PlanDraft) -> Encoding | None:
    """The encoding for which a text is read: one with scales of activations, or one that takes a Hessian, or the default.

    draft  quantised; its embedding does not count, because tokens enter it. None: no other weight is quantised

    Raises PlanError if two need the text for different things.
    """
    used = {step.encoding: None for step in draft.steps if step.encoding != PLAIN and not is_embedding(step.out)}
    encodings = [find_encoding(name) for name in dict.fromkeys([default.name, *used]) if name in used]
    scaled = [encoding for encoding in encodings if encoding.inputs is not None]
    if len(scaled) > 1:
        names = " and ".join(encoding.name for encoding in scaled)
        what = f"{names} need different scales of activations, and one output has one kind"
        raise PlanError([option_error("tensor_types", what, "choose one of them")])
    return next(iter([*scaled, *(encoding for encoding in encodings if encoding.hessian != "no"), *encodings]), None)


def check_mixture(draft: PlanDraft, default: Encoding, by_weight: Mapping[str, str], settings: QuantizeSettings) -> None:
    """Warn of weights that are not calibrated, and of what programs do not run in a quantised draft.

    Raises PlanError if one of them is the program of `--for`.
    """
    scaled = any(find_encoding(step.encoding).inputs is not None for step in draft.steps)
    rounded = [step.out.name for step in draft.steps if scaled and find_encoding(step.encoding).hessian != "no"]
    if rounded:
        what = f"{len(rounded):,} weights of integers are rounded to nearest: the text gives scales of activations only"
        draft.warn(what, rounded[0])
    used = [name for name in dict.fromkeys(step.encoding for step in draft.steps) if name not in (PLAIN, default.name)]
    problems: list[WeightsmithError] = []
    for name in used:
        problems += unloaded(_writing_of(name), settings)
        if not problems:
            check_engines(draft, name, _writing_of(name), settings)
    findings = [*_refused_heads(draft, by_weight, settings.engine), *_refused_embeddings(draft, settings.engine)]
    if not default.of_blocks and settings.engine in (None, *_JOINING):  # ComfyUI joins no weights
        findings += _divided(draft, {*by_weight})
    if settings.engine is None:
        draft.warnings += findings
    else:
        problems += as_problems(findings)
    if problems:
        raise PlanError(problems)


def _writing_of(encoding: str) -> str:
    """The format that users choose to get an encoding: `w4a16` for `w4a16-g64`."""
    writes = format_of_encoding(encoding).writes
    return next(writing.name for writing in writes if any(known.name == encoding for known in writing.all_encodings))


def _refused_heads(draft: PlanDraft, by_weight: Mapping[str, str], engine: str | None) -> Iterator[Finding]:
    """Quantised heads that programs do not load. engine: only this program; None: all."""
    for step in draft.steps:
        if step.encoding != PLAIN and step.out.name in by_weight and is_model_head(step.out):
            for program, what in head_objections(_writing_of(step.encoding), step.out):
                if engine in (None, program):
                    yield Finding(what, step.out.name, fix="leave out its type, or choose another format for the head")


def _refused_embeddings(draft: PlanDraft, engine: str | None) -> Iterator[Finding]:
    """Quantised embeddings that programs do not load, and a warning of what others need. engine: see `_refused_heads`."""
    encoded = [step for step in draft.steps if step.encoding != PLAIN and is_embedding(step.out)]
    if not encoded:
        return
    name = encoded[0].out.name
    loading = {program.name for program in engines_of(_writing_of(encoded[0].encoding))}  # mlx-lm loads its own, for one
    for program, title in (("transformers", "transformers"), ("sglang", "SGLang")):
        if program in loading and engine in (None, program):
            yield Finding(f"{title} does not load quantised embeddings", name, fix="leave out its type")
    if "vllm" in loading and engine in (None, "vllm"):
        what = "vLLM loads a quantised embedding only in models whose code asks for one, and stops while it loads others"
        draft.warn(what, name, fix="try it with your release of vLLM, or leave out its type")


def _divided(draft: PlanDraft, asked: set[str]) -> Iterator[Finding]:
    """One finding of all weights that engines join, and that are not in one encoding."""
    encoding_of = {step.out.name: step.encoding for step in draft.steps if len(step.out.shape) == 2}
    sets = [names for names in joined_sets(encoding_of) if len({encoding_of[name] for name in names}) > 1]
    divided = [names for names in sets if not asked.isdisjoint(names)]
    if divided:
        names = ", ".join(f"{name.split('.')[-2]} {encoding_of[name]}" for name in divided[0])
        what = f"vLLM and SGLang join weights of a layer, and need these in one format: {names} ({len(divided):,} layers)"
        yield Finding(what, divided[0][0], fix="give all parts the same type, such as (q|k|v)_proj=fp8-dynamic")
