"""What `compiler` takes from the inside of numba, which no release of numba promises to keep.

Imported for releases that were tested. Where the import fails, and for other releases, kernels are compiled without: see
`compiler.njit`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numba.core.caching
import numba.core.codegen
import numba.core.compiler
import numba.core.compiler_machinery
import numba.core.runtime
import numba.core.serialize
import numba.core.typed_passes
import numba.core.types

from weightsmith._kernels.jit import digest_of, function_digest

caching: Any = numba.core.caching
serialize: Any = numba.core.serialize
codegen: Any = numba.core.codegen
compiler: Any = numba.core.compiler
machinery: Any = numba.core.compiler_machinery
lowering: Any = numba.core.typed_passes
runtime: Any = numba.core.runtime
types: Any = numba.core.types


class Cache(caching.NullCache):  # type: ignore[misc]
    """The cache of a kernel, in place of numba's: one file for each signature.

    numba keeps an index of all signatures instead. If two processes write it at the same time, it may map a signature to the
    code of another one, and every later run fails. A kernel whose file here is damaged or unreadable is compiled again, and a
    disk that is full costs nothing but the time for that.
    """

    def __init__(self, base: Path, made_by: object, before_first_save: Callable[[], None]) -> None:
        """base: how the files' paths begin. made_by: what decides the code, beside the types and the processor; by its repr."""
        self._base = base
        self._made_by = made_by
        self._before_first_save = before_first_save

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Load saved machine code.

        numba would first import everything it can compile, scipy included, which takes half a second at each start.

        Machine code needs only numba's runtime, which allocates its arrays. The compiler imports the rest when it runs.
        """
        runtime.rtsys.initialize(target)
        path = self._path(signature, target.codegen())
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            os.utime(path)  # the time of its last use
        digest, data = content[:32], content[32:]
        if hashlib.sha256(data).digest() != digest:
            return None
        try:
            return compiler.CompileResult._rebuild(target, *pickle.loads(data))
        except (AttributeError, ImportError):  # it names a class that has moved
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep what was compiled."""
        if result.library.has_dynamic_globals:  # addresses of this process
            return
        self._before_first_save()
        path = self._path(signature, result.codegen)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        with suppress(OSError):
            data = serialize.dumps(result._reduce())
            try:
                unfinished.write_bytes(hashlib.sha256(data).digest() + data)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)

    def _path(self, signature: Any, codegen: Any) -> Path:
        types_and_processor = [described(one) for one in getattr(signature, "args", signature)], codegen.magic_tuple()
        return self._base.with_name(f"{self._base.name}.{digest_of(self._made_by, types_and_processor)}.nbc")


def described(kind: Any) -> object:
    """A type of numba as text. That of a named tuple says nothing of its fields' names, by which a kernel takes them."""
    if not isinstance(kind, types.BaseTuple):
        return str(kind)
    record = f"{kind.instance_class.__module__}: {kind.fields}" if isinstance(kind, types.BaseNamedTuple) else ""
    return str(kind), record, [described(one) for one in kind]


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


class CompilerForCallers(compiler.CompilerBase):  # type: ignore[misc]
    """numba's compiler, but for the last step."""

    def define_pipelines(self) -> list[Any]:
        passes = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_LoweringForCallers if one is lowering.NativeLowering else one, why) for one, why in passes.passes]
        passes.finalize()
        return [passes]


def ignore_constants(dispatcher: Any) -> None:
    """Compile a kernel that kernels call for the types of its arguments alone: numba would do so again for each constant."""
    template_of_types = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        return template_of_types([types.unliteral(kind) for kind in args], kws)

    dispatcher.get_call_template = get_call_template


@cache
def steps_digest() -> str:
    """A digest of the code that replaces steps of numba."""
    classes = _CodeForCallers, _LoweringForCallers, CompilerForCallers
    methods: list[Any] = [method for one in classes for method in vars(one).values() if isinstance(method, FunctionType)]
    methods.append(ignore_constants)
    return digest_of([function_digest(method, {name: name for name in method.__globals__}) for method in methods])
