"""A whole model as ExLlamaV2 0.3.2 expects it: its blocks, architectures, names, config.json, and what is not quantised.

Linear layers of blocks and the head are quantised, a tied head too: the file then has both the embedding and a quantised head.
Embeddings, norms, biases and routers are float16, and so is the head on request: the loader takes the embedding for a tied one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weightsmith._base.errors import Finding, FormatError, PlanError, Unsupported, WeightsmithError, as_plan_error
from weightsmith._base.files import show
from weightsmith._base.strict_json import read_object
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.formats.exl2.layout import (
    ARCHITECTURES,
    GEMMA3,
    GEMMA3_PREFIX,
    OTHER_FORMATS,
    ROWS,
    VERSION,
    Params,
    bits_of,
    differences,
    groups_of,
    loader_config,
    params,
    params_from_json,
    quantization_config,
    why_illegal,
)
from weightsmith._models.formats.exl2.writing import Exl2
from weightsmith._models.formats.unfused import (
    PLAIN_HEAD,
    check_architecture,
    encoded,
    renamed,
    tokenizer_notes,
    unfused_steps,
)
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.configs import finite_number
from weightsmith._models.structure.projections import MIXTRAL, projection_role
from weightsmith._models.structure.vocabulary import is_model_head
from weightsmith._plans import Plan, PlanDraft, Step

# ---- The blocks that get a setting each: attention and MLP of each layer, and their linear layers by role. The tables of
# candidate settings are those of ExLlamaV2 0.3.2, so that measurements can be exchanged with it. `layout.params` reads the
# texts. measurement.json is ExLlamaV2's exchange format; it is reused between bit rates.


BlockParams = Mapping[str, Params]
"""A setting for each linear layer of a block, by the module's role: q, k, v, o, or gate, up, down."""

_LOW, _LOW_V = "3@.1+2@.9/g64", "4@.1+3@.9/g128"

_ATTENTION = (  # q and k; v; o
    ("3@.05+2@.95/g64", "3@.05+2@.95/g64", "3@.05+2@.95/g64"),
    (_LOW, "3@.25+2@.75/g64", _LOW),
    (_LOW, _LOW_V, _LOW),
    (_LOW, _LOW_V, "4@.1+3@.9/g128"),
    ("4@.1+3@.9/g128", "4@.1+3@.9/g128", "4@.1+3@.9/g128"),
    ("4@.1+3@.9/g128", "4@.1+3@.9/g64", "4@.1+3@.9/g128"),
    ("4/g128", "4/g128", "4/g128"),
    ("4/g128", "4/g64", "4/g128"),
    ("4/g64", "4/g32", "4/g64"),
    ("4/g32", "4/g32", "4/g32"),
    ("5@.1+4@.9/g128", "5@.1+4@.9/g64", "5@.1+4@.9/g128"),
    ("5@.1+4@.9/g64", "5@.1+4@.9/g32", "5@.1+4@.9/g64"),
    ("5@.1+4@.9/g64", "5/g64", "5@.1+4@.9/g64"),
    ("5@.1+4@.9/g32", "5/g32", "5@.1+4@.9/g32"),
    ("6@.1+5@.9/g128", "6/g128", "6@.1+5@.9/g128"),
    ("6@.1+5@.9/g32", "6/g32", "6@.1+5@.9/g32"),
    ("6/g128", "6/g128", "6/g128"),
    ("6/g32", "8/g32", "6/g32"),
    ("8/g128", "8/g128", "8/g128"),
)

_DOWN = "6@.05/g32+3@.2/g64+2@.75/g64"

_MLP = (  # gate, up, down
    ("3@.05+2@.95/g64", "3@.05+2@.95/g64", _DOWN),
    ("3@.1+2@.9/g64", "3@.25+2@.75/g64", _DOWN),
    ("3@.1+2@.9/g64", "3@.3+2@.7/g64", "5@.05+3@.95/g32"),
    ("3@.1+2@.9/g64", "3@.3+2@.7/g64", "5@.05+4@.95/g32"),
    ("4@.1+3@.9/g128", "4@.25+3@.75/g128", "8@.05/g32+4@.1/g128+3@.85/g128"),
    ("4@.1+3@.9/g32", "4@.25+3@.75/g32", "8@.05+4@.1+3@.85/g32"),
    ("4@.1+3@.9/g32", "4@.25+3@.75/g32", "8@.05/g32+4@.95/g128"),
    ("4/g128", "4/g32", "8@.05/g32+4@.95/g128"),
    ("4/g32", "4/g32", "8@.05+4@.95/g32"),
    ("5@.1+4@.9/g128", "5@.25+4@.75/g128", "8@.05/g32+5@.1/g128+4@.85/g128"),
    ("5@.1+4@.9/g32", "5@.25+4@.75/g32", "8@.05+5@.1+4@.85/g32"),
    ("6@.1+5@.9/g128", "6@.25+5@.75/g128", "8@.05/g32+6@.1/g128+5@.85/g128"),
    ("6@.1+5@.9/g32", "6@.25+5@.75/g32", "8@.05+6@.1+5@.85/g32"),
    ("6/g128", "6/g128", "8@.05/g32+6@.95/g128"),
    ("8@.1+6@.9/g128", "8@.1+6@.9/g128", "8@.15+6@.85/g128"),
    ("8@.1+6@.9/g128", "8@.1+6@.9/g128", "8/g128"),
    ("8/g128", "8/g128", "8/g128"),
)

