"""Merges state dicts in memory, with the same plan, engine and kernels as for files.

Tensors are read in place, tile by tile (`files.views`); only the output needs memory of a model's size.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from weightsmith._base.errors import Finding, PlanError, Unsupported, WeightsmithError
from weightsmith._base.tensors import DType
from weightsmith._engine.local import DiscardedOutput, run
from weightsmith._engine.resources import Resources, Workload
from weightsmith._engine.tile_work import copied
from weightsmith._files.arrays import Bytes
from weightsmith._methods import get
from weightsmith._methods.user import OwnMethod, at_hand
from weightsmith._models.sources.composed import StateDict
from weightsmith._planning.planner.state_dicts import plan_state_dicts
from weightsmith._plans import Plan


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
        inputs = [StateDict(views, model.ref) for views, model in zip(planned.views, plan.models, strict=True)]
        try:
            outcome = run(plan, inputs, output, Resources(threads or 0), Workload(allow_nonfinite=allow_nonfinite))
        except WeightsmithError as error:
            error.state = ""  # it describes files, which do not apply here
            fix = error.finding.fix.replace("--allow-nonfinite (allow_nonfinite=True)", "allow_nonfinite=True")
            error.finding = replace(error.finding, fix=fix)
            raise
    label = plan.models[first].ref
    differing = [
        Finding(f"the models differ; taken from {label}", name) for name, done in outcome.finished.items() if done.differing
    ]
    for finding in (*plan.warnings, *differing, *copied(outcome.finished)):
        warnings.warn(str(finding), stacklevel=2)
    return {name: output.tensors[planned.same.get(name, name)] for name in planned.views[first]}


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
