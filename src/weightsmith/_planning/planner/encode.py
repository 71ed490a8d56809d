"""Which tensors of an output are stored in an encoding, and what config.json lists as ignored.

Encoded are the weights that a loader builds as nn.Linear in the main decoder: matrices with the role `linear` in its layers.
Everything else is stored as it is: embeddings and heads (unless the encoding takes them, or one is asked for the head), norms,
routers, towers and projectors, prediction layers after the last, experts that are one tensor, GPT-2's transposed matrices
(Conv1D).

In a single file of a diffusion model, the matrices in the blocks of all stacks are encoded. A checkpoint's VAE and text
encoders are stored as they are, and of UNets all but the transformer blocks.

**The list of ignored modules.** compressed-tensors quantises every nn.Linear that the list does not name, so each that is
stored as it is must be in it. transformers and vLLM rename modules (`visual.…` becomes `model.visual.…`) and read `re:`
entries from the beginning of a module's name (`re.match`), so entries are patterns that a new prefix does not change, one for
all layers: `re:.*\\.mlp\\.gate$`. A pattern that would match an encoded module is replaced by the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weightsmith._base.errors import Finding, PlanError, Unsupported
from weightsmith._base.idioms import grouped
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.products.magnitudes import magnitudes
from weightsmith._models.formats import Encoding, find_encoding, format_of_encoding
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.parts import DIFFUSION, PREFIXES
from weightsmith._models.structure.projections import (
    ENGINES_FUSED,
    GATES_OF_LINEAR_ATTENTION,
    in_both_orders,
    joined_sets,
    role_of,
)
from weightsmith._models.structure.vocabulary import HEADS, is_embedding, is_head, is_model_embedding, is_model_head
from weightsmith._planning.planner.files import NO_CONFIG
from weightsmith._plans import PLAIN, Plan, PlanDraft, Product, Step, arrays_of, needs_of
from weightsmith.abc.stored import Modules, maximum_name

FUSED_EXPERTS = "its experts are one tensor"
"""Why a tensor is stored as it is: the planner warns of these, which may be most of a model."""

COPIED = "copied: an input has it stored so"
"""Why a weight is not encoded, although it is stored in an encoding."""

ASKED = "its type is asked for"
"""The reason of a weight that could be stored in the encoding."""

_WEIGHT = ".weight"
_SIZES = ("its width", "its outputs")
"""What the reason begins with when an encoding does not take a weight for its size."""
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_MAMBA_PROJECTIONS = frozenset({"x_proj", "dt_proj"})
"""Projections of Mamba 1 whose weights transformers uses directly, without calling the layers."""
_INDEXER_PROJECTIONS = frozenset({"wk", "weights_proj"})
"""Projections of DeepSeek V3.2 and GLM-5 that vLLM joins into a layer without quantisation."""
_UNET = re.compile(r"(^|\.)(input_blocks|middle_block|output_blocks)\.")
_CONV1D = frozenset({"c_attn", "c_fc"})
"""Modules with more outputs than inputs: a matrix with more columns than rows is stored transposed."""


def quantise(draft: PlanDraft, name: str, others: Mapping[str, str] | None = None) -> None:
    """Store the weights of the linear layers as `name`, and say so in config.json.

    name    of an encoding
    others  weights that are stored as another encoding of the same format: its name, by tensor; `PLAIN` for none

    Raises PlanError: no config.json, no linear weight, a dtype that the encoding cannot take.
    """
    config, by_tensor = draft.config, _Encodings(name, others or {})
    of_blocks = find_encoding(name).of_blocks
    if of_blocks and config is not None:
        what = f"{name} is for single files of diffusion models and text encoders, and this model is a folder with config.json"
        raise PlanError([Unsupported(what, where="quantize", fix="name a weight file with the names that ComfyUI reads")])
    if config is None and not of_blocks:
        what = f"{NO_CONFIG}, in which readers of {name} find what is quantised"
        fix = "put a config.json into the folder of the model that it is taken from"
        raise PlanError([Unsupported(what, where="quantize", fix=fix)])
    specs = [step.out for step in draft.steps]
    structure = analyse(specs, config)
    reasons = _reasons(specs, structure, by_tensor)
    encoded = [spec for spec in specs if spec.name not in reasons]
    if not encoded:
        raise PlanError([_nothing(name, structure, reasons)])
    refused = [(spec, why) for spec in encoded if (why := by_tensor.of(spec).refusal(spec))]
    if refused:
        spec, why = refused[0]
        many = f" (and {len(refused) - 1:,} more)" if len(refused) > 1 else ""
        what = f"the weight cannot be stored as {by_tensor.of(spec).name}: {why}{many}"
        raise PlanError([Unsupported(what, where=spec.name, fix="write weights as bfloat16: --out-dtype bfloat16 (out_dtype)")])
    plain = [spec for spec in specs if spec.name in reasons and not draft.naming.folder_of(spec.name)]
    measured = [step for step in draft.steps if step.out.name not in reasons and by_tensor.of(step.out).maxima]
    products = _products(draft, measured, structure, joins=not of_blocks)
    maker = arrays_of(products)
    draft.steps = [
        _stored(step, by_tensor.of(step.out), maker) if step.out.name not in reasons else step for step in draft.steps
    ]
    draft.products += products
    if config is None:  # its programs look for none
        draft.warnings = [finding for finding in draft.warnings if not finding.what.startswith(NO_CONFIG)]
    else:
        by_encoding = grouped((by_tensor.of(spec).name, spec) for spec in encoded)
        draft.config = {**config, **_described(by_encoding, plain, structure)}
    draft.warnings += [*_fused_findings(plain, reasons, name), *_width_findings(plain, reasons)]


def encodable(draft: PlanDraft, name: str) -> list[str]:
    """The tensors of a draft that an encoding would store."""
    specs = [step.out for step in draft.steps]
    reasons = _reasons(specs, analyse(specs, draft.config), _Encodings(name))
    return [spec.name for spec in specs if spec.name not in reasons]


def stored_plain(plan: Plan) -> dict[str, str]:
    """Each tensor of a quantised plan that is stored as it is, and why; {} if all are encoded, or none is."""
    if all(step.family != PLAIN for step in plan.steps):
        return {}
    specs = [step.out for step in plan.steps]
    name = next((step.encoding for step in plan.steps if step.family != PLAIN), None)
    if name is None:
        return {}
    reasons = _reasons(specs, analyse(specs, plan.config), _Encodings(name))
    return {step.out.name: reasons.get(step.out.name, ASKED) for step in plan.steps if step.family == PLAIN}


@dataclass(frozen=True, slots=True)
class _Encodings:
    """The encoding of each tensor that can be encoded.

    name    of most
    others  of the rest, by tensor; see `quantise`
    """

    name: str
    others: Mapping[str, str] = field(default_factory=dict)
    _by_name: dict[str, Encoding] = field(default_factory=dict, init=False)

    def is_plain(self, spec: TensorSpec) -> bool:
        return self.others.get(spec.name) == PLAIN

    def is_asked_for(self, spec: TensorSpec) -> bool:
        """Whether it is the head or the embedding of the model, and the user names its encoding."""
        return self.others.get(spec.name, PLAIN) != PLAIN and (is_model_head(spec) or is_model_embedding(spec))

    def of(self, spec: TensorSpec) -> Encoding:
        name = self.others.get(spec.name, self.name)
        name = self.name if name == PLAIN else name
        if name not in self._by_name:  # a mixture has tens of thousands of weights
            self._by_name[name] = find_encoding(name)
        return self._by_name[name]


def _stored(step: Step, encoding: Encoding, maker: Mapping[str, str]) -> Step:
    needs = (*step.needs, maker[maximum_name(step.out.name)]) if encoding.maxima else step.needs
    return replace(step, encoding=encoding.name, stored=encoding.outs(step.out), needs=needs)


def _products(draft: PlanDraft, steps: Sequence[Step], structure: Structure, *, joins: bool) -> list[Product]:
    """Largest magnitudes: one product for each layer, whose weights are still in the page cache when they are encoded.

    joins  weights that engines join share a scale
    """
    layers: dict[str, dict[str, Step]] = {}
    maker = arrays_of(draft.products)
    for step in steps:
        place = structure.locate(step.out.name)
        layer = "the vocabulary" if joins else "other blocks"
        if place is not None:
            layer = f"layer {place[1]}" if joins else f"{place[0].prefix}{place[1]}"
        layers.setdefault(layer, {})[step.out.name] = step
    return [
        magnitudes(
            layer,
            list(maxima.values()),
            joined_sets(maxima) if joins else [[name] for name in maxima],
            {name: maximum_name(name) for name in maxima},
            sorted({needed for step in maxima.values() for needed in needs_of(step, maker)}),
        )
        for layer, maxima in layers.items()
    ]


def _reasons(specs: Sequence[TensorSpec], structure: Structure, by_tensor: _Encodings) -> dict[str, str]:
    """Why tensors are stored as they are, by name; those that are not in it are encoded."""
    transposed = any(
        _module(spec).rpartition(".")[2] in _CONV1D and len(spec.shape) == 2 and spec.shape[1] > spec.shape[0] for spec in specs
    )
    reasons = ((spec, _reason(spec, structure, by_tensor, transposed=transposed)) for spec in specs)
    return {spec.name: why or ASKED for spec, why in reasons if why or by_tensor.is_plain(spec)}


def _reason(spec: TensorSpec, structure: Structure, by_tensor: _Encodings, *, transposed: bool) -> str:
    place, main, encoding = structure.locate(spec.name), structure.main, by_tensor.of(spec)
    if encoding.of_blocks:
        return _outside_blocks(spec, structure) or encoding.refusal(replace(spec, dtype=DTYPES["BF16"]))
    if place is None and (is_head(spec) or is_embedding(spec)):
        if encoding.vocabulary or by_tensor.is_asked_for(spec):
            return encoding.refusal(replace(spec, dtype=DTYPES["BF16"]))
        return "the head" if is_head(spec) else "an embedding"
    if place is None or main is None or place[0] != main or main.kind != "decoder":
        return "it is outside the decoder's layers"
    if structure.experts(spec) > 1:
        return FUSED_EXPERTS
    if len(spec.shape) != 2 or not spec.dtype.floating:
        return "it is not a matrix of numbers"
    if role_of(spec) != "linear":
        is_router = not _ROUTERS.isdisjoint(spec.name.split("."))
        return "a router or gate" if is_router else "it is not the weight of a linear layer"
    if why := _engines_reason(_module(spec).split(".")):
        return why
    if transposed and _module(spec).rpartition(".")[2].startswith("c_"):
        return "it is stored transposed (Conv1D)"
    return encoding.refusal(replace(spec, dtype=DTYPES["BF16"]))  # of a name or shape; a dtype is the caller's to change


def _engines_reason(parts: Sequence[str]) -> str:
    """Why engines cannot read the weight of this linear layer quantised; "" if they can. parts: of the module's name."""
    if parts[-1] in GATES_OF_LINEAR_ATTENTION:
        return "it is a gate of linear attention, which engines join into a matrix of few rows"
    if parts[-1] in _MAMBA_PROJECTIONS:
        return "it is a projection to the time steps of Mamba, which programs multiply by as it is"
    if "indexer" in parts[:-1] and parts[-1] in _INDEXER_PROJECTIONS:
        return "it is a part of an indexer that engines keep as it is"
    return ""