_HEAD = {
    2: "4@.3+2@.7/g32",
    3: "4@.15+3@.85/g32",
    4: "6@.15+4@.85/g32",
    5: "6@.15+5@.85/g128",
    6: "8@.15+6@.85/g128",
    8: "8/g128",
}


def _options(roles: tuple[str, ...], table: tuple[tuple[str, ...], ...]) -> tuple[BlockParams, ...]:
    return tuple({role: params(text) for role, text in zip(roles, row, strict=True)} for row in table)


ATTENTION = _options(("q", "k", "v", "o"), tuple((q, q, v, o) for q, v, o in _ATTENTION))
"""The 19 candidates of an attention block, from the fewest bits to the most."""

MLP = _options(("gate", "up", "down"), _MLP)
"""The 17 candidates of an MLP. All experts of a block have the same."""

HEAD = {bits: params(text) for bits, text in _HEAD.items()}
"""The setting of a quantised head for each value of `head_bits`."""

_IN_ATTENTION = re.compile(r"self_attn\.([qkvo]_proj)\.weight")
_IN_MLP = re.compile(r"mlp\.(?:experts\.\d+\.)?((?:gate|up|down)_proj)\.weight")
_IN_EXPERT = re.compile(r"block_sparse_moe\.experts\.\d+\.(w[123])\.weight")

_NAMES = {
    "self_attn": {role: f"{role}_proj" for role in "qkvo"},
    "mlp": {role: f"{role}_proj" for role in ("gate", "up", "down")},
    "block_sparse_moe": {role: MIXTRAL[f"{role}_proj"] for role in ("gate", "up", "down")},
}
"""Roles by the names of measurement.json."""


@dataclass(frozen=True, slots=True)
class Sublayer:
    """Attention or MLP of a layer.

    key      in measurement.json: `model.layers.0.self_attn`; `….block_sparse_moe` of a mixture of experts
    options  its candidates
    linears  role → its weights, [N, K] each: one, or one for each expert
    biased   names of weights whose layer has a bias
    """

    key: str
    options: tuple[BlockParams, ...]
    linears: Mapping[str, tuple[TensorSpec, ...]]
    biased: frozenset[str] = frozenset()

    @property
    def names(self) -> Mapping[str, str]:
        """Role → name in measurement.json."""
        return _NAMES[self.key.rpartition(".")[2]]

    @property
    def encodings(self) -> tuple[Mapping[str, str], ...]:
        """The encoding of each weight, for each option."""
        return tuple(
            {spec.name: Exl2(option[role]).name for role, specs in self.linears.items() for spec in specs}
            for option in self.options
        )

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(spec.size for specs in self.linears.values() for spec in specs)

    def bits(self, chosen: BlockParams) -> int:
        """Bits on disk with a setting for each role."""
        return sum(
            bits_of(groups_of(chosen[role], spec.shape[1]), spec.shape[1], spec.shape[0], bias=spec.name in self.biased)
            for role, specs in self.linears.items()
            for spec in specs
        )


