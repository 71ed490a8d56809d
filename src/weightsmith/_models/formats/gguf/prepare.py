"""Plans of GGUF files: tensors under llama.cpp's names, in its types, and the keys that describe the model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightsmith._base.errors import Finding, FormatError, PlanError, Unsupported, WeightsmithError, noting
from weightsmith._base.files import show
from weightsmith._base.idioms import grouped
from weightsmith._base.options import named, option_error
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import count
from weightsmith._files.containers import GGUF
from weightsmith._files.copied import is_read
from weightsmith._models.formats.gguf.about import Stated, keys_of_files, read_metadata, said_generation
from weightsmith._models.formats.gguf.architectures import architecture_of_config, find_architecture, text_config
from weightsmith._models.formats.gguf.base.architecture import COMPUTED, NOT_ADDED, GgufArchitecture
from weightsmith._models.formats.gguf.base.tensors import SplitTensor, is_norm, is_router, predicts, text_name
from weightsmith._models.formats.gguf.base.values import Floats, GgufConfig
from weightsmith._models.formats.gguf.base.vision import PROCESSOR
from weightsmith._models.formats.gguf.cuts import CutEncoding, HeadOrder, Pieces, part_shape, pieces_of
from weightsmith._models.formats.gguf.diffusion.families import MIXTURES as DIFFUSION_MIXTURES
from weightsmith._models.formats.gguf.diffusion.plan import DENOISERS, is_diffusion, prepare_diffusion
from weightsmith._models.formats.gguf.diffusion.text_encoder import ARCHITECTURE as T5_ENCODER
from weightsmith._models.formats.gguf.diffusion.text_encoder import MODEL_TYPES as T5_MODELS
from weightsmith._models.formats.gguf.diffusion.text_encoder import is_t5
from weightsmith._models.formats.gguf.imatrix import RUN, imatrix_bytes, read_imatrix, with_defaults
from weightsmith._models.formats.gguf.layout import Value, encode_metadata
from weightsmith._models.formats.gguf.mmproj import TOKENIZER, UNUSED, ImageFile, left_out, vision_half
from weightsmith._models.formats.gguf.pooling import MODULES, Pooling, pooling_of, score_head, unstated, with_template
from weightsmith._models.formats.gguf.tokenizer.chat import NAMED_TEMPLATE
from weightsmith._models.formats.gguf.tokenizer.files import READ
from weightsmith._models.formats.gguf.types import (
    COPIED,
    MIXTURES,
    TABLES,
    Chosen,
    Mixture,
    Shape,
    file_type,
    fitting,
    read_types,
    type_of,
)
from weightsmith._models.formats.gguf.writing import (
    NEEDS_IMPORTANCES,
    PLAIN,
    PREFIX,
    STORED,
    TYPES,
    GgufEncoding,
    find,
    libgguf,
)
from weightsmith._models.formats.verbatim import copied
from weightsmith._models.structure.projections import joined_sets
from weightsmith._plans import (
    CAST,
    COPY,
    FILL,
    JOIN,
    Block,
    Dropped,
    Gather,
    PlanDraft,
    Product,
    Settings,
    Step,
    Table,
    arrays_of,
    needs_of,
)
from weightsmith._plans import PLAIN as UNENCODED
from weightsmith.abc.stored import ModelFiles, ModelFormat, ModelRequest, maximum_name
from weightsmith.abc.tensors import StoredAs

_NAMED = "names are llama.cpp's: blk.0.attn_q.weight, blk.0.ffn_down.weight, token_embd.weight, output.weight"
_HEAD_IS_EMBEDDING = "the head is the embedding"
"""Why a tied head that is stored too is left out: not all architectures of llama.cpp would load it."""
_EMBEDDING = "model.embed_tokens.weight"
_PREDICTS = "a layer that predicts several tokens at a time is not written"
_IN_KEYS = "its number is in a key of the GGUF file"
_OTHER_PART = "llama.cpp reads the parts for images and sounds from a file of their own"
_OF_OTHER_PARTS = re.compile(
    r"^(model\.)?(vision|audio|image|multi_modal|mm_|visual|connector|embed_vision|embed_audio|patch_merge)"
)
"""How the names of tensors begin that do not belong to the language model."""
_V = re.compile(r"blk\.([0-9]+)\.attn_(?:v|qkv)\.weight")
_DOWN = re.compile(r"blk\.([0-9]+)\.ffn_down\.weight")

_MAGNITUDES = "magnitudes"
"""The kind of product that finds the largest magnitude of tensors."""
_FACTORED = "NVFP4"
"""The mixture, and the type, whose weights have a factor each."""

_WIDE = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_NARROW = ("IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The types that a measurement tries: for rows of whole blocks of 256, and for others."""

Importances = Mapping[str, Floats]
"""The importance of each column, by llama.cpp's names of the tensors."""


