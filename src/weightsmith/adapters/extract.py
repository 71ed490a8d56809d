"""`weightsmith extract-lora`: the plans that make an adapter of the difference of two models.

Ranks depend on the data, and the layout of the output on the ranks. So there are two plans. The first has products only: the
factors of each matrix at its largest rank (`factors.py`), one product for each layer, and the changes of all other tensors. The
second follows from their arrays: the same products, and steps that store the first columns and rows of their factors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import yaml

from weightsmith._version import __version__
from weightsmith.adapters.changes import changes
from weightsmith.adapters.factors import FactorWork
from weightsmith.adapters.peft import PREFIX, adapter_config, factor_names, stacked_names
from weightsmith.adapters.ranks import Spectrum, choose_ranks
from weightsmith.adapters.report import Extraction, Matrix
from weightsmith.adapters.select import Chosen, Pair, Weight, pair_tensors, select, settings_problems
from weightsmith.checkpoint import Checkpoint
from weightsmith.containers import PEFT
from weightsmith.errors import (
    NOTHING_WRITTEN,
    Finding,
    FormatError,
    MismatchError,
    ParameterError,
    PlanError,
    Unsupported,
    WeightsmithError,
)
from weightsmith.formats.carried import is_read
from weightsmith.jobs.requires import needs_torch
from weightsmith.options import ExtractSettings
from weightsmith.planner import Plan, Prepared
from weightsmith.planner.inputs import open_models
from weightsmith.plans import CAST, COPY, PRODUCTS, Block, Made, ModelInput, Product, Read, Settings, Step
from weightsmith.plans.reading import has_type
from weightsmith.products.base import Arrays
from weightsmith.recipe import ModelRef
from weightsmith.recipe.references import parse_reference
from weightsmith.structure import Structure, analyse
from weightsmith.tensors import BY_TORCH_NAME, DTYPE_NAMES, DTYPES, DType, TensorSpec

FORMAT = "peft"
"""`Plan.then["format"]` of a plan that an adapter follows from."""

COMMAND = "extract-lora"

_BASE, _TUNED = 0, 1  # models of the plan
_DIFFERENCE = Settings({"normalize": False}, ({"weight": 1.0}, {"weight": -1.0}))
_SOURCE = """LoRA: Hu et al. 2021, https://arxiv.org/abs/2106.09685. Randomised singular value decompositions:
Musco and Musco 2015, https://arxiv.org/abs/1504.05477."""


@dataclass(frozen=True, slots=True)
class Following:
    """What the plan of the adapter depends on, besides products: `Plan.then["settings"]`.

    dtype      of the factors, as torch calls it
    left_out   tensors that have no place in the adapter, and why
    """

    dtype: str
    layout: str
    energy: float | None
    max_parameters: int | None
    sv_epsilon: float
    left_out: Mapping[str, str]


# ---- the first plan


def prepare_extraction(
    finetuned: str | os.PathLike[str],
    base: str | os.PathLike[str],
    settings: ExtractSettings,
    dtype: DType | None = None,
) -> Prepared:
    """Plan the adapter that makes `finetuned` of `base`: what is to be decomposed, and what is to be compared.

    finetuned, base  as in a recipe: a folder, a hub id; the fine-tune also `base+adapter`
    dtype            of the factors; None: that of the fine-tune

    Raises PlanError with all problems.
    """
    problems = settings_problems(settings)
    if missing := needs_torch():
        problems.append(ParameterError(missing.replace("this method", COMMAND)))
    refs = [_reference(base, "BASE", problems), _reference(finetuned, "FINETUNED", problems)]
    if refs[0] is not None and refs[0].lora is not None:
        what = "the base of an adapter is one model, not a model and an adapter"
        problems.append(Unsupported(what, where=str(base), fix="merge them first: weightsmith dequantize BASE+ADAPTER FOLDER"))
    known = [ref for ref in refs if ref is not None]
    with ExitStack() as stack:
        opened, found = open_models(known, stack)
        models = [checkpoint for checkpoint in opened if checkpoint is not None]
        problems += found
        if problems or len(models) < 2:
            raise PlanError(problems)
        try:
            plan = _measuring_plan(models[0], models[1], settings, dtype)
        except WeightsmithError as error:
            raise PlanError([error]) from error
        structure = analyse(models[0].specs.values(), models[0].config)
        stack.pop_all()
        return Prepared(plan, tuple(models), structure)


