"""Merge methods of the user's own: a function, a decorator, and a signature that says what its parameters are.

    @weightsmith.block_method
    def blend(models, base, out, weight: PerModel[float], t: float = 0.5):
        out[:] = base + t * sum(w * (m - base) for w, m in zip(weight, models))

`block_method` is for what can be done element by element or row by row: the function sees a run of rows at a time, memory stays
bounded, and the result is the same for any tiles and threads. `tensor_method` gets whole matrices and returns one.

A method comes from a file named in a recipe, an installed package, or a Python function. It goes by its name with the hash of
its source, `./my_method.py:blend@1f0c…`: in a plan, so that work is resumed only with the code that began it, and in the
registry, where the engine finds it. The hash of a Python function is a number of this process: what it calls and closes over
cannot be hashed, so another process resumes nothing that it began.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from weightsmith._base.errors import CheckpointError, MethodError, PluginError, nearest
from weightsmith._base.files import expand_user, read_bounded, real_path
from weightsmith._base.plugins import Plugins
from weightsmith._files.copied import MAX_CODE_BYTES
from weightsmith._kernels.codecs import decode, encode
from weightsmith._methods.method import BaseRole, Method, parameters_of, values
from weightsmith._methods.method import PerModel as PerModel
from weightsmith._methods.steps import with_steps
from weightsmith._plans import OwnCode
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

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
        function: Function = inspect.unwrap(getattr(self.function, "py_func", self.function))
        return function


@overload
def block_method(function: Function, /) -> OwnMethod: ...
@overload
def block_method(*, min_models: int = 1, max_models: int | None = None) -> Callable[[Function], OwnMethod]: ...
def block_method(function: Function | None = None, /, *, min_models: int = 1, max_models: int | None = None) -> Any:
    """Turn a function over rows into a merge method.

    The function takes these arguments by name, and any parameters of its own:

    models  float32 [models, n]: the same n elements of each model, in whole rows; a vector may be cut anywhere
    base    float32 [n]: elements of the base. Without this argument, the method has no base; with `base=None` it is optional
    out     float32 [n]: fill every element; return nothing

    All arrays are C-contiguous, and the function may write to them. They are float64 if the output is F32 or F64, or an input
    is F64.

    A parameter has a type, `float`, `int`, `bool` or `str`, and a default unless it is required. `float | None = None` is
    optional. `PerModel[float]` has one value for each model: an array of float64, int64 or bool, or a tuple of str. Append an
    underscore to Python keywords: `lambda_` is `lambda` in recipes.

    n depends only on the tensor's shape, never on tiles and threads. The function is called from many threads at once. With
    `numba.njit(nogil=True)` they run in parallel.

    min_models, max_models   number of inputs besides the base
    """
    return _decorated("block", function, min_models, max_models)


@overload
def tensor_method(function: Function, /) -> OwnMethod: ...
@overload
def tensor_method(*, min_models: int = 1, max_models: int | None = None) -> Callable[[Function], OwnMethod]: ...
def tensor_method(function: Function | None = None, /, *, min_models: int = 1, max_models: int | None = None) -> Any:
    """Turn a function over whole tensors into a merge method.

    models   a list of float32 arrays in the tensor's shape; experts of a fused tensor are passed one at a time
    base     an array of the same shape; optional as for `block_method`, which also describes parameters
    returns  an array of the same shape: numpy, or torch on any device

    The arrays are float64 if the output is F32 or F64, or an input is F64. Whole tensors are in memory, as many at once as
    there are threads. The result does not depend on the number of threads if the function's does not.
    """
    return _decorated("tensor", function, min_models, max_models)


def _decorated(form: Form, function: Function | None, min_models: int, max_models: int | None) -> Any:
    if function is None:
        return lambda inner: OwnMethod(inner, form, min_models, max_models)
    return OwnMethod(function, form, min_models, max_models)


def method_of(method: OwnMethod, name: str, source: str) -> Method:
    """The record of an own method, by its signature.

    name    as in plans
    source  where the code is from, for the docs and the card

    Raises MethodError when the signature is not one of a merge method.
    """
    plain = method.plain
    called = getattr(plain, "__name__", type(plain).__name__)
    signature = _signature_of(method, called)
    declared = signature.parameters
    parameters = parameters_of(plain, skip=_ARRAYS, called=called)
    doc = inspect.getdoc(plain) or ""
    base: BaseRole = "input"
    if "base" in declared:
        base = "required" if declared["base"].default is inspect.Parameter.empty else "optional"

    def job(matrix: Matrix) -> Job:
        # What else is shared are the parameters of the steps after the merge.
        arguments = values(parameters, matrix.shared, matrix.model_parameters)
        call = Call(method.function, called, plain, "base" in declared, arguments, matrix.name)
        return (BlockJob if method.form == "block" else TensorJob)(matrix, call)

    return Method(
        name=name,
        title=doc.partition("\n")[0].rstrip(".") or "a method of the user's own",
        family="delta" if base == "required" else "average",
        summary=doc or "A method of the user's own.",
        use="",
        passes="One." if method.form == "block" else "Two: the first gathers the tensor in memory.",
        source=source,
        formula=f"{called}{signature}",
        parameters=parameters,
        base=base,
        min_models=method.min_models,
        max_models=method.max_models,
        example="",
        job=job,
    )


def _signature_of(method: OwnMethod, called: str) -> inspect.Signature:
    """The signature of an own method. Raises MethodError for one that lacks an argument of its form."""
    try:
        signature = inspect.signature(method.plain)
    except (TypeError, ValueError):
        fix = "decorate a function written in Python: its parameters are read from its signature"
        raise MethodError(f"the signature of {called} cannot be read", fix=fix) from None
    for required in ("models", "out") if method.form == "block" else ("models",):
        if required not in signature.parameters:
            raise MethodError(
                f"{called}{signature} has no argument '{required}'",
                fix=f"write {_arguments_of(method.form)} as its arguments",
            )
    if method.form == "tensor" and "out" in signature.parameters:
        raise MethodError(f"{called}{signature} has an argument 'out'", fix="return the result: a tensor_method has no out")
    return signature


def _arguments_of(form: Form) -> str:
    return "models, out and perhaps base" if form == "block" else "models and perhaps base"


# ---- jobs


@dataclass(frozen=True, slots=True)
class Call:
    """A user's function with the parameters of one tensor.

    called      the function's name in messages
    plain       the Python function, before numba compiled it
    takes_base  it has an argument `base`
    tensor      name of the output tensor
    """

    function: Callable[..., Any]
    called: str
    plain: Callable[..., Any]
    takes_base: bool
    parameters: Mapping[str, Any]
    tensor: str

    def __call__(self, models: Any, base: Any, **outputs: Any) -> Any:
        """The function's result; `base` is passed when it takes one. Raises MethodError for whatever it raises."""
        if self.takes_base:
            outputs["base"] = base
        try:
            return self.function(models=models, **outputs, **self.parameters)
        except Exception as error:
            first, *rest = str(error).strip().splitlines() or [""]
            raise self.failed(
                f"raised {type(error).__name__}{': ' if first else ''}{first}", [*rest[:8], *self._place(error)]
            ) from error

    def failed(self, what: str, details: Sequence[str] = ()) -> MethodError:
        """The error that says so of this tensor."""
        return MethodError(f"{self.called} {what}", where=f"output tensor {self.tensor}", details=details)

    def _place(self, error: Exception) -> list[str]:
        """The line of the user's file where it happened, if known."""
        file = getattr(getattr(self.plain, "__code__", None), "co_filename", "")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        return [f"{file}:{frames[-1].lineno} in {frames[-1].name}"] if frames else []


