"""numba, as kernels are compiled with it; imported when the first one is called.

numba's own cache looks at a function's file alone. A kernel that calls another, or uses its constants, would go on with the old
one after that file changed, and write past the end of a buffer. Here any change to any kernel is a new cache. The folder is
`$NUMBA_CACHE_DIR`, else `~/.cache/weightsmith`, else none: then kernels are compiled at each start. A run that creates
a new cache removes those that no run has used for 30 days.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
import warnings
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from weightsmith._base.errors import Finding, ParameterError, first_line
from weightsmith._base.installation import cache_home, install_package
from weightsmith._base.text import warn
from weightsmith._kernels.watch import watch

with warnings.catch_warnings(record=True) as _unread:
    try:
        import numba
    except ValueError as error:  # of a variable that it reads when it is imported
        _given = ", ".join(sorted(name for name in os.environ if name.startswith("NUMBA_")))
        _fix = "correct these variables of the environment, or unset them"
        raise ParameterError(f"numba cannot be imported: {first_line(error)}", where=_given, fix=_fix) from error
for _each in _unread:
    if _variable := re.match(r"Environment variable '(NUMBA_\w+)'", str(_each.message)):
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


_FOLDER = re.compile("kernels-[0-9a-f]{16}")
_UNUSED_SECONDS = 30 * 86_400


@cache
def cache_folder() -> str:
    """Where compiled kernels are kept; "" when there is nowhere to write."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    sources.append(Path(__file__).parents[1] / "_base" / "tensors.py")  # the codes of the dtypes
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    try:
        home = config.CACHE_DIR or cache_home()
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


_setting_folder = threading.Lock()
"""Held while numba's cache folder, which is one for the process, is ours: two threads would restore each other's."""


def njit(function: FunctionType, called_by_kernel: bool) -> Any:
    """numba's njit of a kernel. called_by_kernel: only kernels will call it, and it becomes a part of them.

    With a numba that was not tested it is compiled by itself, and kept in numba's own cache, in our folder: that one is
    another after any change of any kernel.
    """
    inside = internals()
    folder = "" if called_by_kernel else cache_folder()
    options: dict[str, Any] = {}
    if inside is not None:
        # What makes a function callable from Python and from C takes as long to compile as a small kernel.
        options = {"no_cpython_wrapper": called_by_kernel, "no_cfunc_wrapper": True}
        if called_by_kernel:
            options["pipeline_class"] = inside.CompilerForCallers
    numba_njit: Any = numba.njit
    made = numba_njit(nogil=True, error_model="numpy", **options)(function)
    if called_by_kernel or made is function:  # with NUMBA_DISABLE_JIT
        return made
    if folder:
        with _setting_folder, suppress(RuntimeError):  # nowhere to write after all
            before = config.CACHE_DIR
            config.CACHE_DIR = folder
            try:
                if inside is None:
                    made.enable_caching()
                else:
                    made._cache = inside.Cache(function)
            finally:
                config.CACHE_DIR = before
    made.compile = watch.entered()(made.compile)
    return made


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
