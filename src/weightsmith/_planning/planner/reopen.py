"""A plan from its JSON, and the inputs it was made for: what a process needs to run a plan that another one made."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from weightsmith import _methods as methods
from weightsmith._activations.statistics import find_statistic
from weightsmith._base.errors import CheckpointError, FormatError, MethodError, PlanError, WeightsmithError
from weightsmith._base.files import show
from weightsmith._base.strict_json import read_object
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._engine.products import find_kind
from weightsmith._files.containers import GGUF, GGUF_ADAPTER
from weightsmith._files.copied import is_read
from weightsmith._files.safetensors import collector_paused
from weightsmith._methods import user
from weightsmith._methods.method import Parameter
from weightsmith._models.checkpoint import Checkpoint, HubModel, locate, open_checkpoint
from weightsmith._models.formats import find_encoding
from weightsmith._models.formats.gguf.cuts import CutEncoding
from weightsmith._models.formats.gguf.header import check_keys
from weightsmith._models.formats.gguf.imatrix import are_importances
from weightsmith._models.formats.gguf.writing import DiffusionEncoding
from weightsmith._models.formats.verbatim import are_alike, fills
from weightsmith._models.lora import open_adapter
from weightsmith._models.lora.exact import as_lora, needs_base
from weightsmith._models.structure import analyse
from weightsmith._planning.planner.inputs import open_models
from weightsmith._planning.planner.parameters import coerce
from weightsmith._planning.planner.prepared import Prepared, Stage, code_files
from weightsmith._planning.recipe import ModelRef
from weightsmith._planning.recipe.values import parse_reference
from weightsmith._plans import (
    COPY,
    FILL,
    PERTURB,
    PLAIN,
    PRODUCTS,
    Gather,
    ModelInput,
    Plan,
    Product,
    Read,
    Step,
    Value,
    plan_from_json,
)
from weightsmith.abc.stored import Encoding, maximum_name

MAX_PLAN_BYTES = 256 << 20  # 100,000 tensors of two models take 28 MB
_MAX_PLAN_MEMORY = 2 << 30
_MAX_ARRAYS = 8 << 30  # bytes of one product: the router of the largest mixtures takes 0.2 GB
_MAKE = "create it with: weightsmith plan RECIPE --json > plan.json"

_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
"""Names of factors that are computed from tensors of another kind of adapter."""

_NEEDED = {
    FILL: frozenset({"value"}),
    PERTURB: frozenset({"expert", "part", "noise_scale", "noise_fraction", "drop_fraction", "factor"}),
}
"""Parameters of the ops that are no merge methods."""


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a JSON file. Raises FormatError, NotFound and CheckpointError."""
    if os.fspath(path).endswith((".yml", ".yaml")):
        raise FormatError("this is a recipe, not a plan", where=os.fspath(path), fix=f"{_MAKE}; or merge it: weightsmith merge")
    with collector_paused():
        return plan_from_json(read_object(Path(path), MAX_PLAN_BYTES, "the plan", _MAKE, max_memory=_MAX_PLAN_MEMORY))


def reopen(plan: Plan, *, allow_code: bool = False) -> Prepared:
    """The inputs of a plan, opened, and checked to be what the plan was made for. Close it, or use `with`.

    allow_code  run the user's own file that the merge method comes from, if there is one

    Raises PlanError with every problem: models that are missing or have changed, and steps that do not fit them.
    """
    _load_method(plan, allow_code=allow_code)
    with ExitStack() as stack:
        problems: list[WeightsmithError] = []
        refs = [parse_reference(m.ref, m.ref) if m.plan is None else ModelRef(m.ref, text=m.ref) for m in plan.models]
        problems += [ref for ref in refs if not isinstance(ref, ModelRef)]
        if problems:
            raise PlanError(problems)
        inputs: list[Checkpoint] = []
        stages: list[Stage] = []
        for number, (planned, ref) in enumerate(zip(plan.models, refs, strict=True)):
            assert isinstance(ref, ModelRef)
            opened = _open(plan, number, ref, stack) if planned.plan is None else _computed(planned, stack, stages, allow_code)
            if isinstance(opened, Checkpoint):
                inputs.append(opened)
            else:
                problems += opened
        if problems:
            raise PlanError(problems)
        problems = [*_check_carried(plan, inputs[plan.donor]), *_check_copies(plan, inputs)] or _check_steps(plan, inputs)
        if problems:
            raise PlanError(problems[:20])
        structure = analyse(list(inputs[plan.donor].specs.values()), inputs[plan.donor].config)
        stack.pop_all()
        named = [path for stage in stages for path in code_files(stage.plan)]
        named += [*code_files(plan), *_files(plan, inputs)]
        return Prepared.of_plan(plan, tuple(inputs), structure, named, stages)