class BlockJob(Job):
    """Calls the function grain by grain: what it is given then depends on the shape alone, whatever it makes of it."""

    portable = False  # the function may call anything

    def __init__(self, matrix: Matrix, call: Call) -> None:
        super().__init__(matrix)
        self.call = call

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, inputs = self.matrix, len(self.matrix.codes)
        flat = tile.scratch.rows(inputs + 1, m.codes, m.out_code, min(m.grain, tile.size)).reshape(-1)
        first = 1 if m.base else 0
        for start in range(0, tile.size, m.grain):
            n = min(m.grain, tile.size - start)
            # Cut from one run of memory, so that all arrays are contiguous: numba compiles for that, and so always the same.
            rows, result = flat[: inputs * n].reshape(inputs, n), flat[inputs * n : (inputs + 1) * n]
            for i in range(inputs):
                decode(tile.raw[i], m.codes[i], start, n, rows[i])
            result.fill(np.nan)
            if self.call(rows[first:], rows[0] if m.base else None, out=result) is not None:
                raise self.call.failed("returned a value; a block_method fills out and returns nothing")
            encode(result, n, m.out_code, start, out)


class TensorJob(Job):
    """Gathers the whole matrix in a pass, calls the function once, and writes what it returned."""

    portable = False

    def __init__(self, matrix: Matrix, call: Call) -> None:
        super().__init__(matrix)
        self.call = call
        self._kind = np.dtype(np.float64 if matrix.wide else np.float32)
        self.resident_bytes = (len(matrix.codes) + 2) * matrix.size * self._kind.itemsize  # its result, and a copy on the way
        self._lock = threading.Lock()
        self._whole: np.ndarray | None = None
        self._result = np.empty(0)

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        m = self.matrix
        with self._lock:  # not before there is a tile: a job may only be asked for its passes
            if self._whole is None:
                self._whole = np.empty((len(m.codes), m.size), self._kind)
        for i, row in enumerate(self._whole):
            decode(tile.raw[i], m.codes[i], 0, tile.size, row[tile.start : tile.start + tile.size])

    def finish_pass(self, number: int, results: list[Any]) -> None:
        assert self._whole is not None
        m, kind = self.matrix, self._kind
        models = [row.reshape(m.shape) for row in self._whole]
        self._whole = None
        base = models.pop(0) if m.base else None
        result = self.call(models, base)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(result, torch.Tensor):
            result = result.detach().to("cpu", getattr(torch, kind.name)).numpy()
        if not isinstance(result, np.ndarray | np.generic) or (
            result.dtype.kind not in "fiub" and result.dtype.name != "bfloat16"
        ):
            raise self.call.failed(f"returned a {type(result).__qualname__}, not an array of numbers")
        if result.shape != m.shape:
            raise self.call.failed(f"returned an array of shape {list(result.shape)}, not {list(m.shape)}")
        self._result = np.ascontiguousarray(result, kind).reshape(-1)

    def apply(self, tile: Tile, out: Bytes) -> None:
        encode(self._result[tile.start : tile.start + tile.size], tile.size, self.matrix.out_code, 0, out)


