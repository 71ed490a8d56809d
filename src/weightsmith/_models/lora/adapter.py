"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors or .bin, checked before it is believed.

LoRA (Hu et al. 2021, arXiv 2106.09685) adds scaling · B @ A to a matrix, with scaling = alpha / r; rsLoRA (Kalajdzievski 2023,
arXiv 2312.03732) has alpha / √r. DoRA (Liu et al. 2024, arXiv 2402.09353) then gives each row a norm of its own.

Adapters in single files, without a config, are in `opening.py`, those of other kinds in `peft_folder.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._base.text import count
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora.config import Layouts, ModulePatterns, has_one_vocabulary
from weightsmith._models.lora.forms import FactorNames
from weightsmith._models.lora.kinds import KINDS
from weightsmith._models.sources.composed import WRAPPERS
from weightsmith._models.structure.configs import finite_number, whole_number

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")  # the first that exists is read
MAX_CONFIG_BYTES = 16 << 20
MOST_DIMENSIONS = 5  # of the kernel of a convolution over time, height and width

PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.(?:lora_([AB])(?:\.default)?\.weight|lora_embedding_([AB])(?:\.default)?)")
_BIAS = re.compile(r"(.+)\.lora_B(?:\.default)?\.bias")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
SAVED = re.compile(r"(?<=\.)modules_to_save\.(?:default\.)?")
_VELORA = (".lora_velora_embed", ".lora_velora_embed.default")
_TOKENS = re.compile(r"(.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.default)?")
_LAYER = ".base_layer"
_REPAIR = "Repair it, or download the adapter again."


@dataclass(frozen=True, slots=True)
class Factors:
    """The update of one module's weight: scaling · B @ A, of an embedding its transpose.

    a, b       names in the adapter's file of A [rank, inputs] and B [outputs, rank]
    embedding  of an embedding: A is [rank, tokens], B [hidden, rank]
    scaling    alpha / rank, or as rsLoRA has it
    magnitude  name of DoRA's norms of the rows: one number for each output; "" without DoRA
    columns    the norms belong to columns: input channels in earlier versions of LyCORIS, hidden dimensions of an embedding
    """

    a: str
    b: str
    embedding: bool
    scaling: float
    magnitude: str = ""
    columns: bool = False


@dataclass(frozen=True, slots=True)
class Stacked:
    """Factors of all experts of one parameter [experts, rows, cols] (`target_parameters`).

    a, b  names in the adapter's file of A [experts · rank, inputs] and B [outputs, rank · experts]
    """

    a: str
    b: str


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter that factors of experts may belong to, and what the config says of these.

    name     after the module's
    grouped  B is [outputs, experts · rank], expert after expert, as Unsloth has it; else the expert changes fastest
    """

    name: str
    rank: int
    scaling: float
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class FileNames:
    """How a single file of factors names them: a merge of such files is written in the same way.

    flat    names of modules have `_` for each dot (kohya's files)
    pairs   module → the endings of its factors
    alphas  modules that have an alpha
    """

    flat: bool
    pairs: Mapping[str, FactorNames]
    alphas: Set[str]


@dataclass(frozen=True, slots=True)
class OtherParts:
    """The tensors of a module in an adapter of another kind than LoRA.

    kind      its name in `kinds.KINDS`
    parts     part of the name → the tensor; those that all modules share are among them
    settings  see `AdapterModule`
    """

    kind: str
    parts: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter's tensors, and what each is for. Made by `open_adapter`.

    checkpoint    of the adapter's weights; its files are the tokenizer's that lie beside them
    updates       module → its factors; modules are named as PEFT names them, without `base_model.model.`
    replacements  tensor of the model → tensor of the file that takes its place (modules_to_save)
    transposed    `fan_in_fan_out`: weights are stored [inputs, outputs], as GPT-2's are
    stacked       module → factors of its parameters: PEFT wraps the module once for each, and the innermost comes first
    parameters    module of `stacked` → the parameters that these may belong to
    weights       those of `updates` that are factors of the parameter `weight` (`target_parameters`), not of the module
    saved         modules that are saved whole, with all inside (`modules_to_save`): other replacements are put in place
    file          of an adapter in a single file: how it names its modules. None for PEFT's folders
    others        module → its tensors of another kind than LoRA. Trainable tokens and biases come beside a LoRA's updates
    turned        B's of a GGUF file whose rows are in llama.cpp's order → the module's name there (see `in_hub_order`)
    as_one        embedding and head were trained as one tensor, if the base ties them
    heads         of q and k, by which the rows of a GGUF file were brought into the Hub's order
    """

    checkpoint: Checkpoint
    updates: Mapping[str, Factors]
    replacements: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    stacked: Mapping[str, tuple[Stacked, ...]] = field(default_factory=dict)
    parameters: Mapping[str, tuple[ExpertParameter, ...]] = field(default_factory=dict)
    weights: Set[str] = frozenset()
    saved: Set[str] = frozenset()
    file: FileNames | None = None
    others: Mapping[str, OtherParts] = field(default_factory=dict)
    turned: Mapping[str, str] = field(default_factory=dict)
    as_one: bool = False
    heads: tuple[int, int] | None = None

    @property
    def title(self) -> str:
        """What it is, for messages: "LoHa"; "LoRA" for one that has nothing else."""
        kinds = dict.fromkeys(KINDS.get(parts.kind).title for parts in self.others.values())
        return " and ".join([*(["LoRA"] if self.updates or self.stacked or not kinds else []), *kinds])

    def ties_factors(self, embedding: Factors, head: Factors) -> bool:
        """Whether factors of a head are those of the embedding, transposed: PEFT saves them twice. Cost: reads both."""
        read, pairs = self.checkpoint.read, ((embedding.b, head.a), (embedding.a, head.b))
        return embedding.scaling == head.scaling and all(np.array_equal(read(one).T, read(other)) for one, other in pairs)


@dataclass(slots=True)
class _Named:
    """What the names of an adapter's tensors say. Each maps a module or a tensor of the model to the stored name.

    factors     module → "A" and "B" → the stored name
    embeddings  modules whose factors are named as those of embeddings
    problems    of names that say nothing
    """

    factors: dict[str, dict[str, str]] = field(default_factory=dict)
    embeddings: set[str] = field(default_factory=set)
    magnitudes: dict[str, str] = field(default_factory=dict)
    replacements: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _by_name(checkpoint: Checkpoint, config: Mapping[str, Any]) -> _Named:
    named = _Named()
    for name, spec in checkpoint.specs.items():
        inner = WRAPPERS.sub("", name).removeprefix(PREFIX)
        match = _FACTOR.fullmatch(inner)
        if ".original_module." in inner or (config.get("velora_config") and inner.endswith(_VELORA)):
            continue  # what a module that is saved whole was before the training; what VeLoRA's training alone needs
        if match is None and (magnitude := _MAGNITUDE.fullmatch(inner)):
            named.magnitudes[magnitude[1]] = name
        elif config.get("lora_bias") and (of_bias := _BIAS.fullmatch(inner)):
            named.biases[of_bias[1]] = name
        elif config.get("trainable_token_indices") and (of_tokens := _TOKENS.fullmatch(inner)):
            named.tokens[of_tokens[1]] = name
        elif match is None and any(part.startswith("lora_") for part in inner.split(".")):
            named.problems.append(f"{show(name)} is no A or B of a LoRA")
        elif match is None:
            named.replacements[SAVED.sub("", inner).replace(_LAYER, "")] = name
        elif not spec.dtype.floating or not 2 <= len(spec.shape) <= (MOST_DIMENSIONS if match[2] else 2) or 0 in spec.shape:
            named.problems.append(f"{spec} is no matrix of floating numbers, nor a kernel")
        elif (other := named.factors.setdefault(match[1], {}).setdefault(match[2] or match[3], name)) != name:
            named.problems.append(f"{show(name)} and {show(other)} are the same factor")
        elif match[3]:
            named.embeddings.add(match[1])
    return named


def _left_over(named: _Named, config: Mapping[str, Any], modules: Collection[str]) -> Iterator[str]:
    """The problems of what belongs to no factors. modules: those with factors."""
    yield from (f"{show(name)} is of a module without A and B" for name in named.magnitudes.values())
    yield from (
        f"{show(name)} is of a module without A and B" for module, name in named.biases.items() if module not in modules
    )
    if config.get("lora_bias") and (unbiased := [module for module in modules if module not in named.biases]):
        yield f"{unbiased[0]} has no bias of B, and lora_bias is true"
    if config.get("trainable_token_indices") and not named.tokens:
        yield "the config has trainable_token_indices, and no tensor is trainable_tokens_delta"


def sort_tensors(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Adapter:
    """The adapter in a file. Raises FormatError with everything in it that cannot be."""
    check_empty(checkpoint)
    named = _by_name(checkpoint, config)
    problems = named.problems
    scalings, layouts = Scalings(config, checkpoint.ref), Layouts(config, f"{checkpoint.ref}, {CONFIG_NAME}")
    targets = _targets(config, checkpoint.ref)
    updates: dict[str, Factors] = {}
    stacked: dict[str, dict[int, Stacked]] = {}
    for module, pair in named.factors.items():
        if len(pair) < 2:
            problems.append(f"{module} has an {next(iter(pair))} and no {'B' if 'A' in pair else 'A'}")
            continue
        a, b = (checkpoint.specs[pair[part]].shape for part in "AB")
        rank, outer = scalings.rank(module), module.replace(_LAYER, "")
        if _of_parameters(outer, targets, plain=a[0] == b[1] == rank):
            depth = module.count(_LAYER)
            if f"{outer}{_LAYER * depth}" != module or a[0] != b[1]:
                problems.append(f"{module} has A {list(a)} and B {list(b)}, which are no factors of experts")
            else:
                stacked.setdefault(outer, {})[depth] = Stacked(pair["A"], pair["B"])
        elif a[0] != rank or b[1] != rank or len(a) != len(b) or set(b[2:]) - {1}:
            problems.append(f"{module} has rank {rank} by the config, and A {list(a)} and B {list(b)}")
        else:
            magnitude, embedding = named.magnitudes.pop(module, ""), module in named.embeddings
            if problem := _magnitude_problem(checkpoint, config, module, magnitude, b[0]):
                problems.append(problem)
                continue
            columns = bool(magnitude) and embedding
            updates[module] = Factors(pair["A"], pair["B"], embedding, scalings.of(module), magnitude, columns)
    problems += _left_over(named, config, updates)
    if problems:
        where, n = str(checkpoint.paths[0]), len(problems)
        shown = [*problems[:8], *([f"and {n - 8} more"] if n > 8 else [])]
        fix = "Save it again with peft: the config and the weights are of different adapters, or this is not one of PEFT's."
        raise FormatError(f"the adapter's tensors have {count(n, 'problem')}", where=where, details=shown, fix=fix)
    return Adapter(
        checkpoint,
        updates,
        named.replacements,
        transposed=config.get("fan_in_fan_out") is True,
        stacked={module: tuple(levels[depth] for depth in sorted(levels, reverse=True)) for module, levels in stacked.items()},
        parameters={module: tuple(_parameters(module, targets, scalings, layouts)) for module in stacked},
        weights=frozenset(
            module for module in updates if any(name == "weight" and f".{module}".endswith(f".{end}") for end, name in targets)
        ),
        saved=frozenset(saved_modules(config, named.replacements)),
        others=dict(_beside_factors(named, updates, config)),
        as_one=has_one_vocabulary(config, [*updates, *(name.removesuffix(".weight") for name in named.replacements)]),
    )


def _beside_factors(
    named: _Named, updates: Mapping[str, Factors], config: Mapping[str, Any]
) -> Iterator[tuple[str, OtherParts]]:
    """Modules with biases of B, and with trained tokens."""
    for module, name in named.biases.items():
        yield module, OtherParts("difference", {"diff_b": name}, {"scale": updates[module].scaling})
    settings = {"trainable_token_indices": config.get("trainable_token_indices")}
    for module, name in named.tokens.items():
        yield module, OtherParts("trainable_tokens", {"trainable_tokens_delta": name}, settings)


def check_empty(checkpoint: Checkpoint) -> None:
    """Raise FormatError for tensors without elements: ZeRO-3 leaves them where each process has a part of the weights."""
    empty = [show(name) for name, spec in checkpoint.specs.items() if spec.size == 0]
    if empty:
        what = f"{len(empty):,} of {count(len(checkpoint.specs), 'tensor')} are empty: DeepSpeed's ZeRO-3 saved the adapter"
        what += " without gathering its weights"
        details = [*empty[:3], *([f"and {len(empty) - 3:,} more"] if len(empty) > 3 else [])]
        fix = "Save it again: with stage3_gather_16bit_weights_on_model_save: true in DeepSpeed's config, or with "
        fix += "model.save_pretrained(folder, state_dict=accelerator.get_state_dict(model)). The checkpoint's zero_to_fp32.py "
        fix += "gathers weights that were saved in parts."
        raise FormatError(what, where=str(checkpoint.paths[0]), details=details, fix=fix)


def saved_modules(config: Mapping[str, Any], replacements: Iterable[str]) -> Iterator[str]:
    """The modules of `modules_to_save`. PEFT compares the ends of names."""
    listed = config.get("modules_to_save")
    ends = tuple(filter(None, map(str, listed))) if isinstance(listed, list) else ()
    for name in replacements:
        module = name
        while module := module.rpartition(".")[0]:
            if module.endswith(ends):
                yield module


def _targets(config: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """`target_parameters`, as the end of a module's name and a parameter's."""
    listed = config.get("target_parameters") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        what = f"target_parameters is {show(listed)}, not a list of names"
        raise FormatError(what, where=f"{where}, {CONFIG_NAME}", fix=_REPAIR)
    return sorted({(module, name) for module, _, name in (target.rpartition(".") for target in listed)})


def _of_parameters(module: str, targets: Iterable[tuple[str, str]], *, plain: bool) -> bool:
    """Whether factors are of a module's parameters. plain: by their shapes they could be of the weight of a linear layer."""
    return any(not plain if name == "weight" or not end else f".{module}".endswith(f".{end}") for end, name in targets)


def _parameters(
    module: str, targets: Iterable[tuple[str, str]], scalings: Scalings, layouts: Layouts
) -> Iterator[ExpertParameter]:
    for end, name in targets:
        if not end or f".{module}".endswith(f".{end}"):
            full = f"{module}.{name}"
            layouts.check(module, name)
            yield ExpertParameter(name, scalings.rank(full), scalings.of(full), layouts.grouped(name))


def _magnitude_problem(checkpoint: Checkpoint, config: Mapping[str, Any], module: str, magnitude: str, outputs: int) -> str:
    """What is wrong with the norms that DoRA has for a module; ""."""
    if bool(config.get("use_dora")) != bool(magnitude):
        return f"{module} has {'a' if magnitude else 'no'} magnitude, and use_dora is {show(config.get('use_dora'))}"
    spec = checkpoint.specs[magnitude] if magnitude else None
    if spec is not None and not (spec.size == outputs == max(spec.shape, default=0) and spec.dtype.floating):
        return f"{spec} has not one number for each of {outputs} outputs"
    return ""


class Scalings:
    """Rank and scaling of each module: `r` and `lora_alpha`, but for the modules that a pattern names."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._where = f"{where}, {CONFIG_NAME}"
        self._root = config.get("use_rslora") is True
        self._rank = self._rank_of("r", config.get("r"))
        self._alpha = self._alpha_of("lora_alpha", config.get("lora_alpha"))
        self._ranks = self._patterns(config, "rank_pattern", self._rank_of)
        self._alphas = self._patterns(config, "alpha_pattern", self._alpha_of)

    def rank(self, module: str) -> int:
        """r of one module."""
        return int(self._ranks.find(module, self._rank))

    def of(self, module: str) -> float:
        """What B @ A of one module is multiplied with."""
        rank = self.rank(module)
        return self._alphas.find(module, self._alpha) / (math.sqrt(rank) if self._root else rank)

    def _rank_of(self, key: str, value: object) -> int:
        rank = whole_number(value)
        if rank is None or not 0 < rank < 2**31:
            raise FormatError(f"{key} is {show(value)}; a rank must be a positive integer", where=self._where, fix=_REPAIR)
        return rank

    def _alpha_of(self, key: str, value: object) -> float:
        alpha = finite_number(value)
        if alpha is None:
            raise FormatError(f"{key} is {show(value)}, not a finite number", where=self._where, fix=_REPAIR)
        return float(alpha)

    def _patterns(self, config: Mapping[str, Any], key: str, number: Callable[[str, object], float]) -> ModulePatterns:
        value = config.get(key) or {}
        if not isinstance(value, dict):
            raise FormatError(f"{key} is {show(value)}, not an object", where=self._where, fix=_REPAIR)
        numbers = {text: number(f"{key} of {show(text)}", stated) for text, stated in value.items()}
        return ModulePatterns(numbers, key, self._where)
