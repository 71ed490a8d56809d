"""Runs another script of this folder with bounded memory and CPU time; see `bounded.py`.

The other script has `load()`, which imports what it needs and is not bounded, `run(loaded)`, and `DOING`: what takes the
memory, for a message. No module of weightsmith is imported. An error is a line on stderr and status 1.
"""

from __future__ import annotations

import contextlib
import runpy
import sys


def main() -> None:
    """Arguments: the script, bytes of memory besides what the libraries take, and seconds of CPU time."""
    path, nbytes, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    script = runpy.run_path(path)
    loaded = script["load"]()
    _limit(nbytes, seconds)
    try:
        script["run"](loaded)
    except BrokenPipeError:
        raise
    except MemoryError:
        sys.exit(f"{script['DOING']} takes more than {nbytes >> 20:,} MiB of memory")
    except Exception as error:  # libraries raise anything for a damaged file
        sys.exit((str(error).strip().splitlines() or [type(error).__name__])[0][:500])


def _limit(nbytes: int, seconds: int) -> None:
    """Bound the memory of this process to `nbytes` more than it has, and its CPU time. Not on Windows."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        with open("/proc/self/statm") as file:  # noqa: PTH123  fewer imports
            now = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main()