def find_blocks(specs: Sequence[TensorSpec], structure: Structure) -> tuple[Sublayer, ...]:
    """The blocks of a model, in model order. specs: of all tensors, named as ExLlamaV2 names them.

    Raises Unsupported for a layer whose blocks are not complete, a matrix of unknown role, and shapes that EXL2 cannot store.
    """
    by_block: dict[str, dict[str, list[TensorSpec]]] = {}
    mixtures: set[str] = set()
    names = {spec.name for spec in specs}
    for spec in specs:
        place, suffix = structure.locate(spec.name), structure.suffix(spec.name)
        if place is None or suffix is None or not suffix.endswith(".weight") or len(spec.shape) != 2:
            continue
        layer = spec.name.removesuffix(f".{suffix}")
        for pattern, module in ((_IN_ATTENTION, "self_attn"), (_IN_MLP, "mlp"), (_IN_EXPERT, "mlp")):
            if match := pattern.fullmatch(suffix):
                role = str(projection_role(match[1]))
                by_block.setdefault(f"{layer}.{module}", {}).setdefault(role, []).append(spec)
                if ".experts." in suffix:
                    mixtures.add(f"{layer}.{module}")
                break
        else:
            if not re.fullmatch(r"(mlp|block_sparse_moe)\.gate\.weight", suffix):
                what = f"ExLlamaV2 knows no matrix of this name {list(spec.shape)}"
                raise Unsupported(what, where=spec.name, fix=OTHER_FORMATS)
    blocks = []
    for key, linears in by_block.items():
        options = ATTENTION if key.endswith("self_attn") else MLP
        for role in options[0]:
            if role not in linears:
                raise Unsupported(f"{key} has no {role} projection, which ExLlamaV2 expects", where=key, fix=OTHER_FORMATS)
        biased = frozenset(
            spec.name
            for specs_of_role in linears.values()
            for spec in specs_of_role
            if f"{spec.name.removesuffix('.weight')}.bias" in names
        )
        of_experts = f"{key.rpartition('.')[0]}.block_sparse_moe" if key in mixtures else key
        blocks.append(Sublayer(of_experts, options, {role: tuple(linears[role]) for role in options[0]}, biased))
    return tuple(blocks)


def shape_problems(specs: Iterable[TensorSpec]) -> list[WeightsmithError]:
    """Why weights inside the layers cannot be stored as EXL2: their widths."""
    problems: list[WeightsmithError] = []
    for spec in specs:
        n, k = spec.shape
        why = f"it has {n:,} output features, which must be a multiple of {ROWS}" if n % ROWS else ""
        if why := why or why_illegal(groups_of(MLP[-1]["gate"], k), k):
            problems.append(
                Unsupported(f"{list(spec.shape)} cannot be stored as EXL2: {why}", where=spec.name, fix=OTHER_FORMATS)
            )
    return problems


# ---- measurement.json

