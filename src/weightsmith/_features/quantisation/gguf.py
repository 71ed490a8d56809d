"""GGUF files: tensors under llama.cpp's names, in the types that it gives them, and the keys that describe the model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._activations.rows import BUILT_IN
from weightsmith._activations.statistic import keys_of
from weightsmith._activations.statistics import find_statistic
from weightsmith._activations.work import StatisticWork
from weightsmith._base.errors import Finding, FormatError, PlanError, Unsupported, WeightsmithError, noting
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped
from weightsmith._base.options import named, option_error
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._features.quantisation.base import Format
from weightsmith._features.quantisation.calibration.plan import (
    CALIBRATION_SETTINGS,
    MEASURED_ROWS,
    MEASURING,
    NONE,
    Chain,
    unused,
)
from weightsmith._features.quantisation.gguf_files import files_of, keys_of_files, said_generation
from weightsmith._features.quantisation.gguf_types import MIXTURES, Chosen, Mixture, Shape, read_types, type_of
from weightsmith._features.quantisation.mmproj import TOKENIZER, UNUSED, ImageFile, left_out, vision_half
from weightsmith._features.quantisation.optimise import solve_together
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._files.containers import GGUF
from weightsmith._files.copied import is_read
from weightsmith._models.formats.gguf.architecture import Architecture
from weightsmith._models.formats.gguf.architectures import architecture_of_config, text_config
from weightsmith._models.formats.gguf.chat_templates import NAMED_TEMPLATE
from weightsmith._models.formats.gguf.cuts import CutEncoding, Pieces, part_shape, pieces_of
from weightsmith._models.formats.gguf.imatrix import RUN, imatrix_bytes, read_imatrix, with_defaults
from weightsmith._models.formats.gguf.layout import encode_metadata
from weightsmith._models.formats.gguf.ordered import HeadOrder
from weightsmith._models.formats.gguf.pooling import MODULES
from weightsmith._models.formats.gguf.tensors import SplitTensor, is_decay, is_router, predicts, text_name
from weightsmith._models.formats.gguf.tokenizer import READ
from weightsmith._models.formats.gguf.values import Config
from weightsmith._models.formats.gguf.vision import PROCESSOR
from weightsmith._models.formats.gguf.writing import NEEDS_IMPORTANCES, PLAIN, PREFIX, TYPES, GgufEncoding, libgguf
from weightsmith._models.structure.fused import site_of
from weightsmith._models.structure.vocabulary import is_vocabulary
from weightsmith._planning.planner import Assembled
from weightsmith._planning.planner.companions import joined, lacking
from weightsmith._planning.planner.subfolders import drop_subfolders
from weightsmith._plans import CAST, COPY, FILL, JOIN, Block, Dropped, Gather, PlanDraft, Product, Settings, Step, Table
from weightsmith.abc.product import Arrays, Floats

_NAMED = "names are llama.cpp's: blk.0.attn_q.weight, blk.0.ffn_down.weight, token_embd.weight, output.weight"

HEAD_IS_EMBEDDING = "the head is the embedding"
"""Why a tied head that is stored too is left out: not all architectures of llama.cpp would load it."""

PREDICTS = "a layer that predicts several tokens at a time is not written"
OTHER_PART = "llama.cpp reads the parts for images and sounds from a file of their own"
_OTHER_PART = re.compile(r"^(model\.)?(vision|audio|image|multi_modal|mm_|visual|connector|embed_vision|embed_audio)")
"""How the names of tensors begin that do not belong to the language model."""

_V = re.compile(r"blk\.([0-9]+)\.attn_(?:v|qkv)\.weight")

Importances = Mapping[str, npt.NDArray[np.float32]]


def apply(mixture: Mixture, assembled: Assembled, settings: QuantizeSettings) -> None:
    """Make the draft one of a GGUF file. Raises PlanError."""
    sized = settings.size_bytes is not None or settings.target is not None
    if sized and settings.calibration is None:
        settings = replace(settings, calibration=BUILT_IN)
    measures = settings.calibration not in (None, NONE)
    if sized and not measures:
        what = "types for a size are chosen by a measurement on a text"
        which = "size_bytes" if settings.target is None else "target"
        raise PlanError([option_error(which, what, f"leave out {named('calibration')}, or name a text")])
    if measures and settings.imatrix is not None:
        what = "importances come from a file or from a calibration text, not both"
        raise PlanError([option_error("imatrix", what, f"leave out {named('imatrix')} or {named('calibration')}")])
    if problems := unused(settings, calibrates=measures):
        raise PlanError(problems)
    draft, chosen = assembled.draft, _chosen(settings)
    drop_subfolders(draft, "llama.cpp")
    with _problems_of_a_plan():
        if not measures:
            importances = {} if settings.imatrix is None else read_imatrix(settings.imatrix)
            _fill(mixture, assembled, importances, chosen, settings)
            return
        architecture = architecture_of_config(text_config(draft.config))
        chain = Chain(assembled, settings, None, MEASURED_ROWS if sized else None, MEASURING)
        weights = [_weighted(draft, architecture, chain.names(layer)) for layer in range(chain.layers)]
        if sized:
            libgguf()  # decodes what is tried
        tried = [_candidates(architecture, own, chosen) for own in weights] if sized else []
        ends = _candidates(architecture, _vocabulary(draft, chain.steps(chain.layers)), chosen) if sized else {}
        ones = {spec.name: np.ones(spec.shape[1:], np.float32) for own in weights for spec in own}
        trial = replace(assembled, draft=PlanDraft.of(draft))
        _fill(
            mixture, trial, _importances_of(draft, architecture, ones), chosen, settings
        )  # its errors, before anything is measured
        if sized:
            _slots(trial.draft, settings, architecture, {name: kinds for own in (*tried, ends) for name, kinds in own.items()})

    def moments(layer: int, states: Product) -> list[Product]:
        return [chain.statistic("moments", layer, states, [spec.name for spec in weights[layer]])]

    def scores(layer: int, states: Product, _gradients: Product, leaving: Product) -> list[Product]:
        return [chain.scores(layer, states, leaving, tried[layer])] if tried[layer] else []

    def of_ends(entering: Product, gradients: Product, leaving: Product) -> list[Product]:
        return [chain.vocabulary_scores(entering, gradients, leaving, ends)] if ends else []

    if sized:
        products = chain.backward(scores, before=moments, after=of_ends)
    else:
        products = chain.forward(moments)
    chain.measure(draft, products, _format_name(mixture), settings)


def follow(
    mixture: Mixture,
    assembled: Assembled,
    settings: QuantizeSettings,
    measured: Sequence[Product],
    arrays: Mapping[str, Arrays],
) -> Mapping[str, bytes]:
    """Make the draft one of a GGUF file with the importances that were measured; these as a file.

    Raises PlanError, FormatError.
    """
    found: dict[str, npt.NDArray[np.float32]] = {}
    scores: dict[str, Floats] = {}
    tried: dict[str, tuple[str, ...]] = {}
    for product in measured:
        if product.name in arrays and product.op in ("scored_layer", "scored_vocabulary"):
            candidates: Mapping[str, tuple[str, ...]] = product.settings["candidates"]
            tried |= candidates
            scores |= dict(zip(candidates, arrays[product.name][0], strict=True))
        elif product.name in arrays:
            found |= _by_weight(StatisticWork.of(product), arrays[product.name])
    chosen = _chosen(settings)
    with _problems_of_a_plan():
        architecture = architecture_of_config(text_config(assembled.draft.config))
        importances = _importances_of(assembled.draft, architecture, found)
        if settings.size_bytes is not None:  # the search for a target gives one
            trial = replace(assembled, draft=PlanDraft.of(assembled.draft))
            _fill(mixture, trial, importances, chosen, settings)
            chosen = [*_fitting_types(trial.draft, settings, architecture, tried, scores), *chosen]
        _fill(mixture, assembled, importances, chosen, settings)
        return {"imatrix.dat": imatrix_bytes(importances)}


# ---- types for a size

_WIDE = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_NARROW = ("IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The types that a measurement tries: for rows of whole blocks of 256, and for others."""

