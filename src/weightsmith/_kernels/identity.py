"""What decides the machine code of a kernel, as a digest: by that it is kept, between runs and over upgrades.

A kernel's own code and the constants and tables that it names, the same of every kernel that it calls, and what compiles them:
Python, numba, LLVM, their settings. A comment, a docstring, a line's number and the name of a file decide nothing. The
processor and the types of the arguments are numba's part, in `internals.Cache`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

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
    """Of values whose `repr` says all."""
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
