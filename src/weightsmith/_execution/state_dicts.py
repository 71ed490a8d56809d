"""Merges state dicts in memory, with the same plan, engine and kernels as for files.

Tensors are read in place, tile by tile (`_files/arrays.py`); only the output needs memory of a model's size.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any, Protocol, cast

import numpy as np

from weightsmith._base.errors import (
    Finding,
    MismatchError,
    ParameterError,
    PlanError,
    ShapeError,
    UnknownParameter,
    Unsupported,
    WeightsmithError,
    nearest,
)
from weightsmith._base.tensors import DType, TensorSpec
from weightsmith._base.text import some
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._engine.tile_work import copied
from weightsmith._files.arrays import Bytes, View, view_of
from weightsmith._methods import get
from weightsmith._methods.method import Method, Parameter
from weightsmith._methods.user import OwnMethod, at_hand
from weightsmith._models.sources.composed import StateDict
from weightsmith._models.structure import analyse
from weightsmith._models.structure.projections import fused_parts, role_of
from weightsmith._planning.options import output_dtype
from weightsmith._planning.planner.merges import made_by
from weightsmith._planning.planner.parameters import coerce, taking_part, without
from weightsmith._planning.planner.segments import wanted_models
from weightsmith._planning.planner.steps import DTypes, factor_problems, operation, split_fused, with_needs
from weightsmith._plans import COPY, ModelInput, Plan, PlanDraft, Read, Settings, Step, Value
from weightsmith.abc.output import Finished


def merge_state_dicts(
    method: str | OwnMethod,
    models: Sequence[Mapping[str, Any] | TorchModule],
    *,
    base: Mapping[str, Any] | TorchModule | None = None,
    out_dtype: DType | str | Any = None,
    threads: int | None = None,
    seed: int = 0,
    allow_nonfinite: bool = False,
    **parameters: Any,
) -> dict[str, Any]:
    """Merge models in memory. The result has the same bytes as a merge of the same tensors from files.

    method      as in a recipe, or your own method from `block_method` or `tensor_method`
    models      torch modules, or state dicts: name → numpy array or torch tensor with any strides and device, all with the
                same names and shapes; not modified
    base        the model that the others were fine-tuned from, for methods with a base
    out_dtype   of the floating-point tensors: `"bfloat16"`, a numpy or torch dtype; default: the smallest that holds all inputs
    threads     default: all available processors; does not affect the result
    seed        of random masks (DARE, DELLA, `task_vectors`)
    allow_nonfinite   merge NaN and infinity like any number; else they raise an error that names tensor and model
    parameters  the method's, as in a recipe: one value, or a sequence with one value for each of `models` for per-model
                parameters. Append an underscore to Python keywords: `lambda_`

    Returns the tensors in the base's order (else the first model's): torch tensors on the CPU if these are torch tensors,
    else numpy arrays (ml_dtypes for bf16 and fp8). Names that share a tensor in every model, such as tied embeddings, share
    one in the result. Integers and booleans are copied from the base (else the first model), with a UserWarning if the models
    differ.

    Raises PlanError with all problems before anything is merged; UnknownName; NonFinite; MethodError for your own method.
    Memory: the output's, and a few MB per thread.

    >>> a, b = {"w": np.float32([1, 2])}, {"w": np.float32([3, 6])}
    >>> merge_state_dicts("linear", [a, b], weight=[0.5, 0.5])
    {'w': array([2., 4.], dtype=float32)}
    """
    with nullcontext(get(method)) if isinstance(method, str) else at_hand(method) as chosen:
        held: dict[int, Any] = {}  # a model that is given twice, as the base too, is one state dict
        tensors: Any = [_state_dict(model, held) for model in models] if isinstance(models, list | tuple) else models
        base_state = None if base is None else _state_dict(base, held)
        planned = plan_state_dicts(chosen, tensors, base_state, parameters, out_dtype, seed)
        plan, first = planned.plan, planned.donor
        if any(chosen.requires(settings.shared) for settings in plan.settings):
            what, fix = f"{chosen.name} measures the models on a text", "write a recipe, with the text, and merge checkpoints"
            raise PlanError([Unsupported(f"{what}, and state dicts have none", fix=fix)])
        output = _Output(plan, planned.models[first])
        finished = _run(planned, output, Resources(threads or 0), Workload(allow_nonfinite=allow_nonfinite))
    label = plan.models[first].ref
    differing = [Finding(f"the models differ; taken from {label}", name) for name, done in finished.items() if done.differing]
    for finding in (*plan.warnings, *differing, *copied(finished)):
        warnings.warn(str(finding), stacklevel=2)
    return {name: output.tensors[planned.same.get(name, name)] for name in planned.views[first]}


def _run(planned: Planned, output: _Output, resources: Resources, workload: Workload) -> Mapping[str, Finished]:
    """Fill the output. Errors do not mention files and commands: there are none here."""
    inputs = [StateDict(views, model.ref) for views, model in zip(planned.views, planned.plan.models, strict=True)]
    try:
        return run(planned.plan, inputs, output, resources, workload).finished
    except WeightsmithError as error:
        error.state = ""
        fix = error.finding.fix.replace("--allow-nonfinite (allow_nonfinite=True)", "allow_nonfinite=True")
        error.finding = replace(error.finding, fix=fix)
        raise


class TorchModule(Protocol):
    """A torch module, as far as it matters here."""

    def state_dict(self) -> Mapping[str, Any]: ...


def _state_dict(model: Mapping[str, Any] | TorchModule, held: dict[int, Any]) -> Any:
    """The tensors of a module; anything else as it is. held: those found before, by the identity of their module."""
    if isinstance(model, Mapping) or not callable(getattr(model, "state_dict", None)):
        return model
    return held.setdefault(id(model), model.state_dict())


class _Output(DiscardedOutput):
    """The engine's output: new numpy or torch tensors, whichever `like` has."""

    def __init__(self, plan: Plan, like: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Any] = {}
        self._bytes: dict[str, Bytes] = {}
        torch = sys.modules.get("torch")
        for step in plan.steps:
            name, dtype, shape = step.out.name, step.out.dtype, step.out.shape
            if torch is not None and isinstance(like[name], torch.Tensor):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype.torch))
                self._bytes[name] = tensor.reshape(-1).view(torch.uint8).numpy()
            else:
                tensor = np.empty(shape, dtype.numpy)
                self._bytes[name] = tensor.reshape(-1).view(np.uint8)
            self.tensors[name] = tensor

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        data = np.frombuffer(buffer, np.uint8)
        self._bytes[name][start_byte : start_byte + data.size] = data