class GgufFormat(ModelFormat):
    """A mixture of types, as users ask for it."""

    program = "llama.cpp"
    readers = "llama.cpp, Ollama, LM Studio"
    shard_bytes = 50_000_000_000  # the largest file that the Hub takes: people expect one file, not one for each 5 GB

    def __init__(self, mixture: Mixture) -> None:
        bits = TYPES[mixture.default].itemsize * 8 / TYPES[mixture.default].block
        about = f"{bits:g} bits a weight" if mixture.default == mixture.name else f"{bits:g}+ bits a weight"
        self.mixture = mixture
        self.name = f"gguf-{mixture.name.lower()}"
        self.summary = f"one GGUF file, {'tensors of GGUF inputs keep their types' if mixture.name == COPIED.name else about}"
        if mixture.name in DIFFUSION_MIXTURES:
            self.readers += ", ComfyUI-GGUF"
        self.measures = mixture.default not in ("F32", "F16", "BF16", "Q8_0", _FACTORED)
        self.settings = frozenset({"tensor_types", "metadata", "mmproj", *(["imatrix"] if self.measures else [])})

    def prepare(self, draft: PlanDraft, companions: ModelFiles, request: ModelRequest) -> Mapping[str, bytes]:
        chosen = _chosen(request)
        if is_diffusion(draft.config) or is_t5({step.out.name for step in draft.steps}):
            return self._prepare_diffusion(draft, companions, request, chosen)
        settings = text_config(draft.config)
        architecture = architecture_of_config(settings).of_model(settings, (step.out.name for step in draft.steps))
        model = _Model(self.mixture, architecture, settings, GgufConfig(settings), chosen)
        importances: Importances = model.placed(request.importances)
        if (imatrix := request.settings.get("imatrix")) is not None:
            importances = read_imatrix(imatrix)
        stated, problems = read_metadata(request.settings["metadata"], model.architecture.name)
        if problems:
            raise PlanError([option_error("metadata", problem) for problem in problems])
        _prepare(model, draft, companions, importances, stated, mmproj=bool(request.settings["mmproj"]))
        return {"imatrix.dat": imatrix_bytes(importances)} if request.importances else {}

    def _prepare_diffusion(
        self, draft: PlanDraft, companions: ModelFiles, request: ModelRequest, chosen: Chosen
    ) -> Mapping[str, bytes]:
        if request.settings.get("imatrix") is not None:
            what = "importance matrices are for language models, and this is not one"
            raise PlanError([option_error("imatrix", what, f"leave out {named('imatrix')}")])
        architecture = T5_ENCODER if is_t5({step.out.name for step in draft.steps}) else "comfy"
        stated, problems = read_metadata(request.settings["metadata"], architecture)
        if problems:
            raise PlanError([option_error("metadata", problem) for problem in problems])
        prepare_diffusion(draft, companions, self.mixture, chosen, stated)
        return {}

    def modules(self, config: Mapping[str, Any] | None, read: Callable[[str], bytes | None]) -> Collection[str]:
        architecture = find_architecture(text_config(config))
        data = None if architecture is None else read(MODULES)
        if architecture is None or data is None:
            return ()
        return pooling_of({MODULES: data}, architecture.name, read).folders

    def part(self, parts: Collection[str]) -> str:
        denoisers = [part for part in parts if part in DENOISERS]
        return denoisers[0] if len(denoisers) == 1 else ""

    def weighed(self, config: Mapping[str, Any] | None, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        if is_diffusion(config) or (config or {}).get("model_type") in T5_MODELS:
            what = "importances are measured by running a language model on a text, and this is not one"
            raise Unsupported(what, fix=f"leave out {named('calibration', 'size_bytes', 'target')}")
        settings = text_config(config)
        architecture = architecture_of_config(settings)
        matrices = (
            spec for spec in specs if len(spec.shape) == 2 and not _predicts(spec.name, architecture, GgufConfig(settings))
        )
        placed = [(spec, architecture.place(spec.name)) for spec in matrices]
        weights = [(spec, place.name) for spec, place in placed if place is not None and place.name.endswith(".weight")]
        return [spec for spec, name in weights if not is_router(name)]

    def candidates(
        self, config: Mapping[str, Any] | None, specs: Iterable[TensorSpec], request: ModelRequest
    ) -> dict[str, tuple[str, ...]]:
        libgguf()  # decodes what is tried
        settings, chosen = text_config(config), _chosen(request)
        architecture = architecture_of_config(settings)
        tied = _is_tied_head if settings.get("tie_word_embeddings") else lambda name: False
        candidates = {}
        for spec in specs:
            place = None if _predicts(spec.name, architecture, GgufConfig(settings)) else architecture.place(spec.name)
            if place is None or tied(spec.name) or any(pattern.search(place.name) for pattern, _ in chosen):
                continue
            types = _WIDE if spec.shape[-1] % 256 == 0 else _NARROW if spec.shape[-1] % 32 == 0 else ()
            if types:
                candidates[spec.name] = tuple(f"{PREFIX}{kind.lower()}" for kind in types)
        return candidates

    def stored_name(self, config: Mapping[str, Any] | None, weight: str) -> str:
        place = architecture_of_config(text_config(config)).place(weight)
        return "" if place is None else place.name


FORMATS = tuple(map(GgufFormat, (*MIXTURES, COPIED)))


@dataclass(frozen=True, slots=True)
class _Model:
    """What is asked for: a mixture of types, with the types that are chosen tensor by tensor; and the language model."""

    mixture: Mixture
    architecture: GgufArchitecture
    settings: Mapping[str, Any]
    config: GgufConfig
    chosen: Chosen

    def placed(self, measured: Mapping[str, Floats]) -> Importances:
        """Importances under llama.cpp's names, in its order, those of a layer's experts in one.

        measured  under the Hub's names
        """
        parts = dict[str, dict[int, Floats]]()
        for name, values in measured.items():
            if place := self.architecture.place(name):
                order = self.architecture.order(place.name, self.config)
                turns = order is not None and order.axis == 1 and order.size == values.size  # `_in_order` rejects another size
                moved = values[order.places] if order is not None and turns else values
                parts.setdefault(place.name, {})[place.expert] = moved
        return {name: np.concatenate([experts[i] for i in sorted(experts)]) for name, experts in parts.items()}


def _chosen(request: ModelRequest) -> Chosen:
    """The types that are asked for by name; the user's win. Raises PlanError."""
    types, problems = read_types(request.settings["tensor_types"])
    if problems:
        raise PlanError([option_error("tensor_types", problem) for problem in problems])
    return [*((re.compile(f"{re.escape(name)}$"), kind) for name, kind in request.types.items()), *types]


def _is_tied_head(name: str) -> bool:
    return text_name(name) == "lm_head.weight"


# ---- the draft


def _prepare(
    model: _Model, draft: PlanDraft, companions: ModelFiles, importances: Importances, stated: Stated, *, mmproj: bool
) -> None:
    if model.mixture.name == _FACTORED and not model.architecture.factored:
        what = f"llama.cpp does not multiply weights of the architecture {model.architecture.name} by the factors of NVFP4"
        raise Unsupported(what, where="config.json", fix="choose another format, such as gguf-q4_k_m")
    whole = list(draft.steps)
    keys, factors = model.architecture.keys(model.settings, model.mixture.number)
    keys |= _numbers_in_keys(model, draft, companions)
    pooling = pooling_of(
        companions.read((MODULES, *READ)),
        model.architecture.name,
        lambda name: companions.read((name,)).get(name) or companions.donor(name),
    )
    behind = [_Stored(step, [replace(step.out, name=pooling.dense[step.out.name])]) for step in _taken(draft, pooling.dense)]
    parts = _parts(model, draft)
    text, products, heads = _with_scores(_with_zeros(parts.text, model, draft), pooling, draft)
    stored = [*_stored_as(text, model), *behind]
    shapes = {spec.name: spec.shape for tensor in stored for spec in tensor.specs}
    model.architecture.check_tensors(model.config, shapes)
    model.architecture.check_sizes(model.config, keys, shapes)
    stored = _with_files(stored, model, companions)
    types = _types(model, stored, _shape(model, stored, keys, weighted=bool(importances)))
    if model.mixture.name == COPIED.name:
        keys["general.file_type"] = _file_type(stored, types)
    complete, defaults = _complete(importances, stored)
    steps, problems = list[Step](), _unmatched(model, stored)
    for tensor, kinds in zip(stored, types, strict=True):
        with noting(problems):
            steps.append(_encoded(tensor, kinds, complete, model, draft, companions))
    if problems:
        raise PlanError(problems)
    steps, maxima = _with_maxima(steps, draft)
    embedding = next(tensor.step for tensor in stored if tensor.specs[0].name == "token_embd.weight")
    about, findings = keys_of_files(draft, companions, model.settings, model.architecture, embedding.out.shape[0], stated)
    about = with_template(pooling.values | about)
    vision, warnings = _vision(model, draft, companions, embedding, parts.others) if mmproj else (ImageFile(), [])
    constants, numbers = _constants(factors, len(draft.settings))
    dropped = [*parts.dropped, *_dropped(parts.predict, _PREDICTS)]
    dropped += _dropped(vision.unused, UNUSED) if vision.header else _dropped(parts.others, _OTHER_PART)
    if dropped:
        draft.fix_products(whole)
    draft.steps, draft.settings = [*steps, *heads, *constants, *vision.steps], [*draft.settings, *numbers]
    draft.products += [*products, *maxima, *vision.products]
    draft.dropped += dropped
    draft.container, draft.header, draft.mmproj = GGUF, encode_metadata(keys | about), vision.header
    _keep_files(model, draft, companions, about)
    draft.warnings += [*_unused(importances, stored), *defaults, *_left_out(dropped, model.architecture), *warnings, *findings]
    draft.warnings += [*pooling.warnings, *(unstated(keys | about) if model.architecture.encodes else ())]
    draft.warnings += [*_changed(steps, model.chosen), *_fallen_back(model, steps), *_unweighted(steps, importances)]
    draft.warnings += [*_not_copied(model, stored, steps)]
    if differs := model.architecture.differs:
        draft.warnings.append(Finding(differs, "config.json", fix="compare its answers with those of the original model"))


def _numbers_in_keys(model: _Model, draft: PlanDraft, companions: ModelFiles) -> dict[str, Value]:
    """The keys with numbers of tensors, which the draft then does not have. Raises FormatError, and as `numbers`."""
    steps = [step for step in draft.steps if model.architecture.key_of(step.out.name) is not None]
    if several := next((step.out for step in steps if step.out.size != 1), None):
        what = f"its shape is {list(several.shape)}, and llama.cpp has one number for it"
        raise FormatError(what, where=several.name, fix="download the model again")
    numbers = companions.numbers([step.out.name for step in steps]) if steps else {}
    draft.leave_out(steps, _IN_KEYS)
    return model.architecture.keys_of_numbers(numbers, model.config.count("num_hidden_layers"))


def _taken(draft: PlanDraft, names: Collection[str]) -> list[Step]:
    """The steps of modules behind the pooling, which the draft then does not have. Raises FormatError if one is missing."""
    taken = [step for step in draft.steps if step.out.name in names]
    if missing := sorted(set(names) - {step.out.name for step in taken}):
        raise FormatError(f"no tensor {missing[0]}", where=MODULES, fix="download the folder again")
    draft.steps = [step for step in draft.steps if step not in taken]
    draft.naming = replace(draft.naming, folders=())
    return taken


def _with_scores(
    steps: Sequence[Step], pooling: Pooling, draft: PlanDraft
) -> tuple[list[Step], Sequence[Product], Sequence[Step]]:
    """The steps without the head of a reranker that is a language model; the products and the step of its scores."""
    if not pooling.rows:
        return list(steps), (), ()
    heads = [step for step in steps if _is_tied_head(step.out.name)]
    head = next(iter(heads), None) or next((step for step in steps if text_name(step.out.name) == _EMBEDDING), None)
    if head is None or len(head.out.shape) != 2:
        raise Unsupported("the model has no head, and its scores are rows of it", where=MODULES, fix="choose another format")
    products, step = score_head(head, pooling.rows, draft)
    return [step for step in steps if step not in heads], products, [step]


def _with_zeros(steps: Sequence[Step], model: _Model, draft: PlanDraft) -> list[Step]:
    """The steps, with rows and tensors of zeros that llama.cpp needs and the model does not have."""
    zeros = -1

    def filled(name: str, like: TensorSpec, shape: tuple[int, ...]) -> Step:
        nonlocal zeros
        zeros = zeros if zeros >= 0 else draft.add_settings(Settings({"value": 0.0}, ()))
        return Step(TensorSpec(name, like.dtype, shape), FILL, (), settings=zeros)

    architecture, complete, placed = model.architecture, list[Step](), dict[str, Step]()
    for step in steps:
        if (place := architecture.place(step.out.name)) is not None:
            placed[place.name] = step
        rows, out = architecture.rows_of("" if place is None else place.name, model.config), step.out
        if rows > (out.shape or (rows,))[0]:
            missing = filled(f"{out.name}[{out.shape[0]}]", out, (rows - out.shape[0], *out.shape[1:]))
            whole = replace(out, shape=(rows, *out.shape[1:]))
            complete.append(Step(whole, JOIN, (), pieces=(*step.leaves, missing), role=step.role, layer=step.layer))
        else:
            complete.append(step)
    for name, like in architecture.unread(model.config).items():
        if name not in placed and like in placed:
            out = placed[like].out
            complete.append(filled(str(architecture.hub_name(name)), out, out.shape))
    return complete


def _shape(model: _Model, stored: Sequence[_Stored], keys: Mapping[str, Value], *, weighted: bool) -> Shape:
    """What the rules of types look at."""
    names = _names(stored)
    stated: dict[str, Any] = {name.removeprefix(f"{model.architecture.name}."): value.value for name, value in keys.items()}
    layers = model.config.count("num_hidden_layers") + model.architecture.predictors
    heads = model.config.count("num_attention_heads")
    kv_heads = stated.get("attention.head_count_kv", heads)
    kv_heads = kv_heads[0] if isinstance(kv_heads, list) else kv_heads
    return Shape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=stated.get("expert_count", 0),
        tied="output.weight" not in names,
        weighted=weighted,
        big=model.architecture.name == "llama" and layers == 80 and heads != kv_heads,
        attention=_numbers(_V, names),
        mlps=_numbers(_DOWN, names),
        plain_heads=model.architecture.name == "bailingmoe3",
    )


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> tuple[int, ...]:
    """The layers that have a tensor, in order."""
    return tuple(sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name))))