def _outside_blocks(spec: TensorSpec, structure: Structure) -> str:
    """Why a tensor of a single file is no matrix of a block; "" for one that is."""
    if structure.parts is not None and structure.module_of(spec.name) != PREFIXES[DIFFUSION]:
        return "it is outside the diffusion model"
    if _UNET.search(spec.name):
        if ".transformer_blocks." not in spec.name:
            return "it is outside the transformer blocks"
    elif structure.locate(spec.name) is None:
        return "it is outside the blocks"
    return "" if role_of(spec) == "linear" and spec.dtype.floating else "it is not the weight of a linear layer"


def _module(spec: TensorSpec) -> str:
    return spec.name.removesuffix(_WEIGHT)


def _nothing(name: str, structure: Structure, reasons: Mapping[str, str]) -> Unsupported:
    """The error when there is nothing to encode."""
    what = f"nothing can be stored as {name}: no decoder of this model has the weight of a linear layer"
    widths = [why for why in reasons.values() if why.startswith(_SIZES)]
    if widths:
        what = f"nothing can be stored as {name}: no linear weight of this model fits ({widths[0]})"
    elif structure.main is None and len(structure.stacks) > 1:
        stacks = ", ".join(stack.prefix for stack in structure.stacks)
        what = f"only a decoder can be stored as {name}, and this model has several stacks: {stacks}"
    tally: dict[str, list[str]] = {}
    for tensor, why in reasons.items():
        tally.setdefault(why, []).append(tensor)
    details = [f"{len(names):,} as they are: {why} ({names[0]})" for why, names in tally.items()]
    fix = "choose another format; weightsmith quantize --list shows all"
    return Unsupported(what, where="quantize", details=details, fix=fix)


