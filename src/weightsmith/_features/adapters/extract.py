"""`weightsmith extract-lora`: the plans that make an adapter of the difference of two models.

Ranks depend on the data, and the layout of the output on the ranks. So there are two plans. The first has products only: the
factors of each matrix at its largest rank (`factors.py`), one product for each layer, and the changes of all other tensors. The
second follows from their arrays: the same products, and steps that store the first columns and rows of their factors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    Finding,
    FormatError,
    MismatchError,
    ParameterError,
    PlanError,
    Unsupported,
    WeightsmithError,
    as_plan_error,
)
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPE_NAMES, DTYPES, DType, TensorSpec
from weightsmith._base.torch_use import needs_torch
from weightsmith._features.adapters.built import BuiltModel, built_of, guessed, needs_asking
from weightsmith._features.adapters.factors import FactorWork, Spectrum, choose_ranks
from weightsmith._features.adapters.options import ExtractSettings
from weightsmith._features.adapters.placing import AdapterPlaces
from weightsmith._features.adapters.report import NAME, AdapterMatrix, Extraction
from weightsmith._features.adapters.select import (
    Chosen,
    TargetPiece,
    TargetWeight,
    changes,
    pair_tensors,
    select,
    settings_problems,
)
from weightsmith._files.containers import PEFT
from weightsmith._files.copied import is_read, is_tokenizer
from weightsmith._files.hf_folder import hub_id_of
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora.beside import differing_files
from weightsmith._models.structure import Structure, analyse
from weightsmith._models.structure.vocabulary import TIED_HEAD, is_vocabulary
from weightsmith._planning.follow_ups import FollowUpKind, SecondPlan
from weightsmith._planning.planner.inputs import find_model, open_models
from weightsmith._planning.planner.match import is_buffer
from weightsmith._planning.planner.prepared import Prepared, model_input
from weightsmith._planning.recipe import ModelRef
from weightsmith._planning.recipe.values import parse_reference
from weightsmith._plans import (
    COPY,
    JOIN,
    PRODUCTS,
    Block,
    FollowUp,
    Plan,
    PlanDraft,
    Product,
    Provenance,
    Read,
    Settings,
    Step,
)
from weightsmith._plans.codec import has_type
from weightsmith._version import __version__
from weightsmith.abc.product import Arrays

COMMAND = "extract-lora"

_BASE, _TUNED = 0, 1  # models of the plan
_FOLDERS = ("peft", "vllm")
"""Layouts that are folders of PEFT."""
_DIFFERENCE = Settings({"normalize": False}, ({"weight": 1.0}, {"weight": -1.0}))
_SOURCE = """LoRA: Hu et al. 2021, https://arxiv.org/abs/2106.09685. Randomised singular value decompositions:
Musco and Musco 2015, https://arxiv.org/abs/1504.05477."""


@dataclass(frozen=True, slots=True)
class ExtractionSettings:
    """What the plan of the adapter depends on, besides products: `FollowUp.settings`.

    out_dtype  of the factors, as torch calls it
    left_out   tensors that have no place in the adapter, and why
    """

    out_dtype: str
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
) -> Prepared:
    """Plan the adapter that makes `finetuned` of `base`: what is to be decomposed, and what is to be compared.

    finetuned, base  as in a recipe: a folder, a hub id; the fine-tune also `base+adapter`

    Raises PlanError with all problems.
    """
    problems = settings_problems(settings)
    if missing := needs_torch():
        problems.append(ParameterError(missing.replace("this method", COMMAND)))
    refs = [parse_reference(os.fspath(name), where) for name, where in ((base, "BASE"), (finetuned, "FINETUNED"))]
    problems += [ref for ref in refs if not isinstance(ref, ModelRef)]
    if isinstance(refs[0], ModelRef) and refs[0].lora is not None:
        what = "the base of an adapter is one model, not a model and an adapter"
        problems.append(Unsupported(what, where=str(base), fix="merge them first: weightsmith dequantize BASE+ADAPTER FOLDER"))
    with ExitStack() as stack:
        known = [ref for ref in refs if isinstance(ref, ModelRef)]
        opened, unopened = open_models(known, stack)
        models = [checkpoint for checkpoint in opened if checkpoint is not None]
        problems += unopened
        problems += [_pipeline_problem(model) for model in models if model.parts][:1]  # of two, the fix is one
        if problems or len(models) < 2:
            raise PlanError(problems)
        with as_plan_error():
            plan = _measuring_plan(models[0], models[1], settings).finish()
        if find_model({known[_BASE]: _BASE}, known[_TUNED]) is not None:
            what, fix = "this is BASE itself, and nothing differs from it", "name another fine-tune, or another base"
            raise PlanError([MismatchError(what, where=f"{known[_TUNED].where}: {finetuned}", fix=fix)])
        structure = analyse(models[0].specs.values(), models[0].config)
        stack.pop_all()
        return Prepared.of_plan(plan, tuple(models), structure)