_HEADER_BYTES = 100
"""At most what a GGUF file has for a tensor besides name and numbers, with padding."""


def _candidates(architecture: Architecture, specs: Iterable[TensorSpec], chosen: Chosen) -> dict[str, tuple[str, ...]]:
    """The encodings to try for each weight whose type is not asked for."""
    found = {}
    for spec in specs:
        place = architecture.place(spec.name)
        if place is None or any(pattern.search(place.name) for pattern, _ in chosen):
            continue
        kinds = _WIDE if spec.shape[-1] % 256 == 0 else _NARROW if spec.shape[-1] % 32 == 0 else ()
        if kinds:
            found[spec.name] = tuple(f"{PREFIX}{kind.lower()}" for kind in kinds)
    return found


def _vocabulary(draft: PlanDraft, steps: Iterable[Step]) -> list[TensorSpec]:
    """The embedding, and the head if it is stored: not one that the embedding is, too."""
    own = {step.out.name for step in _without_doubles(draft.steps, Config(text_config(draft.config)))[1]}
    return [step.out for step in steps if is_vocabulary(step.out) and step.out.name in own and len(step.out.shape) == 2]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor whose type is chosen.

    kinds    the types to choose from, with the bits that the tensor has in each
    weights  that it is made of: several, for experts
    own      the type that the format gives it
    """

    kinds: dict[str, int]
    weights: list[str]
    own: str


def _slots(
    draft: PlanDraft, settings: QuantizeSettings, architecture: Architecture, tried: Mapping[str, Sequence[str]]
) -> tuple[dict[str, _Slot], int]:
    """The tensors whose types are chosen, by name, and the bits available for them.

    draft  of the GGUF file, with the types of the format
    tried  the encodings that were tried for each weight

    Raises ParameterError if even the smallest do not fit.
    """
    weights = grouped((place.name, weight) for weight in tried if (place := architecture.place(weight)))
    slots: dict[str, _Slot] = {}
    fixed = len(draft.header) + len(draft.mmproj) + 4096
    for out in (out for step in draft.steps for out in step.stored):
        fixed += len(out.name) + _HEADER_BYTES
        if out.name not in weights:
            fixed += out.nbytes
            continue
        dtypes = [TYPES[name.removeprefix(PREFIX).upper()] for name in tried[weights[out.name][0]]]
        kinds = {dtype.name: 8 * replace(out, dtype=dtype).nbytes for dtype in dtypes}
        slots[out.name] = _Slot(kinds, weights[out.name], out.dtype.name)
    budget = 8 * ((settings.size_bytes or 0) - fixed)
    least = sum(min(slot.kinds.values()) for slot in slots.values())
    if settings.target is not None:
        budget = max(budget, least)
    if budget < least:
        what = f"the file has at least {fixed + least // 8:,} bytes with the types that are tried, not {settings.size_bytes:,}"
        fix = f"ask for more, or set types that are smaller ({named('tensor_types')})"
        raise option_error("size_bytes", what, fix)
    return slots, budget


def _fitting_types(
    draft: PlanDraft,
    settings: QuantizeSettings,
    architecture: Architecture,
    tried: Mapping[str, Sequence[str]],
    scores: Mapping[str, Floats],
) -> Chosen:
    """The types that change the predictions least and fit into the size. scores: of each weight, [encodings, tokens]."""
    slots, budget = _slots(draft, settings, architecture, tried)
    bits = [list(slot.kinds.values()) for slot in slots.values()]
    found = [np.sum([scores[weight][: len(slot.kinds)] for weight in slot.weights], 0) for slot in slots.values()]
    format_own = [list(slot.kinds).index(slot.own) if slot.own in slot.kinds else 0 for slot in slots.values()]
    picked = solve_together(bits, found, budget, [format_own])
    return [
        (re.compile(f"{re.escape(name)}$"), list(slot.kinds)[i]) for (name, slot), i in zip(slots.items(), picked, strict=True)
    ]


def _by_weight(work: StatisticWork, arrays: Arrays) -> dict[str, npt.NDArray[np.float32]]:
    """The importances of each weight; 1 where no token reached it."""
    at_site = dict(zip(keys_of(find_statistic(work.kind), work.weights), arrays, strict=True))
    found = {weight: at_site[site_of(weight)] for weight in work.weights}
    return {weight: array if array.any() else np.ones_like(array) for weight, array in found.items()}


@contextmanager
def _problems_of_a_plan() -> Iterator[None]:
    try:
        yield
    except WeightsmithError as error:
        if isinstance(error, PlanError):
            raise
        error.finding = replace(error.finding, where=f"quantize: {error.finding.where}".removesuffix(": "))
        raise PlanError([error]) from error


def _chosen(settings: QuantizeSettings) -> Chosen:
    """The types that are asked for by name. Raises PlanError."""
    found, problems = read_types(settings.tensor_types)
    if problems:
        raise PlanError([option_error("tensor_types", each) for each in problems])
    return found


def _fill(mixture: Mixture, assembled: Assembled, importances: Importances, chosen: Chosen, settings: QuantizeSettings) -> None:
    from weightsmith._kernels.ggml import ENCODED

    draft = assembled.draft
    config = text_config(draft.config)
    architecture = architecture_of_config(config)
    keys, extra = architecture.keys(config, mixture.number)
    given = Config(config)
    dropped, steps = _without_doubles(draft.steps, given)
    layers, heads = given.count("num_hidden_layers"), given.count("num_attention_heads")
    last = layers if architecture.predicting and given.count(architecture.predicting, 0, least=0) else math.inf
    steps, others, predict = _parts(
        steps, architecture, last, several=not {"text_config", "vision_config"}.isdisjoint(draft.config or {})
    )
    stored_as = _stored_as(steps, architecture, given)
    names = [spec.name for each in stored_as for spec in each.specs]
    tied = "output.weight" not in names
    stated: dict[str, Any] = {name.removeprefix(f"{architecture.name}."): value.value for name, value in keys.items()}
    kv_heads = stated["attention.head_count_kv"]
    kv_heads = kv_heads[0] if isinstance(kv_heads, list) else kv_heads
    shape = Shape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=stated.get("expert_count", 0),
        tied=tied,
        weighted=bool(importances),
        big=architecture.name == "llama" and layers == 80 and heads != kv_heads,
        attention=tuple(sorted(int(match[1]) for name in names if (match := _V.fullmatch(name)))),
    )
    problems: list[WeightsmithError] = [
        option_error("tensor_types", f"no tensor of this model has a name that matches {pattern.pattern}", _NAMED)
        for pattern, _ in chosen
        if not any(pattern.search(name) for name in names)
    ]
    kinds = [[type_of(mixture, spec, shape, chosen) for spec in each.specs] for each in stored_as]
    if not ENCODED.issuperset({kind for own in kinds for kind in own} - {*PLAIN}):
        libgguf()
    importances, warned = _complete(importances, stored_as)
    made: list[Step] = []
    for each, own in zip(stored_as, kinds, strict=True):
        with noting(problems):
            made.append(_encoded(each, own, importances, mixture, draft, architecture, given))
    if problems:
        raise PlanError(problems)
    embedding = next(each.step for each in stored_as if each.specs[0].name == "token_embd.weight")
    about, findings = keys_of_files(assembled, config, architecture, embedding.out.shape[0])
    vision, warnings = _vision(mixture, assembled, embedding, others) if others and settings.mmproj else (ImageFile(), [])
    constants, numbers = _constants(extra, len(draft.settings))
    copied = [name for name in draft.carried if not is_read(name) and not name.endswith(".py") and "/" not in name]
    said = {"config.json", *READ, *said_generation(assembled, about)}  # the keys say the same
    said |= {*(PROCESSOR if vision.header else ()), *filter(NAMED_TEMPLATE.fullmatch, draft.carried)}
    if f"{architecture.name}.pooling_type" in about:
        said |= {MODULES, *(name for name in draft.carried if name.endswith("_Pooling/config.json"))}
    held = {*copied, "config.json", *said.intersection((*draft.carried, *draft.files))}
    dropped += _dropped(predict, PREDICTS)
    dropped += _dropped(vision.unused, UNUSED) if vision.header else _dropped(others, OTHER_PART)
    draft.steps, draft.settings = [*made, *constants, *vision.steps], [*draft.settings, *numbers]
    draft.products += vision.products
    draft.dropped += dropped
    draft.carried, draft.files = copied, {}
    draft.lacking = joined([draft.lacking, lacking(((c.ref, c.files) for c in assembled.inputs), held)])
    draft.container, draft.header, draft.mmproj = GGUF, encode_metadata(keys | about), vision.header
    draft.warnings += [*_unused(importances, names), *warned, *_left_out(dropped), *warnings, *findings]
    draft.warnings += [*_changed(made, chosen), *_fallen_back(mixture, made, chosen)]


def _changed(steps: Sequence[Step], chosen: Chosen) -> list[Finding]:
    """Tensors that have another type than was asked for, because of their shape."""
    found: dict[tuple[str, str], list[str]] = {}
    for out in (out for step in steps for out in step.stored):
        asked = next((kind for pattern, kind in reversed(chosen) if pattern.search(out.name)), out.dtype.name)
        if out.dtype.name != asked:
            found.setdefault((asked, out.dtype.name), []).append(out.name)
    fix = "choose a type whose blocks fit; vectors, norms and routers are always F32"
    return [
        Finding(f"stored as {kind}, not as {asked}: {len(names):,} tensors", names[0], fix=fix)
        for (asked, kind), names in found.items()
    ]


def _fallen_back(mixture: Mixture, steps: Sequence[Step], chosen: Chosen) -> list[Finding]:
    """Matrices whose rows have no whole blocks of the format's types, and what they are stored as instead."""
    outs = [out for step in steps for out in step.stored if len(out.shape) > 1 and out.dtype.name != "F32"]
    block = TYPES[mixture.default].block
    fallen = [
        out
        for out in outs
        if out.shape[-1] % block and out.dtype.block < block and not any(pattern.search(out.name) for pattern, _ in chosen)
    ]
    findings = []
    for kind, own in grouped((out.dtype.name, out) for out in fallen).items():
        widths = ", ".join(f"{width:,}" for width in sorted({out.shape[-1] for out in own})[:4])
        what = f"{len(own):,} of {len(outs):,} matrices are stored as {kind}: {widths} columns are no multiple of {block}"
        fix = "choose a format without blocks, such as fp8-dynamic, or accept a larger file"
        if kind not in PLAIN:
            fix = "choose a format whose blocks are shorter, such as gguf-q4_0, or accept a larger file"
        findings.append(Finding(what, own[0].name, fix=fix))
    return findings