METHODS: Plugins[object] = Plugins("merge method", "weightsmith.methods", object, {})
"""The methods of installed packages: functions marked as such, or records. weightsmith's own come before them."""


@dataclass(frozen=True, slots=True)
class LoadedMethod:
    """A method that is not one of weightsmith's: its record, and where it comes from."""

    method: Method
    code: OwnCode


_loaded: dict[str, LoadedMethod] = {}
_modules: dict[tuple[str, str], dict[str, Any]] = {}


def loaded(name: str) -> LoadedMethod | None:
    """The loaded method that goes by this name in a plan."""
    return _loaded.get(name)


def names_file(name: str) -> bool:
    """True for `./my_method.py:blend` and similar names.

    >>> names_file("m.py:blend"), names_file("ties")
    (True, False)
    """
    return name.endswith(".py") or ".py:" in name


def load_file(name: str, folder: Path, *, allow_code: bool) -> Method:
    """The method that a recipe names as `file.py:function`. Runs the file, once for each content that it has.

    folder      that the file's path starts from
    allow_code  the user has said that it may run

    Raises MethodError.
    """
    file, colon, function = name.rpartition(":")
    path = real_path(folder / expand_user(file if colon else name))
    try:
        source = read_bounded(path, MAX_CODE_BYTES)
    except CheckpointError as error:
        fix = error.finding.fix or "write the path relative to the recipe's folder"
        raise MethodError(f"the file of the merge method, {path}, cannot be read: {error.finding.what}", fix=fix) from None
    if not colon or not function.isidentifier():
        raise MethodError(f"merge_method {name} names no function", fix=f"write {file if colon else name}:FUNCTION")
    if not allow_code:
        raise MethodError(
            f"merge_method {name} would run code: the file {path}",
            fix="read that file, and if you trust it add --allow-code (allow_code=True)",
        )
    digest = hashlib.sha256(source).hexdigest()
    module = _modules.get((str(path), digest))
    if module is None:
        module = _modules[str(path), digest] = _run(path, source, digest)
    if function not in module:
        known = [n for n, value in module.items() if isinstance(value, OwnMethod | Method)]
        listed = f"methods in it: {', '.join(known)}" if known else ""
        raise MethodError(f"{path} has no function '{function}'{nearest(function, known)}", fix=listed)
    code = OwnCode(name, str(real_path(folder)), digest)
    return _enter(module[function], code, f"{name}, sha256 {digest}")


