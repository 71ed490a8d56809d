"""A plan from its JSON, and the inputs it was made for: what a process needs to run a plan that another one made."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from weightsmith import methods
from weightsmith.checkpoint import Checkpoint, open_checkpoint
from weightsmith.encodings import find_encoding
from weightsmith.errors import CheckpointError, FormatError, PlanError, WeightsmithError
from weightsmith.formats.files import show
from weightsmith.formats.strict_json import read_object
from weightsmith.methods import user_files
from weightsmith.methods.base import Parameter
from weightsmith.planner.build import Prepared, code_files
from weightsmith.planner.inputs import open_models
from weightsmith.planner.parameters import coerce
from weightsmith.plans import COPY, FILL, PERTURB, PLAIN, PRODUCTS, Gather, ModelInput, Plan, Read, Step, Value, plan_from_json
from weightsmith.products import find_kind
from weightsmith.recipe import ModelRef
from weightsmith.recipe.references import parse_reference
from weightsmith.structure import analyse
from weightsmith.tensors import TensorSpec

MAX_PLAN_BYTES = 256 << 20  # 100,000 tensors of two models take 28 MB
_MAX_PLAN_MEMORY = 2 << 30
_MAX_ARRAYS = 8 << 30  # bytes of one product: the router of the largest mixtures takes 0.2 GB
_MAKE = "make it with: weightsmith plan RECIPE --json > plan.json"

_NEEDED = {
    FILL: frozenset({"value"}),
    PERTURB: frozenset({"expert", "part", "noise_scale", "noise_fraction", "drop_fraction", "factor"}),
}
"""Parameters of the ops that are no merge methods."""


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a JSON file. Raises FormatError, NotFound and CheckpointError."""
    return plan_from_json(read_object(Path(path), MAX_PLAN_BYTES, "the plan", _MAKE, max_memory=_MAX_PLAN_MEMORY))


def reopen(plan: Plan, *, allow_code: bool = False) -> Prepared:
    """The inputs of a plan, opened, and checked to be what the plan was made for. Close it, or use `with`.

    allow_code  run the user's own file that the merge method comes from, if there is one

    Raises PlanError with every problem: models that are missing or have changed, and steps that do not fit them.
    """
    _load_method(plan, allow_code=allow_code)
    with ExitStack() as stack:
        problems: list[WeightsmithError] = []
        refs = []
        for model in plan.models:
            ref = parse_reference(model.ref, model.ref)
            if isinstance(ref, ModelRef):
                refs.append(ref)
            else:
                problems.append(ref)
        if problems:
            raise PlanError(problems)
        inputs: list[Checkpoint] = []
        for planned, ref in zip(plan.models, refs, strict=True):
            found = _open(planned, ref, stack)
            if isinstance(found, Checkpoint):
                inputs.append(found)
            else:
                problems += found
        if problems:
            raise PlanError(problems)
        problems = _check_carried(plan, inputs[plan.donor]) or _check_steps(plan, inputs)
        if problems:
            raise PlanError(problems[:20])
        structure = analyse(list(inputs[plan.donor].specs.values()), inputs[plan.donor].config)
        stack.pop_all()
        return Prepared(plan, tuple(inputs), structure, named=code_files(plan))


def _open(planned: ModelInput, ref: ModelRef, stack: ExitStack) -> Checkpoint | list[WeightsmithError]:
    """The model that was planned; or why it is not there. One whose codes are only moved is opened without decoding them."""
    (opened,), problems = open_models([ref], stack)
    if opened is not None and opened.identity == planned.identity:
        return opened
    if ref.lora is None and (opened is None or opened.quantised is None):
        try:
            raw = open_checkpoint(ref.path, revision=ref.revision or None, raw=True, download=False)
        except WeightsmithError:
            return problems
        stack.callback(raw.close)
        if raw.identity == planned.identity:
            return raw
    return problems or [
        CheckpointError(
            "this is not the model that the plan was made for: names, shapes or sizes differ",
            where=planned.ref,
            details=[f"planned  {planned.identity}", f"found    {opened.identity if opened is not None else ''}"],
            fix="make the plan again, or restore the model",
        )
    ]


def _load_method(plan: Plan, *, allow_code: bool) -> None:
    """Make a merge method of the user's own known, and check that it is the one that was planned."""
    code = plan.made.code
    if code is None:
        return
    if code.folder:
        method = user_files.load_file(code.name, Path(code.folder), allow_code=allow_code)
    else:
        method = user_files.load_installed(code.name)
    if method.name != plan.made.name:
        what = f"the code of the merge method {code.name} has changed since the plan was made"
        raise PlanError([CheckpointError(what, where=code.name, fix="make the plan again")])


def _check_carried(plan: Plan, donor: Checkpoint) -> list[WeightsmithError]:
    """A plan cannot have files copied that no plan of ours would: `id_rsa` beside the weights."""
    wrong = [name for name in plan.carried if name not in donor.files]
    what = "the plan carries a file that the model does not have, or that no loader reads"
    return [FormatError(f"{what}: {show(name)}", where=donor.ref, fix="make the plan again") for name in wrong]


