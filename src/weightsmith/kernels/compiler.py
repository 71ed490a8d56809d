"""numba, as kernels are compiled with it; imported when the first one is called.

numba's own cache looks at a function's file alone. A kernel that calls another, or uses its constants, would go on with the old
one after that file changed, and write past the end of a buffer. Here any change to any kernel is a new cache. The folder is
`$NUMBA_CACHE_DIR`, else `~/.cache/weightsmith`, else none: then kernels are compiled at each start. A run that creates
a new cache removes those that no run has used for 30 days.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import threading
import time
import uuid
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
import numba.core.config
import numba.core.event
import numba.core.serialize
import numba.core.typed_passes

from weightsmith.kernels.watch import watch

caching: Any = numba.core.caching
config: Any = numba.core.config
serialize: Any = numba.core.serialize
event: Any = numba.core.event
codegen: Any = numba.core.codegen
compiler: Any = numba.core.compiler
machinery: Any = numba.core.compiler_machinery
lowering: Any = numba.core.typed_passes

_FOLDER = re.compile("kernels-[0-9a-f]{16}")
_UNUSED_SECONDS = 30 * 86_400


@cache
def cache_folder() -> str:
    """Where compiled kernels are kept; "" when there is nowhere to write."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    sources.append(Path(__file__).parent.parent / "tensors.py")  # the codes of the dtypes
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    try:
        home = config.CACHE_DIR or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weightsmith"
        folder = Path(home) / f"kernels-{digest}"
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            os.utime(folder)  # the time of its last use
        if is_new:
            _remove_unused(folder.parent)
    except (OSError, RuntimeError):  # RuntimeError: no HOME, and no such user
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


def _remove_unused(home: Path) -> None:
    """Remove the caches that no run has used for 30 days. Ends silently at an error: another run may remove them too."""
    with suppress(OSError), os.scandir(home) as entries:
        for entry in entries:
            if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                if about.st_uid == os.getuid() and about.st_mtime < time.time() - _UNUSED_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)


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


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, with a `_File`. A disk that is full costs nothing but the time to compile again."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__(function)
        self._cache_file = _File(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

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


class _CompilerForCallers(compiler.CompilerBase):  # type: ignore[misc]
    """numba's compiler, but for the last step."""

    def define_pipelines(self) -> list[Any]:
        passes = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_LoweringForCallers if one is lowering.NativeLowering else one, why) for one, why in passes.passes]
        passes.finalize()
        return [passes]


_setting_folder = threading.Lock()
"""Held while numba's cache folder, which is one for the process, is ours: two threads would restore each other's."""


def njit(function: FunctionType, called_by_kernel: bool) -> Any:
    """numba's njit of a kernel. called_by_kernel: only kernels will call it, and it becomes a part of them."""
    folder = "" if called_by_kernel else cache_folder()
    # What makes a function callable from Python and from C takes as long to compile as a small kernel.
    options: dict[str, Any] = {"no_cpython_wrapper": called_by_kernel, "no_cfunc_wrapper": True}
    if called_by_kernel:
        options["pipeline_class"] = _CompilerForCallers
    numba_njit: Any = numba.njit
    made = numba_njit(nogil=True, error_model="numpy", **options)(function)
    if called_by_kernel or made is function:  # with NUMBA_DISABLE_JIT
        return made
    if folder:
        with _setting_folder, suppress(RuntimeError):  # nowhere to write after all
            before = config.CACHE_DIR
            config.CACHE_DIR = folder
            try:
                made._cache = _Cache(function)
            finally:
                config.CACHE_DIR = before
    made.compile = watch.entered()(made.compile)
    return made


class _Listener(event.Listener):  # type: ignore[misc]
    """Tells the watch what numba does."""

    def on_start(self, event: Any) -> None:
        watch.began(compiling=event.kind == "numba:compile")

    def on_end(self, event: Any) -> None:
        pass


_listener = _Listener()
for _kind in ("numba:compile", "numba:run_pass"):
    event.register(_kind, _listener)
