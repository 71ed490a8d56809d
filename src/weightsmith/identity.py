"""The identity of resumable work: the plan, the state of the input files, the program, and the device if it matters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from weightsmith._version import __version__
from weightsmith.formats.collector import collector_paused
from weightsmith.jobs.requires import named_device
from weightsmith.plans import COPY, Plan
from weightsmith.products import find_kind
from weightsmith.recipe.nodes import Node
from weightsmith.recipe.yaml import read_yaml
from weightsmith.sources import Tensors

ROOMS = (
    "adapters",
    "decoder",
    "encodings",
    "engine",
    "formats",
    "jobs",
    "kernels",
    "lora",
    "methods",
    "mixture",
    "products",
    "quantisation",
    "remote",
    "sources",
    "structure",
    "transplant",
)
"""Rooms whose code determines the bytes of an output, given the plan."""
FILES = ("tensors.py", "plans/values.py", "store/checksum.py", "buckets/parts.py")
"""Modules that do so too, and the one that determines which bytes an uploaded part has."""
PACKAGES = ("numpy", "numba", "torch", "libgguf")
"""Packages whose numbers may differ between versions."""


def work_identity(plan: Plan, inputs: Sequence[Tensors], device: str) -> str:
    """Equal for two runs whose finished tensors may be mixed (sha256, hex). device: of the run, as torch names it, or auto."""
    with collector_paused():
        plan_hash = plan.hash
    parts = [plan_hash, program_digest(), *(model.state for model in inputs), *_device_type(plan, device)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _device_type(plan: Plan, device: str) -> list[str]:
    """The type of the device if a product depends on it, else []: devices round differently."""
    if not any(find_kind(product.op).device for product in plan.products):
        return []
    return [named_device(device).partition(":")[0]]


def facts(plan: Plan, inputs: Sequence[Tensors], device: str) -> dict[str, str]:
    """What the identity depends on, by user-facing names; `#` starts a digest. Only for messages."""
    documents = read_yaml(plan.recipe, "")
    found: dict[str, str] = {}
    for i, document in enumerate(documents):
        if document.root is not None:
            found |= _leaves(document.root, f"[{i}]" if len(documents) > 1 else "")
    found["seed"] = str(plan.seed)
    for kind in _device_type(plan, device):
        found["device"] = kind
    found["max_shard_bytes"] = f"{plan.max_shard_bytes:,}"
    found["dtypes of the output"] = ", ".join(sorted({out.dtype.name for step in plan.steps for out in step.outs}))
    found["tensors that are copied"] = f"{sum(step.op == COPY for step in plan.steps):,} of {len(plan.steps):,}"
    for planned, model in zip(plan.models, inputs, strict=True):
        found[f"files of {planned.ref}"] = _digest(model.state)
    if plan.made.code is not None:
        found[f"code of {plan.made.code.name}"] = _digest(plan.made.code.sha256)
    found["program version"] = __version__
    found["program code, or the version of numpy, numba, torch or libgguf"] = _digest(program_digest())
    return found


def _leaves(node: Node, path: str) -> Iterator[tuple[str, str]]:
    """Key paths such as `models[0].parameters.weight`, and their values."""
    if isinstance(node.value, dict):
        for name, pair in node.value.items():
            yield from _leaves(pair.value, f"{path}.{name}" if path else name)
    elif isinstance(node.value, tuple):
        for i, item in enumerate(node.value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, node.value if isinstance(node.value, str) else json.dumps(node.value)


def _digest(text: str) -> str:
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:16]


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
