"""The identity of resumable work: the plan, the state of the input files, the program, and the device if it matters."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from weightsmith import _methods as methods
from weightsmith._base.installation import is_release
from weightsmith._base.torch_use import named_device
from weightsmith._engine.products import KINDS, find_kind
from weightsmith._files.safetensors import collector_paused
from weightsmith._models.formats import installed_code
from weightsmith._planning.recipe.yaml import Node, read_yaml
from weightsmith._plans import COPY, Plan
from weightsmith._version import __version__
from weightsmith.abc.tensors import Tensors

ROOTS = ("_engine", "_models.checkpoint", "_outputs.staging")
"""What determines the bytes of an output, given the plan and the inputs, with all that it imports: the engine, how inputs are
opened, how bytes are written and taken over, and which bytes an uploaded part has."""
OUTSIDE = ("_reports", "_execution", "_app", "testing")
"""Packages that decide no byte of an output, though `ROOTS` reach them: reports are never resumed, and runs only order work."""
PACKAGES = ("numpy", "numba", "torch", "libgguf")
"""Packages whose numbers may differ between versions."""


def work_identity(plan: Plan, inputs: Sequence[Tensors], device: str) -> str:
    """Equal for two runs whose finished tensors may be mixed (sha256, hex). device: of the run, as torch names it, or auto."""
    with collector_paused():
        plan_hash = plan.hash
    parts = [plan_hash, program_digest(), *installed_code(), *_installed_code(plan), *(model.state for model in inputs)]
    parts += _device_type(plan, device)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _installed_code(plan: Plan) -> list[str]:
    """What identifies the installed plug-ins that the products of the plan use, or of one whose result it reads."""
    identities = {
        f"{KINDS.identity(product.op)}\n{find_kind(product.op).installed(product)}".strip() for product in plan.products
    }
    nested = (model.plan for model in plan.models if model.plan is not None)
    return sorted(identities.union(*map(_installed_code, nested)) - {""})


def merges_on_device(plan: Plan) -> bool:
    """Whether torch computes whole matrices of the plan, or of one whose result it reads, on the run's device."""
    ops = {(leaf.op, leaf.settings) for step in plan.all_steps for leaf in step.leaves if leaf.merges and leaf.role == "linear"}
    return any(methods.get(op).on_device(plan.settings[settings].shared) for op, settings in ops) or any(
        merges_on_device(model.plan) for model in plan.models if model.plan is not None
    )


def _device_type(plan: Plan, device: str) -> list[str]:
    """The type of the device if it changes the numbers of a product or a tensor, else []: devices round differently."""
    if not merges_on_device(plan) and not any(find_kind(product.op).device for product in plan.products):
        return []
    return [named_device(device).partition(":")[0]]


def facts(plan: Plan, inputs: Sequence[Tensors], device: str) -> dict[str, str]:
    """What the identity depends on, by user-facing names; `#` starts a digest. Only for messages."""
    documents = read_yaml(plan.recipe, "")
    facts: dict[str, str] = {}
    for i, document in enumerate(documents):
        if document.root is not None:
            facts |= _leaves(document.root, f"[{i}]" if len(documents) > 1 else "")
    facts["seed"] = str(plan.seed)
    for kind in _device_type(plan, device):
        facts["device"] = kind
    facts["max_shard_bytes"] = f"{plan.max_shard_bytes:,}"
    facts["dtypes of the output"] = ", ".join(sorted({out.dtype.name for step in plan.steps for out in step.outs}))
    facts["tensors that are copied"] = f"{sum(step.op == COPY for step in plan.steps):,} of {len(plan.steps):,}"
    for planned, model in zip(plan.models, inputs, strict=True):
        facts[f"files of {planned.ref}"] = _digest(model.state)
    if plan.provenance.code is not None:
        facts[f"code of {plan.provenance.code.name}"] = _digest(plan.provenance.code.sha256)
    if code := _installed_code(plan):
        facts["code of installed packages"] = _digest("\n".join(code))
    facts["program version"] = __version__
    facts["program code, or the version of numpy, numba, torch or libgguf"] = _digest(program_digest())
    return facts


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
    """Digest of the program (sha256, hex). Work of another program is not resumed.

    A release is its version. In a checkout, many states of the code have one version, so its text counts.
    """
    digest = hashlib.sha256(__version__.encode())
    package = Path(__file__).parents[1]
    for name, data in () if is_release(package) else program_files(package).items():
        digest.update(name.encode() + b"\0" + data)
    for name in PACKAGES:
        digest.update(f"{name} {_version(name)}\0".encode())
    return digest.hexdigest()


_NAMED = re.compile(rb"\bweightsmith((?:\.\w+)+)(\.\{)?(?: +import +(\([^)]*\)|[^\n]*))?")


def program_files(package: Path) -> dict[str, bytes]:
    """The modules that `ROOTS` import, directly or not, and their text; by path, in order. Those of `OUTSIDE` are left out.

    A module counts as imported where its full name is in the text: lists of plug-ins name modules in strings, and a name with
    `{` after it stands for every module of that package. Comments may add a module too many, which costs nothing but a
    resumption.
    """
    paths = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    paths = {name: path for name, path in paths.items() if not name.startswith(tuple(f"{outside}/" for outside in OUTSIDE))}
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in paths}
    below = {root: [name for module, name in modules.items() if f"{module}.".startswith(f"{root}.")] for root in ROOTS}
    todo, sources = [name for names in below.values() for name in names], dict[str, bytes]()
    while todo:
        if (name := todo.pop()) in sources:
            continue
        sources[name] = paths[name].read_bytes()
        for dotted, dynamic, imported in _NAMED.findall(sources[name]):
            path = dotted.decode()[1:]
            parts = path.split(".")
            named = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
            named += [f"{path}.{word.decode()}" for word in re.findall(rb"\w+", imported)]
            if dynamic:
                named += [module for module in modules if module.startswith(f"{path}.")]
            todo += [modules[module] for module in named if module in modules]
    return dict(sorted(sources.items()))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