def _left_out(dropped: Sequence[Dropped]) -> list[Finding]:
    """A stored head that transformers would use, if it differs from the embedding; layers that predict."""
    what = "it is left out: config.json ties the head to the embedding"
    fix = "set tie_word_embeddings to false in the input's config.json if the two differ"
    found = [Finding(what, each.tensor, fix=fix) for each in dropped if each.reason == HEAD_IS_EMBEDDING]
    if predict := [each.tensor for each in dropped if each.reason == PREDICTS]:
        what = f"{len(predict):,} tensors are left out: layers that predict several tokens at a time"
        found.append(Finding(what, predict[0], fix="use the model as it is: it works without them"))
    return found


def _parts(
    steps: Sequence[Step], architecture: Architecture, layers: float, *, several: bool
) -> tuple[list[Step], list[Step], list[Step]]:
    """The steps of the language model, of parts for images and sounds, and of layers that predict several tokens.

    layers   of the language model; those behind them predict
    several  whether config.json describes other parts, too
    """
    own, others, predict = list[Step](), list[Step](), list[Step]()
    for step in steps:
        name = step.out.name
        if predicts(name, layers):
            predict.append(step)
        elif architecture.knows(name):
            own.append(step)
        else:
            (others if several and _OTHER_PART.search(name) else own).append(step)
    return own, others, predict


