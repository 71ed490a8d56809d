"""Merging models that are in memory: state dicts in, a state dict out. Same plan, same engine, same kernels as for files.

The tensors are read where they lie, tile by tile (`sources.views`); the only memory of a model's size is the output's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from weightsmith.engine.constants import copied
from weightsmith.engine.local import Resources, run
from weightsmith.errors import Finding, WeightsmithError
from weightsmith.methods import get
from weightsmith.methods.user import OwnMethod
from weightsmith.methods.user_files import at_hand
from weightsmith.planner.state_dicts import plan_state_dicts
from weightsmith.plans import Plan, Product
from weightsmith.products.base import Arrays
from weightsmith.sources.memory import StateDict
from weightsmith.sources.views import Bytes
from weightsmith.tensors import DType


def merge_state_dicts(
    method: str | OwnMethod,
    models: Sequence[Mapping[str, Any]],
    *,
    base: Mapping[str, Any] | None = None,
    out_dtype: DType | str | Any = None,
    threads: int | None = None,
    seed: int = 0,
    allow_nonfinite: bool = False,
    **parameters: Any,
) -> dict[str, Any]:
    """Merge models that are in memory. The bytes are those that a merge of the same tensors from files has.

    method      as in a recipe, or a method of your own: what `block_method` and `tensor_method` make
    models      state dicts: name → numpy array or torch tensor of any strides and device, all with the same names and shapes;
                read and not changed
    base        the model that the others were tuned from, for methods that have one
    out_dtype   of the floating tensors: `"bfloat16"`, a numpy or torch dtype; by default the smallest that holds all inputs
    threads     default: the processors this process may use; the result does not depend on it
    seed        of random masks (DARE, DELLA, `task_vectors`)
    allow_nonfinite   merge NaN and infinities as any number; else they are an error that names tensor and model
    parameters  the method's, as in a recipe: one value, or for what each model has of its own a sequence of one value for each
                of `models`. A name that Python keeps for itself gets an underscore: `lambda_`

    Returns the tensors in the base's order (else the first model's): torch tensors on the CPU where these are torch's, numpy
    arrays (ml_dtypes for bf16 and fp8) where they are numpy's. Names that are one tensor in every model, as tied embeddings
    are, are one tensor in the result. Integers and booleans are copied from the base (else the first model); where the models
    disagree on them, a UserWarning says so.

    Raises PlanError with every problem, before anything is merged; UnknownName; NonFinite; MethodError for an own method.
    Memory: the output's, and some MB a thread.

    >>> a, b = {"w": np.float32([1, 2])}, {"w": np.float32([3, 6])}
    >>> merge_state_dicts("linear", [a, b], weight=[0.5, 0.5])
    {'w': array([2., 4.], dtype=float32)}
    """
    with nullcontext(get(method)) if isinstance(method, str) else at_hand(method) as found:
        planned = plan_state_dicts(found, models, base, parameters, out_dtype, seed)
        plan, first = planned.plan, planned.donor
        output = _Output(plan, planned.models[first])
        inputs = [StateDict(views, model.ref) for views, model in zip(planned.views, plan.models, strict=True)]
        try:
            outcome = run(plan, inputs, output, Resources(threads or 0), allow_nonfinite=allow_nonfinite)
        except WeightsmithError as error:
            error.state = ""  # it speaks of files, and here are none
            fix = error.finding.fix.replace("--allow-nonfinite (allow_nonfinite=True)", "allow_nonfinite=True")
            error.finding = replace(error.finding, fix=fix)
            raise
    label = plan.models[first].ref
    differing = [Finding(f"the models disagree; taken from {label}", name) for name in outcome.differing]
    for finding in (*plan.warnings, *differing, *copied(outcome.nonfinite)):
        warnings.warn(str(finding), stacklevel=2)
    return {name: output.tensors[planned.same.get(name, name)] for name in planned.views[first]}


class _Output:
    """The engine's output: new tensors, of numpy or torch as those of `like` are."""

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

    def location(self, name: str) -> None:
        return None

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        data = np.frombuffer(buffer, np.uint8)
        self._bytes[name][start_byte : start_byte + data.size] = data

    def finish(self, name: str, checksum: str, distance: tuple[float, float] | None, made_from: str) -> None:
        pass

    def keep(self, product: Product, arrays: Arrays) -> None:
        pass