def _reference(name: str | os.PathLike[str], where: str, problems: list[WeightsmithError]) -> ModelRef | None:
    found = parse_reference(os.fspath(name), where)
    if isinstance(found, ModelRef):
        return found
    problems.append(found)
    return None


def _measuring_plan(base: Checkpoint, tuned: Checkpoint, settings: ExtractSettings, dtype: DType | None) -> Plan:
    pairs, strange = pair_tensors(base, tuned)
    selection = select(pairs, settings, base)
    if not selection.factors:
        what = "no weight of a linear layer is left to decompose"
        fix = "change include, exclude or save_modules" if settings.include or settings.exclude else "name a language model"
        raise ParameterError(what, where=tuned.ref, fix=fix)
    compared = [*selection.whole, *(pair for pair, _ in selection.left_out)]
    factors = tuple(_factor_products(selection, analyse(base.specs.values(), base.config), settings))
    following = Following(
        dtype=(dtype or _dtype(tuned, selection)).torch,
        layout=settings.layout,
        energy=settings.energy,
        max_parameters=settings.max_parameters,
        sv_epsilon=settings.sv_epsilon,
        left_out={pair.spec.name: why for pair, why in selection.left_out},
    )
    models = (base, tuned)
    return Plan(
        made=Made(COMMAND, f"Extracted with weightsmith {__version__}.", _SOURCE, relation="adapter"),
        models=tuple(ModelInput(model.ref, model.revision, model.identity) for model in models),
        steps=(),
        settings=(_DIFFERENCE,),
        products=(*factors, *([changes([_difference(pair) for pair in compared])] if compared else [])),
        carried=(),
        container=PEFT,
        warnings=tuple(_warnings(models, strange)),
        then={"format": FORMAT, "settings": asdict(following)},
    )


def _dtype(tuned: Checkpoint, selection: Chosen) -> DType:
    """Of the fine-tune's weights: float32, if they are neither that nor a 16-bit dtype."""
    found = tuned.kept_as(selection.factors[0].pair.tuned.name)
    return found if found.name in ("BF16", "F16") else DTYPES["F32"]


def _warnings(models: Sequence[Checkpoint], strange: Sequence[str]) -> Iterator[Finding]:
    for model in models:
        yield from model.notes
        if model.decoded:
            what = f"it is quantised ({model.decoded}): the difference has its rounding errors in it"
            yield Finding(what, model.ref, fix="use an unquantised checkpoint, if there is one")
    if strange:
        what = f"the base has no such tensor, and an adapter has no place for it ({len(strange):,} in all)"
        yield Finding(what, strange[0])


def _difference(pair: Pair, name: str = "", block: Block | None = None) -> Step:
    """The step of the difference; of vocabularies of different sizes, of the fine-tune's tensor, which differs in any case."""
    name = name or pair.spec.name
    if pair.grown:
        return Step(replace(pair.tuned, name=name), COPY, (Read(_TUNED, pair.tuned.name),))
    spec = TensorSpec(name, DTYPES["F32"], _shape(pair, block))
    return Step(spec, "linear", (Read(_TUNED, pair.tuned.name, block), Read(_BASE, pair.base, block)))


def _shape(pair: Pair, block: Block | None) -> tuple[int, ...]:
    return pair.spec.shape if block is None else (block.rows, block.cols)


def _matrix_steps(weight: Weight) -> Iterator[Step]:
    """Of each matrix of a target the difference, and what it is in the fine-tune."""
    pair = weight.pair
    for name, block in zip(weight.target.matrices, weight.blocks or (None,), strict=True):
        yield _difference(pair, name, block)
        spec = replace(pair.tuned, name=weight.target.tuned(name), shape=_shape(pair, block))
        yield Step(spec, COPY, (Read(_TUNED, pair.tuned.name, block),))


def _factor_products(selection: Chosen, structure: Structure, settings: ExtractSettings) -> Iterator[Product]:
    layers: dict[str, list[Weight]] = {}
    for weight in selection.factors:
        place = structure.locate(weight.pair.spec.name)
        layers.setdefault("other modules" if place is None else f"{place[0].prefix}{place[1]}", []).append(weight)
    before, total = 0, sum(weight.size for weight in selection.factors)
    for layer, own in layers.items():
        own.sort(key=lambda weight: -weight.size)  # the largest first: threads end at about the same time
        steps = tuple(step for weight in own for step in _matrix_steps(weight))
        targets = tuple(weight.target for weight in own)
        work = FactorWork(targets, settings.distribute_scale, before, total, settings.intruder_scale)
        yield work.product(f"factors of {layer}", steps)
        before += sum(weight.size for weight in own)


