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

numba's own cache looks at a function's file alone. A kernel that calls another, or uses its constants, would go on with the old
one after that file changed, and write past the end of a buffer. Here any change to any kernel is a new cache. The folder is
`$NUMBA_CACHE_DIR`, else `~/.cache/weightsmith`, else none: then kernels are compiled at each start.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, overload
from weakref import WeakSet

import numba
import numba.core.codegen
import numba.core.compiler
import numba.core.compiler_machinery
import numba.core.config
import numba.core.event
import numba.core.typed_passes
import numpy as np

F = TypeVar("F")

config: Any = numba.core.config
event: Any = numba.core.event
codegen: Any = numba.core.codegen
compiler: Any = numba.core.compiler
machinery: Any = numba.core.compiler_machinery
lowering: Any = numba.core.typed_passes


@cache
def cache_folder() -> str:
    """Where compiled kernels are kept; "" when there is nowhere to write."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    sources.append(Path(__file__).parent.parent / "tensors.py")  # the codes of the dtypes
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    try:
        home = config.CACHE_DIR or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weightsmith"
        folder = Path(home) / f"kernels-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no HOME, and no such user
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


# ---- kernels and their variants


class Switch:
    """A constant of kernels: True in those compiled for a call in which its axis has any of its values, else False."""

    def __init__(self, axis: str, values: Container[int]) -> None:
        self.axis = axis
        self.values = values

    def on(self, given: Mapping[str, Collection[int]]) -> bool:
        """Whether a call with these values can take the branch. An axis that is not given may have any value."""
        return self.axis not in given or any(value in self.values for value in given[self.axis])

    def __bool__(self) -> bool:
        """Outside kernels no branch is ruled out."""
        return True


class Kernel:
    """A function, and what it was compiled to for each setting of its switches."""

    def __init__(self, function: FunctionType, axes: Mapping[str, str], known: Mapping[str, Collection[int]]) -> None:
        """See `kernel`."""
        update_wrapper(self, function)
        self.function = function
        self._known = known
        self._axes = [(axis, function.__code__.co_varnames.index(argument)) for argument, axis in axes.items()]
        self._by_arguments: dict[tuple[Any, ...], Any] = {}
        self._by_setting: dict[tuple[bool, ...], Any] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        """Call the variant for these arguments; it is compiled if it is new."""
        key = tuple([v.tobytes() if isinstance(v := args[place], np.ndarray) else v for _, place in self._axes])
        found = self._by_arguments.get(key)
        if found is None:
            given: dict[str, set[int]] = {}
            for axis, place in self._axes:
                given.setdefault(axis, set()).update(np.atleast_1d(args[place]).tolist())
            found = self._by_arguments[key] = self.variant(given)
        return found(*args)

    def variant(self, given: Mapping[str, Collection[int]], *, called_by_kernel: bool = False) -> Any:
        """The function for these values of the axes, as numba will compile it when it is called."""
        given = {**given, **self._known}
        setting = called_by_kernel, *(switch.on(given) for switch in self._switches)
        with self._lock:
            if setting not in self._by_setting:
                bound = {
                    name: used.on(given) if isinstance(used, Switch) else used.variant(given, called_by_kernel=True)
                    for name, used in self._uses()
                }
                function = FunctionType(self.function.__code__, {**self.function.__globals__, **bound})
                function.__qualname__ += "_" + "".join("01"[on] for on in setting)  # its files in the cache are named so
                self._by_setting[setting] = _njit(function, called_by_kernel)
            return self._by_setting[setting]

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


class _CodeForCallers(codegen.JITCodeLibrary):  # type: ignore[misc]
    """The code of a kernel that only kernels call. It is linked into each of them, and optimised there.

    numba would first optimise it by itself, and turn it into machine code that nobody calls.
    """

    def _optimize_final_module(self) -> None:
        """Left to the callers."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@machinery.register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringForCallers(lowering.NativeLowering):  # type: ignore[misc]
    """Lowers a kernel to LLVM's language. numba's own pass goes on to machine code, for calls from Python."""

    _name = "lowering_for_callers"

    def run_pass(self, state: Any) -> bool:
        state.library = _CodeForCallers(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        state.library.finalize()
        entry: Any = {}.popitem  # numba wants a built-in function to call from Python; this one fails
        state.cr = state.cr._replace(cfunc=entry)
        state.targetctx.insert_user_function(entry, state.cr.fndesc, [state.library])
        return True


class _CompilerForCallers(compiler.CompilerBase):  # type: ignore[misc]
    """numba's compiler, but for the last step."""

    def define_pipelines(self) -> list[Any]:
        passes = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_LoweringForCallers if one is lowering.NativeLowering else one, why) for one, why in passes.passes]
        passes.finalize()
        return [passes]


