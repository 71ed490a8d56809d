"""Which modules of a model become factors, which are saved whole, and which an adapter cannot hold."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from weightsmith._base.errors import ShapeError, UnknownName, WeightsmithError, nearest
from weightsmith._base.files import show
from weightsmith._base.options import assignment, named, option_error
from weightsmith._base.tensors import DTYPES, MAX_STACKED, TensorSpec
from weightsmith._features.adapters.built import GROUP, WEIGHT, BuiltModel, ExpertStack, find_stacks, group_of, is_expert
from weightsmith._features.adapters.factors import FactorTarget, Form, prefers_exact
from weightsmith._features.adapters.options import ExtractSettings
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.projections import COMPONENTS, fused_parts, role_of
from weightsmith._models.structure.vocabulary import TIED_HEAD, is_embedding, is_head, is_vocabulary, ties
from weightsmith._planning.planner.inputs import analyse_all
from weightsmith._planning.planner.match import ModelNames, is_buffer
from weightsmith._plans import Block, Product, Step
from weightsmith.abc.product import Arrays, ProductContext, ProductKind


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor of the base and its counterpart in the fine-tune.

    spec   of the base, under the name that the adapter uses
    base   its name in the base, another one for a tied head
    tuned  name and shape in the fine-tune
    """

    spec: TensorSpec
    base: str
    tuned: TensorSpec

    @property
    def grown(self) -> bool:
        """The fine-tune has another number of tokens."""
        return self.tuned.shape != self.spec.shape


@dataclass(frozen=True, slots=True)
class TargetPiece:
    """A tensor, or a block of it.

    chosen  False: its difference is taken for zero
    """

    pair: TensorPair
    block: Block | None = None
    chosen: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.pair.spec.shape if self.block is None else (self.block.rows, self.block.cols)


@dataclass(frozen=True, slots=True)
class TargetWeight:
    """A tensor, or several, that become factors.

    matrices  of each matrix of the target the pieces that it is made of, one above the other
    """

    target: FactorTarget
    matrices: tuple[tuple[TargetPiece, ...], ...]

    @property
    def pair(self) -> TensorPair:
        """The first of its tensors."""
        return self.matrices[0][0].pair

    @property
    def size(self) -> int:
        """Elements of the matrices."""
        return sum(math.prod(piece.shape) for pieces in self.matrices for piece in pieces)


@dataclass
class Chosen:
    """What becomes of each tensor.

    factors   in the order of the base's tensors
    whole     tensors to save whole if they differ
    left_out  tensors that have no place in the adapter, and why: a warning if they differ
    """

    factors: list[TargetWeight] = field(default_factory=list)
    whole: list[TensorPair] = field(default_factory=list)
    left_out: list[tuple[TensorPair, str]] = field(default_factory=list)


def pair_tensors(base: Checkpoint, tuned: Checkpoint) -> tuple[list[TensorPair], list[str]]:
    """All tensors of floating numbers with their counterparts, and the names of those that only the fine-tune has.

    Raises ShapeError with everything of the base that the fine-tune does not have, or in another shape.
    """
    structures = analyse_all([base, tuned])
    base_structure, tuned_structure = structures
    assert base_structure is not None
    assert tuned_structure is not None
    tuned_names = ModelNames(tuned_structure, tuned.specs, base_structure, base.specs).all()
    embedding = next((name for name in tuned_names if name in base.specs and is_embedding(base.specs[name])), "")
    pairs: list[TensorPair] = []
    problems: list[str] = []
    for spec in base.specs.values():
        if is_buffer(spec) or not spec.dtype.floating:
            continue
        name = tuned_names.get(spec.name)
        if name is None and is_head(spec) and embedding and ties(tuned.config, stores_head=False):
            name = tuned_names[embedding]
        if name is None:
            problems.append(f"{spec.name}: the fine-tune has no such tensor{nearest(spec.name, tuned.specs)}")
            continue
        pair = TensorPair(spec, spec.name, tuned.specs[name])
        if pair.grown and not (is_vocabulary(spec) and pair.tuned.shape[1:] == spec.shape[1:]):
            problems.append(f"{spec.name}: {list(spec.shape)} in the base, and {list(pair.tuned.shape)} in the fine-tune")
        pairs.append(pair)
    strange = [name for name in tuned_names if name not in base.specs and not is_buffer(tuned.specs[tuned_names[name]])]
    if embedding and not any(is_head(pair.spec) for pair in pairs) and ties(base.config, stores_head=False):
        head = next((name for name in strange if is_head(replace(tuned.specs[tuned_names[name]], name=name))), "")
        strange = [name for name in strange if name != head]
        source = tuned.specs[tuned_names[head] if head else tuned_names[embedding]]
        pairs.append(TensorPair(replace(base.specs[embedding], name=head or TIED_HEAD), embedding, source))
    problems += [
        f"{name}: the base has no such layer" for name in strange if tuned_structure.locate(tuned_names[name]) is not None
    ]
    if problems:
        raise _unequal(base, tuned, problems)
    return pairs, strange