def _types(model: _Model, stored: Sequence[_Stored], shape: Shape) -> list[list[str]]:
    """The types of each tensor, or of its parts. Raises Unsupported if libgguf is missing and needed."""
    from weightsmith._kernels.ggml import ENCODED

    if model.mixture.name == COPIED.name and not any(tensor.in_file for tensor in stored):
        what = "no tensor of the output comes from a GGUF file, whose types it would have"
        raise Unsupported(what, fix=f"choose the types, such as {PREFIX}q4_k_m")
    types = [[_type(model, tensor, i, shape) for i in range(len(tensor.specs))] for tensor in stored]
    if model.mixture.name == _FACTORED:
        names = {*_names(stored)}

        def factored(tensor: _Stored, name: str) -> bool:
            biased = f"{name.removesuffix('.weight')}.bias" in names  # llama.cpp multiplies biases too
            return not (tensor.parts or biased or model.architecture.predicts(name))

        types = [
            [
                "Q8_0" if kind == _FACTORED and not factored(tensor, spec.name) else kind
                for spec, kind in zip(tensor.specs, kinds, strict=True)
            ]
            for tensor, kinds in zip(stored, types, strict=True)
        ]
    if not ENCODED.issuperset({kind for kinds in types for kind in kinds} - {*PLAIN}):
        libgguf()
    return types


