"""Whether transformers could load the output: its names and shapes against the model that its config.json builds.

For outputs whose config.json is a new one: stacks, mixtures, surgery. Where transformers is not installed, nothing is checked.
It runs in a process of its own (`loading_script.py`): importing it takes seconds and hundreds of MB, and a config.json of
unknown origin may ask for a model of any size. Code that a model brings with it is never executed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weightsmith.errors import Finding, LayerError
from weightsmith.tensors import TensorSpec

TIMEOUT_SECONDS = 120
"""Ten times what the largest published models take."""

_SHOWN = 3
_KINDS = {"missing": "not in the output", "unexpected": "the model class has no such tensor", "shape": ""}
_FIX = "load the output with its own software before you publish it"

Checked = tuple[Mapping[str, Any] | None, Iterable[TensorSpec]]
"""config.json and the tensors of a checkpoint."""


def check_loading(output: Checked, donor: Checked, label: str, *, where: str) -> LayerError | Finding | None:
    """What transformers would say of the output: an error if it could not load it, a warning where that is not known.

    donor  the model that gave config.json: what transformers already misses in it is no fault of the output
    label  the donor's

    Cost: 2 to 10 seconds, and a second pass over the donor when a difference is found.
    """
    if output[0] is None or not installed():
        return None
    answer = _ask(output)
    if "unknown" in answer:
        return _unchecked(f"transformers has no {answer['unknown']}")
    if not answer.get("failed") and not answer["differences"]:
        return None
    own = _ask(donor)
    if "failed" in answer:
        if "failed" in own:
            return _unchecked(f"transformers cannot load {label} itself: {own['failed']}")
        return _refused([answer["failed"]], where)
    before = {(kind, _pattern(name)) for kind, name, _ in own.get("differences", ())}
    found = [(kind, name, text) for kind, name, text in answer["differences"] if (kind, _pattern(name)) not in before]
    if not found:
        return None
    return _refused([f"{name}: {text or _KINDS[kind]}" for kind, name, text in found], where)


def installed() -> bool:
    """True where the check can run: from_pretrained places tensors on the meta device by accelerate."""
    return all(find_spec(name) is not None for name in ("torch", "transformers", "accelerate"))


def _refused(differences: list[str], where: str) -> LayerError:
    more = [f"and {len(differences) - _SHOWN:,} more"] if len(differences) > _SHOWN else []
    return LayerError(
        "transformers could not load the output: its config.json would build a model with other tensors",
        where=where,
        details=[*differences[:_SHOWN], *more],
        fix="choose other layers; to write it all the same, use --no-check-loading (check_loading=False)",
    )


def _unchecked(why: str) -> Finding:
    return Finding(f"the output's config.json was not checked: {why}", fix=_FIX)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _ask(checkpoint: Checked) -> dict[str, Any]:
    """The script's answer."""
    config, specs = checkpoint
    question = [config, [[s.name, s.dtype.torch, s.shape] for s in specs]]
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "TQDM_DISABLE": "1"}
    try:
        # -P: the folder of the script holds modules whose names are common.
        done = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("loading_script.py"))],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, **quiet},
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not built after {TIMEOUT_SECONDS} seconds"}
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"the process ended with status {error.returncode}"]
        return {"unknown": f"answer: {said[-1][:300]}"}
    except (OSError, ValueError) as error:
        return {"unknown": f"answer: {error}"}
    return answer
