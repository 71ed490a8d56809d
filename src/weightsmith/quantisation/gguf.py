"""GGUF files: every tensor under llama.cpp's name, in a type chosen by llama.cpp's rules, and the keys that describe the model.

The mixtures of types are those of llama.cpp's `llama_model_quantize` (src/llama-quant.cpp), so that a file has the same types
and the same bytes as one that llama.cpp makes from the model's F32 file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from weightsmith.containers import GGUF
from weightsmith.containers.gguf import encode_metadata
from weightsmith.encodings.gguf import NEEDS_IMPORTANCES, TYPES, GgufEncoding
from weightsmith.errors import Finding, FormatError, ParameterError, PlanError, Unsupported, WeightsmithError
from weightsmith.formats.carried import MAX_CARRIED_BYTES, is_read
from weightsmith.formats.files import read_bounded, show
from weightsmith.formats.gguf.config import Config, family_of_config, keys_of_config
from weightsmith.formats.gguf.families import Family, gguf_place, is_norm, rotated_heads
from weightsmith.formats.gguf.imatrix import imatrix_bytes, read_imatrix
from weightsmith.formats.gguf.tokenizer import READ, tokenizer_keys
from weightsmith.options import QuantizeSettings
from weightsmith.planner import Plan, Prepared
from weightsmith.plans import FILL, JOIN, Dropped, Settings, Step, Table
from weightsmith.products.base import Arrays
from weightsmith.quantisation.base import Format
from weightsmith.quantisation.calibration.plan import CALIBRATION_SETTINGS, NONE, Chain, before_measuring, measuring
from weightsmith.quantisation.calibration.work import ImportanceWork
from weightsmith.sources.gguf import libgguf
from weightsmith.tensors import DTYPES, TensorSpec

Importances = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of types, as llama.cpp calls it.

    name     Q4_K_M
    number   llama.cpp's, in general.file_type
    default  the type of what no rule names
    """

    name: str
    number: int
    default: str


MIXTURES = tuple(
    Mixture(*each)
    for each in (
        ("F32", 0, "F32"),
        ("F16", 1, "F16"),
        ("BF16", 32, "BF16"),
        ("Q8_0", 7, "Q8_0"),
        ("Q6_K", 18, "Q6_K"),
        ("Q5_K_M", 17, "Q5_K"),
        ("Q5_K_S", 16, "Q5_K"),
        ("Q5_1", 9, "Q5_1"),
        ("Q5_0", 8, "Q5_0"),
        ("Q4_K_M", 15, "Q4_K"),
        ("Q4_K_S", 14, "Q4_K"),
        ("Q4_1", 3, "Q4_1"),
        ("Q4_0", 2, "Q4_0"),
        ("IQ4_NL", 25, "IQ4_NL"),
        ("IQ4_XS", 30, "IQ4_XS"),
        ("Q3_K_L", 13, "Q3_K"),
        ("Q3_K_M", 12, "Q3_K"),
        ("Q3_K_S", 11, "Q3_K"),
        ("IQ3_M", 27, "IQ3_S"),
        ("IQ3_S", 26, "IQ3_S"),
        ("IQ3_XS", 22, "IQ3_S"),
        ("IQ3_XXS", 23, "IQ3_XXS"),
        ("Q2_K", 10, "Q2_K"),
        ("Q2_K_S", 21, "Q2_K"),
        ("IQ2_M", 29, "IQ2_S"),
        ("IQ2_S", 28, "IQ2_XS"),
        ("IQ2_XS", 20, "IQ2_XS"),
        ("IQ2_XXS", 19, "IQ2_XXS"),
    )
)

_FALLBACK = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Where the rows are no multiple of 256."""

_TINY = frozenset({"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"})
_IQ4 = frozenset({"IQ4_NL", "IQ4_XS"})
_OF_EIGHT = frozenset("Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS".split())
"""Mixtures that store the attention's output of eight experts' models as Q5_K."""

_LAYER = re.compile(r"blk\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rules look at besides names.

    layers, heads, kv_heads, experts  of the model
    tied      the embedding is the head too
    weighted  there are importances
    big       Llama's 70B, whose v is small beside q
    """

    layers: int
    heads: int
    kv_heads: int
    experts: int
    tied: bool
    weighted: bool
    big: bool

    @property
    def group(self) -> int:
        """Heads of q that share one of k."""
        return self.heads // self.kv_heads


