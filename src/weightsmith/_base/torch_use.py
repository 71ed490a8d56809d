"""torch, where something is computed with it: whether it is installed, on which device, and on one thread, so that results do
not depend on the number of processors.

Importing this module imports no torch.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from weightsmith._base.errors import ParameterError, first_line
from weightsmith._base.installation import install
from weightsmith._base.options import named
from weightsmith._base.process import return_large_blocks

CPU_BUILD_BYTES = 250 << 20
"""Memory of torch's CPU build, imported and at work."""

GPU_BUILD_BYTES = 400 << 20
"""How much more a GPU build takes, measured with CUDA 13. Its libraries are loaded even without a GPU."""

_loading = threading.Lock()
_loaded: set[str] = set()


def needs_torch() -> str:
    """An error message if torch is not installed, else ""."""
    try:
        installed = importlib.util.find_spec("torch") is not None
    except ImportError:
        installed = False
    return "" if installed else f"this method requires torch, which is not installed: run {install('torch')}"


@cache
def installed_bytes() -> int:
    """Memory of torch, imported and at work: of the build that is installed, else of a CPU build."""
    spec = None if needs_torch() else importlib.util.find_spec("torch")
    libraries = [Path(folder, "lib") for folder in (spec.submodule_search_locations or () if spec else ())]
    names = [name for kind in ("cuda", "hip", "xpu") for name in (f"libtorch_{kind}.so", f"torch_{kind}.dll")]
    for_gpu = any((folder / name).exists() for folder in libraries for name in names)
    return CPU_BUILD_BYTES + for_gpu * GPU_BUILD_BYTES


def named_device(device: str) -> str:
    """The torch device that a user's choice names: with "auto", cuda where torch can use it.

    >>> named_device("cuda:1")
    'cuda:1'
    """
    if device != "auto":
        return device
    if needs_torch():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: str, dtype: str = "float32") -> str:
    """`named_device`, after torch has used it. dtype: of the numbers that will be there. Raises ParameterError."""
    import torch

    name = named_device(device)
    try:
        torch.zeros(1, device=name, dtype=getattr(torch, dtype))  # a call of CUDA by this thread, without which cuBLAS warns
    except Exception as error:  # what torch raises for unknown names and missing devices differs by build
        what = f"the device '{name}' cannot be used: {first_line(error)}"
        raise ParameterError(what, where=named("device"), fix="write cpu, or a device that torch supports") from error
    load_linear_algebra(name)
    return name


def load_linear_algebra(device: str) -> None:
    """Let torch load its linear algebra for a GPU, once. Two threads that do so at the same time get a RuntimeError.

    device  as torch names it, and one that torch can use
    """
    if not device.startswith("cuda"):
        return
    with _loading:
        if device not in _loaded:
            import torch

            torch.linalg.inv(torch.ones(1, 1, device=device))
            _loaded.add(device)


Tensor = Any  # torch is optional, so mypy cannot use its type


class _OneThread:
    """Context manager: torch uses one thread while any block is active, and the previous number after the last.

    OpenMP has a number for each thread, so every thread sets its own to 1. A thread that leaves before the last keeps 1,
    because restoring it would change the process's too; its number does not count as the previous one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 1
        self._here = threading.local()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        import torch

        return_large_blocks()
        with self._lock:
            if self._inside == 0 and not getattr(self._here, "changed", False):
                self._before = torch.get_num_threads()
            self._inside += 1
            self._here.changed = True
            torch.set_num_threads(1)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    torch.set_num_threads(self._before)
                    self._here.changed = False


one_thread = _OneThread()