def _type(model: _Model, stored: _Stored, part: int, shape: Shape) -> str:
    """The type of a tensor, or of one of its parts.

    Layers that predict, and what llama.cpp never reads, have no importances: they never run.
    """
    spec, mixture, in_file = stored.specs[part], model.mixture, stored.in_file
    if mixture.name == COPIED.name:
        kind = stored.step.out.dtype.name
        if in_file is not None and len(in_file.parts) >= len(stored.specs):
            kind = in_file.parts[part].dtype.name
            if _is_factored(stored, kind) and not model.architecture.factored:
                kind = "Q8_0"  # without a factor, NVFP4 has few numbers
        mixture = replace(mixture, default=kind if kind in TYPES else "F32")
    kind = type_of(mixture, spec, shape, model.chosen)
    unmeasured = model.architecture.predicts(spec.name) or spec.name in model.architecture.unread(model.config)
    weighted = unmeasured and _must_be_weighted(kind, mixture) and mixture.name != COPIED.name
    return fitting("Q4_K", spec.shape[-1]) if weighted else kind


def _file_type(stored: Sequence[_Stored], types: Sequence[Sequence[str]]) -> Value:
    """That of the inputs, if all say the same; else of the mixture that comes nearest to the types of the matrices."""
    stated = {tensor.in_file.types for tensor in stored if tensor.in_file is not None}
    numbers = [number for number in stated if type(number) is int and 0 <= number < 1 << 31]
    if len(stated) == 1 and numbers and all(tensor.in_file is not None for tensor in stored):
        return Value("u32", numbers[0])
    kinds = [
        kind
        for tensor, kinds in zip(stored, types, strict=True)
        for spec, kind in zip(tensor.specs, kinds, strict=True)
        if len(spec.shape) > 1
    ]
    return Value("u32", file_type(kinds))


def _names(stored: Iterable[_Stored]) -> list[str]:
    return [spec.name for tensor in stored for spec in tensor.specs]


def _unmatched(model: _Model, stored: Iterable[_Stored]) -> list[WeightsmithError]:
    """Types that are asked for of no tensor."""
    names = _names(stored)
    return [
        option_error("tensor_types", f"no tensor of this model has a name that matches {pattern.pattern}", _NAMED)
        for pattern, _ in model.chosen
        if not any(pattern.search(name) for name in names)
    ]


