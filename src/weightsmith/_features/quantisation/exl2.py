"""The format `exl2`: which setting each block gets, and the plan with it.

Without data, the error of a setting is that of normally distributed weights. Blocks of a kind then have equal errors, and get
equal settings but for what fills up the target.

**A measurement** is a product for each layer, and gives the error of each option of each block. The square of an error is the
loss that an option causes, in nats for each token: the sum of the losses of the block's weights. A full measurement computes
ExLlamaV2's errors instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from weightsmith._base.errors import Finding, FormatError, PlanError, WeightsmithError, as_plan_error
from weightsmith._base.files import expand_user
from weightsmith._base.idioms import grouped
from weightsmith._base.options import assignment, named, option_error
from weightsmith._features.quantisation.base import (
    CALIBRATION_SETTINGS,
    MEASURED_ROWS,
    MEASURING,
    Format,
    calibrates,
    engine_findings,
    read_target,
    unused,
)
from weightsmith._features.quantisation.calibration.plan import Chain, calibrate
from weightsmith._features.quantisation.optimise import Candidate, choose
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._models.formats.exl2.layout import ARCHITECTURES, ELSEWHERE, OTHER_FORMATS, Params
from weightsmith._models.formats.exl2.model import (
    LEAST_ERROR,
    BlockParams,
    Measured,
    Model,
    Sublayer,
    measurement_json,
    notes,
    prepare_model,
    read_measurement,
    store,
)
from weightsmith._models.formats.unfused import DEFAULT_HEAD_BITS, check_architecture
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._plans import PlanDraft, Product
from weightsmith.abc.product import Arrays

HEADER_BYTES = 120
"""At most what the header of a weight file has for a tensor, besides its name."""
ROUNDED_BITS = 4
"""Below this, rounding to nearest is not advised: SmolLM2-135M has a perplexity of 13 in bf16, 24 with 4 bits, 46 with 3.5."""
FULL = "full"

_ERRORS = {
    2: {32: 0.404, 64: 0.409, 128: 0.418},
    3: {32: 0.198, 64: 0.206, 128: 0.213},
    4: {32: 0.0956, 64: 0.1029, 128: 0.1090},
    5: {32: 0.0472, 64: 0.0516, 128: 0.0552},
    6: {32: 0.0236, 64: 0.0258, 128: 0.0278},
    8: {32: 0.0059, 64: 0.0065, 128: 0.0070},
}
"""Relative error of normally distributed weights, by bits and group size: measured, 512 rows of 512."""


def _store(assembled: Prepared, model: Model, settings: QuantizeSettings, target: float, params: Sequence[BlockParams]) -> None:
    """Make the draft one with a setting for each role of each block. target: bits for each weight."""
    draft = assembled.draft
    draft.warnings += _unfit(model, settings)
    bits = sum(block.bits(chosen) for block, chosen in zip(model.blocks, params, strict=True)) / model.weights
    if calibrates(settings):
        chain = Chain(assembled, settings, model.steps)
        _fill(draft, model, settings, params, bits, chain.described)
        calibrate(chain, draft, model.prefix)
    else:
        _fill(draft, model, settings, params, bits, {"rows": 0, "length": 0, "dataset": "none"})
        if target < ROUNDED_BITS:
            what = f"rounded to nearest with fewer than {ROUNDED_BITS} bits, a model loses much of what it can do"
            draft.warn(what, "bits", fix="leave out --calibration none, or use more bits")
    if abs(bits - target) > 0.02 and settings.bits is not None:
        what = f"{bits:.3f} bits for each weight, not {target:g}: its blocks are few, and settings come in steps"
        draft.warn(what, "bits")


def _unfit(model: Model, settings: QuantizeSettings) -> list[Finding]:
    """Warnings about sizes that ExLlamaV2 computes wrongly. Raises PlanError if it is the program of `--for`."""
    stored = [spec for block in model.blocks for specs in block.linears.values() for spec in specs]
    return engine_findings("exl2", stored, settings, ELSEWHERE)


def _fill(
    draft: PlanDraft,
    model: Model,
    settings: QuantizeSettings,
    params: Sequence[BlockParams],
    bits: float,
    calibration: Mapping[str, object],
) -> None:
    """`store` with the settings of each block."""
    by_name = {
        spec.name: chosen[role]
        for block, chosen in zip(model.blocks, params, strict=True)
        for role, specs in block.linears.items()
        for spec in specs
    }
    store(draft, model, by_name, settings.head_bits or DEFAULT_HEAD_BITS, bits, calibration)


def _target(draft: PlanDraft, model: Model, settings: QuantizeSettings) -> float:
    """The average bits for each weight: as asked, or as many as fit into the size. Raises ParameterError if it is too small."""
    if settings.bits is not None:
        return settings.bits
    if settings.target is not None and settings.size_bytes is None:
        return sum(max(block.bits(option) for option in block.options) for block in model.blocks) / model.weights
    least, most = (sum(pick(block.bits(option) for option in block.options) for block in model.blocks) for pick in (min, max))
    trial = PlanDraft.of(draft)
    fewest = [min(block.options, key=block.bits) for block in model.blocks]
    _fill(trial, model, settings, fewest, 0, {})
    outs = [out for step in trial.steps for out in step.outs]
    others = sum(out.nbytes + len(out.name) + HEADER_BYTES for out in outs) + HEADER_BYTES - least // 8
    room = 8 * ((settings.size_bytes or 0) - others)
    if room < least and settings.target is not None:
        room = least
    if room < least:
        what = f"the model has at least {others + least // 8:,} bytes as EXL2, not {settings.size_bytes:,}"
        head = settings.head_bits or DEFAULT_HEAD_BITS
        fix = f"ask for more, or for fewer bits of the head than {head} ({named('head_bits')}), or choose a gguf format"
        raise option_error("size_bytes", what, fix)
    return min(room, most) / model.weights


def _check(settings: QuantizeSettings) -> None:
    """Raise PlanError with all problems of the settings."""
    problems: list[WeightsmithError] = []
    with as_plan_error():
        sized = read_target(settings) is not None
    if sized and (settings.uniform or not calibrates(settings) or settings.measurement is not None):
        what = "a target needs a measurement on a text"
        fix = f"leave out {named('uniform', 'measurement')}, and {assignment('calibration', 'none')}"
        problems.append(option_error("target", what, fix))
    if not sized and (settings.bits is None) == (settings.size_bytes is None):
        what = "exl2 needs the average bits per weight, a size or a target"
        if settings.bits is not None:
            what = "the size follows from the bits"
        fix = f"write {assignment('bits', 4.25)}, or any number from 2.2 to 8; or {named('size_bytes')}, but not both"
        problems.append(option_error("bits", what, fix))
    problems += unused(settings, calibrates=calibrates(settings))
    if settings.measurement is not None and settings.uniform:
        fix = f"leave out {named('uniform')} or {named('measurement')}"
        problems.append(option_error("uniform", "a measurement chooses different bits for the blocks", fix))
    if settings.measure is not None and (settings.uniform or settings.measurement is not None or not calibrates(settings)):
        what = f"nothing is measured with {named('uniform', 'measurement')}, or without a calibration text"
        problems.append(option_error("measure", what, f"leave out {named('measure')}"))
    if problems:
        raise PlanError(problems)


def _choose(model: Model, settings: QuantizeSettings, bits: float) -> list[BlockParams]:
    """A setting for each role of each block."""
    if settings.measurement is not None:
        return _best(read_measurement(expand_user(settings.measurement), model.blocks), model, bits)
    kinds = ((block.key.rpartition(".")[2] if settings.uniform else block.key, block) for block in model.blocks)
    groups = list(grouped(kinds).values())
    chosen = choose([_expected(blocks) for blocks in groups], model.weights, bits)
    by_key = {block.key: block.options[i] for blocks, i in zip(groups, chosen, strict=True) for block in blocks}
    return [by_key[block.key] for block in model.blocks]


def _best(measured: Sequence[tuple[Sublayer, list[Measured]]], model: Model, bits: float) -> list[BlockParams]:
    slots = [[Candidate(block.bits(option.params), option.error**2) for option in options] for block, options in measured]
    chosen = choose(slots, model.weights, bits)
    return [options[i].params for (_, options), i in zip(measured, chosen, strict=True)]


def _expected(blocks: Sequence[Sublayer]) -> list[Candidate]:
    """The candidates of blocks that get the same, with the squared errors of normally distributed weights, in all."""
    return [
        Candidate(
            sum(block.bits(option) for block in blocks),
            sum(
                _squared_error(option[role]) * spec.size
                for block in blocks
                for role, specs in block.linears.items()
                for spec in specs
            )
            / 1e6,
        )
        for option in blocks[0].options
    ]


def _squared_error(params: Params) -> float:
    parts = zip(params.bits, params.proportions, params.group_sizes, strict=True)
    return sum(share * _ERRORS[bits][size] ** 2 for bits, share, size in parts)


# ---- the measurement


def products_for(blocks: Sequence[Sublayer], chain: Chain, *, full: bool) -> tuple[Product, ...]:
    """The products of a measurement."""
    layers = {name: layer for layer in range(chain.layers) for name in chain.names(layer)}
    of_layer: dict[int, dict[str, tuple[Mapping[str, str], ...]]] = {layer: {} for layer in range(chain.layers)}
    for block in blocks:
        of_layer[layers[next(iter(block.encodings[0]))]][block.key] = block.encodings
    if full:
        return chain.forward(lambda layer, states: [chain.errors(layer, states, of_layer[layer])])
    tried = {
        layer: dict(pair for options in by_block.values() for pair in _candidates(options))
        for layer, by_block in of_layer.items()
    }

    def losses(layer: int, states: Product, gradients: Product, _leaving: Product) -> list[Product]:
        return [chain.losses(layer, states, gradients, tried[layer])]

    return chain.backward(losses, lambda layer: tuple(tried[layer]))


def _candidates(options: Sequence[Mapping[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """The names of the weights of a block, and the encodings to try for each."""
    return [(name, tuple(dict.fromkeys(option[name] for option in options))) for name in options[0]]


def errors_of(blocks: Sequence[Sublayer], products: Iterable[tuple[Product, Arrays]]) -> list[tuple[Sublayer, list[Measured]]]:
    """The error of every option. products: the measured layers, with their arrays. Raises FormatError if they are others."""
    errors: dict[str, list[float]] = {}
    losses: dict[tuple[str, str], float] = {}
    for product, (array,) in products:
        settings, rows = product.settings, array.tolist()
        if product.op == "measured_blocks":
            errors |= {key: [min(1.0, error) for error in row] for key, row in zip(settings["blocks"], rows, strict=True)}
        else:
            for (name, tried), row in zip(settings["candidates"].items(), rows, strict=True):
                losses |= {(name, encoding): loss for encoding, loss in zip(tried, row, strict=False)}
    measured_blocks = []
    for block in blocks:
        options = [option.items() for option in block.encodings]
        if all(losses.keys() >= option for option in options):
            errors[block.key] = [math.sqrt(sum(losses[pair] for pair in option)) for option in options]
        if len(errors.get(block.key, ())) < len(options):
            what = "not a plan that can be run: it does not measure every weight"
            raise FormatError(what, where="products", fix="make the plan again")
        measured = zip(block.options, errors[block.key], strict=False)
        measured_blocks.append((block, [Measured(option, max(LEAST_ERROR, error)) for option, error in measured]))
    return measured_blocks


class Exl2Format(Format):
    """EXL2."""

    name = "exl2"
    summary = "2.2 to 8 bits for each weight, chosen for each layer"
    readers = "ExLlamaV2, older TabbyAPI"
    settings = (
        frozenset({"bits", "size_bytes", "target", "head_bits", "measure", "measurement", "uniform"}) | CALIBRATION_SETTINGS
    )
    measures = True

    def apply(self, prepared: Prepared, settings: QuantizeSettings) -> None:
        check_architecture(prepared.draft.config, ARCHITECTURES, "EXL2", OTHER_FORMATS)
        _check(settings)
        draft = prepared.draft
        model = prepare_model(draft)
        with as_plan_error():
            bits = _target(draft, model, settings)
            params = _choose(model, settings, bits)
        if not calibrates(settings) or settings.uniform or settings.measurement is not None:
            _store(prepared, model, settings, bits, params)
            return
        draft.warnings += [*notes(draft), *_unfit(model, settings)]
        full = settings.measure == FULL
        chain = Chain(prepared, settings, model.steps, None if full else MEASURED_ROWS, MEASURING)
        chain.measure(draft, products_for(model.blocks, chain, full=full), "exl2", settings)

    def follow(
        self, prepared: Prepared, settings: QuantizeSettings, measured: Sequence[Product], arrays: Mapping[str, Arrays]
    ) -> Mapping[str, bytes]:
        _check(settings)
        model = prepare_model(prepared.draft)
        bits = _target(prepared.draft, model, settings)
        errors = errors_of(model.blocks, [(p, arrays[p.name]) for p in measured if p.name in arrays])
        _store(prepared, model, settings, bits, _best(errors, model, bits))
        return {"measurement.json": (json.dumps(measurement_json(errors), indent=1) + "\n").encode()}


FORMAT = Exl2Format()