MAX_BYTES = 256 << 20
MAX_OPTIONS = 64
LEAST_ERROR = 1e-6
_MEASURE = "measure the model again"


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of a block. params: by role. error: 1 - accuracy."""

    params: BlockParams
    error: float


def read_measurement(path: Path, blocks: Sequence[Sublayer]) -> list[tuple[Sublayer, list[Measured]]]:
    """The settings that were measured for each block of a model. Raises FormatError for a file of another model, or damaged."""
    where = str(path)
    data = read_object(path, MAX_BYTES, "measurement.json", _MEASURE).get("measurement")
    if not isinstance(data, Mapping):
        raise FormatError("it has no object 'measurement'", where=where, fix=_MEASURE)
    return [(block, _measured_options(data.get(block.key), block, where)) for block in blocks]


def _measured_options(value: object, block: Sublayer, where: str) -> list[Measured]:
    where = f"{where}: {block.key}"
    if not isinstance(value, list) or not 0 < len(value) <= MAX_OPTIONS:
        what = f"it has {show(value) if not isinstance(value, list) else len(value)} for this block, not a list of settings"
        raise FormatError(what, where=where, fix=_MEASURE)
    options = []
    for option in value:
        if not isinstance(option, Mapping):
            raise FormatError(f"a setting is {show(option)}, not an object", where=where, fix=_MEASURE)
        params = {role: params_from_json(option.get(name), f"{where}.{name}") for role, name in block.names.items()}
        accuracy, bits = finite_number(option.get("accuracy")), option.get("total_bits")
        if accuracy is None or accuracy > 1:
            raise FormatError(f"accuracy is {show(option.get('accuracy'))}, not a number up to 1", where=where, fix=_MEASURE)
        if bits != block.bits(params):
            what = f"total_bits is {show(bits)}, and the setting takes {block.bits(params):,} bits in this model"
            raise FormatError(what, where=where, fix="name a measurement of this very model")
        options.append(Measured(params, max(LEAST_ERROR, 1 - accuracy)))
    return options


def measurement_json(measured: Sequence[tuple[Sublayer, Sequence[Measured]]]) -> dict[str, Any]:
    """measurement.json as ExLlamaV2 writes it. measured: in model order, attention and MLP of each layer."""
    entries: dict[str, Any] = {
        block.key: [
            {
                "accuracy": 1 - option.error,
                "total_bits": block.bits(option.params),
                **{name: option.params[role].to_json() for role, name in block.names.items()},
            }
            for option in options
        ]
        for block, options in measured
    }
    # Modules are counted as ExLlamaV2 counts them: embedding, blocks, norm, head.
    return {"measurement": entries | {"model.norm.norm": None, "lm_head.linear": None}, "last_module_idx": len(measured) + 2}


# ---- The model


_WEIGHT = ".weight"


@dataclass(frozen=True)
class Model:
    """The steps of a model with ExLlamaV2's names, before its blocks get settings.

    steps   one for each tensor, with its dtype and plain
    blocks  in model order
    head    the head's weight: always a step of its own
    tied    whether it is the embedding, and stored nowhere else
    prefix  of all names in the output, which the steps do not have yet
    """

    steps: tuple[Step, ...]
    blocks: tuple[Sublayer, ...]
    head: str
    tied: bool
    prefix: str

    @cached_property
    def unsorted(self) -> frozenset[str]:
        """Weights whose input features must stay in their own order.

        The loader moves the order of `down_proj` to the outputs of gate and up, but not to their biases.
        """
        return frozenset(
            spec.name for block in self.blocks if block.biased and "down" in block.linears for spec in block.linears["down"]
        )

    @property
    def weights(self) -> int:
        """The number of weights in all blocks, which the average bits per weight refers to."""
        return sum(block.weights for block in self.blocks)


def prepare_model(plan: Plan | PlanDraft) -> Model:
    """Check architecture, names and shapes, split fused matrices, and give a tied head a step.

    Raises PlanError with what ExLlamaV2 could not load.
    """
    architecture = check_architecture(plan.config, ARCHITECTURES, "EXL2", OTHER_FORMATS)
    steps, tied = unfused_steps(plan)
    split_specs = [step.out for step in steps]
    with as_plan_error():
        blocks = find_blocks(split_specs, analyse(split_specs, plan.config))
    head = next((spec for spec in split_specs if is_model_head(spec)), None)
    problems = shape_problems(spec for block in blocks for specs in block.linears.values() for spec in specs)
    if head is None or not blocks:
        problems.append(
            Unsupported("it has no head or no layers, which ExLlamaV2 expects", where=architecture, fix=OTHER_FORMATS)
        )
    if head is not None and head.shape[1] % 32:
        problems += shape_problems([head])
    if head is not None and head.shape[0] % 32 and f"{head.name.removesuffix(_WEIGHT)}.bias" in {s.name for s in split_specs}:
        what = f"{head.shape[0]:,} outputs with a bias cannot be padded to a multiple of 32"
        problems.append(Unsupported(what, where=head.name, fix=OTHER_FORMATS))
    if problems or head is None:
        raise PlanError(problems)
    return Model(tuple(steps), blocks, head.name, tied, GEMMA3_PREFIX if architecture == GEMMA3 else "")


# ---- the draft


def store(
    draft: PlanDraft, model: Model, params: Mapping[str, Params], head_bits: int, bits: float, calibration: Mapping[str, Any]
) -> None:
    """Make the draft that of the EXL2 model.

    params       setting of each weight of the blocks
    head_bits    one of `blocks.HEAD`, or `unfused.PLAIN_HEAD`
    bits         for each weight, for config.json
    calibration  for config.json
    """
    encodings = {name: Exl2(setting, sort=name not in model.unsorted).name for name, setting in params.items()}
    if head_bits != PLAIN_HEAD:
        encodings[model.head] = Exl2(HEAD[head_bits]).name
    steps = []
    for step in model.steps:
        spec = step.out
        if spec.name == model.head and model.tied and head_bits == PLAIN_HEAD:
            continue
        named = renamed(step, model.prefix + spec.name) if model.prefix else step
        steps.append(encoded(named, encodings.get(spec.name)))
    config = {**(draft.config or {}), **({"tie_word_embeddings": True} if model.tied else {})}
    draft.config = {**loader_config(config, gemma3=bool(model.prefix)), **quantization_config(bits, head_bits, calibration)}
    draft.steps = steps
    draft.warnings += [note for note in notes(draft) if note not in draft.warnings]


def notes(draft: PlanDraft) -> list[Finding]:
    """Warnings about ExLlamaV2: whether it loads the model, and where its results differ from transformers'."""
    what = f"EXL2 is loaded by ExLlamaV2 {VERSION}, which is archived, and by TabbyAPI up to June 2026; TabbyAPI now takes EXL3"
    fix = "choose a gguf format for llama.cpp, Ollama and CPUs, or w4a16 or fp8-dynamic for vLLM and SGLang"
    findings = [Finding(what, "quantize", fix=fix), *tokenizer_notes(draft, "ExLlamaV2 does not load it")]
    config = loader_config(draft.config or {}, gemma3=False)
    return [*findings, *(Finding(what, where, fix=fix) for what, where, fix in differences(config))]