def type_of(mixture: Mixture, spec: TensorSpec, shape: Shape) -> str:
    """The type of a tensor, by ggml's name.

    spec  under llama.cpp's name
    """
    name = spec.name
    if len(spec.shape) < 2 or is_norm(name) or ".ffn_gate_inp." in name:  # routers too: they are small, and they decide much
        return "F32"
    if mixture.default in ("F32", "F16", "BF16"):
        return mixture.default
    kind = _by_rule(mixture.name, mixture.default, name, spec.shape[-1], shape)
    if spec.shape[-1] % TYPES[kind].block:
        kind = _FALLBACK.get(kind, "F16")
    return "F16" if spec.shape[-1] % TYPES[kind].block else kind


def _by_rule(mix: str, default: str, name: str, cols: int, shape: Shape) -> str:
    """The type before it is known whether the rows have whole blocks."""
    match = _LAYER.match(name)
    i, n = (int(match[1]), shape.layers) if match else (0, shape.layers)
    eight, four = shape.experts == 8, shape.group >= 4
    if name == "output.weight" or (shape.tied and name == "token_embd.weight"):
        if cols % TYPES[default].block or default == "Q8_0":
            return "Q8_0"
        return "Q5_K" if mix in _TINY or mix == "IQ3_XXS" else "Q6_K"
    if name == "token_embd.weight":
        small = {"IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S", "IQ3_XXS": "IQ3_S"}
        return small.get(mix, default)
    part = name.split(".")[-2]
    if mix in _TINY:
        better = "IQ3_S" if mix in ("IQ2_S", "IQ2_M") else "Q2_K"
        if part in ("attn_v", "attn_qkv"):
            return "Q4_K" if four or shape.experts >= 4 else better
        if part == "attn_k" and eight:
            return "Q4_K"
        if part.startswith("ffn_down") and i < n // 8:
            return better
        if part == "attn_output":
            return "Q5_K" if eight else "IQ3_S" if mix in ("IQ2_S", "IQ2_M") else default
        return default
    if part in ("attn_v", "attn_qkv"):
        return _of_v(mix, default, i, n, shape)
    if part in ("attn_k", "attn_q"):
        if part == "attn_k" and eight:
            return "Q8_0"
        return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(mix, default)
    if part.startswith("ffn_down"):
        return _of_down(mix, default, i, n, shape)
    if part == "attn_output":
        if eight:
            return "Q5_K" if mix in _OF_EIGHT else default
        more = {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}
        return more.get(mix, default)
    if part.startswith(("ffn_gate", "ffn_up")) and mix == "IQ3_XS" and n // 8 <= i < 7 * n // 8:
        return "IQ3_XXS"
    return default