def _run(path: Path, source: bytes, digest: str) -> dict[str, Any]:
    """The names that the file defines."""
    module = types.ModuleType(f"weightsmith_own_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look up its definitions there
    try:
        # These bytes, and not what importlib would read again: the hash is of what runs.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = f"{path}{line} cannot be loaded: {type(error).__name__}: {error}"
        raise MethodError(what, fix=f"see the traceback of: python {path}") from error
    return module.__dict__


def load_installed(name: str) -> Method:
    """The method that an installed package brings under this name. Raises MethodError when it does not work."""
    try:
        plugin, identity = METHODS.get(name), METHODS.identity(name)
    except PluginError as error:  # it gets its place in the recipe
        raise MethodError(f"{error.finding.where}: {error.finding.what}", fix=error.finding.fix) from error
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return _enter(plugin, OwnCode(name, "", digest), f"package {METHODS.source(name)}")


def _enter(method_like: object, code: OwnCode, source: str) -> Method:
    """The record of what was found under a name, known to the registry from now on."""
    planned = f"{code.name}@{code.sha256[:16]}"
    method = _record(method_like, code.name, planned, source)
    _loaded[planned] = LoadedMethod(method, code)
    return method


def _record(method_like: object, name: str, planned: str, source: str) -> Method:
    if isinstance(method_like, Method):
        return with_steps(replace(method_like, name=planned))
    if isinstance(method_like, OwnMethod):
        return with_steps(method_of(method_like, planned, source))
    raise MethodError(
        f"{name} is a {type(method_like).__name__}, not a merge method",
        fix="write @weightsmith.block_method or @weightsmith.tensor_method above the function",
    )


PROCESS = "<process>"
"""In place of the folder of a method's file: it is a function of the process that made the plan."""

_PLANNED = re.compile(r"(.+)@[0-9a-f]{16}")
_process = os.urandom(16)
_functions: dict[int, tuple[object, str]] = {}  # by identity; the function is kept, so that no other takes its place


def name_of(function: object) -> str:
    """The name in recipes and plans of a function that a Python recipe holds as `merge_method`; it is loaded from now on.

    Raises MethodError unless it is a merge method.
    """
    if (entry := _functions.get(id(function))) is not None:
        return entry[1]
    called = _called(function)
    digest = hashlib.sha256(_process + len(_functions).to_bytes(8, "little")).hexdigest()
    method = _enter(function, OwnCode(called, PROCESS, digest), "a Python function")
    _functions[id(function)] = function, method.name
    return method.name


def function_of(planned: str) -> str:
    """The name of the Python function that a plan or recipe of another process means; "" for other methods.

    >>> function_of("blend@0123456789abcdef"), function_of("./m.py:blend@0123456789abcdef"), function_of("ties")
    ('blend', '', '')
    """
    match = _PLANNED.fullmatch(planned)
    return match[1] if match is not None and not names_file(match[1]) else ""


def _called(function: object) -> str:
    plain = function.plain if isinstance(function, OwnMethod) else function
    return str(getattr(plain, "__name__", "") or getattr(plain, "name", "own"))


@contextmanager
def at_hand(function: object) -> Iterator[Method]:
    """The record of a function, in the registry until the end of the block."""
    called = _called(function)
    number = 1
    name = called
    while (
        _loaded.setdefault(name, mine := LoadedMethod(_record(function, called, name, "the caller"), OwnCode(called, "", "")))
        is not mine
    ):
        number += 1
        name = f"{called}-{number}"
    try:
        yield mine.method
    finally:
        del _loaded[name]