def _pipeline_problem(model: Checkpoint) -> Unsupported:
    what = f"a pipeline of several models, and an adapter is of one: {', '.join(model.parts)}"
    folder = next((part for part in model.parts if part in ("unet", "transformer")), next(iter(model.parts)))
    return Unsupported(what, where=model.ref, fix=f"name the folder of one part in both models, such as {model.ref}/{folder}")


def _measuring_plan(base: Checkpoint, tuned: Checkpoint, settings: ExtractSettings) -> PlanDraft:
    pairs, strange = pair_tensors(base, tuned)
    built = built_of(base) if settings.layout == "peft" and needs_asking(base) else None
    selection = select(pairs, settings, base, None if built is None or built.unknown else built)
    if not selection.factors:
        what = "no weight of a linear layer is left to decompose"
        fix = "change include, exclude or save_modules" if settings.include or settings.exclude else "name a language model"
        raise ParameterError(what, where=tuned.ref, fix=fix)
    compared = [*selection.whole, *(pair for pair, _ in selection.left_out)]
    following = ExtractionSettings(
        out_dtype=(settings.out_dtype or _dtype(tuned, selection)).torch,
        layout=settings.layout,
        energy=settings.energy,
        max_parameters=settings.max_parameters,
        sv_epsilon=settings.sv_epsilon,
        left_out={pair.spec.name: why for pair, why in selection.left_out},
    )
    models = (base, tuned)
    draft = PlanDraft(
        Provenance(COMMAND, f"Extracted with weightsmith {__version__}.", _SOURCE, relation="adapter"),
        models=[model_input(model) for model in models],
        settings=[_DIFFERENCE],
        products=[*_factor_products(selection, analyse(base.specs.values(), base.config), settings)],
        container=PEFT,
        warnings=list(_warnings(models, strange)),
        then=FollowUp("lora", asdict(following)),
    )
    draft.products += [changes([_difference(TargetPiece(pair)) for pair in compared])] if compared else []
    return draft


def _dtype(tuned: Checkpoint, selection: Chosen) -> DType:
    """The dtype of the fine-tune's weights; float32, unless it is a 16-bit dtype."""
    dtype = tuned.natural_dtype(selection.factors[0].pair.tuned.name)
    return dtype if dtype.name in ("BF16", "F16") else DTYPES["F32"]


def _warnings(models: Sequence[Checkpoint], strange: Sequence[str]) -> Iterator[Finding]:
    for model in models:
        yield from model.notes
        if model.decoded:
            what = f"it is quantised ({model.decoded}): the difference has its rounding errors in it"
            yield Finding(what, model.ref, fix="use an unquantised checkpoint, if there is one")
    if strange:
        what = f"the base has no such tensor, and an adapter has no place for it ({len(strange):,} in all)"
        yield Finding(what, strange[0])


def _difference(piece: TargetPiece) -> Step:
    """The step of the difference; of vocabularies of different sizes, of the fine-tune's tensor, which differs in any case."""
    pair, name = piece.pair, piece.pair.spec.name
    if pair.grown:
        return Step(replace(pair.tuned, name=name), COPY, (Read(_TUNED, pair.tuned.name),))
    base = Read(_BASE, pair.base, piece.block)
    tuned = Read(_TUNED, pair.tuned.name, piece.block) if piece.chosen else base
    return Step(TensorSpec(name, DTYPES["F32"], piece.shape), "linear", (tuned, base))