# ---- the second plan


def follow(prepared: Prepared, arrays: Mapping[str, Arrays]) -> tuple[Plan, Extraction]:
    """The plan of the adapter, and the report. arrays: of the products of the first plan, by name.

    Raises PlanError if nothing differs, FormatError for a plan that we did not make.
    """
    plan = prepared.plan
    settings: Any = (plan.then or {}).get("settings")
    if not has_type(settings, Following) or len(plan.models) != 2 or settings["dtype"] not in DTYPE_NAMES:
        raise FormatError("not a plan that can be run", where="then", fix="make the plan again")
    following = Following(**settings)
    matrices = list(_matrices(plan, arrays))
    try:
        ranks = choose_ranks(
            [matrix.spectrum for matrix in matrices],
            energy=following.energy,
            max_parameters=following.max_parameters,
            sv_epsilon=following.sv_epsilon,
            groups=[matrix.target.group for matrix in matrices],
        )
    except ParameterError as error:
        raise PlanError([error]) from error
    matrices = [replace(matrix, rank=rank) for matrix, rank in zip(matrices, ranks, strict=True)]
    compared = next((product for product in plan.products if product.op == "changes"), None)
    steps_compared = () if compared is None else compared.steps
    largest = () if compared is None else arrays[compared.name][0].tolist()
    differing = [step.out.name for step, change in zip(steps_compared, largest, strict=True) if change]
    _check_something_differs(prepared, matrices, differing)
    reads = {step.out.name: step.inputs[0] for step in steps_compared if step.out.name not in following.left_out}
    whole = _modules_to_save(reads, differing)
    ranked = {matrix.target.module: matrix for matrix in matrices if matrix.rank}
    steps = [step for matrix in ranked.values() for step in _factor_steps(matrix, ranked, BY_TORCH_NAME[following.dtype])]
    for module, names in whole.items():
        steps += [_whole_step(prepared.inputs, f"{module}.{name}", read) for name, read in names.items()]
    left_out = {name: why for name, why in following.left_out.items() if name in differing}
    report = Extraction(tuple(matrices), tuple(whole), left_out)
    grown = any(step.op == COPY and step.out.name in reads for step in steps_compared)
    made = replace(plan.made, title=f"{plan.made.title[:-1]}: the adapter that makes `{plan.models[_TUNED].ref}` of the base.")
    tuned = prepared.inputs[_TUNED]
    result = replace(
        plan,
        made=made,
        steps=tuple(steps),
        config=_config_of(prepared, matrices, whole),
        products=tuple(product for product in plan.products if product.op == "factors"),
        donor=_TUNED if grown else _BASE,
        carried=tuple(name for name in tuned.files if is_read(name) and name != "config.json") if grown else (),
        then=None,
        recipe=_command(plan, following),
        follows_recipe=False,
    )
    result.layout  # noqa: B018  names that cannot be stored show here
    return result, report


def _matrices(plan: Plan, arrays: Mapping[str, Arrays]) -> Iterator[Matrix]:
    for product in plan.products:
        if product.op != "factors":
            continue
        shapes = {step.out.name: step.out.shape for step in product.steps}
        found = iter(arrays[product.name])
        for target in FactorWork.of(product).targets:
            _, _, values, facts = (next(found) for _ in range(4))
            rows, cols = shapes[target.matrices[0]]
            for name, own, each in zip(target.matrices, np.atleast_2d(values), np.atleast_2d(facts).tolist(), strict=True):
                *known, intruders = each
                spectrum = Spectrum(rows, cols, own, *known)
                yield Matrix(name.removesuffix(".weight"), target, spectrum, 0, int(intruders))


