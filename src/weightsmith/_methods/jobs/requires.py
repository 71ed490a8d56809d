"""Optional packages that some jobs require."""

from __future__ import annotations

import importlib.util

from weightsmith._base.errors import ParameterError, first_line
from weightsmith._base.installation import install
from weightsmith._base.options import named


def needs_torch() -> str:
    """An error message if torch is not installed, else ""."""
    try:
        found = importlib.util.find_spec("torch") is not None
    except ImportError:
        found = False
    return "" if found else f"this method requires torch, which is not installed: run {install('torch')}"


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
        torch.empty(1, device=name, dtype=getattr(torch, dtype))
    except Exception as error:  # what torch raises for unknown names and missing devices differs by build
        what = f"the device '{name}' cannot be used: {first_line(error)}"
        raise ParameterError(what, where=named("device"), fix="write cpu, or a device that torch supports") from error
    return name
