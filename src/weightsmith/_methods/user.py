"""Merge methods of the user's own: a function, a decorator, and a signature that says what its parameters are.

    @weightsmith.block_method
    def blend(models, base, out, weight: PerModel[float], t: float = 0.5):
        out[:] = base + t * sum(w * (m - base) for w, m in zip(weight, models))

`block_method` is for what can be done element by element or row by row: the function sees a run of rows at a time, memory stays
bounded, and the result is the same for any tiles and threads. `tensor_method` gets whole matrices and returns one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

from weightsmith._base.errors import MethodError
from weightsmith._methods.base import BaseRole, Method
from weightsmith._methods.signature import PerModel as PerModel
from weightsmith._methods.signature import parameters_of, values
from weightsmith.abc.job import Job, Matrix

Function = Callable[..., Any]
Form = Literal["block", "tensor"]

_ARRAYS = ("models", "base", "out")


@dataclass(frozen=True)
class OwnMethod:
    """What the decorators make: the function, still callable, and how it is to be called.

    form        `block` or `tensor`
    min_models, max_models   besides the base
    """

    function: Function
    form: Form
    min_models: int = 1
    max_models: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def plain(self) -> Function:
        """The Python function, before numba compiled it."""
        found: Function = inspect.unwrap(getattr(self.function, "py_func", self.function))
        return found


@overload
def block_method(function: Function, /) -> OwnMethod: ...
@overload
def block_method(*, min_models: int = 1, max_models: int | None = None) -> Callable[[Function], OwnMethod]: ...
def block_method(function: Function | None = None, /, *, min_models: int = 1, max_models: int | None = None) -> Any:
    """Make a merge method of a function over rows.

    The function takes, by these names, and whatever parameters it likes:

    models  float32 [models, n]: the same n elements of each model, whole rows one after the other; a vector's are cut anywhere
    base    float32 [n]: of the base; a function without `base` has none, and one with `base=None` may be merged without
    out     float32 [n]: to be filled, all of it; nothing is returned

    All are C-contiguous, the function's own to write in, and float64 when the output is F32 or F64, or an input is F64.

    A parameter has a type, `float`, `int`, `bool` or `str`, and a default unless it is required; `float | None = None` may be
    left out. `PerModel[float]` has one value for each model: an array of float64, int64 or bool, a tuple of str. A name that
    ends in an underscore because Python keeps the word for itself, `lambda_`, is written without it in recipes.

    n depends on the tensor's shape alone, never on tiles and threads. The function is called from many threads at once; under
    `numba.njit(nogil=True)` they run side by side.

    min_models, max_models   inputs besides the base
    """
    return _decorated("block", function, min_models, max_models)


@overload
def tensor_method(function: Function, /) -> OwnMethod: ...
@overload
def tensor_method(*, min_models: int = 1, max_models: int | None = None) -> Callable[[Function], OwnMethod]: ...
def tensor_method(function: Function | None = None, /, *, min_models: int = 1, max_models: int | None = None) -> Any:
    """Make a merge method of a function over whole tensors.

    models   a list of float32 arrays in the tensor's shape; experts of a fused tensor come one at a time
    base     such an array; as for `block_method`, which also says what parameters are
    returns  an array of the same shape: numpy, or torch on any device

    The arrays are float64 when the output is F32 or F64, or an input is F64. A tensor is in memory as a whole, for as many
    tensors at once as there are threads; the result is the same for any number of threads if the function's is.
    """
    return _decorated("tensor", function, min_models, max_models)


def _decorated(form: Form, function: Function | None, min_models: int, max_models: int | None) -> Any:
    if function is None:
        return lambda inner: OwnMethod(inner, form, min_models, max_models)
    return OwnMethod(function, form, min_models, max_models)


def method_of(own: OwnMethod, name: str, source: str) -> Method:
    """The record of an own method, by its signature.

    name    as in plans
    source  where the code is from, for the docs and the card

    Raises MethodError when the signature is not one of a merge method.
    """
    plain = own.plain
    called = getattr(plain, "__name__", type(plain).__name__)
    try:
        signature = inspect.signature(plain)
    except (TypeError, ValueError):
        fix = "decorate a function written in Python: its parameters are read from its signature"
        raise MethodError(f"the signature of {called} cannot be read", fix=fix) from None
    given = dict(signature.parameters)
    for wanted in ("models", "out") if own.form == "block" else ("models",):
        if wanted not in given:
            raise MethodError(
                f"{called}{signature} has no argument '{wanted}'",
                fix=f"write {_wanted(own.form)} as its arguments",
            )
    if own.form == "tensor" and "out" in given:
        raise MethodError(f"{called}{signature} has an argument 'out'", fix="return the result: a tensor_method has no out")
    parameters = parameters_of(plain, skip=_ARRAYS, called=called)
    doc = inspect.getdoc(plain) or ""
    base: BaseRole = "input"
    if "base" in given:
        base = "required" if given["base"].default is inspect.Parameter.empty else "optional"

    def job(matrix: Matrix) -> Job:
        from weightsmith._methods.user_jobs import BlockJob, Call, TensorJob

        # What else is shared are the parameters of the steps after the merge.
        arguments = values(parameters, matrix.shared, matrix.own)
        call = Call(own.function, called, plain, "base" in given, arguments, matrix.name)
        return (BlockJob if own.form == "block" else TensorJob)(matrix, call)

    return Method(
        name=name,
        title=doc.partition("\n")[0].rstrip(".") or "a method of the user's own",
        summary=doc or "A method of the user's own.",
        use="",
        passes="One." if own.form == "block" else "Two: the first gathers the tensor in memory.",
        source=source,
        formula=f"{called}{signature}",
        parameters=parameters,
        base=base,
        min_models=own.min_models,
        max_models=own.max_models,
        example="",
        job=job,
    )


def _wanted(form: Form) -> str:
    return "models, out and perhaps base" if form == "block" else "models and perhaps base"