def _files(plan: Plan, inputs: list[Checkpoint]) -> list[Path]:
    """The files that products read. Call after `_check_steps`."""
    listed = [inputs[file.model].folder / file.name for product in plan.products for file in product.files]
    return [*listed, *(path for product in plan.products for path in find_kind(product.op).reads(product))]


def _computed(
    planned: ModelInput, stack: ExitStack, stages: list[Stage], allow_code: bool
) -> Checkpoint | list[WeightsmithError]:
    """The result of another plan, computed when it is read; or why it cannot be. Adds to `stages`."""
    assert planned.plan is not None
    try:
        prepared = reopen(planned.plan, allow_code=allow_code)
    except PlanError as error:
        return list(error.problems)
    stack.callback(prepared.close)
    stage = Stage.of(planned.ref, planned.ref, prepared.plan, prepared.inputs, prepared.stages)
    if stage.why:
        return [FormatError(f"cannot be computed when it is read: {stage.why}", where=planned.ref, fix=_MAKE)]
    stages += [*prepared.stages, stage]
    result = stage.result()
    return result if result.identity == planned.identity else [_differs(planned, result.identity)]


def _differs(planned: ModelInput, identity: str) -> CheckpointError:
    what = "this is not the model that the plan was made for: names, shapes or sizes differ"
    details = [f"planned  {planned.identity}", f"found    {identity}"]
    return CheckpointError(what, where=planned.ref, details=details, fix="make the plan again, or restore the model")


def _open(plan: Plan, number: int, ref: ModelRef, stack: ExitStack) -> Checkpoint | list[WeightsmithError]:
    """The model that was planned; or why it is not there. One whose codes are only moved is opened without decoding them."""
    planned = plan.models[number]
    ref = _pinned(ref, planned)
    (opened,), problems = open_models([ref], stack, plain=True)  # whoever made the plan has said so, if it was necessary
    if opened is None and ref.lora is None:
        try:
            adapter = open_adapter(ref.path, revision=ref.revision or None)
        except WeightsmithError:
            pass
        else:
            stack.callback(adapter.checkpoint.close)
            opened = adapter.checkpoint
            if adapter.others and opened.identity != planned.identity:
                shapes = _shapes(plan, number) if needs_base(adapter) else {}
                with suppress(WeightsmithError):
                    opened = as_lora(adapter, shapes).checkpoint
    if opened is not None and opened.identity == planned.identity:
        return _unchanged(planned, opened)
    if opened is not None and opened.verbatim is not None and opened.verbatim.source.identity == planned.identity:
        return _unchanged(planned, opened.undecoded())
    if ref.lora is None and (opened is None or opened.quantised is None):
        try:
            raw = open_checkpoint(ref.path, revision=ref.revision or None, raw=True, download=False)
        except WeightsmithError:
            return problems
        stack.callback(raw.close)
        if raw.identity == planned.identity:
            return _unchanged(planned, raw)
    return problems or [_differs(planned, opened.identity if opened is not None else "")]


def _shapes(plan: Plan, number: int) -> dict[str, tuple[int, ...]]:
    """Outputs and inputs of modules of an adapter, as the plan reads factors of them. The adapter's identity confirms them."""
    sides: dict[str, dict[str, int]] = {}
    for step in plan.all_steps:
        for leaf in step.leaves:
            for read in leaf.inputs:
                match = _FACTOR.fullmatch(read.tensor) if read.model == number else None
                if match and len(leaf.out.shape) == 2:
                    sides.setdefault(match[1], {})[match[2]] = leaf.out.shape[match[2] == "A"]
    return {module: (known["B"], known["A"]) for module, known in sides.items() if len(known) == 2}


