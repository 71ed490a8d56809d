"""Router weights kept with the unfinished output: a run that goes on does not compute hidden states twice.

The file is a zip archive, whose parts have checksums, with the key of what the weights were made from. One that is damaged,
or has another key, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np

from weightsmith._version import __version__
from weightsmith.mixture.packages import package_version
from weightsmith.mixture.routing.gates import MODES, Gating
from weightsmith.mixture.routing.report import Report
from weightsmith.mixture.routing.route import Routing
from weightsmith.tensors import DType

NAME = "router"
"""The file in the folder where the output is built."""


def key_of(gating: Gating, mode: str, dtype: DType, *, report: bool) -> str:
    """Identity of router weights, and of the report if there is one (sha256, hex): of all that they follow from.

    That is the recipe and the seed; and prompts, base, tokenizer and programs where these are used.
    """
    facts: list[object] = [__version__, [mode, dtype.name, report, gating.seed, gating.shape], gating.recipe.router_scale]
    if report or MODES[mode].needs != "nothing":
        facts += _seen(gating, report=report)
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _seen(gating: Gating, *, report: bool) -> list[object]:
    """What the model is shown, and by what it is read."""
    donor, recipe = gating.base.donor, gating.recipe
    models = sorted({i.model for step in donor.steps.values() for leaf in step.leaves for i in leaf.inputs})
    inputs = gating.assembly.inputs
    files = [donor.checkpoint.folder / name for name in donor.checkpoint.files]
    return [
        [package_version(name) for name in ("torch", "transformers", "tokenizers")],
        [recipe.prompt_tokens, recipe.experts_per_token, len(recipe.experts)],
        [str(expert.model) for expert in gating.experts],
        [[t.positive, t.negative, sorted((t.whole or {}).items()), t.held_out if report else ()] for t in gating.texts],
        dict(donor.config),
        [step.to_json() for step in donor.steps.values()],
        [[dict(s.shared), [dict(m) for m in s.models]] for s in gating.assembly.settings],
        [inputs[model].state_hash for model in models],
        [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()],
    ]


def load(path: Path, key: str) -> Routing | None:
    """What was kept under this key, or None."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as parts:
            if str(parts["key"]) != key:
                return None
            told = json.loads(str(parts["report"]))
            return Routing(parts["rows"], None if told is None else Report.from_json(told))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def save(path: Path, key: str, routing: Routing) -> None:
    """Keep router weights; on a disk that cannot take them nothing is kept."""
    told = None if routing.report is None else routing.report.to_json()
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, key=np.array(key), rows=routing.rows, report=np.array(json.dumps(told)))
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