def _check_steps(plan: Plan, inputs: list[Checkpoint]) -> list[WeightsmithError]:
    """What of the steps does not fit the inputs. The values of a plan may come from anyone."""
    problems: list[WeightsmithError] = []
    arrays = {out.name: out for product in plan.products for out in product.outs}
    for product in plan.products:
        if problem := find_kind(product.op).check(product):
            problems.append(FormatError(f"not a plan that can be run: {problem}", where=f"product {product.name}", fix=_MAKE))
        if sum(out.nbytes for out in product.outs) > _MAX_ARRAYS:
            problems.append(FormatError("its arrays do not fit into memory", where=f"product {product.name}", fix=_MAKE))
        known = {*product.needs, *([product.name] if find_kind(product.op).survey else [])}
        steps = product.steps or [step for step in plan.steps if product.name in plan.needs(step)]
        for step in steps if product.steps or product.name in known else ():
            if unknown := plan.needs(step) - known:
                problems.append(_wrong(step, f"product {product.name} does not say that it needs {min(unknown)}"))
    for step in (*plan.steps, *(step for product in plan.products for step in product.steps)):
        try:
            if step.encoding != PLAIN and find_encoding(step.encoding).outs(step.out) != step.stored:
                raise _wrong(step, f"{step.encoding} does not store it as the plan says")
            if step.encoding != PLAIN and any(piece.out.shape[1:] != step.out.shape[1:] for piece in step.pieces):
                raise _wrong(step, f"{step.encoding} stores whole rows, and its pieces have other rows")
            for leaf in step.leaves:
                _check_leaf(plan, leaf, inputs, arrays)
        except WeightsmithError as error:
            problems.append(error)
    return problems


def _check_leaf(plan: Plan, leaf: Step, inputs: list[Checkpoint], arrays: dict[str, TensorSpec]) -> None:
    _check_settings(plan, leaf)
    for read in leaf.inputs:
        specs = arrays if read.model == PRODUCTS else inputs[read.model].specs
        if read.tensor not in specs:
            raise _wrong(leaf, f"{plan.label(read)} has no tensor {read.tensor!r}")
        spec = specs[read.tensor]
        size = _size(plan, leaf, read, spec, arrays)
        if size != leaf.out.size:
            raise _wrong(leaf, f"{read.tensor} gives {size:,} elements, and {leaf.out.size:,} are wanted")
        if leaf.op == COPY and spec.dtype is not leaf.out.dtype:
            raise _wrong(leaf, f"{read.tensor} is {spec.dtype}, and cannot be copied as {leaf.out.dtype}")
        if leaf.op != COPY and (spec.dtype.code < 0 or leaf.out.dtype.code < 0):
            raise _wrong(leaf, f"{leaf.op} computes with numbers, and {read.tensor} is {spec.dtype}")


def _check_settings(plan: Plan, leaf: Step) -> None:
    """The parameters are those of the op, in kind and range."""
    settings = plan.settings[leaf.settings]
    if not leaf.merges:
        if missing := _NEEDED.get(leaf.op, frozenset()).difference(settings.shared):
            raise _wrong(leaf, f"{leaf.op} needs {', '.join(sorted(missing))}")
        if leaf.op != FILL and len(leaf.inputs) < 1:
            raise _wrong(leaf, f"{leaf.op} needs an input")
        return
    method = methods.get(leaf.op)
    count = len(leaf.inputs) - leaf.base
    if count < 1 or (method.base == "required" and not leaf.base) or (method.base == "input" and leaf.base):
        raise _wrong(leaf, f"{count} models {'and' if leaf.base else 'without'} a base are not what {leaf.op} takes")
    takers = settings.models[1:] if leaf.base else settings.models
    for parameter in method.parameters:
        for values in (settings.shared,) if parameter.scope == "tensor" else takers:
            value = values.get(parameter.name)
            if not _fits(parameter, value):
                raise _wrong(leaf, f"{parameter.name} is {value!r}")
    if problem := method.check(settings.shared, settings.models):
        raise _wrong(leaf, problem)


def _fits(parameter: Parameter, value: Value | None) -> bool:
    """The value is one that a recipe could have resolved to."""
    if value is None:
        return parameter.optional
    try:
        return coerce(parameter, value) == value and isinstance(value, bool) == (parameter.kind == "bool")
    except (ValueError, OverflowError):
        return False


def _size(plan: Plan, leaf: Step, read: Read, spec: TensorSpec, arrays: dict[str, TensorSpec]) -> int:
    """Elements of a read. Raises FormatError for a view that is not inside the tensor."""
    view = read.view
    if view is None:
        return spec.size
    block = view.block if isinstance(view, Gather) else view
    if block.end > spec.size or (block.stride < block.cols and block.rows > 1):
        raise _wrong(leaf, f"a block of {read.tensor} ends at element {block.end:,} of {spec.size:,}")
    if not isinstance(view, Gather):
        return block.rows * block.cols
    if isinstance(view.table, str):
        places = arrays[view.table].size
        if arrays[view.table].dtype.name != "I32":
            raise _wrong(leaf, f"{view.table} is no table of int32")
    else:
        places = len(plan.tables[view.table].data) // 4
    return places * (block.cols if view.axis == 0 else block.rows)


def _wrong(step: Step, what: str) -> FormatError:
    return FormatError(f"the plan does not fit its inputs: {what}", where=f"step {step.out.name}")
