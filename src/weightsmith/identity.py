"""The identity of resumable work: the plan, the state of the input files, and the program."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from weightsmith._version import __version__
from weightsmith.plans import Plan
from weightsmith.sources import Tensors

ROOMS = ("encodings", "engine", "formats", "jobs", "kernels", "lora", "methods", "mixture", "products", "sources", "structure")
"""Rooms whose code determines the bytes of an output, given the plan."""
FILES = ("tensors.py", "plans/values.py", "store/checksum.py")
"""Modules that do so too."""
PACKAGES = ("numpy", "numba", "torch")
"""Packages whose numbers may differ between versions."""


def work_identity(plan: Plan, inputs: Sequence[Tensors]) -> str:
    """Equal for two runs whose finished tensors may be mixed (sha256, hex)."""
    return hashlib.sha256("\n".join([plan.hash, program_digest(), *(model.state for model in inputs)]).encode()).hexdigest()


@cache
def program_digest() -> str:
    """Digest of the version and the code that computes bytes (sha256, hex). Work of another program is not resumed."""
    digest = hashlib.sha256(__version__.encode())
    package = Path(__file__).parent
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    for name in FILES:
        digest.update((package / name).read_bytes())
    for name in PACKAGES:
        digest.update(f"{name} {_version(name)}\0".encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