def _pinned(ref: ModelRef, planned: ModelInput) -> ModelRef:
    """The reference with the commits that the plan was made for, whatever the branches stand for now."""
    base, _, adapter = planned.revision.partition("+")
    lora = ref.lora
    if lora is not None and adapter and _is_on_hub(lora):
        lora = replace(lora, revision=adapter)
    return replace(ref, revision=base if base and _is_on_hub(ref) else ref.revision, lora=lora)


def _is_on_hub(ref: ModelRef) -> bool:
    return isinstance(locate(ref.path, ref.revision or None), HubModel)


def _unchanged(planned: ModelInput, opened: Checkpoint) -> Checkpoint | list[WeightsmithError]:
    """The model; or that its files, with names and shapes as planned, have another revision or other weights."""
    for then, now in ((planned.revision, opened.revision), (planned.sample, opened.sample())):
        if then != now:
            what = "the files of this model have changed since the plan was made"
            details = [f"planned  {then}", f"found    {now}"]
            return [CheckpointError(what, where=planned.ref, details=details, fix="make the plan again")]
    return opened


def _load_method(plan: Plan, *, allow_code: bool) -> None:
    """Make a merge method of the user's own known, and check that it is the one that was planned."""
    code = plan.provenance.code
    if code is None:
        return
    if code.folder == user.PROCESS:
        if user.loaded(plan.provenance.name) is None:
            what = f"merge_method {code.name} is a function of the Python process that made the plan"
            fix = f"write it into a file, name it in the recipe as ./my_method.py:{code.name}, and make the plan again"
            raise PlanError([MethodError(what, fix=fix)])
        return
    if code.folder:
        method = user.load_file(code.name, Path(code.folder), allow_code=allow_code)
    else:
        method = user.load_installed(code.name)
    if method.name != plan.provenance.name:
        what = f"the code of the merge method {code.name} has changed since the plan was made"
        raise PlanError([CheckpointError(what, where=code.name, fix="make the plan again")])


def _check_carried(plan: Plan, donor: Checkpoint) -> list[WeightsmithError]:
    """A plan may copy only files that our own plans would copy, never an `id_rsa`."""
    wrong = [name for name in plan.carried if name not in donor.files]
    parts = {f"{part}/config.json" for part in plan.naming.parts}
    wrong += [name for name in plan.files if not is_read(name) and name not in parts]
    what = "the plan carries a file that the model does not have, or that no loader reads"
    return [FormatError(f"{what}: {show(name)}", where=donor.ref, fix="make the plan again") for name in wrong]


def _check_copies(plan: Plan, inputs: list[Checkpoint]) -> list[WeightsmithError]:
    """Tensors that a run is to compare and their model does not have."""
    named = ((inputs[copy.model], name) for copy in plan.copies for name in (copy.tensor, copy.other))
    absent = [(model, name) for model, name in named if name not in model.specs]
    what = "not a plan that can be run: it compares a tensor that the model does not have"
    return [FormatError(f"{what}: {show(name)}", where=model.ref, fix=_MAKE) for model, name in absent]


def _check_steps(plan: Plan, inputs: list[Checkpoint]) -> list[WeightsmithError]:
    """What of the steps does not fit the inputs. The values of a plan may come from anyone."""
    problems: list[WeightsmithError] = []
    arrays = {out.name: out for product in plan.products for out in product.outs}
    if plan.container in (GGUF, GGUF_ADAPTER):
        for name, header in (("header", plan.header), *([("mmproj", plan.mmproj)] if plan.mmproj else [])):
            try:
                check_keys(header, Path(name))
            except WeightsmithError as error:
                problems.append(FormatError(f"not a plan that can be run: {error.finding.what}", where=name, fix=_MAKE))
    for product in plan.products:
        where = f"product {product.name}"
        problems += [FormatError(problem, where=where, fix=_MAKE) for problem in _product_problems(product)]
        known = {*product.needs, *([product.name] if find_kind(product.op).reduce else [])}
        steps = product.steps or [step for step in plan.steps if product.name in plan.needs(step)]
        for step in steps if product.steps or product.name in known else ():
            if unknown := plan.needs(step) - known:
                problems.append(_wrong(step, f"{where} does not say that it needs {min(unknown)}"))
    if problems:
        return problems
    for step in plan.all_steps:
        try:
            if step.encoding != PLAIN:
                _check_encoding(plan, step, arrays)
            for leaf in step.leaves:
                _check_leaf(plan, leaf, inputs, arrays)
        except WeightsmithError as error:
            problems.append(error)
    return problems