_setting_folder = threading.Lock()
"""Held while numba's cache folder, which is one for the process, is ours: two threads would restore each other's."""


def _njit(function: FunctionType, called_by_kernel: bool) -> Any:
    folder = "" if called_by_kernel else cache_folder()
    # What makes a function callable from Python and from C takes as long to compile as a small kernel.
    options: dict[str, Any] = {"no_cpython_wrapper": called_by_kernel, "no_cfunc_wrapper": True}
    if called_by_kernel:
        options["pipeline_class"] = _CompilerForCallers
    njit: Any = numba.njit
    decorate = njit(nogil=True, cache=bool(folder), error_model="numpy", **options)
    with _setting_folder:
        before = config.CACHE_DIR
        config.CACHE_DIR = folder
        try:
            made = decorate(function)
        finally:
            config.CACHE_DIR = before
    if not called_by_kernel and made is not function:  # it is, with NUMBA_DISABLE_JIT
        made.compile = _watch.entered()(made.compile)
    return made


@overload
def kernel(function: F, /) -> F: ...
@overload
def kernel(*, known: Mapping[str, Collection[int]] = ..., **axes: str) -> Callable[[F], F]: ...
def kernel(function: Any = None, /, *, known: Mapping[str, Collection[int]] | None = None, **axes: str) -> Any:
    """Compile at the first call, for the types of its arguments; releases the GIL; no fastmath.

    known  values of axes that no argument decides
    axes   argument → axis of the switches that it decides: an integer, or an array of them

    A division by zero gives an infinity or NaN, as in numpy: Python's test for it before each division keeps loops from
    vectorising.
    """
    if function is None:
        return lambda decorated: Kernel(decorated, axes, known or {})
    return Kernel(function, {}, {})


# ---- while kernels are compiled


class Abandoned(BaseException):
    """A kernel is not compiled to the end: nobody waits for this thread any more."""


class _Watch(event.Listener):  # type: ignore[misc]
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

    def on_start(self, event: Any) -> None:
        """numba compiles a function, or makes a pass over one."""
        thread = threading.current_thread()
        self._check(thread)
        if event.kind == "numba:compile" and thread in self.inside:
            with self.lock:
                if not self.compiling:
                    self._collect = gc.isenabled()
                    gc.disable()
                self.compiling.add(thread)

    def on_end(self, event: Any) -> None:
        """It has come to an end."""

    def _check(self, thread: threading.Thread) -> None:
        if thread in self.abandoned:
            raise Abandoned


_watch = _Watch()
for _kind in ("numba:compile", "numba:run_pass"):
    event.register(_kind, _watch)


def is_compiling() -> bool:
    """A kernel is being compiled now, in any thread: it was not in the cache."""
    return bool(_watch.compiling)


def is_left() -> bool:
    """A thread that nobody waits for is still in the compiler."""
    with _watch.lock:
        return any(thread in _watch.abandoned for thread in _watch.inside)


def leave(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that were told to end, but not for the compiler: a thread in it raises Abandoned at its next step."""
    with _watch.lock:
        _watch.abandoned.update(threads)
    for thread in threads:
        while thread.is_alive():
            with _watch.lock:
                if thread in _watch.inside:
                    atexit.register(thread.join)  # LLVM must not be at work when the process is taken down
                    break
            thread.join(0.02)
