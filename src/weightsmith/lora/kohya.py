"""LoRA adapters in single files, as kohya's scripts write them: `lora_down`, `lora_up` and `alpha` of each module.

A file has no config. Names of modules have `_` in place of dots, after a beginning that names the network, such as `lora_te_`
for a text encoder: a module is the base's one whose name is the same with `_` for each dot. Without an `alpha`, the scaling
is 1.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from weightsmith.checkpoint import Checkpoint, ModelFolder
from weightsmith.errors import FormatError, Unsupported
from weightsmith.formats.files import show
from weightsmith.lora.records import CONFIG_NAME, Adapter, Factors
from weightsmith.sources import open_file
from weightsmith.text import count

_BEGINNING = re.compile(r"lora_(?:te\d*|unet|transformer|llm|prior)_|lora_|lycoris_")
_PART = re.compile(r"([^.]+)\.(lora_down\.weight|lora_up\.weight|alpha)")


def open_kohya(ref: str, path: Path) -> Adapter:
    """Open a single file. Raises Unsupported for one that is not kohya's, and for layers that are not linear."""
    opened = open_file(path, ref)
    checkpoint = Checkpoint(
        ref, opened.source, ModelFolder(path.parent, config={}), metadata=opened.metadata, notes=opened.notes
    )
    try:
        return Adapter(checkpoint, _updates(checkpoint, path), flat=True)
    except Exception:
        checkpoint.close()
        raise


def _updates(checkpoint: Checkpoint, path: Path) -> dict[str, Factors]:
    parts: dict[str, dict[str, str]] = {}
    strange: list[str] = []
    for name in checkpoint.specs:
        match, beginning = _PART.fullmatch(name), _BEGINNING.match(name)
        if match is None or beginning is None:
            strange.append(name)
        else:
            parts.setdefault(match[1][beginning.end() :], {})[match[2]] = name
    if not parts:
        fix = f"name the folder that holds {CONFIG_NAME}, or a single file with lora_down and lora_up"
        raise Unsupported("a single file that is not a LoRA of kohya's scripts", where=str(path), details=strange[:3], fix=fix)
    if strange:
        what = f"{len(strange):,} tensors are neither lora_down, lora_up nor alpha of a module"
        fix = "merge it with the program that has made it, or convert it to PEFT's format"
        raise Unsupported(what, where=str(path), details=[show(name) for name in strange[:8]], fix=fix)
    problems, updates = [], {}
    for module, own in parts.items():
        shapes = [checkpoint.specs[own[part]].shape if part in own else () for part in ("lora_down.weight", "lora_up.weight")]
        down, up = shapes
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or 0 in (*down, *up):
            problems.append(f"{module}: lora_down {list(down)} and lora_up {list(up)} are no factors of a linear layer")
            continue
        scaling = 1.0
        if "alpha" in own:
            spec = checkpoint.specs[own["alpha"]]
            if spec.size != 1 or not spec.dtype.floating:
                problems.append(f"{spec} is not one number")
                continue
            scaling = float(checkpoint.read(spec.name).astype(float).reshape(())) / down[0]
            if not math.isfinite(scaling):
                problems.append(f"{spec.name} is {scaling}")
                continue
        updates[module] = Factors(own["lora_down.weight"], own["lora_up.weight"], embedding=False, scaling=scaling)
    if problems:
        what = f"the adapter's tensors have {count(len(problems), 'problem')}"
        raise FormatError(what, where=str(path), details=problems[:8], fix="convert it to PEFT's format, or repair it")
    return updates
