"""What transformers is asked about models of unknown origin: nothing of theirs runs, and the answer comes in bounded time."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mini import write_checkpoint
from tests.zoo import SIZES
from weightsmith import open_checkpoint
from weightsmith._planning.planner import loading, transformers_script

# Here they are looked for and not imported, which takes seconds: a process of its own imports them.
pytestmark = pytest.mark.skipif(not all(map(find_spec, ("peft", "transformers"))), reason="requires peft and transformers")

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
NAMES = ["model.norm.weight", "lm_head.weight", "a\nb", "\u202e", "x" * 10000]


def ask(config: Any, names: Any = NAMES) -> dict[str, Any]:
    return loading.ask_script(json.dumps(["describe", config, names]), lambda _process: None)


@pytest.mark.slow
def test_code_of_a_model_does_not_run(tmp_path: Path) -> None:
    for name in ("configuration_evil", "modeling_evil"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    code = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    config = {**LLAMA, "auto_map": code, "_name_or_path": str(tmp_path), "trust_remote_code": True}
    inner = {"model_type": "llava", "text_config": {**config}, "vision_config": {"model_type": "evil", "auto_map": code}}

    assert set(transformers_script.describe(config, NAMES)["names"]) == {"model.norm.weight", "lm_head.weight"}
    assert set(transformers_script.describe(inner, NAMES)) == {"unknown"}
    assert set(transformers_script.describe({**config, "model_type": "evil"}, NAMES)) == {"unknown"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "evil"},
        {"architectures": ["os"]},
        {"architectures": ["Trainer"]},
        {"hidden_size": 1 << 62},
        {"hidden_size": "32"},
        {"num_attention_heads": 0},
        {"vocab_size": -1},
        {"rope_parameters": {"rope_type": "yarn", "factor": "x"}},
    ],
)
def test_values_that_cannot_be_are_no_answer(keys: dict[str, Any]) -> None:
    description = transformers_script.describe({**LLAMA, **keys}, NAMES)
    assert set(description) == {"unknown"}
    assert len(description["unknown"]) <= 500


@pytest.mark.slow
@pytest.mark.sweep
def test_a_model_of_any_size_takes_bounded_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process is ended, and the checkpoint is taken for one that transformers does not know."""
    monkeypatch.setattr(loading, "TIMEOUT_SECONDS", 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "installed", lambda: True)
    write_checkpoint(tmp_path / "model", {"norm": np.ones(2, np.float32)}, {**LLAMA, "num_hidden_layers": 1 << 40})
    with open_checkpoint(tmp_path / "model") as model:
        description = loading.describe(model)
    assert set(description) == {"unknown"}