def _unequal(base: Checkpoint, tuned: Checkpoint, problems: Sequence[str]) -> ShapeError:
    kinds = [show((model.config or {}).get("architectures")) for model in (base, tuned)]
    details = [f"the base is {kinds[0]}, the fine-tune {kinds[1]}"] if kinds[0] != kinds[1] else []
    what = f"it is not a fine-tune of {base.ref}: {len(problems):,} tensors do not match"
    fix = "name the model that was fine-tuned as BASE; the fine-tune's card may say which"
    return ShapeError(what, where=tuned.ref, details=[*details, *problems], fix=fix)


def select(pairs: Sequence[TensorPair], settings: ExtractSettings, base: Checkpoint, built: BuiltModel | None = None) -> Chosen:
    """Sort the tensors by what becomes of them.

    built  the model that transformers builds, where names do not tell (`built.needs_asking`)

    Raises ParameterError and UnknownName for settings that match no module.
    """
    modules = list(dict.fromkeys(module_of(pair) for pair in pairs))
    chosen = set(_matching(modules, settings))
    saved = set(_saved(modules, settings.save_modules))
    transposed = _is_transposed(pairs)
    structure = analyse(base.specs.values(), base.config)
    stacks = find_stacks(base.specs, structure, base.config) if built is None else _stacks(base, structure, built)
    selection = Chosen()

    def target(module: str, form: Form, shape: tuple[int, ...], experts: int = 0, group: str = "") -> FactorTarget:
        rank = min(settings.max_rank, *shape)
        return FactorTarget(module, form, rank, settings.exact or prefers_exact(rank, *shape), experts, group)

    joined = _joined(pairs, chosen - saved, built, target) if built is not None and settings.layout == "peft" else {}
    for pair in pairs:
        module, stack = module_of(pair), stacks.get(pair.spec.name)
        if pair.spec.name in joined:
            weight = joined[pair.spec.name]
            if pair is weight.pair:
                selection.factors.append(weight)
            continue
        if module not in chosen:
            continue
        form = None if module in saved else _form(pair, settings, built, transposed=transposed)
        if form is not None:
            group = GROUP if is_expert(pair.spec.name) else ""
            selection.factors.append(TargetWeight(target(module, form, pair.spec.shape, group=group), ((TargetPiece(pair),),)))
        elif stack is not None and module not in saved and settings.layout == "peft":
            form = "transposed" if stack.swapped else "linear"
            parameter = target(stack.parameter, form, stack.shape[1:], stack.shape[0], group_of(stack.parameter))
            selection.factors.append(TargetWeight(parameter, tuple((TargetPiece(pair, block),) for block in stack.blocks)))
        elif stack is not None and module not in saved and not stack.transposed and ".experts." in pair.spec.name:
            for part in fused_parts(pair.spec, base.specs, structure, base.config):
                parameter = target(part.name.removesuffix(WEIGHT), "linear", part.shape, group=GROUP)
                selection.factors.append(TargetWeight(parameter, ((TargetPiece(pair, part.block),),)))
        elif why := _refusal(module, settings, saved):
            selection.left_out.append((pair, why))
        else:
            selection.whole.append(pair)
    return selection


def _stacks(base: Checkpoint, structure: Structure, built: BuiltModel) -> dict[str, ExpertStack]:
    """The parameters of all experts in the model that transformers builds, which the base stores as they are."""
    stacks: dict[str, ExpertStack] = {}
    for spec in base.specs.values():
        key = built.names.get(spec.name, "")
        if not key or built.tensors[key] != spec.shape or len(spec.shape) != 3 or min(spec.shape) < 2:
            continue
        if (structure.experts(spec) > 1 or "expert" in key) and spec.shape[0] <= MAX_STACKED:
            swapped = key.rpartition(".")[0] in built.rows
            stacks[spec.name] = ExpertStack(key, swapped, swapped, (spec.shape[0], spec.shape[1], spec.shape[2]))
    return stacks


def _joined(
    pairs: Sequence[TensorPair], chosen: Iterable[str], built: BuiltModel, target: Callable[..., FactorTarget]
) -> dict[str, TargetWeight]:
    """Tensor → the parameter of all experts that transformers makes of it and of others."""
    of, listed = {pair.spec.name: pair for pair in pairs}, set(chosen)
    weights: dict[str, TargetWeight] = {}
    for key, sources in built.sources.items():
        parts = [of[name] for name in sources if name in of]
        if not built.fused(key) or len(parts) < len(sources) or not any(module_of(pair) in listed for pair in parts):
            continue
        experts, rows, cols = built.tensors[key]
        per_expert = len(parts) // experts
        pieces = [TargetPiece(pair, chosen=module_of(pair) in listed) for pair in parts]
        matrices = tuple(tuple(pieces[e * per_expert : (e + 1) * per_expert]) for e in range(experts))
        weight = TargetWeight(target(key, "linear", (rows, cols), experts, group_of(key)), matrices)
        weights |= dict.fromkeys(sources, weight)
    return weights