def _product_problems(product: Product) -> Iterator[str]:
    kind, invalid = find_kind(product.op), "not a plan that can be run"
    if product.transient != kind.transient:
        yield f"{invalid}: the arrays of '{product.op}' are {'not ' * product.transient}transient"
    if problem := kind.check(product):
        yield f"{invalid}: {problem}"
    if len({step.out.name for step in product.steps}) < len(product.steps):
        yield f"{invalid}: two of its steps have one name"
    if not product.transient and sum(out.nbytes for out in product.outs) > _MAX_ARRAYS:
        yield "its arrays do not fit into memory"


def _check_encoding(plan: Plan, step: Step, arrays: dict[str, TensorSpec]) -> None:
    """The tensors that a step stores are those of its encoding; in a GGUF file, under other names."""
    encoding, name = find_encoding(step.encoding), maximum_name(step.out.name)
    outs = encoding.outs(step.out)
    if plan.container in (GGUF, GGUF_ADAPTER):
        outs = tuple(replace(out, name=stored.name) for out, stored in zip(outs, step.stored, strict=False))
    if step.verbatim:
        if not are_alike(outs, step.stored) or not all(fills(piece.out, step.stored[n]) for piece, n, _ in step.places):
            raise _wrong(step, f"{step.encoding} does not store it as the plan says")
        return
    if outs != step.stored:
        raise _wrong(step, f"{step.encoding} does not store it as the plan says")
    if any(not _fills_rows(encoding, piece.out, step.out) for piece in step.pieces):
        raise _wrong(step, f"{step.encoding} stores whole rows, and its pieces have other rows")
    if isinstance(encoding, CutEncoding) and any(math.prod(piece.out.shape[:-1]) % encoding.height for piece in step.pieces):
        raise _wrong(step, f"{step.encoding} stores whole bands of rows, and its pieces have others")
    if step.weighted < 0 and encoding.importances == "must":
        kinds = " and ".join(out.dtype.name for out in step.stored)
        raise _wrong(step, f"{kinds} cannot be encoded without importances")
    if step.weighted >= 0:
        cols, count = step.out.shape[-1], len(plan.tables[step.weighted].data) // 4
        if count not in encoding.importance_counts(step.out):
            raise _wrong(step, f"its {count:,} importances are not one for each of {cols:,} columns")
        if not are_importances(plan.tables[step.weighted].floats):
            raise _wrong(step, "its importances are negative, not finite or too large")
    maxima = arrays.get(name)
    fits = maxima is not None and (maxima.dtype.name, maxima.shape) == ("F32", (1,)) and plan.maker[name] in plan.needs(step)
    if encoding.maxima and not fits:
        raise _wrong(step, f"{step.encoding} needs the array {name!r} of a product")


def _fills_rows(encoding: Encoding, piece: TensorSpec, out: TensorSpec) -> bool:
    """Whether the tiles of a piece are whole rows of the tensor."""
    cols, whole = (spec.shape[-1] if len(spec.shape) > 1 else 1 for spec in (piece, out))
    if isinstance(encoding, DiffusionEncoding) and encoding.folded:
        return bool(whole) and piece.size % whole == 0 and cols * encoding.align_rows % whole == 0
    return cols == whole


