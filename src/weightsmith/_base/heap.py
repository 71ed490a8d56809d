"""What glibc's malloc does with freed memory. Other C libraries are left alone.

By default it gives each thread an arena that keeps what its threads have freed, blocks of up to 32 MiB too, and never shrinks
in the middle: 0.2 GB where matrices of 46 MB are decomposed, and 2 MB more for each layer that is calibrated.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache

LARGE_BYTES = 4 << 20
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h


def limit_malloc_arenas() -> None:
    """Have all threads share an arena from now on. For a process that is ours alone: for programs that use weightsmith as a
    library it may be slower.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@cache
def return_large_blocks() -> None:
    """Have freed blocks of `LARGE_BYTES` and more returned to the system at once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def return_freed() -> None:
    """Return what is free now to the system. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