def _dropped(steps: Iterable[Step], reason: str) -> list[Dropped]:
    """The input tensors of steps that are left out."""
    return [Dropped(read.model, read.tensor, reason) for step in steps for read in step.reads if read.model >= 0]


def _vision(mixture: Mixture, assembled: Assembled, embedding: Step, steps: Sequence[Step]) -> tuple[ImageFile, list[Finding]]:
    """The file for images, and the warning if there is none. steps: of parts for images and sounds."""
    files = files_of(assembled, (*PROCESSOR, *TOKENIZER))
    try:
        vision = vision_half(assembled.draft, embedding, steps, files, mixture.name)
    except Unsupported as error:
        return ImageFile(), [left_out(error, len(steps))]
    if vision is not None:
        return vision, []
    what = f"{len(steps):,} tensors are left out: the file holds the language model alone"
    fix = "make a mmproj file for images with llama.cpp's convert_hf_to_gguf.py --mmproj, of the model in the Hub's layout"
    return ImageFile(), [Finding(what, steps[0].out.name, fix=fix)]


def _in_order(step: Step, order: HeadOrder | None, draft: PlanDraft) -> Step:
    """The step with its rows or columns in the order that llama.cpp wants.

    Raises Unsupported for a step that computes, FormatError for a tensor of another size than config.json says.
    """
    if order is None:
        return step
    if (size := step.out.shape[order.axis]) != order.size:
        kind = ("rows", "columns")[order.axis]
        what = f"it has {size:,} {kind}, and {order.size:,} with the {order.values:,} value heads of config.json"
        raise FormatError(what, where=step.out.name, fix="repair linear_num_value_heads and the other linear_… in config.json")
    if step.op not in (COPY, CAST):
        what = "llama.cpp has the value heads of this tensor in another order, in which a merge would have other numbers"
        fix = f"merge without {named('quantize')}, then quantise the result"
        raise Unsupported(what, where=step.out.name, fix=fix)
    rows, cols = step.out.shape[0], step.out.size // step.out.shape[0]
    draft.tables.append(Table.of(order.places))
    view = Gather(len(draft.tables) - 1, Block(0, rows, cols, cols), order.axis)
    return replace(step, inputs=tuple(replace(read, view=view) for read in step.inputs))


