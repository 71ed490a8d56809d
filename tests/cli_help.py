"""Running the command line in tests: in this process where it can be, as a process of its own where it must be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.mini import write_checkpoint


@dataclass
class Ran:
    """What a run left: exit code and the two streams."""

    code: int
    out: str
    err: str


class Cli:
    """`cli("merge", recipe, out)` runs `weightsmith merge …` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *args: object) -> Ran:
        from weightsmith._app.cli import main

        self.monkeypatch.setattr(sys, "argv", ["weightsmith", *map(str, args)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self.capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)


def environment(**options: str) -> dict[str, str]:
    """The environment of a process that finds the package under test, and no colour or debug settings."""
    import weightsmith

    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "WEIGHTSMITH_DEBUG", "PYTHONUNBUFFERED")}
    return {"WEIGHTSMITH_CONFIG": ""} | env | {"PYTHONPATH": str(Path(weightsmith.__file__).parents[1])} | options


def run_process(*args: object, code: str = "", fresh: bool = False, **options: Any) -> Ran:
    """`weightsmith …` in a copy of this process, or `python -c code …`. fresh: in a new interpreter, if its start matters."""
    if not (code or fresh) and options.keys() <= {"env", "cwd"}:
        from tests.fork_help import forked_cli

        return forked_cli(*args, env=environment(**options.get("env", {})), cwd=options.get("cwd"))
    start = ["-c", code] if code else ["-m", "weightsmith"]
    env = environment(**options.pop("env", {}))
    done = subprocess.run([sys.executable, *start, *map(str, args)], capture_output=True, text=True, env=env, **options)
    return Ran(done.returncode, done.stdout, done.stderr)


CONFIG = {"model_type": "llama", "architectures": ["X"], "num_hidden_layers": 2, "vocab_size": 8, "dtype": "float32"}


def make_models(root: Path, names: tuple[str, ...] = ("a", "b"), layers: int = 2) -> None:
    """Small float32 models with a tokenizer each, in folders of these names."""
    for seed, name in enumerate(names):
        rng = np.random.default_rng(seed)
        tensors = {"model.embed_tokens.weight": rng.standard_normal((8, 4), np.float32)}
        for i in range(layers):
            for part in ("self_attn.q_proj", "mlp.up_proj"):
                tensors[f"model.layers.{i}.{part}.weight"] = rng.standard_normal((4, 4), np.float32)
        tensors["model.norm.weight"] = rng.standard_normal(4, np.float32)
        write_checkpoint(root / name, tensors, CONFIG | {"num_hidden_layers": layers})
        (root / name / "tokenizer.json").write_text(f'{{"of": "{name}"}}')


LINEAR = """merge_method: linear
models:
  - model: a
    parameters: {weight: 0.25}
  - model: b
    parameters:
      weight: 0.75
"""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line, in this process."""
    for name in ("NO_COLOR", "WEIGHTSMITH_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WEIGHTSMITH_CONFIG", os.environ.get("WEIGHTSMITH_CONFIG", ""))  # not this user's settings
    return Cli(monkeypatch, capsys)


def make_adapter(folder: Path) -> Path:
    """A tiny LoRA in PEFT's format."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {f"{name}A.weight": np.ones((2, 8), np.float32), f"{name}B.weight": np.ones((8, 2), np.float32)}
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the models `a` and `b` and the recipe `linear.yml`."""
    make_models(tmp_path)
    (tmp_path / "linear.yml").write_text(LINEAR)
    monkeypatch.chdir(tmp_path)
    return tmp_path


__all__ = ["CONFIG", "LINEAR", "Cli", "Ran", "cli", "environment", "make_adapter", "make_models", "run_process", "work"]


_KILLED = """
import os, sys, weightsmith
def stop(progress):
    if progress.tensors >= int(sys.argv[3]):
        os.kill(os.getpid(), 9)
weightsmith.moe(sys.argv[1], sys.argv[2], progress=stop, threads=1, check_loading=False)
"""


def check_killed_and_resumed(recipe: Mapping[str, Any], folder: Path, *, after: int) -> None:
    """A mixture that is killed when `after` tensors are finished resumes with them, and has the bytes of an undisturbed one."""
    import weightsmith
    from tests.fork_help import forked_code

    file, out, fresh = folder / "moe.yml", folder / "out", folder / "fresh"
    file.write_text(json.dumps(recipe) + "\n")
    killed = forked_code(_KILLED, file, out, after)
    assert killed.code == -signal.SIGKILL, killed.err
    assert not out.exists()
    assert weightsmith.moe(file, out).resumed >= after
    weightsmith.moe(file, fresh)
    assert (out / "model.safetensors").read_bytes() == (fresh / "model.safetensors").read_bytes()