def _keep_files(model: _Model, draft: PlanDraft, companions: ModelFiles, about: Mapping[str, Value]) -> None:
    """Leave out of the draft the files whose contents are in the keys, and those that only transformers reads."""
    said = {"config.json", *READ, *said_generation(draft, companions, about), *filter(NAMED_TEMPLATE.fullmatch, draft.carried)}
    said |= {*(PROCESSOR if draft.mmproj else ())}
    if f"{model.architecture.name}.pooling_type" in about:
        said |= {MODULES, *(name for name in (*draft.carried, *draft.files) if name.endswith("_Pooling/config.json"))}
    copied = [name for name in draft.carried if not is_read(name) and not name.endswith(".py") and "/" not in name]
    companions.held({*copied, "config.json", *said.intersection((*draft.carried, *draft.files))})
    draft.carried, draft.files = copied, {}


# ---- warnings


def _changed(steps: Sequence[Step], chosen: Chosen) -> list[Finding]:
    """Tensors that have another type than was asked for, because of their shape."""
    changed: dict[tuple[str, str], list[str]] = {}
    for out in (out for step in steps for out in step.stored):
        asked = next((kind for pattern, kind in reversed(chosen) if pattern.search(out.name)), out.dtype.name)
        if out.dtype.name != asked and not out.name.endswith(".scale"):
            changed.setdefault((asked, out.dtype.name), []).append(out.name)
    fix = "choose a type whose blocks fit; vectors, norms and routers are always F32"
    return [
        Finding(f"stored as {kind}, not as {asked}: {len(names):,} tensors", names[0], fix=fix)
        for (asked, kind), names in changed.items()
    ]


def _fallen_back(model: _Model, steps: Sequence[Step]) -> list[Finding]:
    """Matrices whose rows have no whole blocks of the format's types, and what they are stored as instead."""
    outs = [out for step in steps for out in step.stored if len(out.shape) > 1 and out.dtype.name != "F32"]
    block = TYPES[model.mixture.default].block
    unfit = [out for out in outs if out.shape[-1] % block and out.dtype.block < block]
    fallen = [out for out in unfit if not any(pattern.search(out.name) for pattern, _ in model.chosen)]
    findings = []
    for kind, alike in grouped((out.dtype.name, out) for out in fallen).items():
        widths = ", ".join(f"{width:,}" for width in sorted({out.shape[-1] for out in alike})[:4])
        what = f"{len(alike):,} of {len(outs):,} matrices are stored as {kind}: {widths} columns are no multiple of {block}"
        fix = "choose a format without blocks, such as fp8-dynamic, or accept a larger file"
        if kind not in PLAIN:
            fix = "choose a format whose blocks are shorter, such as gguf-q4_0, or accept a larger file"
        findings.append(Finding(what, alike[0].name, fix=fix))
    return findings


def _unweighted(steps: Sequence[Step], importances: Importances) -> list[Finding]:
    """The warning that importances change nothing for some tensors."""
    blocks = [step.stored[0].name for step in steps if step.stored and step.stored[0].dtype.block > 1]
    copies = [step.stored[0].name for step in steps if step.verbatim and step.stored[0].dtype.block > 1]
    if not importances or not copies:
        return []
    what = f"{len(copies):,} of {count(len(blocks), 'tensor')} with blocks are copied: importances change nothing for them"
    return [Finding(what, copies[0], fix="start from a model that is not quantised, if there is one")]


def _not_copied(model: _Model, stored: Sequence[_Stored], steps: Sequence[Step]) -> list[Finding]:
    """Matrices that are not copied, in a file whose types are those of the inputs."""
    if model.mixture.name != COPIED.name:
        return []
    blocks = [step for step in steps if step.op != FILL and any(out.dtype.block > 1 for out in step.stored)]
    encoded = [step.out.name for step in blocks if not step.verbatim]
    plain = [tensor.step.out.name for tensor in stored if tensor.in_file is None and _is_matrix(tensor.specs[0])]
    findings = []
    if encoded:
        what = (
            f"{len(encoded):,} of {count(len(blocks), 'tensor')} with blocks are encoded: no input has them as the output does"
        )
        findings.append(Finding(what, encoded[0], fix="use the output as it is: the others are copied"))
    if plain:
        what = f"{len(plain):,} of {len(stored):,} tensors are plain numbers: they are not read from a GGUF file"
        fix = f"use the output as it is, or choose their types with {named('tensor_types')}"
        findings.append(Finding(what, plain[0], fix=fix))
    return findings


def _is_matrix(spec: TensorSpec) -> bool:
    """Whether llama.cpp may store a tensor as blocks."""
    return spec.name.endswith(".weight") and math.prod(spec.shape[:-1]) > 1 and not (is_norm(spec.name) or is_router(spec.name))


def _left_out(dropped: Sequence[Dropped], architecture: GgufArchitecture) -> list[Finding]:
    """A stored head that transformers would use, if it differs from the embedding; layers that predict; heads of encoders."""
    what = "it is left out: config.json ties the head to the embedding"
    fix = "set tie_word_embeddings to false in the input's config.json if the two differ"
    findings = [Finding(what, head.tensor, fix=fix) for head in dropped if head.reason == _HEAD_IS_EMBEDDING]
    if predict := [layer.tensor for layer in dropped if layer.reason == _PREDICTS]:
        what = f"{len(predict):,} tensors are left out: layers that predict several tokens at a time"
        findings.append(Finding(what, predict[0], fix="use the model as it is: it works without them"))
    for reason in dict.fromkeys(architecture.unused.values()):
        names = [tensor.tensor for tensor in dropped if tensor.reason == reason]
        if names and reason != COMPUTED:
            what = f"left out, {count(len(names), 'tensor')}: {reason}"
            fix = "use the model as it is: its vectors do not need them"
            if reason == NOT_ADDED:
                fix = "compare the vectors of llama.cpp with those of the model: they differ unless the biases are near 0"
            findings.append(Finding(what, names[0], fix=fix))
    return findings