def _tuned(piece: TargetPiece, name: str) -> Step:
    """The step of the fine-tune's matrix."""
    read = Read(_TUNED, piece.pair.tuned.name, piece.block) if piece.chosen else Read(_BASE, piece.pair.base, piece.block)
    return Step(replace(piece.pair.tuned, name=name, shape=piece.shape), COPY, (read,))


def _matrix_steps(weight: TargetWeight) -> Iterator[Step]:
    """The steps for each matrix of a target: its difference, and the matrix of the fine-tune."""
    for name, pieces in zip(weight.target.matrices, weight.matrices, strict=True):
        yield _joined(name, [_difference(piece) for piece in pieces])
        yield _joined(weight.target.tuned(name), [_tuned(piece, f"{piece.pair.spec.name}: fine-tuned") for piece in pieces])


def _joined(name: str, pieces: Sequence[Step]) -> Step:
    """A matrix of several, one above the other; of experts, one below the other too."""
    first = pieces[0].out
    if len(pieces) == 1:
        return replace(pieces[0], out=replace(first, name=name))
    shape = (sum(piece.out.shape[0] for piece in pieces), *first.shape[1:])
    return Step(replace(first, name=name, shape=shape), JOIN, (), pieces=tuple(pieces))


def _factor_products(selection: Chosen, structure: Structure, settings: ExtractSettings) -> Iterator[Product]:
    layers: dict[str, list[TargetWeight]] = {}
    for weight in selection.factors:
        place = structure.locate(weight.pair.spec.name)
        layers.setdefault("other modules" if place is None else f"{place[0].prefix}{place[1]}", []).append(weight)
    before, total = 0, sum(weight.size for weight in selection.factors)
    for layer, weights in layers.items():
        weights.sort(key=lambda weight: -weight.size)  # the largest first: threads end at about the same time
        steps = tuple(step for weight in weights for step in _matrix_steps(weight))
        targets = tuple(weight.target for weight in weights)
        work = FactorWork(targets, settings.distribute_scale, before, total, settings.intruder_scale)
        yield work.product(f"factors of {layer}", steps)
        before += sum(weight.size for weight in weights)


# ---- the second plan


def follow(prepared: Prepared, arrays: Mapping[str, Arrays], built: BuiltModel | None, _max_bytes: int | None) -> SecondPlan:
    """The plan of the adapter, with the report.

    arrays  of the products of the first plan, by name
    built   the model that transformers builds of the base; None: ask

    Raises PlanError if nothing differs, or if the adapter has no place for something that does; FormatError for a plan that we
    did not make.
    """
    plan = prepared.plan
    settings: Any = None if plan.then is None else plan.then.settings
    if not has_type(settings, ExtractionSettings) or len(plan.models) != 2 or settings["out_dtype"] not in DTYPE_NAMES:
        raise FormatError("not a plan that can be run", where="then", fix="make the plan again")
    following = ExtractionSettings(**settings)
    matrices = list(_matrices(plan, arrays))
    with as_plan_error(ParameterError):
        ranks = choose_ranks(
            [matrix.spectrum for matrix in matrices],
            energy=following.energy,
            max_parameters=following.max_parameters,
            sv_epsilon=following.sv_epsilon,
            groups=[matrix.target.group for matrix in matrices],
        )
    matrices = [replace(matrix, rank=rank) for matrix, rank in zip(matrices, ranks, strict=True)]
    compared = next((product for product in plan.products if product.op == "changes"), None)
    steps_compared = () if compared is None else compared.steps
    largest = () if compared is None else arrays[compared.name][0].tolist()
    differing = [step.out.name for step, change in zip(steps_compared, largest, strict=True) if change]
    _check_something_differs(prepared, matrices, differing)
    left_out = {name: why for name, why in following.left_out.items() if name in differing}
    if following.layout != "peft":
        built = guessed(prepared.inputs[_BASE], "")
    elif built is None:
        built = built_of(prepared.inputs[_BASE])
    adapter = _Adapter(prepared, built, following)
    matrices = adapter.add_factors(matrices)
    adapter.add_whole(steps_compared, [name for name in differing if name not in left_out])
    places = adapter.places
    steps = [step for matrix in adapter.ranked.values() for step in adapter.factor_steps(matrix)]
    whole = [key for keys in places.whole.values() for key in keys]
    steps += [adapter.whole_step(key) for key in (*whole, *places.in_place)]
    unknown = built.unknown if following.layout == "peft" else ""
    report = Extraction(tuple(matrices), tuple(places.whole), left_out, tuple(places.in_place), unknown)
    grown = any(step.op == COPY and step.out.name not in left_out for step in steps_compared)
    draft = PlanDraft.of(plan)
    title = f"{plan.provenance.title[:-1]}: the adapter that makes `{plan.models[_TUNED].ref}` of the base."
    draft.provenance, draft.then = replace(plan.provenance, title=title), None
    draft.steps, draft.config = steps, adapter.config(matrices)
    draft.products = [product for product in plan.products if product.op == "factors"]
    tuned = prepared.inputs[_TUNED]
    draft.carried = [name for name in tuned.files if is_read(name) and name != "config.json"] if grown else []
    if not grown and following.layout in _FOLDERS:
        draft.carried = _tokenizer(prepared)
    draft.donor = _TUNED if draft.carried else _BASE
    draft.recipe, draft.follows_recipe = _command(plan, following), False
    return SecondPlan(prepared.with_plan(draft.finish()), arrays, reports={NAME: report})


