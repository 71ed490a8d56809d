"""How kernels are compiled: when they are first called, each only with the branches that the call can take.

`@kernel` is numba's njit without the GIL. A merge of bf16 models needs none of the code that reads F16, and DARE none of
DELLA's sorting; with all of it a first merge took up to 17 s. So a branch stands behind a `Switch`, a constant of its module,
and a kernel says which arguments decide its switches:

    BF16_IN = Switch("in", [BF16])

    @kernel(codes="in")
    def decode_all(raw, codes, ...):      # the values in `codes` are those of the axis "in"
        if BF16_IN and codes[0] == BF16:  # compiled only where BF16 is among them
            ...

The kernels that it calls are compiled for the same values, as a part of it: LLVM optimises them once, together. numba drops
what is behind a constant that is False before it infers types, so that such code costs nothing.

numba itself is in `compiler.py`, which is imported when a kernel is first called: a plan needs none. Here is also which threads
are in its compiler now, so that a run that ends does not wait for it; and the digest by which a compiled kernel is kept.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import sys
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, overload
from weakref import WeakSet

import numpy as np

F = TypeVar("F")


# ---- kernels and their variants


def writable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy if it may not be written. For an array that may not be, numba would compile the kernel again."""
    return array if array.flags.writeable else array.copy()


class Switch:
    """A constant of kernels: True in those compiled for a call in which its axis has any of its values, else False.

    behind  another switch, without which no call reaches the branch: what the axis has does not matter then
    """

    def __init__(self, axis: str, values: Container[int], *, behind: Switch | None = None) -> None:
        self.axis = axis
        self.values = values
        self.behind = behind

    def on(self, axis_values: Mapping[str, Collection[int]]) -> bool:
        """Whether a call with these values can take the branch. An axis that is not given may have any value."""
        if self.behind is not None and not self.behind.on(axis_values):
            return False
        return self.axis not in axis_values or any(value in self.values for value in axis_values[self.axis])

    def __bool__(self) -> bool:
        """Outside kernels no branch is ruled out."""
        return True


class Kernel:
    """A function, and what it was compiled to for each setting of its switches."""

    def __init__(self, function: FunctionType, axes: Mapping[str, str], known: Mapping[str, Collection[int]]) -> None:
        """Look up the axes among the arguments; the parameters are those of `kernel`."""
        update_wrapper(self, function)
        self.function = function
        self._known = known
        self._axes = [(axis, *_find_argument(function, name)) for name, axis in axes.items()]
        self._places = [(place, field) for _, place, field in self._axes]
        self._by_arguments: dict[tuple[Any, ...], Any] = {}
        self._by_setting: dict[tuple[bool, ...], Any] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        """Call the variant for these arguments; it is compiled if it is new."""
        values = [getattr(args[place], field) if field else args[place] for place, field in self._places]
        key = tuple([value.tobytes() if value.__class__ is np.ndarray else value for value in values])
        compiled = self._by_arguments.get(key)
        if compiled is None:
            axis_values: dict[str, set[int]] = {}
            for (axis, _, _), value in zip(self._axes, values, strict=True):
                axis_values.setdefault(axis, set()).update(np.atleast_1d(value).tolist())
            compiled = self._by_arguments[key] = self.variant(axis_values)
        return compiled(*args)

    def variant(self, axis_values: Mapping[str, Collection[int]], *, called_by_kernel: bool = False) -> Any:
        """The function for these values of the axes, as numba will compile it when it is called."""
        axis_values = {**axis_values, **self._known}
        setting = called_by_kernel, *(switch.on(axis_values) for switch in self._switches)
        njit = import_module("weightsmith._kernels.compiler").njit  # named as text, for it imports this module
        with self._lock:
            if setting not in self._by_setting:
                bound = {
                    name: used.on(axis_values) if isinstance(used, Switch) else used.variant(axis_values, called_by_kernel=True)
                    for name, used in self._uses()
                }
                function = FunctionType(self.function.__code__, {**self.function.__globals__, **bound})
                function.__qualname__ += "_" + "".join("01"[on] for on in setting)  # its files in the cache are named so
                self._by_setting[setting] = njit(
                    function, called_by_kernel, "" if called_by_kernel else self.digest(axis_values)
                )
            return self._by_setting[setting]

    def digest(self, axis_values: Mapping[str, Collection[int]]) -> str:
        """What tells the code of the variant for these values from any other; "" if nothing can: see `function_digest`."""
        try:
            return self._digest(axis_values)
        except UnknownIdentityError:
            return ""

    def _digest(self, axis_values: Mapping[str, Collection[int]]) -> str:
        axis_values = {**axis_values, **self._known}
        bound = {
            name: used.on(axis_values) if isinstance(used, Switch) else used._digest(axis_values) for name, used in self._uses()
        }
        return function_digest(self.function, bound)

    @cached_property
    def _switches(self) -> tuple[Switch, ...]:
        """Its own, and those of the kernels that it calls."""
        used = [used for _, used in self._uses()]
        return tuple(dict.fromkeys(switch for one in used for switch in ([one] if isinstance(one, Switch) else one._switches)))

    def _uses(self) -> Iterator[tuple[str, Switch | Kernel]]:
        """The switches and kernels that the code names."""
        for name in self.function.__code__.co_names:
            used = self.function.__globals__.get(name)
            if isinstance(used, Switch | Kernel):
                yield name, used