def _without_doubles(steps: Sequence[Step], config: Config) -> tuple[list[Dropped], list[Step]]:
    """The steps without what llama.cpp computes: a tied head that is stored twice, and frequencies of RoPE."""
    dropped, kept = [], []
    for step in steps:
        why = ""
        if text_name(step.out.name) == "lm_head.weight" and config.get("tie_word_embeddings"):
            why = HEAD_IS_EMBEDDING
        elif step.out.name.endswith(".rotary_emb.inv_freq"):
            why = "llama.cpp computes it"
        if why:
            dropped += [Dropped(read.model, read.tensor, why) for read in step.reads if read.model >= 0]
        else:
            kept.append(step)
    return list(dict.fromkeys(dropped)), kept


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step, and what llama.cpp stores of it.

    specs   under llama.cpp's names: the tensor, or its parts
    height  rows of a band, of a tensor in parts
    parts   what each part is of a band; (): the tensor is stored as one
    flat    see `SplitTensor`
    """

    step: Step
    specs: list[TensorSpec]
    height: int = 0
    parts: tuple[Pieces, ...] = ()
    flat: bool = False


def _stored_as(steps: Sequence[Step], architecture: Architecture, config: Config) -> list[_Stored]:
    """The steps, those of the experts of a layer as one. Raises PlanError with every tensor that llama.cpp has not."""
    found: dict[str, list[_Stored]] = {}
    together: dict[str, dict[int, Step]] = {}
    unknown: list[WeightsmithError] = []
    for step in steps:
        place = architecture.place(step.out.name)
        if split := architecture.split_of(step.out.name):
            found[step.out.name] = _in_parts(step, *split, config)
        elif place is None:
            what = f"llama.cpp knows no such tensor in a model of the type {architecture.model_types[0]}"
            unknown.append(Unsupported(what, where=step.out.name, fix="choose another format, such as fp8-dynamic"))
        else:
            found.setdefault(place.name, [_Stored(step, [replace(step.out, name=place.name)])])
            if place.expert >= 0:
                together.setdefault(place.name, {})[place.expert] = step
    if unknown:
        raise PlanError(unknown)
    for name, experts in together.items():
        ordered = [experts[i] for i in sorted(experts)]
        outs = [step.out for step in ordered]
        if sorted(experts) != list(range(len(experts))) or len({(out.shape, out.dtype) for out in outs}) > 1:
            what = f"its experts are numbered {show(sorted(experts))}, or have unequal shapes"
            raise Unsupported(what, where=outs[0].name, fix="choose another format")
        whole = re.sub(r"\.experts\.\d+\.", ".experts.", outs[0].name)
        spec = TensorSpec(whole, outs[0].dtype, (len(outs), *outs[0].shape))
        pieces = tuple(leaf for step in ordered for leaf in step.leaves)
        joined = Step(spec, JOIN, (), pieces=pieces, role=ordered[0].role, layer=ordered[0].layer)
        found[name] = [_Stored(joined, [replace(spec, name=name)])]
    if "token_embd.weight" not in found:
        raise Unsupported("the model has no embedding", where="model.embed_tokens.weight", fix="choose another format")
    return [each for own in found.values() for each in own]


def _in_parts(step: Step, split: SplitTensor, layer: str, config: Config) -> list[_Stored]:
    """A step of a tensor that llama.cpp stores in parts, or a step for each of them if a merge makes them one by one.

    Raises FormatError, and Unsupported for a merge of other matrices.
    """
    height, parts = pieces_of(split, config, step.out.shape)
    names = [f"blk.{layer}.{part.name}" for part in split.parts]
    shapes = [part_shape(pieces, height, step.out.shape, flat=split.flat) for pieces in parts]
    specs = [TensorSpec(name, step.out.dtype, shape) for name, shape in zip(names, shapes, strict=True)]
    rows = [math.prod(piece.out.shape[:-1]) for piece in step.pieces]
    if not any(each % height for each in rows):
        return [_Stored(step, specs, height, parts, split.flat)]
    count = len(parts)
    moved = split.flat or any(piece.step > 1 or piece.transposed for pieces in parts for piece in pieces)
    if moved or rows != [piece.rows for pieces in parts for piece in pieces] * (len(rows) // count):
        what = "llama.cpp stores it in parts that the merge does not compute one by one"
        raise Unsupported(what, where=step.out.name, fix=f"merge without {named('quantize')}, then quantise the result")
    own = [replace(spec, name=f"{step.out.name}.{i}") for i, spec in enumerate(specs)]
    return [_Stored(replace(step, out=out, pieces=step.pieces[i::count]), [specs[i]]) for i, out in enumerate(own)]


def _encoded(
    stored: _Stored,
    kinds: Sequence[str],
    importances: Importances,
    mixture: Mixture,
    draft: PlanDraft,
    architecture: Architecture,
    config: Config,
) -> Step:
    """The step of a tensor that is stored as one of these types, or in parts of these. Raises FormatError, Unsupported."""
    spec, dtypes = stored.specs[0], [TYPES[kind] for kind in kinds]
    step = _in_order(stored.step, architecture.order(spec.name, config), draft)
    encoding: GgufEncoding | CutEncoding
    if stored.parts:
        encoding = CutEncoding(stored.height, tuple(zip(dtypes, stored.parts, strict=True)), stored.flat)
    else:
        heads = config.count("num_attention_heads")
        turned = architecture.rotated_heads(spec.name, heads, config.count("num_key_value_heads", heads))
        head_rows, decays = spec.shape[0] // turned if turned else 0, is_decay(spec.name)
        encoding = GgufEncoding(dtypes[0], head_rows, architecture.shift_of(spec.name), decays)
    tables, weighted = list[Floats](), -1
    for each, kind in zip(stored.specs, kinds, strict=True):
        values = _importances(importances, each, kind, mixture) if TYPES[kind].block > 1 else None
        matrices = each.shape[0] if len(each.shape) == 3 else 1
        tables.append(np.zeros(each.shape[-1] * matrices, np.float32) if values is None else values)
    if any(table.any() for table in tables):
        weighted = len(draft.tables)
        draft.tables.append(Table(np.concatenate(tables).astype("<f4").tobytes()))
    outs = encoding.outs(step.out)
    named_outs = tuple(replace(out, name=each.name) for out, each in zip(outs, stored.specs, strict=True))
    return replace(step, encoding=encoding.name, stored=named_outs, weighted=weighted)


def _weighted(draft: PlanDraft, architecture: Architecture, names: Iterable[str]) -> list[TensorSpec]:
    """Those of the tensors that llama.cpp has importances for: weights of linear layers, but not of routers."""
    own = set(names)
    specs = [step.out for step in draft.steps if step.out.name in own and len(step.out.shape) == 2]
    placed = [(spec, architecture.place(spec.name)) for spec in specs]
    named_weights = [(spec, place.name) for spec, place in placed if place is not None and place.name.endswith(".weight")]
    return [spec for spec, name in named_weights if not is_router(name)]


def _importances_of(draft: PlanDraft, architecture: Architecture, found: Importances) -> Importances:
    """Importances under llama.cpp's names, in its order, those of a layer's experts in one. found: under the Hub's names."""
    config, parts = Config(text_config(draft.config)), dict[str, dict[int, npt.NDArray[np.float32]]]()
    for name, values in found.items():
        if place := architecture.place(name):
            order = architecture.order(place.name, config)
            turns = order is not None and order.axis == 1 and order.size == values.size  # `_in_order` rejects another size
            moved = values[order.places] if order is not None and turns else values
            parts.setdefault(place.name, {})[place.expert] = moved
    return {name: np.concatenate([own[i] for i in sorted(own)]) for name, own in parts.items()}