def _check_leaf(plan: Plan, leaf: Step, inputs: list[Checkpoint], arrays: dict[str, TensorSpec]) -> None:
    _check_settings(plan, leaf)
    _check_statistics(plan, leaf, arrays)
    for read in leaf.inputs:
        specs = arrays if read.model == PRODUCTS else inputs[read.model].specs
        if read.tensor not in specs:
            raise _wrong(leaf, f"{plan.label(read)} has no tensor {read.tensor!r}")
        spec = specs[read.tensor]
        size = _size(plan, leaf, read, spec, arrays)
        if size != leaf.out.size:
            raise _wrong(leaf, f"{read.tensor} gives {size:,} elements, and {leaf.out.size:,} are wanted")
        for other in read.view.fallback if isinstance(read.view, Gather) else ():
            _check_fallback(plan, leaf, read, other, inputs, arrays)
        if leaf.op == COPY and spec.dtype is not leaf.out.dtype:
            raise _wrong(leaf, f"{read.tensor} is {spec.dtype}, and cannot be copied as {leaf.out.dtype}")
        if leaf.op != COPY and (spec.dtype.code < 0 or leaf.out.dtype.code < 0):
            raise _wrong(leaf, f"{leaf.op} computes with numbers, and {read.tensor} is {spec.dtype}")


def _check_statistics(plan: Plan, leaf: Step, arrays: dict[str, TensorSpec]) -> None:
    """The statistics are those that the method looks at, each of the shape that it has for the tensor; or there are none."""
    if not leaf.statistics:
        return
    required = methods.get(leaf.op).requires(plan.settings[leaf.settings].shared) if leaf.merges else ()
    expected = [(requirement.kind, i) for requirement in required for i in requirement.inputs(len(leaf.inputs), base=leaf.base)]
    if len(leaf.out.shape) != 2 or [(statistic.kind, statistic.input) for statistic in leaf.statistics] != expected:
        raise _wrong(leaf, f"{leaf.op} looks at other statistics of it")
    for statistic in leaf.statistics:
        spec, shape = arrays[statistic.read.tensor], find_statistic(statistic.kind).shape(*leaf.out.shape)
        size = _size(plan, leaf, statistic.read, spec, arrays)
        if spec.dtype.name != "F32" or spec.shape[-1:] != shape[-1:] or size != math.prod(shape):
            raise _wrong(leaf, f"{statistic.read.tensor} does not have the shape of its {statistic.kind}")


def _check_fallback(
    plan: Plan, leaf: Step, read: Read, other: Read, inputs: list[Checkpoint], arrays: dict[str, TensorSpec]
) -> None:
    """Rows that fill those of `read`: as many, of the same length, of numbers."""
    read_spec, other_spec = (
        (arrays if source.model == PRODUCTS else inputs[source.model].specs).get(source.tensor) for source in (read, other)
    )
    if read_spec is None or other_spec is None:
        raise _wrong(leaf, f"{plan.label(other)} has no tensor {other.tensor!r}")
    gather, other_gather = read.view, other.view
    assert isinstance(gather, Gather)
    assert isinstance(other_gather, Gather)
    assert isinstance(gather.table, int)
    same = other_gather.block.cols == gather.block.cols and _size(plan, leaf, other, other_spec, arrays) == leaf.out.size
    numbers = min(other_spec.dtype.code, read_spec.dtype.code) >= 0 or (
        other_spec.dtype is read_spec.dtype and other_spec.dtype.name in DTYPES
    )
    if not same or not numbers:
        raise _wrong(leaf, f"the rows of {other.tensor} cannot replace those of {read.tensor}")


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
    if leaf.out.size and method.needs(settings.shared) and (needed := method.product([(leaf, settings)])) is not None:
        product = next((product for product in plan.products if leaf.needs[:1] == (product.name,)), None)
        if product is None or product.op != needed.op or not find_kind(needed.op).serves(product, needed):
            raise _wrong(leaf, f"{leaf.op} needs a product '{needed.op}' of its models")


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
            raise _wrong(leaf, f"{view.table} is not a table of int32")
    else:
        places = len(plan.tables[view.table].data) // 4
    return places * (block.cols if view.axis == 0 else block.rows)


def _wrong(step: Step, what: str) -> FormatError:
    return FormatError(f"the plan does not fit its inputs: {what}", where=f"step {step.out.name}", fix=_MAKE)
