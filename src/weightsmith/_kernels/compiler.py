"""numba, as kernels are compiled with it; imported when the first one is called.

numba's own cache looks at a function's file alone. A kernel that calls another, or uses its constants, would go on with the old
one after that file changed, and write past the end of a buffer. Here each kernel is kept under the digest of all that decides
its machine code: after a change that kernel and its callers are compiled again, and nothing else. The folder is `kernels` in
`$NUMBA_CACHE_DIR`, else in `~/.cache/weightsmith`, else none: then kernels are compiled at each start. What no run has used for
30 days is removed when a new kernel is kept.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
import warnings
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from weightsmith._base.errors import Finding, ParameterError, first_line
from weightsmith._base.installation import cache_home, install_package
from weightsmith._base.text import warn
from weightsmith._kernels.jit import compiler_digest, digest_of, watch

with warnings.catch_warnings(record=True) as _unread:
    try:
        import numba
    except ValueError as error:  # of a variable that it reads when it is imported
        _variables = ", ".join(sorted(name for name in os.environ if name.startswith("NUMBA_")))
        _fix = "correct these variables of the environment, or unset them"
        raise ParameterError(f"numba cannot be imported: {first_line(error)}", where=_variables, fix=_fix) from error
for _warning in _unread:
    if _variable := re.match(r"Environment variable '(NUMBA_\w+)'", str(_warning.message)):
        warn(Finding(f"numba does not understand {os.environ.get(_variable[1], '')!r}, and ignores it", _variable[1]))

config: Any = numba.config

TESTED = (0, 68)
"""The last release of numba whose inside is known to be as `internals` takes it; pyproject.toml allows none after it."""


@cache
def internals() -> ModuleType | None:
    """`kernels.internals`; None for a release of numba that has another inside, or that was not tested, with a warning."""
    release = tuple(int(part) for part in re.findall(r"\d+", numba.__version__)[:2])
    why = f"this version was tested with numba {TESTED[0]}.{TESTED[1]} at most"
    if release <= TESTED:
        try:
            from weightsmith._kernels import internals
        except (ImportError, AttributeError, TypeError) as error:
            why = f"its inside is another than this version takes: {first_line(error)}"
        else:
            return internals
    older = install_package(f"'numba<{TESTED[0]}.{TESTED[1] + 1}'")
    fix = f"run {older} to change that"
    warn(Finding(f"kernels compile more slowly with numba {numba.__version__}: {why}", fix=fix))
    return None


@cache
def cache_folder() -> str:
    """Where compiled kernels are kept; "" when there is nowhere to write."""
    try:
        folder = Path(config.CACHE_DIR or cache_home()) / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no HOME, and no such user
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


_KEPT = re.compile(r"[\w.<>]+\.[0-9a-f]{32}(\.nbc(\.[0-9a-f]{32})?)?")
"""A kernel, one that a run was about to write, and the folder of one that numba keeps."""

_UNUSED_SECONDS = 30 * 86_400


@cache
def remove_unused(folder: str) -> None:
    """Remove, once in each process, what no run has used for 30 days. Ends silently at an error: another may remove it too."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _KEPT.fullmatch(entry.name) and not entry.is_symlink():
                about = entry.stat(follow_symlinks=False)
                if about.st_uid == os.getuid() and about.st_mtime < time.time() - _UNUSED_SECONDS:
                    if entry.is_dir():
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        Path(entry.path).unlink()


def njit(function: FunctionType, called_by_kernel: bool, digest: str) -> Any:
    """numba's njit of a kernel. called_by_kernel: only kernels will call it, and it becomes a part of them.

    It is kept under its digest; without one it is not. With a numba that was not tested it is compiled by itself.
    """
    inside = internals()
    folder = cache_folder() if digest else ""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if inside is not None:
        # What makes a function callable from Python and from C takes as long to compile as a small kernel.
        options |= {"no_cpython_wrapper": called_by_kernel, "no_cfunc_wrapper": True}
    numba_njit: Any = numba.njit
    pipeline = {"pipeline_class": inside.CompilerForCallers} if inside is not None and called_by_kernel else {}
    dispatcher = numba_njit(**options, **pipeline)(function)
    if dispatcher is function:  # with NUMBA_DISABLE_JIT
        return dispatcher
    if called_by_kernel:
        if inside is not None:
            inside.ignore_constants(dispatcher)
        return dispatcher
    if folder:
        base = Path(folder, f"{function.__module__}.{function.__qualname__}")
        made_by = digest, compiler_digest(), sorted(options.items())
        if inside is None:
            _keep_by_numba(dispatcher, Path(f"{base}.{digest_of(made_by)}"))
        else:
            dispatcher._cache = inside.Cache(base, (made_by, inside.steps_digest()), partial(remove_unused, folder))
    dispatcher.compile = watch.entered()(dispatcher.compile)
    return dispatcher


_setting_folder = threading.Lock()
"""Held while numba's cache folder, which is one for the process, is a kernel's: two threads would restore each other's."""


def _keep_by_numba(dispatcher: Any, folder: Path) -> None:
    """Have numba keep a function in this folder, in its own way."""
    with _setting_folder, suppress(RuntimeError, OSError):  # nowhere to write after all
        remove_unused(str(folder.parent))
        before = config.CACHE_DIR
        config.CACHE_DIR = str(folder)
        try:
            dispatcher.enable_caching()
            os.utime(folder)  # the time of its last use
        finally:
            config.CACHE_DIR = before


def _listen() -> None:
    """Have numba tell the watch what it does."""
    try:
        event: Any = import_module("numba.core.event")
    except ImportError:  # then nothing says that kernels are being compiled
        return

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            watch.began(compiling=event.kind == "numba:compile")

        def on_end(self, event: Any) -> None:
            pass

    listener = Listener()
    for kind in ("numba:compile", "numba:run_pass"):
        event.register(kind, listener)


_listen()