# ---- the plan, or every problem at once: what `planner/build.py` does for a recipe and checkpoints on disk


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it reads from.

    models  in the plan's order
    views   of their tensors
    donor   index of the model whose order, integers and kind of tensors the result has
    same    names that are another name's tensor in every model, with that name
    """

    plan: Plan
    models: tuple[Mapping[str, Any], ...]
    views: tuple[Mapping[str, View], ...]
    donor: int
    same: Mapping[str, str]


def plan_state_dicts(
    method: Method,
    models: Sequence[Mapping[str, Any]],
    base: Mapping[str, Any] | None,
    parameters: Mapping[str, Any],
    out_dtype: object,
    seed: int,
) -> Planned:
    """The plan of a merge in memory; see `weightsmith.merge_state_dicts`. No element is read.

    Raises PlanError with all problems.
    """
    problems: list[WeightsmithError] = []
    call = _Call(method, models, base, problems)
    settings = call.settings(parameters)
    asked = _dtype(out_dtype, problems)
    held = tuple(_views(label, model, problems) for label, model in zip(call.labels, call.inputs, strict=True))
    if not problems:
        call.compare(held)
    if problems:
        raise PlanError(problems)
    plan, same = call.plan(held, asked, settings, seed)
    return Planned(plan, tuple(call.inputs), held, call.donor, same)


class _Call:
    """The models of one call in the order in which the method takes them.

    inputs    a base first if the method has one; a base that is an input like the others is the last, unless it is listed
    has_base  inputs[0] is the base
    places    of each input among the user's models; None for a base
    donor     index of the input whose integers, order and kind of tensors the result has
    findings  warnings
    """

    def __init__(
        self,
        method: Method,
        models: Sequence[Mapping[str, Any]],
        base: Mapping[str, Any] | None,
        problems: list[WeightsmithError],
    ) -> None:
        self.method = method
        self.problems = problems
        self.findings: list[Finding] = []
        if isinstance(models, Mapping) or not isinstance(models, Sequence):
            raise PlanError([ParameterError("models must be a list of state dicts", where="models", fix="write [a, b]")])
        self.count = len(models)
        places: list[int | None] = list(range(self.count))
        self.has_base = base is not None and method.base != "input"
        if base is not None:
            listed = next((i for i, model in enumerate(models) if model is base), None)
            if self.has_base:
                places = [None, *(i for i in places if i != listed)]
            elif listed is None:
                places = [*places, None]
        elif method.base == "required":
            fix = "give base=, the model the others came from"
            problems.append(ParameterError(f"method {method.name} needs a base", fix=fix))
        self.places = places
        self.inputs = [models[i] if i is not None else cast("Mapping[str, Any]", base) for i in places]
        self.labels = [f"models[{i}]" if i is not None else "base" for i in places]
        self.donor = next((k for k, model in enumerate(self.inputs) if model is base), 0) if base is not None else 0
        self._check_count()

    @property
    def label(self) -> str:
        """The donor's label."""
        return self.labels[self.donor]

    def _check_count(self) -> None:
        method, count = self.method, len(self.inputs) - self.has_base
        if needed := wanted_models(method, count):
            besides = " besides the base" if self.has_base else ""
            self.problems.append(MismatchError(f"method {method.name} takes {needed} models{besides}, not {count}"))

    # ---- parameters

    def settings(self, arguments: Mapping[str, Any]) -> Settings:
        """The values of all parameters; adds their problems to the list."""
        known = {p.name: p for p in self.method.parameters}
        values: dict[str, Any] = {}
        before = len(self.problems)
        for written, value in arguments.items():
            name = written[:-1] if iskeyword(written[:-1]) and written.endswith("_") else written
            if name not in known:
                others = ", ".join(p + "_" * iskeyword(p) for p in known)
                what = f"method {self.method.name} has no parameter '{written}'{nearest(written, known)}"
                self.problems.append(UnknownParameter(what, fix=f"write one of {others}" if others else "remove it"))
            elif value is not None:
                values[name] = value.item() if isinstance(value, np.generic) else value
                if known[name].ignored:
                    self.findings.append(Finding(f"{name} has no effect: {known[name].ignored}"))
        takers = [k for k in range(len(self.inputs)) if not (self.has_base and k == 0)]
        shared = {p.name: self._one(p, values.get(p.name), "") for p in known.values() if p.scope == "tensor"}
        by_input: list[dict[str, Value | None]] = [{} for _ in self.inputs]
        for p in known.values():
            if p.scope == "model":
                for k, value in zip(takers, self._each(p, values.get(p.name), takers), strict=True):
                    by_input[k][p.name] = value
        if len(self.problems) == before and (wrong := self.method.check(shared, by_input)):
            self.problems.append(ParameterError(wrong))
        return Settings(shared, tuple(by_input))

    def _one(self, parameter: Parameter, value: Any, place: str) -> Value | None:
        """One value as the parameter's kind, or its default."""
        where = parameter.name + place
        if value is None:
            if parameter.required:
                what = f"method {self.method.name} needs the parameter '{where}'"
                self.problems.append(ParameterError(what, fix=f"give {parameter.name}="))
            return parameter.default
        if not isinstance(value, bool | int | float | str):
            kind = type(value).__name__
            many = " for each model" if parameter.scope == "model" else ", for all models and tensors"
            self.problems.append(ParameterError(f"must be one value{many}, not a {kind}", where=where))
            return None
        try:
            return coerce(parameter, value)
        except ValueError as error:
            self.problems.append(ParameterError(f"{error}, not {value!r}", where=where))
            return None

    def _each(self, parameter: Parameter, value: Any, takers: Sequence[int]) -> list[Value | None]:
        """The values of a parameter for the inputs `takers`: one for all, or one for each of the user's models."""
        if isinstance(value, np.ndarray) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str):
            return [self._one(parameter, value, "")] * len(takers)
        if len(value) != self.count:
            what = f"has {len(value)} values, and there are {self.count} models"
            fix = "give one value for each of models, or one for all"
            self.problems.append(ParameterError(what, where=parameter.name, fix=fix))
        elif any(self.places[k] is None for k in takers):
            what = f"the base counts as one more input of {self.method.name}, and has no value"
            fix = "list the base among the models too, with a value of its own"
            self.problems.append(ParameterError(what, where=parameter.name, fix=fix))
        else:
            return [self._one(parameter, value[self.places[k] or 0], f"[{self.places[k]}]") for k in takers]
        return [None] * len(takers)

    # ---- tensors

    def compare(self, held: Sequence[Mapping[str, View]]) -> None:
        """All models must have the same names and shapes."""
        first = held[self.donor]
        details = []
        for label, views in zip(self.labels, held, strict=True):
            missing = [name for name in first if name not in views]
            extra = [name for name in views if name not in first]
            details += [f"{label} has no {some(missing, 3)}"] if missing else []
            details += [f"{label} has {some(extra, 3)}, which {self.label} has not"] if extra else []
        if details:
            fix = "give the same names to the same tensors, and leave out what is not to be merged"
            self.problems.append(MismatchError("the models have different tensors", details=details, fix=fix))
        for name in first:
            specs = [(label, views[name].spec) for label, views in zip(self.labels, held, strict=True) if name in views]
            if any(spec.shape != first[name].spec.shape for _, spec in specs):
                lines = [f"{label}: {list(spec.shape)} {spec.dtype}" for label, spec in specs]
                self.problems.append(ShapeError("the shapes differ", where=name, details=lines))

    def plan(
        self, held: Sequence[Mapping[str, View]], asked: DType | None, settings: Settings, seed: int
    ) -> tuple[Plan, dict[str, str]]:
        """The plan, and names that are another name's tensor in every model."""
        specs = [{name: view.spec for name, view in views.items()} for views in held]
        dtypes, structure = DTypes(asked, specs), analyse(specs[self.donor].values(), None)
        steps, same, findings = [], dict[str, str](), self.findings
        first_with: dict[tuple[Any, ...], str] = {}
        taken = {tuple(range(len(held))): 0}  # places of the inputs that take part → index of their settings
        for name, spec in specs[self.donor].items():
            identity = tuple(views[name].identity for views in held)
            if None not in identity and first_with.setdefault(identity, name) != name:
                same[name] = first_with[identity]
                continue
            tensors = [s[name] for s in specs]
            if all(s.dtype.floating for s in tensors):
                step = self._merged(name, tensors, dtypes, settings, taken)
                if step.merges and not self.method.elementwise(settings.shared):
                    step = split_fused(step, fused_parts(spec, specs[self.donor], structure, None))
                steps.append(step)
            else:
                steps.append(self._copied(name, tensors, findings))
        draft = PlanDraft(made_by(self.method), [ModelInput(label, "", "") for label in self.labels], seed=seed)
        draft.settings = [settings, *(without(settings, places) for places in list(taken)[1:])]
        draft.steps, products = with_needs(steps, draft.settings, self.method)
        fix = "merge the products B @ A, or the adapters' files with weightsmith.merge"
        if problems := factor_problems(draft.steps, self.label, fix):
            raise PlanError(problems)
        draft.products, draft.warnings = list(products), [*findings, *dtypes.findings()]
        return draft.finish(stored=False), same

    def _merged(
        self, name: str, tensors: Sequence[TensorSpec], dtypes: DTypes, settings: Settings, taken: dict[tuple[int, ...], int]
    ) -> Step:
        """The step of one merged tensor. taken: see `plan`."""
        dtype = dtypes.of([Read(k, name) for k in range(len(tensors))])
        out = TensorSpec(name, dtype, tensors[0].shape)
        places = taking_part(self.method, settings, role_of(out), base=self.has_base)
        op = operation(self.method, settings, len(tensors), places, base=self.has_base, same=dtype == tensors[places[0]].dtype)
        index = taken.setdefault(places, len(taken))
        return Step(out, op, tuple(Read(k, name) for k in places), self.has_base, index)

    def _copied(self, name: str, tensors: Sequence[TensorSpec], findings: list[Finding]) -> Step:
        """Integers and booleans: the donor's, compared with the others' while they are copied."""
        order = [self.donor, *(k for k in range(len(tensors)) if k != self.donor)]
        if any(spec.dtype != tensors[self.donor].dtype for spec in tensors):
            details = tuple(f"{label}: {spec.dtype}" for label, spec in zip(self.labels, tensors, strict=True))
            findings.append(Finding(f"dtypes differ and are not all floating; taken from {self.label}", name, details))
            order = order[:1]
        return Step(tensors[self.donor], COPY, tuple(Read(k, name) for k in order))


def _views(label: str, model: object, problems: list[WeightsmithError]) -> dict[str, View]:
    """The views of a model's tensors."""
    if not isinstance(model, Mapping):
        what = f"this is a {type(model).__qualname__}, not a mapping of names to tensors"
        fix = "pass a torch module or its state_dict()"
        problems.append(Unsupported(what, where=label, fix=fix))
        return {}
    views: dict[str, View] = {}
    for name, tensor in model.items():
        if not isinstance(name, str):
            problems.append(Unsupported(f"the name {name!r} is not a string", where=label, fix="use names as in a state_dict"))
            continue
        try:
            views[name] = view_of(name, tensor)
        except WeightsmithError as error:
            what = error.finding.what.removesuffix("; it cannot be stored")
            problems.append(Unsupported(f"{what}; it cannot be merged", where=f"{label}, tensor {name}", fix=error.finding.fix))
    return views


def _dtype(asked: object, problems: list[WeightsmithError]) -> DType | None:
    try:
        return output_dtype(asked)
    except ParameterError as error:
        problems.append(error)
        return None