# ---- the parts of a model


@dataclass(frozen=True, slots=True)
class _Parts:
    """The steps of a model.

    text     of the language model
    others   of parts for images and sounds
    predict  of layers that predict several tokens
    dropped  input tensors of others: what llama.cpp computes
    """

    text: Sequence[Step]
    others: Sequence[Step]
    predict: Sequence[Step]
    dropped: Sequence[Dropped]


def _parts(model: _Model, draft: PlanDraft) -> _Parts:
    several = not {"text_config", "vision_config"}.isdisjoint(draft.config or {})
    architecture = model.architecture
    dropped, kept = _without_doubles(draft.steps, model)
    text, others, predict = list[Step](), list[Step](), list[Step]()
    for step in kept:
        name = step.out.name
        if not architecture.predictors and _predicts(name, architecture, model.config):
            predict.append(step)
        elif several and not architecture.knows(name) and _OF_OTHER_PARTS.search(name):
            others.append(step)
        else:
            text.append(step)
    return _Parts(text, others, predict, dropped)


def _predicts(name: str, architecture: GgufArchitecture, config: GgufConfig) -> bool:
    """Whether a tensor of the Hub's layout is of a layer that predicts several tokens. Raises FormatError."""
    predicting = architecture.predicting
    numbered = predicting is not None and not predicting.stack and config.count(predicting.setting, 0, least=0)
    return predicts(name, config.count("num_hidden_layers") if numbered else math.inf)


def _without_doubles(steps: Sequence[Step], model: _Model) -> tuple[list[Dropped], list[Step]]:
    """The steps without what llama.cpp does not store: a tied head that is stored twice, frequencies of RoPE, and `unused`."""
    dropped, kept = list[Dropped](), []
    for step in steps:
        if _is_tied_head(step.out.name) and model.config.get("tie_word_embeddings"):
            dropped += _dropped([step], _HEAD_IS_EMBEDDING)
        elif reason := model.architecture.reason_unused(step.out.name):
            dropped += _dropped([step], reason)
        elif step.out.name.endswith(".rotary_emb.inv_freq"):
            dropped += _dropped([step], COMPUTED)
        else:
            kept.append(step)
    return list(dict.fromkeys(dropped)), kept


def _dropped(steps: Iterable[Step], reason: str) -> list[Dropped]:
    """The input tensors of steps that are left out."""
    return [Dropped(read.model, read.tensor, reason) for step in steps for read in step.reads if read.model >= 0]


def _vision(
    model: _Model, draft: PlanDraft, companions: ModelFiles, embedding: Step, steps: Sequence[Step]
) -> tuple[ImageFile, list[Finding]]:
    """The file for images, and the warning if there is none. steps: of parts for images and sounds."""
    if not steps:
        return ImageFile(), []
    try:
        vision = vision_half(draft, embedding, steps, companions.read((*PROCESSOR, *TOKENIZER)), model.mixture.name)
    except Unsupported as error:
        return ImageFile(), [left_out(error, len(steps))]
    if vision is not None:
        return vision, []
    what = f"{len(steps):,} tensors are left out: the file holds the language model alone"
    fix = "make a mmproj file for images with llama.cpp's convert_hf_to_gguf.py --mmproj, of the model in the Hub's layout"
    return ImageFile(), [Finding(what, steps[0].out.name, fix=fix)]


# ---- tensors


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step, and what llama.cpp stores of it.

    specs   under llama.cpp's names: the tensor, or its parts
    height  rows of a band, of a tensor in parts
    parts   what each part is of a band; (): the tensor is stored as one
    flat    see `SplitTensor`
    in_file how a GGUF file has it, or the first of what it is made from; None: none has
    """

    step: Step
    specs: list[TensorSpec]
    height: int = 0
    parts: tuple[Pieces, ...] = ()
    flat: bool = False
    in_file: StoredAs | None = None


def _with_files(stored: Sequence[_Stored], model: _Model, companions: ModelFiles) -> list[_Stored]:
    """The tensors with `in_file`: of the first GGUF file that a step reads, or of the tensor that an unread one is like."""
    places = dict[str, StoredAs]()
    for tensor in stored:
        read_places = (companions.stored_as(read) for read in tensor.step.reads if read.model >= 0)
        if (place := next((place for place in read_places if place is not None), None)) is not None:
            places[tensor.specs[0].name] = place
    unread = model.architecture.unread(model.config)
    names = [(tensor, tensor.specs[0].name) for tensor in stored]
    return [replace(tensor, in_file=places.get(unread.get(name, name))) for tensor, name in names]


def _stored_as(steps: Sequence[Step], model: _Model) -> list[_Stored]:
    """The steps, those of the experts of a layer as one. Raises PlanError with every tensor that llama.cpp has not."""
    stored: dict[str, list[_Stored]] = {}
    together: dict[str, dict[int, Step]] = {}
    unknown: list[WeightsmithError] = []
    for step in steps:
        place = model.architecture.place(step.out.name)
        if split := model.architecture.split_of(step.out.name):
            cut = model.architecture.cut(split[0], model.config, step.out.shape)
            stored[step.out.name] = _in_parts(step, cut, split[1], model.config)
        elif place is None:
            what = f"llama.cpp knows no such tensor in a model of the type {model.architecture.model_types[0]}"
            unknown.append(Unsupported(what, where=step.out.name, fix="choose another format, such as fp8-dynamic"))
        else:
            stored.setdefault(place.name, [_Stored(step, [replace(step.out, name=place.name)])])
            if place.expert >= 0:
                together.setdefault(place.name, {})[place.expert] = step
    if unknown:
        raise PlanError(unknown)
    stored |= {name: [_joined(name, experts)] for name, experts in together.items()}
    if "token_embd.weight" not in stored:
        raise Unsupported("the model has no embedding", where="model.embed_tokens.weight", fix="choose another format")
    return [tensor for parts in stored.values() for tensor in parts]


def _joined(name: str, experts: Mapping[int, Step]) -> _Stored:
    """The experts of a layer as one. name: llama.cpp's. Raises Unsupported for experts that differ, or do not follow."""
    ordered = [experts[i] for i in sorted(experts)]
    outs = [step.out for step in ordered]
    if sorted(experts) != list(range(len(experts))) or len({(out.shape, out.dtype) for out in outs}) > 1:
        what = f"its experts are numbered {show(sorted(experts))}, or have unequal shapes"
        raise Unsupported(what, where=outs[0].name, fix="choose another format")
    whole = re.sub(r"(?<=\.experts)\.\d+(?=\.)|\.\d+(?=\.(?:weight|bias)$)", "", outs[0].name)
    spec = TensorSpec(whole, outs[0].dtype, (len(outs), *outs[0].shape))
    pieces = tuple(leaf for step in ordered for leaf in step.leaves)
    joined = Step(spec, JOIN, (), pieces=pieces, role=ordered[0].role, layer=ordered[0].layer)
    return _Stored(joined, [replace(spec, name=name)])


