"""Single files of LoRA factors, without an adapter_config.json: kohya's, diffusers', ComfyUI's.

The update of a module is alpha / rank · B @ A, or B @ A without an `alpha`: so do kohya's scripts, diffusers and ComfyUI.
diffusers also writes rank and alpha into the metadata of the file. PEFT's own file says neither, as adapter_config.json does:
a file with PEFT's names alone is not read.

A convolution's A is [rank, inputs, height, width] and B [outputs, rank, 1, 1]: as matrices, they are factors like all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._base.strict_json import parse_object
from weightsmith._base.text import count
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.lora.adapter import CONFIG_NAME, PREFIX, Adapter, Factors, FileNames, Scalings
from weightsmith._models.lora.forms import ALPHA, DORA, Pair, other_kind, split_factor
from weightsmith._models.lora.keys import check_config
from weightsmith._models.lora.networks import UNKNOWN, network_of

METADATA_KEY = "lora_adapter_metadata"
"""What diffusers writes into a file's metadata: rank, alpha and more of each network, as JSON."""

_SHOWN = 8
_MOST_DIMENSIONS = 5  # of the kernel of a convolution over time, height and width
_WAY_OUT = "merge it into its base with the program that made it, and use that model"
_Parts = dict[str, tuple[str, Pair]]


def read_file(checkpoint: Checkpoint, path: Path) -> Adapter:
    """The adapter in a file whose names are of factors.

    Raises Unsupported for what is no B @ A, and for a scale that is in no file; FormatError for factors that do not fit.
    """
    where = str(path)
    parts_of_module, alphas, strange = _sorted(checkpoint)
    if kinds := dict.fromkeys(filter(None, map(other_kind, strange))):
        named = [f"{show(name)}: {other_kind(name)}" for name in strange if other_kind(name)]
        what = f"it is {' and '.join(kinds)}, not plain LoRA, and is neither applied nor merged"
        raise Unsupported(what, where=where, details=named[:_SHOWN], fix=_WAY_OUT)
    if not parts_of_module:
        fix = f"name the folder that holds {CONFIG_NAME}, or a single file with lora_down and lora_up, or lora_A and lora_B"
        details = [show(name) for name in strange[:3]]
        what = "a single file that is not a LoRA of kohya's scripts, or of diffusers"
        raise Unsupported(what, where=where, details=details, fix=fix)
    strange += [alphas.pop(module) for module in [*alphas] if module not in parts_of_module]
    if strange:
        what = f"{count(len(strange), 'tensor')} of it are neither factors nor alpha of a module"
        raise Unsupported(what, where=where, details=[show(name) for name in strange[:_SHOWN]], fix=_WAY_OUT)
    flat = _is_flat(parts_of_module, where)
    scale = _Scale(checkpoint, alphas, where, flat=flat)
    problems, updates = list[str](), dict[str, Factors]()
    for module, parts in parts_of_module.items():
        factors = _factors(checkpoint, module, parts, scale)
        if isinstance(factors, str):
            problems.append(factors)
        else:
            updates[module] = factors
    if problems:
        what = f"the adapter's tensors have {count(len(problems), 'problem')}"
        raise FormatError(what, where=where, details=problems[:_SHOWN], fix="repair it, or save it again with its trainer")
    pairs = {module: parts["A"][1] for module, parts in parts_of_module.items()}
    return Adapter(checkpoint, updates, file=FileNames(flat, pairs, frozenset(alphas)))


def _sorted(checkpoint: Checkpoint) -> tuple[dict[str, _Parts], dict[str, str], list[str]]:
    """Module → its A and B; module → its alpha; and all other tensors."""
    parts_of_module: dict[str, _Parts] = {}
    alphas: dict[str, str] = {}
    strange: list[str] = []
    for name in checkpoint.specs:
        factor = split_factor(name)
        if factor is not None and factor[1] not in parts_of_module.get(factor[0], {}):
            parts_of_module.setdefault(factor[0], {})[factor[1]] = name, factor[2]
        elif factor is None and name.endswith(ALPHA):
            alphas[name.removesuffix(ALPHA)] = name
        else:
            strange.append(name)
    return parts_of_module, alphas, strange