def _tokenizer(prepared: Prepared) -> list[str]:
    """The tokenizer files of the fine-tune, if any differs from the base's: no tensor holds a chat template."""
    base, tuned = prepared.inputs[_BASE], prepared.inputs[_TUNED]
    return [name for name in tuned.files if is_tokenizer(name)] if differing_files(tuned, base) else []


FOLLOW_UP = FollowUpKind(follow, question=lambda prepared: partial(built_of, prepared.inputs[_BASE]))
"""An adapter, whose ranks follow from singular values. `FollowUp.settings`: the fields of `ExtractionSettings`."""


class _Adapter:
    """The adapter that follows: places in the model for what was decomposed and for what differs."""

    def __init__(self, prepared: Prepared, built: BuiltModel, following: ExtractionSettings) -> None:
        self.inputs, self.built, self.following = prepared.inputs, built, following
        self.places = AdapterPlaces(built)
        self.ranked: dict[str, AdapterMatrix] = {}
        self._reads: dict[str, tuple[Read, ...]] = {}  # tensor of the model → what the fine-tune has there
        listed = (prepared.inputs[_BASE].config or {}).get("architectures")
        self._causal = isinstance(listed, list) and any("CausalLM" in str(name) for name in listed)
        self._factors = {
            step.out.name: step for product in prepared.plan.products if product.op == "factors" for step in product.steps
        }

    def add_factors(self, matrices: Sequence[AdapterMatrix]) -> list[AdapterMatrix]:
        """Place the factors; returns the matrices that have a place. The others are saved whole."""
        lost = set[str]()
        for target in {matrix.target.module: matrix.target for matrix in matrices if matrix.rank}.values():
            if self.following.layout != "peft":
                self.places.modules[target.module] = target
            elif not self.places.add_factors(target):
                lost.add(target.module)
        kept = [matrix for matrix in matrices if matrix.target.module not in lost]
        first = {matrix.target.module: matrix for matrix in reversed(kept) if matrix.rank}
        for name, target in (*self.places.modules.items(), *self.places.parameters.items()):
            self.ranked[name] = first[target.module]
        self._lost = [matrix.target for matrix in matrices if matrix.target.module in lost]
        if not self.ranked:
            what = f"PEFT gives factors to none of the {len(lost):,} modules that differ, such as {min(lost)}"
            raise PlanError([Unsupported(what, where=self.inputs[_TUNED].ref, fix="name a language model")])
        return kept

    def _stored(self, compared: Sequence[Step]) -> dict[str, Read]:
        """Where the fine-tune has each tensor of the base; the base's own where it is excluded."""
        tuned = self.inputs[_TUNED]
        stored = {step.out.name: step.inputs[0] for step in compared}
        for step in self._factors.values():
            for leaf in step.leaves:
                if len(leaf.inputs) == 2:
                    stored[leaf.inputs[1].tensor] = replace(leaf.inputs[0], view=None)
        for name, spec in self.inputs[_BASE].specs.items():
            if name not in stored:  # excluded, or what is not compared: a count of steps
                new = name in tuned.specs and (is_buffer(spec) or not spec.dtype.floating)
                stored[name] = Read(_TUNED if new else _BASE, name)
        return stored

    def add_whole(self, compared: Sequence[Step], differing: Sequence[str]) -> None:
        """Place the tensors that differ and have no factors. Raises PlanError with those that have no place."""
        stored = self._stored(compared)
        problems: list[str] = []
        reads_of_key: dict[str, Read] = {}
        parts = [leaf for target in self._lost for name in target.matrices for leaf in self._factors[name].leaves]
        lost = {leaf.inputs[1].tensor for leaf in parts}
        for name in [*differing, *lost]:
            key = self.built.key(name)
            same = name == TIED_HEAD and any(read == stored[name] for other_name, read in stored.items() if other_name != name)
            if not key and not same:  # a head that is the embedding is not one of every model
                problems.append(f"{name}: the model that transformers builds has no such tensor")
            elif key:
                reads_of_key[key] = stored[name]
        shared = {key for group in self.built.tied if len(group) > 2 or not self._causal for key in group}
        for key, read in list(reads_of_key.items()):
            group = self.built.group(key)
            known = [other_name for other_name in group if other_name in reads_of_key]
            if len(group) == 1 or not known:
                continue
            alike = len({reads_of_key[other_name] for other_name in known}) == 1
            if alike and (len(group) > 2 or not self._causal):  # PEFT changes all that share it, and so do our readers
                for other_name in known:
                    del reads_of_key[other_name]
                kept = next((other_name for other_name in group if other_name in self.built.sources), key)
                reads_of_key[kept] = read
            elif len(group) > 2:
                problems.append(f"{key}: the base shares it with {', '.join(group[:3])}, and the fine-tune does not")
            else:
                (other,) = set(group) - {key}
                reads_of_key.setdefault(other, read)
                shared.difference_update(group)
        for name, read in stored.items():
            if key := self.built.key(name):
                self._reads.setdefault(key, (read,))
        for key, sources in self.built.sources.items():
            if key in self.built.operations:
                self._reads[key] = tuple(stored[name] for name in sources)
        self._reads |= {key: (read,) for key, read in reads_of_key.items() if key not in self.built.operations}
        self.places.add_whole(reads_of_key, self._reads, shared)
        problems += self._misfits()
        if problems:
            what = f"PEFT's adapters have no place for {len(problems):,} tensors that differ from {self.inputs[_BASE].ref}"
            fix = "leave them out: --exclude (exclude=...) with their names"
            raise PlanError([Unsupported(what, where=self.inputs[_TUNED].ref, details=problems, fix=fix)])

    def _misfits(self) -> Iterator[str]:
        """The tensors of the adapter that have another shape in the model that transformers builds, or are made of others."""
        for key in (*(key for keys in self.places.whole.values() for key in keys), *self.places.in_place):
            shape, operations = self._spec(key).shape, self.built.operations.get(key)
            expected = self.built.tensors.get(key)
            grown = expected is not None and is_vocabulary(self._spec(key)) and expected[1:] == shape[1:]
            if operations and not self.built.fused(key):
                yield f"{key}: transformers makes it of {', '.join(self.built.sources[key][:3])} ({', '.join(operations)})"
            elif expected != shape and not grown:
                there = "in the model that transformers builds"
                there = f"which is not {there}" if expected is None else f"{list(expected)} {there}"
                yield f"{key}: {list(shape)} in the fine-tune, {there}"

    def _spec(self, key: str) -> TensorSpec:
        """A tensor of the fine-tune, under the model's name, in the dtype that it has on disk."""
        reads = self._reads[key]
        model = self.inputs[reads[0].model]
        first, dtype = model.specs[reads[0].tensor], model.natural_dtype(reads[0].tensor)
        return TensorSpec(key, dtype, self.built.tensors[key] if len(reads) > 1 else first.shape)

    def factor_steps(self, matrix: AdapterMatrix) -> Iterator[Step]:
        """A and B with the first `rank` of their rows and columns."""
        dtype = BY_TORCH_NAME[self.following.out_dtype]
        target, rank, count = matrix.target, matrix.rank, max(1, matrix.target.experts)
        place = next(name for name, ranked in self.ranked.items() if ranked is matrix)
        a, b, *_ = target.outs((matrix.spectrum.rows, matrix.spectrum.cols))
        (outputs, known), inputs = b.shape, a.size // (count * target.rank)
        names = self.places.factors(place)
        blocks = Block(0, count, rank * inputs, a.size // count), Block(0, outputs, rank * count, known)
        shapes = (count * rank, inputs), (outputs, rank * count)
        reads = Read(PRODUCTS, a.name, blocks[0]), Read(PRODUCTS, b.name, blocks[1])
        for name, shape, read in zip(names, shapes, reads, strict=True):
            yield Step.copy(TensorSpec(name, dtype, shape), read, a.dtype)

    def whole_step(self, key: str) -> Step:
        """A tensor of the fine-tune, as PEFT names it."""
        reads, out = self._reads[key], replace(self._spec(key), name=self.places.saved(key))
        pieces = []
        for read in reads:
            spec = self.inputs[read.model].specs[read.tensor]
            pieces.append(Step.copy(TensorSpec(read.tensor, out.dtype, spec.shape), replace(read, view=None), spec.dtype))
        return replace(pieces[0], out=out) if len(pieces) == 1 else Step(out, JOIN, (), pieces=tuple(pieces))

    def config(self, matrices: Sequence[AdapterMatrix]) -> dict[str, Any]:
        """adapter_config.json."""
        base, places = self.inputs[_BASE], self.places
        cached = hub_id_of(base.ref)
        return places.config(
            cached or base.ref.partition("@")[0],
            Path(base.ref).name if cached else base.revision,
            {name: matrix.rank for name, matrix in self.ranked.items()},
            places.target_modules(),
            transposed=any(target.form == "transposed" for target in places.modules.values()),
            causal=self._causal,
            rank=next((matrix.rank for matrix in matrices if matrix.rank and matrix.target.group), None),
        )


def _matrices(plan: Plan, arrays: Mapping[str, Arrays]) -> Iterator[AdapterMatrix]:
    for product in plan.products:
        if product.op != "factors":
            continue
        shapes = {step.out.name: step.out.shape for step in product.steps}
        product_arrays = iter(arrays[product.name])
        for target in FactorWork.of(product).targets:
            _, _, values, facts = (next(product_arrays) for _ in range(4))
            rows, cols = shapes[target.matrices[0]]
            for name, singular_values, facts_of_matrix in zip(
                target.matrices, np.atleast_2d(values), np.atleast_2d(facts).tolist(), strict=True
            ):
                *known, intruders = facts_of_matrix
                spectrum = Spectrum(rows, cols, singular_values, *known)
                yield AdapterMatrix(name.removesuffix(".weight"), target, spectrum, 0, int(intruders))


def _check_something_differs(prepared: Prepared, matrices: Sequence[AdapterMatrix], differing: Sequence[str]) -> None:
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


def _command(plan: Plan, following: ExtractionSettings) -> str:
    """The settings, for the card."""
    base, tuned = (model.ref for model in plan.models)
    chosen = {key: value for key, value in asdict(following).items() if value not in (None, 0.0) and key != "left_out"}
    work = [FactorWork.of(product) for product in plan.products if product.op == "factors"]
    largest = max(target.rank for product_work in work for target in product_work.targets)
    settings = {"finetuned": tuned, "base": base, "max_rank": largest, **chosen, "distribute_scale": work[0].spread}
    if work[0].intruders != 1:
        settings["intruder_scale"] = work[0].intruders
    return yaml.safe_dump({COMMAND: settings}, sort_keys=False, allow_unicode=True)