def _more_bits(i: int, n: int) -> bool:
    """Layers where more bits help most: the first and the last eighth, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _of_v(mix: str, default: str, i: int, n: int, shape: Shape) -> str:
    four = shape.group >= 4
    kind = default
    if mix == "Q2_K":
        kind = "Q4_K" if four else "Q3_K"
    elif mix == "Q2_K_S" and four:
        kind = "Q4_K"
    elif mix == "IQ3_XXS":
        kind = "Q4_K" if four else "IQ3_XXS" if shape.weighted else "IQ3_S"
    elif (mix in ("IQ3_XS", "IQ3_S") and four) or mix == "IQ3_M":
        kind = "Q4_K"
    elif mix == "Q3_K_M":
        kind = "Q5_K" if i < 2 else "Q4_K"
    elif mix == "Q3_K_L" or (mix in _IQ4 and four):
        kind = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and _more_bits(i, n):
        kind = "Q6_K"
    elif mix == "Q4_K_S" and i < 4:
        kind = "Q5_K"
    if shape.big and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if shape.experts == 8 else kind


def _of_down(mix: str, default: str, i: int, n: int, shape: Shape) -> str:
    early = i < n // 8
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q2_K_S":
        return "Q4_K" if early else default
    if mix == "IQ3_XXS" and not shape.weighted:
        return "Q4_K" if early else "Q3_K"
    if mix == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K"
    if mix == "IQ3_M":
        return "Q4_K" if early or (shape.experts == 8 and _more_bits(i, n)) else default
    if mix == "Q3_K_L":
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if _more_bits(i, n) else default
    if early and ((mix in _IQ4 and not shape.weighted) or mix == "Q4_K_S"):
        return "Q5_K"
    if early and shape.weighted:
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}.get(mix, default)
    return default


# ---- the plan


def apply(mixture: Mixture, prepared: Prepared, settings: QuantizeSettings) -> Plan:
    """The plan of a GGUF file. Raises PlanError."""
    measures = settings.calibration not in (None, NONE)
    if measures and settings.imatrix is not None:
        what = "importances are either read from a file, or computed from a calibration text"
        raise PlanError([ParameterError(what, where="imatrix", fix="leave out --imatrix or --calibration")])
    with _problems_of_a_plan():
        if not measures:
            return _planned(mixture, prepared, {} if settings.imatrix is None else read_imatrix(settings.imatrix))
        family = family_of_config(prepared.plan.config)
        chain = Chain(prepared.plan, prepared, settings)
        weights = [_weighted(prepared.plan, family, chain.names(layer)) for layer in range(chain.layers)]
        ones = {spec.name: np.ones(spec.shape[1:], np.float32) for own in weights for spec in own}
        _planned(mixture, prepared, _importances_of(family, ones))  # its errors, before anything is measured
    products = measuring(chain, lambda layer, states: chain.importances(layer, states, [s.name for s in weights[layer]]))
    then = {"format": _format_name(mixture), "settings": asdict(settings)}
    return replace(prepared.plan, products=(*map(chain.surveyed, prepared.plan.products), *products), then=then)


def follow(
    mixture: Mixture, prepared: Prepared, settings: QuantizeSettings, arrays: Mapping[str, Arrays]
) -> tuple[Plan, Mapping[str, bytes]]:
    """The plan of a GGUF file with the importances that were measured, and these as a file. Raises PlanError, FormatError."""
    plain, measured = before_measuring(prepared.plan)
    found: dict[str, npt.NDArray[np.float32]] = {}
    for product in measured:
        if product.name in arrays:
            found |= dict(zip(ImportanceWork.of(product).weights, arrays[product.name], strict=True))
    with _problems_of_a_plan():
        importances = _importances_of(family_of_config(plain.config), found)
        return _planned(mixture, replace(prepared, plan=plain), importances), {"imatrix.dat": imatrix_bytes(importances)}


@contextmanager
def _problems_of_a_plan() -> Iterator[None]:
    try:
        yield
    except WeightsmithError as error:
        if isinstance(error, PlanError):
            raise
        error.finding = replace(error.finding, where=f"quantize: {error.finding.where}".removesuffix(": "))
        raise PlanError([error]) from error


def _planned(mixture: Mixture, prepared: Prepared, importances: Importances) -> Plan:
    plan = prepared.plan
    family = family_of_config(plan.config)
    config = plan.config or {}
    if mixture.default not in ("F32", "F16", "BF16"):
        libgguf()
    keys, extra = keys_of_config(config, family, mixture.number)
    given = Config(config)
    dropped, steps = _without_doubles(plan, given)
    named = _named(steps, family)
    tied = "output.weight" not in named
    specs = [replace(step.out, name=name) for name, step in named.items()]
    layers, heads = given.count("num_hidden_layers"), given.count("num_attention_heads")
    kv_heads = given.count("num_key_value_heads", heads)
    experts = keys.get(f"{family.architecture}.expert_count")
    shape = Shape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        experts=0 if experts is None or not isinstance(experts.value, int) else experts.value,
        tied=tied,
        weighted=bool(importances),
        big=family.architecture == "llama" and layers == 80 and heads != kv_heads,
    )
    tables = list(plan.tables)
    problems: list[WeightsmithError] = []
    made: list[Step] = []
    for spec, step in zip(specs, named.values(), strict=True):
        kind = type_of(mixture, spec, shape)
        turned = rotated_heads(family, spec.name, heads, kv_heads)
        shift = family.shift if is_norm(spec.name) else 0.0
        encoding = GgufEncoding(TYPES[kind], spec.shape[0] // turned if turned else 0, shift)
        weighted = -1
        try:
            if encoding.dtype.block > 1 and (values := _importances(importances, spec, kind, mixture)) is not None:
                weighted = len(tables)
                tables.append(Table(values.astype("<f4").tobytes()))
            stored = tuple(replace(out, name=spec.name) for out in encoding.outs(step.out))
        except WeightsmithError as error:
            problems.append(error)
            continue
        made.append(replace(step, encoding=encoding.name, stored=stored, weighted=weighted))
    if problems:
        raise PlanError(problems)
    rows = named["token_embd.weight"].out.shape[0]
    keys |= tokenizer_keys(_tokenizer(prepared), config, family, rows)
    constants, numbers = _constants(extra, len(plan.settings))
    return replace(
        plan,
        steps=(*made, *constants),
        settings=(*plan.settings, *numbers),
        tables=tuple(tables),
        dropped=(*plan.dropped, *dropped),
        carried=tuple(name for name in plan.carried if not is_read(name) and not name.endswith(".py")),
        files={},
        container=GGUF,
        header=encode_metadata(keys),
        warnings=(*plan.warnings, *_unused(importances, named)),
    )


def _without_doubles(plan: Plan, config: Config) -> tuple[list[Dropped], list[Step]]:
    """The steps without what llama.cpp computes: a tied head that is stored twice, and frequencies of RoPE."""
    dropped, kept = [], []
    for step in plan.steps:
        why = ""
        if step.out.name == "lm_head.weight" and config.get("tie_word_embeddings"):
            why = "the head is the embedding"
        elif step.out.name.endswith(".rotary_emb.inv_freq"):
            why = "llama.cpp computes it"
        if why:
            dropped += [Dropped(read.model, read.tensor, why) for read in step.reads if read.model >= 0]
        else:
            kept.append(step)
    return list(dict.fromkeys(dropped)), kept


def _named(steps: Sequence[Step], family: Family) -> dict[str, Step]:
    """The steps under llama.cpp's names; the experts of a layer as one step. Raises PlanError with every tensor it has not."""
    single: dict[str, Step] = {}
    together: dict[str, dict[int, Step]] = {}
    unknown: list[WeightsmithError] = []
    for step in steps:
        place = gguf_place(family, step.out.name)
        if place is None:
            what = f"llama.cpp knows no such tensor in a model of the type {family.model_type}"
            unknown.append(Unsupported(what, where=step.out.name, fix="choose another format, such as fp8-dynamic"))
        elif place.expert < 0:
            single[place.name] = step
        else:
            single.setdefault(place.name, step)
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
        single[name] = Step(spec, JOIN, (), pieces=pieces, role=ordered[0].role, layer=ordered[0].layer)
    if "token_embd.weight" not in single:
        raise Unsupported("the model has no embedding", where="model.embed_tokens.weight", fix="choose another format")
    return single