def _is_flat(modules: Mapping[str, _Parts], where: str) -> bool:
    """Whether names of modules have `_` for each dot. Raises Unsupported if some do and others do not."""
    dotted = [module for module in modules if "." in module]
    if dotted and len(dotted) < len(modules):
        flat = next(module for module in modules if "." not in module)
        details = [show(flat), show(dotted[0])]
        raise Unsupported("it names modules in two ways, with dots and with _", where=where, details=details, fix=_WAY_OUT)
    return not dotted


class _Scale:
    """What the product of a module's factors is multiplied with."""

    def __init__(self, checkpoint: Checkpoint, alphas: Mapping[str, str], where: str, *, flat: bool) -> None:
        self._checkpoint, self._alphas, self._where, self._flat = checkpoint, alphas, where, flat
        text = checkpoint.metadata.get(METADATA_KEY, "")
        fix = "repair it, or save it again with diffusers"
        self._metadata = parse_object(text.encode(), METADATA_KEY, where, fix) if text else {}
        self._stated: dict[str, Scalings | None] = {}

    def of(self, module: str, rank: int, pair: Pair) -> float | str:
        """The number; or what is wrong with it. Raises Unsupported if it is in no file."""
        network, inner = network_of(module, flat=self._flat)
        beginning = module.removesuffix(inner).removesuffix(".")
        stated = self._of_network(beginning)
        if stated is not None:
            if (stated_rank := stated.rank(inner)) != rank:
                return f"{module} has rank {stated_rank} by the file's metadata, and factors of {rank}"
            return stated.of(inner)
        if module in self._alphas:
            return self._alpha(self._alphas[module], rank)
        if network is UNKNOWN and pair.a.startswith(".lora_A"):
            what = "neither an alpha nor the name of a network says what the factors are multiplied with"
            if module.startswith(PREFIX):
                what = "its factors are named as PEFT names them, and lora_alpha / r, their scale, is in no file"
            fix = f"name the folder that holds {CONFIG_NAME} beside it"
            raise Unsupported(what, where=self._where, details=[show(module)], fix=fix)
        return 1.0

    def _alpha(self, name: str, rank: int) -> float | str:
        spec = self._checkpoint.specs[name]
        if spec.size != 1 or spec.dtype.name == "BOOL":
            return f"{spec} is not one number"
        alpha = float(self._checkpoint.read(name).astype(float).reshape(()))
        return alpha / rank if math.isfinite(alpha) else f"{name} is {alpha}"

    def _of_network(self, beginning: str) -> Scalings | None:
        """What the metadata says of a network; None if it says nothing."""
        if beginning not in self._stated:
            start = f"{beginning}."
            stated = self._metadata.items() if beginning else ()
            network_config: dict[str, Any] = {key.removeprefix(start): value for key, value in stated if key.startswith(start)}
            if network_config:
                check_config({**network_config, "peft_type": "LORA"}, f"{self._where}, {METADATA_KEY}")
            if network_config.get("use_dora"):
                what = f"it is {DORA} by its metadata, and has no norms of rows"
                raise Unsupported(what, where=self._where, fix=_WAY_OUT)
            self._stated[beginning] = Scalings(network_config, f"{self._where}, {METADATA_KEY}") if network_config else None
        return self._stated[beginning]


def _factors(checkpoint: Checkpoint, module: str, parts: _Parts, scale: _Scale) -> Factors | str:
    """The factors of a module; or what is wrong with them."""
    if len(parts) < 2:
        (part,) = parts
        return f"{module} has an {part}, {show(parts[part][0])}, and no {'B' if part == 'A' else 'A'}"
    (a, pair), (b, other) = parts["A"], parts["B"]
    down, up = checkpoint.specs[a], checkpoint.specs[b]
    shapes = f"{list(down.shape)} and {list(up.shape)}"
    alike = pair is other and 2 <= len(down.shape) == len(up.shape) <= _MOST_DIMENSIONS and set(up.shape[2:]) <= {1}
    if not alike or down.shape[0] != up.shape[1] or 0 in (*down.shape, *up.shape):
        return f"{module}: {shapes} are no factors of a linear layer or a convolution"
    if not (down.dtype.floating and up.dtype.floating):
        return f"{module}: {down.dtype} and {up.dtype} are no floating numbers"
    scaling = scale.of(module, down.shape[0], pair)
    return scaling if isinstance(scaling, str) else Factors(a, b, pair.embedding, scaling)
