"""Runs with a GPU, and what several threads ask of one. `make test-gpu` runs all other tests on one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.cli_help import run_process
from tests.mini import write_checkpoint
from weightsmith._base import torch_use

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-gpu")


def test_linear_algebra_is_loaded_once_for_each_gpu_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    running: list[str] = []

    def inverse(device: str) -> None:
        running.append(device)
        assert len(running) == 1, "two threads at the same time"
        time.sleep(0.01)
        loaded.append(device)
        running.clear()

    monkeypatch.setattr(torch_use, "_loaded", set())
    monkeypatch.setattr(torch, "ones", lambda *_shape, device: device)
    monkeypatch.setattr(torch.linalg, "inv", inverse)
    with ThreadPoolExecutor(8) as threads:
        [*threads.map(torch_use.load_linear_algebra, ["cuda", "cuda:1", "cpu", "cpu:0"] * 50)]
    assert sorted(loaded) == ["cuda", "cuda:1"]


@gpu
@pytest.mark.slow
def test_threads_that_decompose_on_a_gpu_give_the_bytes_of_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = {f"model.layers.{i}.mlp.up_proj.weight": rng.normal(size=(96, 64)).astype(np.float32) for i in range(32)}
    write_checkpoint(tmp_path / "base", base)
    for name in "ab":
        write_checkpoint(tmp_path / name, {key: w + rng.normal(0, 0.01, w.shape).astype(np.float32) for key, w in base.items()})
    (tmp_path / "r.yml").write_text("merge_method: tsv_m\nbase_model: base\nmodels: [{model: a}, {model: b}]\n")

    def merged(name: str, *options: Any) -> dict[str, Any]:
        """In a new process, which has not loaded torch's linear algebra."""
        ran = run_process("merge", "r.yml", name, *options, fresh=True, cwd=tmp_path)
        assert ran.code == 0, ran.err
        return load_file(tmp_path / name / "model.safetensors")

    one, eight = (merged(f"{n}", "--device", "cuda", "--threads", n) for n in (1, 8))
    cpu = merged("cpu")
    for key, weight in one.items():
        assert weight.tobytes() == eight[key].tobytes()
        np.testing.assert_allclose(weight, cpu[key], rtol=0, atol=1e-5)
