"""What `compiler` takes from the inside of numba, which no release of numba promises to keep.

Imported for releases that were tested. Where the import fails, and for other releases, kernels are compiled without: see
`compiler.njit`.
"""

from __future__ import annotations

import hashlib
import pickle
import uuid
from contextlib import suppress
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

caching: Any = numba.core.caching
serialize: Any = numba.core.serialize
codegen: Any = numba.core.codegen
compiler: Any = numba.core.compiler
machinery: Any = numba.core.compiler_machinery
lowering: Any = numba.core.typed_passes
runtime: Any = numba.core.runtime


class _File:
    """The cache of a kernel: one file for each signature.

    numba keeps an index of all signatures instead. If two processes write it at the same time, it may map a signature to the
    code of another one, and every later run fails. A kernel whose file here is damaged or unreadable is compiled again.
    """

    def __init__(self, folder: str, base: str, stamp: object) -> None:
        self._base = Path(folder) / base
        self._made_by = numba.__version__, stamp

    def load(self, key: object) -> Any:
        """What was saved; None if it is missing or damaged."""
        try:
            found = self._path(key).read_bytes()
        except OSError:
            return None
        digest, data = found[:32], found[32:]
        return pickle.loads(data) if hashlib.sha256(data).digest() == digest else None

    def save(self, key: object, data: object) -> None:
        """Keep it. Raises OSError."""
        packed = serialize.dumps(data)
        unfinished = self._path(key, f".{uuid.uuid4().hex}")
        try:
            unfinished.write_bytes(hashlib.sha256(packed).digest() + packed)
            unfinished.replace(self._path(key))
        finally:
            unfinished.unlink(missing_ok=True)

    def _path(self, key: object, end: str = "") -> Path:
        digest = hashlib.sha256(repr((self._made_by, key)).encode()).hexdigest()[:32]
        return self._base.with_name(f"{self._base.name}.{digest}.nbc{end}")


class Cache(caching.FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, with a `_File`. A disk that is full costs nothing but the time to compile again."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__(function)
        self._cache_file = _File(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, signature: object, target: Any) -> Any:
        """Load saved machine code.

        numba would first import everything it can compile, scipy included, which takes half a second at each start.

        Machine code needs only numba's runtime, which allocates its arrays. The compiler imports the rest when it runs.
        """
        runtime.rtsys.initialize(target)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target)

    def save_overload(self, signature: object, data: object) -> None:
        with suppress(OSError):
            super().save_overload(signature, data)


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