def module_of(pair: TensorPair) -> str:
    """The module of a tensor: its name without the last component. A parameter of all experts counts as a module."""
    name = pair.spec.name
    return name if len(pair.spec.shape) == 3 and not name.endswith(WEIGHT) else name.rpartition(".")[0]


def _form(pair: TensorPair, settings: ExtractSettings, built: BuiltModel | None, *, transposed: bool) -> Form | None:
    """How the weight becomes factors; None if it does not."""
    spec = pair.spec
    if not spec.name.endswith(WEIGHT) or pair.grown:
        return None
    if _is_linear(pair, built):
        return "transposed" if transposed else "linear"
    if not settings.embed_lora or settings.layout != "peft" or not is_vocabulary(spec) or min(spec.shape) < 1:
        return None
    return "embedding" if is_embedding(spec) else "linear"


def _is_linear(pair: TensorPair, built: BuiltModel | None) -> bool:
    spec = pair.spec
    if built is None:
        return role_of(spec) == "linear"
    module = built.key(spec.name).rpartition(".")[0]
    known = built.modules.get(module) in ("linear", "transposed") and COMPONENTS.isdisjoint(spec.name.split("."))
    return known and min(spec.shape) > 1 and not is_vocabulary(spec)


def _refusal(module: str, settings: ExtractSettings, saved: Iterable[str]) -> str:
    """Why a tensor cannot be saved whole; ""."""
    if settings.layout != "peft":
        return "vLLM reads factors only"
    return "--skip-undecomposable" if settings.skip_undecomposable and module not in saved else ""


def _is_transposed(pairs: Sequence[TensorPair]) -> bool:
    """The weights of linear layers are [inputs, outputs], as GPT-2's are: biases are as long as their rows."""
    shapes = {pair.spec.name: pair.spec.shape for pair in pairs}
    sides: Counter[int] = Counter()
    for pair in pairs:
        bias = shapes.get(pair.spec.name.removesuffix(WEIGHT) + ".bias")
        shape = pair.spec.shape
        if role_of(pair.spec) == "linear" and bias is not None and shape[0] != shape[1]:
            sides.update(axis for axis in (0, 1) if bias == (shape[axis],))
    return sides[1] > sides[0]


def _matching(modules: Sequence[str], settings: ExtractSettings) -> list[str]:
    """The modules that the regular expressions let through."""
    include = [_pattern(text, "include", modules) for text in settings.include]
    exclude = [_pattern(text, "exclude", modules) for text in settings.exclude]
    return [
        module
        for module in modules
        if (not include or any(p.search(module) for p in include)) and not any(p.search(module) for p in exclude)
    ]


def _pattern(text: str, option: str, modules: Sequence[str]) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise option_error(option, f"{text!r} is not a regular expression: {error}") from error
    if not any(map(pattern.search, modules)):
        what = f"{text!r} matches no module"
        raise option_error(option, what, f"write a module name such as {modules[len(modules) // 2]}")
    return pattern


def _saved(modules: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        matches = [module for module in modules if f".{module}".endswith(f".{name}")]
        matches += [module for module in modules if f".{module}".rpartition(".")[0].endswith(f".{name}")] if not matches else []
        if not matches:
            last = sorted({module.rpartition(".")[2] for module in modules})
            raise UnknownName(f"no module is called '{name}'{nearest(name, last)}", where=named("save_modules"))
        yield from matches


def settings_problems(settings: ExtractSettings) -> list[WeightsmithError]:
    """Settings that exclude each other."""
    problems: list[WeightsmithError] = []
    if settings.layout == "vllm":
        if settings.max_rank > VLLM_RANK:
            what = f"vLLM loads ranks up to {VLLM_RANK}, not {settings.max_rank}"
            problems.append(option_error("max_rank", what, f"write {assignment('max_rank', VLLM_RANK)} or less"))
        for name in ("embed_lora", "save_modules"):
            if getattr(settings, name):
                problems.append(option_error(name, "vLLM loads factors of linear layers only", f"leave out {named(name)}"))
    if settings.energy is not None and settings.max_parameters is not None:
        what = f"{named('energy')} chooses the ranks already"
        problems.append(option_error("max_parameters", what, "leave out one of them"))
    return problems


VLLM_RANK = 512
"""The largest `--max-lora-rank` of vLLM."""


# ---- The `changes` product: the largest change of each of some tensors, for those that are not decomposed


NAME = "changes of other tensors"


def changes(steps: Sequence[Step]) -> Product:
    """The product. steps: of the differences."""
    return Product(NAME, "changes", (TensorSpec(NAME, DTYPES["F32"], (len(steps),)),), {}, tuple(steps))


def _compute(context: ProductContext) -> Arrays:
    return [context.largest([step.out.name for step in context.product.steps])]


def _check(product: Product) -> str:
    return "" if product.outs == changes(product.steps).outs else "it has not one number for each tensor"


KIND = ProductKind("comparing", compute=_compute, check=_check)