def _fused_findings(plain: Sequence[TensorSpec], reasons: Mapping[str, str], name: str) -> Iterator[Finding]:
    fused = [spec for spec in plain if reasons[spec.name] == FUSED_EXPERTS]
    if fused:
        what = f"fused experts are stored as they are, not as {name}, which takes matrices: {len(fused):,} tensors"
        yield Finding(what, fused[0].name, fix="choose a layout with one matrix for each expert, such as Mixtral's")


def _width_findings(plain: Sequence[TensorSpec], reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Weights that would be encoded if their size were another one."""
    refused = [spec.name for spec in plain if reasons[spec.name].startswith(_SIZES)]
    if refused:
        yield Finding(f"weights stored as they are: {len(refused):,}; {reasons[refused[0]]}", refused[0])


# ---- the ignored modules


def _described(
    by_encoding: Mapping[str, Sequence[TensorSpec]], plain: Sequence[TensorSpec], structure: Structure
) -> dict[str, Any]:
    """`Encoding.config`, or `StoredFormat.mixed` of several. by_encoding: the encoded weights. Raises PlanError."""
    encoded = [spec for specs in by_encoding.values() for spec in specs]
    modules = [_module(spec) for spec in plain if _may_be_linear(spec, structure) and not is_embedding(spec)]
    modules += dict.fromkeys(_experts_module(_module(spec)) for spec in plain if structure.experts(spec) > 1)
    ignored = ignored_modules(plain, encoded, structure)
    listed = Modules(ignored, tuple(dict.fromkeys([*_tied_heads(encoded), *modules])), tuple(map(_module, encoded)))
    encodings = [find_encoding(name) for name in by_encoding]
    try:
        configs = [encoding.config(listed) for encoding in encodings]
        mixed = format_of_encoding(encodings[0].name).mixed
        # vLLM finds a head by its name, not by its class; an embedding is no linear layer
        by_name = mixed is not None and any(is_model_head(spec) or is_model_embedding(spec) for spec in encoded)
        if len(configs) == 1 and not by_name:
            return configs[0]
        assert mixed is not None, "only encodings of a format that mixes them are asked for together"
        return mixed(configs, targets_of(list(by_encoding.values()), structure))
    except Unsupported as error:
        raise PlanError([error]) from error


def _experts_module(module: str) -> str:
    """The module in which engines hold all experts of a layer that is stored as `module`.

    >>> _experts_module("model.layers.0.block_sparse_moe.input_linear"), _experts_module("layers.0.mlp.experts.gate_up_proj")
    ('model.layers.0.block_sparse_moe.experts', 'layers.0.mlp.experts')
    """
    home = module.rpartition(".")[0]
    return home if home.endswith(".experts") else f"{home}.experts"


def _may_be_linear(spec: TensorSpec, structure: Structure) -> bool:
    """Whether a loader may build a linear layer, or several, for a plain tensor."""
    return structure.experts(spec) > 1 or (len(spec.shape) == 2 and spec.name.endswith(_WEIGHT) and spec.dtype.floating)


def ignored_modules(plain: Sequence[TensorSpec], encoded: Sequence[TensorSpec], structure: Structure) -> list[str]:
    """Entries for every module among `plain` that a loader may build as a linear layer, as names or `re:` patterns.

    `lm_head` is always among them, unless the head is encoded. A tied head is a module though no tensor has its name: where
    none is stored, it may have any of the names of heads.
    """
    suffixes = {_module(spec) if (s := structure.suffix(spec.name)) is None else s: _module(spec) for spec in encoded}
    examples = list(suffixes.values())  # of each kind of module one: a pattern matches all layers, or has a layer's number
    entries: dict[str, None] = dict.fromkeys(_tied_heads(encoded))
    joined = _joined_modules([plain, encoded])
    for spec in plain:
        if not _may_be_linear(spec, structure):
            continue
        pattern = _pattern(spec, structure, joined, fused=structure.experts(spec) > 1)
        if not pattern and is_embedding(spec):
            continue
        safe = pattern and not any(re.match(pattern, module) for module in examples)
        entries |= dict.fromkeys([f"re:{pattern}"] if safe else _names(spec, joined))
    if not any(map(is_model_head, (*plain, *encoded))):
        entries[rf"re:(\w+\.)?({'|'.join(HEADS[1:])})$"] = None  # one component before it: the model's, and no layer's
    return list(entries)


def _tied_heads(encoded: Sequence[TensorSpec]) -> list[str]:
    """The module that a head is in most models, stored or not; [] if the head is encoded."""
    return [] if any(map(is_model_head, encoded)) else ["lm_head"]


def targets_of(groups: Sequence[Sequence[TensorSpec]], structure: Structure) -> list[list[str]]:
    """Entries for the modules of each group of encoded weights, as `ignored_modules` has them. No entry fits two groups.

    Names of classes would not do: vLLM asks for the class of a joined matrix before it asks for the names of its parts.
    """
    group_of = {spec.name: number for number, specs in enumerate(groups) for spec in specs}
    joined = _joined_modules(groups)
    kinds = {spec.name: _kinds(spec, structure, joined) for specs in groups for spec in specs}
    specs_by_name = {spec.name: spec for specs in groups for spec in specs}
    used: dict[str, set[int]] = {}
    for name, number in group_of.items():
        for pattern in kinds[name]:
            used.setdefault(pattern, set()).add(number)
    entries: list[dict[str, None]] = [{} for _ in groups]
    for name, number in group_of.items():
        pattern = next((pattern for pattern in kinds[name] if len(used[pattern]) == 1), "")
        entries[number] |= dict.fromkeys([f"re:{pattern}"] if pattern else _names(specs_by_name[name], joined))
    return [list(group) for group in entries]


def _joined_modules(groups: Sequence[Sequence[TensorSpec]]) -> dict[str, str]:
    """The module that engines build in place of several, by the first of these; {} if any has parts in different groups, which
    engines refuse. SGLang looks for this name alone if the model's code does not say what it joins (Llama and most others).
    """
    group_of = {_module(spec): number for number, specs in enumerate(groups) for spec in specs}
    joined: dict[str, str] = {}
    for whole, parts in ENGINES_FUSED.items():
        for first in [module for module in group_of if module.rpartition(".")[2] == parts[0]]:
            home = first.rpartition(".")[0]
            numbers = [group_of.get(f"{home}.{part}") for part in parts]
            if None not in numbers and len(set(numbers)) > 1:
                return {}
            if None not in numbers and "experts" not in home.split("."):
                joined[first] = f"{home}.{whole}"
    return joined


def _names(spec: TensorSpec, joined: Mapping[str, str]) -> list[str]:
    """The name of a module, and of the joined one that engines build in its place."""
    module = _module(spec)
    return [module, *([joined[module]] if module in joined else [])]


def _alternatives(spec: TensorSpec, inner: str, joined: Mapping[str, str]) -> str:
    """The expression for a module in its layer, and for the joined one that engines build in its place."""
    leaves = [re.escape(name.rpartition(".")[2]) for name in _names(spec, joined)]
    parent, dot, _ = inner.rpartition(".")
    return re.escape(parent + dot) + (leaves[0] if len(leaves) == 1 else f"({'|'.join(leaves)})")


def _kinds(spec: TensorSpec, structure: Structure, joined: Mapping[str, str]) -> tuple[str, ...]:
    """Patterns for a module of the decoder, the widest first: of all layers, of one layer. With experts, all projections come
    first: vLLM asks for `….experts.0.gate_proj`, whatever the model calls it."""
    place, inner = structure.locate(spec.name), (structure.suffix(spec.name) or "").removesuffix(_WEIGHT)
    if place is None and (is_model_head(spec) or is_model_embedding(spec)):
        return (rf"(.*\.)?{re.escape(_module(spec).rpartition('.')[2])}$",)
    if place is None or not inner:
        return ()
    parent, expert, projection = re.fullmatch(r"(?:(.*\bexperts)(\.\d+)?\.)?(.*)", inner).groups()  # type: ignore[union-attr]
    inside = [rf"{_alternatives(spec, inner, joined)}$"]
    if parent is not None and expert is not None:
        inside = [rf"{re.escape(parent)}\..*", rf"{re.escape(parent)}\.\d+\.{re.escape(projection)}$"]
    layer = in_both_orders(f"{place[0].prefix.removeprefix('model.')}{place[1]}")
    return (*(rf".*\.{part}" for part in inside), *(rf"(.*\.)?{layer}\.{part}" for part in inside))


def _pattern(spec: TensorSpec, structure: Structure, joined: Mapping[str, str], *, fused: bool) -> str:
    """What tells a module from the encoded ones whatever prefix a loader gives it; "" where its name must do."""
    name, suffix = _module(spec), structure.suffix(spec.name)
    place, extra = structure.locate(spec.name), structure.extra(spec.name)
    if extra is not None:  # a prediction layer, of which loaders make modules of other names
        layer = extra[0].prefix.removeprefix("model.") + str(extra[0].n_layers + extra[1])
        return rf"(.*\.)?{re.escape(layer)}\..*"
    if place is not None and suffix is not None and place[0] == structure.main:
        inner = suffix.removesuffix(_WEIGHT)
        if fused:  # vLLM asks for `….experts.0.gate_proj`, the module that the experts would be made of
            return rf".*\.{re.escape(inner.rpartition('.')[0] or inner)}\..*"
        return rf".*\.{_alternatives(spec, inner, joined)}$"
    if name != "lm_head" and name.endswith(".lm_head"):
        return r".*\.lm_head$"
    module = structure.module_of(spec.name)
    tower = structure.main is not None and module != structure.main.module and name.startswith(f"{module}.")
    return rf"(.*\.)?{re.escape(module.rpartition('.')[2])}\..*" if tower else ""