def _importances(importances: Importances, spec: TensorSpec, kind: str, mixture: Mixture) -> npt.NDArray[np.float32] | None:
    """The importances of a tensor's columns, of each of its matrices; None if there are none."""
    values = importances.get(spec.name)
    matrices = spec.shape[0] if len(spec.shape) == 3 else 1
    ends = spec.name in ("token_embd.weight", "output.weight")
    if values is not None and values.size != spec.shape[-1] * matrices:
        if spec.name != "token_embd.weight":
            what = f"the importance matrix has {values.size:,} numbers for it, and it has {spec.shape[-1] * matrices:,} columns"
            raise FormatError(what, where=spec.name, fix="use the importance matrix of this model")
        values = None
    tiny = kind in (*NEEDS_IMPORTANCES, "IQ2_S", "IQ3_XXS") or (kind == "Q2_K" and mixture.name == "Q2_K_S")
    if values is None and tiny and not ends:
        what = f"it would be stored as {kind}, which gives garbage without importances"
        fix = "write --calibration built-in, give an importance matrix that has this tensor (--imatrix FILE), or use more bits"
        raise Unsupported(what, where=spec.name, fix=fix)
    return values


def _complete(importances: Importances, stored_as: Iterable[_Stored]) -> tuple[Importances, list[Finding]]:
    """The importances with 1 for columns that have none, and the warning that counts these."""
    complete, counts = dict(importances), dict[str, int]()
    for spec in (spec for each in stored_as for spec in each.specs):
        values = importances.get(spec.name)
        if values is not None and len(spec.shape) > 1 and values.size % spec.shape[-1] == 0:  # `_importances` rejects others
            complete[spec.name], missing = with_defaults(values, spec.shape[-1])
            counts |= {spec.name: missing} if missing else {}
    if not counts:
        return importances, []
    what = f"{sum(counts.values()):,} runs of {RUN} columns, in {len(counts):,} tensors, have no importances: they count as 1"
    fix = "use a longer text, or one that reaches every expert"
    return complete, [Finding(what, next(iter(counts)), fix=fix)]