def _weighted(plan: Plan, family: Family, names: Iterable[str]) -> list[TensorSpec]:
    """Those of the tensors that llama.cpp has importances for: weights of linear layers, but not of routers."""
    own = set(names)
    specs = [step.out for step in plan.steps if step.out.name in own and len(step.out.shape) == 2]
    placed = [(spec, gguf_place(family, spec.name)) for spec in specs]
    return [spec for spec, place in placed if place is not None and ".ffn_gate_inp." not in place.name]


def _importances_of(family: Family, found: Importances) -> Importances:
    """Importances under llama.cpp's names, those of a layer's experts in one. found: under the Hub's names."""
    parts: dict[str, dict[int, npt.NDArray[np.float32]]] = {}
    for name, values in found.items():
        if place := gguf_place(family, name):
            parts.setdefault(place.name, {})[place.expert] = values
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


def _tokenizer(prepared: Prepared) -> dict[str, bytes]:
    """The tokenizer's files of the output."""
    donor = prepared.inputs[prepared.plan.donor]
    names = [name for name in READ if name in prepared.plan.carried]
    donor.fetch(names)
    written = {name: data for name, data in prepared.plan.files.items() if name in READ}
    return {name: read_bounded(donor.folder / name, MAX_CARRIED_BYTES) for name in names} | written


def _format_name(mixture: Mixture) -> str:
    return f"gguf-{mixture.name.lower()}"


def _format(mixture: Mixture) -> Format:
    bits = TYPES[mixture.default].itemsize * 8 / TYPES[mixture.default].block
    about = f"{bits:g} bits a weight" if mixture.default == mixture.name else f"{bits:g}+ bits a weight"
    run: Callable[[Prepared, QuantizeSettings], Plan] = partial(apply, mixture)
    readers = "llama.cpp, Ollama, LM Studio"
    if mixture.default in ("F32", "F16", "BF16", "Q8_0"):
        return Format(_format_name(mixture), f"one GGUF file, {about}", readers, run)
    settings = CALIBRATION_SETTINGS | {"imatrix"}
    return Format(_format_name(mixture), f"one GGUF file, {about}", readers, run, settings, partial(follow, mixture))


FORMATS = tuple(map(_format, MIXTURES))