def _find_argument(function: FunctionType, name: str) -> tuple[int, str]:
    """The place of an argument, and "" or a field of the record that it is, by its name: `out_code` is `out.code`."""
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    if name in arguments:
        return arguments.index(name), ""
    record = next(argument for argument in arguments if name.startswith(f"{argument}_"))
    return arguments.index(record), name.removeprefix(f"{record}_")


@overload
def kernel(function: F, /) -> F: ...
@overload
def kernel(*, known: Mapping[str, Collection[int]] = ..., **axes: str) -> Callable[[F], F]: ...
def kernel(function: Any = None, /, *, known: Mapping[str, Collection[int]] | None = None, **axes: str) -> Any:
    """Compile at the first call, for the types of its arguments; releases the GIL; no fastmath.

    known  values of axes that no argument decides
    axes   argument → axis of the switches that it decides: an integer, or an array of them. `out_code` is an argument, or the
           field `code` of an argument `out`

    A division by zero gives an infinity or NaN, as in numpy: Python's test for it before each division keeps loops from
    vectorising.
    """
    if function is None:
        return lambda decorated: Kernel(decorated, axes, known or {})
    return Kernel(function, {}, {})


class Abandoned(BaseException):
    """A kernel is not compiled to the end: nobody waits for this thread any more."""


class _Watch:
    """Knows which threads are in numba's compiler, and ends those that nobody waits for.

    inside     threads that wait for the compiler, load from the cache, or compile
    compiling  those of them that compile

    The garbage collector is off while a kernel is compiled: it takes a fifth of the time, and finds little.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside: set[threading.Thread] = set()
        self.compiling: set[threading.Thread] = set()
        self.abandoned: WeakSet[threading.Thread] = WeakSet()
        self._collect = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is in the compiler."""
        thread = threading.current_thread()
        with self.lock:
            self._check(thread)
            self.inside.add(thread)
        try:
            yield
        finally:
            with self.lock:
                self.inside.discard(thread)
                if thread in self.compiling:
                    self.compiling.discard(thread)
                    if not self.compiling and self._collect:
                        gc.enable()
        self._check(thread)

    def began(self, *, compiling: bool) -> None:
        """numba compiles a function (compiling), or makes a pass over one."""
        thread = threading.current_thread()
        self._check(thread)
        if compiling and thread in self.inside:
            with self.lock:
                if not self.compiling:
                    self._collect = gc.isenabled()
                    gc.disable()
                self.compiling.add(thread)

    def _check(self, thread: threading.Thread) -> None:
        if thread in self.abandoned:
            raise Abandoned


watch = _Watch()


def is_compiling() -> bool:
    """A kernel is being compiled now, in any thread: it was not in the cache."""
    return bool(watch.compiling)


def is_left() -> bool:
    """A thread that nobody waits for is still in the compiler."""
    with watch.lock:
        return any(thread in watch.abandoned for thread in watch.inside)


