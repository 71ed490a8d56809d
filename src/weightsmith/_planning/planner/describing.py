"""What transformers calls the modules and tensors of a checkpoint: asked in another process (`transformers_script.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from weightsmith._models.checkpoint import Checkpoint
from weightsmith._planning.planner import answers, loading
from weightsmith._planning.planner.loading import Began

_KEYS = frozenset({"modules", "tensors", "names", "tied", "redirected", "refused", "rows", "peft"})


def describe(model: Checkpoint, began: Began = lambda _process: None) -> dict[str, Any]:
    """The script's answer about a checkpoint, or {"unknown": why}. Cost: 2 to 10 seconds, unless it was asked before."""
    if model.config is None:
        return {"unknown": "it has no config.json"}
    if not loading.installed():
        return {"unknown": "transformers is not installed"}
    question = json.dumps(["describe", model.config, list(model.specs)])
    key = answers.key_of(question, loading.SCRIPT, (*loading.PACKAGES, *(["peft"] if find_spec("peft") else [])))
    answer = answers.find(key, _sound)
    if answer is None:
        answer = loading.ask_script(question, began)
        answers.keep(key, answer, _sound)
    return answer if _sound(answer) else {"unknown": str(answer.get("unknown") or answer.get("failed") or "no answer")}


def built_names(model: Checkpoint) -> dict[str, str]:
    """Tensor of a checkpoint → tensor of the model that transformers builds; {} if that is not known."""
    return {name: key for name, (key, _) in describe(model).get("names", {}).items()}


def _sound(answer: Mapping[str, Any]) -> bool:
    return set(answer) == _KEYS and all(isinstance(answer[key], dict) for key in ("modules", "tensors", "names"))