def _unused(importances: Importances, named: Iterable[str]) -> list[Finding]:
    """A warning if none of the importances is of a tensor of this model."""
    if not importances or not importances.keys().isdisjoint(named):
        return []
    what = f"no name in the importance matrix is of a tensor of this model; the first is {show(next(iter(importances)))}"
    return [Finding(what, "imatrix", fix="use the importance matrix of this model")]


def _constants(extra: Mapping[str, npt.NDArray[np.float32]], first: int) -> tuple[list[Step], list[Settings]]:
    """Steps for vectors that no model has, because transformers computes them from config.json; and their settings."""
    steps: list[Step] = []
    settings: list[Settings] = []
    for name, values in extra.items():
        pieces: list[Step] = []
        for i, value in enumerate(values.tolist()):
            pieces.append(Step(TensorSpec(f"{name}[{i}]", DTYPES["F32"], (1,)), FILL, (), settings=first + len(settings)))
            settings.append(Settings({"value": value}, ()))
        spec = TensorSpec(name, DTYPES["F32"], (len(values),))
        steps.append(Step(spec, JOIN, (), pieces=tuple(pieces), encoding=GgufEncoding(DTYPES["F32"]).name, stored=(spec,)))
    return steps, settings


def _format_name(mixture: Mixture) -> str:
    return f"gguf-{mixture.name.lower()}"


def _format(mixture: Mixture) -> Format:
    bits = TYPES[mixture.default].itemsize * 8 / TYPES[mixture.default].block
    about = f"{bits:g} bits a weight" if mixture.default == mixture.name else f"{bits:g}+ bits a weight"
    run: Callable[[Assembled, QuantizeSettings], None] = partial(apply, mixture)
    readers = "llama.cpp, Ollama, LM Studio"
    if mixture.default in ("F32", "F16", "BF16", "Q8_0"):
        return Format(_format_name(mixture), f"one GGUF file, {about}", readers, run, frozenset({"tensor_types", "mmproj"}))
    settings = CALIBRATION_SETTINGS | {"imatrix", "tensor_types", "mmproj", "size_bytes", "target"}
    return Format(_format_name(mixture), f"one GGUF file, {about}", readers, run, settings, partial(follow, mixture))


FORMATS = tuple(map(_format, MIXTURES))
