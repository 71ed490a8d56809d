"""How kernels are compiled: `@kernel` is numba's njit without the GIL, cached in a folder named by what all kernels say.

numba's own cache looks at a function's file alone. A kernel that calls another, or uses its constants, would go on with the old
one after that file changed, and write past the end of a buffer. Here any change to any kernel is a new cache. The folder is
`$NUMBA_CACHE_DIR`, else `~/.cache/weightsmith`, else none: then kernels are compiled at each start.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.core.config

F = TypeVar("F")

config: Any = numba.core.config


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


def kernel(function: F) -> F:
    """Compile at the first call, for the types of its arguments; releases the GIL; no fastmath.

    A division by zero gives an infinity or NaN, as in numpy: Python's test for it before each division keeps loops from
    vectorising.
    """
    folder = cache_folder()
    before = config.CACHE_DIR
    config.CACHE_DIR = folder
    try:
        compile_: Any = numba.njit(nogil=True, cache=bool(folder), error_model="numpy")
        return compile_(function)  # type: ignore[no-any-return]
    finally:
        config.CACHE_DIR = before