def leave(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that were told to end, but not for the compiler: a thread in it raises Abandoned at its next step."""
    with watch.lock:
        watch.abandoned.update(threads)
    for thread in threads:
        while thread.is_alive():
            with watch.lock:
                if thread in watch.inside:
                    atexit.register(thread.join)  # LLVM must not be at work when the process is taken down
                    break
            thread.join(0.02)


# ---- What decides a kernel's machine code, as a digest: by that it is kept, between runs and over upgrades
#
# Its own code and the constants and tables that it names, the same of every kernel that it calls, and what compiles them:
# Python, numba, LLVM, their settings. A comment, a docstring, a line's number and the name of a file decide nothing. The
# processor and the types of the arguments are numba's part, in `internals.Cache`.

_LIBRARIES = {"cmath", "math", "numpy"}
"""numba compiles what is in these by itself: their names say it all."""

_SETTINGS = (
    "BOUNDSCHECK",
    "DEBUGINFO_DEFAULT",
    "ENABLE_AVX",
    "EXTEND_VARIABLE_LIFETIMES",
    "LLVM_REFPRUNE_FLAGS",
    "LLVM_REFPRUNE_PASS",
    "LOOP_VECTORIZE",
    "NRT_STATS",
    "OPT",
    "SLP_VECTORIZE",
    "USING_SVML",
)
"""Those of numba that change the code that it makes."""


class UnknownIdentityError(Exception):
    """A kernel names something that may be another one the next time, and nothing shows it: it is not kept."""


def function_digest(function: FunctionType, bound: Mapping[str, object]) -> str:
    """The digest of a function. bound: for names of its globals, a digest, or whether a switch is on, in place of the value.

    Raises UnknownIdentityError.
    """
    return digest_of(*_function(function, bound))


@cache
def compiler_digest() -> str:
    """That of what compiles kernels: Python, numba, LLVM and their settings."""
    import numba

    llvm: Any = import_module("llvmlite")  # comes with numba
    settings = [(name, getattr(numba.config, name, None)) for name in _SETTINGS]
    return digest_of(sys.implementation.cache_tag, numba.__version__, llvm.__version__, np.__version__, settings)


def digest_of(*parts: object) -> str:
    """A digest of values whose `repr` says all."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _function(function: FunctionType, bound: Mapping[str, object]) -> Iterator[object]:
    code = function.__code__
    yield function.__module__  # which is imported when a caller is loaded
    yield _code(code, is_documented=function.__doc__ is not None)
    for name in sorted(_names(code)):
        if name in bound:
            yield name, bound[name]
        elif name in function.__globals__:
            yield name, _value(function.__globals__[name], name)


def _names(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _code(code: CodeType, *, is_documented: bool = False) -> tuple[object, ...]:
    """What a code object does, without where it stands. is_documented: its first constant is its docstring."""
    return (
        code.co_code,
        code.co_exceptiontable,
        [_value(one, code.co_name) for one in code.co_consts[is_documented:]],
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
    )


def _value(value: Any, name: str) -> object:
    """A constant as text that is the same in every process."""
    kind = type(value).__name__
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return kind, repr(value)
        case np.generic() if not value.dtype.hasobject:
            return str(value.dtype), value.tobytes()
        case np.ndarray() if not value.dtype.hasobject:
            return repr(value.dtype), value.shape, value.flags.c_contiguous, hashlib.sha256(value.tobytes()).hexdigest()
        case tuple():
            return kind, getattr(value, "_fields", ()), [_value(one, name) for one in value]
        case frozenset():
            return kind, sorted(repr(_value(one, name)) for one in value)
        case CodeType():
            return _code(value)
        case ModuleType() if value.__name__ in _LIBRARIES:
            return kind, value.__name__
        case type() if issubclass(value, tuple) and hasattr(value, "_fields"):
            return kind, value.__module__, value.__qualname__, value._fields
        case type() | BuiltinFunctionType() | np.ufunc() if _is_of_a_library(value):
            return kind, value.__name__
        case _ if isinstance(getattr(value, "py_func", None), FunctionType):  # by numba.njit itself
            return kind, repr(value.targetoptions), list(_function(value.py_func, {}))
    raise UnknownIdentityError(f"{name} is {kind}")


def _is_of_a_library(value: Any) -> bool:
    return isinstance(value, np.ufunc) or str(value.__module__).partition(".")[0] in {*_LIBRARIES, "builtins"}