def _check_something_differs(prepared: Prepared, matrices: Sequence[Matrix], differing: Sequence[str]) -> None:
    if any(matrix.rank for matrix in matrices):
        return
    tuned, base = prepared.inputs[_TUNED].ref, prepared.inputs[_BASE].ref
    changed = [matrix for matrix in matrices if matrix.spectrum.energy]
    if changed:
        what = f"no rank is left for any of {len(changed):,} matrices that differ from {base}"
        details = ["their differences are rounding noise, or all singular values are at most sv_epsilon"]
        error: WeightsmithError = MismatchError(what, where=tuned, details=details, fix="leave out energy and sv_epsilon")
    elif differing:
        what = f"only {len(differing):,} tensors that cannot become factors differ from {base}: {differing[0]}"
        error = MismatchError(what, where=tuned, fix="name a fine-tune in which linear layers differ")
    else:
        error = MismatchError(f"nothing differs from {base}", where=tuned, fix="name another fine-tune, or another base")
    error.state = NOTHING_WRITTEN
    raise PlanError([error])


def _modules_to_save(reads: Mapping[str, Read], differing: Sequence[str]) -> dict[str, dict[str, Read]]:
    """module → all of its tensors → what the fine-tune has there, for each module of which one tensor differs."""
    changed = {name.rpartition(".")[0] for name in differing}
    found: dict[str, dict[str, Read]] = {}
    for name, read in reads.items():
        module, _, own = name.rpartition(".")
        if module in changed:
            found.setdefault(module, {})[own] = read
    return found


def _factor_steps(matrix: Matrix, chosen: Collection[str], dtype: DType) -> Iterator[Step]:
    """A and B with the first `rank` of their rows and columns. chosen: modules with factors."""
    target, rank, experts = matrix.target, matrix.rank, matrix.target.experts
    a, b, *_ = target.outs((matrix.spectrum.rows, matrix.spectrum.cols))
    outputs, known = b.shape
    if experts:
        names, inputs = stacked_names(target.module, chosen), a.shape[1] // target.rank
        blocks = Block(0, experts, rank * inputs, a.shape[1]), Block(0, outputs, rank * experts, known)
        shapes = (experts * rank, inputs), (outputs, rank * experts)
    else:
        names, inputs = factor_names(target.module, target.form), a.shape[1]
        blocks = Block(0, rank, inputs, inputs), Block(0, outputs, rank, known)
        shapes = (rank, inputs), (outputs, rank)
    reads = Read(PRODUCTS, a.name, blocks[0]), Read(PRODUCTS, b.name, blocks[1])
    for name, shape, read in zip(names, shapes, reads, strict=True):
        yield Step(TensorSpec(name, dtype, shape), COPY if dtype.name == "F32" else CAST, (read,))


def _whole_step(inputs: Sequence[Checkpoint], name: str, read: Read) -> Step:
    """A tensor of the fine-tune, in the dtype that it has on disk."""
    model = inputs[read.model]
    spec, dtype = model.specs[read.tensor], model.kept_as(read.tensor)
    out = TensorSpec(f"{PREFIX}{name}", dtype, spec.shape)
    return Step(out, COPY if dtype == spec.dtype else CAST, (replace(read, view=None),))


def _config_of(prepared: Prepared, matrices: Sequence[Matrix], whole: Mapping[str, object]) -> dict[str, Any]:
    base = prepared.inputs[_BASE]
    listed = (base.config or {}).get("architectures")
    return adapter_config(
        base.ref.partition("@")[0],
        base.revision,
        {matrix.target.module: matrix.rank for matrix in matrices if matrix.rank},
        list(whole),
        list(dict.fromkeys(name.rpartition(".")[0] for name in base.specs)),
        transposed=any(matrix.target.form == "transposed" and not matrix.target.experts for matrix in matrices),
        parameters=list(dict.fromkeys(matrix.target.module for matrix in matrices if matrix.rank and matrix.target.experts)),
        rank=next((matrix.rank for matrix in matrices if matrix.target.group), None),
        causal=isinstance(listed, list) and any("CausalLM" in str(name) for name in listed),
    )


def _command(plan: Plan, following: Following) -> str:
    """The settings, for the card."""
    base, tuned = (model.ref for model in plan.models)
    chosen = {key: value for key, value in asdict(following).items() if value not in (None, 0.0) and key != "left_out"}
    work = [FactorWork.of(product) for product in plan.products if product.op == "factors"]
    largest = max(target.rank for own in work for target in own.targets)
    made = {"finetuned": tuned, "base": base, "max_rank": largest, **chosen, "distribute_scale": work[0].spread}
    if work[0].intruders != 1:
        made["intruder_scale"] = work[0].intruders
    return yaml.safe_dump({COMMAND: made}, sort_keys=False, allow_unicode=True)