def _in_parts(step: Step, split: SplitTensor, layer: str, config: GgufConfig) -> list[_Stored]:
    """A step of a tensor that llama.cpp stores in parts, or a step for each of them if a merge makes them one by one.

    Raises FormatError, and Unsupported for a merge of other matrices.
    """
    height, parts = pieces_of(split, config, step.out.shape)
    names = [f"blk.{layer}.{part.name}" for part in split.parts]
    shapes = [part_shape(pieces, height, step.out.shape, flat=split.flat) for pieces in parts]
    specs = [TensorSpec(name, step.out.dtype, shape) for name, shape in zip(names, shapes, strict=True)]
    rows = [math.prod(piece.out.shape[:-1]) for piece in step.pieces]
    if not any(count_of_rows % height for count_of_rows in rows):
        return [_Stored(step, specs, height, parts, split.flat)]
    count = len(parts)
    moved = split.flat or any(piece.moved for pieces in parts for piece in pieces)
    if moved or rows != [piece.rows for pieces in parts for piece in pieces] * (len(rows) // count):
        what = "llama.cpp stores it in parts that the merge does not compute one by one"
        raise Unsupported(what, where=step.out.name, fix=f"merge without {named('quantize')}, then quantise the result")
    outs = [replace(spec, name=f"{step.out.name}.{i}") for i, spec in enumerate(specs)]
    return [_Stored(replace(step, out=out, pieces=step.pieces[i::count]), [specs[i]]) for i, out in enumerate(outs)]


def _in_order(step: Step, order: HeadOrder | None, draft: PlanDraft) -> Step:
    """The step with its rows or columns in the order that llama.cpp wants.

    Raises Unsupported for a step that computes, FormatError for a tensor of another size than config.json says.
    """
    if order is None:
        return step
    if (size := step.out.shape[order.axis]) != order.size:
        kind = ("rows", "columns")[order.axis]
        what = f"it has {size:,} {kind}, and {order.size:,} with the {order.values:,} {order.parts} of config.json"
        raise FormatError(what, where=step.out.name, fix=f"repair {order.settings} in config.json")
    if step.op not in (COPY, CAST):
        what = f"llama.cpp has the {order.parts} of this tensor in another order, in which a merge would have other numbers"
        fix = f"merge without {named('quantize')}, then quantise the result"
        raise Unsupported(what, where=step.out.name, fix=fix)
    rows, cols = step.out.shape[0], step.out.size // step.out.shape[0]
    draft.tables.append(Table.of(order.places))
    view = Gather(len(draft.tables) - 1, Block(0, rows, cols, cols), order.axis)
    return replace(step, inputs=tuple(replace(read, view=view) for read in step.inputs))


def _encoded(
    stored: _Stored, kinds: Sequence[str], importances: Importances, model: _Model, draft: PlanDraft, companions: ModelFiles
) -> Step:
    """The step of a tensor that is stored as one of these types, or in parts of these; or that copies it from GGUF files.

    Raises FormatError, Unsupported.
    """
    spec, dtypes = stored.specs[0], [STORED[kind] for kind in kinds]
    architecture, config = model.architecture, model.config
    order = architecture.order(spec.name, config)
    encoding: GgufEncoding | CutEncoding
    if stored.parts:
        encoding = CutEncoding(stored.height, tuple(zip(dtypes, stored.parts, strict=True)), stored.flat)
    else:
        heads = config.count("num_attention_heads")
        turned = architecture.rotated_heads(spec.name, heads, config.count("num_key_value_heads", heads))
        head_rows, power = spec.shape[0] // turned if turned else 0, architecture.power_of(spec.name)
        shift, skipped = architecture.shift_of(spec.name), architecture.rows_skipped(spec.name, config)
        factored = kinds[0] == model.mixture.name == _FACTORED or (architecture.factored and _is_factored(stored, kinds[0]))
        columns = architecture.columns_of(spec.name, config)
        encoding = GgufEncoding(
            dtypes[0],
            head_rows,
            shift,
            power,
            skipped=skipped,
            factored=factored,
            columns=columns,
            times=architecture.times(spec.name, config),
            deep=architecture.is_deepened(spec.name),
        )
    names = [part.name for part in stored.specs]
    if encoding.maxima:
        names.append(f"{names[0].removesuffix('.weight')}.scale")
    named_outs = [replace(out, name=name) for out, name in zip(encoding.outs(stored.step.out), names, strict=True)]
    measured = any(leaf.base for leaf in stored.step.leaves) and model.mixture.name != COPIED.name
    if not measured:
        sources = companions.stored_as, companions.undecoded
        if (copy := copied(stored.step, encoding.name, named_outs, *sources, order)) is not None:
            return copy
    step = _in_order(stored.step, order, draft)
    tables, weighted = list[Floats](), -1
    for part, kind in zip(stored.specs, kinds, strict=True):
        values = _importances(importances, part, kind, model.mixture) if STORED[kind].block > 1 else None
        matrices = part.shape[0] if len(part.shape) == 3 else 1
        tables.append(np.zeros(part.shape[-1] * matrices, np.float32) if values is None else values)
    if any(table.any() for table in tables):
        weighted = len(draft.tables)
        draft.tables.append(Table(np.concatenate(tables).astype("<f4").tobytes()))
    return replace(step, encoding=encoding.name, stored=tuple(named_outs), weighted=weighted)


def _is_factored(stored: _Stored, kind: str) -> bool:
    """Whether a file has a tensor of this type as numbers with a factor."""
    return kind == _FACTORED and stored.in_file is not None and len(stored.in_file.parts) > len(stored.specs)


def _with_maxima(steps: Sequence[Step], draft: PlanDraft) -> tuple[list[Step], list[Product]]:
    """The steps, and the products of the largest magnitudes that some of their encodings need.

    Weights that engines join share theirs, as in NVIDIA's checkpoints, whose scales are then kept.
    """
    computed = ((step, find(step.encoding)) for step in steps if not step.verbatim)
    measured = {step.out.name: step for step, encoding in computed if encoding is not None and encoding.maxima}
    maker, products = arrays_of(draft.products), dict[str, Product]()
    for names in joined_sets(measured):
        plain = tuple(replace(measured[name], encoding=UNENCODED, stored=()) for name in names)
        outs = tuple(TensorSpec(maximum_name(name), DTYPES["F32"], (1,)) for name in names)
        needs = tuple(sorted({needed for step in plain for needed in needs_of(step, maker)}))
        of = f"largest magnitude of {', '.join(names)}"
        products |= dict.fromkeys(names, Product(of, _MAGNITUDES, outs, {"sets": [names]}, plain, needs=needs))
    complete = list[Step]()
    for step in steps:
        product = products.get(step.out.name)
        complete.append(step if product is None else replace(step, needs=(*step.needs, product.name)))
    return complete, list({product.name: product for product in products.values()}.values())


def _constants(factors: Mapping[str, Floats], first: int) -> tuple[list[Step], list[Settings]]:
    """Steps for vectors that no model has, because transformers computes them from config.json; and their settings."""
    steps: list[Step] = []
    settings: list[Settings] = []
    for name, values in factors.items():
        pieces: list[Step] = []
        for i, value in enumerate(values.tolist()):
            pieces.append(Step(TensorSpec(f"{name}[{i}]", DTYPES["F32"], (1,)), FILL, (), settings=first + len(settings)))
            settings.append(Settings({"value": value}, ()))
        spec = TensorSpec(name, DTYPES["F32"], (len(values),))
        steps.append(Step(spec, JOIN, (), pieces=tuple(pieces), encoding=GgufEncoding(DTYPES["F32"]).name, stored=(spec,)))
    return steps, settings


# ---- importances


def _importances(importances: Importances, spec: TensorSpec, kind: str, mixture: Mixture) -> Floats | None:
    """The importances of a tensor's columns, of each of its matrices; None if there are none."""
    values = importances.get(spec.name)
    matrices = spec.shape[0] if len(spec.shape) == 3 else 1
    ends = spec.name in (*TABLES, "output.weight")
    if values is not None and values.size != spec.shape[-1] * matrices:
        if spec.name != "token_embd.weight":
            what = f"the importance matrix has {values.size:,} numbers for it, and it has {spec.shape[-1] * matrices:,} columns"
            raise FormatError(what, where=spec.name, fix="use the importance matrix of this model")
        values = None
    if values is None and _must_be_weighted(kind, mixture) and not ends:
        what = f"it would be stored as {kind}, which gives garbage without importances"
        fix = "write --calibration built-in, give an importance matrix that has this tensor (--imatrix FILE), or use more bits"
        if mixture.name == COPIED.name:
            fix = f"choose another type for it with {named('tensor_types')}"
        raise Unsupported(what, where=spec.name, fix=fix)
    return values


def _must_be_weighted(kind: str, mixture: Mixture) -> bool:
    """Whether a tensor of this type would be garbage without importances."""
    return kind in (*NEEDS_IMPORTANCES, "IQ2_S", "IQ3_XXS") or (kind == "Q2_K" and mixture.name == "Q2_K_S")


def _complete(importances: Importances, stored: Iterable[_Stored]) -> tuple[Importances, list[Finding]]:
    """The importances with 1 for columns that have none, and the warning that counts these."""
    complete, counts = dict(importances), dict[str, int]()
    for spec in (spec for tensor in stored for spec in tensor.specs):
        values = importances.get(spec.name)
        if values is not None and len(spec.shape) > 1 and values.size % spec.shape[-1] == 0:  # `_importances` rejects others
            complete[spec.name], missing = with_defaults(values, spec.shape[-1])
            counts |= {spec.name: missing} if missing else {}
    if not counts:
        return importances, []
    what = f"{sum(counts.values()):,} runs of {RUN} columns, in {len(counts):,} tensors, have no importances: they count as 1"
    fix = "use a longer text, or one that reaches every expert"
    return complete, [Finding(what, next(iter(counts)), fix=fix)]


def _unused(importances: Importances, stored: Iterable[_Stored]) -> list[Finding]:
    """A warning if none of the importances is of a tensor of this model."""
    if not importances or not importances.keys().isdisjoint(_names(stored)):
        return []
    what = f"no name in the importance matrix is of a tensor of this model; the first is {show(next(iter(importances)))}"
    return [Finding(what, "imatrix", fix="use the importance matrix of this model")]
